"""What our calls cost the scheduler thread of a real server with a tree of many nodes, under load."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from evicbench.policy.own_calls import Calls, Watch, watched
from evicbench.report import Line
from evicbench.testbed.server import GUESSED, Server, greedy

NUM_NODES = 20_000
LOAD_S = 180.0
GPU_TOKENS = 160_000
HOST_GB = 0.7
TURN_TOKENS = (12, 24)
MOST_TURNS = 6
BATCH = 16
NUM_CLIENTS = 4
MOST_S, MOST_AT_999_S = 10e-3, 2e-3


class Conversations:
    """Prompts that branch: each goes on from the end of an earlier one, or begins a new conversation."""

    def __init__(self, seed: int, vocabulary: int = 400) -> None:
        self._draw = random.Random(seed)
        self._vocabulary = vocabulary
        self._known: list[list[int]] = []
        self._lock = threading.Lock()

    def next(self, new_share: float) -> list[int]:
        """A prompt; ``new_share`` of them begin a conversation, of the others the later ones are continued more."""
        with self._lock:
            draw = self._draw
            prompt: list[int] = []
            if self._known and draw.random() >= new_share:
                prompt = self._known[int(len(self._known) * draw.random() ** 0.3)]
            if len(prompt) > MOST_TURNS * TURN_TOKENS[1]:
                prompt = []
            prompt = prompt + [draw.randrange(64, 64 + self._vocabulary) for _ in range(draw.randint(*TURN_TOKENS))]
            self._known.append(prompt)
            return prompt


def send(server: Server, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
    server.post("/generate", greedy([list(prompt) for prompt in prompts], num_tokens))


def drive(server: Server, conversations: Conversations, seconds: float, new_share: float = 0.3) -> int:
    """Load by some clients, one batch after the other; returns how many requests were served."""
    end_s = time.monotonic() + seconds

    def client(_: int) -> int:
        served = 0
        while time.monotonic() < end_s:
            send(server, [conversations.next(new_share) for _ in range(BATCH)], 4)
            served += BATCH
        return served

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return sum(pool.map(client, range(NUM_CLIENTS)))


def grow(server: Server, conversations: Conversations, num_nodes: int, deadline_s: float) -> int:
    """Prompts until the tree has that many nodes; returns how many it has."""
    while True:
        stats = server.get("/evicpress/stats")
        if stats["num_nodes"] >= num_nodes or time.monotonic() > deadline_s:
            return int(stats["num_nodes"])
        for _ in range(8):
            send(server, [conversations.next(0.3) for _ in range(64)], 1)


def measure_stalls(num_nodes: int = NUM_NODES, load_s: float = LOAD_S) -> Iterator[Line]:
    """Tiers, compression and no profiler; costs, half-life and weights are learned as the load goes on."""
    arguments = (
        *(
            "--kv-policy",
            "evicpress",
            "--kv-forms",
            "keydiff@0.5,knorm@0.25",
            "--kv-min-compress-tokens",
            "8",
            *GUESSED,
        ),
        *(
            "--kv-host-gb",
            f"{HOST_GB * num_nodes / NUM_NODES:.3f}",
            "--max-total-tokens",
            str(GPU_TOKENS * num_nodes // NUM_NODES),
        ),
        *("--max-running-requests", "32"),
    )
    with watched() as watch, Server(*arguments, env=watch.env) as server:
        conversations = Conversations(1)
        reached = grow(server, conversations, num_nodes, time.monotonic() + 3.0 * load_s)
        since = watch.num_lines
        served = drive(server, conversations, load_s)
        stats = server.get("/evicpress/stats")
        time.sleep(3.0)  # idle work begins, and the last calls are told
        yield from lines(watch, since, min(reached, stats["num_nodes"]), served, load_s, stats)


def lines(
    watch: Watch, since: int, num_nodes: int, served: int, load_s: float, stats: dict[str, Any]
) -> Iterator[Line]:
    found = watch.calls(since)
    ours = {name: calls for name, calls in found.items() if not name.startswith("gc ")}
    together = Calls()
    for calls in ours.values():
        together.add(calls)
    what = f"real server, {num_nodes:,} nodes, {served / load_s:.0f} requests/s for {load_s:.0f} s"
    worst = sorted(ours.items(), key=lambda item: -item[1].max_s)[:6]
    named = ", ".join(f"{name} {calls.max_s * 1e3:.1f} of {calls.count:,}" for name, calls in worst)
    yield Line(
        f"{what}: the longest of {together.count:,} calls of ours, processor time of the thread",
        f"<= {MOST_S * 1e3:.0f} ms",
        f"{together.max_s * 1e3:.1f} ms (wall {together.max_wall_s * 1e3:.1f}); by call, ms: {named}",
        together.max_s <= MOST_S,
    )
    slow = sorted(ours.items(), key=lambda item: -item[1].at(0.999))[:6]
    named = ", ".join(f"{name} {calls.at(0.999) * 1e3:.2f}" for name, calls in slow)
    yield Line(
        f"{what}: calls of ours at p99.9",
        f"<= {MOST_AT_999_S * 1e3:.0f} ms",
        f"{together.at(0.999) * 1e3:.2f} ms; by call: {named}",
        together.at(0.999) <= MOST_AT_999_S,
    )
    collections = {name: calls for name, calls in found.items() if name.startswith("gc ")}
    longest = max((calls.max_s for calls in collections.values()), default=0.0)
    named = ", ".join(
        f"{name}: {calls.count} up to {calls.max_s * 1e3:.1f}" for name, calls in sorted(collections.items())
    )
    yield Line(
        f"{what}: the longest garbage collection on the thread",
        f"<= {MOST_S * 1e3:.0f} ms",
        f"{longest * 1e3:.1f} ms ({named}); decisions: {stats['decisions']}",
        longest <= MOST_S,
    )
