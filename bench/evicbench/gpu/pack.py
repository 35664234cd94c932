"""Pack a folder that a bare GPU machine can run everything here from: SGLang, our source, kernels; and name what runs.

Runs where pip reaches PyPI; downloads about 660 MB once. The folder holds ``site.tar.xz`` (Python packages),
``source.tar.xz`` (this repository as it is, without what only people read), ``boot.sh``, ``run.sh``, ``manifest.json``
and, with ``--compiled``, ``compiled.tar.xz`` (kernels that need not be compiled there).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from evicbench.gpu.wheels import WHEELS, fetch, unpack, write_stubs
from evicbench.paths import ROOT

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
DEFAULT_LIMIT_MIB = 64.0
SOURCE = ("python", "kernels", "patches", "bench", "tests/kernels", "pyproject.toml", "LICENSE")
NOT_SOURCE = ("bench/results/", "bench/out/")
ARCHIVES = ("site.tar.xz", "source.tar.xz", "compiled.tar.xz")
_MTIME = 1_700_000_000  # equal inputs make equal archives


class PackError(RuntimeError):
    """The folder cannot be packed, or is too large; one sentence."""


def contents(folder: Path) -> dict[str, int]:
    """Bytes of each file at the top of the folder, the largest first."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def check_limit(sizes: Mapping[str, int], limit_mib: float) -> None:
    """Raise PackError when the files exceed the limit."""
    total = sum(sizes.values())
    if total > limit_mib * MIB:
        raise PackError(
            f"{total / MIB:.1f} MiB are over the limit of {limit_mib:g} MiB: raise --limit-mib, or leave out --compiled"
        )


def tracked_files(root: Path = ROOT) -> list[str]:
    """The files of ``SOURCE`` that belong to the repository, new ones that git does not ignore included."""
    listed = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", *SOURCE]
    done = subprocess.run(listed, capture_output=True, check=False)
    if done.returncode:
        raise PackError(f"{root} must be a clone: git ls-files ended with {done.returncode}")
    names = sorted(set(done.stdout.decode().split("\0")) - {""})
    return [name for name in names if not name.startswith(NOT_SOURCE) and os.path.lexists(root / name)]


def commit_of(root: Path = ROOT) -> str:
    """The commit, with ``+`` where the tree has changes but for results; ``unknown`` where git cannot say."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:  # no git here
            return ""
        return done.stdout.strip()

    left_out = [f":(exclude){folder}" for folder in NOT_SOURCE]
    is_changed = git("status", "--porcelain", "--", ".", *left_out) != ""
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+" if is_changed else "")


def running_commit(root: Path, carry: str | os.PathLike[str] | None) -> str:
    """The commit of the tree at ``root``: git's where there is a ``.git``, else that of the manifest in the packed
    folder ``carry``, with ``+`` where a file of the tree differs from the packed one; else ``unknown``."""
    if (root / ".git").exists():
        found = commit_of(root)
        if not found.startswith("unknown"):
            return found
    folder = None if carry is None else Path(carry)
    if folder is None or not (folder / "manifest.json").exists() or not (folder / "source.tar.xz").exists():
        return "unknown"
    packed = str(json.loads((folder / "manifest.json").read_text())["commit"])
    is_marked = packed.endswith("+")  # the tree had changes when it was packed
    return packed + ("+" if not is_marked and differing(root, folder / "source.tar.xz") else "")


def differing(root: Path, archive: Path) -> list[str]:
    """Files of ``root`` that are absent or not as in the archive of the source, and modules that it does not hold."""
    found, packed = [], set()
    with tarfile.open(archive, "r:xz") as tar:
        for member in tar:
            packed.add(member.name)
            here = root / member.name
            if member.issym():
                is_same = here.is_symlink() and str(here.readlink()) == member.linkname
            else:
                content = tar.extractfile(member)
                is_same = content is not None and here.is_file() and here.read_bytes() == content.read()
            found += [] if is_same else [member.name]
    return found + sorted(_modules(root) - packed)


def _modules(root: Path) -> set[str]:
    """Python files where the source is; links to folders are not followed."""
    names = {
        str(Path(folder, file).relative_to(root))
        for top in SOURCE
        for folder, _, files in os.walk(root / top)
        for file in files
        if file.endswith(".py")
    }
    return {name for name in names if not name.startswith(NOT_SOURCE)}


def digest_of(folder: Path) -> str:
    """SHA-256 of the archives of a packed folder; ``boot.sh`` names what it unpacks by it."""
    digest = hashlib.sha256()
    for name in ARCHIVES:
        if (folder / name).exists():
            digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.hexdigest()


def write_archive(archive: Path, root: Path, names: Iterable[str]) -> None:
    """A tar.xz of these files of ``root``; links stay links, owners and times are left out."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = _MTIME
        return member

    with (
        lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for name in names:
            tar.add(root / name, name, recursive=False, filter=plain)


def write_plugin(site: Path, root: Path = ROOT) -> None:
    """Write what pip would leave of our package: its name and entry points, so that SGLang finds the plugin."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = dict(project["entry-points"]) | {"console_scripts": project["scripts"]}
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines))


def pack_site(archive: Path, cache: Path, stage: Path) -> None:
    left_out = sum(unpack(wheel, stage) for wheel in fetch(cache))
    write_stubs(stage)
    write_plugin(stage)
    files = [file.relative_to(stage) for file in stage.rglob("*") if file.is_file()]
    files.sort(key=lambda name: (name.suffix, name.name == "RECORD", str(name)))  # like beside like: xz finds more
    size = sum((stage / name).stat().st_size for name in files)
    print(f"    site: {len(files)} files, {size / MIB:.0f} MiB; {left_out} files left out", flush=True)
    write_archive(archive, stage, map(str, files))


def pack_compiled(archive: Path, compiled: Path, stage: Path) -> None:
    """``compiled`` as ``precompile.py`` leaves it: ``flashinfer/``, ``tvm/``, ``triton/``, each optional."""
    libraries = {file.parent.name: ("aot", file) for file in (compiled / "flashinfer").rglob("cached_ops/*/*.so")}
    libraries |= {file.parent.name: ("tvm", file) for file in (compiled / "tvm").glob("*/*.so")}
    for name, (kind, file) in libraries.items():
        target = stage / kind / name / file.name
        target.parent.mkdir(parents=True)
        subprocess.run(["strip", "-s", "-o", target, file], check=True)
    if (compiled / "triton").is_dir():
        shutil.copytree(compiled / "triton", stage / "triton")
    files = sorted(str(file.relative_to(stage)) for file in stage.rglob("*") if file.is_file())
    if not files:
        raise PackError(f"{compiled} holds no compiled kernel: expected flashinfer/, tvm/ or triton/ in it")
    print(f"    compiled: {len(libraries)} modules", flush=True)
    write_archive(archive, stage, files)


def pack(options: argparse.Namespace) -> dict[str, int]:
    out: Path = options.out
    if out.exists() and any(out.iterdir()) and not (out / "manifest.json").exists():
        raise PackError(f"{out} holds something else: expected an empty folder or one packed before")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="evicpress-pack-") as made:
        stage = Path(made)
        pack_site(out / "site.tar.xz", options.cache, stage / "site")
        if options.compiled is not None:
            pack_compiled(out / "compiled.tar.xz", options.compiled, stage / "compiled")
    write_archive(out / "source.tar.xz", ROOT, tracked_files())
    for script in ("boot.sh", "run.sh"):
        shutil.copy2(HERE / script, out / script)
    manifest = {
        "commit": commit_of(),
        "digest": digest_of(out),
        "packed": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "wheels": list(WHEELS),
        "compiled": options.compiled is not None,
        "sizes": contents(out),
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return contents(out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".carry", help="folder to pack (default: .carry)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "evicpress-wheels",
        help="folder that keeps downloaded wheels (default: ~/.cache/evicpress-wheels)",
    )
    parser.add_argument("--compiled", type=Path, help="folder of compiled kernels, from precompile.py (default: none)")
    parser.add_argument("--limit-mib", type=float, default=DEFAULT_LIMIT_MIB, help="size allowed (default: 64)")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    try:
        sizes = pack(options)
        print(f"{options.out}, {time.monotonic() - begin:.0f} s:")
        for name, size in sizes.items():
            print(f"    {name:18} {size / MIB:8.2f} MiB")
        check_limit(sizes, options.limit_mib)
    except (PackError, RuntimeError, OSError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
