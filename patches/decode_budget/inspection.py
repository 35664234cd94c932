"""Inspection of requests with a decode-time budget: the answer to ``/evicpress/requests``."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Protocol, TypeAlias

import numpy as np
import torch

from sglang_evicpress.decode_budget.stats import Totals
from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.patches.decode_budget.records import MAX_RID, Ended
from sglang_evicpress.patches.decode_budget.state import (
    BudgetedRequest,
    DecodeState,
    budget_of,
    num_logical,
    num_physical,
    position_values,
    row_is_own,
)
from sglang_evicpress.patches.decode_budget.types import DecodeScheduler

MAX_REQUESTS = 100
"""Requests that one answer lists at most."""
MAX_VALUES = 65536
"""Positions that one answer shows at most: what the scheduler's thread encodes in about a millisecond."""


class Watched(Protocol):
    """A cache that knows its scheduler, once that is complete."""

    @property
    def scheduler(self) -> DecodeScheduler | None: ...


class Records(Protocol):
    """Records of requests with a budget."""

    totals: Totals

    @property
    def ended(self) -> Iterable[Ended]: ...
    def describe_request(self, req: BudgetedRequest, state: DecodeState) -> dict[str, object]: ...


Told: TypeAlias = Ended | tuple[BudgetedRequest, DecodeState]
"""A request that ended, or a live one with its budget."""


class RequestsInspection:
    """Answers to questions about requests with a budget; reads only."""

    def __init__(self, cache: Watched, records: Records, device: torch.device | str) -> None:
        self._cache = cache
        self._records = records
        self._device = device

    def describe_requests(
        self, rid: str | None, *, positions: bool = False, offset: int = 0, after: int = 0, limit: int = MAX_REQUESTS
    ) -> dict[str, object]:
        """Requests with a budget, those that ended lately included, by their numbers, which count them from 1: all
        named ``rid``, or up to ``limit`` with numbers above ``after``. ``next`` (also ``next_after``) asks for the
        rest, None without one.

        ``positions`` shows of the last one named ``rid`` what its slots hold and what each traced pass left, as one
        row of ``num_values`` values: up to MAX_VALUES of them from ``offset`` on, and ``next_offset``. Shapes tell how
        to cut them; the passes come with offset 0.

        Raises IntrospectionError 404 for a ``rid`` that is not among them.
        """
        known = None if rid is None else rid[:MAX_RID]
        live: list[tuple[int, Told]] = [
            (state.number, (req, state))
            for req, state in self._budgeted()
            if known is None or req.rid[:MAX_RID] == known
        ]
        ended = [(each.number, each) for each in self._records.ended if known in (None, each.described["rid"])]
        most = MAX_REQUESTS if rid is not None else min(limit, MAX_REQUESTS)
        after = 0 if rid is not None else after
        matches = [each for each in chain(live, ended) if each[0] > after]
        if rid is not None and not matches:
            raise IntrospectionError(404, f"request {rid!r} has no budget here, or ended long ago")
        if positions:
            ((_, last),) = heapq.nlargest(1, matches, key=itemgetter(0))
            return {"requests": [self._describe_positions(last, offset)], "totals": self._records.totals.to_json()}
        page = heapq.nsmallest(most, matches, key=itemgetter(0))
        following = page[-1][0] if len(page) < len(matches) else None
        return {
            "requests": [self._describe(told) for _, told in page],
            "next": following,
            "next_after": following,
            "totals": self._records.totals.to_json(),
        }

    def _describe(self, told: Told) -> dict[str, object]:
        return told.described if isinstance(told, Ended) else self._records.describe_request(*told)

    def _describe_positions(self, told: Told, offset: int) -> dict[str, object]:
        end = offset + MAX_VALUES
        if isinstance(told, Ended):
            trace, final = told.trace, None if told.trace is None else told.trace.final
            shape = None if final is None else list(final.shape)
            num_held = 0 if final is None else final.num_elements
            final_positions = np.empty(0, np.int32) if final is None else final.read().numpy().reshape(-1)[offset:end]
        else:
            req, state = told
            trace, shape = state.trace, self._shape_of_row(req, state)
            num_held = 0 if shape is None else math.prod(shape)
            final_positions = np.empty(0, np.int32)
            if offset < num_held:
                lengths = num_logical(req), num_physical(req)
                values = position_values(state.positions, *lengths, offset, min(end, num_held), self._device)
                final_positions = values.cpu().numpy()
        num_values = num_held + (0 if trace is None else trace.num_values)
        if trace is not None and end > num_held:
            final_positions = np.concatenate([final_positions, trace.values(max(0, offset - num_held), end - num_held)])
        return {
            **self._describe(told),
            "positions_shape": shape,
            "trace": trace.to_json() if trace is not None and offset == 0 else None,
            "is_trace_cut": None if trace is None else trace.is_cut,
            "values": final_positions,
            "num_values": num_values,
            "next_offset": end if end < num_values else None,
        }

    def _shape_of_row(self, req: BudgetedRequest, state: DecodeState) -> list[int] | None:
        """Shape of ``positions_of_row``, without making it."""
        if not row_is_own(req, state):
            return None
        return [*(() if state.positions is None else state.positions.shape[:-1]), num_physical(req)]

    def _budgeted(self) -> Iterator[tuple[BudgetedRequest, DecodeState]]:
        scheduler = self._cache.scheduler
        if scheduler is None:
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
