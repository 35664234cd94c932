"""Time and costs that the policy goes by."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import replace

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tree.changes import Signal
from sglang_evicpress.policy.cost_model import CostModel, CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.reuse_tracker import ReuseTracker

START_LOADS = {
    Tier.HOST: TransferCost(1e-3, 4e9),
    Tier.SSD: TransferCost(3e-3, 1e9),
    Tier.EXTERNAL: TransferCost(10e-3, 1e9),
}
"""What loading is taken to cost before any was observed."""

AWAY = TransferCost(1e6, 1.0)
"""Of loading from an external store that is left alone: what is there counts for nothing."""

FAR = 1.0  # twice or half of it: looked at ten times as soon
DRIFT = 0.1  # of a predicted duration: costs that differ less are not worth a change, nor a look at every node
COMPARE_PAUSE_S = 1.0  # between two comparisons of the costs in use with those learned, which take 0.1 ms
COPIES_WARM, COPIES_SEEN, COPIES_PER_LOOK = 2, 16, 8
"""Evictions that copied: the first are slower than others, and of the many after the next each of so many is learned
from."""

LOADS_SEEN, LOAD_PAUSE_S = 64, 0.25
"""Loads of a codec from a tier that are each learned from, and the least seconds between those that are after them: it
takes 0.4 ms, in a round that others wait for."""

REFRESH_S = 10.0  # nor is it more often than this,
REFRESH_S_PER_NODE = 3e-3  # or than takes a hundredth of the time: each node costs some 30 us on a busy server

DROP_WEIGHT = 2.0
"""How many times recomputing counts at least where there is a tier below the GPU: a drop is for good, while what lies
below can still be computed anew when that is sooner."""


class PolicyTerms:
    """The logical time ``now_s`` is what rank 0 last stamped (``scheduler``), in seconds since its first stamp; it
    never goes back and is equal on every rank, as are the ``costs`` that loads go by and those of the policy, which is
    told of others less often where there are many nodes: ``policy_costs``, and ``weighed``, which are these with
    ``recompute_weight`` and ``read_weight``. ``cost_model`` is this rank's own.

    ``advanced`` tells that time goes on, ``costs_changed`` that the policy is to look at all ``nodes`` again.
    """

    def __init__(
        self,
        config: EvicPressConfig,
        nodes: Sized,
        *,
        has_host: bool,
        is_external_away: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes, self._is_external_away, self._clock = nodes, is_external_away, clock
        self.advanced = Signal[[]]()
        self.costs_changed = Signal[[CostSnapshot]]()
        self.reuse = ReuseTracker()
        self.now_s = 0.0
        self.costs = CostSnapshot(
            PrefillCost(config.prefill.fixed_s, config.prefill.per_token_s, config.prefill.per_pair_s), START_LOADS, {}
        )
        self.policy_costs = self.costs
        self.cost_model = CostModel(self.costs)
        self._num_copies_seen = 0
        self._num_loads_seen = Counter[tuple[Tier, str]]()
        self._load_learned_s = dict[tuple[Tier, str], float]()
        self._least_weight = self.recompute_weight = DROP_WEIGHT if has_host else 1.0
        self.read_weight = 1.0
        self.weighed = _weighed(self.costs, self.recompute_weight, self.read_weight, is_away=False)
        self._first_stamp_s: float | None = None
        self._refreshed_s = self._looked_s = self._compared_s = -REFRESH_S

    def value_of_hit(self) -> float:
        """Weight of a node that is expected to be used once, soon enough to be kept for that: uses per second."""
        return 1.0 / self.reuse.model.horizon_s

    def observe_load(self, tier: Tier, num_bytes: int, seconds: float, codec: str = "raw") -> None:
        """So many bytes, stored by a codec, were brought back from a tier; ranks learn of it by rank 0's next stamp."""
        if not (num_bytes > 0 and 0.0 < seconds < math.inf):
            return
        kind, now_s = (tier, codec), self._clock()
        self._num_loads_seen[kind] += 1
        since_s = now_s - self._load_learned_s.get(kind, -math.inf)
        if self._num_loads_seen[kind] <= LOADS_SEEN or since_s >= LOAD_PAUSE_S:
            self._load_learned_s[kind] = now_s
            self.cost_model.observe_load(tier, num_bytes, seconds, codec)

    def observe_copies(self, num_copies: int, num_bytes: int, seconds: float) -> None:
        """An eviction copied so many nodes to the host, of ``num_bytes`` together."""
        self._num_copies_seen += 1
        if self._num_copies_seen <= COPIES_WARM:
            return
        if self._num_copies_seen <= COPIES_SEEN or self._num_copies_seen % COPIES_PER_LOOK == 0:
            self.cost_model.observe_copy(num_copies, num_bytes, seconds)

    def advance(
        self, stamp_s: float, costs: CostSnapshot, congestion: float = 1.0, read_congestion: float = 1.0
    ) -> None:
        """Rank 0's clock shows ``stamp_s`` and it has seen these costs; called on every rank between two steps.
        ``congestion``: how many requests a second of computing delays there, ``read_congestion``: one of reading,
        which counts no more than one of computing: while others read, what lies below can be computed after all."""
        if self._first_stamp_s is None:
            self._first_stamp_s = stamp_s
        self.now_s = max(self.now_s, stamp_s - self._first_stamp_s)
        if costs.copy != self.costs.copy:  # no step of a node depends on it
            self.costs = replace(self.costs, copy=costs.copy)
        self.advanced()
        recompute_weight = max(self._least_weight, congestion)
        self._take(costs, recompute_weight, min(read_congestion, recompute_weight))

    def _take(self, costs: CostSnapshot, weight: float, read_weight: float) -> None:
        """Go by these costs where they predict enough otherwise; tell the policy, if it was told long enough ago."""
        if self.now_s - self._compared_s < COMPARE_PAUSE_S:
            return
        self._compared_s = self.now_s
        if _have_drifted(costs, self.costs, DRIFT):
            self.costs = costs
        pause_s = max(REFRESH_S, REFRESH_S_PER_NODE * len(self._nodes))
        if self.now_s - self._looked_s < pause_s / 10:
            return
        self._looked_s = self.now_s
        weighed = _weighed(costs, weight, read_weight, is_away=self._is_external_away())
        # loads that take twice as long as predicted come late
        if _have_drifted(weighed, self.weighed, DRIFT if self.now_s - self._refreshed_s >= pause_s else FAR):
            self._refreshed_s = self.now_s
            self.costs = self.policy_costs = costs
            self.weighed = weighed
            self.recompute_weight, self.read_weight = weight, read_weight
            self.costs_changed(weighed)


def _have_drifted(costs: CostSnapshot, known: CostSnapshot, tolerance: float) -> bool:
    return costs.drifted_from(known, tolerance) or known.drifted_from(costs, tolerance)


def _weighed(costs: CostSnapshot, weight: float, read_weight: float, *, is_away: bool) -> CostSnapshot:
    """Costs as the policy sees them: a second of recomputing delays all who could run meanwhile, one of reading all
    whose reads wait behind it."""
    weighed = costs.of_a_part().with_recompute_weight(weight).with_read_weight(read_weight)
    return replace(weighed, load={**weighed.load, Tier.EXTERNAL: AWAY}) if is_away else weighed
