"""Decode-time budgets: before each step of the scheduler, drop what running requests hold over theirs.

Prefixes in the tree are never touched: a request that is to drop anything copies what it shares, or what survives of
it, into slots of its own first. When and how much is a function of lengths alone, so that ranks agree and a server
with overlap drops at the same tokens as one without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import torch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_evicpress.asked_quality import asks_exact, check_quality
from sglang_evicpress.asked_retention import check_retention
from sglang_evicpress.decode_budget.schedule import is_due, is_near, is_over
from sglang_evicpress.decode_budget.settings import DecodeSettings, client_settings, fields_of
from sglang_evicpress.decode_budget.stats import RequestStats, Totals
from sglang_evicpress.patches.attention.query_ring import STEPS_AHEAD, QueryRing
from sglang_evicpress.patches.compat.release import REQUEST_KV
from sglang_evicpress.patches.decode_budget.rows import DecodeTree, row_of, unshare
from sglang_evicpress.patches.decode_budget.state import (
    BudgetedRequest,
    DecodeState,
    budget_of,
    holds_kv,
    num_physical,
    num_shared,
)
from sglang_evicpress.patches.decode_budget.trace import DecodeTrace
from sglang_evicpress.patches.decode_budget.types import ArrivingRequest, DecodeScheduler
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node_kv import PrefixView
from sglang_evicpress.patches.unsupported import check_decode


class BudgetLog(Protocol):
    """Counts of requests with a budget."""

    totals: Totals

    def note_request(self) -> int: ...
    def settle_copies(self, state: DecodeState, *, but_last: bool = False) -> None: ...
    def note_end(self, req: BudgetedRequest, state: DecodeState) -> None: ...


class Floors(Protocol):
    """Floors of quality."""

    def of_request(self, req: ArrivingRequest) -> float: ...


@dataclass(eq=False, repr=False)
class DecodeBudgets:
    """Budgets of running requests: ``default`` is the server's, ``clients`` what requests may choose; ``floors`` are of
    the quality that a request is promised."""

    tree: DecodeTree
    compressor: Compressor
    make_passes: Callable[[Sequence[BudgetedRequest]], bool]
    log: BudgetLog
    default: DecodeSettings
    clients: str
    floors: Floors

    def __post_init__(self) -> None:
        self.has_budgets = False  # until the first request comes with one
        self._given_up: list[tuple[BudgetedRequest, str]] = []

    @property
    def totals(self) -> Totals:
        """Counts of this server."""
        return self.log.totals

    # ---- requests that come

    def settings_of(self, req: ArrivingRequest) -> tuple[DecodeSettings | None, bool]:
        """The budget a request comes with, None for none, and whether it wants the trace of its passes.

        Raises ValueError, one sentence, for what it asked for and cannot have.
        """
        if is_shadow_name(req.extra_key):  # measures the KV of prefixes, as they are
            return None, False
        params = req.sampling_params.custom_params
        check_quality(params)
        check_retention(params)
        settings, wants_trace = client_settings(params, self.default, self.clients)
        if settings is not None and self.floors.of_request(req) == 1.0:
            if "kv_decode_budget" in fields_of(params):
                whose, way_out = ("", "one") if asks_exact(params) else ("its tenant's ", "the latter")
                raise ValueError(
                    f"{whose}kv_quality is 'exact' and kv_decode_budget is {settings.tokens}, which drops KV: "
                    f"leave {way_out} out"
                )
            return None, False  # the server's own budget is for requests that take any KV
        if settings is not None and self.compressor.groups.num_groups > 1:
            raise ValueError(
                f"kv_decode_budget is {settings.tokens}, and this server's --kv-forms keep different numbers of tokens "
                "in different layers, of which none can be dropped while a request runs: leave it out"
            )
        if settings is not None:
            check_decode(
                settings,
                self.tree.page_size,
                self.compressor.sinks,
                keeps_queries=self.default.reads_queries,
                has_geometry=self.compressor.geometry is not None,
            )
        return settings, wants_trace

    def begin(self, req: ArrivingRequest, settings: DecodeSettings, *, wants_trace: bool) -> None:
        """The request has this budget from now on."""
        self.has_budgets = True
        trace = DecodeTrace() if wants_trace else None
        req.kv_budget = DecodeState(settings, RequestStats(), trace=trace, number=self.log.note_request())

    # ---- requests that run

    def visit_budgets(self, scheduler: DecodeScheduler) -> None:
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

    def _reads_soon(self, req: BudgetedRequest, state: DecodeState, ring: QueryRing) -> bool:
        """True if a pass may read the query of the next step: it is at most so many steps away."""
        if not state.settings.reads_queries:
            return False
        within = ring.window + STEPS_AHEAD
        return state.is_first_visit or is_near(state.settings, num_physical(req), self.tree.page_size, within)

    def _is_due(self, req: BudgetedRequest, state: DecodeState) -> bool:
        """True if a request that has its prompt computed is to drop anything now."""
        if getattr(req, "skip_radix_cache_insert", False):  # its KV is not of its tokens alone
            state.in_tree = True
        if not state.in_tree:  # with overlap the prefill is in flight, and its result comes after the next launch
            self.compressor.wait_for_forward(self.compressor.k_buffers[0])  # for the queries that its node keeps
            self.tree.keep_running(req, req.get_fill_ids(), is_chunk=False)
        num_slots, page = num_physical(req), self.tree.page_size
        if state.is_first_visit and is_over(state.settings, num_slots, page):
            return True
        state.is_first_visit = False
        return is_due(state.settings, num_slots, page)

    def _visit(self, reqs: list[BudgetedRequest]) -> bool:
        """The passes that are due; whether anything was dropped."""
        before = [num_physical(req) for req in reqs]
        has_dropped = self.make_passes(reqs)
        for req, num_slots in zip(reqs, before, strict=True):
            if num_physical(req) < num_slots:
                req.kv_budget.is_first_visit = False
        return has_dropped

    def keeps_back(self, req: BudgetedRequest, *, chunked: bool) -> bool:
        """True if the tree is offered nothing of a request that has computed its prompt, or a chunk of it."""
        state = budget_of(req)
        if state is None:
            return False
        if chunked and state.is_chunked:
            self._stash_piece(req, state)
            return True
        if chunked or state.in_tree:  # handed in before its first pass, see _is_due
            return not chunked
        state.in_tree = True
        return False

    def note_end(self, req: BudgetedRequest) -> bool:
        """The request is about to give its slots back; False if the tree must take nothing of it: what was computed on
        survivors is nobody else's."""
        state = budget_of(req)
        if state is None:
            return True
        self.log.note_end(req, state)
        return not state.has_left_tree

    def end(self, req: BudgetedRequest) -> None:
        """The request has given its slots back."""
        state = budget_of(req)
        if state is not None:
            state.reset()

    def _stash_piece(self, req: BudgetedRequest, state: DecodeState) -> None:
        """A piece (chunked_recompute.py) is computed, or in flight: drop what is over the budget, and show SGLang the
        rest as the prefix of the next one, with holes."""
        state.in_tree = True
        if is_over(state.settings, num_physical(req), self.tree.page_size):
            self.make_passes([req])
        elif not state.has_left_tree:
            unshare(self.tree, self.compressor, [req])
        slots = row_of(self.tree, req, num_physical(req))
        if not state.has_left_tree:  # there was no room to copy what it shares: another try after the next piece
            prefix = req.prefix_indices[: REQUEST_KV.protected_len(req)]
            REQUEST_KV.set_prefix(req, torch.cat([prefix, slots[num_shared(req) :]]))
            req.evicpress = PrefixView(slots, req.evicpress.holes, req.evicpress.is_lossy, True)
            return
        REQUEST_KV.set_prefix(req, torch.cat([slots.new_zeros(state.num_dropped), slots]))

    # ---- requests that cannot go on

    def give_up(self, req: BudgetedRequest, why: str) -> None:
        """Abort a waiting request before the next round; while batches are made the queue must stay as it is."""
        self._given_up.append((req, why))

    def _abort_given_up(self, scheduler: DecodeScheduler) -> None:
        for req, why in self._given_up:
            if req in scheduler.waiting_queue:
                scheduler.waiting_queue.remove(req)
                scheduler.ipc_channels.send_to_tokenizer.send_output(
                    AbortReq(rid=req.rid, finished_reason=FINISH_ABORT(why, HTTPStatus.SERVICE_UNAVAILABLE).to_json()),
                    req,
                )
        self._given_up.clear()

    def describe(self, scheduler: DecodeScheduler) -> dict[str, object]:
        """Counts of this server, and the slots that running requests with a budget hold and are granted."""
        held = granted = 0
        for req in scheduler.running_batch.reqs if self.has_budgets else ():
            state = budget_of(req)
            if state is not None and holds_kv(req):
                self.log.settle_copies(state, but_last=True)  # that of a pass just made would be waited for
                held += num_physical(req)
                granted += state.settings.tokens
        return {"totals": self.log.totals.to_json(), "held_slots": held, "granted_slots": granted}
