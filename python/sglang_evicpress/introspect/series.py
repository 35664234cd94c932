"""Prometheus series: a table of names, and of the places in the answers of the endpoints that they are read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

PREFIX = "sglang_evicpress_"
"""Of every name. No colon, as SGLang has in its own: in OpenMetrics, for which Prometheus asks, that becomes an
underscore, and in plain text it stays."""

EVERY = "*"

Figures = Mapping[str, object]
"""Nested answers: ``stats``, ``tiers``, ``budgets``, ``profiler`` and ``threads``, each an object."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric. ``path`` leads to its value, names joined by dots; each ``*`` in it is a label, in the order of
    ``labels``. Counters only grow, and end in ``_total``."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    path: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.path.split(".").count(EVERY) != len(self.labels):
            raise ValueError(f"series {self.name} has labels {self.labels}: expected one for each * of {self.path!r}")
        if self.name.endswith("_total") != (self.kind == "counter"):
            raise ValueError(f"series {self.name} is a {self.kind}: expected _total at the end of counters alone")

    def read(self, figures: Figures) -> Iterator[tuple[tuple[str, ...], float]]:
        """Values of the labels with the value of the series; nothing where there is none now."""
        yield from _read(figures, self.path.split("."), ())


def _counter(name: str, text: str, path: str, *labels: str) -> Series:
    return Series(f"{name}_total", "counter", text, path, labels)


def _gauge(name: str, text: str, path: str, *labels: str) -> Series:
    return Series(name, "gauge", text, path, labels)


SERIES: tuple[Series, ...] = (
    # what requests were served
    _counter("requests", "Users' requests admitted.", "stats.admission.requests"),
    _counter("prompt_tokens", "Tokens of their prompts.", "stats.admission.prompt_tokens"),
    _counter(
        "hit_tokens",
        "Prompt tokens served from the cache, by the tier and form they were found in.",
        "stats.served.tokens.*.*",
        *("tier", "form"),
    ),
    _counter("computed_tokens", "Prompt tokens computed, by reason.", "stats.admission.computed_tokens.*", "reason"),
    _counter(
        "saved_prefill_seconds",
        "Seconds in which the hit tokens would have been computed, by the learned cost of prefilling.",
        "stats.served.saved_s.*",
        "tier",
    ),
    _counter("regret_tokens", "Dropped tokens that were asked for again.", "stats.drops.*.missed_tokens", "reason"),
    _counter(
        "regret_seconds",
        "Seconds in which these were computed again, as predicted when they were dropped.",
        "stats.drops.*.missed_s",
        "reason",
    ),
    # what was decided
    _counter(
        "decisions",
        "Decisions carried out: the cause of a drop, the occasion of any other.",
        "stats.decisions.by_reason.*.*",
        *("kind", "reason"),
    ),
    _counter("dropped_tokens", "Tokens dropped, by cause.", "stats.drops.*.tokens", "reason"),
    _counter("freed_slots", "Slots of the GPU pool freed by decisions.", "stats.decisions.freed_slots"),
    _gauge("alpha", "Seconds of delay that one unit of quality is worth.", "stats.alpha"),
    # quality
    _gauge("quality_target", "Mean quality that is held, of tokens served from the cache.", "stats.quality.target"),
    _gauge("quality_predicted", "Mean predicted quality of tokens served of late.", "stats.quality.predicted"),
    _gauge("quality_measured", "The same, corrected by judged answers.", "stats.quality.measured"),
    _gauge("quality_correction", "Loss observed over loss predicted.", "stats.quality.correction"),
    _counter("quality_refused_tokens", "Cached tokens too lossy to serve.", "stats.quality.refused_tokens"),
    _counter("profiler_events", "Work of the online profiler, by event.", "profiler.*", "event"),
    # tiers
    _gauge("nodes", "Nodes of the radix tree.", "stats.num_nodes"),
    _gauge("tier_capacity_bytes", "Size of a tier.", "tiers.tiers.*.capacity_bytes", "tier"),
    _gauge("tier_used_bytes", "Bytes of a tier in use.", "tiers.tiers.*.used_bytes", "tier"),
    _gauge(
        "tier_compression",
        "Bytes of exact, raw KV of the nodes that a tier holds, over the bytes that they take.",
        "tiers.tiers.*.compression",
        "tier",
    ),
    _gauge("stored_bytes", "Bytes of nodes, by tier and form.", "tiers.tiers.*.forms.*.bytes", "tier", "form"),
    _gauge("stored_tokens", "Tokens of nodes, by tier and form.", "tiers.tiers.*.forms.*.tokens", "tier", "form"),
    _gauge("stored_nodes", "Nodes by tier and form.", "tiers.tiers.*.forms.*.nodes", "tier", "form"),
    _gauge("tenant_held_bytes", "Bytes of a tenant with limits.", "stats.tenants.*.held_bytes.*", "tenant", "tier"),
    _gauge("tenant_limit_bytes", "Bytes that it may hold.", "stats.tenants.*.limit_bytes.*", "tenant", "tier"),
    _gauge("load_bytes_per_second", "Learned bandwidth of loads to the GPU.", "tiers.tiers.*.load.bytes_per_s", "tier"),
    _counter("tier_events", "Copies, loads and reads between tiers, by event.", "tiers.counts.*", "event"),
    _counter("ssd_read_bytes", "Bytes read from the SSD.", "tiers.tiers.ssd.read_bytes"),
    _counter("ssd_written_bytes", "Bytes written to the SSD.", "tiers.tiers.ssd.written_bytes"),
    _counter("ssd_refused_bytes", "Bytes not written, to spare the SSD.", "tiers.tiers.ssd.wear.refused_bytes"),
    _counter(
        "external_published_bytes", "Bytes published to the external store.", "tiers.tiers.external.published_bytes"
    ),
    _counter("external_read_bytes", "Bytes read from the external store.", "tiers.tiers.external.read_bytes"),
    _gauge("external_readable", "1 while the external store is asked.", "tiers.tiers.external.may_read"),
    _gauge("ssd_writable", "1 while the SSD takes writes.", "tiers.tiers.ssd.is_writable"),
    # queues
    _gauge("queue_requests", "Users' requests that wait.", "stats.waiting.requests"),
    _gauge("queue_wait_seconds", "Wait expected of a request that comes now.", "stats.queue.expected_wait_s"),
    _counter("queue_refused_requests", "Requests refused by --kv-max-queue-seconds.", "stats.queue.refused"),
    _gauge("tier_queue_jobs", "Jobs that wait for a thread, by kind.", "tiers.queue.*", "queue"),
    _gauge("copy_queue_requests", "Requests that wait for a copy.", "tiers.requests_waiting_for_a_copy"),
    # errors
    _counter("move_errors", "Moves that failed, by kind and error.", "stats.decisions.failed.*", "reason"),
    _counter("tier_errors", "Errors of the tiers, each a miss, by reason.", "tiers.errors.*", "reason"),
    _counter("thread_failures", "Failures of threads, which go on.", "threads.*.num_failures", "thread"),
    # budgets of running requests
    _counter("budget_requests", "Requests with a decode-time budget.", "budgets.totals.requests"),
    _counter("budget_passes", "Passes that dropped KV of running requests.", "budgets.totals.passes"),
    _counter("budget_passes_deferred", "Passes put off for want of memory.", "budgets.totals.passes_deferred"),
    _counter("budget_tokens_evicted", "Tokens whose KV running requests dropped.", "budgets.totals.tokens_evicted"),
    _counter("budget_pages_freed", "Pages that these passes gave back.", "budgets.totals.pages_freed"),
    _counter("budget_slot_copies", "Slots that these passes copied.", "budgets.totals.slot_copies"),
    _counter("budget_seconds", "Seconds that these passes took the scheduler.", "budgets.totals.seconds"),
    _gauge("budget_held_slots", "Slots that running requests with a budget hold.", "budgets.held_slots"),
    _gauge("budget_granted_slots", "Slots that their budgets grant.", "budgets.granted_slots"),
)
"""Every series, without the prefix."""


def _read(found: object, path: list[str], labels: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    if not path:
        if isinstance(found, int | float):
            yield labels, float(found)
    elif isinstance(found, Mapping):
        name, rest = path[0], path[1:]
        if name == EVERY:
            for key, value in found.items():
                yield from _read(value, rest, (*labels, str(key)))
        elif name in found:
            yield from _read(found[name], rest, labels)
