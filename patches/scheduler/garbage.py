"""Garbage collection that no request waits for.

A full collection looks at every object of the process: those of SGLang and torch, some 0.5 s, and those of the tree,
some 100 ms at 20,000 nodes, wherever the scheduler happens to be. What is there when the scheduler is complete is
frozen, as it stays; and full collections come in rounds in which nothing is to be done, or once in ``MOST_S``: cycles
among old objects are few, but what holds them is never freed without. Young objects are collected as ever. All of this
is a rank's own: nothing that is decided depends on it.
"""

from __future__ import annotations

import gc
import time

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress.patches.tree.types import Scheduler

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
NEVER = 2**31 - 1
IDLE_S = 1.0
"""Without a request before a collection, and at least ``PAUSE_SHARE`` times what the last one took."""

PAUSE_SHARE = 50.0
SMALL_STEPS = 3
"""Collections of the youngest objects per one of those that were spared by these: Python's 10 take three times as long
at once, and look at each object as often."""

LEAST_YOUNG = 30
"""Collections of young objects since the last full one: as many objects as by Python's own thresholds."""

MOST_S = 6 * 3600.0
"""Without a full collection on a server that is never idle."""


class FullCollections:
    """Full collections of one scheduler process, from its completion on."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(gc.get_threshold()[0], SMALL_STEPS, NEVER)
        self._busy_s = self._last_s = time.monotonic()
        self._pause_s = IDLE_S

    def begin_round(self, *, is_idle: bool) -> None:
        """``is_idle``: no request runs or waits."""
        now_s = time.monotonic()
        if not is_idle:
            self._busy_s = now_s
        is_due = now_s - max(self._busy_s, self._last_s) >= self._pause_s and gc.get_count()[2] >= LEAST_YOUNG
        if is_due or now_s - self._last_s >= MOST_S:
            gc.collect()
            self._last_s = time.monotonic()
            self._pause_s = max(IDLE_S, PAUSE_SHARE * (self._last_s - now_s))


_collections: FullCollections | None = None


def _after_init(_: None, scheduler: Scheduler, *__: object, **___: object) -> None:
    """AFTER ``__init__``."""
    global _collections
    _collections = FullCollections()


def _before_get_next_batch_to_run(scheduler: Scheduler) -> None:
    """BEFORE ``get_next_batch_to_run``."""
    if _collections is not None:
        is_running = scheduler.last_batch is not None or not scheduler.running_batch.is_empty()
        _collections.begin_round(is_idle=not is_running and not scheduler.waiting_queue)


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    registry.register(SCHEDULER + "__init__", _after_init, hook_type.AFTER)
    registry.register(SCHEDULER + "get_next_batch_to_run", _before_get_next_batch_to_run, hook_type.BEFORE)
