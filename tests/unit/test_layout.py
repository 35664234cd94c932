"""The two links, the folders that must stay without ``__init__.py``, and imports that do nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "python" / "sglang_evicpress"


@pytest.mark.parametrize("folder", ["kernels", "patches"])
def test_link_is_relative_and_leads_to_the_top_level_folder(folder: str) -> None:
    link = SOURCE / folder
    assert link.is_symlink(), f"{link} is a plain file or folder: clone the repository, do not unzip it"
    assert link.readlink() == Path("..", "..", folder)
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", ["kernels", "patches", "tests"])
def test_folder_is_no_regular_package(folder: str) -> None:
    """A top-level ``kernels`` package would shadow the one SGLang loads its attention kernels with."""
    assert list((ROOT / folder).rglob("__init__.py")) == []


def loaded_by(*modules: str) -> set[str]:
    """Packages beyond the stdlib that importing ``modules`` loads, in a fresh interpreter at the root."""
    # multiprocessing makes `__mp_main__` an alias of `__main__`.
    program = (
        "import sys, importlib; sys.path.insert(0, 'python'); before = set(sys.modules)\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(tops - sys.stdlib_module_names - {'__mp_main__'}))"
    )
    command = [sys.executable, "-c", program, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_and_its_plugin_loads_only_the_stdlib() -> None:
    assert loaded_by("sglang_evicpress", "sglang_evicpress.plugin") == {"sglang_evicpress"}


def test_importing_the_decision_side_loads_only_the_stdlib_and_numpy() -> None:
    costs = ("policy.cost_model", "policy.quality_curves", "policy.reuse", "policy.utility")
    pure = ("core", "policy", *costs)
    assert loaded_by(*(f"sglang_evicpress.{name}" for name in pure)) == {"numpy", "sglang_evicpress"}


def test_the_kernels_package_of_sglang_is_found_from_the_repository_root() -> None:
    program = "import importlib.util as u; print(u.find_spec('kernels').origin)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).name == "__init__.py"
    assert ROOT / "kernels" not in Path(done.stdout.strip()).parents
