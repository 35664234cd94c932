"""Time of the policy for one decision, one hit and one slice of a sweep, its memory, and its growth."""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from evicbench.paths import out_file
from evicbench.policy.runs import COSTS, SLOT_BYTES
from evicbench.report import Line
from sglang_evicpress.core import EXACT, Decision, Form, NodeStats, Tier
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner

NUM_NODES = (100_000, 1_000_000)
SIZES = (1_000, 10_000, 100_000, 1_000_000)
FORMS = tuple(Form(press, kept) for press, kept in itertools.product(("keydiff", "snapkv", "knorm"), (0.75, 0.5, 0.25)))
MENU = Menu(FORMS[:-1], tuple(Tier)[:3], SLOT_BYTES)  # 8 forms and the exact one on 3 tiers: 27 options, and the drop
NUM_DECISIONS = 4_000
NUM_HITS = 20_000
DECISIONS_PER_ROUND = 4
SLICE_NODES = 64
MOST_S = 10e-3
"""Of any call."""

FULL_HOST = 0.0005
"""The host's bytes over those on the GPU: so few that thousands of decisions fill it."""


@dataclass(frozen=True, slots=True)
class Cache:
    policy: Planner
    draw: random.Random
    curves: Sequence[tuple[float, ...]]


def nodes_of(num_nodes: int, draw: random.Random, curves: Sequence[tuple[float, ...]]) -> Iterator[NodeStats]:
    """A random forest of exact nodes on the GPU, parents first."""
    depths: list[int] = []
    for i in range(num_nodes):
        parent = draw.randrange(i) if i and draw.random() < 0.6 else None
        tokens = draw.randrange(64, 4_000)
        depth = 0 if parent is None else depths[parent]
        depths.append(depth + tokens)
        yield node(i, parent, tokens, depth, draw, curves)


def node(
    node_id: int, parent: int | None, tokens: int, depth: int, draw: random.Random, curves: Sequence[tuple[float, ...]]
) -> NodeStats:
    return NodeStats(
        node_id,
        parent,
        Tier.GPU,
        EXACT,
        tokens,
        tokens * SLOT_BYTES,
        depth,
        1.0,
        draw.choice(curves),
        MENU.everything,
        draw.paretovariate(1.2),
        1,
        node_id,
    )


def build(num_nodes: int) -> Cache:
    """A policy that knows ``num_nodes`` nodes; curves are shared, as their memory is not asked for."""
    draw = random.Random(num_nodes)
    curves = [
        tuple(1.0 - draw.uniform(0.1, 0.9) * (1.0 - form.kept_fraction) ** 1.5 for form in MENU.forms)
        for _ in range(500)
    ]
    planner = make_planner("evicpress", MENU, alpha=1.0, costs=COSTS)
    planner.add_all(nodes_of(num_nodes, draw, curves))
    return Cache(planner, draw, curves)


def execute(planner: Planner, plan: Sequence[Decision]) -> None:
    """Tell the policy that it was done."""
    for decision in plan:
        option, candidate = decision.option, planner.index.candidates[decision.node_id]
        if option.tier is None or option.form is None:
            planner.remove(candidate.id)
            continue
        planner.add(
            NodeStats(
                candidate.id,
                candidate.parent_id,
                option.tier,
                option.form,
                candidate.num_tokens,
                option.num_bytes,
                candidate.depth_tokens,
                decision.quality,
                candidate.curve,
                candidate.allowed_forms & MENU.smaller(option.form),
                candidate.weight,
                candidate.num_hits,
                candidate.last_use,
            )
        )


def time_decisions(cache: Cache, host_share: float, number: int = NUM_DECISIONS) -> tuple[list[float], float]:
    """Processor seconds of each of ``number`` decisions on a full GPU, and how many nodes one moves on average.

    A decision: a node has come, as many bytes as it has are short; plan for them and tell the policy that it was done.
    The GPU is kept at what it holds, the host at ``host_share`` of that; once it is full, what comes there goes on.
    """
    planner, draw = cache.policy, cache.draw
    index = planner.index
    limits = {Tier.GPU: index.num_bytes[0], Tier.HOST: int(index.num_bytes[0] * host_share), Tier.SSD: 1 << 60}
    took: list[float] = []
    moved = 0
    for node_id in itertools.count(10_000_000 + len(index.candidates)):
        if len(took) == number:
            return took, moved / number
        planner.add(node(node_id, None, draw.randrange(64, 4_000), 0, draw, cache.curves))
        short = index.num_bytes[0] - limits[Tier.GPU]
        if short <= 0:
            continue
        room = {tier: max(0, limits[tier] - index.num_bytes[tier]) for tier in (Tier.HOST, Tier.SSD)}
        start = time.thread_time()
        plan = planner.plan(Tier.GPU, short, room)
        execute(planner, plan)
        took.append(time.thread_time() - start)
        moved += len(plan)
        if len(took) % DECISIONS_PER_ROUND == 0:
            gc.collect(0 if len(took) % (8 * DECISIONS_PER_ROUND) else 1)
    raise RuntimeError("unreachable: counting does not end")


def quietest(cache: Cache, host_share: float, rounds: int = 3) -> tuple[list[float], float]:
    """``time_decisions`` in the round with the least median: what others do on a shared machine only adds."""
    return min((time_decisions(cache, host_share) for _ in range(rounds)), key=lambda found: at(found[0], 0.5))


def time_hits(cache: Cache, number: int = NUM_HITS) -> list[float]:
    """Processor seconds of each of ``number`` hits on random nodes."""
    planner, candidates = cache.policy, cache.policy.index.candidates
    took = []
    for tick, node_id in enumerate(cache.draw.choices(list(candidates), k=number), start=10**9):
        candidate = candidates[node_id]
        start = time.thread_time()
        planner.touch(node_id, candidate.weight + 1.0, candidate.num_hits + 1, tick)
        took.append(time.thread_time() - start)
    return took


def time_sweep(cache: Cache, number: int = NUM_DECISIONS) -> tuple[float, list[float], list[float]]:
    """Processor seconds of taking other costs, of each slice of the sweep that follows, and of each decision and hit
    between two slices."""
    planner, draw = cache.policy, cache.draw
    drift = replace(COSTS, prefill=replace(COSTS.prefill, per_token_s=1.3 * COSTS.prefill.per_token_s))
    begin = time.thread_time()
    planner.refresh(drift)
    began_s = time.thread_time() - begin
    slices, between = list[float](), list[float]()
    hit = iter(draw.choices(list(planner.index.candidates), k=number))
    while planner.index.is_sweeping and len(slices) < number:
        begin = time.thread_time()
        planner.advance(SLICE_NODES)
        slices.append(time.thread_time() - begin)
        if (node_id := next(hit)) in planner.index.candidates:
            candidate = planner.index.candidates[node_id]
            begin = time.thread_time()
            planner.touch(node_id, candidate.weight + 1.0, candidate.num_hits + 1, 2 * 10**9 + len(slices))
            between.append(time.thread_time() - begin)
        between += time_decisions(cache, 1e6, 1)[0]
    return began_s, slices, between


def at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def spread(values: Sequence[float]) -> str:
    named = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (1.0, "most"))
    return ", ".join(f"{name} {at(values, share) * 1e6:.0f}" for share, name in named) + " us"


def memory_per_node(num_nodes: int) -> float:
    """Bytes a node takes in the policy, but for its curve, which all share here."""
    draw = random.Random(0)
    nodes = list(nodes_of(num_nodes, draw, [tuple(form.kept_fraction for form in MENU.forms)]))
    gc.collect()
    tracemalloc.start()
    planner = make_planner("evicpress", MENU, alpha=1.0, costs=COSTS)
    planner.add_all(nodes)
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return taken / len(planner.index.candidates)


def measure_speed(sizes: Sequence[int] = NUM_NODES, scaled: Sequence[int] = SIZES) -> Iterator[Line]:
    """Processor time of one core, so that other processes hardly count; decisions in the quietest of three rounds.

    Objects that live as long as the cache are frozen out of the garbage collector before measuring (gc.freeze), as a
    server does after its start. What comes later is collected between decisions, as a server does in each round, and
    never all of it, as a server does when it is idle.
    """
    for num_nodes in sizes:
        yield from speed_of(num_nodes)
    yield scaling(scaled)


def speed_of(num_nodes: int) -> Iterator[Line]:
    cache = build(num_nodes)
    candidates = cache.policy.index.candidates
    what = f"{len(candidates):,} nodes x {len(MENU.forms) * len(MENU.tiers)} options"
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], 2**31 - 1)
    gc.collect()
    gc.freeze()
    try:
        hits = time_hits(cache)
        yield Line(f"{what}: one hit", "mean <= 20 us", f"mean {statistics.fmean(hits) * 1e6:.1f}, {spread(hits)}",
                   statistics.fmean(hits) <= 20e-6)  # fmt: skip
        took, moved = quietest(cache, 1e6)
        yield Line(
            f"{what}: one decision, planned and carried out, {moved:.1f} nodes moved",
            "p50 < 100 us, p99 < 1 ms, most <= 10 ms",
            spread(took),
            at(took, 0.5) < 100e-6 and at(took, 0.99) < 1e-3 and max(took) <= MOST_S,
        )
        time_decisions(cache, FULL_HOST)  # fills it
        took, moved = quietest(cache, FULL_HOST)
        yield Line(
            f"{what}: with a full host, {moved:.1f} nodes moved, of which each is one decision",
            "p50 < 100 us for each, p99 < 1 ms for all, most <= 10 ms",
            f"p50 {at(took, 0.5) / moved * 1e6:.0f} us for each; for all {spread(took)}",
            at(took, 0.5) / moved < 100e-6 and at(took, 0.99) < 1e-3 and max(took) <= MOST_S,
        )
        began_s, slices, between = time_sweep(cache)
        yield Line(
            f"{what}: other costs, and each of {len(slices):,} slices of {SLICE_NODES} nodes of the sweep",
            "each <= 10 ms",
            f"{began_s * 1e3:.1f} ms, and {spread(slices)}",
            max(began_s, *slices) <= MOST_S,
        )
        yield Line(
            f"{what}: decisions and hits while it lasts", "most <= 10 ms", spread(between), max(between) <= MOST_S
        )
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    del cache, candidates
    per_node = memory_per_node(num_nodes // 4)
    yield Line(
        f"memory per node beyond its curve, {num_nodes // 4:,} nodes",
        "< 1,000 bytes",
        f"{per_node:.0f} bytes",
        per_node < 1_000,
    )


def scaling(sizes: Sequence[int]) -> Line:
    """One decision against the number of nodes."""
    medians, means = [], []
    for size in sizes:
        cache = build(size)
        gc.collect()
        gc.freeze()
        try:
            time_decisions(cache, 1e6, 200)
            took, _ = time_decisions(cache, 1e6, 2_000)
        finally:
            gc.unfreeze()
        del cache
        medians.append(at(took, 0.5))
        means.append(statistics.fmean(sorted(took)[: len(took) * 99 // 100]))
    fits = statistics.linear_regression([math.log2(size) for size in sizes], means)
    growth, logarithms = means[-1] / means[0], math.log(sizes[-1]) / math.log(sizes[0])
    draw_scaling(sizes, medians, means, fits.slope, fits.intercept)
    figure = ", ".join(f"{size:,}: {mean * 1e6:.0f}" for size, mean in zip(sizes, means, strict=True))
    return Line(
        "mean cost of a decision against nodes, but for the slowest hundredth",
        f"grows no faster than log n: at most {logarithms:.1f} times from {sizes[0]:,} to {sizes[-1]:,}",
        f"{growth:.2f} times ({figure} us; {fits.slope * 1e6:+.1f} us a doubling)",
        growth <= logarithms,
    )


def draw_scaling(
    sizes: Sequence[int], medians: Sequence[float], means: Sequence[float], slope: float, base: float
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(sizes, [mean * 1e6 for mean in means], "o-", label="mean of the fastest 99 %")
    axes.plot(sizes, [median * 1e6 for median in medians], "s--", label="median")
    axes.plot(sizes, [(base + slope * math.log2(size)) * 1e6 for size in sizes], ":", label="fitted a + b log n")
    axes.set(xscale="log", xlabel="nodes", ylabel="processor time of a decision, us", ylim=(0.0, None))
    axes.set_title("Planning for one node's bytes and carrying it out")
    axes.legend()
    figure.savefig(out_file("policy", "scaling.svg"), metadata={"Date": None})
