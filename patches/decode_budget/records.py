"""Records of decode-time budgets: the counts of the server, the traces, and the requests that ended lately."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from sglang_evicpress.decode_budget.stats import PassRecord, Totals
from sglang_evicpress.device import HostCopy
from sglang_evicpress.patches.compat.release import REQUEST_KV
from sglang_evicpress.patches.decode_budget.state import BudgetedRequest, DecodeState, num_physical, positions_of_row
from sglang_evicpress.patches.decode_budget.trace import DecodeTrace, TraceRoom

MAX_ENDED = 256
"""Requests that ended, of which the last so many can still be asked about."""

MAX_RID = 256  # characters of a request's name that are kept: clients choose it


class Ended(NamedTuple):
    """A request that ended, as it is described, with its trace."""

    number: int
    described: dict[str, object]
    trace: DecodeTrace | None


class BudgetRecords:
    """Counts of this server, and requests that ended."""

    def __init__(self, device: torch.device | str) -> None:
        self.totals = Totals()
        self.ended: deque[Ended] = deque(maxlen=MAX_ENDED)
        self._trace_room = TraceRoom()
        self._device = device

    def note_request(self) -> int:
        """Count a request that comes with a budget; its number."""
        self.totals.num_requests += 1
        return self.totals.num_requests

    def note_deferred(self) -> int:
        """Count a pass for which the device had no memory; how many there were."""
        self.totals.num_deferred += 1
        return self.totals.num_deferred

    def note_pass(self, state: DecodeState, record: PassRecord, copies: tuple[HostCopy, int] | None) -> None:
        """Count a pass. ``copies``: where the device counts what it copies, and the place of the row there."""
        state.stats.see(record.before)
        self.totals.add(state.stats, record)
        if copies is not None:
            state.unsettled.append((record, *copies))
        if state.trace is not None and state.positions is not None:
            self._trace_room.add(state.trace, record, state.positions.clone(), self._ended_traces())

    def settle_copies(self, state: DecodeState, *, but_last: bool = False) -> None:
        """Fill in what the device has counted; may wait for it."""
        left = state.unsettled[-1:] if but_last else []
        for record, copies, place in state.unsettled[: len(state.unsettled) - len(left)]:
            self.totals.settle(state.stats, record, float(copies.read()[place]))
        state.unsettled = left

    def note_end(self, req: BudgetedRequest, state: DecodeState) -> None:
        """The request is about to give its slots back: it has ended, or waits to be computed anew."""
        if not req.finished() and req.to_finish is None:
            num_tokens = len(req.origin_input_ids) + len(req.output_ids)
            state.retracted.append(num_tokens)
            if state.trace is not None:  # a pass that no token has seen
                state.trace.forget_from(num_tokens)
        else:
            if state.trace is not None:
                self._trace_room.end(state.trace, positions_of_row(req, state, self._device), self._ended_traces())
            # A request that a user has aborted may be sent back once more before it ends.
            earlier = next((each for each in self.ended if each.number == state.number), None)
            if earlier is not None:
                self.ended.remove(earlier)
            self.ended.append(Ended(state.number, self.describe_request(req, state), state.trace))

    def describe_request(self, req: BudgetedRequest, state: DecodeState) -> dict[str, object]:
        """All but its positions and its trace."""
        settings = state.settings
        is_held = REQUEST_KV.holds_kv(req)
        num_slots = num_physical(req) if is_held else 0
        num_tokens = len(req.origin_input_ids) + len(req.output_ids)
        self.settle_copies(state)
        has_ended = req.finished() or req.to_finish is not None
        return {
            "rid": req.rid[:MAX_RID],
            "number": state.number,
            "state": "ended" if has_ended else "running" if is_held else "waiting",
            "every": settings.interval,
            "protected_pages": list(settings.protected_pages),
            "shares_prefix": is_held and not state.has_left_tree and REQUEST_KV.protected_len(req) > 0,
            "retracted_at": list(state.retracted),
            **state.stats.to_json(settings, num_tokens, num_slots),
        }

    def _ended_traces(self) -> list[DecodeTrace]:
        return [ended.trace for ended in self.ended if ended.trace is not None]
