"""Decode-time budgets: before each step of the scheduler, drop what running requests hold over theirs.

Prefixes in the tree are never touched: a request that is to drop anything copies what it shares, or what survives of
it, into slots of its own first. When and how much is a function of lengths alone, so that ranks agree and a server
with overlap drops at the same tokens as one without.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import torch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_evicpress.decode.compaction import (
    hole_moves,
    holefill_copies,
    holefill_positions,
    repack_copies,
    repack_positions,
)
from sglang_evicpress.decode.rhythm import is_due, is_near, is_over, target
from sglang_evicpress.decode.scores import page_means, score, survivors, worst_pages
from sglang_evicpress.decode.tally import PassKind, PassRecord, Totals
from sglang_evicpress.kernels.compact import compact
from sglang_evicpress.kernels.fill_holes import fill_holes
from sglang_evicpress.layout import HostCopy
from sglang_evicpress.patches.decode_queries import STEPS_AHEAD, QueryRing
from sglang_evicpress.patches.decode_rows import leave_tree, path_positions, put_row, row_of, take_slots, unshare
from sglang_evicpress.patches.decode_state import (
    DecodeState,
    budget_of,
    holds_kv,
    num_logical,
    num_physical,
    num_shared,
    positions_of,
)
from sglang_evicpress.patches.decode_trace import DecodeTrace, TraceRoom
from sglang_evicpress.patches.paged_allocator import free_whole_pages
from sglang_evicpress.patches.refusals import decode_settings
from sglang_evicpress.press import PressInput, QueryWindow

logger = logging.getLogger(__name__)

MAX_ENDED = 256
"""Requests that ended, of which the last so many can still be asked about."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a pass is going to do: the survivors, int [L, H, m] among the slots of the row, and the int32 [L, H, m]
    positions held afterwards. ``moves`` are (targets, sources) where holes are filled; ``copies`` [L, H] counts, None
    where that is known."""

    chosen: torch.Tensor
    positions: torch.Tensor
    moves: tuple[torch.Tensor, torch.Tensor] | None
    copies: torch.Tensor | None


class DecodeBudgets:
    """The part of EvicPressCache that drops KV of running requests."""

    def open_budgets(self: Any) -> None:
        self.default_budget = decode_settings(self.config)
        self.has_budgets = False  # until the first request comes with one
        self.budget_totals = Totals()
        self._budget_metrics: Any = None
        self._given_up: list[tuple[Any, str]] = []
        self.ended_budgets: deque[tuple[dict[str, object], DecodeTrace | None]] = deque(maxlen=MAX_ENDED)
        self._trace_room = TraceRoom()

    def visit_budgets(self: Any, scheduler: Any) -> None:
        """Drop what is due. Free room is seen by the admission and by the next step's check of memory."""
        if QueryRing.active is not None:
            QueryRing.active.is_needed = False
        if not self.has_budgets:
            return
        self._abort_given_up(scheduler)
        running, last = scheduler.running_batch, scheduler.last_batch
        batches = (running,) if running is last or last is None else (running, last)
        seen: set[int] = set()
        has_freed = False
        for batch in batches:
            for req in batch.reqs:
                state = budget_of(req)
                if state is None or id(req) in seen or not holds_kv(req):
                    continue
                seen.add(id(req))
                if QueryRing.active is not None:
                    QueryRing.active.is_needed |= self._reads_soon(req, state, QueryRing.active)
                if req is not scheduler.chunked_req and req.inflight_middle_chunks <= 0:
                    has_freed |= self._visit(req, state)
        if has_freed:
            running.batch_is_full = False
            self.publish_budgets(running)

    def _reads_soon(self: Any, req: Any, state: DecodeState, ring: QueryRing) -> bool:
        """Whether a pass may read the query of the next step: it is at most so many steps away."""
        if not state.settings.reads_queries:
            return False
        within = ring.window + STEPS_AHEAD
        return state.is_first_visit or is_near(state.settings, num_physical(req), self.page_size, within)

    def _visit(self: Any, req: Any, state: DecodeState) -> bool:
        """Whether anything was dropped."""
        if not state.in_tree:  # with overlap the prefill is in flight, and its result comes after the next launch
            self.compressor.wait_for_forward(self.compressor.k_buffers[0])  # for the queries that its node keeps
            self.cache_unfinished_req(req)
        settings, page = state.settings, self.page_size
        num_slots = num_physical(req)
        if state.is_first_visit:
            if is_over(settings, num_slots, page):
                state.is_first_visit = not self.drop_tokens(req, state)
                return not state.is_first_visit
            state.is_first_visit = False
        if not is_due(settings, num_slots, page):
            return False
        return self._drop_page(req, state) if settings.method == "paged" else self.drop_tokens(req, state)

    def give_up(self: Any, req: Any, why: str) -> None:
        """Abort a waiting request before the next round; while batches are made the queue must stay as it is."""
        self._given_up.append((req, why))

    def _abort_given_up(self: Any, scheduler: Any) -> None:
        for req, why in self._given_up:
            if req in scheduler.waiting_queue:
                scheduler.waiting_queue.remove(req)
                scheduler.ipc_channels.send_to_tokenizer.send_output(
                    AbortReq(rid=req.rid, finished_reason=FINISH_ABORT(why, HTTPStatus.SERVICE_UNAVAILABLE).to_json()),
                    req,
                )
        self._given_up.clear()

    def drop_tokens(self: Any, req: Any, state: DecodeState) -> bool:
        """Keep the best tokens of every (layer, head) and move them together; whether there was room for that.

        Where the tree owns a part of the row, the survivors are copied to slots of the request, and what lay there
        stays as it is.
        """
        began = time.perf_counter()
        num_slots, shared, page = num_physical(req), num_shared(req), self.page_size
        num_kept = target(state.settings, num_slots, page)
        fresh = None
        if shared > 0:
            fresh = take_slots(self, -(-num_kept // page) * page)
            if fresh is None:
                return False
        try:
            slots = row_of(self, req, num_slots)
            self.compressor.wait_for_forward(slots)
            survey = self._survey(req, state, slots, num_kept, fresh)
        except torch.OutOfMemoryError as error:
            if fresh is not None:
                self.token_to_kv_pool_allocator.free(fresh)
            return self._put_off(req, error)
        if not state.has_left_tree:
            leave_tree(self, req)
        kind: PassKind = "prefill" if state.is_first_visit else self._way(state)
        if fresh is not None:
            kind, kept, freed = "copy_out", fresh[:num_kept], slots[shared:]
        else:
            kept, freed = slots[:num_kept], slots[-(-num_kept // page) * page :]
            self._compact(slots, survey)
            state.is_in_order = state.is_in_order and survey.moves is None
        state.positions = survey.positions
        free_whole_pages(self.token_to_kv_pool_allocator, freed)
        put_row(self, req, kept, num_slots - num_kept)
        self._note_pass(req, state, kind, num_slots, -(-len(freed) // page), began, num_kept, survey.copies)
        return True

    def _survey(
        self: Any, req: Any, state: DecodeState, slots: torch.Tensor, num_kept: int, fresh: torch.Tensor | None
    ) -> Survey:
        """All of a pass that takes device memory for every layer and head; nothing that anybody uses is changed. What
        is left takes some for the slots of one row."""
        node = self._press_input(req, state, slots)
        scores = score(state.settings.score, node, state.settings.window)
        chosen = survivors(scores, node.positions, num_kept, self.compressor.sinks, in_order=state.is_in_order)
        if fresh is not None:
            self.compressor.copy_survivors(slots, chosen, fresh[:num_kept])
            return Survey(chosen, repack_positions(node.positions, chosen), None, None)
        if self._way(state) == "repack":
            return Survey(chosen, repack_positions(node.positions, chosen), None, repack_copies(chosen))
        targets, sources = moves = hole_moves(chosen, slots.numel())
        positions = holefill_positions(node.positions, targets, sources, num_kept)
        return Survey(chosen, positions, moves, holefill_copies(chosen))

    def _put_off(self: Any, req: Any, error: torch.OutOfMemoryError) -> bool:
        """The device has no memory for a pass now: the request stays as it is, and the next round tries again. With
        other ranks it stays an error, for they would no longer hold the same."""
        if not self.compressor.is_alone:
            raise error
        self.budget_totals.num_put_off = count = self.budget_totals.num_put_off + 1
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th: every round may try
            text = "evicpress: a pass over request %s was put off, the device has no memory for it (time %d): %s"
            logger.warning(text, req.rid, count, error)
        return False

    def _way(self: Any, state: DecodeState) -> Literal["repack", "holefill"]:
        """``compact`` fills holes: where that copies as much as a repack it is one, and never does it copy more.
        ``paged`` keeps the order, as its pages are of neighbours."""
        return "repack" if state.settings.method in ("paged", "repack") else "holefill"

    def _compact(self: Any, slots: torch.Tensor, survey: Survey) -> None:
        """Bring the survivors to the first slots of the row, in place."""
        buffers = self.compressor.k_buffers, self.compressor.v_buffers
        if survey.moves is None:
            compact(*buffers, slots, survey.chosen)
        else:
            fill_holes(*buffers, slots, *survey.moves)

    def _drop_page(self: Any, req: Any, state: DecodeState) -> bool:
        """Free the page with the lowest mean score; what comes behind it moves up in the row, and nothing is copied.

        Which one it is the host does not learn: nothing waits for the device, unless ranks must agree.
        """
        began, copies = time.perf_counter(), 0
        try:
            if not state.has_left_tree:
                copies = num_shared(req)
                if not unshare(self, req):
                    return False
            num_slots, page = num_physical(req), self.page_size
            slots = row_of(self, req, num_slots)
            self.compressor.wait_for_forward(slots)
            node = self._press_input(req, state, slots)
            means = self.compressor.summed(page_means(score(state.settings.score, node, state.settings.window), page))
            dropped = worst_pages(means, state.settings.protect)
            order = torch.arange(num_slots // page - 1, device=slots.device)
            order += order >= dropped
            known = positions_of(state.positions, num_logical(req), num_slots, slots.device)
            positions = known.view(*known.shape[:-1], -1, page).index_select(-2, order).flatten(-2)
            pages = slots.view(-1, page)
            freed, kept = pages.index_select(0, dropped)[0], pages.index_select(0, order).flatten()
        except torch.OutOfMemoryError as error:
            return self._put_off(req, error)
        free_whole_pages(self.token_to_kv_pool_allocator, freed)
        state.positions = positions
        put_row(self, req, kept, page)
        self._note_pass(req, state, "page", num_slots, 1, began, copies)
        return True

    def _press_input(self: Any, req: Any, state: DecodeState, slots: torch.Tensor) -> PressInput:
        """The whole row, as a press sees it."""
        compressor, num_tokens = self.compressor, num_logical(req)
        known = state.positions if state.has_left_tree else path_positions(self, req)
        positions = positions_of(known, num_tokens, len(slots), slots.device)
        return PressInput(
            k_buffers=compressor.k_buffers,
            v_buffers=compressor.v_buffers,
            slots=slots,
            positions=positions.expand(compressor.num_layers, compressor.num_heads, -1),
            start=0,
            num_tokens=num_tokens,
            window=self._queries_of(req, state),
            scale=compressor.scale,
            page_size=self.page_size,
        )

    def _queries_of(self: Any, req: Any, state: DecodeState) -> QueryWindow | None:
        if QueryRing.active is None or not state.settings.reads_queries:
            return None
        num_tokens = num_logical(req)
        return QueryRing.active.window_of(req.req_pool_idx, num_tokens - state.num_cached, num_tokens)

    def _note_pass(
        self: Any,
        req: Any,
        state: DecodeState,
        kind: PassKind,
        num_before: int,
        num_freed: int,
        began: float,
        num_copies: int,
        copies: torch.Tensor | None = None,
    ) -> None:
        """``num_copies`` where the host knows them, else ``copies``."""
        seconds, known = time.perf_counter() - began, float(num_copies) if copies is None else None
        record = PassRecord(kind, num_logical(req), num_before, num_physical(req), num_freed, known, seconds)
        state.tally.see(num_before)
        self.budget_totals.add(state.tally, record)
        if copies is not None:
            state.unsettled.append((record, HostCopy(copies.mean(dtype=torch.float32))))
        if state.trace is not None and state.positions is not None:
            self._trace_room.add(state.trace, record, state.positions, self._ended_traces())

    def settle_copies(self: Any, state: DecodeState, *, but_last: bool = False) -> None:
        """Fill in what the device has counted; may wait for it."""
        left = state.unsettled[-1:] if but_last else []
        for record, copies in state.unsettled[: len(state.unsettled) - len(left)]:
            self.budget_totals.settle(state.tally, record, float(copies.read()))
        state.unsettled = left

    def note_end(self: Any, req: Any, state: DecodeState) -> None:
        """The request is about to give its slots back: it has ended, or waits to be computed anew."""
        if not req.finished() and req.to_finish is None:
            num_tokens = len(req.origin_input_ids) + len(req.output_ids)
            state.sent_back.append(num_tokens)
            if state.trace is not None:  # a pass that no token has seen
                state.trace.forget_from(num_tokens)
        else:
            if state.trace is not None:
                self._trace_room.end(state.trace, self.positions_of_row(req, state), self._ended_traces())
            self.ended_budgets.append((self.describe_request(req, state), state.trace))

    def _ended_traces(self: Any) -> list[DecodeTrace]:
        return [trace for _, trace in self.ended_budgets if trace is not None]
