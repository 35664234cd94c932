"""Watch of the work on budgets in each round of a real server's scheduler, as a plugin that SGLang loads in it.

The plugin times the one call of ours that every round makes, reads the pool's count of free slots on both sides of it,
and notes the passes that it made. Nothing of the product is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from evicbench.plugins import PluginLog, Tell, plugin_folder, watch_scheduler


@dataclass(frozen=True, slots=True)
class Pass:
    """``taken``: slots that it took from the pool to copy what it shared."""

    kind: str
    pages_freed: int
    taken: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the scheduler: when it began, ``num_running`` requests of its batch, the seconds of our visit, by
    how much the free slots rose in it, and the seconds spent on the queries of the step before."""

    began: float
    num_running: int
    visit_s: float
    rise: int
    ring_s: float
    passes: tuple[Pass, ...]

    @classmethod
    def read(cls, line: Any) -> Round:
        passes = tuple(Pass(*given) for given in line["passes"])
        return cls(line["began"], line["running"], line["visit"], line["rise"], line["ring"], passes)


class Watch(PluginLog):
    """``with watched() as watch, Server(..., env=watch.env): ...``, then ``watch.rounds()``."""

    def backends(self) -> set[str]:
        """The types of attention backend that the server has had in its rounds."""
        return {line["backend"] for line in self.lines()}

    def rounds(self, since: int = 0) -> list[Round]:
        """Rounds with a running batch or a pass, from line ``since`` on."""
        return [Round.read(line) for line in self.lines(since)]


@contextmanager
def watched() -> Iterator[Watch]:
    with plugin_folder("evicpress_bench_watch", "evicbench.decode_budget.watch:load") as folder:
        yield Watch(folder)


def step_seconds(rounds: Sequence[Round], num_running: int) -> list[float]:
    """Lengths of the rounds without a pass in which a batch of that size ran and the next one ran it again."""
    pairs = zip(rounds, rounds[1:], strict=False)
    return [
        after.began - each.began
        for each, after in pairs
        if each.num_running == after.num_running == num_running and not each.passes
    ]


# ---- in the server


def load() -> None:
    watch_scheduler(_attach)


def _attach(scheduler: Any, tell: Tell) -> None:
    from sglang_evicpress.decode_budget.stats import PassRecord, RequestStats, Totals
    from sglang_evicpress.patches.attention.query_ring import QueryRing

    class SeenTotals(Totals):
        def add(self, stats: RequestStats, record: PassRecord) -> None:
            super().add(stats, record)
            made.append(record)

    made: list[PassRecord] = []
    ring_s = [0.0]
    cache, page, observe = scheduler.tree_cache, scheduler.page_size, QueryRing.observe_decode
    cache.decode_budgets.log.totals = SeenTotals()
    visit, allocator = cache.decode_budgets.visit_budgets, scheduler.token_to_kv_pool_allocator

    def timed(ring: Any, *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        observe(ring, *args, **kwargs)
        ring_s[0] += time.perf_counter() - begin

    def watched_visit(given: Any) -> None:
        running, free = len(given.running_batch.reqs), allocator.available_size()
        made.clear()
        begin = time.perf_counter()
        visit(given)
        seconds = time.perf_counter() - begin
        if running or made:
            backend = type(scheduler.tp_worker.model_runner.attn_backend).__name__
            passes = [(each.kind, each.pages_freed, _taken(each, page), each.seconds) for each in made]
            rise = allocator.available_size() - free
            tell(
                **{"backend": backend, "began": begin, "running": running, "visit": seconds},
                **{"rise": rise, "ring": ring_s[0], "passes": passes},
            )
        ring_s[0] = 0.0

    QueryRing.observe_decode = timed  # type: ignore[method-assign,assignment]
    cache.decode_budgets.visit_budgets = watched_visit


def _taken(record: Any, page: int) -> int:
    if record.kind == "copy_out":
        return int(-(-record.after // page) * page)
    return int(record.copies or 0) if record.kind == "page" else 0
