"""Prometheus series on a server with ``--enable-metrics``.

The scheduler process writes them, with SGLang's own labels, to the folder that SGLang has set up for its processes; its
main process serves what is there as ``/metrics``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sglang_evicpress.error_text import code_path
from sglang_evicpress.introspect.series import PREFIX, SERIES, Figures, Series

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Between two publications at least."""

PAUSE_S = 60.0
"""After one that failed."""

Labels = tuple[str, ...]


class MetricsReporter(Protocol):
    """SGLang's SchedulerMetricsReporter."""

    current_scheduler_metrics_enabled: bool


class MetricsCollector(Protocol):
    """SGLang's SchedulerMetricsCollector."""

    labels: Mapping[str, object]


class MeasuredScheduler(Protocol):
    """The scheduler; without metrics it has no collector."""

    metrics_reporter: MetricsReporter | None
    metrics_collector: MetricsCollector | None


class _Counters:
    """One series that only grows, by the values of its own labels."""

    def __init__(self, series: Series, metric: Counter, common: Mapping[str, object]) -> None:
        self.series, self._metric, self._common = series, metric, common
        self._children: dict[Labels, tuple[Counter, float]] = {}

    def publish(self, values: Mapping[Labels, float]) -> None:
        for labels, value in values.items():
            child, before = self._children.get(labels, (None, 0.0))
            if child is None:
                child = self._metric.labels(**self._common, **dict(zip(self.series.labels, labels, strict=True)))
            if value != before:
                child.inc(value - before if value > before else value)  # counted anew, as by a new SSD folder
            self._children[labels] = child, value


class _Gauges:
    """One series of present values, by those of its own labels. What is not there any more is 0."""

    def __init__(self, series: Series, metric: Gauge, common: Mapping[str, object]) -> None:
        self.series, self._metric, self._common = series, metric, common
        self._children: dict[Labels, tuple[Gauge, float]] = {}

    def publish(self, values: Mapping[Labels, float]) -> None:
        for labels, value in {**dict.fromkeys(self._children, 0.0), **values}.items():
            child, before = self._children.get(labels, (None, None))
            if child is None:
                child = self._metric.labels(**self._common, **dict(zip(self.series.labels, labels, strict=True)))
            if value != before:
                child.set(value)
                self._children[labels] = child, value


class Metrics:
    """Publishes ``SERIES`` out of what ``read`` answers. ``labels`` are SGLang's own."""

    def __init__(
        self, labels: Mapping[str, object], read: Callable[[], Figures], clock: Callable[[], float] = time.monotonic
    ) -> None:
        from prometheus_client import Counter, Gauge  # not before SGLang has named the folder of its processes

        self._read, self._clock = read, clock
        self._next_s = -float("inf")
        self._series: list[_Counters | _Gauges] = []
        for series in SERIES:
            name, names = PREFIX + series.name, (*labels, *series.labels)
            if series.kind == "counter":
                self._series.append(_Counters(series, Counter(name, series.text, names), labels))
            else:
                gauge = Gauge(name, series.text, names, multiprocess_mode="mostrecent")
                self._series.append(_Gauges(series, gauge, labels))

    def publish_when_due(self) -> None:
        """Once every ``INTERVAL_S``; else it costs a look at the clock. Never raises: it runs in the scheduler loop."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + INTERVAL_S
        try:
            self.publish()
        except Exception as error:  # noqa: BLE001 - a disk that is full: the series stand still, the server serves
            self._next_s = now_s + PAUSE_S
            logger.error("evicpress: no series are published for %g s: %r, at %s", PAUSE_S, error, code_path(error))

    def publish(self) -> None:
        """Bring every series up to date."""
        figures = self._read()
        for each in self._series:
            each.publish(dict(each.series.read(figures)))


@dataclass(frozen=True, slots=True)
class FigureReader:
    """Reads what the endpoints answer. ``budgets`` are of running requests, ``profiler`` counts what it did."""

    stats: Callable[[], Mapping[str, object]]
    tiers: Callable[[], Mapping[str, object]]
    budgets: Callable[[], Mapping[str, object]]
    profiler: Mapping[str, int]

    def __call__(self) -> Figures:
        stats = self.stats()
        threads = stats["threads"]
        named = {str(each["name"]): each for each in threads} if isinstance(threads, list) else {}
        return {
            "stats": stats,
            "tiers": self.tiers(),
            "budgets": self.budgets(),
            "profiler": self.profiler,
            "threads": named,
        }


class Described(Protocol):
    """What the endpoints answer."""

    @property
    def describe_stats(self) -> Callable[[], Mapping[str, object]]: ...
    @property
    def describe_tiers(self) -> Callable[[], Mapping[str, object]]: ...


def metrics_of(
    scheduler: MeasuredScheduler,
    inspector: Described,
    budgets: Callable[[], Mapping[str, object]],
    profiler: Mapping[str, int],
) -> Metrics | None:
    """Metrics of a scheduler, None on a server, or a rank, that has none. See ``FigureReader``."""
    reporter, collector = scheduler.metrics_reporter, scheduler.metrics_collector
    if reporter is None or collector is None or not reporter.current_scheduler_metrics_enabled:
        return None
    read = FigureReader(inspector.describe_stats, inspector.describe_tiers, budgets, profiler)
    return Metrics(collector.labels, read)
