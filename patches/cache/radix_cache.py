"""EvicPressCache: SGLang's radix cache whose nodes can be compressed where they are. Backend name ``evicpress``.

Logical things stay logical (keys, matches, prefix lengths): a dropped token is a hole, entry 0 of ``node.value``, and
only there. Sizes, locks and frees count physical slots. A running request never changes its KV view: what it computed
itself stays its own unless the tree holds the very same exact KV.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sglang_evicpress.asked_retention import retention_s
from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.patches.attention import group_rows
from sglang_evicpress.patches.attention.prompt_queries import PromptQueries
from sglang_evicpress.patches.cache.inspection import TreeInspection
from sglang_evicpress.patches.cache.inspector import Inspector
from sglang_evicpress.patches.cache.integrity import Integrity, num_running
from sglang_evicpress.patches.cache.kv_events import KvEvents
from sglang_evicpress.patches.cache.metrics import metrics_of
from sglang_evicpress.patches.cache.outside import Outside
from sglang_evicpress.patches.cache.parts import Parts
from sglang_evicpress.patches.cache.statistics import Statistics
from sglang_evicpress.patches.compat.release import REQUEST_KV
from sglang_evicpress.patches.decode_budget.budgets import DecodeBudgets
from sglang_evicpress.patches.decode_budget.inspection import RequestsInspection
from sglang_evicpress.patches.decode_budget.passes import DecodePasses
from sglang_evicpress.patches.decode_budget.records import BudgetRecords
from sglang_evicpress.patches.scheduler import hooks
from sglang_evicpress.patches.scheduler.prefill_times import PrefillTimes
from sglang_evicpress.patches.tiers.placement import NOWHERE
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.exact_requests import usable_steps
from sglang_evicpress.patches.tree.model_identity import ModelIdentity
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node import (
    first_outside,
    holes_of,
    is_reserved,
    num_slots,
    path_to,
    servable_steps,
    steps_of,
    view_of_path,
)
from sglang_evicpress.patches.tree.node_kv import NodeKV
from sglang_evicpress.patches.unsupported import decode_settings
from sglang_evicpress.tiers.entry.copies import Copy
from sglang_evicpress.tiers.entry.identity import KEY_BYTES, MAX_TOKEN

logger = logging.getLogger(__name__)


class EvicPressCache(RadixCache):
    """See the module. Everything here runs on the scheduler thread."""

    def __init__(
        self,
        params: Any,
        config: EvicPressConfig,
        compressor: Compressor,
        identity: bytes = bytes(KEY_BYTES),
        seed: bytes = b"",
        hash_key: bytes = b"",
    ) -> None:
        self.config = config
        self.compressor = compressor
        self.nodes: dict[int, Any] = {}
        allocator, page_size = params.token_to_kv_pool_allocator, params.page_size
        outside = Outside(
            root_of=lambda: self.root_node,
            namespaces=lambda: (top.key.extra_key for top in self.root_node.children.values()),
            delete=self._delete_leaf,
            num_running=lambda: num_running(self.scheduler),
            tree=self,
        )
        parts = self.parts = Parts(self.nodes, allocator, page_size, config, compressor, identity, outside, seed)
        tree, tiers = parts.tree, parts.tiers
        self.changes, self.ledger, self.queue = tree.changes, tree.ledger, tree.queue
        self.queued_hits, self.terms = tree.queued_hits, tree.terms
        self.policy, self.quality = tree.policy, tree.quality
        self.placement, self.shadows, self.block_events = tiers.placement, parts.shadows, KvEvents(self)
        if params.enable_kv_cache_events:
            self.block_events.follow(tree.changes)
        self.background, self.prefill_times = parts.background, PrefillTimes(tree.terms.cost_model)
        self.views, self.late_checkpoints = parts.views, parts.late_checkpoints
        self.scheduler: Any = None
        self.name_profiles: Callable[[Any], bytes] = lambda tokenizer: bytes(KEY_BYTES)
        self.vocab_size, self._tick = MAX_TOKEN + 1, 0  # the model's, where it is known
        super().__init__(params)
        records, settings = BudgetRecords(self.device), decode_settings(config)
        passes = DecodePasses(self, compressor, records)
        self.decode_budgets = DecodeBudgets(
            self, compressor, passes.make_passes, records, settings, config.decode.client_budgets, tree.floors
        )
        execute = parts.controller.execute_asked
        reached = tiers.gpu_ops, parts.view.options_of, execute, allocator, parts.eviction.free_slots
        policy = tree.policy, tree.terms, parts.controller.journal
        inspection = TreeInspection(self, *reached, tiers.holds, *policy, hash_key or secrets.token_bytes(32))
        figures = tree.terms, tree.policy, tree.queue, self.prefill_times, tree.queued_hits, self, tree.ledger
        counted = parts.controller, parts.quality_control, parts.recomputation.counts
        served = parts.served.counts, parts.first_tokens.times, tree.storage
        checked = tree.ledger, tree.policy, parts.view.stats_of, tree.aside, self, parts.shadows.shadow_nodes
        integrity = Integrity(self, *checked, tree.ranks, parts.controller.journal.digest)
        statistics = Statistics(config, *figures, *counted, *served, tree.eviction_log.describe_evictions)
        shown = inspection, statistics.describe_stats, integrity.check_integrity, parts.admin
        requests = RequestsInspection(self, records, self.device)
        self.inspector = Inspector(*shown, requests, parts.shadows, tree.quality, parts.background.counts)

    def attach_scheduler(self, scheduler: Any) -> None:
        """Called once the scheduler is complete; compression then orders itself behind its forward stream."""
        self.scheduler = scheduler
        parts, tree, tiers = self.parts, self.parts.tree, self.parts.tiers
        budgets = partial(self.decode_budgets.describe, scheduler)
        hooks.attach(
            hooks.HookedCache(
                advance=tree.terms.advance,
                begin_round=parts.begin_round,
                prefill_times=self.prefill_times,
                queued_hits=tree.queued_hits,
                rounds=parts.rounds,
                prefetches=tiers.prefetches,
                loads=tiers.loads,
                admission=parts.admission,
                weights=parts.weights,
                know_adapters=tree.adapters.know_adapters,
                decode_budgets=self.decode_budgets,
                background=parts.background,
                checkpoints=self.late_checkpoints,
                first_tokens=parts.first_tokens,
                metrics=metrics_of(scheduler, self.inspector, budgets, tree.quality.counts),
                agreement=tree.storage.agreement,
            )
        )
        channels = scheduler.ipc_channels
        tree.storage.arrival.watch((channels.recv_from_tokenizer, channels.recv_from_rpc))
        self.compressor.forward_stream = getattr(scheduler, "forward_stream", None)
        self.quality.identify_profiles()

    def reset(self) -> None:
        tiers = self.parts.tiers
        tiers.promotion.clear()
        tiers.ssd_compression.clear()
        tiers.loads.end_all()
        super().reset()
        tiers.placement.clear(self.nodes.values())
        tiers.prefetches.clear()
        self.parts.ssd_attachment.flush(is_first=self.scheduler is None)
        self.nodes.clear()
        self.shadows.clear_shadows()
        self.changes.flushed()
        if self.scheduler is not None:  # the weights may be others
            self.quality.identify_profiles()
        self.root_node.kv = NodeKV()

    def know_model(self, model: ModelIdentity) -> None:
        """Ask ``model`` from now on which model it is that computes."""
        self.name_profiles = model.of_profiles
        self.parts.ssd_attachment.know_model(model.of_model)
        self.parts.weights.know_model(model.forget_weights)

    def close(self, *, save: bool = True) -> None:
        """The server ends: see ``TierShutdown``."""
        self.late_checkpoints.settle()
        self.parts.shutdown.close(save=save)

    host = property(lambda self: self.parts.tree.storage.host if self.parts.tree.storage.has_host else None)
    ssd = property(lambda self: self.parts.tree.storage.ssd)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Longest servable prefix of ``params.key``; ``device_indices`` is logical, with holes. So many more tokens as
        ``host_hit_length`` says, of a request's prefix only, are ready to be loaded.

        A partial match splits a node, compressed or not; where a compressed node would be left with too few slots for
        the part that matches, the match ends at its parent.
        """
        key = params.key.page_aligned(self.page_size)
        path, num_resident = list[Any](), 0
        if not self.disable:
            quality, kept, req = self.parts.quality_control, self.config.min_match_kept, params.req
            steps = usable_steps(req, self.parts.slot_checks.sound(self._steps(key)), kept)
            steps = steps[: (num := quality.note_match(req, steps))]
            num_resident = sum(node.value is not None for node, _ in steps)
            num_ready = self.parts.tiers.prefetcher.ready_to_load(req, steps, num_resident)
            steps = steps[: servable_steps(steps[: num_resident + num_ready], kept)]
            while len(steps) < num:  # what is left out does not pay for what is lossy in front of it
                num, steps = len(steps), steps[: servable_steps(steps[: quality.num_affordable(req, steps)], kept)]
            num_resident = min(num_resident, len(steps))
            path = self._take(steps)
        resident = path[:num_resident]
        if params.req is not None:
            params.req.evicpress = view_of_path(resident, self.device)
            self.parts.tiers.holds.end(node.id for node in path)
        device_node = resident[-1] if resident else self.root_node
        indices = [node.value for node in resident]
        return REQUEST_KV.match_result(
            torch.cat(indices) if indices else torch.empty(0, dtype=torch.int64, device=self.device),
            params.req,
            device_node,
            path[-1] if path else self.root_node,
            sum(len(node.key) for node in path[num_resident:]),
        )

    def init_load_back(self, params: InitLoadBackParams) -> tuple[Any, Any]:
        """Bring what ``match_prefix`` promised onto the GPU; see ``LoadBack.bring_back``."""
        return REQUEST_KV.loaded(params.req, *self.parts.tiers.load_back.bring_back(params.req, params.best_match_node))

    def _steps(self, key: RadixKey) -> list[tuple[Any, int]]:
        """The nodes that spell the longest known prefix of ``key`` with the tokens each matches; changes nothing."""
        return steps_of(self.root_node, key, self.page_size)

    def key_of_waiting(self, req: Any) -> RadixKey:
        """Key that a request in the queue will be matched with, as far as it can be known."""
        tokens = req.origin_input_ids + req.output_ids if len(req.output_ids) else req.origin_input_ids
        return RadixKey(tokens, req.extra_key, limit=max(0, len(tokens) - 1)).page_aligned(self.page_size)

    def known_of(self, req: Any) -> list[tuple[Any, int]]:
        """The nodes that spell the longest known prefix of a request in the queue with the tokens each matches."""
        return [] if self.disable else self._steps(self.key_of_waiting(req))

    def steps_of_waiting(self, req: Any) -> list[tuple[Any, int]]:
        """Those of them that it would be served from."""
        return self.usable_steps(req, self.known_of(req))

    def usable_steps(self, req: Any, steps: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
        """Those of the nodes of a known prefix that a request, or None, can be served from."""
        steps = usable_steps(req, steps, self.config.min_match_kept)
        return steps[: self.parts.quality_control.num_affordable(req, steps)]

    def _take(self, steps: list[tuple[Any, int]]) -> list[Any]:
        """Make the path that ``steps`` describe end at a node boundary, by a split, and note its use."""
        self._tick, now = self._tick + 1, time.monotonic()
        path = [node for node, _ in steps]
        if steps and steps[-1][1] < len(path[-1].key):
            path[-1] = self._split_node(path[-1].key, path[-1], steps[-1][1])
        for node in path:
            node.last_access_time = now
            node.kv.last_use = self._tick
            self.policy.touch(node)
        return path

    def touch(self, node: Any) -> None:
        """The node is used now, and not hit."""
        self._tick += 1
        node.kv.last_use = self._tick
        self.policy.touch(node)

    # ---- accounting in physical slots

    # See SlotLedger. What RadixCache itself writes, in logical tokens, is not taken.
    evictable_size_ = property(lambda self: self.ledger.evictable, lambda self, num_tokens: None)
    protected_size_ = property(lambda self: self.ledger.protected, lambda self, num_tokens: None)

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        delta = 0
        while not self.disable and node is not self.root_node:
            if node.lock_ref == 0:
                delta -= num_slots(node)
                self.policy.lock(node.id, True)
            node.lock_ref += 1
            node = node.parent
        self.ledger.lock(-delta)
        return IncLockRefResult(delta=delta)

    def dec_lock_ref(self, node: Any, params: Any = None) -> DecLockRefResult:
        delta = 0
        while not self.disable and node is not self.root_node:
            if node is None:
                raise RuntimeError("evicpress: a request holds a node of a tree that was flushed")
            if node.lock_ref == 1:
                delta += num_slots(node)
                self.policy.lock(node.id, is_reserved(node))
            node.lock_ref -= 1
            node = node.parent
        self.ledger.unlock(delta)
        return DecLockRefResult(delta=delta)

    def _split_node(self, key: RadixKey, child: Any, split_len: int) -> Any:
        """SGLang's split, and the record's: slots with M < split_len go to the new upper node."""
        kv, is_absent = child.kv, child.value is None
        if is_absent:
            child.value = NOWHERE.new_zeros(len(child.key))  # SGLang splits what is there
        upper = super()._split_node(key, child, split_len)
        kv.version += 1
        upper.kv = replace(kv, slots=None, layout=None, job=None, is_leaving=False, num_prefetches=0)
        upper.kv.is_aside, upper.kv.room_bytes = False, None
        if kv.layout is not None:
            above, below = kv.layout.split(split_len)
            upper.kv.layout, upper.kv.slots = above, kv.slots[: above.num_slots].clone()
            kv.layout, kv.slots = below, kv.slots[above.num_slots :].clone()
        if is_absent:
            upper.value = child.value = None
            upper.kv.slots = kv.slots = NOWHERE
        self.nodes[upper.id] = upper
        if not kv.is_text:
            outside = first_outside(upper.key.raw_token_ids(), self.vocab_size)
            upper.kv.is_text = upper.parent.kv.is_text and outside is None
        self.changes.split(upper, child)
        self.changes.changed(upper)
        self.changes.changed(child)
        return upper

    def evict(self, params: EvictParams) -> EvictResult:
        """See ``Eviction.evict``."""
        if self.disable or params.num_tokens <= 0:
            return EvictResult()
        begin = time.perf_counter()
        freed = self.parts.eviction.evict(params.num_tokens)
        self.update_eviction_metrics(freed, begin)
        return EvictResult(num_tokens_evicted=freed)

    def make_whole_room(self, num_slots: int) -> None:
        """See ``Eviction.make_whole_room``."""
        self.parts.eviction.make_whole_room(num_slots)

    def insert(self, params: InsertParams) -> InsertResult:
        """SGLang's insert of exact KV, a hit for every node that was there already; their slots stay the caller's."""
        if self.disable:
            return InsertResult(prefix_len=0)
        key = params.key.page_aligned(self.page_size)
        value = torch.tensor(key.token_ids[: len(key)]) if params.value is None else params.value
        path = self._take(self._steps(key))
        for node in () if getattr(params, "chunked", False) else path:
            self.queued_hits.use(node)
        num_known = sum(len(node.key) for node in path)
        num_resident = sum(len(node.key) for node in path if node.value is not None)
        end = num_known
        for node in reversed(path):  # see _give
            begin = end - len(node.key)
            if node.value is None:
                self.parts.tiers.fill_replace.fill(node, value[begin:end], False)
            end = begin
        last = path[-1] if path else self.root_node
        if num_known < len(key):
            last = self._add_leaf(last, key[num_known:], value[num_known : len(key)], params.priority or 0, False)
        return InsertResult(prefix_len=num_resident, last_device_node=last)

    def _add_leaf(self, parent: Any, key: RadixKey, value: torch.Tensor, priority: int, is_lossy_prefix: bool) -> Any:
        kv = NodeKV(is_lossy_prefix=is_lossy_prefix, last_use=self._tick)
        node = self._attach_leaf(parent, key, value.clone(), kv, priority)
        self.ledger.add(len(key))
        self.quality.find_profiles(node)
        self.changes.changed(node)
        return node

    def add_absent_leaf(self, parent: Any, key: RadixKey, copy: Copy) -> Any:
        """A node that is not on the GPU: ``copy`` is all there is of it. Raises RuntimeError where the tree goes on
        that way already."""
        if key.child_key(self.page_size) in parent.children:
            raise RuntimeError(f"evicpress: node {parent.id} has a child that begins with the same page")
        kv = NodeKV(last_use=self._tick, slots=NOWHERE)
        node = self._attach_leaf(parent, key, None, kv, 0)
        if copy.layout is not None:
            copy.origin = node.id
        self.placement.add_copy(node, copy)
        self.quality.find_profiles(node)
        return node

    def _attach_leaf(self, parent: Any, key: RadixKey, value: torch.Tensor | None, kv: NodeKV, priority: int) -> Any:
        node = TreeNode(priority=priority)
        node.parent, node.key, node.value, node.kv, node.hit_count = parent, key, value, kv, 1
        parent.children[key.child_key(self.page_size)] = self.nodes[node.id] = node
        kv.is_shadow = is_shadow_name(key.extra_key)
        self.queued_hits.add(node, 0 if parent is self.root_node else len(parent.children))
        kv.is_text = parent.kv.is_text and first_outside(key.raw_token_ids(), self.vocab_size) is None
        return node

    def _give(self, req: Any, key: RadixKey, own: torch.Tensor, adopted: int) -> list[Any]:
        """Put a request's own KV ``own`` (of the tokens of ``key`` from ``adopted`` on) into the tree.

        The tree keeps what it has unless the request's is a promotion; the rest is freed. Returns the nodes from there.
        """
        view = self.views.view_of(req)
        priority = getattr(req, "priority", 0) or 0
        path = self._take(self._steps(key))
        beyond, parts, gains, kept, known = [], [], list[float](), set[int](), 0
        for node, gain in zip(path, self.parts.quality_control.gains(req, path, view.is_lossy), strict=True):
            node.priority = max(node.priority, priority)
            begin, known = known, known + len(node.key)
            if begin >= adopted:
                beyond.append(node)
                parts.append(own[begin - adopted : known - adopted])
                gains.append(gain)
        # From the end: what a node holds anew may take from those below it their copies, and with these all they are.
        for node, node_slots, gain in zip(beyond[::-1], parts[::-1], gains[::-1], strict=True):
            if node.value is None:
                self.parts.tiers.fill_replace.fill(node, node_slots, view.is_lossy)
            elif self.parts.tiers.fill_replace.is_promotion(node, view, gain):
                self.parts.tiers.fill_replace.replace(node, node_slots, view.is_lossy)
            else:
                self.ledger.free(node_slots)
                kept.add(node.id)
        parent, rest = path[-1] if path else self.root_node, own[known - adopted : len(key) - adopted]
        if parent is not self.root_node and parent.id not in self.nodes:  # dropped: there was no memory to trim it
            self.ledger.free(rest)
        elif known < len(key):
            leaf = self._add_leaf(parent, key[known:], rest, priority, view.is_lossy)
            if PromptQueries.active is not None:
                self.parts.tree.queries.keep(leaf, *PromptQueries.active.keep(req.rid, known))
                self.changes.changed(leaf)
            beyond.append(leaf)
        if (seconds := retention_s(req.sampling_params.custom_params)) and (last := [*path, *beyond][-1:]):
            self.queued_hits.retain(path_to(last[0]), seconds)
        for node in [node for node in beyond if node.id not in kept] if view.is_lossy else ():
            node.kv.prefix_quality = min(node.kv.prefix_quality, getattr(req, "evicpress_prefix_quality", 1.0))
        return beyond

    def end_request(self, req: Any, num_tokens: int, *, is_insert: bool) -> None:
        """The request ended or is to be computed anew: its own KV of ``num_tokens`` goes to the tree, or is freed."""
        if self.disable:
            self.token_to_kv_pool_allocator.free(
                self.req_to_token_pool.req_to_token[REQUEST_KV.row_of(req), :num_tokens]
            )
            return
        adopted = REQUEST_KV.protected_len(req)
        own = self._own_slots(req, num_tokens)
        key = self._key_of((req.origin_input_ids + req.output_ids)[:num_tokens], req)
        if is_insert:
            self.quality.record_answer(req)
        if is_insert and not self.disable_finished_insert and len(key) >= adopted:
            self._give(req, key, own[: len(key) - adopted], adopted)
            self.ledger.free(own[len(key) - adopted :])
        else:
            self.ledger.free(own)
        if PromptQueries.active is not None:
            PromptQueries.active.forget(req.rid)
        self.decode_budgets.end(req)

    def keep_running(self, req: Any, token_ids: Any, *, is_chunk: bool) -> None:
        """The KV of ``token_ids``, all that a running request has, goes to the tree. ``is_chunk``: more of its prompt
        is to be computed."""
        if self.disable or self.decode_budgets.keeps_back(req, chunked=is_chunk):
            return
        adopted, view = REQUEST_KV.protected_len(req), self.views.view_of(req)
        key = self._key_of(token_ids, req)
        own = self._own_slots(req, len(token_ids))
        prefix = req.prefix_indices[:adopted]
        if len(key) <= adopted or self.parts.tiers.fill_replace.would_change_view(self._steps(key), adopted, view):
            REQUEST_KV.set_prefix(req, torch.cat([prefix, own]))
            req.evicpress = view.extended(own, adopted - view.holes)
            return
        beyond = self._give(req, key, own[: len(key) - adopted], adopted)
        tail = torch.cat([node.value for node in beyond])  # all of them full: see would_change_view
        holes = view.holes
        self.req_to_token_pool.write((REQUEST_KV.row_of(req), slice(adopted - holes, len(key) - holes)), tail)
        group_rows.note_written(REQUEST_KV.row_of(req), adopted - holes)
        REQUEST_KV.relock(self, req, beyond[-1])
        tail = torch.cat([tail, own[len(key) - adopted :]])
        if PromptQueries.active is not None and not is_chunk:
            PromptQueries.active.forget(req.rid)
        REQUEST_KV.set_protected_len(req, len(key))
        REQUEST_KV.set_prefix(req, torch.cat([prefix, tail]))
        req.evicpress = view.extended(tail, adopted - holes)

    def _own_slots(self, req: Any, num_tokens: int) -> torch.Tensor:
        """Slots that a request computed itself: logical [protected, num_tokens) of its compact row."""
        holes = holes_of(req)
        row = self.req_to_token_pool.req_to_token[REQUEST_KV.row_of(req)]
        return row[REQUEST_KV.protected_len(req) - holes : num_tokens - holes].to(torch.int64, copy=True)

    def _key_of(self, token_ids: Any, req: Any) -> RadixKey:
        """Key of a request's tokens that may go into the tree: of one in a shadow only the shadow."""
        if is_shadow_name(req.extra_key):
            token_ids = token_ids[: self.shadows.num_shadow_tokens(req)]
        return RadixKey(token_ids, req.extra_key).page_aligned(self.page_size)

    def take_events(self) -> list[Any]:
        """SGLang's KV events since it last asked; see ``KvEvents``."""
        self.block_events.tell()
        return list(super().take_events())

    def _update_leaf_status(self, node: Any) -> None:
        """SGLang's set of leaves to evict stays empty: the policy's index knows, and to look at all children for every
        lock and release is slow below a prefix that many contexts share."""

    def _delete_leaf(self, node: Any) -> None:
        super()._delete_leaf(node)
        self.ledger.remove(num_slots(node))
        del self.nodes[node.id]
        self.changes.deleted(node)
