"""Distance of a plan from the best that any plan could reach, over random snapshots of several families."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evicbench.policy.optimum import optimum
from evicbench.policy.runs import in_processes
from evicbench.policy.snapshots import FAMILIES, LARGE, SMALL, Family, Snapshot, snapshot
from evicbench.report import Line
from sglang_evicpress.core import Decision, Tier
from sglang_evicpress.policy.utility import utility
from sglang_evicpress.quantiles import quantile

NUM_SMALL, NUM_LARGE = 200, 20
"""Snapshots of each family."""

SUM, FEW_BELOW, OFTEN, WORST = 0.97, 0.9, 0.95, 0.95
LEAST_GAIN = 0.01
"""Of the total utility: what cannot gain that is left out where single snapshots are judged."""


@dataclass(frozen=True, slots=True)
class Score:
    """Utility gained over dropping every node, by the plan and by the optimum; ``is_exact``: the latter can be reached.

    Gains do not change when a constant is added to all options of a node: quality 1 after a prefill is already worth
    something, and most of the total. ``is_notable``: the optimum gains a notable part of it.
    """

    family: str
    seed: int
    num_nodes: int
    is_exact: bool
    gain: float
    best_gain: float
    is_notable: bool

    @property
    def share(self) -> float:
        return self.gain / self.best_gain if self.best_gain > 0.0 else 1.0


def total_utility(given: Snapshot, plan: Sequence[Decision]) -> tuple[float, float]:
    """The total once the plan is carried out, and that of dropping every node, from the formulas of the paper."""
    decided = {decision.node_id: decision for decision in plan}
    total = dropped = 0.0
    for node in given.nodes:
        prefill_s = given.costs.prefill.marginal_seconds(node.num_tokens, node.depth_tokens)
        dropped += utility(node.weight, given.alpha, 1.0, prefill_s)
        decision = decided.get(node.id)
        tier, form, num_bytes = node.tier, node.form, node.num_bytes
        if decision is not None:
            option = decision.option
            if option.tier is None or option.form is None:
                total += utility(node.weight, given.alpha, 1.0, prefill_s)
                continue
            tier, form, num_bytes = option.tier, option.form, option.num_bytes
        quality = node.quality if form == node.form else node.curve[given.menu.forms.index(form)]
        total += utility(node.weight, given.alpha, quality, given.costs.load_seconds(tier, num_bytes, form.codec))
    return total, dropped


def score(seed: int, family: Family, num_nodes: tuple[int, int]) -> Score:
    """Raises RuntimeError when the plan does not free what it must."""
    given = snapshot(seed, family, num_nodes)
    plan = given.policy().plan(Tier.GPU, given.demand, given.room)
    freed = sum(decision.freed_bytes for decision in plan if decision.source.tier == Tier.GPU)
    if freed < given.demand:
        raise RuntimeError(f"snapshot {seed} of {family.name}: the plan frees {freed} of {given.demand} bytes")
    total, dropped = total_utility(given, plan)
    best = optimum(given)
    best_gain = best.value - dropped
    is_notable = best_gain >= LEAST_GAIN * abs(best.value)
    return Score(family.name, seed, len(given.nodes), best.is_exact, total - dropped, best_gain, is_notable)


def score_all(jobs: Sequence[tuple[int, Family, tuple[int, int]]], processes: int | None) -> list[Score]:
    return list(in_processes(_score_job, jobs, processes))


def _score_job(job: tuple[int, Family, tuple[int, int]]) -> Score:
    return score(*job)


def spread(values: Sequence[float]) -> str:
    """mean, median, fifth percentile and worst, in percent."""
    mean, median, fifth = statistics.fmean(values), statistics.median(values), quantile(values, 0.05)
    return f"mean {mean:.2%}, median {median:.2%}, 5th percentile {fifth:.2%}, worst {min(values):.2%} of {len(values)}"


def sum_over_sum(scores: Sequence[Score]) -> float:
    return sum(one.gain for one in scores) / sum(one.best_gain for one in scores)


def measure_optimality(
    num_small: int = NUM_SMALL, num_large: int = NUM_LARGE, processes: int | None = None
) -> Iterator[Line]:
    """Small snapshots beside the integer optimum, large ones beside its linear relaxation, both with the rules of the
    tree."""
    small = score_all([(seed, family, SMALL) for family in FAMILIES for seed in range(num_small)], processes)
    large = score_all([(seed, family, LARGE) for family in FAMILIES for seed in range(num_large)], processes)
    for family in FAMILIES:
        own_small, own_large = ([one for one in scores if one.family == family.name] for scores in (small, large))
        num_exact = sum(one.is_exact for one in own_small)
        shares = sum_over_sum(own_small), sum_over_sum(own_large)
        yield Line(
            f"{family.name}: utility gained over dropping everything, sum over sum of the optimum on the tree",
            f">= {SUM:.0%} with {SMALL[0]}-{SMALL[1]} nodes and with {LARGE[0]:,}-{LARGE[1]:,}",
            f"{shares[0]:.2%} of {len(own_small)}, {num_exact} optima exact; {shares[1]:.2%} of {len(own_large)}",
            min(shares) >= SUM,
        )
    below = [one for one in (*small, *large) if one.gain < -1e-9 * abs(one.best_gain)]
    yield Line(
        "all families: a plan worth less than dropping everything",
        "none",
        f"{len(below)} of {len(small) + len(large)}{_named(below)}",
        not below,
    )
    shares_of_small = [one.share for one in small if one.is_notable]
    often = sum(share >= FEW_BELOW for share in shares_of_small) / len(shares_of_small)
    yield Line(
        f"all families, {SMALL[0]}-{SMALL[1]} nodes: share of what can be gained, optima under {LEAST_GAIN:.0%} of the "
        "total left out",
        f">= {FEW_BELOW:.0%} in {OFTEN:.0%} of snapshots",
        f"in {often:.1%}; {spread(shares_of_small)}",
        often >= OFTEN,
    )
    shares_of_large = [one.share for one in large if one.is_notable]
    yield Line(
        f"all families, {LARGE[0]:,}-{LARGE[1]:,} nodes: the same against the linear relaxation",
        f"worst >= {WORST:.0%}",
        f"{spread(shares_of_large)}{_named([one for one in large if one.is_notable and one.share < WORST])}",
        min(shares_of_large) >= WORST,
    )


def _named(scores: Sequence[Score]) -> str:
    return "".join(f"; {one.family} {one.seed} ({one.num_nodes} nodes): {one.share:.2%}" for one in scores[:5])
