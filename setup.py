"""Restores the two links of the package before a build: tools that ignore links unpack them as text files."""

from pathlib import Path

from setuptools import setup

for name in ("kernels", "patches"):
    link = Path(__file__).parent / "python" / "sglang_evicpress" / name
    if not link.is_dir():
        link.unlink(missing_ok=True)
        link.symlink_to(Path("../..", name))

setup()
