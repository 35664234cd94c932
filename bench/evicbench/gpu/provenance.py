"""Commit that really runs: the checkout's own, or that of a packed folder, marked where files are not as packed."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

from evicbench.gpu.pack import NOT_SOURCE, SOURCE, commit_of


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
