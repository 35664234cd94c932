"""Times from the queue to the first token, taken where the scheduler meets both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_evicpress.introspect.served import FirstTokenTimes
from sglang_evicpress.patches.tree.types import ForwardMode, QueuedRequest


class PrefilledRequest(QueuedRequest, Protocol):
    """A request of a batch that prefills. ``inflight_middle_chunks``: parts of its prompt that come before the last.
    ``evicpress_queued_s``: when it came to the queue, None once its first token was seen."""

    inflight_middle_chunks: int
    evicpress_queued_s: float | None


class PrefilledBatch(Protocol):
    """SGLang's ScheduleBatch."""

    forward_mode: ForwardMode

    @property
    def reqs(self) -> Sequence[PrefilledRequest]: ...


@dataclass(eq=False, repr=False)
class FirstTokenWatch:
    """Feeds ``times`` with users' requests, each once: not again after it was retracted."""

    times: FirstTokenTimes
    clock: Callable[[], float] = time.perf_counter

    def enter(self, req: PrefilledRequest) -> None:
        """A user's request has come to the queue."""
        if not req.retracted_stain:
            req.evicpress_queued_s = self.clock()

    def note(self, batch: PrefilledBatch) -> None:
        """The result of a batch is there."""
        if not batch.forward_mode.is_extend():
            return
        now_s = self.clock()
        for req in batch.reqs:
            queued_s = getattr(req, "evicpress_queued_s", None)
            if queued_s is not None and req.inflight_middle_chunks <= 0:
                self.times.add(now_s - queued_s)
                req.evicpress_queued_s = None
