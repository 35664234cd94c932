"""``evicpress plan``: one row for each combination of sizes, and what it does not take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_evicpress.cli.main import main

TRACE = ["synthetic:rag", "--limit", "120"]


def test_every_combination_is_replayed_and_more_memory_is_no_slower(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TRACE, "--gpu", "1%,4%", "--host", "0,10%", "--ssd", "0", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [(each["gpu"], each["host"]) for each in results] == [("1%", "0"), ("1%", "10%"), ("4%", "0"), ("4%", "10%")]
    assert results[3]["ttft"]["mean_s"] < results[0]["ttft"]["mean_s"]
    assert all(each["target"] == 0.97 for each in results)


def test_the_table_has_the_sizes_and_what_they_buy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TRACE, "--gpu", "1%", "--host", "10%", "--ssd", "0", "--quality", "0.9"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["gpu", "host", "ssd"] and row.split()[:3] == ["1%", "10%", "0"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--policy", "lru"], "--policy is not for plan"),
        (["--host", "5%,x"], "--host: 'x': expected a share"),
        (
            ["--gpu", ",".join(f"{size}%" for size in range(1, 30))],
            "combinations of sizes are given",
        ),
        (["--quality", "2"], "quality"),
        (["--quality", "0.9,0.95"], "--quality: 2 targets are given: expected one"),
    ],
)
def test_bad_input_is_one_sentence(given: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TRACE, *given]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_flags_of_replay_may_stand_before_the_trace_and_bad_lines_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    path.write_text("\n".join([json.dumps(line), "{", json.dumps({**line, "timestamp": 1000})]) + "\n")
    sizes = ["--gpu", "50%", "--host", "0", "--ssd", "0"]
    assert main(["plan", "--limit", "5", "--skip-bad", str(path), *sizes]) == 0
    said = capsys.readouterr()
    assert "line 2" in said.err and said.out.splitlines()[1].split()[:3] == ["50%", "0", "0"]
