"""The parts of the cache, each made after those that it is given."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.core import NodeStats, Tier
from sglang_evicpress.patches.cache.gpu_ops import GpuOps
from sglang_evicpress.patches.cache.moves import NodeMoves
from sglang_evicpress.patches.cache.plans import CurrentPlans
from sglang_evicpress.patches.scheduler.paged_allocator import PagedPool, free_whole_pages
from sglang_evicpress.patches.tiers.backup import Backup
from sglang_evicpress.patches.tiers.demotion import Demotion
from sglang_evicpress.patches.tiers.host_compression import HostCompression
from sglang_evicpress.patches.tiers.host_room import HostRoom
from sglang_evicpress.patches.tiers.placement import Placement
from sglang_evicpress.patches.tiers.removal import Removal
from sglang_evicpress.patches.tiers.ssd_io import SsdIo
from sglang_evicpress.patches.tiers.storage import Storage
from sglang_evicpress.patches.tree.adapters import Adapters
from sglang_evicpress.patches.tree.changes import NodeChanges
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.set_aside import SetAside
from sglang_evicpress.patches.tree.slot_ledger import SlotLedger
from sglang_evicpress.patches.tree.types import Allocator, Node
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner
from sglang_evicpress.tiers.entry.copies import Copy


class Pool(Allocator, PagedPool, Protocol):
    """SGLang's allocator, with its pages."""


@dataclass(frozen=True)
class Outside:
    """What the parts ask of the tree and of the parts above them, each by one function."""

    root_of: Callable[[], Node]
    namespaces: Callable[[], Iterable[str | None]]
    delete: Callable[[Node], None]
    tell_removed: Callable[[Node], None]
    policy: Callable[[], Planner]
    now_s: Callable[[], float]
    costs: Callable[[], CostSnapshot]
    observe_load: Callable[[Tier, int, float], None]
    free_slots: Callable[[Tier, int], int]
    mark_dirty: Callable[[], None]
    on_drop: Callable[[Node, str, int | None], None]
    stats_of: Callable[[Node], NodeStats]
    quality_of_copy: Callable[[Node, Copy], float]
    cause_of_drop: Callable[[Node], str | None]
    is_arriving: Callable[[Node], bool]

    @property
    def root(self) -> Node:
        return self.root_of()

    def remove(self, node_id: int) -> None:
        """Let no plan be about the node any more."""
        self.policy().remove(node_id)


class Parts:
    """Those that are objects of their own; the others are mixins of ``EvicPressCache`` still. ``evictions`` and
    ``eviction_seconds`` count what evicting did, copying at once included."""

    def __init__(
        self,
        nodes: Mapping[int, Node],
        allocator: Pool,
        page_size: int,
        config: EvicPressConfig,
        compressor: Compressor,
        identity: bytes,
        outside: Outside,
    ) -> None:
        self.evictions, self.eviction_seconds = Counter[str](), defaultdict[str, float](float)
        slot_bytes = compressor.slot_bytes
        self.changes = NodeChanges()
        self.ledger = SlotLedger(partial(free_whole_pages, allocator))
        self.aside = SetAside(nodes, self.changes.changed)
        self.adapters = Adapters(identity, outside.namespaces, has_tiers=config.has_tiers)
        self.storage = Storage.open(config, compressor.payload_copier, identity, is_cuda=compressor.is_cuda)
        self.menu = Menu(config.menu_forms, self.storage.tiers, slot_bytes, page_size)
        self.placement = Placement(
            self.storage, self.adapters, outside.quality_of_copy, self.changes.changed, slot_bytes
        )
        self.removal = Removal(nodes, outside, self.storage, self.placement, self.ledger, self.changes, outside.on_drop)
        self.plans = CurrentPlans(outside.policy, self.placement.lower_copies_of)
        self.gpu_ops = GpuOps(
            nodes,
            self.menu,
            config.sinks,
            compressor,
            allocator,
            self.ledger,
            self.changes,
            self.removal,
            outside.stats_of,
        )
        self.host_room = HostRoom(nodes, self.storage, self.placement, self.removal, self.plans, self.changes)
        self.ssd_io = SsdIo(
            nodes,
            self.storage,
            self.adapters,
            self.placement,
            self.removal,
            self.host_room,
            self.plans,
            self.changes,
            costs=outside.costs,
            free_slots=outside.free_slots,
            observe=outside.observe_load,
            mark_dirty=outside.mark_dirty,
            slot_bytes=slot_bytes,
            page_size=page_size,
        )
        self.backup = Backup(
            nodes,
            self.storage,
            self.placement,
            self.removal,
            self.host_room,
            self.ssd_io,
            compressor,
            outside.is_arriving,
            self.evictions,
            self.eviction_seconds,
        )
        self.host_compression = HostCompression(
            nodes,
            self.storage,
            self.placement,
            self.removal,
            self.host_room,
            self.ssd_io,
            self.gpu_ops,
            compressor,
            slot_bytes,
        )
        self.demotion = Demotion(
            nodes, self.adapters, self.placement, self.removal, self.gpu_ops, self.host_compression, self.backup
        )
        self.moves = NodeMoves(
            nodes,
            self.gpu_ops,
            self.host_compression,
            self.removal,
            self.demotion,
            self.aside,
            outside.cause_of_drop,
            outside.now_s,
            is_alone=lambda: compressor.is_alone,
        )
        self.changes.subscribe(self.placement.note_copies)
        self.changes.subscribe_to_leaving(self.backup.backup_parent)
