"""Pack a folder that a bare GPU machine can run everything here from: SGLang, our source, model shapes, kernels.

Runs where pip reaches PyPI; downloads about 660 MB once. The folder holds ``site.tar.xz`` (Python packages),
``source.tar.xz`` (this repository as it is, without what only people read), ``models/``, ``boot.sh``, ``run.sh``,
``manifest.json`` and, with ``--compiled``, ``compiled.tar.xz`` (kernels that need not be compiled there).
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evicbench.gpu.models import MODELS, write_model
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


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the table of contents."""

    name: str
    num_bytes: int
    num_files: int
    what: str


def contents(folder: Path) -> list[Entry]:
    """Content of the folder: one entry per file or folder at its top, the largest first."""
    notes = {
        "site.tar.xz": "SGLang and what it needs",
        "source.tar.xz": "this repository: package, kernels, patches, bench, testbed model",
        "compiled.tar.xz": "compiled kernels of FlashInfer, SGLang and Triton",
        "models": "config.json and tokenizer of each model shape, no weights",
        "manifest.json": "commit, digest, versions, sizes",
    }
    entries = []
    for path in sorted(folder.iterdir()):
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        entries.append(Entry(path.name, size, len(files), notes.get(path.name, "")))
    return sorted(entries, key=lambda entry: -entry.num_bytes)


def table(entries: Sequence[Entry]) -> str:
    total = sum(entry.num_bytes for entry in entries)
    rows = [f"    {entry.name:18} {entry.num_bytes / MIB:8.2f} MiB  {entry.what}" for entry in entries]
    return "\n".join([*rows, f"    {'total':18} {total / MIB:8.2f} MiB"])


def check_limit(entries: Sequence[Entry], limit_mib: float, beside_bytes: int = 0) -> None:
    """Raise PackError when the entries, and ``beside_bytes`` that travel with them, exceed the limit."""
    total = sum(entry.num_bytes for entry in entries) + beside_bytes
    if total > limit_mib * MIB:
        raise PackError(
            f"{total / MIB:.1f} MiB are over the limit of {limit_mib:g} MiB: raise --limit-mib, or leave out "
            "the CUDA sources with --no-compile-sources, or --compiled"
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


def pack_site(archive: Path, cache: Path, stage: Path, *, compile_sources: bool) -> None:
    left_out = 0
    for wheel in fetch(cache):
        left_out += unpack(wheel, stage, compile_sources=compile_sources)
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


def pack(options: argparse.Namespace) -> list[Entry]:
    out: Path = options.out
    if out.exists() and any(out.iterdir()) and not (out / "manifest.json").exists():
        raise PackError(f"{out} holds something else: expected an empty folder or one packed before")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="evicpress-pack-") as made:
        stage = Path(made)
        pack_site(out / "site.tar.xz", options.cache, stage / "site", compile_sources=options.compile_sources)
        if options.compiled is not None:
            pack_compiled(out / "compiled.tar.xz", options.compiled, stage / "compiled")
    write_archive(out / "source.tar.xz", ROOT, tracked_files())
    for model in MODELS:
        write_model(model, out / "models" / model.name)
    for script in ("boot.sh", "run.sh"):
        shutil.copy2(HERE / script, out / script)
    (out / "manifest.json").write_text(
        json.dumps(
            {
                "commit": commit_of(),
                "digest": digest_of(out),
                "packed": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "wheels": list(WHEELS),
                "compile_sources": options.compile_sources,
                "compiled": options.compiled is not None,
                "sizes": {entry.name: entry.num_bytes for entry in contents(out)},
            },
            indent=1,
        )
        + "\n"
    )
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
    parser.add_argument(
        "--no-compile-sources", dest="compile_sources", action="store_false", help="leave FlashInfer's CUDA headers out"
    )
    parser.add_argument("--limit-mib", type=float, default=DEFAULT_LIMIT_MIB, help="size allowed (default: 64)")
    parser.add_argument(
        "--with-checkout", action="store_true", help="count this repository too, where it travels beside the folder"
    )
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    try:
        entries = pack(options)
        print(f"{options.out}, {time.monotonic() - begin:.0f} s:\n{table(entries)}")
        beside = 0
        if options.with_checkout:
            beside = sum((ROOT / name).lstat().st_size for name in _checkout())
            print(f"    {'the checkout':18} {beside / MIB:8.2f} MiB  beside it")
        check_limit(entries, options.limit_mib, beside)
    except (PackError, RuntimeError, OSError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    return 0


def _checkout() -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True)
    return [name for name in done.stdout.decode().split("\0") if name and os.path.lexists(ROOT / name)]


if __name__ == "__main__":
    sys.exit(main())
