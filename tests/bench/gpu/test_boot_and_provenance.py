"""A packed folder on the machine it is unpacked on, as far as no GPU is needed, and the commit that results name."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from evicbench.gpu import pack
from evicbench.gpu.pack import differing, running_commit

FEW = (
    "bench/evicbench/gpu/run.sh",
    "kernels/compact.py",
    "patches/attention/physical_lengths.py",
    "pyproject.toml",
    "python/sglang_evicpress/__init__.py",
    "python/sglang_evicpress/kernels",
    "python/sglang_evicpress/patches",
)
SHOWN = ("EVICPRESS_SOURCE", "PYTHONPATH", "CPATH", "LIBRARY_PATH", "TRITON_CACHE_DIR", "CUDA_HOME", "MAX_JOBS")


@pytest.fixture
def carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder by the real ``pack``: one wheel of two files, few files of this repository."""
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/__init__.py", "one = 1\n")
        archive.writestr("flashinfer/data/__init__.py", "")
    compiled = tmp_path / "compiled-there"
    (compiled / "triton").mkdir(parents=True)
    (compiled / "triton" / "kernel.json").write_text("{}")
    out = tmp_path / "beside" / "carry"
    with monkeypatch.context() as packing:
        packing.setattr(pack, "fetch", lambda cache: [wheel])
        packing.setattr(pack, "tracked_files", lambda: list(FEW))
        packing.setattr(pack, "commit_of", lambda: "abc")
        pack.pack(argparse.Namespace(out=out, cache=tmp_path, compiled=compiled))
    return out


def boot(carry: Path, place: Path, **given: str) -> tuple[dict[str, str], str]:
    """Source boot.sh in a bare environment; the variables it leaves, and what it said. The Python is this one, which
    need not be a GPU machine's: the check of versions and compileall are left out."""
    stub = place.parent / "python-stub"
    skipped = 'if [ "$*" = - ]; then cat >/dev/null; exit 0; fi\nif [ "${2:-}" = compileall ]; then exit 0; fi\n'
    stub.write_text(f'#!/bin/sh\n{skipped}exec {shlex.quote(sys.executable)} "$@"\n')
    stub.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "HOME": str(place.parent)}
    env |= {"EVICPRESS_PYTHON": str(stub), "EVICPRESS_PLACE": str(place), **given}
    shown = "\n".join(f'echo "{name}=${{{name}:-}}"' for name in SHOWN)
    script = f'. "$1/boot.sh" || exit\necho "status=$?"\n. "$1/boot.sh" >/dev/null || exit\n{shown}\n'
    command = ["env", "-i", *(f"{name}={value}" for name, value in env.items())]
    command += ["bash", "-u", "-o", "pipefail", "-c", script, "bash", str(carry)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {}, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "status=0" in lines
    return dict(line.split("=", 1) for line in lines if not line.startswith("boot:")), done.stdout


def unpacked(place: Path) -> list[Path]:
    return sorted(file.parent for file in place.glob("*/ready"))


def test_boot_unpacks_with_nothing_set(carry: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    shown, said = boot(carry, place)
    (folder,) = unpacked(place)
    source = folder / "source"
    assert pack.digest_of(carry).startswith(folder.name)
    assert shown["EVICPRESS_SOURCE"] == str(source) and f"source {source};" in said
    for name, module in (("kernels", "compact.py"), ("patches", "attention/physical_lengths.py")):
        link = source / "python" / "sglang_evicpress" / name
        assert link.is_symlink() and (link / module).read_bytes() == (pack.ROOT / name / module).read_bytes()
    assert (folder / "site" / "some" / "__init__.py").read_text() == "one = 1\n"
    assert shown["PYTHONPATH"] == f"{folder}/site:{source}/python:{source}/bench"
    assert (shown["CPATH"], shown["LIBRARY_PATH"]) == (f"{folder}/links/include", f"{folder}/links")
    assert Path(shown["TRITON_CACHE_DIR"], "kernel.json").exists() and int(shown["MAX_JOBS"]) > 0


def test_boot_keeps_what_is_set_and_unpacks_once(carry: Path, tmp_path: Path) -> None:
    place, cuda = tmp_path / "place", tmp_path / "cuda"
    (cuda / "bin").mkdir(parents=True)
    (cuda / "bin" / "nvcc").write_text("#!/bin/sh\n")
    (cuda / "bin" / "nvcc").chmod(0o755)
    boot(carry, place)
    (folder,) = unpacked(place)
    (folder / "source" / "seen").touch()
    shown, _ = boot(carry, place, CUDA_HOME=str(cuda), CPATH="/c", LIBRARY_PATH="/l", MAX_JOBS="3", PYTHONPATH="/p")
    assert unpacked(place) == [folder] and (folder / "source" / "seen").exists()
    assert (shown["CUDA_HOME"], shown["MAX_JOBS"]) == (str(cuda), "3")
    assert shown["CPATH"] == f"/c:{folder}/links/include" and shown["LIBRARY_PATH"] == f"{folder}/links:/l"


def test_what_was_cut_off_is_unpacked_again(carry: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    boot(carry, place)
    (folder,) = unpacked(place)
    (folder / "ready").unlink()
    (folder / "site" / "left.py").touch()
    (folder / "source" / "pyproject.toml").unlink()
    boot(carry, place)
    assert unpacked(place) == [folder]
    assert (folder / "source" / "pyproject.toml").exists() and not (folder / "site" / "left.py").exists()


def test_another_packing_is_unpacked_beside_the_first(carry: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    boot(carry, place)
    first = unpacked(place)
    pack.write_archive(carry / "source.tar.xz", pack.ROOT, FEW[3:])
    _, said = boot(carry, place)
    assert "not those of its manifest.json" in said and unpacked(place) == first
    manifest = json.loads((carry / "manifest.json").read_text())
    (carry / "manifest.json").write_text(json.dumps(manifest | {"digest": pack.digest_of(carry)}))
    shown, _ = boot(carry, place)
    assert len(unpacked(place)) == 2
    assert not Path(shown["EVICPRESS_SOURCE"], "kernels").exists()


def test_a_checkout_around_the_folder_runs_and_is_what_results_name(carry: Path, tmp_path: Path) -> None:
    checkout = carry.parent
    for name in FEW:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(pack.ROOT / name, checkout / name, follow_symlinks=False)
    shown, _ = boot(carry, tmp_path / "place")
    assert shown["EVICPRESS_SOURCE"] == str(checkout)
    assert running_commit(checkout, carry) == "abc"
    (checkout / "bench" / "results").mkdir()
    (checkout / "bench" / "results" / "made.py").touch()
    assert running_commit(checkout, carry) == "abc"
    (checkout / "kernels" / "compact.py").write_text("other\n")
    assert running_commit(checkout, carry) == "abc+"


@pytest.mark.parametrize("change", ["edited", "removed", "added", "relinked"])
def test_a_tree_that_is_not_as_packed_is_marked(change: str, carry: Path, tmp_path: Path) -> None:
    boot(carry, tmp_path / "place")
    root = unpacked(tmp_path / "place")[0] / "source"
    assert running_commit(root, carry) == "abc" and not differing(root, carry / "source.tar.xz")
    names = {"edited": "pyproject.toml", "removed": "patches/attention/physical_lengths.py", "added": "kernels/more.py"}
    name = names.get(change, "python/sglang_evicpress/kernels")
    if change in ("removed", "relinked"):
        (root / name).unlink()
    if change == "relinked":
        (root / name).symlink_to("../../patches")
    elif change != "removed":
        (root / name).write_text("x\n")
    assert differing(root, carry / "source.tar.xz") == [name]
    assert running_commit(root, carry) == "abc+"
    manifest = json.loads((carry / "manifest.json").read_text())
    (carry / "manifest.json").write_text(json.dumps(manifest | {"commit": "abc+"}))
    assert running_commit(root, carry) == "abc+"


def test_a_clone_names_its_own_commit_and_results_are_no_change(carry: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    (root / "bench" / "results").mkdir(parents=True)
    (root / "file").write_text("x")
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@e", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout[:12]
    assert running_commit(root, carry) == head
    (root / "bench" / "results" / "speed.md").write_text("x")
    assert running_commit(root, carry) == head
    (root / "other").write_text("x")
    assert running_commit(root, carry) == head + "+"


def test_without_git_and_manifest_no_commit_is_named(tmp_path: Path) -> None:
    assert running_commit(tmp_path, None) == running_commit(tmp_path, tmp_path) == "unknown"
