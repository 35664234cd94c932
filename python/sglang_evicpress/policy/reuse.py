"""Probability and time of a node's next use, learned from the uses of all nodes: the weight of each in the utility.

A node's *rate* is the most uses per second that keeping it for some time is expected to bring: the maximum over t of
P(used within t) / E[time until it is used, t at most], which is the Gittins index of a job that pays once (Gittins,
Journal of the Royal Statistical Society B 41(2), 1979), and what hit density is for one horizon (LHD: Beckmann et al.,
NSDI 2018, section 3). Both probabilities come from the hazard of a use by age, the time since the last use, counted
for each class of nodes: a node used once by its size and by whether its parent goes on elsewhere too, others by how
often and how far apart they have been used. (SAECache, arXiv 2605.18825, finds reuse to differ up to 756 times between
kinds of tokens and learns its times online too.)
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

NUM_AGES = 40
FIRST_AGE_S = 0.05
AGES_PER_DOUBLING = 2
BORDERS_S = (0.0, *(FIRST_AGE_S * 2.0 ** (index / AGES_PER_DOUBLING) for index in range(NUM_AGES - 1)))
"""Where each bucket of ages begins, in seconds; the last one is open."""

SIZES = (128, 1024, 8192)
"""Most tokens of the first three classes of size, for nodes used once."""

USES = (3, 6)
"""Uses from which on a node is in the second and third class of how often it was used; the first has two."""

_PER_GAP_CLASS = 4  # buckets of ages: a class of gaps is four times as long as the one before
_FIRST_GAP = 6  # the bucket whose beginning is the shortest gap that is told apart, 0.28 s
NUM_GAP_CLASSES = 8
_ONCE = 2 * (len(SIZES) + 1)
NUM_CLASSES = _ONCE + (len(USES) + 1) * NUM_GAP_CLASSES

WINDOW = 16
"""Gaps, at most, that the mean gap of a node remembers."""

DEATH = 0.02
"""Of nodes used again and again, so many are taken to be used no more, each time, before anything is counted."""

PRIOR, POOL = 8.0, 32.0
"""Nodes that count as much as what is assumed of all, and as what is counted of similar classes."""

LOOK = 100
"""Uses after which the rates are worked out anew."""

FADE = 4000
"""Uses after which all counts are halved."""

HORIZON_PER_GAP = 2.2
"""Time for which a node is kept, in typical gaps: rates times this are numbers of uses."""

_START_GAP_S = 1.0
_LEAST_GAP_S = 1e-3
_MOST_HAZARD = 0.98
_NUM_GAPS = 256

Floats = NDArray[np.float64]

_BORDERS = np.array(BORDERS_S)
_ENDS = np.append(_BORDERS[1:], BORDERS_S[-1] * 3.0)
_WIDTHS = _ENDS - _BORDERS
_KEPT_S = _ENDS[None, :] - _BORDERS[:, None]  # from the beginning of one age to the end of another
_AGES_AT_ONCE = 8  # for which rates are worked out, which must fit the processor's cache
_GAPS_S = tuple(BORDERS_S[_FIRST_GAP + _PER_GAP_CLASS * index] for index in range(NUM_GAP_CLASSES))
_SHIFTS = tuple(_PER_GAP_CLASS * (NUM_GAP_CLASSES - 1 - index) for index in range(NUM_GAP_CLASSES))


@dataclass(slots=True)
class History:
    """Uses of one node: how many, the last one, the mean of the last ``WINDOW`` gaps between them (the first of which
    is a typical gap of all nodes) in seconds, its class, and the bucket of its age. ``counts``: it is counted in
    what is learned of all. ``entry`` is the tracker's."""

    kind: int
    last_use_s: float
    counts: bool = True
    num_uses: int = 1
    gap_sum_s: float = 0.0
    gap_s: float = _START_GAP_S
    row: int = 0
    age: int = 0
    entry: int = 0


def kind_of(num_tokens: int, num_siblings: int) -> int:
    """Class of a node used once: by tokens, and by whether it is its parent's only child, as the next turn of a
    conversation is, or one of several, as a question about a document is. 0 siblings: it is below the root."""
    size = sum(num_tokens > most for most in SIZES)
    return size if num_siblings == 1 else len(SIZES) + 1 + size


class ReuseModel:
    """Counts of uses by class and age, and the rates that follow from them.

    Counts are whole numbers, told by events that all ranks see, so every rank has the same rates. Reads no clock.
    """

    def __init__(self) -> None:
        self._uses = np.zeros((NUM_CLASSES, NUM_AGES), np.int64)
        self._halves = np.zeros((NUM_CLASSES, NUM_AGES), np.int64)  # nodes that reached an age, twice
        self.num_uses = 0
        self.typical_gap_s = _START_GAP_S
        self._gaps: deque[float] = deque(maxlen=_NUM_GAPS)
        self._rates: list[list[float]]
        self.learn()

    @property
    def horizon_s(self) -> float:
        """Seconds for which a rate is taken to hold."""
        return HORIZON_PER_GAP * self.typical_gap_s

    def rate(self, history: History) -> float:
        """Uses per second expected of the node if it is kept."""
        rate = self._rates[history.row][history.age]
        if history.num_uses == 1:
            return rate
        class_gap_s: float = _GAPS_S[_gap_class(history.gap_s)]
        return rate * class_gap_s / history.gap_s  # within its class by its own gap

    def begin(self, history: History) -> None:
        """The node is new, or was used just now."""
        history.age = 0
        if history.num_uses == 1:
            history.row = history.kind
        else:
            often = sum(history.num_uses >= least for least in USES)
            history.row = _ONCE + often * NUM_GAP_CLASSES + _gap_class(history.gap_s)
        self._halves[history.row, 0] += 2 * history.counts

    def use(self, history: History, now_s: float) -> bool:
        """The node is used again. Returns True if rates should be learned anew."""
        gap_s = max(now_s - history.last_use_s, _LEAST_GAP_S)
        history.last_use_s = now_s
        self._uses[history.row, history.age] += history.counts
        history.num_uses += 1
        num_gaps = history.num_uses - 1
        if num_gaps > WINDOW:
            history.gap_sum_s -= history.gap_sum_s / WINDOW
        history.gap_sum_s += gap_s
        history.gap_s = (history.gap_sum_s + self.typical_gap_s) / (min(num_gaps, WINDOW) + 1)
        self.begin(history)
        self.num_uses += 1
        if self.num_uses % FADE == 0:
            self._uses //= 2
            self._halves //= 2
        return self.num_uses % LOOK == 0 or self.num_uses in (1, 2, 4, 8, 16, 32, 64)

    def observe_gap(self, gap_s: float) -> None:
        """A request uses a prefix whose last token was last used ``gap_s`` ago: what a typical gap is."""
        self._gaps.append(max(gap_s, _LEAST_GAP_S))

    def copy(self, history: History) -> History:
        """History of a node that has been used as another was, and is counted besides from now on."""
        self._halves[history.row, : history.age + 1] += 2 * history.counts
        return replace(history)

    def grow(self, history: History) -> None:
        """The node has reached the next bucket of ages."""
        history.age += 1
        self._halves[history.row, history.age] += 2 * history.counts

    def end(self, history: History) -> None:
        """The node is gone: whether it would have been used, nobody will know."""
        self._halves[history.row, history.age] -= history.counts

    def learn(self) -> None:
        """Work out the rates, in less than half a millisecond."""
        if self._gaps:
            self.typical_gap_s = sorted(self._gaps)[len(self._gaps) // 2]
        hazards = np.empty((NUM_CLASSES, NUM_AGES))
        shortest = np.empty(NUM_CLASSES)  # no class is judged by less time than this
        uses: Floats = self._uses.astype(np.float64)
        reached: Floats = self._halves.astype(np.float64) / 2.0
        gap_s = self.typical_gap_s
        once = _smoothed(_sum(uses[:_ONCE]), _sum(reached[:_ONCE]), PRIOR, _fading(gap_s))
        hazards[:_ONCE] = _smoothed(uses[:_ONCE], reached[:_ONCE], POOL, once)
        shortest[:_ONCE] = gap_s
        for first in range(_ONCE, NUM_CLASSES, NUM_GAP_CLASSES):
            rows = slice(first, first + NUM_GAP_CLASSES)
            alike = _smoothed(_of_alike(uses[rows]), _of_alike(reached[rows]), PRIOR, _all_recurring())
            hazards[rows] = _smoothed(uses[rows], reached[rows], POOL, alike)
            shortest[rows] = 0.5 * np.array(_GAPS_S)
        self._rates = _best_rates(np.clip(hazards, 1e-7, _MOST_HAZARD), shortest).tolist()


def _gap_class(gap_s: float) -> int:
    steps = math.log2(gap_s / _GAPS_S[0]) * AGES_PER_DOUBLING / _PER_GAP_CLASS
    return round(min(NUM_GAP_CLASSES - 1, max(0, steps)))


def _smoothed(uses: Floats, reached: Floats, strength: float, expected: Floats) -> Floats:
    """Share of those who reached an age that were used in it, ``strength`` of them as ``expected``."""
    smoothed: Floats = (uses + strength * expected) / (np.maximum(reached, uses) + strength)
    return smoothed


def _sum(rows: Floats) -> Floats:
    """Sum of rows, one after the other: the same bits on every machine."""
    total = np.zeros(rows.shape[1])
    for row in rows:
        total = total + row
    return total


def _of_alike(rows: Floats) -> Floats:
    """For each class of gaps the sum of all of them, moved so that the same column is the same age in gaps of each."""
    moved = np.zeros((NUM_GAP_CLASSES, NUM_AGES + _SHIFTS[0]))
    for row, into, shift in zip(rows, moved, _SHIFTS, strict=True):
        into[shift : shift + NUM_AGES] = row
    pooled = _sum(moved)
    return np.array([pooled[shift : shift + NUM_AGES] for shift in _SHIFTS])


def _fading(gap_s: float) -> Floats:
    """Hazards assumed of nodes used once: the older, the less likely, in seconds about as in typical gaps."""
    middles = 0.5 * (_BORDERS + _ENDS)
    hazards: Floats = np.minimum(0.3 * _WIDTHS / (middles + gap_s), 0.5)
    return hazards


def _recurring(gap_s: float) -> Floats:
    """Hazards assumed of nodes used every ``gap_s`` seconds on average, independently, until they die unseen (the model
    of Schmittlein et al., Management Science 33(1), 1987, with one chance of death at each use)."""
    alive = [DEATH + (1.0 - DEATH) * math.exp(-border / gap_s) for border in (*BORDERS_S, float(_ENDS[-1]))]
    return np.array([1.0 - after / before for before, after in zip(alive, alive[1:], strict=False)])


@cache
def _all_recurring() -> Floats:
    """``_recurring`` of each class of gaps."""
    return np.array([_recurring(gap_s) for gap_s in _GAPS_S])


def _best_rates(hazards: Floats, shortest_s: Floats) -> Floats:
    """For each class and age the most uses per second, over all times of ``shortest_s`` or more for which a node of
    that age may be kept until it is used."""
    num = len(hazards)
    survive = np.cumprod(np.hstack([np.ones((num, 1)), 1.0 - hazards]), axis=1)
    used = survive[:, :-1] * hazards
    seconds = (survive[:, 1:] + 0.5 * used) * _WIDTHS
    start = np.zeros((num, 1))
    all_used, all_seconds = np.hstack([start, used.cumsum(axis=1)]), np.hstack([start, seconds.cumsum(axis=1)])
    rates = np.empty_like(hazards)
    for first in range(0, NUM_AGES, _AGES_AT_ONCE):
        ages = slice(first, first + _AGES_AT_ONCE)
        gained = all_used[:, None, first + 1 :] - all_used[:, ages, None]  # by class, age, and age it is kept to
        spent = all_seconds[:, None, first + 1 :] - all_seconds[:, ages, None]
        is_long = _KEPT_S[ages, first:] >= shortest_s[:, None, None]
        is_long[:, :, -1] = True
        gained /= np.maximum(spent, 1e-300)
        gained *= is_long
        rates[:, ages] = gained.max(axis=2)
    return rates
