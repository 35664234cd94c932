"""Garbage collection that no request waits for.

A full collection looks at every object of the process: those of SGLang and torch, some 0.5 s, and those of the tree,
some 100 ms at 20,000 nodes, wherever the scheduler happens to be. What is there when the scheduler is complete is
frozen, as it stays; and full collections come in rounds in which nothing is to be done, or once in ``MOST_S``: cycles
among old objects are few, but what holds them is never freed without.

Young objects are collected every few rounds. Python does so when 700 more were made than freed, whatever their age:
where as many old nodes leave the tree as new ones come, that is seldom, and then there are tens of thousands of young
ones, some 50 ms. Those that are left are old at once: to look at them a second time took 8 ms, up to 18, and in 2,400
looks at 75 requests/s no young object was found in a cycle. All of this is a rank's own: nothing that several ranks
decide depends on it.
"""

from __future__ import annotations

import gc
import time

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress.patches.tree.types import Scheduler

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
NEVER = 2**31 - 1
IDLE_S = 1.0
"""Without a request before a full collection."""

PAUSE_SHARE = 50.0
"""Of what the last one took, until the next; twice the pause before, where it has found nothing."""

ROUNDS_PER_LOOK = 8
"""Of rounds one looks at young objects, after which those that are left are old. It takes half a millisecond: where
there are many nodes and one rank, such a round of a busy server makes no room, visits no nodes and learns nothing."""

LEAST_ROUNDS = 200
"""Of requests, since the last full collection, before another."""

MOST_S = 1800.0
"""Without a full collection on a server that is never idle."""


class FullCollections:
    """Full collections of one scheduler process, from its completion on."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        self._num_rounds = self._num_all_rounds = 0
        self._busy_s = self._last_s = time.monotonic()
        self._pause_s = 0.0

    def begin_round(self, *, is_idle: bool) -> bool:
        """``is_idle``: no request runs or waits. True where it looked at any objects, which takes time."""
        now_s = time.monotonic()
        self._num_all_rounds += 1
        looks = self._num_all_rounds % ROUNDS_PER_LOOK == 0
        if looks:  # the policy goes on with its work while nothing is asked for
            gc.collect(1)
        if not is_idle:
            self._num_rounds += 1
            self._busy_s = now_s
        is_free = now_s - self._busy_s >= IDLE_S and now_s - self._last_s >= self._pause_s
        if self._num_rounds >= LEAST_ROUNDS and (is_free or now_s - self._last_s >= MOST_S):
            num_found = gc.collect()
            self._num_rounds, self._last_s = 0, time.monotonic()
            pause_s = max(PAUSE_SHARE * (self._last_s - now_s), 0.0 if num_found else 2.0 * self._pause_s)
            self._pause_s = min(pause_s, MOST_S)
            looks = True
        return looks


_collections: FullCollections | None = None


def _after_init(_: None, scheduler: Scheduler, *__: object, **___: object) -> None:
    """AFTER ``__init__``."""
    global _collections
    _collections = FullCollections()


def begin_round(scheduler: Scheduler) -> bool:
    """Before the next batch is made. True where it took some of the round's time."""
    if _collections is None:
        return False
    is_running = scheduler.last_batch is not None or not scheduler.running_batch.is_empty()
    return _collections.begin_round(is_idle=not is_running and not scheduler.waiting_queue)


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    registry.register(SCHEDULER + "__init__", _after_init, hook_type.AFTER)
