"""The end of the server: what the next one would sooner read than compute goes to the SSD."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.storage import EXTERNAL_THREADS
from sglang_evicpress.patches.tiers.types import Backups, Names, Rounds, Tiers
from sglang_evicpress.patches.tree.node import iter_nodes, size_of, start_of
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.tiers.ssd.tier import SsdTier

CLOSE_S = 6.0
LET_GO_S = 2.0  # of an SSD folder


@dataclass(eq=False, repr=False)
class TierShutdown:
    """Lets go of everything below the GPU. ``part`` lets this rank go on alone."""

    root: Callable[[], Node]
    nodes: Mapping[int, Node]
    storage: Tiers
    names: Names
    backup: Backups
    rounds: Rounds
    close_ssd: Callable[[SsdTier, float], None]
    part: Callable[[], None]
    _: KW_ONLY
    costs: Callable[[], CostSnapshot]
    join_loads: Callable[[], None]
    release_shadows: Callable[[], int]
    slot_bytes: int

    def close(self, *, save: bool = True) -> None:
        """Publish what is on its way to the SSD, within a few seconds. Without ``save``, after an exception, publish
        nothing and wait for nothing."""
        workers, ssd = self.storage.workers, self.storage.ssd
        if not save:
            if ssd is not None:
                ssd.store.abandon()
            for each in workers.values():
                each.close(time.monotonic())
            return
        if not self.storage.has_host:
            return
        self.part()  # ranks end at steps of their own
        deadline_s = time.monotonic() + CLOSE_S
        self.join_loads()  # what is still arriving cannot be copied yet
        if ssd is not None:
            self._save_for_the_next(deadline_s - 1.0)
        left_s = deadline_s - time.monotonic()
        self.rounds.settle(lambda: not workers["write"].num_pending and not workers["copy"].num_pending, left_s)
        external = self.storage.external
        for each in [workers[name] for name in workers if name not in EXTERNAL_THREADS]:
            each.close(deadline_s + 1.0)
        if ssd is not None:
            self.close_ssd(ssd, LET_GO_S)
        for each in [workers[name] for name in workers if name in EXTERNAL_THREADS]:
            each.close(time.monotonic())
        if external is not None and not external.circuit.hangs and not external.close():
            self.storage.errors["external_close_deadline"] += 1

    def _save_for_the_next(self, deadline_s: float) -> None:
        """The most used first."""
        self.release_shadows()
        costs = self.costs()
        for node in sorted(iter_nodes(self.root()), key=lambda node: -node.kv.weight):
            if node.id not in self.nodes or not self.names.may_reach_ssd(node):
                continue
            load_s = costs.load_seconds(Tier.SSD, size_of(node) * self.slot_bytes)
            compute_s = costs.prefill.marginal_seconds(len(node.key), start_of(node))
            if Tier.SSD not in node.kv.copies and load_s < compute_s:
                self.rounds.settle(partial(self._is_begun, node), deadline_s - time.monotonic())
            if time.monotonic() >= deadline_s:
                return

    def _is_begun(self, node: Node) -> bool:
        """True if its copy is on its way, or it is gone: it had to make room."""
        return node.id not in self.nodes or self.backup.start_copy(node, Tier.SSD)
