"""Choice of the next context to measure: served worse than predicted, to be observed, or never profiled."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sglang_evicpress.quality.profile import query_set
from sglang_evicpress.quality.recorder import Context, Query, Recorder

MAX_OBSERVATIONS = 4
"""The newest of a context, over which predicted minus observed is averaged; one job observes no more."""


@dataclass(frozen=True, slots=True)
class Job:
    """``observe``: score the answers served to ``queries``, lossy hits all, under the exact KV, then call
    ``DriftMonitor.observe``. ``drift``: profile a context anew that is served worse than its profile says.
    ``unprofiled``: profile a context of which nothing is known."""

    why: Literal["observe", "drift", "unprofiled"]
    key: bytes
    queries: tuple[Query, ...]


@dataclass(slots=True)
class _State:
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_OBSERVATIONS))
    """Predicted minus observed quality, since the last profile."""
    num_seen: int = 0
    """The lossy hits up to this one were looked at, or served before the last profile."""
    is_new: bool = True
    """Nothing was looked at since the last profile."""
    asked: str | None = None
    """The set of queries of the last profile."""
    retry_at: int = 0
    """After a failure: the hits there must be before it is chosen again."""
    num_hits: int = 0
    num_lossy_hits: int = 0
    chosen: str | None = None
    """These three: the context's hits, and its set of queries, when it was last chosen."""


class DriftMonitor:
    """Compares what was predicted of a context's quality with what is observed, and chooses the next job.

    A context is observed after the first lossy hit since its profile, then after every ``every``-th: the newest of
    them that were not yet. When the mean of predicted minus observed over the newest observations exceeds
    ``threshold``, it has drifted. What was chosen and failed is chosen again after ``every`` more hits. Contexts that
    the recorder has forgotten are forgotten. Raises ValueError for a threshold outside 0..1, or counts below 1.
    """

    def __init__(self, threshold: float = 0.3, every: int = 8, min_hits: int = 2) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold is {threshold!r}: expected 0 to 1")
        if every < 1 or min_hits < 1:
            raise ValueError(f"every is {every} and min_hits {min_hits}: expected at least 1")
        self.threshold, self.every, self.min_hits = threshold, every, min_hits
        self._states: dict[bytes, _State] = {}

    def is_due(self, key: bytes, num_lossy_hits: int) -> bool:
        """True if lossy hits of the context are to be observed, now that there were so many."""
        state = self._known(key)
        if num_lossy_hits < state.num_seen:  # the recorder forgot it and began to count anew
            return num_lossy_hits >= 1
        return num_lossy_hits >= state.num_seen + (1 if state.is_new else self.every)

    def is_drifted(self, key: bytes) -> bool:
        gaps = self._known(key).gaps
        return bool(gaps) and math.fsum(gaps) / len(gaps) > self.threshold

    def observe(self, key: bytes, predicted: float, observed: float) -> bool:
        """Note an observation; True if the context has drifted. The hits up to when it was chosen are done with.

        Raises ValueError for a quality that is not a finite number.
        """
        if not math.isfinite(predicted - observed):
            raise ValueError(f"quality was predicted {predicted!r} and observed {observed!r}: expected finite numbers")
        state = self._state(key)
        state.gaps.append(predicted - observed)
        state.num_seen, state.is_new = state.num_lossy_hits, False
        return self.is_drifted(key)

    def profiled(self, key: bytes, *, num_lossy_hits: int | None = None, asked: str | None = None) -> None:
        """The context has a new profile: earlier observations count no more, nor do the lossy hits until now.

        ``num_lossy_hits`` there were by now, and ``asked`` is the ``query_set`` of the profile; left out, both are
        those of when it was chosen.
        """
        state = self._state(key)
        state.gaps.clear()
        state.num_seen = state.num_lossy_hits if num_lossy_hits is None else num_lossy_hits
        state.is_new, state.retry_at = True, 0
        state.asked = state.chosen if asked is None else asked

    def was_profiled(self, key: bytes) -> bool:
        """Since it was first asked about here: what could not be measured then cannot be now."""
        return self._known(key).asked is not None

    def failed(self, key: bytes) -> None:
        """The job could not be done: the context is left alone until ``every`` more hits than when it was chosen."""
        state = self._state(key)
        state.retry_at = state.num_hits + self.every

    def next_job(self, recorder: Recorder, profiled: Container[bytes], weights: Mapping[bytes, float]) -> Job | None:
        """Drifted contexts first, then observations that are due, then contexts not ``profiled`` with ``min_hits``.

        Among these the greatest of ``weights``, their present reuse; where it is 0 or absent the context is not in the
        tree, and never chosen. A drifted one whose queries are those of its profile has nothing new to be asked.
        Nothing changes by choosing: until the caller reports, the answer stays the same.
        """
        for key in [key for key in self._states if recorder.context_of(key) is None]:
            del self._states[key]
        candidates = [(weights.get(key, 0.0), key) for key in recorder]
        best: tuple[int, Job, Context] | None = None
        for _, key in sorted((pair for pair in candidates if pair[0] > 0.0), reverse=True):
            context = recorder.context_of(key)
            if context is None or context.num_hits < self._known(key).retry_at:
                continue
            rank, job = self._job(key, context, recorder, profiled)
            if job is not None and (best is None or rank < best[0]):
                best = rank, job, context
                if rank == 0:
                    break
        if best is None:
            return None
        _, job, context = best
        state = self._state(job.key)
        state.num_hits, state.num_lossy_hits = context.num_hits, context.num_lossy_hits
        state.chosen = _set_of(recorder.queries_of(job.key))
        return job

    def _job(
        self, key: bytes, context: Context, recorder: Recorder, profiled: Container[bytes]
    ) -> tuple[int, Job | None]:
        """The most urgent that this context needs, and how urgent: 0 is the most."""
        queries = recorder.queries_of(key)
        if self.is_drifted(key) and queries and self._known(key).asked != _set_of(queries):
            return 0, Job("drift", key, queries)
        if self.is_due(key, context.num_lossy_hits):
            seen = self._known(key).num_seen
            seen = seen if context.num_lossy_hits >= seen else 0
            served = tuple(query for query in queries if query.lossy_hit > seen and query.answer)
            if served:
                return 1, Job("observe", key, served[-MAX_OBSERVATIONS:])
        if key not in profiled and context.num_hits >= self.min_hits and queries:
            return 2, Job("unprofiled", key, queries)
        return 3, None

    def _known(self, key: bytes) -> _State:
        """To be read only: that of a context that was never chosen is not kept."""
        return self._states.get(key) or _State()

    def _state(self, key: bytes) -> _State:
        return self._states.setdefault(key, _State())


def _set_of(queries: tuple[Query, ...]) -> str:
    return query_set([query.tokens for query in queries])
