"""The joint choice of compressing, demoting or dropping, by least utility lost per byte freed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sglang_evicpress.core import Form, Tier, Way
from sglang_evicpress.policy.base import DROPPED, Record, Step
from sglang_evicpress.policy.cost_model import Costs
from sglang_evicpress.policy.hull import Edge, Point, first_points, next_on_hull, sizes_of
from sglang_evicpress.policy.menu import Menu


class EvicPressRule:
    """EvicPress section 4.4 and appendix A: change whatever loses the least utility per byte it frees.

    Utility is section 4.2's, ``weight * (alpha * quality - delay)``. The weight is common to all options of a node, so
    its hull is that of ``alpha * quality - delay`` and a hit only scales the slopes. On a tier a node can shrink in
    place or leave: to a lower tier, in the form that has the most utility there, or as the copy that lies there, which
    may be better than the node, or by a drop, whose quality is 1 and whose delay is that of prefilling its tokens
    again; of those ways out, which all hold 0 bytes on this tier, the one with the most utility is the hull's last
    point. Raises ValueError if alpha is negative or not finite, or if the
    costs lack a tier of the menu.
    """

    name: ClassVar[str] = "evicpress"
    weighs_quality: ClassVar[bool] = True
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

    def step(self, record: Record, barred: int = 0, ways: Sequence[Way] | None = None) -> Step | None:
        edge = record.memo
        if not isinstance(edge, Edge):
            edge = record.memo = self._edge(record)
        floor, num_bytes = record.floor, record.num_bytes
        leave, leave_utility = None, -math.inf
        if floor > record.rank:
            if barred or ways is not None:
                leave, leave_utility = self._leave(record, floor, barred, ways)
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
        lost, weight = edge.utility - leave_utility, record.weight
        return Step(weight * per_byte, leave.rank, leave.form, leave.num_bytes, leave.quality, leave.delay_s, lost)

    def choices(
        self, record: Record, barred: int = 0, num_bytes: int = 1, ways: Sequence[Way] | None = None
    ) -> list[Step]:
        """Every change that frees ``num_bytes`` or more on the node's tier; the key is that of a step."""
        held, floor = record.num_bytes, record.floor
        if held < num_bytes or not held:
            return []
        now = self.alpha * record.quality - self.delay_s(record)
        found = []
        for point in self.points(record):
            if held - point[0] >= num_bytes:
                lost = now - point[1]
                found.append(self._shrink(record, point, record.weight * lost / (held - point[0]), lost))
        for rank, form, size, quality, worth in self.ways_out(record, ways):
            if rank <= floor and not barred >> rank & 1:
                lost = now - worth
                delay_s = self.alpha * quality - worth
                found.append(Step(record.weight * lost / held, rank, form, size, quality, delay_s, lost))
        return found

    def prepare(self, records: Iterable[Record]) -> None:
        """Find the edges of many records at once, as ``step`` would one by one."""
        by_place: defaultdict[tuple[int, int], list[Record]] = defaultdict(list)
        for record in records:
            by_place[record.rank, record.floor].append(record)
        for (rank, floor), group in by_place.items():
            self._prepare(rank, floor, group)

    def _prepare(self, rank: int, floor: int, group: list[Record]) -> None:
        menu, alpha, forms, num = self.menu, self.alpha, self.menu.forms, len(group)
        tokens = np.fromiter((record.num_tokens for record in group), np.int64, num)
        held = np.fromiter((record.num_bytes for record in group), np.float64, num)
        quality = np.fromiter((record.quality for record in group), np.float64, num)
        sinks = np.fromiter((record.sinks for record in group), np.int64, num)
        reachable = np.fromiter((record.reachable for record in group), np.int64, num)
        curves = np.array([record.curve for record in group], np.float64)
        slot_bytes = [menu.slot_bytes * menu.codec_ratio[form.codec] for form in forms]
        sizes = sizes_of([form.kept_fraction for form in forms], slot_bytes, menu.page_size, tokens, sinks)
        is_open = (reachable[:, None] >> np.arange(len(forms)) & 1).astype(bool) & (sizes < held[:, None])

        def worths(tier: int) -> NDArray[np.float64]:
            fixed, per_byte = np.array(self._laws[tier]).T
            found: NDArray[np.float64] = alpha * curves - fixed - sizes * per_byte
            return found

        def delays(tier: int) -> NDArray[np.float64]:
            costs = self.costs
            found = (costs.load_seconds(Tier(tier), record.num_bytes, record.form.codec) for record in group)
            return np.fromiter(found, np.float64, num)

        utility = alpha * quality - (delays(rank) if rank else 0.0)
        here = worths(rank)
        first = first_points(held, utility, sizes, here, is_open)
        first[held == 0] = -1
        ways: list[
            tuple[int, NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]
        ] = []  # tier, delay as it is, best form, its worth
        for tier in menu.tiers:
            if rank < tier <= floor:
                there = np.where(is_open, worths(tier), -math.inf)
                best = there.argmax(axis=1)
                ways.append((int(tier), delays(tier), best, there[np.arange(num), best]))
        for row, record in enumerate(group):
            index = int(first[row])
            shrunk = None if index < 0 else (int(sizes[row, index]), float(here[row, index]), index)
            edge = record.memo = Edge(float(utility[row]), shrunk, floor)
            if floor >= DROPPED:
                delay_s = self.costs.prefill.marginal_seconds(record.num_tokens, record.depth_tokens)
                edge.leave, edge.leave_utility = Step(0.0, DROPPED, None, 0, 1.0, delay_s), alpha - delay_s
            for way in record.ways:
                if rank < way.rank <= floor:
                    delay_s = self.costs.load_seconds(Tier(way.rank), way.num_bytes, way.form.codec)
                    worth = alpha * way.quality - delay_s
                    if worth > edge.leave_utility:
                        edge.leave = Step(0.0, way.rank, way.form, way.num_bytes, way.quality, delay_s)
                        edge.leave_utility = worth
            for tier_rank, as_it_is, best_form, best_worth in ways:
                delay_s = float(as_it_is[row])
                worth = alpha * record.quality - delay_s
                if worth > edge.leave_utility:
                    edge.leave = Step(0.0, tier_rank, record.form, record.num_bytes, record.quality, delay_s)
                    edge.leave_utility = worth
                worth = float(best_worth[row])
                if worth > edge.leave_utility:
                    index = int(best_form[row])
                    value = record.curve[index]
                    edge.leave = Step(
                        0.0, tier_rank, forms[index], int(sizes[row, index]), value, alpha * value - worth
                    )
                    edge.leave_utility = worth

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
        """Points of the forms the node can take in place, with fewer bytes than it holds."""
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

    def ways_out(
        self, record: Record, ways: Sequence[Way] | None = None
    ) -> list[tuple[int, Form | None, int, float, float]]:
        """Every (rank, form, bytes, quality, utility per use) the node could be below its tier, children aside."""
        delay_s = self.costs.prefill.marginal_seconds(record.num_tokens, record.depth_tokens)
        found: list[tuple[int, Form | None, int, float, float]] = [(DROPPED, None, 0, 1.0, self.alpha - delay_s)]
        if ways is None:
            states = [(record.form, record.num_bytes, record.quality)]
            states += [(self.menu.forms[index], size, record.curve[index]) for index, size in self._smaller(record)]
            ways = [way for way in record.ways if way.rank > record.rank]
            ways += [Way(int(tier), *state) for tier in self.menu.tiers if tier > record.rank for state in states]
        for rank, form, size, quality in ways:
            worth = self.alpha * quality - self.costs.load_seconds(Tier(rank), size, form.codec)
            found.append((rank, form, size, quality, worth))
        return found

    def _leave(
        self, record: Record, floor: int, barred: int, ways: Sequence[Way] | None = None
    ) -> tuple[Step | None, float]:
        """The best way off the tier and its utility per use; of equal ones the first."""
        best: Step | None = None
        best_utility = -math.inf
        if floor >= DROPPED:
            delay_s = self.costs.prefill.marginal_seconds(record.num_tokens, record.depth_tokens)
            best, best_utility = Step(0.0, DROPPED, None, 0, 1.0, delay_s), self.alpha - delay_s
        alpha, curve, forms = self.alpha, record.curve, self.menu.forms
        for rank, form, num_bytes, quality in record.ways if ways is None else ways:
            if record.rank < rank <= floor and not barred >> rank & 1:
                delay_s = self.costs.load_seconds(Tier(rank), num_bytes, form.codec)
                worth = alpha * quality - delay_s
                if worth > best_utility:
                    best, best_utility = Step(0.0, rank, form, num_bytes, quality, delay_s), worth
        if ways is not None:
            return best, best_utility
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
