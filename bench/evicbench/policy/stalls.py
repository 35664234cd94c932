"""Cost of our calls to the scheduler thread of a real server with a tree of many nodes, under load."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from evicbench.policy.own_calls import TOLD_EVERY_S, Calls, watched
from evicbench.report import Line
from evicbench.testbed.server import GUESSED, Server, greedy

NUM_NODES = 20_000
LOAD_S = 180.0
SETTLE_S = 5.0
"""Between the bursts of 512 prompts that grow the tree, which leave no room on the GPU, and the load."""

IDLE_S = 6.0
GPU_TOKENS = 240_000
HOST_GB = 0.6
ONE_LAYER = ("--json-model-override-args", '{"num_hidden_layers": 1}')
"""1,024 bytes a slot: 20,000 nodes fit in less than 1 GB."""

TURN_TOKENS = (24, 48)
MOST_TOKENS = 256
NUM_CLIENTS, ANSWER_TOKENS = 8, 8
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
            if len(prompt) > MOST_TOKENS:
                prompt = []
            prompt = prompt + [draw.randrange(64, 64 + self._vocabulary) for _ in range(draw.randint(*TURN_TOKENS))]
            self._known.append(prompt)
            return prompt


def send(server: Server, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
    server.post("/generate", greedy([list(prompt) for prompt in prompts], num_tokens))


def drive(server: Server, conversations: Conversations, seconds: float, new_share: float = 0.3) -> int:
    """Load by some clients, one request after the other; returns how many were served."""
    end_s = time.monotonic() + seconds

    def client(_: int) -> int:
        served = 0
        while time.monotonic() < end_s:
            send(server, [conversations.next(new_share)], ANSWER_TOKENS)
            served += 1
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
    share = num_nodes / NUM_NODES
    arguments = (
        *("--kv-policy", "evicpress", "--kv-forms", "keydiff@0.5,knorm@0.25", "--kv-min-compress-tokens", "8"),
        *("--kv-host-gb", f"{HOST_GB * share:.3f}", "--max-total-tokens", str(int(GPU_TOKENS * share))),
        *("--max-running-requests", "32", *ONE_LAYER, *GUESSED),
    )
    with watched() as watch, Server(*arguments, env=watch.env) as server:
        conversations = Conversations(1)
        reached = grow(server, conversations, num_nodes, time.monotonic() + 3.0 * load_s)
        time.sleep(SETTLE_S)
        first = watch.num_lines
        served = drive(server, conversations, load_s)
        stats = server.get("/evicpress/stats")
        end = watch.num_lines
        time.sleep(2.0 * TOLD_EVERY_S)  # the last calls are told, and left out
        idle = watch.num_lines
        time.sleep(IDLE_S)
        what = f"real server, {min(reached, stats['num_nodes']):,} nodes"
        load = f"{what}, {served / load_s:.0f} requests/s for {load_s:.0f} s"
        yield from lines(load, watch.calls(first, end))
        yield idle_line(f"{what}, idle", watch.calls(idle), watch.calls(end).get("gc 2", Calls()))


def lines(what: str, found: Mapping[str, Calls]) -> Iterator[Line]:
    ours = {name: calls for name, calls in found.items() if not name.startswith("gc ")}
    together = Calls()
    for calls in ours.values():
        together.add(calls)
    worst = sorted(ours.items(), key=lambda item: -item[1].max_s)[:5]
    named = ", ".join(f"{name} {calls.max_s * 1e3:.1f}" for name, calls in worst)
    yield Line(
        f"{what}: the longest of {together.count:,} calls of ours, processor time of the thread",
        f"<= {MOST_S * 1e3:.0f} ms",
        f"{together.max_s * 1e3:.1f} ms (wall {together.max_wall_s * 1e3:.1f}); {named}",
        together.max_s <= MOST_S,
    )
    slow = sorted(ours.items(), key=lambda item: -item[1].at(0.999))[:5]
    named = ", ".join(f"{name} {calls.at(0.999) * 1e3:.1f} of {calls.count:,}" for name, calls in slow)
    yield Line(
        f"{what}: p99.9 of all these calls",
        f"<= {MOST_AT_999_S * 1e3:.0f} ms",
        f"{together.at(0.999) * 1e3:.2f} ms; {named}",
        together.at(0.999) <= MOST_AT_999_S,
    )
    collections = {name: calls for name, calls in sorted(found.items()) if name.startswith("gc ")}
    longest = max((calls.max_s for calls in collections.values()), default=0.0)
    named = ", ".join(f"{calls.count} of generation {name[3:]}" for name, calls in collections.items())
    yield Line(
        f"{what}: the longest garbage collection, in them or beside them",
        f"<= {MOST_S * 1e3:.0f} ms",
        f"{longest * 1e3:.1f} ms; {named or 'none'}",
        longest <= MOST_S,
    )


def idle_line(what: str, found: Mapping[str, Calls], collections: Calls) -> Line:
    """A full collection comes when nobody waits; whoever comes meanwhile does, once."""
    rest = {name: calls for name, calls in found.items() if not name.startswith("gc ")}
    name, longest = max(rest.items(), key=lambda item: item[1].max_s, default=("none", Calls()))
    return Line(
        f"{what}: the longest call of ours but a full collection",
        f"<= {MOST_S * 1e3:.0f} ms",
        f"{longest.max_s * 1e3:.1f} ms, {name}; a collection {collections.max_s * 1e3:.1f} ms",
        longest.max_s <= MOST_S,
    )
