"""The tree of the page, read from real servers with many nodes: cost of each step, and of all of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from evicbench.policy.stalls import GPU_TOKENS, HOST_GB, NUM_NODES, ONE_LAYER, Conversations, grow
from evicbench.report import Line
from evicbench.testbed.server import GUESSED, Server
from sglang_evicpress.introspect.arguments import PAGE_OUTLINE

SIZES = (1_000, 50_000)
GROW_S = 900.0
MOST_MS = 5.0
MOST_NODES = 500


def measure(sizes: Sequence[int] = SIZES) -> Iterator[Line]:
    yield Line(
        "nodes that one scheduler step describes", f"<= {MOST_NODES}", str(PAGE_OUTLINE), PAGE_OUTLINE <= MOST_NODES
    )
    for num_nodes in sizes:
        yield from _lines(num_nodes)


def _lines(num_nodes: int) -> Iterator[Line]:
    share = max(1.0, num_nodes / NUM_NODES)
    arguments = (
        *("--kv-policy", "evicpress", "--kv-forms", "keydiff@0.5,knorm@0.25", "--kv-min-compress-tokens", "8"),
        *("--kv-host-gb", f"{HOST_GB * share:.3f}", "--max-total-tokens", str(int(GPU_TOKENS * share))),
        *("--max-running-requests", "32", *ONE_LAYER, *GUESSED),
    )
    with Server(*arguments) as server:
        reached = grow(server, Conversations(1), num_nodes, time.monotonic() + GROW_S)
        begin = time.monotonic()
        found, following = 0, 0
        while following is not None:
            page = server.get(f"/evicpress/outline?after={following}&limit=5000")
            found, following = found + len(page["nodes"]), page["next"]
        took_s = time.monotonic() - begin
        calls = server.get("/evicpress/stats")["calls"]["outline"]
        yield Line(
            f"the longest step of reading the outline of {found:,} nodes, processor time of the scheduler",
            f"<= {MOST_MS:g} ms, of all {num_nodes:,} nodes",
            f"{calls['max_cpu_ms']:.2f} ms; {calls['count']} steps, {calls['cpu_ms']:.0f} ms together, {took_s:.2f} s",
            calls["max_cpu_ms"] <= MOST_MS and found >= num_nodes * 0.98 and reached >= num_nodes,
        )
