"""Watch of a real server's scheduler for what clients cannot see, as a plugin SGLang loads beside ours or alone:
what planning attention for a decode step takes, and how long loads from the host take. Nothing is replaced.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from evicbench.plugins import PluginLog, Tell, plugin_folder, watch_scheduler

NAME = "evicpress_gpu_watch"


@dataclass(frozen=True, slots=True)
class Plan:
    """One planning of a decode step: seconds of the call, and on the GPU's time line (the same on a CPU)."""

    batch: int
    host_s: float
    device_s: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """One load from the host, all layers: bytes, seconds from the first copy to the end of the last, and seconds of the
    CPU that its thread took to queue them."""

    num_bytes: int
    seconds: float
    thread_s: float


class Watch(PluginLog):
    """``with watched() as watch, Server(..., env=watch.env): ...``."""

    def plans(self, batch: int, since: int = 0) -> list[Plan]:
        return [Plan(*line["plan"]) for line in self.lines(since) if line.get("plan", [None])[0] == batch]

    def loads(self, since: int = 0) -> list[Loaded]:
        return [Loaded(*line["load"]) for line in self.lines(since) if "load" in line]


@contextmanager
def watched(is_stock: bool = False) -> Iterator[Watch]:
    """``is_stock``: no other plugin is loaded."""
    with plugin_folder(NAME, "evicbench.gpu.watch:load") as folder:
        watch = Watch(folder)
        if is_stock:
            watch.env["SGLANG_PLUGINS"] = NAME
        yield watch


# ---- in the server


def load() -> None:
    watch_scheduler(_attach)


def _attach(scheduler: Any, tell: Tell) -> None:
    _watch_plans(scheduler.tp_worker.model_runner.attn_backend, tell)
    if hasattr(scheduler.tree_cache, "compressor"):  # ours
        _watch_loads(scheduler.tree_cache.compressor.slot_bytes, tell)


def _watch_plans(backend: Any, tell: Tell) -> None:
    """Outside of what we wrapped around the same calls: the physical view is part of what planning costs."""
    import torch

    is_cuda = torch.cuda.is_available()
    waiting: deque[tuple[int, float, Any, Any]] = deque()
    is_inside = [False]

    def mark() -> Any:
        if not is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def tell_finished() -> None:
        while waiting and (waiting[0][3] is None or waiting[0][3].query()):
            batch, host_s, start, end = waiting.popleft()
            tell(plan=(batch, host_s, host_s if end is None else start.elapsed_time(end) / 1e3))

    def wrap(plan: Callable[..., Any]) -> Callable[..., Any]:
        def planned(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if is_inside[0] or not forward_batch.forward_mode.is_decode():
                return plan(forward_batch, *args, **kwargs)
            is_inside[0] = True  # eager planning calls the one for graphs
            try:
                start, begin = mark(), time.perf_counter()
                result = plan(forward_batch, *args, **kwargs)
                waiting.append((forward_batch.batch_size, time.perf_counter() - begin, start, mark()))
            finally:
                is_inside[0] = False
            tell_finished()
            return result

        return planned

    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        if hasattr(backend, name):
            setattr(backend, name, wrap(getattr(backend, name)))


def _watch_loads(slot_bytes: int, tell: Tell) -> None:
    from sglang_evicpress.patches.tiers.load import Load

    finish = Load.finish

    def finished(self: Any) -> None:
        tell(
            load=(self.num_slots * slot_bytes, sum(took_s for _, took_s in self.copied().values()), self.thread_seconds)
        )
        finish(self)

    Load.finish = finished  # type: ignore[method-assign]
