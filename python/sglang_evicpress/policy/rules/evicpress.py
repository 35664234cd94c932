"""The joint choice of compressing, demoting or dropping, by least utility lost per byte freed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_evicpress.core import Form, LowerCopy, Tier
from sglang_evicpress.policy.base import DROPPED, Candidate, Step, lower_bytes, lower_forms, smaller_forms
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.hull import HullState, Point, first_points, next_on_hull, sizes_of
from sglang_evicpress.policy.menu import Menu


def checked_alpha(alpha: float) -> float:
    """``alpha``. Raises ValueError unless it is a finite number of at least 0."""
    if not (math.isfinite(alpha) and alpha >= 0.0):
        raise ValueError(f"alpha is {alpha!r}: expected a finite number, 0 or more")
    return alpha


class EvicPressPolicy:
    """EvicPress section 4.4 and appendix A: change whatever loses the least utility per byte it frees.

    Utility is section 4.2's, ``weight * (alpha * quality - delay)``. The weight is common to all options of a node, so
    its hull is that of ``alpha * quality - delay`` and a hit only scales the slopes. On a tier a node can shrink in
    place or leave: to a lower tier, in the form that has the most utility there, or as the copy that lies there, which
    may be better than the node, or by a drop, whose quality is 1 and whose delay is that of prefilling its tokens
    again, or those of reading it from the external store where that is worth more; of those exits, which all hold 0
    bytes on this tier, the one with the most utility is the hull's last point. Raises ValueError if alpha is negative
    or not finite, or if the costs lack a tier of the menu.
    """

    name: str = "evicpress"
    weighs_quality: bool = True

    def __init__(self, menu: Menu, alpha: float, costs: CostSnapshot) -> None:
        self.menu = menu
        self.alpha = checked_alpha(alpha)
        self.compresses = len(menu.forms) > 1
        self._terms = 0  # their number: other costs, another alpha or other curves make others
        self.read_costs(costs)

    def read_costs(self, costs: CostSnapshot) -> None:
        """Take other costs; the hulls made before are outdated (``Planner.refresh`` drops them)."""
        self.costs = costs
        forms, tiers = self.menu.forms, self.menu.tiers  # per tier, and there per form
        self._transfer_costs = [[self._transfer_cost(tier, form) for form in forms if tier in tiers] for tier in Tier]

    def _transfer_cost(self, tier: Tier, form: Form) -> tuple[float, float]:
        """(fixed seconds, seconds per byte) of getting the form back from the tier."""
        if tier == Tier.GPU:
            return 0.0, 0.0
        load, decode = self.costs.load.get(tier), self.costs.decode.get(form.codec)
        if load is None:
            raise ValueError(f"the costs have no cost for tier {tier.label}, which is on the menu")
        if decode is None:
            return load.fixed_s, 1.0 / load.bytes_per_s
        return load.fixed_s + decode.fixed_s, 1.0 / load.bytes_per_s + 1.0 / decode.bytes_per_s

    def delay_s(self, candidate: Candidate) -> float:
        if candidate.tier == Tier.GPU:
            return 0.0
        return self.costs.load_seconds(Tier(candidate.tier), candidate.num_bytes, candidate.form.codec)

    def dropped(self, candidate: Candidate) -> tuple[float, float]:
        """(quality, seconds) of the next use of a node that is dropped: computed anew, or read from the external store
        where that is worth more."""
        delay_s = self.costs.prefill.marginal_seconds(candidate.num_tokens, candidate.depth_tokens)
        if candidate.external is None:
            return 1.0, delay_s
        _, form, num_bytes, quality = candidate.external
        read_s = self.costs.load_seconds(Tier.EXTERNAL, num_bytes, form.codec)
        return (quality, read_s) if self.alpha * (1.0 - quality) < delay_s - read_s else (1.0, delay_s)

    def step(
        self, candidate: Candidate, excluded_tiers: int = 0, lower_copies: Sequence[LowerCopy] | None = None
    ) -> Step | None:
        state = candidate.memo
        if not isinstance(state, HullState) or state.terms != self._terms:
            state = candidate.memo = self._hull_state(candidate)
        lowest_tier, num_bytes = candidate.lowest_tier, candidate.num_bytes
        leave, leave_utility = None, -math.inf
        if lowest_tier > candidate.tier:
            if excluded_tiers or lower_copies is not None:
                leave, leave_utility = self._leave(candidate, lowest_tier, excluded_tiers, lower_copies)
            else:
                if state.lowest_tier != lowest_tier:
                    state.leave, state.leave_utility = self._leave(candidate, lowest_tier, 0)
                    state.lowest_tier = lowest_tier
                leave, leave_utility = state.leave, state.leave_utility
        if num_bytes == 0:
            # A node of holes only frees nothing, but its parent cannot go before it: the last resort.
            return None if leave is None else leave._replace(key=math.inf)
        per_byte = (state.utility - leave_utility) / num_bytes
        shrunk = state.shrunk
        if shrunk is not None and state.is_poor:
            if leave is None:
                return self._shrink(candidate, shrunk, math.inf, state.utility - shrunk[1])
        elif shrunk is not None:
            lost = state.utility - shrunk[1]
            shrunk_per_byte = lost / (num_bytes - shrunk[0])
            if shrunk_per_byte <= per_byte:
                return self._shrink(candidate, shrunk, candidate.weight * shrunk_per_byte, lost)
        if leave is None:
            return None
        lost, weight = state.utility - leave_utility, candidate.weight
        return Step(weight * per_byte, leave.tier, leave.form, leave.num_bytes, leave.quality, leave.delay_s, lost)

    def choices(
        self,
        candidate: Candidate,
        excluded_tiers: int = 0,
        num_bytes: int = 1,
        lower_copies: Sequence[LowerCopy] | None = None,
    ) -> list[Step]:
        """Every change that frees ``num_bytes`` or more on the node's tier; the key is that of a step."""
        held, lowest_tier = candidate.num_bytes, candidate.lowest_tier
        if held < num_bytes or not held:
            return []
        now = self.alpha * candidate.quality - self.delay_s(candidate)
        steps = []
        for point in self.worth_keeping(candidate):
            if held - point[0] >= num_bytes:
                lost = now - point[1]
                steps.append(self._shrink(candidate, point, candidate.weight * lost / (held - point[0]), lost))
        for tier, form, size, quality, worth in self.exits(candidate, lower_copies):
            if tier <= lowest_tier and not excluded_tiers >> tier & 1:
                lost = now - worth
                delay_s = self.alpha * quality - worth
                steps.append(Step(candidate.weight * lost / held, tier, form, size, quality, delay_s, lost))
        return steps

    def forget_steps(self) -> None:
        self._terms += 1

    def prepare(self, candidates: Iterable[Candidate]) -> None:
        """Find the hull states of many candidates at once, as ``step`` would one by one."""
        by_place: defaultdict[tuple[int, int], list[Candidate]] = defaultdict(list)
        for candidate in candidates:
            state = candidate.memo
            if not isinstance(state, HullState) or state.terms != self._terms:
                by_place[candidate.tier, candidate.lowest_tier].append(candidate)
        for (tier, lowest_tier), group in by_place.items():
            self._prepare(tier, lowest_tier, group)

    def _prepare(self, tier: int, lowest_tier: int, group: list[Candidate]) -> None:
        menu, alpha, forms, num = self.menu, self.alpha, self.menu.forms, len(group)
        tokens = np.fromiter((candidate.num_tokens for candidate in group), np.int64, num)
        held = np.fromiter((candidate.num_bytes for candidate in group), np.float64, num)
        quality = np.fromiter((candidate.quality for candidate in group), np.float64, num)
        sinks = np.fromiter((candidate.sinks for candidate in group), np.int64, num)
        allowed_forms = np.fromiter((candidate.allowed_forms for candidate in group), np.int64, num)
        curves = np.array([candidate.curve for candidate in group], np.float64)
        kept = [form.kept_fraction for form in forms]
        raw = sizes_of(kept, [menu.slot_bytes] * len(forms), menu.page_size, tokens, sinks)
        stored = np.ceil(raw * [menu.codec_ratio[form.codec] for form in forms])
        for index, form in enumerate(forms):
            if form.is_uneven:
                nodes = [(candidate.num_tokens, candidate.sinks) for candidate in group]
                raw[:, index] = [menu.sizes(*node)[index] for node in nodes]
                stored[:, index] = [menu.sizes(*node, Tier.HOST)[index] for node in nodes]
        stored_whole = np.fromiter((lower_bytes(menu, candidate) for candidate in group), np.float64, num)
        is_allowed = (allowed_forms[:, None] >> np.arange(len(forms)) & 1).astype(bool)
        sizes, is_open = stored, is_allowed & (stored < stored_whole[:, None])
        is_open_below = is_open
        if tier == Tier.GPU:
            own_codec = np.fromiter((menu.of_codec(candidate.form.codec) for candidate in group), np.int64, num)
            is_of_codec = (own_codec[:, None] >> np.arange(len(forms)) & 1).astype(bool)
            sizes, is_open = raw, is_allowed & is_of_codec & (raw < held[:, None])

        def worths(tier: int, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
            fixed, per_byte = np.array(self._transfer_costs[tier]).T
            worth: NDArray[np.float64] = alpha * curves - fixed - sizes * per_byte
            return worth

        def delays(tier: int) -> NDArray[np.float64]:
            costs = self.costs
            seconds = (
                costs.load_seconds(Tier(tier), lower_bytes(menu, candidate), candidate.form.codec)
                for candidate in group
            )
            return np.fromiter(seconds, np.float64, num)

        utility = alpha * quality - (delays(tier) if tier else 0.0)
        worth_here = worths(tier, sizes)
        dropped = np.fromiter((alpha * value - delay_s for value, delay_s in map(self.dropped, group)), np.float64, num)
        is_kept = is_open & (worth_here >= dropped[:, None])
        first = first_points(held, utility, sizes, worth_here, is_kept)
        is_poor = first < 0
        first[is_poor] = first_points(held, utility, sizes, worth_here, is_open)[is_poor]
        first[held == 0] = -1
        exits: list[
            tuple[int, NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]
        ] = []  # tier, delay as it is, best form, its worth
        for lower in menu.tiers:
            if tier < lower <= lowest_tier:
                there = np.where(is_open_below, worths(lower, stored), -math.inf)
                best = there.argmax(axis=1)
                exits.append((int(lower), delays(lower), best, there[np.arange(num), best]))
        for row, candidate in enumerate(group):
            index = int(first[row])
            shrunk = None if index < 0 else (int(sizes[row, index]), float(worth_here[row, index]), index)
            state = HullState(float(utility[row]), shrunk, self._terms, lowest_tier, is_poor=bool(is_poor[row]))
            candidate.memo = state
            state.leave, state.leave_utility = self._leave_at_once(candidate, lowest_tier, 0, candidate.lower_copies)
            for below, as_it_is, best_form, best_worth in exits:
                delay_s = float(as_it_is[row])
                worth = alpha * candidate.quality - delay_s
                if worth > state.leave_utility:
                    state.leave = Step(
                        0.0, below, candidate.form, lower_bytes(menu, candidate), candidate.quality, delay_s
                    )
                    state.leave_utility = worth
                worth = float(best_worth[row])
                if worth > state.leave_utility:
                    index = int(best_form[row])
                    value = candidate.curve[index]
                    state.leave = Step(0.0, below, forms[index], int(stored[row, index]), value, alpha * value - worth)
                    state.leave_utility = worth

    def _shrink(self, candidate: Candidate, point: Point, key: float, loss: float) -> Step:
        num_bytes, utility, index = point
        quality = candidate.curve[index]
        return Step(
            key, candidate.tier, self.menu.forms[index], num_bytes, quality, self.alpha * quality - utility, loss
        )

    def _hull_state(self, candidate: Candidate) -> HullState:
        now = self.alpha * candidate.quality - self.delay_s(candidate)
        if not candidate.num_bytes:
            return HullState(now, None, self._terms)
        current = (candidate.num_bytes, now, -1)
        shrunk = next_on_hull(current, self.worth_keeping(candidate))
        if shrunk is not None:
            return HullState(now, shrunk, self._terms)
        return HullState(now, next_on_hull(current, self.points(candidate)), self._terms, is_poor=True)

    def points(self, candidate: Candidate) -> list[Point]:
        """Points of the forms the node can take in place, with fewer bytes than it holds."""
        transfer_costs, curve, alpha = self._transfer_costs[candidate.tier], candidate.curve, self.alpha
        points = []
        for index, size in smaller_forms(self.menu, candidate):
            fixed_s, per_byte_s = transfer_costs[index]
            points.append((size, alpha * curve[index] - fixed_s - size * per_byte_s, index))
        return points

    def worth_keeping(self, candidate: Candidate) -> list[Point]:
        """Those of ``points`` that are worth no less than a drop. A leaf would be dropped before it takes one of the
        others; a node with children would ruin all their paths: it waits for them to go, and shrinks so at the last."""
        quality, delay_s = self.dropped(candidate)
        worth = self.alpha * quality - delay_s
        return [point for point in self.points(candidate) if point[1] >= worth]

    def exits(
        self, candidate: Candidate, lower_copies: Sequence[LowerCopy] | None = None
    ) -> list[tuple[int, Form | None, int, float, float]]:
        """Every (rank, form, bytes, quality, utility per use) the node could be below its tier, children aside."""
        alpha, load_seconds = self.alpha, self.costs.load_seconds
        quality, delay_s = self.dropped(candidate)
        worth = alpha * quality - delay_s
        exits: list[tuple[int, Form | None, int, float, float]] = [(DROPPED, None, 0, quality, worth)]
        for tier, form, size, quality in candidate.lower_copies if lower_copies is None else lower_copies:
            if lower_copies is not None or tier > candidate.tier:
                worth = alpha * quality - load_seconds(Tier(tier), size, form.codec)
                exits.append((tier, form, size, quality, worth))
        if lower_copies is not None:
            return exits
        held, smaller = lower_bytes(self.menu, candidate), lower_forms(self.menu, candidate)
        as_it_is, codec, curve, forms = (
            alpha * candidate.quality,
            candidate.form.codec,
            candidate.curve,
            self.menu.forms,
        )
        for lower in self.menu.tiers:
            if lower <= candidate.tier:
                continue
            worth, tier = as_it_is - load_seconds(lower, held, codec), int(lower)
            exits.append((tier, candidate.form, held, candidate.quality, worth))
            transfer_costs = self._transfer_costs[lower]
            for index, size in smaller:
                fixed_s, per_byte_s = transfer_costs[index]
                quality = curve[index]
                exits.append((tier, forms[index], size, quality, alpha * quality - fixed_s - size * per_byte_s))
        return exits

    def _leave_at_once(
        self, candidate: Candidate, lowest_tier: int, excluded_tiers: int, lower_copies: Sequence[LowerCopy]
    ) -> tuple[Step | None, float]:
        """The best way off the tier without a byte to be written: a drop, or as one of these copies."""
        best: Step | None = None
        best_utility = -math.inf
        if lowest_tier >= DROPPED and not excluded_tiers >> DROPPED & 1:
            quality, delay_s = self.dropped(candidate)
            best, best_utility = Step(0.0, DROPPED, None, 0, quality, delay_s), self.alpha * quality - delay_s
        for tier, form, num_bytes, quality in lower_copies:
            if candidate.tier < tier <= lowest_tier and not excluded_tiers >> tier & 1:
                delay_s = self.costs.load_seconds(Tier(tier), num_bytes, form.codec)
                worth = self.alpha * quality - delay_s
                if worth > best_utility:
                    best, best_utility = Step(0.0, tier, form, num_bytes, quality, delay_s), worth
        return best, best_utility

    def _leave(
        self,
        candidate: Candidate,
        lowest_tier: int,
        excluded_tiers: int,
        lower_copies: Sequence[LowerCopy] | None = None,
    ) -> tuple[Step | None, float]:
        """The best way off the tier and its utility per use; of equal ones the first."""
        if lower_copies is not None:
            return self._leave_at_once(candidate, lowest_tier, excluded_tiers, lower_copies)
        best, best_utility = self._leave_at_once(candidate, lowest_tier, excluded_tiers, candidate.lower_copies)
        alpha, curve, forms = self.alpha, candidate.curve, self.menu.forms
        smaller, as_it_is = lower_forms(self.menu, candidate), lower_bytes(self.menu, candidate)
        for lower in self.menu.tiers:
            if not candidate.tier < lower <= lowest_tier or excluded_tiers >> lower & 1:
                continue
            delay_s = self.costs.load_seconds(lower, as_it_is, candidate.form.codec)
            worth = alpha * candidate.quality - delay_s
            if worth > best_utility:
                best = Step(0.0, int(lower), candidate.form, as_it_is, candidate.quality, delay_s)
                best_utility = worth
            transfer_costs, best_index = self._transfer_costs[lower], -1
            for index, size in smaller:
                fixed_s, per_byte_s = transfer_costs[index]
                worth = alpha * curve[index] - fixed_s - size * per_byte_s
                if worth > best_utility:
                    best_utility, best_index, num_bytes = worth, index, size
            if best_index >= 0:
                delay_s = alpha * curve[best_index] - best_utility
                best = Step(0.0, int(lower), forms[best_index], num_bytes, curve[best_index], delay_s)
        return best, best_utility
