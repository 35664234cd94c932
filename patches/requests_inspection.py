"""What running requests with a decode-time budget hold and have dropped: the answer to ``/evicpress/requests``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sglang_evicpress.arguments import IntrospectionError
from sglang_evicpress.patches.budget_metrics import BudgetMetrics
from sglang_evicpress.patches.decode_state import (
    DecodeState,
    budget_of,
    holds_kv,
    num_logical,
    num_physical,
    positions_of,
)
from sglang_evicpress.patches.decode_trace import DecodeTrace


class RequestsInspection:
    """The part of EvicPressCache that tells of requests; reads only."""

    def describe_requests(self: Any, rid: str | None, *, positions: bool) -> dict[str, object]:
        """Requests with a budget, the waiting and running ones first, then those that ended lately, oldest first.

        Raises IntrospectionError 404 for a ``rid`` that is not among them.
        """
        shown = []
        for req, state in self._budgeted():
            if rid is None or req.rid == rid:
                held = self.positions_of_row(req, state) if positions else None
                kept = {"positions": None if held is None else held.tolist(), **_shown(state.trace, positions)}
                shown.append({**self.describe_request(req, state), **kept})
        for described, trace in self.ended_budgets:
            if rid is None or described["rid"] == rid:
                held = trace.final if positions and trace is not None else None
                kept = {"positions": None if held is None else held.read().tolist(), **_shown(trace, positions)}
                shown.append({**described, **kept})
        if rid is not None and not shown:
            raise IntrospectionError(404, f"request {rid!r} has no budget here, or ended long ago")
        return {"requests": shown, "totals": self.budget_totals.to_json()}

    def describe_request(self: Any, req: Any, state: DecodeState) -> dict[str, object]:
        """All but its positions and its trace."""
        settings = state.settings
        is_held = req.req_pool_idx is not None and not req.kv_committed_freed
        num_slots = num_physical(req) if is_held else 0
        num_tokens = len(req.origin_input_ids) + len(req.output_ids)
        self.settle_copies(state)
        has_ended = req.finished() or req.to_finish is not None
        return {
            "rid": req.rid,
            "state": "ended" if has_ended else "running" if is_held else "waiting",
            "every": settings.every,
            "protect": list(settings.protect),
            "shares_prefix": is_held and not state.has_left_tree and req.cache_protected_len > 0,
            "sent_back_at": list(state.sent_back),
            **state.tally.to_json(settings, num_tokens, num_slots),
        }

    def positions_of_row(self: Any, req: Any, state: DecodeState) -> torch.Tensor | None:
        """What the slots of its row hold; None unless they are all its own."""
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


def _shown(trace: DecodeTrace | None, positions: bool) -> dict[str, object]:
    if trace is None or not positions:
        return {"trace": None, "is_trace_cut": None}
    return {"trace": trace.to_json(), "is_trace_cut": trace.is_cut}
