"""Counts read from the source of the product: sizes, bases and members of classes, names without a type."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evicbench.paths import ROOT

UNTYPED = re.compile(r"\bAny\b|\bcast\(|\btype: ignore\b|\bgetattr\([^,()]+, \"\w+\"")


def modules(*folders: str) -> list[Path]:
    """Python files below folders of the repository; links are not entered."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def num_lines(*folders: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules(*folders))


def num_untyped(*folders: str) -> int:
    """`Any`, `cast`, `getattr` with a constant name and `type: ignore`, imports of them left out."""
    lines = (line for path in modules(*folders) for line in path.read_text(encoding="utf-8").splitlines())
    return sum(len(UNTYPED.findall(line)) for line in lines if not line.startswith(("from ", "import ")))


@dataclass(frozen=True, slots=True)
class ClassSize:
    """Members of one class, as its own source has them."""

    name: str
    bases: tuple[str, ...]
    num_methods: int
    num_attributes: int

    @property
    def is_protocol(self) -> bool:
        return any(base.startswith("Protocol") for base in self.bases)


def classes(*folders: str) -> Iterator[ClassSize]:
    for path in modules(*folders):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield _size_of(node)


def _size_of(node: ast.ClassDef) -> ClassSize:
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    written = {
        each.attr
        for method in methods
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return ClassSize(node.name, tuple(map(ast.unparse, node.bases)), len(methods), len(fields | written))
