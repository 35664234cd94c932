"""The parts that know the tree's nodes, and what the policy makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.patches.cache.eviction_log import EvictionLog
from sglang_evicpress.patches.cache.outside import Later, Outside, Pool
from sglang_evicpress.patches.cache.policy_sync import PolicySync
from sglang_evicpress.patches.cache.policy_terms import PolicyTerms
from sglang_evicpress.patches.cache.queued_hits import QueuedHits
from sglang_evicpress.patches.profiling.quality import Quality
from sglang_evicpress.patches.scheduler.paged_allocator import free_whole_pages
from sglang_evicpress.patches.scheduler.queue_limit import QueueTimes
from sglang_evicpress.patches.tiers.background_clock import BackgroundClock
from sglang_evicpress.patches.tiers.storage import Storage
from sglang_evicpress.patches.tree.adapters import Adapters
from sglang_evicpress.patches.tree.changes import NodeChanges
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.node_queries import NodeQueries
from sglang_evicpress.patches.tree.quality_floors import QualityFloors
from sglang_evicpress.patches.tree.set_aside import WITHOUT_ROOM_S, SetAside, mark_without_room
from sglang_evicpress.patches.tree.slot_ledger import SlotLedger
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.tenants import read_tenants
from sglang_evicpress.tiers.entry.header import ratios_of


class TreeParts:
    """Each made after those that it is given. What a part asks of one that is made after it, ``later`` finds."""

    def __init__(
        self,
        nodes: Mapping[int, Node],
        allocator: Pool,
        page_size: int,
        config: EvicPressConfig,
        compressor: Compressor,
        identity: bytes,
        outside: Outside,
        later: Later,
    ) -> None:
        slot_bytes = compressor.slot_bytes
        self.num_failed = Counter[str]()
        self.changes = NodeChanges()
        self.queries = NodeQueries(self.changes.changed)
        self.ranks = compressor.ranks
        self.background_clock = BackgroundClock(is_shared=not self.ranks.is_alone)
        self.eviction_log = EvictionLog()
        self.ledger = SlotLedger(partial(free_whole_pages, allocator))
        self.aside = SetAside(nodes, self.changes.changed)
        self.without_room = SetAside(nodes, self.changes.changed, seconds=WITHOUT_ROOM_S, mark=mark_without_room)
        self.adapters = Adapters(identity, outside.namespaces, has_tiers=config.has_tiers)
        ratios = ratios_of(compressor.shape)  # rows of a few models cannot be encoded
        for form in config.menu_forms:
            if not (form.has_lossy_codec or form.codec in ratios):
                raise ValueError(
                    f"form {form} cannot be stored, as KV is {compressor.shape.dtype}: expected --dtype bfloat16, or "
                    "other forms"
                )
        forms = tuple(form for form in config.menu_forms if form.codec in ratios or form not in config.forms)
        make_copier = partial(compressor.payload_copier, dict.fromkeys(form.codec for form in forms))
        self.storage = Storage.open(config, make_copier, identity, self.ranks, is_cuda=compressor.is_cuda)
        self.menu = Menu(forms, self.storage.tiers, slot_bytes, page_size, ratios, compressor.groups)
        self.queue = QueueTimes(config.max_queue_s)
        tenants = read_tenants(config.tenants or {})
        self.terms = PolicyTerms(
            config, nodes, has_host=self.storage.has_host, is_external_away=lambda: self.storage.is_external_away
        )
        self.policy = PolicySync(
            config,
            self.menu,
            nodes,
            self.terms,
            tiers=lambda: self.storage.tiers,
            mean_curve=lambda: self.quality.mean_curve,
            lower_copies_of=later.lower_copies_of,
            stats_of=later.stats_of,
            mark_dirty=self.background_clock.mark_dirty,
            num_failed=self.num_failed,
            tenants=tenants,
        )
        self.quality = Quality(
            outside.tree,
            self.terms,
            self.policy,
            self.background_clock.mark_dirty,
            compressor,
            config,
            self.menu.forms,
            self.changes.changed,
        )
        self.floors = QualityFloors(tenants)
        self.queued_hits = QueuedHits(nodes, self.terms, self.policy)
