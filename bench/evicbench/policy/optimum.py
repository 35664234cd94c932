"""The best that any plan could reach: a multiple-choice knapsack with one capacity per tier, by HiGHS."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_matrix, csr_matrix

from evicbench.policy.snapshots import Snapshot
from sglang_evicpress.core import NodeStats, Tier
from sglang_evicpress.policy.utility import utility

EXACT_UP_TO = 80
"""Nodes up to which the integer optimum is asked for; above, the linear relaxation, which no plan can exceed either."""

GAP = 1e-6


@dataclass(frozen=True, slots=True)
class Optimum:
    """``value`` is the total utility that no choice exceeds; ``is_exact`` that a choice of options reaches it."""

    value: float
    is_exact: bool


def options(snapshot: Snapshot, node: NodeStats) -> list[tuple[Tier | None, int, float]]:
    """(tier, bytes, utility) of what the node is and of all it could become, from the formulas of the paper.

    Without the rules of the tree; a node does not rise to a faster tier, as in any plan.
    """
    menu, costs, alpha = snapshot.menu, snapshot.costs, snapshot.alpha
    prefill_s = costs.prefill.marginal_seconds(node.num_tokens, node.depth_tokens)
    found: list[tuple[Tier | None, int, float]] = [(None, 0, utility(node.weight, alpha, 1.0, prefill_s))]
    sizes = menu.sizes(node.num_tokens, node.sinks)
    states = [(node.form, node.num_bytes, node.quality)]
    states += [
        (form, sizes[index], node.curve[index])
        for index, form in enumerate(menu.forms)
        if node.allowed_forms >> index & 1 and sizes[index] < node.num_bytes
    ]
    for tier in menu.tiers:
        if tier >= node.tier:
            for form, num_bytes, quality in states:
                delay_s = costs.load_seconds(tier, num_bytes, form.codec)
                found.append((tier, num_bytes, utility(node.weight, alpha, quality, delay_s)))
    return found


def optimum(snapshot: Snapshot) -> Optimum:
    """Raises RuntimeError when the solver fails."""
    values: list[float] = []
    owners: list[int] = []
    rows: list[int] = []
    columns: list[int] = []
    sizes: list[float] = []
    held = dict.fromkeys(snapshot.menu.tiers, 0)
    for number, node in enumerate(snapshot.nodes):
        held[node.tier] += node.num_bytes
        for tier, num_bytes, worth in options(snapshot, node):
            if tier is not None:
                rows.append(int(tier))
                columns.append(len(values))
                sizes.append(float(num_bytes))
            owners.append(number)
            values.append(worth)
    unit = float(max(held.values()))
    capacity = [(held[tier] + snapshot.room.get(tier, 0)) / unit for tier in snapshot.menu.tiers]
    capacity[0] = (held[Tier.GPU] - snapshot.demand) / unit
    num = len(values)
    knapsacks = csr_matrix(coo_matrix((np.array(sizes) / unit, (rows, columns)), shape=(len(capacity), num)))
    choices = csr_matrix(coo_matrix((np.ones(num), (owners, np.arange(num))), shape=(len(snapshot.nodes), num)))
    worths = np.array(values)
    scale = float(np.abs(worths).max())
    if len(snapshot.nodes) <= EXACT_UP_TO:
        solved = milp(
            -worths / scale,
            integrality=np.ones(num),
            bounds=Bounds(0.0, 1.0),
            constraints=[LinearConstraint(knapsacks, ub=capacity), LinearConstraint(choices, 1.0, 1.0)],
            options={"mip_rel_gap": GAP, "time_limit": 1.0},
        )
        if solved.mip_dual_bound is not None:
            return Optimum(-float(solved.mip_dual_bound) * scale, solved.status == 0)
    relaxed = linprog(
        -worths / scale,
        A_ub=knapsacks,
        b_ub=capacity,
        A_eq=choices,
        b_eq=np.ones(len(snapshot.nodes)),
        bounds=(0.0, None),
        method="highs-ds",
    )
    if relaxed.status != 0:
        raise RuntimeError(f"the linear relaxation was not solved: {relaxed.message}")
    return Optimum(-float(relaxed.fun) * scale, False)
