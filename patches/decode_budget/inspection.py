"""Inspection of requests with a decode-time budget: the answer to ``/evicpress/requests``."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.patches.decode_budget.metrics import BudgetMetrics
from sglang_evicpress.patches.decode_budget.state import (
    DecodeState,
    budget_of,
    holds_kv,
    num_logical,
    num_physical,
    position_values,
    positions_of,
)

MAX_RID = 256  # characters of a request's name that are kept: clients choose it
MAX_REQUESTS = 100
"""Requests that one answer lists at most."""
MAX_VALUES = 65536
"""Positions that one answer shows at most: what the scheduler's thread encodes in about a millisecond."""


class RequestsInspection:
    """The part of EvicPressCache that tells of requests; reads only."""

    def describe_requests(
        self: Any, rid: str | None, *, positions: bool, offset: int = 0, after: int = 0, limit: int = MAX_REQUESTS
    ) -> dict[str, object]:
        """Requests with a budget, those that ended lately included, by their numbers, which count them from 1: all
        named ``rid``, or up to ``limit`` with numbers above ``after``. ``next_after`` asks for the rest, None without
        one.

        ``positions`` shows of the last one named ``rid`` what its slots hold and what each traced pass left, as one
        row of ``num_values`` values: up to MAX_VALUES of them from ``offset`` on, and ``next_offset``. Shapes tell how
        to cut them; the passes come with offset 0.

        Raises IntrospectionError 404 for a ``rid`` that is not among them.
        """
        live = (
            (state.number, (req, state))
            for req, state in self._budgeted()
            if rid is None or req.rid[:MAX_RID] == rid[:MAX_RID]
        )
        ended = ((described["number"], each) for each in self.ended_budgets for described in (each[0],))
        named = (each for each in ended if rid is None or each[1][0]["rid"] == rid)
        most = MAX_REQUESTS if rid is not None else min(limit, MAX_REQUESTS)
        after = 0 if rid is not None else after
        found = [each for each in chain(live, named) if each[0] > after]
        if rid is not None and not found:
            raise IntrospectionError(404, f"request {rid!r} has no budget here, or ended long ago")
        if positions:
            ((_, last),) = heapq.nlargest(1, found, key=itemgetter(0))
            return {"requests": [self._describe_positions(*last, offset)], "totals": self.budget_totals.to_json()}
        shown = heapq.nsmallest(most, found, key=itemgetter(0))
        return {
            "requests": [self._describe(*each) for _, each in shown],
            "next_after": shown[-1][0] if len(shown) < len(found) else None,
            "totals": self.budget_totals.to_json(),
        }

    def _describe(self: Any, one: Any, other: Any) -> dict[str, object]:
        """A live request with its state, or one that ended with its trace."""
        return one if isinstance(one, dict) else self.describe_request(one, other)

    def _describe_positions(self: Any, one: Any, other: Any, offset: int) -> dict[str, object]:
        end = offset + MAX_VALUES
        if isinstance(one, dict):
            trace, final = other, None if other is None else other.final
            shape = None if final is None else list(final.shape)
            num_held = 0 if final is None else final.size
            held = np.empty(0, np.int32) if final is None else final.read().numpy().reshape(-1)[offset:end]
        else:
            trace, shape = other.trace, self._shape_of_row(one, other)
            num_held = 0 if shape is None else math.prod(shape)
            held = np.empty(0, np.int32)
            if offset < num_held:
                lengths = num_logical(one), num_physical(one)
                values = position_values(other.positions, *lengths, offset, min(end, num_held), self.device)
                held = values.cpu().numpy()
        num_values = num_held + (0 if trace is None else trace.num_values)
        if trace is not None and end > num_held:
            held = np.concatenate([held, trace.values(max(0, offset - num_held), end - num_held)])
        return {
            **self._describe(one, other),
            "positions_shape": shape,
            "trace": trace.to_json() if trace is not None and offset == 0 else None,
            "is_trace_cut": None if trace is None else trace.is_cut,
            "values": held,
            "num_values": num_values,
            "next_offset": end if end < num_values else None,
        }

    def _shape_of_row(self: Any, req: Any, state: DecodeState) -> list[int] | None:
        """Shape of ``positions_of_row``, without making it."""
        if req.req_pool_idx is None or req.kv_committed_freed or not state.has_left_tree:
            return None
        return [*(() if state.positions is None else state.positions.shape[:-1]), num_physical(req)]

    def describe_request(self: Any, req: Any, state: DecodeState) -> dict[str, object]:
        """All but its positions and its trace."""
        settings = state.settings
        is_held = req.req_pool_idx is not None and not req.kv_committed_freed
        num_slots = num_physical(req) if is_held else 0
        num_tokens = len(req.origin_input_ids) + len(req.output_ids)
        self.settle_copies(state)
        has_ended = req.finished() or req.to_finish is not None
        return {
            "rid": req.rid[:MAX_RID],
            "number": state.number,
            "state": "ended" if has_ended else "running" if is_held else "waiting",
            "every": settings.every,
            "protect": list(settings.protect),
            "shares_prefix": is_held and not state.has_left_tree and req.cache_protected_len > 0,
            "sent_back_at": list(state.sent_back),
            **state.tally.to_json(settings, num_tokens, num_slots),
        }

    def positions_of_row(self: Any, req: Any, state: DecodeState) -> torch.Tensor | None:
        """Positions that the slots of its row hold; None unless they are all its own."""
        if req.req_pool_idx is None or req.kv_committed_freed or not state.has_left_tree:
            return None
        return positions_of(state.positions, num_logical(req), num_physical(req), self.device)

    def publish_budgets(self: Any, running: Any) -> None:
        """Bring the metrics up to date, on a server that has any."""
        reporter = getattr(self.scheduler, "metrics_reporter", None)
        if reporter is None or not reporter.current_scheduler_metrics_enabled:
            return
        if self._budget_metrics is None:
            self._budget_metrics = BudgetMetrics(self.scheduler.server_args.served_model_name)
        held = granted = 0
        for req in running.reqs:
            state = budget_of(req)
            if state is not None and holds_kv(req):
                self.settle_copies(state, but_last=True)  # that of a pass just made would be waited for
                held += num_physical(req)
                granted += state.settings.tokens
        self._budget_metrics.publish(self.budget_totals, held, granted)

    def _budgeted(self: Any) -> Iterator[tuple[Any, DecodeState]]:
        scheduler = self.scheduler
        if scheduler is None or not self.has_budgets:
            return
        seen: set[int] = set()
        reqs = list(scheduler.waiting_queue)
        for batch in (scheduler.running_batch, scheduler.last_batch):
            reqs.extend(batch.reqs if batch is not None else [])
        if scheduler.chunked_req is not None:
            reqs.append(scheduler.chunked_req)
        for req in reqs:
            state = budget_of(req)
            if state is not None and id(req) not in seen and not req.finished():
                seen.add(id(req))
                yield req, state
