"""Statistics of budgets: each pass, the counts of each request, and those of the server, as the endpoints show them."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Literal

from sglang_evicpress.decode_budget.settings import DecodeSettings

NUM_PASSES_SHOWN = 16
PassKind = Literal["prefill", "copy_out", "unshare", "page", "repack", "holefill"]


@dataclass(slots=True, eq=False)
class PassRecord:
    """One pass over one request: ``before`` and ``after`` are its slots, ``logical`` its length in tokens.

    ``copies`` counts slots, a slot being one token in all layers and heads: where heads differ it is their mean.
    It is None until the device has told (``Totals.settle``). ``seconds`` is the time the host took.
    """

    kind: PassKind
    logical: int
    before: int
    after: int
    pages_freed: int
    copies: float | None
    seconds: float

    @property
    def tokens_evicted(self) -> int:
        """Slots given up; 0 where the pass only copied."""
        return self.before - self.after

    def to_json(self) -> dict[str, object]:
        """The pass as the endpoints show it."""
        return {
            "kind": self.kind,
            "logical_tokens": self.logical,
            "slots_before": self.before,
            "slots_after": self.after,
            "tokens_evicted": self.tokens_evicted,
            "pages_freed": self.pages_freed,
            "slot_copies": self.copies,
            "seconds": self.seconds,
        }


@dataclass(slots=True)
class Counts:
    """Sums over passes."""

    num_passes: int = 0
    tokens_evicted: int = 0
    pages_freed: int = 0
    slot_copies: float = 0.0
    seconds: float = 0.0
    longest_pass_seconds: float = 0.0

    def add(self, record: PassRecord) -> None:
        """Count a pass; copies that are not known yet count when they are settled."""
        self.num_passes += 1
        self.tokens_evicted += record.tokens_evicted
        self.pages_freed += record.pages_freed
        self.slot_copies += record.copies or 0.0
        self.seconds += record.seconds
        self.longest_pass_seconds = max(self.longest_pass_seconds, record.seconds)

    def to_json(self) -> dict[str, object]:
        """The sums as the endpoints show them."""
        counts = asdict(self)
        return {"passes": counts.pop("num_passes"), **counts}


@dataclass(slots=True)
class RequestStats:
    """Counts of one request, retractions included, and its last passes."""

    counts: Counts = field(default_factory=Counts)
    passes: deque[PassRecord] = field(default_factory=lambda: deque(maxlen=NUM_PASSES_SHOWN))
    peak_slots: int = 0

    def see(self, num_slots: int) -> None:
        """Note how many slots the request holds while it decodes."""
        self.peak_slots = max(self.peak_slots, num_slots)

    def to_json(self, settings: DecodeSettings, logical: int, num_slots: int) -> dict[str, object]:
        """The request as the endpoints show it; ``budget_occupancy`` is slots held over slots granted."""
        return {
            "budget_tokens": settings.tokens,
            "method": settings.method,
            "score": settings.score,
            "logical_tokens": logical,
            "slots": num_slots,
            "peak_slots": self.peak_slots,
            "budget_occupancy": num_slots / settings.tokens,
            **self.counts.to_json(),
            "last_passes": [record.to_json() for record in self.passes],
        }


@dataclass(slots=True)
class Totals:
    """Counts of this server since it started; every pass goes through ``add``. ``num_deferred``: passes for
    which the device had no memory when they were due."""

    num_requests: int = 0
    num_deferred: int = 0
    counts: Counts = field(default_factory=Counts)
    kinds: dict[PassKind, int] = field(default_factory=dict)

    def add(self, stats: RequestStats, record: PassRecord) -> None:
        """Count a pass, in the stats of its request and here."""
        stats.passes.append(record)
        stats.counts.add(record)
        self.counts.add(record)
        self.kinds[record.kind] = self.kinds.get(record.kind, 0) + 1

    def settle(self, stats: RequestStats, record: PassRecord, copies: float) -> None:
        """Fill in the copies of a pass that was added without them. Raises ValueError when it has them already."""
        if record.copies is not None:
            raise ValueError(f"the copies of this pass are {record.copies}: expected a pass without copies")
        record.copies = copies
        stats.counts.slot_copies += copies
        self.counts.slot_copies += copies

    def to_json(self) -> dict[str, object]:
        """The server's counts as the endpoints show them."""
        counts = {"requests": self.num_requests, **self.counts.to_json(), "passes_deferred": self.num_deferred}
        return {**counts, "passes_by_kind": dict(self.kinds)}
