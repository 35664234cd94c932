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
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.controller.controller import Controller
from sglang_evicpress.patches.attention.prompt_queries import PromptQueries
from sglang_evicpress.patches.cache.admission import Admission
from sglang_evicpress.patches.cache.eviction import Eviction
from sglang_evicpress.patches.cache.fill_replace import FillReplace
from sglang_evicpress.patches.cache.inspection import TreeInspection
from sglang_evicpress.patches.cache.inspector import Inspector
from sglang_evicpress.patches.cache.integrity import Integrity
from sglang_evicpress.patches.cache.parts import Outside, Parts
from sglang_evicpress.patches.cache.policy_sync import PolicySync
from sglang_evicpress.patches.cache.statistics import Statistics
from sglang_evicpress.patches.decode_budget.budgets import DecodeBudgets
from sglang_evicpress.patches.decode_budget.chunked_recompute import view_between
from sglang_evicpress.patches.decode_budget.inspection import RequestsInspection
from sglang_evicpress.patches.decode_budget.passes import DecodePasses
from sglang_evicpress.patches.decode_budget.records import BudgetRecords
from sglang_evicpress.patches.decode_budget.state import budget_of
from sglang_evicpress.patches.profiling.background_requests import BackgroundRequests
from sglang_evicpress.patches.profiling.shadows import Shadows
from sglang_evicpress.patches.scheduler import hooks
from sglang_evicpress.patches.scheduler.prefill_times import PrefillTimes
from sglang_evicpress.patches.tiers.admin import TierInspection
from sglang_evicpress.patches.tiers.background import BackgroundDemotion
from sglang_evicpress.patches.tiers.grafting import Grafting
from sglang_evicpress.patches.tiers.load_back import LoadBack
from sglang_evicpress.patches.tiers.placement import NOWHERE
from sglang_evicpress.patches.tiers.prefetch import Prefetcher
from sglang_evicpress.patches.tiers.promotion import Promotion
from sglang_evicpress.patches.tiers.weights import Weights
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node import (
    NodeKV,
    PrefixView,
    first_outside,
    holes_of,
    is_lossy,
    is_reserved,
    num_slots,
    servable_steps,
    slots_of,
)
from sglang_evicpress.patches.tree.types import Request
from sglang_evicpress.patches.unsupported import decode_settings
from sglang_evicpress.policy.reuse import weight_of_new
from sglang_evicpress.tiers.entry.identity import KEY_BYTES, MAX_TOKEN

logger = logging.getLogger(__name__)


class EvicPressCache(
    PolicySync,
    FillReplace,
    Weights,
    BackgroundDemotion,
    Prefetcher,
    Grafting,
    Admission,
    LoadBack,
    Promotion,
    Eviction,
    TierInspection,
    RadixCache,
):
    """See the module. Everything here runs on the scheduler thread."""

    def __init__(
        self,
        params: Any,
        config: EvicPressConfig,
        compressor: Compressor,
        identity: bytes = bytes(KEY_BYTES),
        seed: bytes = b"",
    ) -> None:
        self.config = config
        self.compressor = compressor
        self.nodes: dict[int, Any] = {}
        allocator, page_size = params.token_to_kv_pool_allocator, params.page_size
        outside = Outside(
            root_of=lambda: self.root_node,
            namespaces=lambda: (top.key.extra_key for top in self.root_node.children.values()),
            delete=self._delete_leaf,
            tell_removed=lambda node: self._record_remove_event(node),
            policy=lambda: self.planner,
            now_s=lambda: self.now_s,
            costs=lambda: self.costs,
            observe_load=lambda tier, num_bytes, seconds: self.observe_load(tier, num_bytes, seconds),
            free_slots=lambda tier, num_bytes: self.controller.free_bytes(tier, num_bytes),
            mark_dirty=lambda: self.mark_dirty(at_once=True),
            on_drop=self.note_drop,
            stats_of=self.stats_of,
            quality_of_copy=lambda node, copy: self.quality.quality_of_copy(node, copy),
            cause_of_drop=self.cause_of_drop,
            is_arriving=self.is_arriving,
        )
        parts = Parts(self.nodes, allocator, page_size, config, compressor, identity, outside)
        self.changes, self.ledger, self.aside, self.adapters = parts.changes, parts.ledger, parts.aside, parts.adapters
        self.storage, self.placement, self.removal = parts.storage, parts.placement, parts.removal
        self.menu, self.plans, self.gpu_ops, self.moves = parts.menu, parts.plans, parts.gpu_ops, parts.moves
        self.host_room, self.ssd_io, self.backup = parts.host_room, parts.ssd_io, parts.backup
        self.host_compression, self.demotion, self.evictions = parts.host_compression, parts.demotion, parts.evictions
        self.eviction_seconds, self.workers = parts.eviction_seconds, parts.storage.workers
        self.controller, self.arrival = Controller(parts.moves), parts.storage.arrival
        parts.changes.subscribe(self.on_node_changed)
        self.open_weights()
        self.open_background()
        self.open_prefetches()
        self.open_admission()
        self.open_eviction()
        self.open_promotion()
        self.open_loads(allocator.get_kvcache())
        self.open_index(config)
        requests: list[Request] = []  # the profiler's
        tree = self, self, parts.gpu_ops, self.menu, self.ledger, compressor, self.quality
        signals = parts.adapters.adapter_of, parts.changes.changed, parts.removal.drop
        self.shadows = Shadows(*tree, *signals, requests, seed)
        self.background = BackgroundRequests(self, self.shadows, requests)
        self.prefill_times = PrefillTimes(self.cost_model)
        self.scheduler: Any = None
        self.name_profiles: Callable[[Any], bytes] = lambda tokenizer: bytes(KEY_BYTES)
        self.vocab_size, self._tick = MAX_TOKEN + 1, 0  # the model's, where it is known
        super().__init__(params)
        records, settings = BudgetRecords(self.device), decode_settings(config)
        passes = DecodePasses(self, compressor, records)
        self.decode_budgets = DecodeBudgets(self, compressor, passes, records, settings, config.decode_client_budgets)
        key, journal = secrets.token_bytes(32), self.controller.journal
        inspection = TreeInspection(self, parts.gpu_ops, parts.moves, self, self, journal, key)
        seen = self, self.prefill_times, self.queued_hits, self, self.ledger, self.controller, self
        statistics = Statistics(config, *seen)
        integrity = Integrity(self, self.ledger, self, self.aside, self, self.shadows.shadow_nodes)
        shown = inspection, statistics, integrity, self, RequestsInspection(self, records, self.device)
        self.inspector = Inspector(*shown, self.shadows, self.quality, self.background.counts)

    def attach_scheduler(self, scheduler: Any) -> None:
        """Called once the scheduler is complete; compression then orders itself behind its forward stream."""
        self.scheduler = scheduler
        parts = self, self.prefill_times, self.queued_hits, self, self, self, self.adapters
        hooks.attach(hooks.HookedCache(*parts, self.decode_budgets, self.background))
        self.compressor.forward_stream = getattr(scheduler, "forward_stream", None)
        self.quality.identify_profiles()

    def reset(self) -> None:
        self.end_transfers()
        super().reset()
        self.reset_tiers()
        self.nodes.clear()
        self.aside.clear()
        self.ledger.clear()
        self.shadows.clear_shadows()
        if self.scheduler is not None:  # the weights may be others
            self.quality.identify_profiles()
        self.clear_index()
        self.root_node.kv = NodeKV()

    # ---- match

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Longest servable prefix of ``params.key``; ``device_indices`` is logical, with holes. So many more tokens as
        ``host_hit_length`` says, of a request's prefix only, are ready to be loaded.

        A partial match splits a node, compressed or not; where a compressed node would be left with too few slots for
        the part that matches, the match ends at its parent.
        """
        key = params.key.page_aligned(self.page_size)
        path: list[Any] = []
        num_resident = 0
        if not self.disable:
            steps = self._steps(key)
            steps = steps[: servable_steps(steps, self.config.min_match_kept)]
            num_resident = sum(node.value is not None for node, _ in steps)
            num_ready = 0 if params.req is None else self.ready_to_load(params.req, steps, num_resident)
            steps = steps[: num_resident + num_ready]  # the last pieces of a compression may be left out by that
            steps = steps[: servable_steps(steps, self.config.min_match_kept)]
            num_resident = min(num_resident, len(steps))
            path = self._take(steps)
        resident = path[:num_resident]
        if params.req is not None:
            params.req.evicpress = self._view_of(resident)
            self.end_holds(node.id for node in path)
        if not path:
            return self._empty_match_result
        device_node = resident[-1] if resident else self.root_node
        indices = [node.value for node in resident]
        return MatchResult(
            device_indices=torch.cat(indices) if indices else self._empty_match_result.device_indices,
            last_device_node=device_node,
            last_host_node=path[-1],
            best_match_node=path[-1],
            host_hit_length=sum(len(node.key) for node in path[num_resident:]),
        )

    def _steps(self, key: RadixKey) -> list[tuple[Any, int]]:
        """The nodes that spell the longest known prefix of ``key`` with the tokens each matches; changes nothing."""
        node, steps = self.root_node, []
        while len(key) > 0:
            node = node.children.get(key.child_key(self.page_size))
            if node is None:
                break
            matched = node.key.match(key, page_size=self.page_size)
            steps.append((node, matched))
            if matched < len(node.key):
                break
            key = key[matched:]
        return steps

    def _take(self, steps: list[tuple[Any, int]]) -> list[Any]:
        """Make the path that ``steps`` describe end at a node boundary, by a split, and note its use."""
        self._tick += 1
        now = time.monotonic()
        path = [node for node, _ in steps]
        if steps and steps[-1][1] < len(path[-1].key):
            path[-1] = self._split_node(path[-1].key, path[-1], steps[-1][1])
        for node in path:
            node.last_access_time = now
            node.kv.last_use = self._tick
            self.on_node_used(node)
        return path

    def _view_of(self, path: list[Any]) -> PrefixView:
        if not path:
            return PrefixView(self._empty_match_result.device_indices)
        holes = sum(len(node.key) - num_slots(node) for node in path)
        return PrefixView(torch.cat([slots_of(node) for node in path]), holes, any(is_lossy(node) for node in path))

    def view_of(self, req: Any) -> PrefixView:
        """The prefix that a request took from the tree; an empty one for a request that was never matched."""
        view = getattr(req, "evicpress", None)
        if not isinstance(view, PrefixView):
            view = req.evicpress = self._view_of([])
        return view

    def adopt(self, req: Any) -> PrefixView:
        """The view a request's row is written from, now that it is scheduled; counts its hit, once."""
        num_tokens, state = len(req.prefix_indices), budget_of(req)
        if state is not None and state.has_left_tree:
            return view_between(req, state)
        if num_tokens == 0:
            req.evicpress = self._view_of([])
        view = self.view_of(req)
        if len(view.slots) + view.holes != num_tokens:
            logger.error("evicpress: %.64r has a prefix of %d tokens and a view of others", req.rid, num_tokens)
            self.controller.num_failed["adopt view"] += 1
            slots = req.prefix_indices[req.prefix_indices != 0].to(torch.int64)  # a hole is slot 0
            view = req.evicpress = PrefixView(slots, num_tokens - len(slots), is_lossy=True)
        if not view.is_counted:
            view.is_counted = True
            if state is not None:
                state.num_cached = num_tokens
            path, node = [], req.last_node
            while num_tokens and node is not None and node is not self.root_node:
                path.append(node)
                node = node.parent
            self.on_prefill(req, path[::-1], num_tokens)
            if not is_shadow_name(req.extra_key):
                self.count_admitted(req, num_tokens)
        return view

    # ---- accounting in physical slots

    # See SlotLedger. What RadixCache itself writes, in logical tokens, is not taken.
    evictable_size_ = property(lambda self: self.ledger.evictable, lambda self, num_tokens: None)
    protected_size_ = property(lambda self: self.ledger.protected, lambda self, num_tokens: None)

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        delta = 0
        while not self.disable and node is not self.root_node:
            if node.lock_ref == 0:
                delta -= num_slots(node)
                self.planner.lock(node.id, True)
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
                self.planner.lock(node.id, is_reserved(node))
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
        upper.kv = replace(kv, slots=None, layout=None, job=None, is_leaving=False, num_prefetches=0, is_aside=False)
        if kv.layout is not None:
            above, below = kv.layout.split(split_len)
            upper.kv.layout, upper.kv.slots = above, kv.slots[: above.num_slots].clone()
            kv.layout, kv.slots = below, kv.slots[above.num_slots :].clone()
        if is_absent:
            upper.value = child.value = None
            upper.kv.slots = kv.slots = NOWHERE
        self.nodes[upper.id] = upper
        if not kv.is_text:
            self._note_text(upper)
        self.placement.split_copies(upper, child)
        self.split_reserved(upper, child)
        self.split_hold(upper.id, child.id)
        self.on_node_split(upper, child)
        return upper

    # ---- insert

    def insert(self, params: InsertParams) -> InsertResult:
        """SGLang's insert of exact KV, a hit for every node that was there already; their slots stay the caller's."""
        if self.disable:
            return InsertResult(prefix_len=0)
        key = params.key.page_aligned(self.page_size)
        value = params.value
        if value is None:
            value = torch.tensor(key.token_ids[: len(key)], dtype=torch.int64)
        path = self._take(self._steps(key))
        if not params.chunked:
            for node in path:
                self._hit(node, self.value_of_hit(), 1)
        num_known = sum(len(node.key) for node in path)
        num_resident = sum(len(node.key) for node in path if node.value is not None)
        end = num_known
        for node in reversed(path):  # see _give
            begin = end - len(node.key)
            if node.value is None:
                self._fill(node, value[begin:end], False)
            end = begin
        last = path[-1] if path else self.root_node
        if num_known < len(key):
            last = self._add_leaf(last, key[num_known:], value[num_known : len(key)], params.priority or 0, False)
        return InsertResult(prefix_len=num_resident, last_device_node=last)

    def _add_leaf(self, parent: Any, key: RadixKey, value: torch.Tensor, priority: int, is_lossy_prefix: bool) -> Any:
        node = TreeNode(priority=priority)
        node.parent = parent
        node.key = key
        node.value = value.clone()
        node.hit_count = 1
        parent.children[key.child_key(self.page_size)] = node
        node.kv = NodeKV(is_lossy_prefix=is_lossy_prefix, last_use=self._tick, last_use_s=self.now_s)
        num_siblings = 0 if parent is self.root_node else len(parent.children)
        node.kv.weight = weight_of_new(self.value_of_hit(), parent.kv.weight, num_siblings)
        node.kv.is_shadow = is_shadow_name(key.extra_key)
        self._note_text(node)
        self.nodes[node.id] = node
        self.ledger.add(len(key))
        if not node.kv.is_shadow:
            self._record_store_event(node)
        self.quality.find_profiles(node)
        self.changes.changed(node)
        return node

    def _note_text(self, node: Any) -> None:
        tokens = node.key.raw_token_ids()
        node.kv.is_text = node.parent.kv.is_text and first_outside(tokens, self.vocab_size) is None

    def _give(self, req: Any, key: RadixKey, own: torch.Tensor, adopted: int) -> list[Any]:
        """Put a request's own KV ``own`` (of the tokens of ``key`` from ``adopted`` on) into the tree.

        The tree keeps what it has unless the request's is a promotion; slots nobody keeps are freed. Returns the nodes
        of ``key`` beyond ``adopted``.
        """
        view = self.view_of(req)
        priority = getattr(req, "priority", 0) or 0
        path = self._take(self._steps(key))
        beyond, parts, known = [], [], 0
        for node in path:
            node.priority = max(node.priority, priority)
            begin, known = known, known + len(node.key)
            if begin >= adopted:
                beyond.append(node)
                parts.append(own[begin - adopted : known - adopted])
        # From the end: what a node holds anew may take from those below it their copies, and with these all they are.
        for node, node_slots in zip(beyond[::-1], parts[::-1], strict=True):
            if node.value is None:
                self._fill(node, node_slots, view.is_lossy)
            elif self._is_promotion(node, view):
                self._replace(node, node_slots, view.is_lossy)
            else:
                self.ledger.free(node_slots)
        parent = path[-1] if path else self.root_node
        if parent is not self.root_node and parent.id not in self.nodes:  # dropped: there was no memory to trim it
            self.ledger.free(own[known - adopted : len(key) - adopted])
        elif known < len(key):
            leaf = self._add_leaf(
                parent, key[known:], own[known - adopted : len(key) - adopted], priority, view.is_lossy
            )
            if PromptQueries.active is not None:
                self.keep_window(leaf, *PromptQueries.active.keep(req.rid, known))
                self.changes.changed(leaf)
            beyond.append(leaf)
        return beyond

    def _own_slots(self, req: Any, num_tokens: int) -> torch.Tensor:
        """The slots a request computed itself: logical [cache_protected_len, num_tokens) of its compact row."""
        holes = holes_of(req)
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        return row[req.cache_protected_len - holes : num_tokens - holes].to(torch.int64, copy=True)

    def cache_finished_req(self, req: Any, is_insert: bool = True) -> None:
        is_insert = self.decode_budgets.note_end(req) and is_insert
        num_tokens = req.pop_committed_kv_cache()
        if self.disable:
            self.token_to_kv_pool_allocator.free(self.req_to_token_pool.req_to_token[req.req_pool_idx, :num_tokens])
            return
        adopted = req.cache_protected_len
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
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        self.decode_budgets.end(req)

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        if self.disable or self.decode_budgets.keeps_back(req, chunked=chunked):
            return
        token_ids = req.get_fill_ids()
        adopted, view = req.cache_protected_len, self.view_of(req)
        key = self._key_of(token_ids, req)
        own = self._own_slots(req, len(token_ids))
        prefix = req.prefix_indices[:adopted]
        shared = view.slots[: adopted - view.holes]
        if len(key) <= adopted or self._would_change_view(key, adopted, view):
            req.prefix_indices = torch.cat([prefix, own])
            req.evicpress = PrefixView(torch.cat([shared, own]), view.holes, view.is_lossy, True)
            return
        beyond = self._give(req, key, own[: len(key) - adopted], adopted)
        tail = torch.cat([node.value for node in beyond])  # all of them full: see _would_change_view
        holes = view.holes
        self.req_to_token_pool.write((req.req_pool_idx, slice(adopted - holes, len(key) - holes)), tail)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        self.inc_lock_ref(beyond[-1])
        tail = torch.cat([tail, own[len(key) - adopted :]])
        if PromptQueries.active is not None and not chunked:
            PromptQueries.active.forget(req.rid)
        req.cache_protected_len = len(key)
        req.last_node = beyond[-1]
        req.prefix_indices = torch.cat([prefix, tail])
        req.evicpress = PrefixView(torch.cat([shared, tail]), holes, view.is_lossy, True)

    def _key_of(self, token_ids: Any, req: Any) -> RadixKey:
        """Key of a request's tokens that may go into the tree: of one in a shadow only the shadow."""
        if is_shadow_name(req.extra_key):
            token_ids = token_ids[: self.shadows.num_shadow_tokens(req)]
        return RadixKey(token_ids, req.extra_key).page_aligned(self.page_size)

    def _update_leaf_status(self, node: Any) -> None:
        """SGLang's set of leaves to evict stays empty: the policy's index knows, and to look at all children for every
        lock and release is slow below a prefix that many contexts share."""

    def _delete_leaf(self, node: Any) -> None:
        super()._delete_leaf(node)
        self.ledger.remove(num_slots(node))
        del self.nodes[node.id]
        self.on_node_deleted(node)
