"""Decode-time budgets: before each step of the scheduler, drop what running requests hold over theirs.

Prefixes in the tree are never touched: a request that is to drop anything copies what it shares, or what survives of
it, into slots of its own first. When and how much is a function of lengths alone, so that ranks agree and a server
with overlap drops at the same tokens as one without.
"""

from __future__ import annotations

from collections import deque
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_evicpress.decode_budget.schedule import is_due, is_near, is_over
from sglang_evicpress.decode_budget.stats import Totals
from sglang_evicpress.patches.attention.query_ring import STEPS_AHEAD, QueryRing
from sglang_evicpress.patches.decode_budget.passes import DecodePasses
from sglang_evicpress.patches.decode_budget.state import DecodeState, budget_of, holds_kv, num_physical
from sglang_evicpress.patches.decode_budget.trace import DecodeTrace, TraceRoom
from sglang_evicpress.patches.unsupported import decode_settings

MAX_ENDED = 256
"""Requests that ended, of which the last so many can still be asked about."""


class DecodeBudgets(DecodePasses):
    """The part of EvicPressCache that drops KV of running requests."""

    def open_budgets(self: Any) -> None:
        self.default_budget = decode_settings(self.config)
        self.client_budgets: str = self.config.decode_client_budgets
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
        due = []
        for batch in batches:
            for req in batch.reqs:
                state = budget_of(req)
                if state is None or id(req) in seen or not holds_kv(req):
                    continue
                seen.add(id(req))
                if QueryRing.active is not None:
                    QueryRing.active.is_needed |= self._reads_soon(req, state, QueryRing.active)
                is_prefilled = req is not scheduler.chunked_req and req.inflight_middle_chunks <= 0
                if is_prefilled and self._is_due(req, state):
                    due.append(req)
        if due and self._visit(due):
            running.batch_is_full = False
            self.publish_budgets(running)

    def _reads_soon(self: Any, req: Any, state: DecodeState, ring: QueryRing) -> bool:
        """True if a pass may read the query of the next step: it is at most so many steps away."""
        if not state.settings.reads_queries:
            return False
        within = ring.window + STEPS_AHEAD
        return state.is_first_visit or is_near(state.settings, num_physical(req), self.page_size, within)

    def _is_due(self: Any, req: Any, state: DecodeState) -> bool:
        """True if a request that has its prompt computed is to drop anything now."""
        if not state.in_tree:  # with overlap the prefill is in flight, and its result comes after the next launch
            self.compressor.wait_for_forward(self.compressor.k_buffers[0])  # for the queries that its node keeps
            self.cache_unfinished_req(req)
        num_slots, page = num_physical(req), self.page_size
        if state.is_first_visit and is_over(state.settings, num_slots, page):
            return True
        state.is_first_visit = False
        return is_due(state.settings, num_slots, page)

    def _visit(self: Any, reqs: list[Any]) -> bool:
        """The passes that are due; whether anything was dropped."""
        before = [num_physical(req) for req in reqs]
        has_dropped = bool(self.make_passes(reqs))
        for req, num_slots in zip(reqs, before, strict=True):
            if num_physical(req) < num_slots:
                req.kv_budget.is_first_visit = False
        return has_dropped

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

    def settle_copies(self: Any, state: DecodeState, *, but_last: bool = False) -> None:
        """Fill in what the device has counted; may wait for it."""
        left = state.unsettled[-1:] if but_last else []
        for record, copies, place in state.unsettled[: len(state.unsettled) - len(left)]:
            self.budget_totals.settle(state.tally, record, float(copies.read()[place]))
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
