"""``--json``: one document on standard output and nothing else, whatever is in it."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_evicpress.cli.main import main
from sglang_evicpress.cli.operator import doctor
from sglang_evicpress.cli.operator.finding import Finding
from sglang_evicpress.cli.operator.server import Server
from sglang_evicpress.cli.output import print_json_line, print_result

NODE = {"id": 1, "parent_id": None, "num_tokens": 8, "num_slots": 8, "tier": "gpu", "form": "exact", "lock_ref": 0}
ANSWERS = {
    "tree?": {"nodes": [{**NODE, "lineage": "exact", "num_hits": 1, "weight": 0.5}], "next": None},
    "explain": {
        "node_id": 1,
        **{"num_tokens": 8, "depth_tokens": 0, "weight": 0.5, "alpha": 1.0, "next": None, "why": "so", "options": []},
    },
    "journal": {"num_decisions": 0, "entries": []},
    "stats": {"policy": "evicpress"},
    "tiers": {"tiers": {}},
}


@dataclass(frozen=True)
class Found:
    path: Path
    share: float


def test_what_json_does_not_have_is_written_as_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"one": Found(Path("a/b"), float("inf")), 2: (float("nan"), "\udcff é")}
    print_result(argparse.Namespace(json=True), found, ["not shown"])
    text = capsys.readouterr().out
    assert text.isascii()
    assert json.loads(text) == {"one": {"path": "a/b", "share": None}, "2": [None, "\udcff é"]}
    print_result(argparse.Namespace(json=False), found, ["shown", "too"])
    print_json_line(found)
    assert capsys.readouterr().out.splitlines()[:2] == ["shown", "too"]


def document(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> Any:
    assert main([*words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_what_a_server_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def get(_server: Server, path: str) -> dict[str, Any]:
        return next(answer for begin, answer in ANSWERS.items() if path.startswith(begin))

    monkeypatch.setattr(Server, "get", get)
    assert [node["id"] for node in document(["tree"], capsys)] == [1]
    assert document(["explain", "1"], capsys)["why"] == "so"
    assert document(["top", "--once"], capsys)["stats"] == {"policy": "evicpress"}


def test_a_replay(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(["replay", "synthetic:rag", "--limit", "50", "--gpu", "1%", "--policy", "lru"], capsys)
    assert [run["policy"] for run in found["runs"]] == ["lru"] and found["settings"]["num_requests"] == 50


def test_a_folder_that_is_clean_and_one_that_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert document(["fsck", str(tmp_path)], capsys)["folders"] == [str(tmp_path)]
    (tmp_path / "segment-000001.kv").write_bytes(b"k" * 8192)
    assert document(["fsck", str(tmp_path)], capsys, status=1)["orphan_bytes"] == 8192


def test_budgets_at_another_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "budgets.json"
    content = {"format": "evicpress-layer-budgets", "version": 1, "num_layers": 2, "shares": [1.5, 0.5]}
    path.write_text(json.dumps(content | {"target": 64, "note": {}}))
    assert document(["search", "expand", str(path), "--target", "10"], capsys) == {"target": 10, "budgets": [15, 5]}


def test_findings_of_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "hook_points", lambda: [Finding("hook points", "FAILED", "one is gone", "install")])
    monkeypatch.setattr(doctor, "plugin", lambda: ())
    *_, hook_points, memory = document(["doctor"], capsys, status=1)
    assert hook_points == {"what": "hook points", "state": "FAILED", "found": "one is gone", "fix": "install"}
    assert memory["what"] == "memory" and memory["state"] == "ok"
