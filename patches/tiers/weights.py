"""Weights that change, or go away for a while, under a running server: whoever keeps KV of them is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from sglang_evicpress.patches.tiers.load import Load
from sglang_evicpress.patches.tiers.types import Tiers
from sglang_evicpress.tiers.jobs import Job

MOST_COPY_S = 60.0  # until what a thread copies between GPU and host is there


class Weights:
    """``on_change`` are called one after the other when the model may have other weights and the tree was kept;
    ``loads`` are those that may still write to the pool."""

    def __init__(
        self, storage: Tiers, loads: Callable[[], Iterable[Load]], on_change: Iterable[Callable[[], object]]
    ) -> None:
        self._storage = storage
        self._loads = loads
        self._on_change = on_change
        self._forget: Callable[[], None] | None = None

    def know_model(self, forget: Callable[[], None]) -> None:
        """``forget``: what was known of the weights holds no longer."""
        self._forget = forget

    def forget_weights(self) -> None:
        """They are about to change, or to go."""
        if self._forget is not None:
            self._forget()

    def weights_changed(self) -> None:
        """They may be others now; nothing changes if they are the same."""
        for listener in self._on_change:
            listener()

    def end_copies(self) -> None:
        """Before SGLang gives the pool's memory back: no thread reads or writes it any more. Raises RuntimeError where
        that takes longer than ``MOST_COPY_S``."""
        lasts = []
        for name in ("load", "copy"):
            if name in self._storage.workers:
                lasts.append(Last())
                self._storage.submit(name, lasts[-1])
        deadline_s = time.monotonic() + MOST_COPY_S
        is_over = all(last.has_run.wait(max(0.0, deadline_s - time.monotonic())) for last in lasts)
        # a device may go on with what their thread has queued
        if not (is_over and all(load.await_end(deadline_s) for load in self._loads())):
            raise RuntimeError(f"evicpress: copies of the KV pool go on after {MOST_COPY_S:g} s: it is not released")


class Last(Job):
    """Has run when every job of its worker thread that was submitted before has."""

    priority = 1 << 30
    is_local = True

    def run(self) -> None:
        """Nothing: its turn is what counts."""

    def finish(self) -> None:
        """Nothing follows."""
