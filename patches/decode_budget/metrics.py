"""The counts of decode-time budgets as Prometheus series, on a server with ``--enable-metrics``.

SGLang's main process serves what the scheduler processes write to the folder it has set up for that.
"""

from __future__ import annotations

from sglang_evicpress.decode_budget.stats import Totals

_COUNTERS = {
    "requests": "Requests with a decode-time budget.",
    "passes": "Passes that dropped KV of running requests.",
    "tokens_evicted": "Tokens whose KV running requests dropped.",
    "pages_freed": "Pages that these passes gave back.",
    "slot_copies": "Slots that these passes copied.",
    "seconds": "Seconds that these passes took the scheduler.",
}


class BudgetMetrics:
    """Made in the scheduler process once the first budget is asked for; ``publish`` adds what is new."""

    def __init__(self, model_name: str) -> None:
        from prometheus_client import Counter, Gauge

        self._labels = {"model_name": model_name}
        self._counters = {
            name: Counter(f"evicpress:budget_{name}", text, self._labels.keys()) for name, text in _COUNTERS.items()
        }
        self._occupancy = Gauge(
            "evicpress:budget_occupancy",
            "Slots that running requests hold over the slots that their budgets grant.",
            self._labels.keys(),
            multiprocess_mode="mostrecent",
        )
        self._published = dict.fromkeys(_COUNTERS, 0.0)

    def publish(self, totals: Totals, num_held: int, num_granted: int) -> None:
        values = totals.to_json()
        for name, counter in self._counters.items():
            count = float(str(values[name]))
            counter.labels(**self._labels).inc(count - self._published[name])
            self._published[name] = count
        self._occupancy.labels(**self._labels).set(num_held / num_granted if num_granted else 0.0)
