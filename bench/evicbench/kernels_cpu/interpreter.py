"""Every kernel in Triton's interpreter over the shared case matrix, and the three parts of every kernel file."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType

from evicbench.paths import ROOT
from evicbench.pytest_runs import run_tests, together, verdict
from evicbench.report import Line

NOT_KERNELS = ("aot", "pool")  # the compiler's check, and what all of them share


def kernel_files() -> list[str]:
    return sorted(path.stem for path in (ROOT / "kernels").glob("*.py") if path.stem not in NOT_KERNELS)


def parts(module: ModuleType) -> tuple[list[str], list[str]]:
    """Device kernels of a file, and its launchers: the functions beside which there is one that ends in _torch."""
    names = vars(module)
    kernels = [name for name in names if name.startswith("_") and name.endswith("_kernel")]
    references = [name.removesuffix("_torch") for name in names if name.endswith("_torch") and not name.startswith("_")]
    return kernels, [name for name in references if inspect.isfunction(names.get(name))]


def structure() -> Line:
    found, incomplete, untested = [], [], []
    for name in kernel_files():
        module = import_module(f"sglang_evicpress.kernels.{name}")
        kernels, launchers = parts(module)
        here = [each for each in launchers if getattr(module, each).__module__ == module.__name__]
        text = (ROOT / "tests/kernels" / f"test_{name}.py").read_text()
        found += here
        incomplete += [] if kernels and here else [name]
        untested += [each for each in here if each not in text]
    return Line(
        f"kernel files: {', '.join(kernel_files())}",
        "each has a device kernel, its launcher and a torch reference; tests name every launcher",
        f"{len(found)} launchers with references; incomplete: {incomplete or 'none'}; not tested: {untested or 'none'}",
        bool(found) and not incomplete and not untested,
    )


def measure(names: Sequence[str] = ()) -> Iterator[Line]:
    """Lines of these files of kernels/, or of all."""
    names = names or ("pool", *kernel_files())
    yield structure()
    results = run_tests(*(f"tests/kernels/test_{name}.py" for name in names), interpreted=True)
    for name in names:
        yield verdict(
            f"interpreter: {name} against its reference",
            "every case passes, none is skipped",
            together(results, f"tests/kernels/test_{name}.py"),
        )
