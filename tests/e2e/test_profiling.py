"""The real server measures contexts beside its users, changes none of their answers, and keeps what it measured."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evicbench.testbed.server import ADMIN_KEY, Server
from evicbench.testbed.tasks import Context, make_context
from evicbench.testbed.vocabulary import load_vocabulary

from sglang_evicpress.cli.main import main

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]

DEADLINE_S = 90.0
FORMS = "keydiff@0.8,keydiff@0.2,snapkv@0.5"
FAMILIES = ("needle", "multikv", "mapping")


def flags(profiles: Path) -> tuple[str, ...]:
    """A pool in which everything has room, so that nothing is compressed but in shadows."""
    policy = ("--kv-policy", "evicpress", "--kv-forms", FORMS, "--kv-profile-path", str(profiles))
    return (*policy, "--max-total-tokens", "40000")


def contexts() -> list[Context]:
    return [make_context(family, 1200, random.Random(f"profiling {family}")) for family in FAMILIES]


def ask(server: Server, context: Context, index: int, **fields: Any) -> Any:
    ids = load_vocabulary().encode(context.prompt(context.questions[index].text))
    sampling = {"temperature": 0, "max_new_tokens": 12}
    return server.post("/generate", {"input_ids": ids, "sampling_params": sampling, **fields})


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.1)


def profiles(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/evicpress/profiles")
    return found


def test_contexts_are_measured_beside_users_and_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profiles"
    asked = [(context, index) for index in range(4) for context in contexts()]
    with Server(*flags(file)) as server:
        assert profiles(server)["default"] == {}
        first = [ask(server, *each)["text"] for each in asked]
        for _ in range(6):  # while they are measured
            assert [ask(server, *each)["text"] for each in asked] == first
        until(lambda: len(profiles(server)["profiles"]) == len(FAMILIES))
        until(lambda: server.get("/evicpress/stats")["shadow_slots"] == 0)
        assert [ask(server, *each)["text"] for each in asked] == first
        assert server.post("/evicpress/check")["ok"]
        tree = server.get("/evicpress/tree")["nodes"]
        assert {node["form"] for node in tree} == {"exact"}
        assert not any(node["is_shadow"] for node in tree)
        assert sum(node["num_profiles"] for node in tree) >= len(FAMILIES)
        found = profiles(server)
        assert set(found["default"]) == set(FORMS.split(","))
        one = server.get(f"/evicpress/profiles/{found['profiles'][0]['key']}")
        assert set(one["curve"]) == set(FORMS.split(","))
        for figures in one["curve"].values():
            assert 0.0 <= figures["expected"] <= 1.0 and 0.0 <= figures["mean"] <= 1.0
        status, answer = server.request("GET", "/evicpress/profiles/" + "0" * 32)
        assert (status, "has no profile" in answer["error"]["reason"]) == (404, True)
        status, answer = server.request("GET", "/evicpress/profiles/what")
        assert (status, "32 hex digits" in answer["error"]["reason"]) == (400, True)
        status, answer = server.request(
            "POST",
            "/generate",
            {"input_ids": [1, 5, 6], "extra_key": "evicpress/shadow/mine/exact", "sampling_params": {}},
        )
        assert "abort" in json.dumps(answer).lower()
        offline(server, tmp_path, capsys)
        before = {each["key"] for each in profiles(server)["profiles"]}
        assert len(before) == len(FAMILIES) + 1
    with Server(*flags(file)) as server:
        found = profiles(server)
        assert {each["key"] for each in found["profiles"]} == before
        ask(server, *asked[0])
        tree = server.get("/evicpress/tree")["nodes"]
        assert sum(node["num_profiles"] for node in tree) == 1


def offline(server: Server, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``evicpress profile`` against the server, twice: the second time there is nothing left to do."""
    context = make_context("record", 1200, random.Random("offline"))
    line = {"context": context.text, "questions": [question._asdict() for question in context.questions[:3]]}
    line["questions"] = [{"question": each["text"], "answer": each["answer"]} for each in line["questions"]]  # type: ignore[index,union-attr]
    (folder / "contexts.jsonl").write_text(json.dumps(line) + "\n")
    words = ["profile", "--url", server.url, "--contexts", str(folder / "contexts.jsonl"), "--forms", FORMS]
    words += ["--prompt", "text", "--template", "<bos> {context} <q> {question}", "--no-progress", "--resume"]
    words += ["--admin-api-key", ADMIN_KEY]
    assert main(words) == 0
    assert "1152" in capsys.readouterr().out
    assert main(words) == 0
    assert "1 of 1 contexts were measured before" in capsys.readouterr().out
    assert main(["profile", "show", "--url", server.url, "--admin-api-key", ADMIN_KEY]) == 0
    assert "logprob" in capsys.readouterr().out


def test_a_file_of_profiles_that_cannot_be_one_stops_the_start_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended while it started") as failed, Server(*flags(tmp_path)):
        pass
    last = str(failed.value).rstrip().splitlines()[-1]
    assert last == f"sglang: error: profile store {tmp_path} is a folder: expected a file"
