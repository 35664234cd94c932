"""A small tree as arrays: what every node is and could become, tier by tier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_evicpress.core import Form, LowerCopy, Tier
from sglang_evicpress.policy.base import DROPPED, Candidate, Step
from sglang_evicpress.policy.cost_model import TransferCost
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


TreeOption = tuple[int, Form | None, int, float, float]
"""(tier, form, bytes, quality, utility per use) a node may be, as ``EvicPressPolicy.exits`` gives it."""


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """The options of N nodes in R places, the tiers of the menu and then the drop, at most W in each.

    ``candidates`` are in the order of their depth and there of their parent, so that the children of one parent are
    neighbours and ``levels[d]`` is the first node of depth d; ``parents`` [N] are numbers in that order, -1 for none.
    ``places`` [N] is where they are, and slot 0 there what they are. ``worth`` and ``room`` [N, R, W] are weighted
    utility, -inf for none, and bytes, ever fewer in a place and of ever less worth. What frees no bytes on the tier
    that is short is worth no more than to stay: a gain alone is for ``plan_promotions``.
    """

    tiers: tuple[int, ...]
    candidates: Sequence[Candidate]
    options: Sequence[Sequence[Sequence[TreeOption]]]
    parents: Ints
    levels: Sequence[int]
    places: Ints
    worth: Floats
    room: Floats

    def slot(self, number: int, place: int, num_bytes: int) -> int:
        """The slot of what has the most worth of a node's options in a place that hold no more bytes."""
        return next((slot for slot, option in enumerate(self.options[number][place]) if option[2] <= num_bytes), 0)

    def step(self, weigher: EvicPressPolicy, number: int, place: int, slot: int) -> Step:
        """The change of a node to one of its options; the key is that of no heap."""
        tier, form, num_bytes, quality, worth = self.options[number][place][slot]
        now = self.options[number][self.places[number]][0][4]
        return Step(0.0, tier, form, num_bytes, quality, weigher.alpha * quality - worth, now - worth)


def tree_options(
    candidates: Iterable[Candidate],
    weigher: EvicPressPolicy,
    tier: int,
    lower_copies_of: Mapping[int, Sequence[LowerCopy]] | None = None,
    copy_loss: TransferCost | None = None,
) -> TreeOptions | None:
    """What these nodes may become in a plan that makes room on ``tier``; None where one is on a tier the menu lacks.

    What is locked or on a faster tier stays as it is; in an urgent plan (``lower_copies_of``, see ``Plan``) also what
    is on a slower one, nothing shrinks below the GPU, and what leaves the tier takes no room where it goes.
    ``copy_loss``: utility that copying a node off the GPU takes.
    """
    tiers = (*(int(one) for one in weigher.menu.tiers), DROPPED)
    place_of = {one: place for place, one in enumerate(tiers)}
    nodes, parents, levels = _by_depth(candidates)
    if any(candidate.tier not in place_of for candidate in nodes):
        return None
    is_urgent = lower_copies_of is not None
    alpha, forms, points, exits = weigher.alpha, weigher.menu.forms, weigher.points, weigher.exits
    options: list[list[list[TreeOption]]] = []
    cells: list[tuple[int, int, int]] = []
    worths: list[float] = []
    rooms: list[int] = []
    for number, candidate in enumerate(nodes):
        own_tier, curve, weight = candidate.tier, candidate.curve, candidate.weight
        now = alpha * candidate.quality - weigher.delay_s(candidate)
        found: list[list[TreeOption]] = [[] for _ in tiers]
        most = math.inf if own_tier == tier and candidate.num_bytes else now
        if not candidate.is_locked and (own_tier == tier or (own_tier > tier and not is_urgent)):
            if own_tier == Tier.GPU or not is_urgent:
                own = found[place_of[own_tier]]
                own += [(own_tier, forms[index], size, curve[index], worth) for size, worth, index in points(candidate)]
            copies = None if lower_copies_of is None else lower_copies_of.get(candidate.id, ())
            for option in exits(candidate, copies):
                if option[0] > own_tier and option[0] in place_of:
                    found[place_of[option[0]]].append(option)
        for place, unsorted in enumerate(found):
            kept: list[TreeOption] = []
            takes_room = not is_urgent or tiers[place] == own_tier
            if tiers[place] == own_tier:
                kept.append((own_tier, candidate.form, candidate.num_bytes, candidate.quality, now))
            unsorted.sort(key=_by_worth)
            least = math.inf
            for option in unsorted:
                if option[2] < least:
                    least = option[2]
                    kept.append(option)
                    if not takes_room:
                        break
            found[place] = kept
            for slot, option in enumerate(kept):
                cells.append((number, place, slot))
                took = lost_by_copying(copy_loss, candidate, option[0], option[2])
                worths.append(weight * min(option[4], most) - took)
                rooms.append(option[2] if takes_room else 0)
        options.append(found)
    shape = len(nodes), len(tiers), max((cell[2] + 1 for cell in cells), default=1)
    worth, room = np.full(shape, -math.inf), np.zeros(shape)
    at = tuple(np.array(cells, np.int64).reshape(-1, 3).T)
    worth[at], room[at] = worths, rooms
    places = np.array([place_of[candidate.tier] for candidate in nodes], np.int64)
    return TreeOptions(tiers, nodes, options, parents, levels, places, worth, room)


def lost_by_copying(copy_loss: TransferCost | None, candidate: Candidate, tier: int, num_bytes: int) -> float:
    """Utility that copying a node to a ``tier`` takes, by ``copy_loss``: of one on the GPU that has no copy there."""
    if copy_loss is None or candidate.tier != Tier.GPU or not candidate.tier < tier < DROPPED:
        return 0.0
    is_there = any(lower_copy.tier == tier for lower_copy in candidate.lower_copies)
    return 0.0 if is_there else copy_loss.seconds(num_bytes)


def _by_worth(option: TreeOption) -> tuple[float, int]:
    return -option[4], option[2]


def _by_depth(candidates: Iterable[Candidate]) -> tuple[list[Candidate], Ints, list[int]]:
    """The candidates, roots first, then their children; the numbers of their parents; where each depth begins, and the
    end."""
    known = {candidate.id: candidate for candidate in candidates}
    children: dict[int | None, list[Candidate]] = {None: []}
    for node_id in sorted(known):
        parent_id = known[node_id].parent_id
        children.setdefault(parent_id if parent_id in known else None, []).append(known[node_id])
    nodes = children[None]
    parents, levels = [-1] * len(nodes), [0]
    while levels[-1] < len(nodes):
        start, end = levels[-1], len(nodes)
        levels.append(end)
        for number in range(start, end):
            below = children.get(nodes[number].id, ())
            nodes += below
            parents += [number] * len(below)
    return nodes, np.array(parents, np.int64), levels
