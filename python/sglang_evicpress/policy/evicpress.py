"""The joint choice of compressing, demoting or dropping, by least utility lost per byte freed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.costs import Costs
from sglang_evicpress.policy.book import DROPPED, Record, Step
from sglang_evicpress.policy.menu import Menu

Point = tuple[int, float, int]
"""(bytes, utility per use, index of the form on the menu): a state of a node on its tier."""


def upper_hull(points: Iterable[Point]) -> list[Point]:
    """The upper convex hull of (bytes, utility), from the first point given to ever fewer bytes.

    Left out are dominated points (no fewer bytes and no more utility than another) and LP-dominated ones (below a line
    between two others): the linear relaxation of the multiple-choice knapsack uses no other (Kellerer, Pferschy and
    Pisinger, Knapsack Problems, chapter on the multiple-choice knapsack; AdaptCache section 2). A point with more
    utility in fewer bytes than the first stays: the step there has a negative slope. Of points on one line all are
    kept, so that as little as possible is freed at a time; of equal points the first given counts.
    """
    given = list(points)
    hull = [given[0]]
    while (point := next_on_hull(hull[-1], given)) is not None:
        hull.append(point)
    return hull


def next_on_hull(current: Point, points: Iterable[Point]) -> Point | None:
    """The neighbour of ``current`` towards fewer bytes on the upper hull: the one with the least slope."""
    best, best_slope = None, math.inf
    for point in points:
        freed = current[0] - point[0]
        if freed > 0:
            per_byte = (current[1] - point[1]) / freed
            if best is None or per_byte < best_slope or (per_byte == best_slope and point[0] > best[0]):
                best, best_slope = point, per_byte
    return best


@dataclass(slots=True)
class Edge:
    """The next edge of a node's hull, for as long as neither the node nor a cost changes.

    ``utility`` is that of what it holds; ``shrunk`` where the in-place part of the hull goes next. ``leave`` is the
    best way off the tier when ``floor`` is the lowest rank it may move to.
    """

    utility: float
    shrunk: Point | None
    floor: int = -1
    leave: Step | None = None
    leave_utility: float = -math.inf


class EvicPressRule:
    """EvicPress section 4.4 and appendix A: change whatever loses the least utility per byte it frees.

    Utility is section 4.2's, ``weight * (alpha * quality - delay)``. The weight is common to all options of a node, so
    its hull is that of ``alpha * quality - delay`` and a hit only scales the slopes. On a tier a node can shrink in
    place or leave: to a lower tier, in the form that has the most utility there, or by a drop, whose quality is 1 and
    whose delay is that of prefilling its tokens again; of those ways out, which all hold 0 bytes on this tier, the one
    with the most utility is the hull's last point. Raises ValueError if alpha is negative or not finite, or if the
    costs lack a tier of the menu.
    """

    name: ClassVar[str] = "evicpress"
    rises_only: ClassVar[bool] = True

    def __init__(self, menu: Menu, alpha: float, costs: Costs) -> None:
        if not (math.isfinite(alpha) and alpha >= 0.0):
            raise ValueError(f"alpha is {alpha!r}: expected a finite number, 0 or more")
        self.menu = menu
        self.alpha = alpha
        self.compresses = len(menu.forms) > 1
        self.read_costs(costs)

    def read_costs(self, costs: Costs) -> None:
        """Take other costs; the hulls made before are outdated (``Policy.refresh`` drops them)."""
        self.costs = costs
        self._laws = [self._laws_of(tier) if tier in self.menu.tiers else [] for tier in Tier]

    def _laws_of(self, tier: Tier) -> list[tuple[float, float]]:
        """Per form of the menu the (fixed seconds, seconds per byte) of getting it back from the tier."""
        if tier == Tier.GPU:
            return [(0.0, 0.0)] * len(self.menu.forms)
        return [self._law(tier, form) for form in self.menu.forms]

    def _law(self, tier: Tier, form: Form) -> tuple[float, float]:
        load, decode = self.costs.load.get(tier), self.costs.decode.get(form.codec)
        if load is None:
            raise ValueError(f"the costs have no law for tier {tier.label}, which is on the menu")
        if decode is None:
            return load.fixed_s, 1.0 / load.bytes_per_s
        return load.fixed_s + decode.fixed_s, 1.0 / load.bytes_per_s + 1.0 / decode.bytes_per_s

    def delay_s(self, record: Record) -> float:
        return (
            0.0
            if record.rank == Tier.GPU
            else self.costs.load_seconds(Tier(record.rank), record.num_bytes, record.form.codec)
        )

    def step(self, record: Record, barred: int = 0) -> Step | None:
        edge = record.memo
        if not isinstance(edge, Edge):
            edge = record.memo = self._edge(record)
        floor, num_bytes = record.floor, record.num_bytes
        leave, leave_utility = None, -math.inf
        if floor > record.rank:
            if barred:
                leave, leave_utility = self._leave(record, floor, barred)
            else:
                if edge.floor != floor:
                    edge.leave, edge.leave_utility = self._leave(record, floor, 0)
                    edge.floor = floor
                leave, leave_utility = edge.leave, edge.leave_utility
        if num_bytes == 0:
            # A node of holes only frees nothing, but its parent cannot go before it: the last resort.
            return None if leave is None else leave._replace(key=math.inf)
        per_byte = (edge.utility - leave_utility) / num_bytes
        shrunk = edge.shrunk
        if shrunk is not None:
            lost = edge.utility - shrunk[1]
            shrunk_per_byte = lost / (num_bytes - shrunk[0])
            if shrunk_per_byte <= per_byte:
                return self._shrink(record, shrunk, record.weight * shrunk_per_byte, lost)
        if leave is None:
            return None
        return leave._replace(key=record.weight * per_byte, loss=edge.utility - leave_utility)

    def _shrink(self, record: Record, point: Point, key: float, loss: float) -> Step:
        num_bytes, utility, index = point
        quality = record.curve[index]
        return Step(key, record.rank, self.menu.forms[index], num_bytes, quality, self.alpha * quality - utility, loss)

    def _edge(self, record: Record) -> Edge:
        now = self.alpha * record.quality - self.delay_s(record)
        if not record.num_bytes:
            return Edge(now, None)
        return Edge(now, next_on_hull((record.num_bytes, now, -1), self.points(record)))

    def points(self, record: Record) -> list[Point]:
        """What the node can be made in place, with fewer bytes than it holds."""
        laws, curve, alpha = self._laws[record.rank], record.curve, self.alpha
        found = []
        for index, size in self._smaller(record):
            fixed_s, per_byte_s = laws[index]
            found.append((size, alpha * curve[index] - fixed_s - size * per_byte_s, index))
        return found

    def _smaller(self, record: Record) -> list[tuple[int, int]]:
        """(index of a form, bytes) for the forms that can be made of the node and are smaller than what it holds."""
        reachable, num_bytes = record.reachable, record.num_bytes
        if not reachable:
            return []
        sizes = self.menu.sizes(record.num_tokens, record.sinks)
        return [(index, size) for index, size in enumerate(sizes) if size < num_bytes and reachable >> index & 1]

    def _leave(self, record: Record, floor: int, barred: int) -> tuple[Step | None, float]:
        """The best way off the tier and its utility per use; of equal ones the first."""
        best: Step | None = None
        best_utility = -math.inf
        if floor >= DROPPED:
            delay_s = self.costs.prefill.marginal_seconds(record.num_tokens, record.depth_tokens)
            best, best_utility = Step(0.0, DROPPED, None, 0, 1.0, delay_s), self.alpha - delay_s
        alpha, curve, forms = self.alpha, record.curve, self.menu.forms
        smaller = self._smaller(record)
        for tier in self.menu.tiers:
            if not record.rank < tier <= floor or barred >> tier & 1:
                continue
            delay_s = self.costs.load_seconds(tier, record.num_bytes, record.form.codec)
            worth = alpha * record.quality - delay_s
            if worth > best_utility:
                best, best_utility = Step(0.0, int(tier), record.form, record.num_bytes, record.quality, delay_s), worth
            laws, found = self._laws[tier], -1
            for index, size in smaller:
                fixed_s, per_byte_s = laws[index]
                worth = alpha * curve[index] - fixed_s - size * per_byte_s
                if worth > best_utility:
                    best_utility, found, num_bytes = worth, index, size
            if found >= 0:
                delay_s = alpha * curve[found] - best_utility
                best = Step(0.0, int(tier), forms[found], num_bytes, curve[found], delay_s)
        return best, best_utility
