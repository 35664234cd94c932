"""The real server counts waiting requests as hits, learns prefill times, and tells what it decided and why."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from evicbench.testbed.server import GUESSED, Server

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--max-total-tokens", "6000", "--max-running-requests", "2")
    with Server("--kv-policy", "evicpress", *GUESSED, *flags) as running:
        yield running


def document(seed: int, num_tokens: int = 600) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, 400) for _ in range(num_tokens)]


def generate(server: Server, ids: list[int], num_new: int = 2) -> None:
    sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
    server.post("/generate", {"input_ids": ids, "sampling_params": sampling})


def in_background(server: Server, *prompts: list[int], num_new: int = 2) -> list[threading.Thread]:
    def ask(ids: list[int]) -> None:
        try:
            generate(server, ids, num_new)
        except RuntimeError as error:  # aborted below
            assert "abort" in str(error).lower()

    threads = [threading.Thread(target=ask, args=(ids,)) for ids in prompts]
    for thread in threads:
        thread.start()
    return threads


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def root_hits(server: Server, num_tokens: int) -> list[int]:
    nodes: list[dict[str, Any]] = server.get("/evicpress/tree")["nodes"]
    return [node["num_hits"] for node in nodes if node["parent_id"] is None and node["num_tokens"] >= num_tokens]


def test_a_waiting_request_is_a_hit_until_it_is_aborted(server: Server) -> None:
    shared = document(1)
    server.post("/flush_cache")
    generate(server, [*shared, 7])
    assert root_hits(server, 600) == [1]
    busy = in_background(server, document(2, 20), document(3, 20), num_new=2500)
    until(lambda: server.get("/evicpress/tree")["num_nodes"] >= 3)  # both prompts are in the tree: they run
    waiting = in_background(server, *([*shared, 8 + index] for index in range(3)))
    until(lambda: server.get("/evicpress/stats")["waiting"] == {"requests": 3, "queued_hit_nodes": 3})
    assert root_hits(server, 600) == [4]
    server.post("/abort_request", {"abort_all": True})
    for thread in (*busy, *waiting):
        thread.join(DEADLINE_S)
    until(lambda: server.get("/evicpress/stats")["waiting"] == {"requests": 0, "queued_hit_nodes": 0})
    assert root_hits(server, 600) == [1]
    assert server.post("/evicpress/check")["ok"]


def test_a_waiting_request_that_runs_is_one_hit(server: Server) -> None:
    shared = document(4)
    server.post("/flush_cache")
    generate(server, shared)  # no answer is kept beside it: what follows splits nothing off
    busy = in_background(server, document(5, 20), document(6, 20), num_new=400)
    until(lambda: server.get("/evicpress/tree")["num_nodes"] >= 3)
    waiting = in_background(server, *([*shared[:500], 8 + index] for index in range(3)))
    for thread in (*busy, *waiting):
        thread.join(DEADLINE_S)
    assert root_hits(server, 500) == [4]
    assert server.get("/evicpress/stats")["waiting"] == {"requests": 0, "queued_hit_nodes": 0}


def test_prefill_times_are_learned_from_real_batches(server: Server) -> None:
    server.post("/flush_cache")
    for seed in range(14):
        generate(server, document(100 + seed, 100 + 90 * seed))
    costs = server.get("/evicpress/stats")["costs"]
    assert costs["num_observations"] >= 12
    assert costs["learned"] != costs["in_use"] or costs["in_use"]["prefill_per_token_s"] != 1e-4
    assert any(costs["learned"].values())


def test_the_journal_and_the_explanation_tell_what_was_decided(server: Server) -> None:
    since = server.get("/evicpress/journal?limit=1")["num_decisions"]
    for seed in range(12):
        generate(server, document(200 + seed, 900))
    journal = server.get(f"/evicpress/journal?since={since}&limit=1000")
    assert [entry["number"] for entry in journal["entries"]] == list(range(since + 1, journal["last"] + 1))
    assert journal["entries"] and all(entry["freed_bytes"] >= 0 for entry in journal["entries"])
    for node in server.get("/evicpress/tree")["nodes"][:20]:
        explained = server.get(f"/evicpress/explain/{node['id']}")
        assert explained["costs"] == server.get("/evicpress/stats")["costs"]["in_use"]
        assert explained["weight_horizon_s"] > 0.0
    assert server.post("/evicpress/check")["ok"]
