"""Counters and sizes of the whole cache: the answer to ``/evicpress/stats``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.controller.journal import Journal
from sglang_evicpress.introspect.recomputed import Recomputed
from sglang_evicpress.introspect.served import FirstTokenTimes, ServedTokens
from sglang_evicpress.patches.cache.integrity import CheckedTree, PolicyInUse, in_flight, num_running
from sglang_evicpress.patches.scheduler.queue_limit import FirstTokens
from sglang_evicpress.patches.tiers.types import Slots, Tiers
from sglang_evicpress.policy.cost_model import CostModel, CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.reuse_tracker import ReuseTracker
from sglang_evicpress.policy.turns import Turns
from sglang_evicpress.threads import WatchedThread


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


class TermFigures(Protocol):
    """Time, and costs that loads and the policy go by."""

    now_s: float
    reuse: ReuseTracker
    costs: CostSnapshot
    policy_costs: CostSnapshot
    cost_model: CostModel
    recompute_weight: float
    read_weight: float

    def value_of_hit(self) -> float: ...


class QueueFigures(Protocol):
    """The queue of users' requests."""

    turns: Turns
    num_refused: int
    first_tokens: FirstTokens | None


class QualityFigures(Protocol):
    """Quality of what is served."""

    def describe(self) -> dict[str, object]: ...


class ControllerFigures(Protocol):
    """Decisions that were carried out."""

    journal: Journal
    num_decisions: Counter[tuple[str, str]]
    num_compressed: Counter[str]
    num_demoted: Counter[str]
    num_failed: Counter[str]
    num_dropped: int
    dropped_tokens: int
    freed_slots: int


@dataclass(eq=False, repr=False)
class Statistics:
    """Reader of all counters."""

    config: EvicPressConfig
    terms: TermFigures
    policy: PolicyInUse
    queue: QueueFigures
    prefill_times: SeenPrefills
    queued_hits: WaitingHits
    slots: CheckedTree
    held: Slots
    controller: ControllerFigures
    quality: QualityFigures
    recomputed: Recomputed
    served: ServedTokens
    first_token_times: FirstTokenTimes
    tiers: Tiers
    describe_evictions: Callable[[], dict[str, object]]

    def describe_stats(self) -> dict[str, object]:
        allocator = self.slots.token_to_kv_pool_allocator
        census, controller = self.policy.census, self.controller
        first_tokens = self.queue.first_tokens
        num_waiting = len(self.queued_hits)  # one for each user's request in the queue
        return {
            "policy": self.config.policy,
            "alpha": self.policy.planner.alpha,
            "quality": self.quality.describe(),
            "reuse": self.terms.reuse.describe(),
            "forms": [str(form) for form in self.policy.menu.forms[1:]],
            "layer_groups": list(self.policy.menu.groups.group_of) if self.policy.menu.groups.shares else [],
            "sinks": self.config.sinks,
            "host_gb": self.config.host_gb,
            "now_s": self.terms.now_s,
            "costs": {
                "in_use": described_cost(self.terms.policy_costs.prefill),
                "learned": described_cost(self.terms.cost_model.costs.prefill),
                "copy": _described_transfer(self.terms.costs.copy),
                "decode": {codec: _described_transfer(cost) for codec, cost in self.terms.costs.decode.items()},
                "num_observations": self.prefill_times.num_observed,
                "recompute_weight": round(self.terms.recompute_weight, 3),
                "read_weight": round(self.terms.read_weight, 3),
            },
            "running": {"requests": num_running(self.slots.scheduler)},
            "waiting": {"requests": num_waiting, "queued_hit_nodes": self.queued_hits.num_nodes},
            "queue": {
                "expected_wait_s": self.queue.turns.wait_s(num_waiting),
                "margin_s": 0.0 if first_tokens is None else first_tokens.margin.seconds,
                "admitted_per_s": self.queue.turns.rate,
                "refused": self.queue.num_refused,
            },
            "page_size": self.slots.page_size,
            "total_slots": allocator.size,
            "free_slots": allocator.available_size(),
            "evictable_slots": self.held.evictable,
            "protected_slots": self.held.protected,
            "in_flight_slots": sum(held for _, held in in_flight(self.slots.scheduler, self.slots.page_size)),
            "shadow_slots": census.num_shadow_slots,
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
                "by_reason": _nested(controller.num_decisions),
            },
            "admission": self.recomputed.describe(self.prefill_times.not_loaded_s),
            "drops": self.recomputed.describe_drops(),
            "served": self.served.describe(),
            "first_tokens": self.first_token_times.describe(),
            "evictions": self.describe_evictions(),
            "tenants": self.policy.tenant_plans.describe(),
            "utility_lost_s": controller.journal.lost if self.policy.planner.has_utility else None,
            "threads": [thread.describe() for thread in self.threads()],
        }

    def threads(self) -> Iterator[WatchedThread]:
        """Every thread that works for the cache in this process."""
        for workers in self.tiers.workers.values():
            yield from workers.threads
        if self.tiers.ssd is not None:
            yield from self.tiers.ssd.store.threads


def _nested(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Counts by the first name, then by the second."""
    nested = dict[str, dict[str, int]]()
    for (kind, reason), count in sorted(counts.items()):
        nested.setdefault(kind, {})[reason] = count
    return nested


def _described_transfer(cost: TransferCost) -> dict[str, object]:
    return {"fixed_s": cost.fixed_s, "bytes_per_s": cost.bytes_per_s}


def described_cost(cost: PrefillCost) -> dict[str, object]:
    """Figures of a law of prefill times."""
    return {
        "prefill_fixed_s": cost.fixed_s,
        "prefill_per_token_s": cost.per_token_s,
        "prefill_per_pair_s": cost.per_pair_s,
    }
