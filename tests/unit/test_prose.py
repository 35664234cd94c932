"""Prose of docstrings and documents, as far as a program can tell: openings, and citations that a reader can follow."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("python", "patches", "kernels", "bench", "tests")
OPENINGS = ("What", "How", "Whether", "Which", "Where", "Who", "Of", "As", "Those")
MAX_SHARE = 0.02
"""Of the docstrings of functions and classes; those of modules have none."""

FOREIGN = ("DESIGN", "SEAM", "HOUSE", "REVIEW", "STYLE", "the guide", "(guide")
"""Documents that are not in the repository."""


@dataclass(frozen=True, slots=True)
class Docstring:
    where: str
    is_module: bool
    text: str

    @property
    def opens_badly(self) -> bool:
        return self.text.partition(" ")[0].strip(".,:;") in OPENINGS


def sources() -> list[Path]:
    found = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).glob("**/*.py")}
    return sorted(path for path in found if path.is_relative_to(ROOT) and "out" not in path.relative_to(ROOT).parts)


def documents() -> list[Path]:
    """Every page but the published results, which quote what was printed at their commit."""
    folders = (ROOT, ROOT / "docs", *(ROOT / folder for folder in FOLDERS))
    found = {*ROOT.glob("*.md"), *(path for folder in folders[1:] for path in folder.glob("**/*.md"))}
    return sorted(path for path in found if not {"results", "out"} & {*path.relative_to(ROOT).parts})


def docstrings(source: str, name: str) -> Iterator[Docstring]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                is_module = isinstance(node, ast.Module)
                yield Docstring(name if is_module else f"{name}:{node.lineno}", is_module, text)


@pytest.fixture(scope="module")
def found() -> list[Docstring]:
    return [
        docstring
        for path in sources()
        for docstring in docstrings(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]


def test_modules_open_with_a_noun_or_a_verb(found: list[Docstring]) -> None:
    assert sum(each.is_module for each in found) > 300
    assert [f"{each.where}: {each.text}" for each in found if each.is_module and each.opens_badly] == []


def test_functions_and_classes_open_with_a_noun_or_a_verb(found: list[Docstring]) -> None:
    others = [each for each in found if not each.is_module]
    bad = [f"{each.where}: {each.text.splitlines()[0]}" for each in others if each.opens_badly]
    assert len(others) > 2000
    assert len(bad) < MAX_SHARE * len(others), bad


@functools.cache
def names() -> frozenset[str]:
    """Names of the documents of the repository; environments beside it are not searched."""
    tops = (path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    return frozenset(
        path.name for found in (ROOT.glob("*.md"), *(top.glob("**/*.md") for top in tops)) for path in found
    )


def citations(text: str) -> list[str]:
    """Lines that cite a document which is not in the repository."""
    return [
        line
        for line in text.splitlines()
        if any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", line) for word in FOREIGN)
        or any(name not in names() for name in re.findall(r"(?<![\w.-])[A-Z]{4,}\.md", line))
    ]


def test_only_documents_of_the_repository_are_cited() -> None:
    paths = [path for path in (*sources(), *documents()) if path != Path(__file__).resolve()]
    assert len(paths) > 400
    known = {"PHASE.md", "NAME.md"}  # stand for file names
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in paths
        for line in citations(path.read_text(encoding="utf-8"))
        if not any(name in line for name in known)
    }
    assert sorted(found) == []


def test_bad_prose_is_found() -> None:
    source = '"""What it is."""\ndef f():\n    """Of a node."""\nclass C:\n    """Whatever comes."""\n'
    assert [each.opens_badly for each in docstrings(source, "x")] == [True, True, False]
    text = "as DESIGN section 4 says\nREDESIGN\nsee NOWHERE.md\nsee README.md\nthe guided tour\nthe guide says"
    assert citations(text) == ["as DESIGN section 4 says", "see NOWHERE.md", "the guide says"]
