"""The parts of the cache: what knows the tree, what keeps KV in the tiers, and what decides and serves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.controller.controller import ASKED, IDLE, Controller
from sglang_evicpress.introspect.served import FirstTokenTimes
from sglang_evicpress.patches.cache.admission import Admission
from sglang_evicpress.patches.cache.eviction import Eviction
from sglang_evicpress.patches.cache.late_checkpoints import LateCheckpoints
from sglang_evicpress.patches.cache.moves import NodeMoves
from sglang_evicpress.patches.cache.outside import Later, Outside, Pool
from sglang_evicpress.patches.cache.policy_view import PolicyView
from sglang_evicpress.patches.cache.prefix_views import PrefixViews
from sglang_evicpress.patches.cache.quality_control import QualityControl
from sglang_evicpress.patches.cache.recomputation import Recomputation
from sglang_evicpress.patches.cache.served_hits import ServedHits
from sglang_evicpress.patches.cache.served_kv import note_served_kv
from sglang_evicpress.patches.cache.slot_checks import SlotChecks
from sglang_evicpress.patches.cache.tenant_limits import TenantLimits
from sglang_evicpress.patches.cache.tier_parts import TierParts
from sglang_evicpress.patches.cache.tree_parts import TreeParts
from sglang_evicpress.patches.profiling.background_requests import BackgroundRequests
from sglang_evicpress.patches.profiling.shadows import Shadows
from sglang_evicpress.patches.scheduler.first_tokens import FirstTokenWatch
from sglang_evicpress.patches.scheduler.hooks import is_first_come_first_served
from sglang_evicpress.patches.scheduler.prefill_times import note_not_loaded
from sglang_evicpress.patches.tiers.admin import TierAdmin
from sglang_evicpress.patches.tiers.background import BackgroundDemotion
from sglang_evicpress.patches.tiers.idle_compression import IdleCompression
from sglang_evicpress.patches.tiers.idle_promotion import IdlePromotion
from sglang_evicpress.patches.tiers.report import TierReport
from sglang_evicpress.patches.tiers.rounds import TierRounds
from sglang_evicpress.patches.tiers.shutdown import TierShutdown
from sglang_evicpress.patches.tiers.ssd_attachment import SsdAttachment
from sglang_evicpress.patches.tiers.weights import Weights
from sglang_evicpress.patches.tree.changes import Signal
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.types import Node, Request

MOST_PUT_OFF = 8
"""Rounds for which a token waits, one after the other, of which one is not free of other work."""

MANY_NODES = 1024
"""Nodes from which on each kind of work has rounds of its own, as all together take 2 ms: to let nodes grow older, to
work out their steps, to learn costs, and to make room, which requests wait for: half of them, and those put off."""

ROOM_S, ROOM_OF_MANY_S = 0.8e-3, 0.4e-3
"""Time of a round after which what is left of making room waits for the next one; and with many nodes."""

_GROWTH, _STEPS, _LEARNING, _ROOM = range(4)
_TURNS = (_ROOM, _GROWTH, _ROOM, _STEPS, _ROOM, _LEARNING)
_LATE_TURNS = (_GROWTH, _STEPS)
"""Of rounds that are not put off although a first token waits: those that are put off make room, too."""


class Parts:
    """All of them, each made after those that it is given."""

    def __init__(
        self,
        nodes: Mapping[int, Node],
        allocator: Pool,
        page_size: int,
        config: EvicPressConfig,
        compressor: Compressor,
        identity: bytes,
        outside: Outside,
        seed: bytes,
    ) -> None:
        later = Later(
            lower_copies_of=lambda: self.tiers.placement.lower_copies_of,
            stats_of=lambda node: self.view.stats_of(node),
            note_drop=lambda node, cause, number: self.recomputation.note_drop(node, cause, number),
            free_bytes=lambda tier, num_bytes: self.controller.free_bytes(tier, num_bytes),
            make_room=lambda num_slots: self.eviction.make_room(num_slots),
        )
        slot_bytes = compressor.slot_bytes
        tree = self.tree = TreeParts(nodes, allocator, page_size, config, compressor, identity, outside, later)
        self.round_begun = Signal[[]]()
        self._nodes = nodes
        self._num_put_off = 0
        self._turn = _ROOM
        self._turns, self._late_turns = itertools.cycle(_TURNS), itertools.cycle(_LATE_TURNS)
        self.late_checkpoints = LateCheckpoints(outside.tree.keep_running)
        tiers = self.tiers = TierParts(tree, nodes, allocator, page_size, config, compressor, outside, later)
        self.idle_promotion = IdlePromotion(
            tree.storage,
            allocator,
            tree.policy,
            tiers.promotion,
            tiers.host_room.room,
            tiers.holds.node_ids,
            lambda decisions: self.controller.execute(decisions, occasion=IDLE),
            slot_bytes,
        )
        self.view = PolicyView(
            tree.menu,
            config.min_compress_tokens,
            tree.policy,
            tree.quality,
            tiers.gpu_ops,
            tiers.placement.lower_copies_of,
            lambda node: self.quality_control.least_predicted(node.key.extra_key),
        )
        self.moves = NodeMoves(
            nodes,
            tiers.gpu_ops,
            tiers.host_compression,
            tiers.ssd_compression,
            tiers.removal,
            tiers.demotion,
            tiers.promotion,
            tree.aside,
            tree.ledger,
            tree.terms,
            self.view.cause_of_drop,
            tree.num_failed,
        )
        self.idle_compression = IdleCompression(
            nodes,
            tree.storage,
            tiers.ssd_compression,
            tiers.ssd_io,
            self.view.plan_rewrites,
            tiers.host_room.room,
            tiers.holds.node_ids,
            lambda decisions: self.controller.execute(decisions, occasion=IDLE),
        )
        self.controller = Controller(self.moves, tree.policy, tree.terms, tree.num_failed)
        tenant_limits = TenantLimits(
            nodes,
            tree.policy.tenant_plans,
            self.controller,
            tiers.host_room.room,
            tree.background_clock.mark_dirty,
        )
        self.eviction = Eviction(
            allocator,
            tree.ledger,
            self.controller,
            tiers.host_room.room,
            tiers.placement.lower_copies_of,
            tree.eviction_log,
            costs=lambda: tree.terms.costs,
            observe_copies=tree.terms.observe_copies,
            bounded=tree.policy.bounded,
            mark_dirty=tree.background_clock.mark_dirty,
            num_running=outside.num_running,
            release_from_tail=tiers.prefetches.release_from_tail,
            release_shadows=lambda: self.shadows.release_shadows(),
            return_aside=lambda: compressor.is_alone and tree.aside.return_all(),
            slot_bytes=slot_bytes,
            has_tiers=config.has_tiers,
        )
        background_requests: list[Request] = []
        self.shadows = Shadows(
            outside.tree,
            tree.terms,
            tree.policy.census,
            tiers.gpu_ops,
            tree.menu,
            tree.ledger,
            compressor,
            tree.quality,
            tree.adapters.adapter_of,
            tree.changes.changed,
            tiers.removal.drop,
            tiers.fill_replace.replace,
            tiers.loads.join_all,
            self.eviction.free_slots,
            background_requests,
            seed,
        )
        self.background = BackgroundRequests(
            outside.tree, tree.terms, self.shadows, tiers.prefetches.by_request, background_requests
        )
        self.quality_control = QualityControl(
            config.target_quality, nodes, tree.terms, tree.policy, tree.quality.shares_of, tree.floors
        )
        self.recomputation = Recomputation(
            outside.tree,
            tiers.prefetches.by_request,
            tiers.load_terms.pieces,
            tree.terms,
            tiers.host_room.room,
            self.controller.journal.regret,
            note_not_loaded,
            slot_bytes=slot_bytes,
            page_size=page_size,
            min_match_kept=config.min_match_kept,
        )
        self.served = ServedHits(tree.terms)
        self.first_tokens = FirstTokenWatch(FirstTokenTimes())
        self.admission = Admission(
            outside.tree,
            tiers.prefetches,
            tiers.prefetcher,
            self.background,
            tree.queued_hits,
            tree.terms,
            tree.adapters.note_adapter,
            self.eviction.has_room,
            lambda: tiers.ssd_io.is_freeing_host,
            allocator.available_size,
            is_first_come_first_served,
            tree.storage.counts,
            tree.storage.now_s,
            has_host=tree.storage.has_host,
            page_size=page_size,
            most_new_tokens=CLIP_MAX_NEW_TOKENS,
        )
        self.views = PrefixViews(torch.device(allocator.device), tree.num_failed)
        self.background_demotion = BackgroundDemotion(
            nodes,
            allocator,
            tree.ledger,
            self.controller,
            tree.storage,
            tree.adapters,
            tiers.placement,
            tiers.host_room,
            tree.policy,
            tiers.backup,
            tiers.host_compression,
            tiers.ssd_io,
            config,
            costs=lambda: tree.terms.costs,
            num_slots_needed=lambda: tiers.prefetches.num_slots_needed,
            asked_bytes=lambda: tiers.host_room.asked_bytes,
            mark_dirty=tree.background_clock.mark_dirty,
            is_late=self._is_late,
            ranks=tree.ranks,
            slot_bytes=slot_bytes,
        )
        self.slot_checks = SlotChecks(
            config.slot_checks,
            0,
            (*compressor.k_buffers, *compressor.v_buffers),
            tree.storage,
            tiers.removal.drop,
        )
        self.rounds = TierRounds(
            tree.storage,
            tree.background_clock,
            (self.idle_promotion, self.idle_compression, tiers.external_writes),
            first=(lambda: tiers.loads.start(None), tiers.ssd_io.begin_round, self._return_due),
            keep_room=self.background_demotion.keep_room,
            last=self._end_round,
        )
        self.ssd_attachment = SsdAttachment(
            nodes,
            allocator,
            tree.storage,
            tree.adapters,
            tiers.placement,
            tiers.removal,
            self.rounds,
            config,
            tree.storage.ssd_key,
            tree.policy.rebuild,
        )
        self.weights = Weights(
            tree.storage,
            lambda: tiers.loads.unfinished,
            (self.shadows.release_shadows, tree.quality.identify_profiles, self.ssd_attachment.model_changed),
        )
        report = TierReport(
            allocator,
            tree.storage,
            tiers.host_room,
            tree.policy,
            transfer_costs=lambda: tree.terms.cost_model.costs.load,
            num_prefetching=lambda: tiers.prefetches.num_waiting,
            num_redundant=lambda: tiers.placement.num_spare,
            num_set_apart=lambda: tiers.late_loads.num_slots,
            slot_bytes=slot_bytes,
        )
        self.admin = TierAdmin(
            nodes,
            tree.storage,
            tiers.removal,
            lambda decisions: self.controller.execute(decisions, occasion=ASKED),
            tiers.holds,
            self.rounds,
            self.ssd_attachment,
            report.describe_tiers,
            self.shadows.release_shadows,
            tree.menu,
        )
        self.shutdown = TierShutdown(
            outside.root_of,
            nodes,
            tree.storage,
            tree.adapters,
            tiers.backup,
            self.rounds,
            self.ssd_attachment.close,
            self._part,
            costs=lambda: tree.terms.costs,
            join_loads=tiers.loads.join_all,
            release_shadows=self.shadows.release_shadows,
            slot_bytes=slot_bytes,
        )
        self._connect()
        if tree.policy.tenant_plans.limits:
            self.round_begun.subscribe(tenant_limits.enforce)

    def begin_round(self, *, delays_token: bool, is_full: bool = False) -> bool:
        """Some of what is to be done at many nodes; in a later round where a first token waits for this one, or where
        there are many nodes and other work took its time (``is_full``). True where the round has time to learn."""
        self.tree.background_clock.begin_round()
        if is_full and self._takes_turns and self.tree.ranks.is_alone:  # each rank has other work of its own
            self.tree.background_clock.is_full = True
            return False
        self._num_put_off = self._num_put_off + 1 if delays_token else 0
        if self._num_put_off % MOST_PUT_OFF == 0:
            self.round_begun()
        return self._turn == _LEARNING or not self._takes_turns

    def _visit_nodes(self) -> None:
        """Let nodes grow older and work out their steps; where there are many, in turn with making room, which is not
        put off with them."""
        queued_hits, policy = self.tree.queued_hits, self.tree.policy
        if not self._takes_turns:
            queued_hits.grow_older()
            policy.advance()
            return
        self._turn = next(self._late_turns if self._num_put_off else self._turns)
        self.tree.background_clock.is_full = self._turn != _ROOM
        if self._turn == _GROWTH:
            queued_hits.grow_older()
        elif self._turn != _ROOM:
            policy.advance()

    @property
    def _takes_turns(self) -> bool:
        return len(self._nodes) >= MANY_NODES

    def _is_late(self) -> bool:
        return self.tree.background_clock.spent_s() > (ROOM_OF_MANY_S if self._takes_turns else ROOM_S)

    def _return_due(self) -> None:
        """Not by the stamped clock, which stands still while no request comes."""
        if self.tree.without_room:
            self.tree.without_room.return_due(self.tree.storage.now_s())

    def _end_round(self) -> None:
        self.tiers.external_reads.advance()
        self.tiers.prefetcher.advance()
        self.tiers.external_writes.advance()
        self.tiers.external_checks.advance()

    def _part(self) -> None:
        """The server ends: where there are several ranks, this one goes on alone, and plans nothing more."""
        self.rounds.is_ending = not self.tree.ranks.is_alone
        self.tree.ranks.part()

    def _connect(self) -> None:
        """Let each part know of what the others signal."""
        tree, tiers = self.tree, self.tiers
        changes, terms = tree.changes, tree.terms
        changes.changed.subscribe(
            tiers.placement.note_copies,
            tree.policy.on_node_changed,
            tiers.external_writes.note,
            tiers.external_checks.note,
        )
        changes.left_gpu.subscribe(tiers.backup.backup_parent)
        changes.split.subscribe(
            tiers.placement.split_copies,
            tiers.prefetches.split,
            lambda upper, lower: tiers.holds.split(upper.id, lower.id),
            tree.queued_hits.split,
            tree.quality.split_profiles,
            tree.queries.split,
        )
        changes.deleted.subscribe(
            tree.policy.on_node_deleted,
            tree.aside.forget,
            tree.without_room.forget,
            tiers.placement.forget,
            tree.queued_hits.forget,
            tree.quality.forget,
            tree.queries.drop,
            tiers.external_writes.forget,
            tiers.external_checks.forget,
            self.slot_checks.forget,
        )
        changes.flushed.subscribe(
            tree.aside.clear,
            tree.without_room.clear,
            tree.ledger.clear,
            tree.policy.clear,
            tree.queries.clear,
            tree.queued_hits.clear,
            tree.quality.clear,
            tiers.external_checks.clear,
            self.slot_checks.clear,
        )
        terms.advanced.subscribe(self.moves.retry_failed, tree.quality.refresh_default, self.shadows.expire_shadows)
        self.round_begun.subscribe(self.quality_control.follow_clock, self._visit_nodes, tree.quality.advance)
        terms.costs_changed.subscribe(tree.policy.refresh)
        tree.quality.judged.subscribe(self.quality_control.note_judged)
        self.views.admitted.subscribe(
            tree.quality.note_question,
            self.quality_control.note_admitted,
            note_served_kv,
            tree.queued_hits.on_prefill,
            self.recomputation.count_admitted,
            self.served.count_admitted,
        )
