"""What the scheduler tells the cache beyond SGLang's cache interface: the time, who waits, and how long batches take.

Ranks must decide alike, so they share one clock and one law of prefill times: rank 0 puts a ``Stamp`` before whatever
it has received, SGLang sends it on to the other ranks with that, and every rank takes it in between the same two steps.
Nothing is added when nothing was received, and never a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.utils import TypeBasedDispatcher

from sglang_evicpress.costs import PrefillLaw

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver."


@dataclass(frozen=True, slots=True)
class Stamp:
    """Rank 0's monotonic clock when it received something, and the law that its batches followed until then."""

    now_s: float
    law: PrefillLaw


_cache: Any = None


def attach(cache: Any) -> None:
    """Make ``cache`` the one that is stamped for (a scheduler process has one)."""
    global _cache
    _cache = cache


def _after_pull_raw_reqs(received: list[Any] | None, receiver: Any) -> None:
    """AFTER ``_pull_raw_reqs``: a list only on the rank that receives."""
    if received and _cache is not None:
        received.insert(0, Stamp(time.monotonic(), _cache.prefill_times.law))


def _after_init_request_dispatcher(_: None, scheduler: Any) -> None:
    scheduler._request_dispatcher += TypeBasedDispatcher([(Stamp, _take_stamp)])


def _take_stamp(stamp: Stamp) -> None:
    if _cache is not None:
        _cache.advance(stamp.now_s, stamp.law)


def _after_add_request_to_queue(_: None, scheduler: Any, req: Any, *__: Any, **___: Any) -> None:
    """AFTER ``_add_request_to_queue``, which may also refuse the request."""
    queue = scheduler.waiting_queue
    if _cache is not None and queue and queue[-1] is req:
        _cache.expect(req)


def _after_get_next_batch_to_run(_: Any, scheduler: Any) -> None:
    """AFTER ``get_next_batch_to_run``: whoever left the queue since without running was aborted."""
    if _cache is not None:
        _cache.claims.keep_only(scheduler.waiting_queue)


def _around_run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``run_batch``."""

    def launch() -> Any:
        return original(scheduler, batch, *args, **kwargs)

    if _cache is None:
        return launch()
    return _cache.prefill_times.run(batch, launch, is_synchronous=scheduler.device == "cpu")


def _before_process_batch_result(scheduler: Any, batch: Any, result: Any) -> None:
    """BEFORE ``process_batch_result``."""
    if _cache is not None:
        _cache.prefill_times.finish(result)


def install(registry: Any, hook_type: Any) -> None:
    registry.register(RECEIVER + "_pull_raw_reqs", _after_pull_raw_reqs, hook_type.AFTER)
    registry.register(SCHEDULER + "init_request_dispatcher", _after_init_request_dispatcher, hook_type.AFTER)
    registry.register(SCHEDULER + "_add_request_to_queue", _after_add_request_to_queue, hook_type.AFTER)
    registry.register(SCHEDULER + "get_next_batch_to_run", _after_get_next_batch_to_run, hook_type.AFTER)
    registry.register(SCHEDULER + "run_batch", _around_run_batch, hook_type.AROUND)
    registry.register(SCHEDULER + "process_batch_result", _before_process_batch_result, hook_type.BEFORE)
