"""Odd input of a replay: it still ends, says what is wrong, and breaks nothing."""

from __future__ import annotations

import io
import json
import math
import os
import stat
import sys
from pathlib import Path

import pytest

from sglang_evicpress.cli.main import main
from sglang_evicpress.cli.replay.units import plain, three_digits
from sglang_evicpress.files import WholeFile

PROMPTS = ((0, [0, 1, 2, 3]), (2000, [0, 1, 2, 3]), (3000, [7, 7, 7]), (9000, [0, 1, 8]), (90_000, [0, 1, 2, 3]))


def a_trace(path: Path) -> str:
    lines = [
        {"timestamp": at_ms, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for at_ms, ids in PROMPTS
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["replay", a_trace(tmp_path / "t.jsonl"), "--gpu", "50%", "--jsonl", str(pipe)]) == 2
    assert "expected the path of a file" in capsys.readouterr().err
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    with WholeFile(str(link)) as file:
        file.write({"a": 1})
        file.commit()
    assert link.is_symlink() and target.read_text() == '{"a":1}\n'


@pytest.mark.parametrize("name", ["a" * 300, "circle/x"])
def test_a_path_that_cannot_be_is_bad_input(name: str, tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(ValueError, match="cannot be written|does not exist"):
        WholeFile(str(tmp_path / name))


def test_a_path_that_is_no_utf8_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = a_trace(tmp_path / os.fsdecode(b"n\xff.jsonl")), tmp_path / "out.jsonl"
    assert main(["replay", trace, "--gpu", "50%", "--policy", "lru", "--jsonl", str(out)]) == 0
    assert json.loads(out.read_text())["settings"]["trace"] == "n\\udcff.jsonl"
    assert "n\\udcff.jsonl" in capsys.readouterr().out


def test_a_terminal_that_cannot_show_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["replay", a_trace(tmp_path / "né.jsonl"), "--gpu", "50%", "--policy", "lru"]) == 0
    assert b"n\\xe9.jsonl" in written.getvalue()


def test_no_name_reaches_the_terminal_as_a_command() -> None:
    assert plain("a\x1b[31m\nb\udcffé") == "a\\x1b[31m\\nb\\udcffé"


@pytest.mark.parametrize(
    ("flag", "text"), [("noise", "1000"), ("noise", "inf"), ("alpha", "1e308"), ("alpha", "1,2e9")]
)
def test_what_leaves_the_range_of_a_float_is_bad_input(
    flag: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", a_trace(tmp_path / "t.jsonl"), "--gpu", "50%", f"--{flag}", text]) == 2
    assert f"--{flag}: " in capsys.readouterr().err


def test_endless_seconds_are_printed() -> None:
    assert three_digits(math.inf) == "inf"
