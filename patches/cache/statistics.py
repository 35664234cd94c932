"""Counters and sizes of the whole cache: the answer to ``/evicpress/stats``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.controller.journal import Journal
from sglang_evicpress.introspect.census import Census
from sglang_evicpress.introspect.recomputed import Recomputed
from sglang_evicpress.patches.cache.integrity import RunningScheduler, in_flight
from sglang_evicpress.patches.scheduler.queue_limit import FirstTokens
from sglang_evicpress.patches.tree.types import Allocator
from sglang_evicpress.policy.cost_model import CostModel, CostSnapshot, PrefillCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner
from sglang_evicpress.policy.reuse import ReuseClock
from sglang_evicpress.policy.turns import Turns
from sglang_evicpress.threads import WatchedThread
from sglang_evicpress.tiers.jobs import Workers
from sglang_evicpress.tiers.ssd.tier import SsdTier


class SeenPrefills(Protocol):
    """Prefills that were timed."""

    num_observed: int
    not_loaded_s: float


class WaitingHits(Protocol):
    """Hits that waiting requests are expected to be."""

    def __len__(self) -> int:
        """Requests."""

    @property
    def num_nodes(self) -> int:
        """Nodes, each as often as it is to be hit."""


class PolicyFigures(Protocol):
    """Figures that the policy goes by."""

    now_s: float
    planner: Planner
    menu: Menu
    clock: ReuseClock
    costs: CostSnapshot
    cost_model: CostModel
    recompute_weight: float
    turns: Turns
    num_refused: int
    first_tokens: FirstTokens | None


class SlotFigures(Protocol):
    """Slots of the GPU, by who holds them."""

    page_size: int
    census: Census
    token_to_kv_pool_allocator: Allocator

    @property
    def num_shadow_slots(self) -> int:
        """Slots that nodes of shadows hold."""

    @property
    def scheduler(self) -> RunningScheduler | None:
        """None until it is complete."""


class HeldSlots(Protocol):
    """Slots that nodes hold."""

    evictable: int
    protected: int


class ControllerFigures(Protocol):
    """Decisions that were carried out."""

    journal: Journal
    num_compressed: Counter[str]
    num_demoted: Counter[str]
    num_failed: Counter[str]
    num_dropped: int
    dropped_tokens: int
    freed_slots: int


class RoundFigures(Protocol):
    """Admissions and evictions, and the threads that help."""

    recomputed: Recomputed
    workers: dict[str, Workers]
    ssd: SsdTier | None

    def describe_evictions(self) -> dict[str, object]:
        """By reason."""


class Statistics:
    """Reader of all counters."""

    def __init__(
        self,
        config: EvicPressConfig,
        policy: PolicyFigures,
        prefill_times: SeenPrefills,
        queued_hits: WaitingHits,
        slots: SlotFigures,
        held: HeldSlots,
        controller: ControllerFigures,
        rounds: RoundFigures,
    ) -> None:
        self._config = config
        self._policy = policy
        self._prefill_times = prefill_times
        self._hits_by_request = queued_hits
        self._slots = slots
        self._held = held
        self._controller = controller
        self._rounds = rounds

    def describe_stats(self) -> dict[str, object]:
        allocator = self._slots.token_to_kv_pool_allocator
        census, controller = self._slots.census, self._controller
        first_tokens = self._policy.first_tokens
        num_waiting = len(self._hits_by_request)  # one for each user's request in the queue
        return {
            "policy": self._config.policy,
            "alpha": self._config.alpha,
            "half_life_s": self._policy.clock.half_life_s,
            "half_life_is_learned": self._policy.clock.is_learned,
            "forms": [str(form) for form in self._policy.menu.forms[1:]],
            "now_s": self._policy.now_s,
            "costs": {
                "in_use": described_cost(self._policy.costs.prefill),
                "learned": described_cost(self._policy.cost_model.costs.prefill),
                "num_observations": self._prefill_times.num_observed,
                "recompute_weight": round(self._policy.recompute_weight, 3),
            },
            "waiting": {"requests": num_waiting, "queued_hit_nodes": self._hits_by_request.num_nodes},
            "queue": {
                "expected_wait_s": self._policy.turns.wait_s(
                    len(self._hits_by_request)
                ),  # one queued hit per user's request that waits
                "margin_s": 0.0 if first_tokens is None else first_tokens.margin.seconds,
                "admitted_per_s": self._policy.turns.rate,
                "refused": self._policy.num_refused,
            },
            "page_size": self._slots.page_size,
            "total_slots": allocator.size,
            "free_slots": allocator.available_size(),
            "evictable_slots": self._held.evictable,
            "protected_slots": self._held.protected,
            "in_flight_slots": sum(held for _, held in in_flight(self._slots.scheduler, self._slots.page_size)),
            "shadow_slots": self._slots.num_shadow_slots,
            "num_nodes": census.num_nodes,
            "cached_tokens": census.num_tokens,
            "cached_slots": census.num_slots,
            "resident_forms": census.by_form(),
            "decisions": {
                "compressed": dict(controller.num_compressed),
                "dropped": controller.num_dropped,
                "demoted": dict(controller.num_demoted),
                "dropped_tokens": controller.dropped_tokens,
                "freed_slots": controller.freed_slots,
                "failed": dict(controller.num_failed),
            },
            "admission": self._rounds.recomputed.describe(self._prefill_times.not_loaded_s),
            "drops": self._rounds.recomputed.describe_drops(),
            "evictions": self._rounds.describe_evictions(),
            "utility_lost_s": controller.journal.lost if self._policy.planner.has_utility else None,
            "threads": [thread.describe() for thread in self.threads()],
        }

    def threads(self) -> Iterator[WatchedThread]:
        """Every thread that works for the cache in this process."""
        for workers in self._rounds.workers.values():
            yield from workers.threads
        if self._rounds.ssd is not None:
            yield from self._rounds.ssd.store.threads


def described_cost(cost: PrefillCost) -> dict[str, object]:
    """Figures of a law of prefill times."""
    return {
        "prefill_fixed_s": cost.fixed_s,
        "prefill_per_token_s": cost.per_token_s,
        "prefill_per_pair_s": cost.per_pair_s,
    }
