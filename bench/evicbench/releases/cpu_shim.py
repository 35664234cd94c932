"""Lets SGLang 0.5.16 and newer be imported where there is no NVIDIA driver, and test servers sooner.

These import two functions of ``sgl_kernel`` on a CPU too, which they never call there, and that package loads
``libcuda.so.1`` when it is imported. Where that fails, every name of the package becomes a function that raises. Only
the repository's own environments have it (``make setup``): run as a program, this file puts itself into the
environment that runs it. Users' servers have a driver.

Packages named by ``EVICPRESS_HIDDEN_PACKAGES`` are as if they were not installed. transformers imports scikit-learn,
which only our profiler's sentence encoder needs, wherever it is: a fifth of what it takes to import SGLang.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

PACKAGE = "sgl_kernel"
MODULE = "evicpress_cpu_shim"
HIDDEN = "EVICPRESS_HIDDEN_PACKAGES"


def _raising(name: str) -> Callable[..., object]:
    def missing(*args: object, **kwargs: object) -> object:
        raise RuntimeError(f"{PACKAGE}.{name} needs the NVIDIA driver, which this machine does not have")

    return missing


class _Loader(importlib.abc.Loader):
    """Loads the package; where it cannot be loaded, its names raise when they are called."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except ImportError:
            for name in [name for name in sys.modules if name.startswith(PACKAGE + ".")]:
                del sys.modules[name]
            module.__path__ = []  # none of its modules can be imported either

            def attribute(name: str) -> Callable[..., object]:
                if name.startswith("__"):
                    raise AttributeError(name)
                return _raising(name)

            module.__dict__["__getattr__"] = attribute


class Finder(importlib.abc.MetaPathFinder):
    """Finds ``sgl_kernel`` where it is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """Called by the environment's ``.pth`` file whenever its Python starts."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    for name in os.environ.get(HIDDEN, "").split():
        sys.modules[name] = None  # type: ignore[assignment]  # "not installed", for whoever asks or imports


def main() -> None:
    """Put this file into the environment that runs it."""
    folder = Path(sysconfig.get_path("purelib"))
    shutil.copyfile(__file__, folder / f"{MODULE}.py")
    (folder / f"{MODULE}.pth").write_text(f"import {MODULE}; {MODULE}.install()\n", encoding="utf-8")


if __name__ == "__main__":
    main()
