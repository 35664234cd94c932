"""Files of layer budgets: what was written comes back, and anything else is one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_evicpress.search.budget_file import BudgetFile, read_budget_file, write_budget_file

WRITTEN: dict[str, object] = {
    "format": "evicpress-layer-budgets",
    "version": 1,
    "num_layers": 2,
    "shares": [1.5, 0.5],
    "target": 128,
    "note": {"task": "recall"},
}


def write(folder: Path, content: object) -> str:
    path = folder / "budgets.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "budgets.json")
    file = BudgetFile.of([30, 10, 20], 20, {"seed": 3, "press": "snapkv"})
    write_budget_file(path, file)
    assert read_budget_file(path) == file
    assert file.shares == (1.5, 0.5, 1.0)
    assert file.num_layers == 3


def test_the_documented_example_is_read(tmp_path: Path) -> None:
    assert read_budget_file(write(tmp_path, WRITTEN)) == BudgetFile((1.5, 0.5), 128, {"task": "recall"})


def test_a_file_without_a_note_is_read(tmp_path: Path) -> None:
    content = {key: value for key, value in WRITTEN.items() if key != "note"}
    assert read_budget_file(write(tmp_path, content)) == BudgetFile((1.5, 0.5), 128)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("format", "budgets", "does not have format 'evicpress-layer-budgets'"),
        ("version", 2, "has version 2: expected 1"),
        ("version", True, "has version True: expected 1"),
        ("num_layers", 3, "num_layers is 3: expected 2"),
        ("num_layers", "2", "num_layers is '2': expected 2"),
        ("shares", "1.5 0.5", "shares is '1.5 0.5': expected a list of numbers"),
        ("shares", [1.5, "0.5"], r"shares\[1\] is '0.5': expected a finite number of at least 0"),
        ("shares", [2.5, -0.5], r"shares\[1\] is -0.5: expected a finite number of at least 0"),
        ("shares", [float("nan"), 1.0], r"shares\[0\] is nan: expected a finite number"),
        ("shares", [True, 1.0], r"shares\[0\] is True: expected a finite number"),
        ("shares", [1.5, 1.5], "shares have the mean 1.5: expected 1"),
        ("shares", [10**400, 1.0], r"shares\[0\] is 10+: expected a finite number"),
        ("shares", [1e308, 1e308], r"shares\[0\] is 1e\+308: expected a finite number"),
        ("target", 10**400, "expected a whole number of tokens of at least 1, below 2"),
        ("target", 0, "target is 0: expected a whole number of tokens of at least 1"),
        ("target", 12.5, "target is 12.5: expected a whole number of tokens of at least 1"),
        ("note", [], "note is \\[\\]: expected an object"),
        ("layers", 2, "has the unknown key 'layers': expected format, version,"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, key: str, value: object, says: str) -> None:
    path = write(tmp_path, {**WRITTEN, key: value})
    with pytest.raises(ValueError, match=says) as error:
        read_budget_file(path)
    assert path in str(error.value)


@pytest.mark.parametrize("key", ["num_layers", "shares", "target"])
def test_a_missing_value_is_named(tmp_path: Path, key: str) -> None:
    path = write(tmp_path, {name: value for name, value in WRITTEN.items() if name != key})
    with pytest.raises(ValueError, match=f"has no {key}"):
        read_budget_file(path)


def test_no_shares_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {**WRITTEN, "num_layers": 0, "shares": []})
    with pytest.raises(ValueError, match="shares has 0 numbers: expected one for each of 1 to 1024 layers"):
        read_budget_file(path)


def test_what_is_no_budget_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist: expected a file that `evicpress search` has written"):
        read_budget_file(str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match="does not have format"):
        read_budget_file(write(tmp_path, [1.5, 0.5]))
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"format": ', encoding="utf-8")
    with pytest.raises(ValueError, match="is not JSON"):
        read_budget_file(str(damaged))


def test_budgets_of_nothing_and_a_note_that_is_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"budgets are \(0, 0\): expected one above 0"):
        BudgetFile.of([0, 0], 20)
    path = tmp_path / "budgets.json"
    with pytest.raises(ValueError, match="cannot be written .*: expected JSON"):
        write_budget_file(str(path), BudgetFile((1.0,), 20, {"model": object()}))
    assert not path.exists()
