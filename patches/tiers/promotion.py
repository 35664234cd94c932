"""Promoting nodes, a step at a time: lossy ones get their exact KV back from a copy below, nodes that are below come
up. A load has its slots to itself until it is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.host_checks import is_verified
from sglang_evicpress.patches.tiers.load import Load, Part
from sglang_evicpress.patches.tiers.placement import exact_tier_of
from sglang_evicpress.patches.tiers.ssd_io import SsdReads
from sglang_evicpress.patches.tiers.types import Slots, Tiers
from sglang_evicpress.patches.tree.node import is_lossy
from sglang_evicpress.patches.tree.types import Allocator, Node
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry
from sglang_evicpress.tiers.jobs import Job

FREE_SHARE = 1 / 8
"""Of the pool: stays free, so that nothing that comes up is pushed down by the next request."""

MOST_READS = 3
"""Of one SSD entry, for one promotion: on a full host what was read may have to go before it is loaded."""

RETRY_S, MOST_DOUBLED = 60.0, 10
"""So long a node stays where it is of which the SSD entry could not be had, twice as long each time, unless a request
matches it: others come up meanwhile."""


class TimedHolds(Protocol):
    """Nodes that stay where they are for a while, see ``Holds``."""

    def hold(self, node_id: int, seconds: float) -> None: ...
    def left_s(self, node_id: int) -> float: ...


@dataclass(eq=False, repr=False)
class Promotion:
    """Carries promotions out. ``start_unseen`` begins a load that no request waits for, ``start_check`` verifies a host
    entry; ``place`` and ``replace`` give slots to a node that is below, or lossy on the GPU; ``holds``: nodes that
    stay where they are for a while; ``busy_s``: when a request last ran or waited."""

    nodes: Mapping[int, Node]
    storage: Tiers
    allocator: Allocator
    ledger: Slots
    ssd: SsdReads
    start_unseen: Callable[[Part, Callable[[Load], None]], Load]
    start_check: Callable[[HostEntry], Job]
    place: Callable[[Node, Copy, torch.Tensor], torch.Tensor]
    replace: Callable[[Node, torch.Tensor, bool], None]
    holds: TimedHolds
    costs: Callable[[], CostSnapshot]
    busy_s: Callable[[], float]

    def __post_init__(self) -> None:
        self._source_tiers: dict[int, Tier] = {}  # by node id
        self._num_reads = Counter[int]()

    @property
    def is_busy(self) -> bool:
        return bool(self._source_tiers)

    def promote(self, node_id: int) -> bool:
        """Begin to bring a node onto the GPU, or to give it its exact KV if it is there; False where nothing has
        that."""
        node = self.nodes[node_id]
        tier = min(node.kv.copies) if node.value is None else exact_tier_of(node)
        if tier is None:
            return False
        self._source_tiers[node_id] = tier
        return True

    def advance(self) -> None:
        """Go on with what is being promoted."""
        for node_id, tier in list(self._source_tiers.items()):
            if not self._take_step(node_id, tier):
                del self._source_tiers[node_id]
                del self._num_reads[node_id]

    def clear(self) -> None:
        """The tree goes."""
        self._source_tiers.clear()
        self._num_reads.clear()

    def _take_step(self, node_id: int, tier: Tier) -> bool:
        """The next step of promoting a node; False when it is done, or cannot be any more."""
        node = self.nodes.get(node_id)
        if node is None or node.lock_ref > 0 or (node.value is not None and not is_lossy(node)):
            return False
        if self.holds.left_s(node_id) > 0.0:
            return False
        if node.kv.job is not None:
            return True
        copy = node.kv.copies.get(Tier.HOST)
        if copy is None or (node.value is not None and not copy.is_exact):
            below = node.kv.copies.get(Tier.SSD)
            if tier != Tier.SSD or below is None:
                return False
            if node.value is not None and not below.is_exact:
                return False  # it was promoted as it is
            load_s = self.costs().load_seconds(Tier.SSD, below.entry.header.payload_bytes)
            if self.ssd.reads or self.storage.now_s() - self.busy_s() < load_s:
                return True  # a request that comes now would have to wait for it: none came for as long as it takes
            self._num_reads[node_id] += 1
            if self._num_reads[node_id] > MOST_READS or self.ssd.start_read(below.entry) is None:
                self.holds.hold(node_id, RETRY_S * 2 ** min(below.entry.num_vain, MOST_DOUBLED))
                below.entry.num_vain += 1
                return False
            return True
        if not is_verified(copy.entry, self.storage.now_s()):
            self.start_check(copy.entry)
            return True
        self._start_load(node, copy)
        return node.kv.job is not None

    def _start_load(self, node: Node, copy: Copy) -> None:
        allocator = self.allocator
        if not _is_reachable(node) or allocator.available_size() - copy.num_slots < FREE_SHARE * allocator.size / 2:
            return
        slots = allocator.alloc(copy.num_slots)
        if slots is not None:
            self.ledger.reserve(len(slots))
            end = partial(self._end_load, node.id, node.kv.version)
            node.kv.job = self.start_unseen(Part(copy, slots), end)

    def _end_load(self, node_id: int, version: int, load: Load) -> None:
        (part,) = load.parts
        self.ledger.release(len(part.slots))
        node = self.nodes.get(node_id)
        if node is not None and node.kv.job is load:
            node.kv.job = None
        if load.error is not None or node is None or not self._fits(node, version, part.copy):
            self.ledger.free(part.slots)
        elif node.value is None:
            self.place(node, part.copy, part.slots)
            self.storage.counts["promoted"] += 1
        else:
            self.replace(node, part.slots, False)
            self.storage.counts["upgraded"] += 1

    def _fits(self, node: Node, version: int, copy: Copy) -> bool:
        """True if the node is still what it was when the load began."""
        is_same = node.kv.version == version and node.kv.copies.get(Tier.HOST) is copy
        return is_same and _is_reachable(node) and node.lock_ref == 0 and not self.holds.left_s(node.id)


def _is_reachable(node: Node) -> bool:
    parent = node.parent
    return parent.parent is None or parent.value is not None
