"""Weights that change, or go away for a while, under a running server: which model the cache keeps KV of."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

from sglang_evicpress.tiers.jobs import Job
from sglang_evicpress.tiers.ssd.store import StoreError
from sglang_evicpress.tiers.ssd.tier import SsdTier

logger = logging.getLogger(__name__)

MOST_COPY_S = 60.0  # until what a thread copies between GPU and host is there


class Weights:
    """The part of EvicPressCache that follows the weights. Everything here runs on the scheduler thread."""

    def open_weights(self: Any) -> None:
        """``identify`` asks for the model's identity anew; ``forget_weights``: what was known of the weights holds no
        longer."""
        self.identify: Callable[[], bytes] | None = None
        self.forget_weights: Callable[[], None] = lambda: None
        self.is_mixed = False  # the tree holds KV of several models
        self._parted_ssd: SsdTier | None = None  # until the tree is flushed

    @property
    def are_weights_released(self: Any) -> bool:
        """True if SGLang has given the memory of the weights back for now: it must not be read."""
        return self.scheduler is not None and GPU_MEMORY_TYPE_WEIGHTS in self.scheduler.weight_updater.offload_tags

    def weights_changed(self: Any) -> None:
        """The model may have other weights, and the tree was kept; nothing of it changes if they are the same."""
        self.shadows.release_shadows()
        if self.quality.identify_profiles():
            for node in self.nodes.values():
                node.kv.profiles, node.kv.curve = {}, None
                self.changes.changed(node)
        self.part_from_ssd()

    def identity_now(self: Any) -> bytes:
        """Identity of the model that computes from now on; without tiers nobody needs one."""
        return bytes(self.adapters.identity if self.host is None or self.identify is None else self.identify())

    def part_from_ssd(self: Any) -> None:
        """The model may have other weights now, and the tree was kept: if it holds KV of both, nothing goes to the SSD,
        or comes from it, until the tree is flushed."""
        identity = self.identity_now()
        if identity == self.adapters.identity:
            return
        allocator = self.token_to_kv_pool_allocator
        if not self.nodes and not self.is_mixed and allocator.available_size() == allocator.size:
            self.change_identity(identity)
            self.renew_planner()
            return
        self.is_mixed = True
        if self.ssd is not None:
            logger.warning("evicpress: the weights changed without a flush: the SSD tier is off until /flush_cache")
            former = self.ssd
            self.detach_ssd()
            self._parted_ssd = former

    def use_ssd(self: Any, ssd: SsdTier | None) -> None:
        """The SSD tier is this one from now on; whoever calls sees to the nodes."""
        self.storage.use_ssd(ssd)
        self.placement.use_no_ssd_entry()

    def reset_tiers(self: Any) -> None:
        """The tree is gone, and with it every copy: an SSD entry too, as the weights may be others now."""
        for node in self.nodes.values():
            node.kv.version += 1
            self.placement.remove_copies(node)
        self.prefetches.clear()
        self.prefetch_nodes.clear()
        self.placement.clear()
        if self.ssd is not None and self.nodes:
            self.ssd.clear(self.workers["write"])
        self.is_mixed = False
        identity = self.identity_now()
        if identity != self.adapters.identity or self._parted_ssd is not None:
            self.change_identity(identity)

    def change_identity(self: Any, identity: bytes) -> None:
        """The model has other weights now: what is on the SSD is none of its business, and must not look like it."""
        self.adapters.use_identity(identity)
        former: SsdTier | None = self.ssd or self._parted_ssd
        is_parted, self._parted_ssd = self.ssd is None, None
        if former is None:
            return
        if not is_parted:
            self.close_ssd(former)
        try:
            self.use_ssd(former.reopened(identity))
        except (StoreError, OSError) as error:
            logger.error("evicpress: the SSD tier is lost: %s", error)
            self.use_ssd(None)
        self.menu = replace(self.menu, tiers=self.tiers)

    def end_copies(self: Any) -> None:
        """Before SGLang gives the pool's memory back: no thread reads or writes it any more. Raises RuntimeError where
        that takes longer than ``MOST_COPY_S``."""
        lasts = [Last() for name in ("load", "copy") if name in self.workers]
        for last, name in zip(lasts, ("load", "copy"), strict=False):
            self.workers[name].submit(last)
        deadline_s = time.monotonic() + MOST_COPY_S
        is_over = all(last.has_run.wait(max(0.0, deadline_s - time.monotonic())) for last in lasts)
        # a device may go on with what their thread has queued
        loads = (*self.loads, *self.promotion_loads, *self.set_apart)
        if not (is_over and all(load.await_end(deadline_s) for load in loads)):
            raise RuntimeError(f"evicpress: copies of the KV pool go on after {MOST_COPY_S:g} s: it is not released")


class Last(Job):
    """Has run when every job of its worker thread that was submitted before has."""

    rank = 1 << 30

    def run(self) -> None:
        """Nothing: its turn is what counts."""

    def finish(self) -> None:
        """Nothing follows."""
