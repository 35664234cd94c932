"""Admission in a round, beyond SGLang's own rules: a request whose prefix is on its way is passed over, so is
one whose missing prefix another computes, and one whose load has no room yet. What was computed all the same is counted
by its reason."""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, CacheAgnosticPolicy
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_evicpress.core import Tier
from sglang_evicpress.introspect.recomputed import TAIL_TOKENS, Drop, Recomputed, place_of
from sglang_evicpress.patches.scheduler.prefill_times import note_not_loaded
from sglang_evicpress.patches.tiers.prefetch import WINDOW
from sglang_evicpress.patches.tree.node import path_to, servable_steps, start_of

LEAST_SHARED = 64
"""Tokens that two requests must both miss for one to wait until the other has computed them; and half of what it
misses, as the other may have far more to compute."""

DEFER_S = 1.0
"""So long a request whose load has no room is passed over, from when it could have run; others could go on for ever."""

COMPUTING_S = 1.0
"""A request is taken to compute for so long at least, and for ``COMPUTING_TIMES`` as long as predicted."""

COMPUTING_TIMES = 3.0


class Admission:
    """The part of EvicPressCache that says who is passed over. Everything here runs on the scheduler thread."""

    def open_admission(self: Any) -> None:
        self.recomputed = Recomputed()
        self.computing: dict[int, tuple[Any, float]] = {}  # requests that prefill, by id(), until when at most
        self._queue: list[Any] = []  # the head of it, as it was before some of it was hidden
        self._behind: list[Any] = []  # all behind the head
        self._passed_over: set[int] = set()  # of the head, by id()
        self._num_hidden = 0
        self.is_out_of_room = False  # in this round somebody was deferred
        self.slots_ahead = 0  # that those who were passed over in this round need to run

    def hide_waiting(self: Any, scheduler: Any) -> None:
        """Take those of which nothing new can be said out of the queue until ``show_waiting``: SGLang looks every
        request that waits up in the tree, step by step. Where they are served in the order of the queue, also those for
        whom nothing is got ready yet."""
        self.background.hide_background(scheduler)
        queue = scheduler.waiting_queue
        self.is_out_of_room, self.slots_ahead = False, 0
        if not self.prefetches:
            return
        most = WINDOW if _is_first_come_first_served(scheduler) else len(queue)
        head, behind = queue[:most], queue[most:]
        passed_over = [req for req in head if self.is_passed_over(req)]
        self.slots_ahead = sum(self.prefetches[id(req)].num_to_run for req in passed_over)
        self._num_hidden = len(passed_over) + len(behind)
        if self._num_hidden:
            self._queue, self._behind, self._passed_over = head, behind, {id(req) for req in passed_over}
            scheduler.waiting_queue = [req for req in head if id(req) not in self._passed_over]

    def show_waiting(self: Any, scheduler: Any) -> None:
        """The queue in its order again, without those that run now; who has come since is behind."""
        if self._num_hidden:
            left_in_queue = scheduler.waiting_queue
            known, left = {id(req) for req in self._queue}, {id(req) for req in left_in_queue} | self._passed_over
            waiting = [req for req in self._queue if id(req) in left]
            scheduler.waiting_queue = waiting + self._behind + [req for req in left_in_queue if id(req) not in known]
            self._num_hidden, self._queue, self._behind, self._passed_over = 0, [], [], set()
        self.background.show_background(scheduler)

    def is_passed_by(self: Any, adder: Any, req: Any) -> bool:
        """True if the batch that is made goes on without a request for now. What it waits for has its turn when there
        is room for it besides those before it in the queue that were passed over."""
        prefetch = self.prefetches.get(id(req))
        if prefetch is None:
            return bool(self.background.should_defer(req) or self.is_being_computed(req))
        new_tokens = max(0, min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS) - len(req.output_ids))
        prefetch.num_to_run = len(req.full_untruncated_fill_ids) - len(req.prefix_indices) + new_tokens + self.page_size
        has_turn = not self.slots_ahead or self.slots_ahead + prefetch.num_to_run < adder.rem_total_tokens
        is_prefetching = self.is_prefetching(req, has_turn=has_turn)
        if not is_prefetching and (self.background.should_defer(req) or self.is_being_computed(req)):
            return True
        if not is_prefetching and not self.lacks_room(adder, req):
            return False
        self.slots_ahead += prefetch.num_to_run
        return True

    def note_admitted(self: Any, req: Any) -> None:
        """SGLang has put the request into the batch that it makes."""
        if self.prefetches:
            num_new = len(req.origin_input_ids) - len(req.prefix_indices)
            took_s = self.costs.prefill.marginal_seconds(max(0, num_new), len(req.prefix_indices))
            self.computing[id(req)] = req, time.perf_counter() + COMPUTING_S + COMPUTING_TIMES * took_s

    def is_being_computed(self: Any, req: Any) -> bool:
        """True if another request computes now what this one misses: it is in the tree when that is over."""
        if not self.computing:
            return False
        now = time.perf_counter()
        for key, (other, until_s) in list(self.computing.items()):
            if now > until_s or other.finished() or getattr(other, "is_retracted", False):
                del self.computing[key]
        begin = len(req.prefix_indices) + req.host_hit_length
        tokens = req.origin_input_ids
        end = begin + max(LEAST_SHARED, (len(tokens) - begin) // 2)
        missing = tokens[begin:end]
        if len(missing) < LEAST_SHARED:
            return False
        for other, _ in self.computing.values():
            theirs = other.origin_input_ids
            is_behind = other.cache_protected_len <= begin  # else the tree had it, and this request could not use it
            is_same = is_behind and other is not req and other.extra_key == req.extra_key
            if is_same and theirs[begin:end] == missing and theirs[:begin] == tokens[:begin]:
                self.storage.counts["waits_for_a_duplicate"] += 1
                return True
        return False

    def lacks_room(self: Any, adder: Any, req: Any) -> bool:
        """True if what is to be loaded for a request, or computed of it in this batch, has no room on the GPU now, but
        will: others run, or copies of what is to leave are on their way. Or if what was to be loaded is not ready
        any more."""
        if self.host is None:
            return False
        last = req.best_match_node if req.host_hit_length else req.last_node
        copies = [node.kv.copies.get(Tier.HOST) for node in path_to(last) if node.value is None]
        if None in copies:  # since it was matched it had to make room for what else is read for it: match it anew
            return True
        num_new = len(req.full_untruncated_fill_ids) - len(req.prefix_indices) - req.host_hit_length
        if adder.rem_chunk_tokens is not None:
            num_new = min(num_new, max(0, adder.rem_chunk_tokens))
        needed = sum(copy.num_slots for copy in copies) + num_new + self.page_size
        if self.is_out_of_room:  # for one before it, which comes first
            return bool(self.token_to_kv_pool_allocator.available_size() < needed)
        self.inc_lock_ref(last)
        has_room = self.has_room(needed)
        self.dec_lock_ref(last)
        prefetch = self.prefetches.get(id(req))
        is_patient = prefetch is None or prefetch.turn_s is None or time.perf_counter() < prefetch.turn_s + DEFER_S
        if has_room or not is_patient or (self.scheduler.running_batch.is_empty() and not self.is_freeing_host):
            return False
        self.is_out_of_room = True
        self.storage.counts["loads_deferred"] += 1
        return True

    def key_of_waiting(self: Any, req: Any) -> RadixKey:
        """Key that a request in the queue will be matched with, as far as it can be known."""
        tokens = req.origin_input_ids + req.output_ids if len(req.output_ids) else req.origin_input_ids
        return RadixKey(tokens, req.extra_key, limit=max(0, len(tokens) - 1)).page_aligned(self.page_size)

    # ---- what is computed although it need not be

    def count_admitted(self: Any, req: Any, num_cached: int) -> None:
        """The request runs with so many tokens of its prompt from the cache."""
        counts, tokens = self.recomputed, req.origin_input_ids
        counts.admit(len(tokens), min(num_cached, len(tokens)))
        known = self._steps(self.key_of_waiting(req))
        num_known = sum(matched for _, matched in known)
        if num_known > num_cached:
            reason, load_s = self._why_not_used(req, known, num_cached)
            counts.blame(reason, num_known - num_cached)
            if reason == "not_worth":
                compute_s = self.costs.prefill.marginal_seconds(num_known - num_cached, num_cached)
                counts.not_worth_s["load"] += load_s
                counts.not_worth_s["predicted"] += compute_s
                note_not_loaded(req, num_known - num_cached)
        begin = max(num_known, num_cached)
        if begin + self.page_size >= len(tokens):
            return
        if getattr(req, "retracted_stain", False):
            counts.blame("retracted", len(tokens) - begin)
            return
        for drop in counts.miss(tokens, begin, req.extra_key, self.page_size):
            self.controller.journal.regret(drop.number, drop.recompute_s)

    def _why_not_used(self: Any, req: Any, known: list[tuple[Any, int]], num_cached: int) -> tuple[str, float]:
        """Why a request does not take all that the tree knows of its prompt, with what loading the rest would take."""
        usable = known[: servable_steps(known, self.config.min_match_kept)]
        begin, unused = 0, []
        for node, matched in usable:
            if begin >= num_cached:
                unused.append((node, matched))
            begin += matched
        absent = [(node, matched) for node, matched in unused if node.value is None and node.kv.copies]
        if not absent:
            return ("came_meanwhile" if unused else "not_servable"), 0.0
        pieces = self._pieces(absent)
        load_s = sum(self.costs.load_seconds(piece.tier, piece.num_bytes) for piece in pieces)
        prefetch = self.prefetches.get(id(req))
        if getattr(req, "evicpress_without_room", False):
            return "no_gpu_room", load_s
        if prefetch is None:
            return "not_prefetched", load_s
        if prefetch.is_late:
            return "late", load_s
        if prefetch.short_of is not None or prefetch.is_without_room:
            return "no_host_room", load_s
        if prefetch.is_waiting:
            return "unverified", load_s
        return "not_worth", load_s

    def note_drop(self: Any, node: Any, reason: str, number: int | None) -> None:
        """A node is about to be dropped."""
        if node.kv.is_shadow:
            return
        start = start_of(node)
        before: list[int] = []
        above = node.parent
        while above.parent is not None and len(before) < TAIL_TOKENS:
            before = [*above.key.raw_token_ids()[-TAIL_TOKENS:], *before]
            above = above.parent
        page = node.key.raw_token_ids()[: self.page_size]
        needed, room = self.menu.slot_bytes * len(node.key), self.host_room.room()
        self.recomputed.drop(
            place_of(before, page, start, node.key.extra_key),
            Drop(
                len(node.key),
                self.costs.prefill.marginal_seconds(len(node.key), start),
                reason,
                any(free >= needed for free in room.values()),
                number,
            ),
        )


def _is_first_come_first_served(scheduler: Any) -> bool:
    """True if SGLang looks at the queue in its own order; it sorts by other rules after we have hidden some of it."""
    policy = getattr(scheduler, "policy", None)
    is_fcfs = policy is not None and policy.policy == CacheAgnosticPolicy.FCFS
    return is_fcfs and not scheduler.enable_priority_scheduling
