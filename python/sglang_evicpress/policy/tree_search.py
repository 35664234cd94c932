"""The plan for a small tree: prices per tier, the best choice of the whole tree at each, and what they leave free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sglang_evicpress.policy.tree_options import Floats, Ints, TreeOptions

MAX_BUNDLE = 12
"""Choices whose mean is sought."""

CLOSE = 0.02
"""Of what can be gained over dropping everything: with less than that to be gained, or gained, all stays as it is."""


class Effort(NamedTuple):
    """Bounds of a search: of ``num_prices`` at once in each of ``num_rounds``, of ``num_starts`` choices beside the one
    given that are made to fit, by at most ``num_steps`` each, and of ``num_exchanges`` tried on the best."""

    num_prices: int
    num_rounds: int
    num_starts: int
    num_steps: int
    num_exchanges: int


SMALL, MIDDLING = 128, 1024
EFFORTS = {
    12: Effort(8, 6, 4, 24, 12),
    32: Effort(6, 6, 3, 24, 6),
    SMALL: Effort(6, 6, 2, 32, 3),
    MIDDLING: Effort(6, 10, 3, 200, 3),
}
"""By the nodes there are at the most: less for each the more there are, for then the greedy, which is where a search
starts, is better. A few milliseconds up to ``SMALL``, tens up to ``MIDDLING``."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An option per node, as place and slot [N], and the sum of what they are worth."""

    value: float
    places: Ints
    slots: Ints


@dataclass(frozen=True, slots=True)
class Found:
    """The best choice at some prices [R]: the bound it is of any plan, what it is worth, whether it fits."""

    bound: float
    worth: float
    fits: bool
    places: Ints
    slots: Ints
    prices: Floats
    used: Floats


class TreeSearch:
    """Lagrangian relaxation of the multiple-choice knapsack on a tree (Fisher 1981, on Lagrangian relaxation for
    integer programs; Kellerer et al., on the multiple-choice knapsack).

    With a price per byte of each tier instead of its ``capacity`` [R], the best choice for all nodes is found from the
    leaves upwards: a node is never on a faster tier than its parent, so that a parent and what is below it leave in one
    step wherever that is best. What it is worth less the bytes is an upper bound of any plan. Several prices are tried
    at once; what is too dear becomes cheaper. The best choices are then made to fit, and what they leave free is used.
    """

    def __init__(self, options: TreeOptions, capacity: Sequence[float]) -> None:
        self.options = options
        self.capacity = np.array([*capacity, math.inf])
        fits_alone = options.room <= self.capacity[:, None]
        self.worth = np.where(fits_alone, options.worth, -math.inf)
        self._is_priced = np.isfinite(self.capacity) & (self.capacity > 0.0)
        self._has_one_price = int(self._is_priced.sum()) == 1
        self._unit = np.where(self._is_priced, self.capacity, 1.0)
        num, self._levels = len(options.parents), options.levels
        self._numbers = np.arange(num)
        self._effort = next(effort for most, effort in EFFORTS.items() if num <= most)
        flat = np.nonzero(np.isfinite(self.worth))
        self._owners, self._places, self._slots = flat
        self._worths, self._sizes = self.worth[flat], options.room[flat]
        roots = self._levels[1]
        below = options.parents[roots:]
        self._firsts = np.flatnonzero(np.diff(below, prepend=-1))  # of the children of each parent, from the roots on
        self._heads = below[self._firsts]
        self._by_level = []
        for start, end in zip(self._levels[1:], self._levels[2:], strict=False):
            above = options.parents[start:end]
            firsts = np.flatnonzero(np.diff(above, prepend=-1))
            self._by_level.append((start, end, firsts, above[firsts], above))
        self._roots = np.arange(num)
        for start, end, _, _, above in self._by_level:
            self._roots[start:end] = self._roots[above]

    def better(self, given: Choice, prices: Sequence[float]) -> Choice | None:
        """A choice that is clearly worth more than the one given, or None where none was found. ``prices`` [R], of the
        tiers and the drop, are a guess."""
        drop = self.worth[:, -1, 0]
        dropped = float(np.where(np.isfinite(drop), drop, self._as_it_is()).sum())
        guess = np.array(prices)
        tried = self._first_prices(guess)
        if tried is None:
            return None
        found: list[Found] = []
        for _ in range(self._effort.num_rounds):
            found += self._best_at(tried)
            found.sort(key=lambda one: one.bound)
            bound = found[0].bound
            enough = bound - CLOSE * (bound - dropped)
            if not given.value < enough:  # also where what has to stay does not fit, and there is no bound
                return None
            if any(one.fits and one.worth >= enough for one in found):
                break
            gap = bound - given.value
            tried = self._between(found, len(tried)) if self._has_one_price else self._descent(found, gap, len(tried))
        best = given
        for start in ((given.places, given.slots, guess), *self._starts(found, bound - given.value)):
            if (one := self._fitted(*start)) is not None and one.value > best.value:
                best = one
            if best.value >= enough:
                break
        else:
            best = self._exchanged(best, found[0].prices, enough)
        if best is given:  # which may be no choice of this tree: the greedy drops what is below a node that must go
            return None
        is_clear = best.value - given.value > CLOSE * (bound - dropped) / 2 or given.value < dropped <= best.value
        return self._kept(best) if is_clear else None

    def _slope(self, found: Found) -> Floats:
        """How the bound changes with the prices, each times what its tier can hold."""
        return np.where(self._is_priced, 1.0 - found.used / self._unit, 0.0)

    def _bundle(self, found: list[Found], gap: float) -> tuple[list[Found], Floats, Floats]:
        """The choices that are nearly the best at the best prices, the shares of each with which their mean fits the
        capacity most closely, and what that leaves: the shortest combination of their slopes, by Frank and Wolfe."""
        best = found[0]
        near, slopes = [], []
        for one in found:
            slope = self._slope(one)
            error = best.bound - one.bound - float((slope * self._unit * (best.prices - one.prices)).sum())
            if one is best or error <= 0.5 * gap:
                near.append(one)
                slopes.append(slope)
            if len(near) == MAX_BUNDLE:
                break
        shares, edges = np.zeros(len(near)), np.array(slopes)
        shares[0], shortest = 1.0, slopes[0]
        for _ in range(MAX_BUNDLE):
            number = int((edges * shortest).sum(axis=1).argmin())
            edge = slopes[number] - shortest
            length = float((edge * edge).sum())
            share = -float((shortest * edge).sum()) / length if length > 0.0 else 0.0
            if share <= 1e-9:
                break
            share = min(share, 1.0)
            shares *= 1.0 - share
            shares[number] += share
            shortest = shortest + share * edge
        return near, shares, shortest

    def _descent(self, found: list[Found], gap: float, num: int) -> Floats:
        """Prices [K, R] further down from the best, along the mean slope there, by parts of the step that would close
        the gap."""
        best, slope = found[0].prices, self._bundle(found, gap)[2]
        steps = gap / max(float((slope * slope).sum()), 1e-12) * 2.5 ** -np.arange(0.0, num)
        prices: Floats = np.where(
            self._is_priced, np.maximum(best - steps[:, None] * slope / self._unit, 0.05 * best), best
        )
        return prices

    def _between(self, found: list[Found], num: int) -> Floats:
        """Prices [K, R] between the highest at which too much is wanted and the lowest at which all fits."""
        low = max((one for one in found if not one.fits), key=lambda one: float(one.prices.sum()), default=None)
        high = min((one for one in found if one.fits), key=lambda one: float(one.prices.sum()), default=None)
        least = found[0].prices * 0.0 if low is None else low.prices
        most = 4.0 * found[0].prices if high is None else high.prices
        prices: Floats = least + (most - least) * (np.arange(1.0, num + 1.0) / (num + 1.0))[:, None]
        return prices

    def _as_it_is(self) -> Floats:
        worth: Floats = self.options.worth[self._numbers, self.options.places, 0]
        return worth

    def _first_prices(self, guess: Floats) -> Floats | None:
        """[K, R], half of them about the guess, half from what one byte is worth at the most down to a thousandth; None
        where a node must not stay, though it has to."""
        if not np.isfinite(self.worth).any(axis=(1, 2)).all():
            return None
        drop = self.worth[:, -1:, :1]
        is_better = np.isfinite(self.worth) & np.isfinite(drop) & (self.options.room > 0)
        gains = np.where(is_better, self.worth - np.where(np.isfinite(drop), drop, 0.0), 0.0)
        dearest = float((gains / np.where(self.options.room > 0, self.options.room, 1.0)).max()) or 1.0
        half = self._effort.num_prices // 2
        factors = np.array([0.5 * 4.0 ** (step / (half - 1)) for step in range(half)])
        shares = np.array([10.0 ** (-3.0 * step / (half - 1)) for step in range(half)])
        prices: Floats = np.concatenate((np.outer(factors, guess), np.outer(dearest * shares, np.ones(len(guess)))))
        prices = np.where(np.isfinite(self.capacity), np.maximum(prices, 1e-6 * dearest), 0.0)
        return prices

    def _best_at(self, prices: Floats) -> list[Found]:
        """The best choice at each of some prices [K, R]."""
        net = self.worth - prices[:, None, :, None] * self.options.room
        slots = net.argmax(axis=3)
        sums = np.take_along_axis(net, slots[..., None], 3)[..., 0].transpose(1, 0, 2).copy()  # [N, K, R]
        for start, end, firsts, heads, _ in reversed(self._by_level):
            least = np.maximum.accumulate(sums[start:end, :, ::-1], axis=2)[..., ::-1]
            sums[heads] += np.add.reduceat(least, firsts, axis=0)
        places = np.empty(sums.shape[:2], np.int64)
        roots = self._levels[1]
        places[:roots] = sums[:roots].argmax(axis=2)
        every = np.arange(sums.shape[2])
        for start, end, _, _, above in self._by_level:
            is_open = every >= places[above][..., None]
            places[start:end] = np.where(is_open, sums[start:end], -math.inf).argmax(axis=2)
        bounds = sums[:roots].max(axis=2).sum(axis=0)
        bounds += (prices * np.where(np.isfinite(self.capacity), self.capacity, 0.0)).sum(axis=1)
        places = places.T
        slots = np.take_along_axis(slots, places[..., None], 2)[..., 0]
        worth = self.worth[self._numbers, places, slots].sum(axis=1)
        num_bytes = self.options.room[self._numbers, places, slots]
        used = (num_bytes[..., None] * (places[..., None] == every)).sum(axis=1)
        fits = (used <= self.capacity).all(axis=1)
        return [
            Found(
                float(bounds[row]), float(worth[row]), bool(fits[row]), places[row], slots[row], prices[row], used[row]
            )
            for row in range(len(prices))
        ]

    def _starts(self, found: list[Found], gap: float) -> Iterator[tuple[Ints, Ints, Floats]]:
        """The choices near the best prices, whole trees from each by its share; the best that fits; the first of all,
        each once."""
        near, shares, _ = self._bundle(found, gap)
        yield (
            *self._rounded([one for one, share in zip(near, shares, strict=True) if share > 0.0], shares[shares > 0.0]),
            found[0].prices,
        )
        fitting = max((one for one in found if one.fits), key=lambda one: one.worth, default=found[0])
        seen: set[bytes] = set()
        for one in (fitting, *found):
            key = one.places.tobytes() + one.slots.tobytes()
            if key not in seen:
                yield one.places, one.slots, one.prices
            seen.add(key)
            if len(seen) == self._effort.num_starts:
                return

    def _rounded(self, near: list[Found], shares: Floats) -> tuple[Ints, Ints]:
        """A choice with every tree as in one of those given, such that the bytes are those of the mean by the shares,
        as nearly as one tree after the other can, the largest first."""
        num, num_places = len(self._numbers), len(self.capacity)
        used = np.zeros((len(near), num, num_places))
        for number, one in enumerate(near):
            num_bytes = self.options.room[self._numbers, one.places, one.slots]
            cells = np.bincount(self._roots * num_places + one.places, weights=num_bytes, minlength=num * num_places)
            used[number] = cells.reshape(num, num_places)
        off = (used - (used * (shares / shares.sum())[:, None, None]).sum(axis=0)) / self._unit * self._is_priced
        largest = np.abs(off).max(axis=(0, 2))
        chosen, sums = np.zeros(num, np.int64), np.zeros(num_places)
        for tree in np.argsort(-largest, kind="stable")[: np.count_nonzero(largest)]:
            sums_with = sums + off[:, tree]
            chosen[tree] = number = int((sums_with * sums_with).sum(axis=1).argmin())
            sums = sums_with[number]
        row = chosen[self._roots]
        places, slots = np.array([one.places for one in near]), np.array([one.slots for one in near])
        return places[row, self._numbers], slots[row, self._numbers]

    def _exchanged(self, best: Choice, prices: Floats, enough: float) -> Choice:
        """What comes of giving one node more than there is room for, and what others lose by that, while it pays."""
        tries = self._effort.num_exchanges
        while tries > 0 and best.value < enough:
            worth = self.worth[self._numbers, best.places, best.slots][self._owners]
            held = self.options.room[self._numbers, best.places, best.slots][self._owners]
            gain = self._worths - worth
            net = gain - prices[self._places] * self._sizes + prices[best.places][self._owners] * held
            wanted = np.flatnonzero((gain > 0.0) & (self._places <= self._lowest(best.places)[self._owners]))
            if not len(wanted):
                return best
            better = None
            by_gain, by_net = (wanted[np.argsort(-score[wanted], kind="stable")] for score in (gain, net))
            for option in dict.fromkeys(int(one) for pair in zip(by_net, by_gain, strict=True) for one in pair):
                tries -= 1
                one = self._fitted(*self._forced(best, option, prices), prices, int(self._owners[option]))
                if one is not None and one.value > best.value:
                    better = one
                if better is not None or tries <= 0:
                    break
            if better is None:
                return best
            best = better
        return best

    def _forced(self, choice: Choice, option: int, prices: Floats) -> tuple[Ints, Ints]:
        """The choice with one node in an option, and what is above it no lower than that."""
        places, slots = choice.places.copy(), choice.slots.copy()
        number, place = int(self._owners[option]), int(self._places[option])
        places[number], slots[number] = place, self._slots[option]
        while (number := int(self.options.parents[number])) >= 0 and places[number] > place:
            places[number] = place
            slots[number] = (self.worth[number, place] - prices[place] * self.options.room[number, place]).argmax()
        return places, slots

    def _fitted(self, places: Ints, slots: Ints, prices: Floats, fixed: int = -1) -> Choice | None:
        """A choice made to fit, one change of one node after the other, but for the node ``fixed``, and with what is
        left free used; None where it cannot be."""
        places, slots = places.copy(), slots.copy()
        owners, at, sizes = self._owners, self._places, self._sizes
        worth, held = self.worth[self._numbers, places, slots], self.options.room[self._numbers, places, slots]
        free = self.capacity - np.bincount(places, weights=held, minlength=len(self.capacity))
        if not np.isfinite(worth).all():
            return None
        for _ in range(self._effort.num_steps):
            above = np.where(self.options.parents >= 0, places[self.options.parents], 0)
            below = self._lowest(places)
            now, own = places[owners], held[owners]
            gain, is_there = self._worths - worth[owners], at == now
            added = sizes - own * is_there
            fits = (at >= above[owners]) & (at <= below[owners]) & (added <= np.maximum(free, 0.0)[at])
            if (free < 0.0).any():
                tight = int((free < 0.0).argmax())
                freed = np.where(at == tight, -added, own)
                open_to = np.flatnonzero(fits & (now == tight) & (freed > 0.0) & (owners != fixed))
                score = gain[open_to] / np.minimum(freed[open_to], -free[tight])
            else:
                open_to = np.flatnonzero(fits & (gain > 0.0))
                score = (gain - prices[at] * added + prices[now] * own * ~is_there)[open_to]
            if not len(open_to):
                break
            best = open_to[score.argmax()]
            node = owners[best]
            free[places[node]] += held[node]
            free[at[best]] -= sizes[best]
            places[node], slots[node] = at[best], self._slots[best]
            worth[node], held[node] = self._worths[best], sizes[best]
        return Choice(float(worth.sum()), places, slots) if (free >= 0.0).all() else None

    def _lowest(self, places: Ints) -> Ints:
        """The place each node may go down to: that of its first child."""
        lowest = np.full(len(places), len(self.capacity) - 1)
        if len(self._firsts):
            lowest[self._heads] = np.minimum.reduceat(places[self._levels[1] :], self._firsts)
        return lowest

    def _kept(self, choice: Choice) -> Choice:
        """The same, but that what loses nothing by it stays as it is."""
        places, slots, value = choice.places.copy(), choice.slots.copy(), choice.value
        held = self.options.room[self._numbers, places, slots]
        free = self.capacity - np.bincount(places, weights=held, minlength=len(self.capacity))
        parents, options = self.options.parents, self.options
        for number, own in enumerate(options.places):
            place, slot = places[number], slots[number]
            gain = self.worth[number, own, 0] - self.worth[number, place, slot]
            if (place == own and slot == 0) or gain < 0.0 or (parents[number] >= 0 and places[parents[number]] > own):
                continue
            freed, needed = options.room[number, place, slot], options.room[number, own, 0]
            if needed - (freed if place == own else 0.0) <= free[own]:
                free[place] += freed
                free[own] -= needed
                places[number], slots[number] = own, 0
                value += float(gain)
        return Choice(value, places, slots)
