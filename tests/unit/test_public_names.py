"""The names others build on, and the words we do not use: a rename here is a decision, not an accident."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "sglang_evicpress"

# Words with two meanings in the field, or none. `compression_ratio` is 0.25 for 25 % removed in one project,
# 4.0 in another: here it is always kept_fraction.
BANNED = re.compile("compression_ratio|spill|offload|manager|helper|utils|handler|^new_|^process_|^handle_|_?v2$")

PUBLIC = {
    "sglang_evicpress": set(),
    "sglang_evicpress.core": {
        "DROP",
        "EXACT",
        "CODECS",
        "CodecTraits",
        "PRESSES",
        "Decision",
        "Form",
        "NodeStats",
        "Option",
        "PressTraits",
        "Tier",
        "LowerCopy",
    },
    "sglang_evicpress.plugin": {"load"},
}


def files() -> list[Path]:
    roots = (PACKAGE, PACKAGE / "kernels", PACKAGE / "patches")
    return sorted({path for root in roots for path in root.glob("**/*.py")})


def own_names(tree: ast.Module) -> set[str]:
    """Names a module defines at its top level and does not mark as private."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if not name.startswith("_")}


def defined_names(tree: ast.AST, *, with_arguments: bool) -> Iterator[tuple[int, str]]:
    """Line and name of every class and function, and of their arguments."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name, lineno=line) | ast.ClassDef(name=name, lineno=line):
                yield line, name
            case ast.arg(arg=name, lineno=line) if with_arguments:
                yield line, name


@pytest.mark.parametrize("module", PUBLIC)
def test_module_defines_exactly_its_public_names(module: str) -> None:
    source = importlib.import_module(module).__file__
    assert source is not None
    assert own_names(ast.parse(Path(source).read_text(encoding="utf-8"))) == PUBLIC[module]


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_module_uses_the_words_of_the_glossary(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # What patches/ is handed by SGLang it may call what SGLang calls it.
    names = defined_names(tree, with_arguments="patches" not in path.relative_to(PACKAGE).parts)
    assert [f"line {line}: {name}" for line, name in names if BANNED.search(name.lower())] == []
    assert not BANNED.search(path.stem)


def test_every_press_a_form_can_name_has_a_module_of_its_name() -> None:
    from sglang_evicpress.core import PRESSES

    modules = {path.stem for path in (PACKAGE / "press").glob("*.py")} - {"__init__", "base", "layers"}
    assert modules == set(PRESSES)
