"""The joint choice of compressing or dropping by least utility lost per slot freed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from sglang_evicpress.core import Decision, Form, NodeStats, Option
from sglang_evicpress.profile import Curves
from sglang_evicpress.utility import PrefillCost, recompute_seconds, utility


class Point(NamedTuple):
    """A state of a node: slots held, utility, and the option that leads there (None: as it is)."""

    num_slots: int
    utility: float
    option: Option | None = None


def next_hull_point(current: Point, points: Iterable[Point]) -> Point | None:
    """The neighbour of ``current`` towards fewer slots on the upper convex hull of (slots, utility).

    Walking on from point to point visits exactly the states that the linear relaxation of the knapsack can
    use: a point dominated by another (no more slots and no less utility) or lying below a line between two
    others is passed over. A point that loses nothing against ``current`` is taken at once, the best one.
    Points on one line are all visited, so that as little as possible is freed at a time; of equal points the
    first given counts. None when nothing holds fewer slots.
    """
    smaller = [point for point in points if point.num_slots < current.num_slots]
    if not smaller:
        return None
    best = max(smaller, key=lambda point: (point.utility, -point.num_slots))
    if best.utility >= current.utility:
        return best
    return min(smaller, key=lambda point: (_slope(current, point), -point.num_slots))


def _slope(start: Point, end: Point) -> float:
    return (start.utility - end.utility) / (start.num_slots - end.num_slots)


@dataclass(slots=True)
class _Walk:
    """How far a plan has come with one node."""

    node: NodeStats
    start: Point
    compressed: list[Point]
    dropped: Point | None
    num_children: int
    current: Point
    step: Point | None = None
    version: int = 0

    def look_ahead(self) -> tuple[float, int, int, int] | None:
        """Find the next step; its place in the heap or None. Earlier places of the node are outdated."""
        self.version += 1
        if self.num_children == 0 and self.dropped is not None:
            self.step = next_hull_point(self.current, [*self.compressed, self.dropped])
            if self.step is None and self.current.num_slots == 0 and self.current is not self.dropped:
                # A node of holes only frees nothing, but its parent cannot go before it: the last resort.
                self.step = self.dropped
                return (math.inf, self.node.last_use, self.node.id, self.version)
        else:
            self.step = next_hull_point(self.current, self.compressed)
        if self.step is None:
            return None
        return (_slope(self.current, self.step), self.node.last_use, self.node.id, self.version)


@dataclass(frozen=True, slots=True)
class EvicPressPolicy:
    """EvicPress section 4.4 and appendix A over the device tier: shrink or drop whatever hurts least.

    The paper: choosing one configuration per context for the most utility is a multiple-choice knapsack,
    solved by repeating the change of least utility drop until the tier fits (configurations that save nothing
    are left out). The printed algorithm compares drops as such; we compare them per slot freed and along each
    node's upper convex hull, the textbook greedy (Kellerer, Pferschy, Pisinger, Knapsack Problems, chapter on
    the multiple-choice knapsack; AdaptCache section 2), which is the optimum of the linear relaxation up to
    its last step. (The algorithm as printed assigns S where it must subtract what was freed.)

    ``alpha`` weighs quality against seconds, ``curves`` give the quality of forms, ``prefill`` the delay of
    drop. Steps of equal loss per slot are taken by ``last_use``, then id. Raises ValueError if alpha is
    negative or not finite.
    """

    alpha: float
    curves: Curves
    prefill: PrefillCost
    name: ClassVar[str] = "evicpress"
    compresses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha >= 0.0):
            raise ValueError(f"alpha is {self.alpha!r}: expected a finite number, 0 or more")

    def plan(self, nodes: Sequence[NodeStats], demand_slots: int) -> list[Decision]:
        if demand_slots <= 0:
            return []
        quality = _Memo(self.curves.quality)
        walks = {node.id: self._walk(node, quality) for node in nodes if node.options}
        heap = [place for walk in walks.values() if (place := walk.look_ahead()) is not None]
        heapq.heapify(heap)
        moved: dict[int, _Walk] = {}  # in order of each node's last step
        freed_slots = 0
        while heap and freed_slots < demand_slots:
            _, _, node_id, version = heapq.heappop(heap)
            walk = walks[node_id]
            if walk.step is None or walk.version != version:
                continue
            freed_slots += walk.current.num_slots - walk.step.num_slots
            walk.current = walk.step
            moved.pop(node_id, None)
            moved[node_id] = walk
            changed: _Walk | None = walk
            if walk.current is walk.dropped:
                changed = walks.get(walk.node.parent_id) if walk.node.parent_id is not None else None
                if changed is not None:
                    changed.num_children -= 1
            if changed is not None and (place := changed.look_ahead()) is not None:
                heapq.heappush(heap, place)
        return _decisions(list(moved.values()))

    def _walk(self, node: NodeStats, quality: _Memo) -> _Walk:
        start = Point(node.num_slots, utility(node.weight, self.alpha, quality[node.form], 0.0))
        compressed: list[Point] = []
        dropped: Point | None = None
        for option in node.options:
            if option.form is None:
                delay_s = recompute_seconds(node.num_tokens, node.depth_tokens, self.prefill)
                dropped = Point(0, utility(node.weight, self.alpha, 1.0, delay_s), option)
            elif option.num_slots < node.num_slots:
                held = utility(node.weight, self.alpha, quality[option.form], 0.0)
                compressed.append(Point(option.num_slots, held, option))
        return _Walk(node, start, compressed, dropped, node.num_children, start)


@dataclass(slots=True)
class _Memo:
    """Quality by form, read once per plan: there are few forms and many nodes."""

    read: Callable[[Form], float]
    known: dict[Form, float] = field(default_factory=dict)

    def __getitem__(self, form: Form) -> float:
        found = self.known.get(form)
        if found is None:
            found = self.known[form] = self.read(form)
        return found


def _decisions(moved: list[_Walk]) -> list[Decision]:
    """One decision per moved node; a drop that frees nothing stays only if its parent is dropped too."""
    kept: list[Decision] = []
    dropped_ids: set[int] = set()
    for walk in reversed(moved):  # parents before children
        option = walk.current.option
        freed_slots = walk.start.num_slots - walk.current.num_slots
        if option is None or (freed_slots == 0 and walk.node.parent_id not in dropped_ids):
            continue
        if option.form is None:
            dropped_ids.add(walk.node.id)
        loss = walk.start.utility - walk.current.utility
        what = "drop" if option.form is None else str(option.form)
        verb = "gains" if loss < 0 else "loses"
        reason = f"{what}: {verb} {abs(loss):.4g} over {freed_slots} slots"
        kept.append(Decision(walk.node.id, option, freed_slots, loss, reason))
    kept.reverse()
    return kept
