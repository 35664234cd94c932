"""Distance of the greedy plan from the best that any plan could reach, over random snapshots."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evicbench.policy.optimum import optimum
from evicbench.policy.snapshots import Snapshot, snapshot
from evicbench.report import Line
from sglang_evicpress.core import Decision, Tier
from sglang_evicpress.policy.utility import utility
from sglang_evicpress.quantiles import quantile

NUM_SNAPSHOTS = 200
MEAN, WORST, MANY = 0.99, 0.97, 100


@dataclass(frozen=True, slots=True)
class Score:
    """``of_total``: total utility after the plan over that of the optimum; None where the latter is not above 0.

    ``of_gain``: the same after the utility of dropping every node is taken from both. It does not change when a
    constant is added to all options of a node; as a rule it is much the stricter one, for quality 1 after a prefill is
    already worth something and most of the total.
    """

    num_nodes: int
    is_exact: bool
    of_total: float | None
    of_gain: float


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


def score(seed: int) -> Score:
    """Raises RuntimeError when the plan does not free what it must."""
    given = snapshot(seed)
    plan = given.policy().plan(Tier.GPU, given.demand, given.room)
    freed = sum(decision.freed_bytes for decision in plan if decision.source.tier == Tier.GPU)
    if freed < given.demand:
        raise RuntimeError(f"snapshot {seed}: the plan frees {freed} of {given.demand} bytes")
    total, dropped = total_utility(given, plan)
    best = optimum(given)
    return Score(
        len(given.nodes),
        best.is_exact,
        total / best.value if best.value > 0.0 else None,
        (total - dropped) / (best.value - dropped) if best.value > dropped else 1.0,
    )


def spread(values: Sequence[float]) -> str:
    """mean, median, fifth percentile and worst, in percent."""
    mean, median, fifth = statistics.fmean(values), statistics.median(values), quantile(values, 0.05)
    return f"mean {mean:.2%}, median {median:.2%}, 5th percentile {fifth:.2%}, worst {min(values):.2%} of {len(values)}"


def measure_optimality(num_snapshots: int = NUM_SNAPSHOTS) -> Iterator[Line]:
    scores = [score(seed) for seed in range(num_snapshots)]
    totals = [found.of_total for found in scores if found.of_total is not None]
    many = [found for found in scores if found.num_nodes >= MANY]
    totals_of_many = [found.of_total for found in many if found.of_total is not None]
    gains, gains_of_many = [found.of_gain for found in scores], [found.of_gain for found in many]
    num_exact = sum(found.is_exact for found in scores)
    yield Line(
        f"utility after the plan over the optimum (MCKP without tree rules, {num_exact} exact, the others its linear "
        f"relaxation), {len(scores)} snapshots",
        f"mean >= {MEAN:.0%}",
        spread(totals),
        statistics.fmean(totals) >= MEAN,
    )
    yield Line(
        f"the same, {MANY} nodes and more",
        f"worst >= {WORST:.0%}",
        spread(totals_of_many),
        min(totals_of_many) >= WORST,
    )
    yield Line(
        f"stricter: utility gained over dropping everything, {MANY} nodes and more",
        f"mean >= {MEAN:.0%}, worst >= {WORST:.0%}",
        spread(gains_of_many),
        statistics.fmean(gains_of_many) >= MEAN and min(gains_of_many) >= WORST,
    )
    yield Line(
        "the same, all snapshots: with few nodes one step is much, as one node is",
        f"median >= {MEAN:.0%}",
        f"{spread(gains)}; {sum(gain >= MEAN for gain in gains)} at {MEAN:.0%} or more",
        statistics.median(gains) >= MEAN,
    )
