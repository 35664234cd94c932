"""One word for one thing: no word that was given up in a part of the tree comes back there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("vocabulary.tsv")
TEXT = {".py", ".md", ".toml", ".yaml", ".html"}
NOT_SEARCHED = {TABLE.name, Path(__file__).name}


def rows() -> list[tuple[str, str, str]]:
    """Scope (globs below the root), the word that was given up, the word that is used instead."""
    cells = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:] if line]
    return [(scope, old, new) for scope, old, new in cells]


def files_of(scope: str) -> list[Path]:
    """The text files of a scope; a folder stands for all below it."""
    found: set[Path] = set()
    for glob in scope.split():
        for path in ROOT.glob(glob):
            below = path.rglob("*") if path.is_dir() else [path]
            found |= {one for one in below if one.suffix in TEXT and one.is_file()}
    return sorted(one for one in found if one.name not in NOT_SEARCHED and "results" not in one.parts)


def uses(text: str, word: str) -> list[int]:
    """The lines that use the word by itself: not as part of a longer one, nor of a longer flag."""
    whole = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w]|-\w)")
    return [number for number, line in enumerate(text.splitlines(), 1) if whole.search(line)]


@pytest.mark.parametrize(("scope", "old", "new"), rows())
def test_a_word_that_was_given_up_is_not_used(scope: str, old: str, new: str) -> None:
    files = files_of(scope)
    assert files, f"no file is in the scope {scope!r}"
    found = [
        f"{path.relative_to(ROOT)}:{number}" for path in files for number in uses(path.read_text(encoding="utf-8"), old)
    ]
    assert found == [], f"say {new!r} for {old!r}"


def test_a_word_is_given_up_once_in_a_scope() -> None:
    pairs = [(scope, old) for scope, old, _ in rows()]
    assert len(pairs) == len(set(pairs)) > 100


def test_a_word_is_seen_by_itself_alone() -> None:
    text = "Book\nNotebook\nBookkeeping\na Book.\n--kv-drift 0.3\n--kv-drift-threshold 0.3"
    assert uses(text, "Book") == [1, 4]
    assert uses(text, "--kv-drift") == [5]
