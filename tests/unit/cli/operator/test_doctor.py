"""Findings of the doctor: on this machine, and of a server that does or does not do what it should."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sglang_evicpress.cli.operator import doctor
from sglang_evicpress.cli.operator.finding import Finding
from sglang_evicpress.cli.operator.self_test import NUM_TOKENS, self_test


class Fake:
    """A server whose one node moves as it is told; ``breaks`` at a step."""

    def __init__(self, breaks: str = "") -> None:
        self.breaks = breaks
        self.node: dict[str, Any] | None = None
        self.others: list[dict[str, Any]] = []
        self.moved: list[str] = []

    def get(self, path: str) -> dict[str, Any]:
        if path == "stats":
            return {
                "policy": "evicpress",
                "num_nodes": 0,
                "total_slots": 9,
                "forms": ["exact", "keydiff@0.5", "exact+int4"],
            }
        if path == "tiers":
            return {"tiers": {"gpu": {}, "host": {}}}
        if path.startswith("tree"):
            return {"nodes": [*([] if self.node is None else [self.node]), *self.others], "next": None}
        assert self.node is not None
        return self.node

    def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        if path == "check":
            return {"violations": ["a slot is lost"] if self.breaks == "check" else []}
        assert self.node is not None
        self.moved.append(path)
        if path.endswith("compress") and self.breaks != "compress":
            self.node = {**self.node, "form": body["form"], "num_slots": 128}
        if path.endswith("demote"):
            if self.breaks == "demote":
                raise ValueError("status 409: no room")
            self.node = {**self.node, "tier": body["tier"]}
        return {}

    def generate(self, body: Mapping[str, object]) -> dict[str, Any]:
        is_known = self.node is not None
        self.node = self.node or {
            "id": 4,
            "num_tokens": NUM_TOKENS,
            "num_slots": NUM_TOKENS,
            "form": "exact",
            "tier": "gpu",
            "namespace": "9f",
        }
        kv = {"cached_tokens": NUM_TOKENS - 1 if is_known else 0, "kv_cache": {"lossy_tokens": NUM_TOKENS - 1}}
        return {"meta_info": kv, "output_ids": [1, 2]}


def findings_of(breaks: str = "") -> list[Finding]:
    server: Any = Fake(breaks)
    return list(self_test(server))


def test_a_sound_server_passes_every_step() -> None:
    findings = findings_of()
    assert [finding.state for finding in findings] == ["ok"] * 6
    assert findings[2].found == "256 slots became 128 as keydiff@0.5"
    assert findings[4].found == "255 of 256 tokens from the cache, 255 of them lossy"


def user_node(number: int, num_tokens: int, namespace: str | None) -> dict[str, Any]:
    return {"id": number, "num_tokens": num_tokens, "namespace": namespace, "num_slots": num_tokens, "form": "exact"}


class Busy(Fake):
    """Users' nodes come while the prompt is computed: new ones, and the upper half of one that was split."""

    def generate(self, body: Mapping[str, object]) -> dict[str, Any]:
        self.others = [user_node(5, 4 * NUM_TOKENS, None), user_node(6, NUM_TOKENS, "a1"), user_node(7, 9000, "new")]
        return super().generate(body)


def test_no_node_of_a_user_is_touched_that_came_meanwhile() -> None:
    server: Any = Busy()
    server.others = [user_node(3, 2 * NUM_TOKENS, "a1")]
    assert [finding.state for finding in self_test(server)] == ["ok"] * 6
    assert {path.split("/")[1] for path in server.moved if path != "check"} == {"4"}


def test_a_user_who_may_be_taken_for_the_prompt_ends_the_test() -> None:
    server: Any = Busy()
    server.others = []
    *_, last = self_test(server)
    assert last.state == "FAILED" and last.found.startswith("a user's request of as many tokens") and not server.moved


@pytest.mark.parametrize(
    ("breaks", "what", "found"),
    [
        ("compress", "self-test: compressed", "the node holds exact, not keydiff@0.5"),
        ("demote", "self-test", "status 409: no room"),
        ("check", "self-test: invariants", "a slot is lost"),
    ],
)
def test_the_step_that_fails_is_named(breaks: str, what: str, found: str) -> None:
    last = findings_of(breaks)[-1]
    assert (last.what, last.state, last.found) == (what, "FAILED", found)


def test_a_folder_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE_BYTES", 1 << 20)
    finding = doctor.ssd(str(tmp_path / "kv"))
    assert finding.state == "ok" and "writes" in finding.found and list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert doctor.ssd(str(tmp_path / "file")).state == "FAILED"


def test_a_plugin_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    (finding,) = doctor.plugin()
    assert finding.state == "FAILED" and "SGLANG_PLUGINS is 'other'" in finding.found
    monkeypatch.setenv("SGLANG_PLUGINS", "other,evicpress")
    (finding,) = doctor.plugin()
    assert finding.state == "ok"


def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    torch, missing = doctor.versions()
    assert torch.state == "ok" and missing.state == "note"
    assert list(missing.lines()) == ["note    no-such-package: not installed", "        pip install no-such-package"]
