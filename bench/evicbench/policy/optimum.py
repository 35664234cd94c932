"""The best that any plan could reach: a multiple-choice knapsack with one capacity per tier on a tree, by HiGHS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix, vstack

from evicbench.policy.snapshots import Snapshot
from sglang_evicpress.core import NodeStats, Tier
from sglang_evicpress.policy.base import DROPPED
from sglang_evicpress.policy.utility import utility

EXACT_UP_TO = 100
"""Nodes up to which the integer optimum is asked for; above, the linear relaxation, which no plan can exceed either."""

GAP = 1e-4

Choice = tuple[int, int, float]
"""(rank of the tier, DROPPED for none; bytes there; utility)."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """``value`` is the total utility that no plan exceeds; ``is_exact`` that one reaches it."""

    value: float
    is_exact: bool


def options(snapshot: Snapshot, node: NodeStats) -> list[Choice]:
    """What the node is and all it could become, from the formulas of the paper.

    A node does not rise to a faster tier, as in any plan; on the GPU it stays in its codec, below it a form takes what
    its codec stores.
    """
    menu, costs, alpha = snapshot.menu, snapshot.costs, snapshot.alpha
    prefill_s = costs.prefill.marginal_seconds(node.num_tokens, node.depth_tokens)
    found = [(DROPPED, 0, utility(node.weight, alpha, 1.0, prefill_s))]
    for tier in menu.tiers:
        if tier < node.tier:
            continue
        held = menu.stored_bytes(node.form, node.num_bytes) if node.tier == Tier.GPU < tier else node.num_bytes
        sizes = menu.sizes(node.num_tokens, node.sinks, tier)
        states = [(node.form, held, node.quality)]
        states += [
            (form, sizes[index], node.curve[index])
            for index, form in enumerate(menu.forms)
            if node.allowed_forms >> index & 1
            and sizes[index] < held
            and (tier > Tier.GPU or form.codec == node.form.codec)
        ]
        for form, num_bytes, quality in states:
            delay_s = costs.load_seconds(tier, num_bytes, form.codec)
            found.append((int(tier), num_bytes, utility(node.weight, alpha, quality, delay_s)))
    return found


def undominated(choices: Sequence[Choice]) -> list[Choice]:
    """Without those that another on the same tier equals or exceeds in no more bytes: no optimum needs them."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda one: (one[0], one[1], -one[2])):
        if not kept or kept[-1][0] != choice[0] or choice[2] > kept[-1][2]:
            kept.append(choice)
    return kept


def optimum(snapshot: Snapshot) -> Optimum:
    """The best plan under the rules of the tree: in the end no node is on a faster tier than its parent, nor without
    it. Raises RuntimeError when the solver fails."""
    nodes = snapshot.nodes
    numbers = {node.id: number for number, node in enumerate(nodes)}
    held = dict.fromkeys(snapshot.menu.tiers, 0)
    owners: list[int] = []
    chosen: list[Choice] = []
    for number, node in enumerate(nodes):
        held[node.tier] += node.num_bytes
        for choice in undominated(options(snapshot, node)):
            owners.append(number)
            chosen.append(choice)
    num, owner = len(chosen), np.array(owners)
    ranks, sizes = np.array([choice[0] for choice in chosen]), np.array([float(choice[1]) for choice in chosen])
    worths, unit = np.array([choice[2] for choice in chosen]), float(max(held.values()))
    capacity = np.array([(held[tier] + snapshot.room.get(tier, 0)) / unit for tier in snapshot.menu.tiers])
    capacity[0] = (held[Tier.GPU] - snapshot.demand) / unit
    is_kept = ranks < DROPPED
    columns = np.arange(num)
    knapsacks = csr_matrix(
        (sizes[is_kept] / unit, (ranks[is_kept], columns[is_kept])), shape=(len(snapshot.menu.tiers), num)
    )
    tree = _tree_rules(nodes, numbers, owner, ranks)
    choices = csr_matrix((np.ones(num), (owner, columns)), shape=(len(nodes), num))
    scale = float(np.abs(worths).max())
    if len(nodes) <= EXACT_UP_TO:
        solved = milp(
            -worths / scale,
            integrality=np.ones(num),
            bounds=Bounds(0.0, 1.0),
            constraints=[
                LinearConstraint(knapsacks, ub=capacity),
                LinearConstraint(choices, 1.0, 1.0),
                *([LinearConstraint(tree, ub=0.0)] if tree.shape[0] else []),
            ],
            options={"mip_rel_gap": GAP, "time_limit": 1.0},
        )
        if solved.mip_dual_bound is not None:
            return Optimum(-float(solved.mip_dual_bound) * scale, solved.status == 0)
    relaxed = linprog(
        -worths / scale,
        A_ub=vstack((knapsacks, tree)) if tree.shape[0] else knapsacks,
        b_ub=np.concatenate((capacity, np.zeros(tree.shape[0]))),
        A_eq=choices,
        b_eq=np.ones(len(nodes)),
        bounds=(0.0, None),
        method="highs-ds",
    )
    if relaxed.status != 0:
        raise RuntimeError(f"the linear relaxation was not solved: {relaxed.message}")
    return Optimum(-float(relaxed.fun) * scale, False)


def _tree_rules(
    nodes: Sequence[NodeStats], numbers: Mapping[int, int], owner: NDArray[np.int64], ranks: NDArray[np.int64]
) -> csr_matrix:
    """A row for each child and each rank it may be above: its parent is at that rank or below only if it is as well;
    [rows, choices], each row at most 0."""
    starts = np.searchsorted(owner, np.arange(len(nodes) + 1))
    rows: list[NDArray[np.int64]] = []
    columns: list[NDArray[np.int64]] = []
    signs: list[NDArray[np.float64]] = []
    num_rows = 0
    for number, node in enumerate(nodes):
        above = None if node.parent_id is None else numbers[node.parent_id]
        if above is None:
            continue
        for rank in sorted({int(rank) for rank in ranks[starts[number] : starts[number + 1]]} | {DROPPED}):
            if rank == node.tier:
                continue
            for one, sign in ((above, 1.0), (number, -1.0)):
                reaching = np.arange(starts[one], starts[one + 1])[ranks[starts[one] : starts[one + 1]] >= rank]
                rows.append(np.full(len(reaching), num_rows))
                columns.append(reaching)
                signs.append(np.full(len(reaching), sign))
            num_rows += 1
    if not num_rows:
        return csr_matrix((0, len(owner)))
    cells = (np.concatenate(rows), np.concatenate(columns))
    return csr_matrix((np.concatenate(signs), cells), shape=(num_rows, len(owner)))
