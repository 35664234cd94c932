"""Prefill times, read off the batches that the scheduler runs anyhow, for the cost model.

With the overlap scheduler a batch is launched while the one before still runs, and its result is looked at later: its
time begins when it was launched or when the result before it was there, whichever is later. On the CPU a batch is over
when ``run_batch`` returns, whatever the scheduler does. A batch that has waited for KV on its way back to the GPU says
nothing of prefilling, and is not observed. Fitting costs some 0.3 ms, so a batch that was timed is learned from
when nothing runs, or some batches later, when no first token waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_evicpress.patches.tree.node import holes_of
from sglang_evicpress.patches.tree.types import QueuedRequest
from sglang_evicpress.policy.cost_model import CostModel, CostSnapshot, PrefillCost

NUM_WARM_UP = 2
"""Batches at the start that are not observed: kernels are compiled and pools touched for the first time."""

LEAST_TOKENS = 64
"""New tokens of a batch that is observed. A smaller one waits for launches and for KV to be read, whatever it computes:
a cost fitted to the few tokens behind each cached prefix says that a whole prompt takes ten times as long as it
does."""

STALLED_SHARE = 0.01
"""Of a batch's time: what it may have waited for loads and still be observed."""

NUM_TRUSTED = 8
"""Observations before the cost they show is used."""

MOST_PATIENT, MOST_PENDING = 4, 8
"""Batches that were timed and not learned from while others run; and at all, as a server of one token each never has a
better moment."""

MOST_LEARNED = 2
"""Batches that an idle round learns from, at most."""


class TimedBatch(Protocol):
    """SGLang's ScheduleBatch."""

    forward_mode: ForwardMode
    reqs: list[QueuedRequest]
    extend_lens: list[int]
    prefix_lens: list[int]


class TimedResult(Protocol):
    """SGLang's GenerationBatchResult, with the batch that it is of and when that was launched."""

    copy_done: torch.cuda.Event | None
    next_token_ids: object
    evicpress_run: tuple[list[tuple[int, int]], int, float, float] | None


class PrefillTimes:
    """Feeds batches that prefill to ``model``; decode batches only tell when the device was busy."""

    def __init__(self, model: CostModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_observed = 0
        self._model = model
        self._start = model.costs.prefill
        self._clock = clock
        self._num_seen = 0
        self._last_result_s = 0.0
        self._pending: list[tuple[list[tuple[int, int]], float]] = []  # chunks and seconds to learn from
        self.not_loaded_s = 0.0  # that computing took which could have been loaded, see ``note_not_loaded``

    @property
    def costs(self) -> CostSnapshot:
        """All that was seen to cost time, prefilling as ``cost`` says."""
        return replace(self._model.costs, prefill=self.cost)

    @property
    def cost(self) -> PrefillCost:
        """Prefill cost learned from the batches; the one the model started with while they are few."""
        return self._start if self.num_observed < NUM_TRUSTED else self._model.costs.prefill

    def run(
        self,
        batch: TimedBatch,
        launch: Callable[[], TimedResult],
        is_synchronous: bool,
        stalled: Callable[[], float] = lambda: 0.0,
    ) -> TimedResult:
        """Launch the batch by ``launch`` and return its result; ``is_synchronous``: it is computed by then.
        ``stalled`` tells after the launch how many seconds it has waited for loads, infinitely many where it waits on
        its device."""
        chunks = _chunks_of(batch)
        num_not_loaded = sum(map(_take_not_loaded, batch.reqs, batch.extend_lens)) if chunks else 0
        begin = self._clock()
        result = launch()
        stalled_s = stalled()
        if is_synchronous:
            self._observe(chunks, num_not_loaded, begin, stalled_s)
        else:
            result.evicpress_run = (chunks, num_not_loaded, begin, stalled_s)
        return result

    def finish(self, result: TimedResult) -> None:
        """The scheduler is about to look at the result: wait for it, as it would, and see what time it is."""
        run = getattr(result, "evicpress_run", None)
        if run is None:
            return
        copy_done = result.copy_done
        ids = getattr(result, "next_token_ids", None)  # embeddings have none
        if copy_done is not None:
            copy_done.synchronize()
        elif isinstance(ids, torch.Tensor) and ids.is_cuda:
            torch.cuda.current_stream().synchronize()
        result.evicpress_run = None
        self._observe(*run)

    def _observe(self, chunks: list[tuple[int, int]], num_not_loaded: int, begin: float, stalled_s: float) -> None:
        now = self._clock()
        seconds = now - max(begin, self._last_result_s)
        self._last_result_s = now
        if num_not_loaded:
            self.not_loaded_s += seconds * min(1.0, num_not_loaded / sum(num_tokens for num_tokens, _ in chunks))
        if not chunks or sum(num_tokens for num_tokens, _ in chunks) < LEAST_TOKENS:
            return
        if stalled_s > STALLED_SHARE * seconds:
            return
        self._num_seen += 1
        if self._num_seen > NUM_WARM_UP and seconds > 0.0:
            self._pending.append((chunks, seconds))
            if len(self._pending) >= MOST_PENDING:
                self._learn(1)

    def learn(self, *, is_idle: bool) -> None:
        """Learn from the next batches that were timed, the first first; while others run, from one, where they are too
        many."""
        self._learn(min(len(self._pending), MOST_LEARNED) if is_idle else int(len(self._pending) > MOST_PATIENT))

    def _learn(self, num_due: int) -> None:
        for chunks, seconds in self._pending[:num_due]:
            self._model.observe_prefill(chunks, seconds)
        self.num_observed += num_due
        del self._pending[:num_due]


def note_not_loaded(req: QueuedRequest, num_tokens: int) -> None:
    """A request that is about to run computes so many tokens that it could have loaded."""
    req.evicpress_not_loaded = num_tokens


def _take_not_loaded(req: QueuedRequest, num_new: int) -> int:
    """Tokens not loaded among the next ``num_new`` computed: of a prompt in chunks the first are counted first."""
    num_tokens = getattr(req, "evicpress_not_loaded", 0)
    taken = min(num_tokens, num_new)
    if taken:
        req.evicpress_not_loaded = num_tokens - taken
    return taken


def _chunks_of(batch: TimedBatch) -> list[tuple[int, int]]:
    """(new tokens, physical prefix length) of each request of a batch that prefills, nothing for another one.

    Attention reads the slots that are there, so holes do not count. In a mixed batch a decoding request is a prefill
    of one token, as it is to SGLang; under load a server that mixes runs next to no others.
    """
    if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
        return []
    lengths = zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True)
    return [(new, max(0, before - holes_of(req))) for req, new, before in lengths if new > 0]
