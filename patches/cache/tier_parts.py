"""The parts that keep KV below the GPU and bring it back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.core import Form, Tier
from sglang_evicpress.patches.cache.fill_replace import FillReplace
from sglang_evicpress.patches.cache.gpu_ops import GpuOps
from sglang_evicpress.patches.cache.outside import Later, Outside, Pool
from sglang_evicpress.patches.cache.tree_parts import TreeParts
from sglang_evicpress.patches.tiers.backup import Backup
from sglang_evicpress.patches.tiers.demotion import Demotion
from sglang_evicpress.patches.tiers.external_checks import ExternalChecks
from sglang_evicpress.patches.tiers.external_reads import ExternalReads
from sglang_evicpress.patches.tiers.external_writes import ExternalWrites
from sglang_evicpress.patches.tiers.grafting import Grafting
from sglang_evicpress.patches.tiers.holds import Holds
from sglang_evicpress.patches.tiers.host_checks import HostChecks
from sglang_evicpress.patches.tiers.host_compression import HostCompression
from sglang_evicpress.patches.tiers.host_room import HostRoom
from sglang_evicpress.patches.tiers.late_loads import LateLoads
from sglang_evicpress.patches.tiers.load_back import LoadBack
from sglang_evicpress.patches.tiers.load_terms import LoadTerms
from sglang_evicpress.patches.tiers.loads import Loads
from sglang_evicpress.patches.tiers.placement import Placement
from sglang_evicpress.patches.tiers.prefetch import Prefetcher
from sglang_evicpress.patches.tiers.prefetches import Prefetches
from sglang_evicpress.patches.tiers.promotion import Promotion
from sglang_evicpress.patches.tiers.removal import Removal
from sglang_evicpress.patches.tiers.reservations import Reservations
from sglang_evicpress.patches.tiers.ssd_compression import SsdCompression
from sglang_evicpress.patches.tiers.ssd_io import SsdIo
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.types import Node


class TierParts:
    """Each made after those that it is given. What a part asks of one that is made after it, ``later`` finds."""

    def __init__(
        self,
        tree: TreeParts,
        nodes: Mapping[int, Node],
        allocator: Pool,
        page_size: int,
        config: EvicPressConfig,
        compressor: Compressor,
        outside: Outside,
        later: Later,
    ) -> None:
        slot_bytes = compressor.slot_bytes
        takes_lossy = any(not form.is_exact for form in tree.menu.forms)
        self.placement = Placement(
            tree.storage,
            tree.adapters,
            tree.ledger,
            tree.quality.quality_of_copy,
            tree.changes.changed,
            tree.menu.stored_bytes,
            slot_bytes,
        )
        self.removal = Removal(
            nodes,
            outside,
            tree.storage,
            self.placement,
            tree.ledger,
            tree.changes,
            on_drop=later.note_drop,
            leave_plans=tree.policy.remove,
        )
        self.gpu_ops = GpuOps(
            nodes, tree.menu, config.sinks, compressor, allocator, tree.ledger, tree.changes, self.removal
        )
        self.host_room = HostRoom(nodes, tree.storage, self.placement, self.removal, tree.policy, tree.changes)
        self.ssd_io = SsdIo(
            nodes,
            tree.storage,
            tree.adapters,
            self.placement,
            self.removal,
            self.host_room,
            tree.policy,
            tree.changes,
            costs=lambda: tree.terms.costs,
            free_slots=later.free_bytes,
            observe=tree.terms.observe_load,
            mark_dirty=partial(tree.background_clock.mark_dirty, at_once=True),
            page_size=page_size,
        )
        self.late_loads = LateLoads(tree.storage, allocator, tree.ledger)
        self.loads = Loads(
            tree.storage,
            self.late_loads,
            compressor.written_event,
            tree.terms.observe_load,
            outside.tree.dec_lock_ref,
            is_cuda=compressor.is_cuda,
        )
        if self.loads.gate is not None:
            allocator.get_kvcache().register_layer_transfer_counter(self.loads.gate)
        self.reservations = Reservations(
            nodes,
            tree.storage,
            self.ssd_io,
            tree.changes.changed,
            outside.tree.inc_lock_ref,
            outside.tree.dec_lock_ref,
            allocator.size,
        )
        self.prefetches = Prefetches(self.reservations, tree.storage.now_s)
        self.load_back = LoadBack(
            tree.storage,
            allocator,
            self.loads.add,
            self.placement.place,
            outside.tree.inc_lock_ref,
            outside.tree.dec_lock_ref,
            later.make_room,
            self.prefetches.from_ssd,
            allocator.device,
        )
        self.backup = Backup(
            nodes,
            tree.storage,
            self.placement,
            self.removal,
            self.host_room,
            self.ssd_io,
            compressor,
            self.loads.is_arriving,
            tree.eviction_log,
        )

        def lacks_room(node: Node, form: Form, num_bytes: int) -> None:
            planned = tree.menu.num_bytes(form, len(node.key), tier=Tier.HOST)  # an entry has its positions besides
            node.kv.room_bytes = min(num_bytes, planned - 1)  # not the same again
            tree.without_room.add(node.id, tree.storage.now_s())

        self.host_compression = HostCompression(
            nodes,
            tree.storage,
            self.placement,
            self.removal,
            self.host_room,
            self.ssd_io,
            self.gpu_ops,
            compressor,
            lacks_room,
        )
        self.ssd_compression = SsdCompression(
            nodes,
            tree.storage,
            self.ssd_io,
            self.host_compression,
            self.removal,
            costs=lambda: tree.terms.costs,
            busy_s=lambda: tree.background_clock.busy_s,
            room=self.host_room.room,
        )
        self.demotion = Demotion(
            nodes, tree.adapters, self.placement, self.removal, self.gpu_ops, self.host_compression, self.backup
        )
        self.fill_replace = FillReplace(
            nodes,
            self.placement,
            self.removal,
            tree.ledger,
            tree.changes,
            compressor,
            config.min_match_kept,
            self.gpu_ops.window_of,
            tree.queries.drop,
            self.backup.backup_parent,
        )
        self.holds = Holds(nodes, tree.storage.now_s)
        self.checks = HostChecks(tree.storage, self.removal.invalidate_entry)
        self.load_terms = LoadTerms(lambda: tree.terms.costs, self.ssd_io, lambda: self.prefetches.num_ready)
        self.grafting = Grafting(
            tree.storage,
            tree.adapters,
            self.ssd_io.look_up,
            lambda: self.external_reads.is_busy,
            lambda *asked: self.external_reads.look_up(*asked),
            self.load_terms,
            outside.tree,
            slot_bytes,
            page_size,
            takes_lossy,
            compressor.groups.group_of,
        )
        self.external_reads = ExternalReads(
            tree.storage,
            tree.adapters,
            self.host_room,
            self.load_terms,
            self.grafting,
            costs=lambda: tree.terms.costs,
            observe=tree.terms.observe_load,
            slot_bytes=slot_bytes,
            page_size=page_size,
            takes_lossy=takes_lossy,
        )
        self.external_writes = ExternalWrites(
            nodes,
            tree.storage,
            tree.adapters,
            self.host_room,
            self.backup,
            self.removal,
            tree.changes,
            costs=lambda: tree.terms.costs,
            observe=tree.terms.observe_load,
            slot_bytes=slot_bytes,
        )
        self.external_checks = ExternalChecks(
            nodes, tree.storage, tree.adapters, self.placement.header_of, tree.changes
        )
        self.prefetcher = Prefetcher(
            nodes,
            tree.storage,
            self.prefetches,
            self.reservations,
            self.load_terms,
            self.ssd_io,
            self.grafting,
            outside.tree,
            tree.queue.turns.wait_s,
            lambda: self.host_room.num_plans,
            self.checks.start,
            page_size,
        )
        self.promotion = Promotion(
            nodes,
            tree.storage,
            allocator,
            tree.ledger,
            self.ssd_io,
            self.loads.start_unseen,
            self.checks.start,
            self.placement.place,
            self.fill_replace.replace,
            self.holds,
            lambda: tree.terms.costs,
            lambda: tree.background_clock.busy_s,
        )
