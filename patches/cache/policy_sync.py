"""Keeping the policy's index in step with the tree: every change is told when it happens, none costs a walk."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.controller.controller import NOT_MEASURED
from sglang_evicpress.core import NodeStats, Tier
from sglang_evicpress.introspect.census import Census
from sglang_evicpress.patches.cache.queued_hits import QueuedHits
from sglang_evicpress.patches.profiling.quality import Quality
from sglang_evicpress.patches.scheduler.queue_limit import FirstTokens
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node import (
    NodeKV,
    census_of,
    is_lossy,
    is_reserved,
    iter_nodes,
    servable_steps,
    size_of,
    start_of,
)
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.cost_model import CostModel, CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.reuse import ReuseClock
from sglang_evicpress.policy.turns import Turns
from sglang_evicpress.press import get_press

START_LOADS = {Tier.HOST: TransferCost(1e-3, 4e9), Tier.SSD: TransferCost(3e-3, 1e9)}
"""What loading is taken to cost before any was observed."""

FAR = 1.0  # twice or half of it: looked at ten times as soon
DRIFT = 0.1  # of a predicted duration: costs that differ less are not worth another look at every node
REFRESH_S = 10.0  # nor is it more often than this,
REFRESH_S_PER_NODE = 1e-3  # or than takes a hundredth of the time: each node costs some 10 us

DROP_WEIGHT = 2.0
"""How many times recomputing counts at least where there is a tier below the GPU: a drop is for good, while what lies
below can still be computed anew when that is sooner."""


class PolicySync:
    """The part of EvicPressCache that talks to the policy. Everything here runs on the scheduler thread.

    The logical time ``now_s`` is what rank 0 last stamped (``scheduler``), in seconds since its first stamp; it never
    goes back and is equal on every rank, as are the ``costs`` in use. ``cost_model`` is this rank's own.
    """

    def open_index(self: Any, config: EvicPressConfig) -> None:
        self.costs = CostSnapshot(
            PrefillCost(config.prefill_fixed_s, config.prefill_per_token_s, config.prefill_per_pair_s), START_LOADS, {}
        )
        self.cost_model = CostModel(self.costs)
        self.recompute_weight = DROP_WEIGHT if self.host is not None else 1.0  # as the policy has it
        self.clock = ReuseClock(config.half_life_s)
        self.now_s = 0.0
        self._first_stamp_s: float | None = None
        self._refreshed_s = -REFRESH_S
        self.queued_hits = QueuedHits(self._hit)
        self.turns, self.num_refused = Turns(), 0  # of the queue, which queue_limit.py watches
        self.first_tokens = None if config.max_queue_s is None else FirstTokens(config.max_queue_s)
        self.quality = Quality(self, self, self.compressor, config, self.menu.forms, self.changes.changed)
        self._blind = self.menu.everything  # the forms that can be made without queries
        for index, form in enumerate(self.menu.forms):
            if form.press is not None and get_press(form.press).needs_queries:
                self._blind &= ~(1 << index)
        self._windowed: dict[int, dict[int, Any]] = {}
        self.clear_index()

    def clear_index(self: Any) -> None:
        """An index without nodes."""
        self.renew_planner()
        self.census = Census()
        self._windowed.clear()
        self.queued_hits.clear()

    def renew_planner(self: Any) -> None:
        """A policy that knows no node yet, of the present menu."""
        config = self.config
        costs = self._told = self._weighed(self.costs, self.recompute_weight)
        self.planner = make_planner(
            config.policy, self.menu, alpha=config.alpha, costs=costs, mean_curve=self.quality.mean_curve
        )
        self.controller.planner = self.planner

    def rebuild_policy(self: Any) -> None:
        """A policy of the present menu that knows every node."""
        self.renew_planner()
        self.planner.add_all(self.stats_of(node) for node in iter_nodes(self.root_node))

    def tell_policy(self: Any, nodes: Iterable[Node]) -> None:
        """Show the policy nodes of which other quality is expected now."""
        for node in nodes:
            self.planner.add(self.stats_of(node))

    @property
    def num_shadow_slots(self: Any) -> int:
        return int(self.census.num_shadow_slots)

    # ---- what happens to nodes

    def on_node_changed(self: Any, node: Any) -> None:
        self.census.put(node.id, census_of(node))
        if not math.isfinite(node.kv.weight):  # no plan can be made with it
            self.controller.num_failed["note weight"] += 1
            node.kv.weight = 0.0
        self.planner.add(self.stats_of(node))
        self.mark_dirty()

    def on_node_split(self: Any, upper: Any, lower: Any) -> None:
        self.queued_hits.split(upper, lower)
        self.quality.split_profiles(upper, lower)
        if lower.kv.window is not None:
            self._windowed[lower.kv.window][upper.id] = upper
        self.changes.changed(upper)
        self.changes.changed(lower)

    def on_node_deleted(self: Any, node: Any) -> None:
        if node.id in self.planner.index.candidates:
            self.planner.remove(node.id)
        self.census.remove(node.id)
        self.aside.forget(node.id)
        self.placement.forget(node.id)
        self.queued_hits.forget(node)
        self.drop_window(node)

    def on_node_used(self: Any, node: Any) -> None:
        """The node was matched: its tick changed, not its weight."""
        kv = node.kv
        self.planner.touch(node.id, kv.weight, kv.num_hits, kv.last_use)

    def keep_window(self: Any, node: Any, key: int | None, lost: list[int]) -> None:
        """The node's queries are kept under ``key``; those of the ``lost`` keys had to make room."""
        node.kv.window = key
        if key is not None:
            self._windowed[key] = {node.id: node}
        for other in lost:
            for owner in list(self._windowed.get(other, {}).values()):
                self.drop_window(owner)
                self.changes.changed(owner)

    def drop_window(self: Any, node: Any) -> None:
        key, node.kv.window = node.kv.window, None
        if key is not None:
            owners = self._windowed[key]
            del owners[node.id]
            if not owners:
                del self._windowed[key]

    def stats_of(self: Any, node: Any) -> NodeStats:
        """The node as the policy sees it."""
        kv: NodeKV = node.kv
        start, slots, num_tokens, tier = start_of(node), size_of(node), len(node.key), tier_of(node)
        form, expectation = kv.form, self.quality.expectation_of(node)
        allowed_forms = 0
        # those that do not weigh quality compress on the GPU only, before anything goes down
        policy = self.planner.policy
        is_open = tier == Tier.GPU or (tier == Tier.HOST and policy.weighs_quality)
        if is_open and num_tokens >= self.config.min_compress_tokens and policy.compresses:
            allowed_forms = self.menu.smaller(form)
            if self.gpu_ops.window_of(node) is None:
                allowed_forms &= self._blind
            if policy.weighs_quality:
                allowed_forms &= expectation.known  # what nobody measured is not chosen
        return NodeStats(
            id=node.id,
            parent_id=None if node.parent is self.root_node else node.parent.id,
            tier=tier,
            form=form,
            num_tokens=num_tokens,
            num_bytes=slots * self.menu.slot_bytes,
            depth_tokens=start,
            quality=self.quality.quality_of(node),
            curve=expectation.vector,
            allowed_forms=allowed_forms,
            weight=kv.weight,
            num_hits=kv.num_hits,
            last_use=kv.last_use,
            sinks=self.gpu_ops.sinks_of(num_tokens, start),
            is_locked=node.lock_ref > 0 or is_reserved(node),
            exact_on=self.exact_tier_of(node),
            lower_copies=self.placement.lower_copies_of.get(node.id, ()),
        )

    def exact_tier_of(self: Any, node: Any) -> Tier | None:
        """The fastest tier below that holds the exact KV of a lossy node as well."""
        if not is_lossy(node):
            return None
        own_tier = tier_of(node)
        return min((tier for tier, copy in node.kv.copies.items() if tier > own_tier and copy.is_exact), default=None)

    def cause_of_drop(self: Any, node: Any) -> str | None:
        """Why a node can become nothing else, where that is that no form of it was measured."""
        could_shrink = (
            self.planner.policy.compresses and len(node.key) >= self.config.min_compress_tokens and not is_lossy(node)
        )
        if self.planner.policy.weighs_quality and could_shrink and not self.quality.expectation_of(node).known:
            return NOT_MEASURED
        return None

    def retry_set_aside(self: Any) -> None:
        """Plan again with nodes that were set aside for long enough, and free what could not be freed."""
        self.aside.return_due(self.now_s)
        for slots in self.ledger.take_unfreed():
            try:
                self.ledger.free_or_keep(slots)
            except Exception as error:
                if not self.is_alone:
                    raise
                self.controller.num_failed[f"free {type(error).__name__}"] += 1

    @property
    def num_failed_moves(self: Any) -> int:
        return sum(self.controller.num_failed.values())

    @property
    def is_alone(self: Any) -> bool:
        return bool(self.compressor.is_alone)

    # ---- hits

    def value_of_hit(self: Any) -> float:
        return self.clock.value_of_hit(self.now_s)

    def _hit(self: Any, node: Any, value: float, num_hits: int) -> None:
        kv = node.kv
        kv.weight = max(0.0, kv.weight + value)
        kv.num_hits += num_hits
        if num_hits > 0:
            kv.last_use_s = self.now_s
        self.planner.touch(node.id, kv.weight, kv.num_hits, kv.last_use)

    def on_queued(self: Any, req: Any) -> None:
        """A request has entered the waiting queue: what it would match now gets its hit. Splits and touches nothing."""
        self.adapters.note_adapter(req.lora_id)
        if is_shadow_name(req.extra_key):
            self.background.receive_background(req)
            return
        path: list[Any] = []
        if not self.disable:
            key = self.key_of_waiting(req)
            steps = self._steps(key)
            steps = steps[: servable_steps(steps, self.config.min_match_kept)]
            path = [node for node, _ in steps]
            if path and path[-1].lock_ref == 0 and not path[-1].kv.queued_hits:
                # What runs or waits is held for that: such a gap says nothing of how long to remember the others.
                gap_s = self.now_s - path[-1].kv.last_use_s
                self.clock.observe_reuse(gap_s, sum(matched for _, matched in steps))
        self.queued_hits.make(req, path, self.value_of_hit(), self.now_s)
        self.begin_prefetch(req)

    def on_prefill(self: Any, req: Any, path: list[Any], num_tokens: int) -> None:
        """A request runs on ``path``, which holds ``num_tokens``: every node of it has its hit now, once."""
        if is_shadow_name(req.extra_key):
            return
        gap_s = self.now_s - path[-1].kv.last_use_s if path else 0.0
        self.quality.note_question(req, path, num_tokens)
        was_queued = self.queued_hits.resolve(req, path, self.value_of_hit())
        if path and not was_queued:
            self.clock.observe_reuse(gap_s, num_tokens)

    # ---- time and costs

    def observe_load(self: Any, tier: Tier, num_bytes: int, seconds: float) -> None:
        """So many bytes were brought back from a tier; ranks learn of it by rank 0's next stamp."""
        if num_bytes > 0 and seconds > 0.0:
            self.cost_model.observe_load(tier, num_bytes, seconds)

    def _weighed(self: Any, costs: CostSnapshot, weight: float) -> CostSnapshot:
        """Costs as the policy sees them: a second of recomputing delays all who could run meanwhile."""
        return costs.of_a_part().with_recompute_weight(weight)

    def advance(self: Any, stamp_s: float, costs: CostSnapshot, congestion: float = 1.0) -> None:
        """Rank 0's clock shows ``stamp_s`` and it has seen these costs; called on every rank between two steps.
        ``congestion``: how many requests a second of computing delays there."""
        if self._first_stamp_s is None:
            self._first_stamp_s = stamp_s
        self.now_s = max(self.now_s, stamp_s - self._first_stamp_s)
        if self.clock.is_due(self.now_s):
            restate = self.clock.rebase(self.now_s)
            for node in self.nodes.values():
                node.kv.weight = restate(node.kv.weight, node.kv.last_use_s)
            self.queued_hits.restate(restate)
            self.planner.reweigh({node.id: node.kv.weight for node in self.nodes.values()})
        self.retry_set_aside()
        self.quality.refresh_default()
        self.controller.now_s = self.now_s
        self.controller.value_of_hit = self.value_of_hit()
        self._take_costs(costs, congestion)

    def _take_costs(self: Any, costs: CostSnapshot, congestion: float) -> None:
        """Tell the policy, where that changes a prediction enough and the last time is long enough ago."""
        pause_s = max(REFRESH_S, REFRESH_S_PER_NODE * len(self.nodes))
        since_s = self.now_s - self._refreshed_s
        if since_s < pause_s / 10:
            return
        weight = max(DROP_WEIGHT if self.host is not None else 1.0, congestion)
        weighed = self._weighed(costs, weight)
        tolerance = DRIFT if since_s >= pause_s else FAR  # loads that take twice as long as predicted come late
        if weighed.drifted_from(self._told, tolerance) or self._told.drifted_from(weighed, tolerance):
            self._refreshed_s = self.now_s
            self.costs, self.recompute_weight, self._told = costs, weight, weighed
            self.planner.refresh(weighed)
