"""Watch of our own calls on the scheduler thread of a real server, as a plugin that SGLang loads beside ours.

Every hook of ours and every method of the cache that SGLang calls is timed by the thread's processor time, less what a
hook around something of SGLang's spends in that, and less full garbage collections. Nothing is replaced.
"""

from __future__ import annotations

import functools
import gc
import math
import pkgutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from evicbench.plugins import PluginLog, Tell, plugin_folder, watch_scheduler

NAME = "evicpress_own_calls"
CACHE_CALLS = (
    *("match_prefix", "init_load_back", "insert", "evict", "make_room", "end_request", "keep_running"),
    *("inc_lock_ref", "dec_lock_ref", "check_hicache_events", "reset"),
)
TOLD_EVERY_S = 1.0
FULL = 2
"""Generation of a collection of all objects."""

STEPS_PER_DOUBLING = 8


def bucket_of(seconds: float) -> int:
    return math.ceil(STEPS_PER_DOUBLING * math.log2(max(seconds, 1e-7)))


def seconds_of(bucket: int) -> float:
    """The upper end of a bucket."""
    return float(2.0 ** (bucket / STEPS_PER_DOUBLING))


@dataclass(slots=True)
class Calls:
    """Durations of calls by bucket, and the longest in seconds of processor and of wall time."""

    buckets: Counter[int] = field(default_factory=Counter)
    max_s: float = 0.0
    max_wall_s: float = 0.0

    @property
    def count(self) -> int:
        return self.buckets.total()

    def at(self, share: float) -> float:
        """Seconds that the share of calls does not take longer than."""
        left = share * self.count
        for bucket, count in sorted(self.buckets.items()):
            left -= count
            if left <= 0:
                return min(seconds_of(bucket), self.max_s)
        return self.max_s

    def add(self, other: Calls) -> None:
        self.buckets.update(other.buckets)
        self.max_s, self.max_wall_s = max(self.max_s, other.max_s), max(self.max_wall_s, other.max_wall_s)


class Watch(PluginLog):
    """``with watched() as watch, Server(..., env=watch.env): ...``."""

    def calls(self, since: int = 0, until: int | None = None) -> dict[str, Calls]:
        """By name, told in these lines; ``gc N`` is a collection of generation N, in a call of ours or not."""
        found: defaultdict[str, Calls] = defaultdict(Calls)
        for line in self.lines(since)[: None if until is None else until - since]:
            for name, (buckets, max_s, max_wall_s) in line["calls"].items():
                found[name].add(Calls(Counter({int(key): count for key, count in buckets.items()}), max_s, max_wall_s))
        return dict(found)


@contextmanager
def watched() -> Iterator[Watch]:
    with plugin_folder(NAME, "evicbench.policy.own_calls:load") as folder:
        yield Watch(folder)


# ---- in the server


class Clock:
    """Times calls of one thread; what is ``outside`` of ours is left out of the call around it."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._thread = threading.get_ident()
        self._calls: defaultdict[str, Calls] = defaultdict(Calls)
        self._left_out: list[list[float]] = []  # of the calls that are under way: processor and wall seconds
        self._told_s = time.monotonic()
        self._gc_s = 0.0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*args, **kwargs)
            left_out = [0.0, 0.0]
            self._left_out.append(left_out)
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                cpu_s, wall_s = time.thread_time() - cpu_s - left_out[0], time.perf_counter() - wall_s - left_out[1]
                self._left_out.pop()
                self.note(name, cpu_s, wall_s)

        return run

    def outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._left_out or threading.get_ident() != self._thread:
                return call(*args, **kwargs)
            around, self._left_out = self._left_out, []
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._left_out = around
                cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
                for left_out in around:
                    left_out[0] += cpu_s
                    left_out[1] += wall_s

        return run

    def note(self, name: str, cpu_s: float, wall_s: float) -> None:
        calls = self._calls[name]
        calls.buckets[bucket_of(cpu_s)] += 1
        calls.max_s, calls.max_wall_s = max(calls.max_s, cpu_s), max(calls.max_wall_s, wall_s)
        now_s = time.monotonic()
        if now_s - self._told_s >= TOLD_EVERY_S and not self._left_out:
            all_calls, self._calls = (
                self._calls,
                defaultdict(Calls),
            )  # where a collection adds from here on
            self._told_s = now_s
            self._tell(calls={name: (each.buckets, each.max_s, each.max_wall_s) for name, each in all_calls.items()})

    def note_collection(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._gc_s = time.thread_time()
        else:
            seconds = time.thread_time() - self._gc_s
            if info["generation"] == FULL:  # told apart, whatever call it comes in
                for left_out in self._left_out:
                    left_out[0] += seconds
                    left_out[1] += seconds
            self.note(f"gc {info['generation']}", seconds, seconds)


def load() -> None:
    watch_scheduler(_attach)


def _attach(scheduler: Any, tell: Tell) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    clock = Clock(tell)
    for target, hooks in HookRegistry._hooks.items():
        for place, (kind, hook, source) in enumerate(hooks):
            if getattr(hook, "__module__", "").startswith("sglang_evicpress."):
                name = f"{hook.__module__.rpartition('.')[2]}.{hook.__name__}"
                timed = clock.timed(name, _around(clock, hook) if kind == HookType.AROUND else hook)
                _put(target, hook, timed)
                hooks[place] = (kind, timed, source)
    cache = scheduler.tree_cache
    for name in CACHE_CALLS:
        if hasattr(cache, name):
            setattr(cache, name, clock.timed(name, getattr(cache, name)))
    gc.callbacks.append(clock.note_collection)


def _around(clock: Clock, hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, whose first argument is a function of SGLang's."""

    @functools.wraps(hook)
    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return hook(clock.outside(original), *args, **kwargs)

    return run


def _put(target: str, hook: object, timed: object) -> None:
    """Put ``timed`` in place of a hook that SGLang has wrapped around its target, in the closure that has it."""
    function = pkgutil.resolve_name(target)
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is hook:
                cell.cell_contents = timed
                return
        function = getattr(function, "__wrapped__", None)
    raise RuntimeError(f"hook {hook} is not at {target}")
