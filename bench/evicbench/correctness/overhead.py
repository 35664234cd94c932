"""Cost of the plugin when everything fits, and gain of its CPU attention: paired timings on real servers.

Two servers run side by side and answer the same requests in turn (A B, B A, ...), so that both see the same noise; only
ratios are reported. Their order of starting changes too.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from evicbench.report import Line
from evicbench.streams import stream
from evicbench.testbed.server import Server

OVERHEAD_BOUND = 1.05
SPEEDUP_BOUND = 3.0
ATTENTION_ONLY = {"SGLANG_EVICPRESS": "attention"}  # stock SGLang but for the CPU attention
COMMON = ("--max-total-tokens", "120000")
STARTS = 4  # of both servers: of two that run the same code, one is up to 4 % slower until it ends
_LEAST_PAIRS = 8  # a start
# what profiling costs is measured by show-profiler
OURS = ("--kv-policy", "evicpress", "--kv-disable-online-profiling", *COMMON)


def paired(servers: Sequence[Server], prompts: Sequence[list[int]], num_tokens: int) -> tuple[list[float], list[float]]:
    """Ratios (second server / first) of time to first token and of time between tokens, one pair a prompt."""
    first, between = [], []
    for index, prompt in enumerate(prompts):
        order = (0, 1) if index // 2 % 2 == 0 else (1, 0)  # by twos: every other prompt is of another kind
        seen = {which: stream(servers[which], prompt, num_tokens) for which in order}
        first.append(seen[1].first_s / seen[0].first_s)
        if seen[0].between_s > 0.0:  # else all tokens came at once
            between.append(seen[1].between_s / seen[0].between_s)
    return first, between


def overhead(pairs: int, seed: int = 0, most: float = OVERHEAD_BOUND, most_starts: int = STARTS) -> list[Line]:
    """Everything fits, nothing is compressed: half the prompts are new, half extend one that is cached."""
    rng = random.Random(seed)
    contexts = [[rng.randrange(6, 480) for _ in range(1000)] for _ in range(8)]
    prompts, is_untouched = [], True
    for index in range(pairs):
        fresh = [rng.randrange(6, 480) for _ in range(600)]
        prompts.append(fresh if index % 2 else contexts[index // 2 % len(contexts)] + fresh[:20])
    first, between = list[float](), list[float]()
    starts = min(most_starts, max(1, pairs // _LEAST_PAIRS))
    for start in range(starts):
        servers = [Server(*COMMON, env=ATTENTION_ONLY), Server(*OURS)]
        with ExitStack() as stack:
            for server in reversed(servers) if start % 2 else servers:
                stack.enter_context(server)
            for server in servers:
                for context in contexts:
                    stream(server, context, 4)
            ratios = paired(servers, prompts[pairs * start // starts : pairs * (start + 1) // starts], 24)
            core = servers[0].tree_core
            dropped = servers[1].get("/evicpress/stats")["decisions"]
        is_untouched = is_untouched and not dropped["compressed"] and not dropped["dropped"]
        first += ratios[0]
        between += ratios[1]
    lines = []
    for what, ratios in (("time to first token", first), ("time between tokens", between)):
        median = statistics.median(ratios)
        lines.append(
            Line(
                f"overhead, nothing compressed: {what}, evicpress / stock, same CPU attention, {pairs} pairs in "
                f"{starts} starts{', stock on its Rust tree core' if core == 'rust' else ''}",
                f"median <= {most}",
                f"{median:.3f}",
                median <= most and is_untouched,
            )
        )
    return lines


def attention_speedup(rounds: int, seed: int = 1) -> Line:
    """First token of a question on a cached 4k prefix: SGLang's torch_native against ours."""
    rng = random.Random(seed)
    prefix = [rng.randrange(6, 480) for _ in range(4000)]
    suffixes = [[rng.randrange(6, 480) for _ in range(24)] for _ in range(rounds)]
    prompts = [prefix + suffix for suffix in suffixes]
    with (
        Server(*COMMON, "--attention-backend", "torch_native", env={"SGLANG_PLUGINS": "none"}) as stock,
        Server(*OURS) as ours,
    ):
        for server in (stock, ours):
            stream(server, prefix, 2)
        first, _ = paired((stock, ours), prompts, 2)
    speedup = 1 / statistics.median(first)
    return Line(
        f"CPU attention on a cached 4k prefix: torch_native's first token / ours, {rounds} pairs",
        f">= {SPEEDUP_BOUND}x",
        f"{speedup:.1f}x",
        speedup >= SPEEDUP_BOUND,
    )
