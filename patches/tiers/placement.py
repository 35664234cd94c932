"""Copies of nodes below the GPU: making them, showing the fastest, and moving a node down by freeing what is above.

A node is on the fastest tier that has it; its record (``node.kv``) describes what it is there. Further copies below are
spare: they make a later move down free, or hold the exact KV of a node that is lossy above.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch

from sglang_evicpress.config import GB, EvicPressConfig
from sglang_evicpress.core import Form, LowerCopy, Tier
from sglang_evicpress.patches.tiers.backup import Backup
from sglang_evicpress.patches.tiers.host_room import MOST_GIVEN_UP
from sglang_evicpress.patches.tiers.redundant import RedundantHostCopies, RedundantSsdEntries
from sglang_evicpress.patches.tree.adapters import SsdScope
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.node import (
    has_child_on_gpu,
    is_lossy,
    iter_nodes,
    num_slots,
    path_to,
    size_of,
    slots_of,
    start_of,
)
from sglang_evicpress.survivors import SurvivorLayout
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry, SsdEntry
from sglang_evicpress.tiers.entry.encoding import Header
from sglang_evicpress.tiers.entry.identity import PathHash, namespace_digest, token_bytes
from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.faults import Faults
from sglang_evicpress.tiers.host.tier import HostTier
from sglang_evicpress.tiers.jobs import Workers
from sglang_evicpress.tiers.ssd.read_timer import ReadTimer
from sglang_evicpress.tiers.ssd.tier import SsdTier

logger = logging.getLogger(__name__)

FAULTS_FLAG = "SGLANG_EVICPRESS_FAULTS"  # what the tiers do wrong on purpose, in tests: see tiers/faults.py
NOWHERE = torch.empty(0, dtype=torch.int64)
SMALL_SHARE = 1 / 4  # of an SSD entry
MOST_COPIED_SHARE = 1 / 4  # of the host tier: bytes on their way at once


class Placement:
    """The part of EvicPressCache that knows where copies are. Everything here runs on the scheduler thread."""

    def open_tiers(self: Any, config: EvicPressConfig, compressor: Compressor, identity: bytes) -> None:
        """Take the memory and start the threads. Raises ValueError or RuntimeError, one sentence, if it cannot be."""
        self.open_weights()
        self.host: HostTier | None = None
        self.ssd: SsdTier | None = None
        self.lower_copies_of: dict[int, tuple[LowerCopy, ...]] = {}  # by node id, what lower tiers have of it
        self.planned: frozenset[int] = frozenset()  # nodes that the last look ahead would have leave the GPU
        self.tier_counts: Counter[str] = Counter()
        self.tier_errors: Counter[str] = Counter()
        self._redundant, self.redundant_ssd = RedundantHostCopies(), RedundantSsdEntries()
        self.num_to_give_up = MOST_GIVEN_UP
        self._fragments: dict[HostEntry, None] = {}  # those of which a node has given up its piece
        self.ssd_fragments: dict[SsdEntry, None] = {}
        self._copying_bytes = 0
        self._host_wanted = self.num_host_plans = 0
        self._is_dirty = False
        self._next_plan_s = 0.0
        self.busy_s = 0.0  # when a request last ran or waited, time.monotonic
        self.arrival, self.read_timer = threading.Event(), ReadTimer()
        self.workers: dict[str, Workers] = {}
        if not config.has_tiers:
            return
        self.copier = compressor.payload_copier()
        text = os.environ.get(FAULTS_FLAG)
        faults = None if text is None else Faults.parse(text)
        pool_is_cuda = compressor.is_cuda
        self.host = HostTier(config.host_bytes, is_pinned=pool_is_cuda, faults=faults)
        self.ssd_key = None if config.ssd_key_file is None else Key.read(config.ssd_key_file)
        for name, num_threads in (("load", 1), ("check", 1), ("read", 2), ("copy", 1), ("write", 1)):
            self.workers[name] = Workers(name, num_threads, self.arrival)
        if config.ssd_dir is not None:
            per_day = None if config.ssd_write_gb_per_day is None else config.ssd_write_gb_per_day * GB
            self.ssd = SsdTier.open(
                config.ssd_dir, config.ssd_bytes, per_day, config.ssd_fsync, identity, faults, key=self.ssd_key
            )

    def use_ssd(self: Any, ssd: SsdTier | None) -> None:
        """The SSD tier is this one from now on; whoever calls sees to the nodes."""
        self.ssd = ssd
        self.redundant_ssd = RedundantSsdEntries()

    @property
    def tiers(self: Any) -> tuple[Tier, ...]:
        """Tiers in use, the GPU first."""
        tiers = [Tier.GPU]
        if self.host is not None:
            tiers.append(Tier.HOST)
        if self.ssd is not None:
            tiers.append(Tier.SSD)
        return tuple(tiers)

    # ---- what a node has

    def note_copies(self: Any, node: Any) -> None:
        """Work out anew as what the node can be on lower tiers at once."""
        own_tier, slot_bytes = tier_of(node), self.menu.slot_bytes
        lower_copies = tuple(
            LowerCopy(int(tier), copy.form, copy.num_slots * slot_bytes, self.quality.quality_of_copy(node, copy))
            for tier, copy in sorted(node.kv.copies.items())
            if tier > own_tier
        )
        if lower_copies:
            self.lower_copies_of[node.id] = lower_copies
        else:
            self.lower_copies_of.pop(node.id, None)
        copy = node.kv.copies.get(Tier.SSD)
        if copy is not None:
            self.redundant_ssd.note(copy.entry, node.id, is_lowest=own_tier == Tier.SSD)

    def has_same(self: Any, node: Any, tier: Tier) -> bool:
        """True if a lower tier has just what the node holds now."""
        copy = node.kv.copies.get(tier)
        return copy is not None and _same(node.kv, copy, size_of(node))

    def add_copy(self: Any, node: Any, copy: Copy) -> None:
        """The node has ``copy`` from now on, instead of one that it had on that tier."""
        self.remove_copy(node, copy.tier)
        kv = node.kv
        kv.copies[copy.tier] = copy
        if copy.tier == Tier.HOST:
            self.host.hold(copy.entry, node.id)
            if node.value is not None:
                self._redundant.add(node.id, is_coldest=True)
        else:
            copy.entry.owners.add(node.id)
        if node.value is None and tier_of(node) == copy.tier:
            self.show(node)
        self.changes.changed(node)

    def remove_copy(self: Any, node: Any, tier: Tier) -> None:
        """Give a copy up, if there is one. Whoever calls sees to the node when that was all it had."""
        copy = node.kv.copies.pop(tier, None)
        if copy is None:
            return
        if tier == Tier.HOST:
            self._redundant.discard(node.id)
            self.host.release(copy.entry, node.id)
            if copy.entry.owners:
                self._fragments[copy.entry] = None
        else:
            copy.entry.owners.discard(node.id)
            self.redundant_ssd.leave(copy.entry, node.id)
            if copy.entry.owners:
                self.ssd_fragments[copy.entry] = None
            elif self.ssd is not None:
                self.ssd.remove(copy.entry, self.workers["write"])

    def remove_copies(self: Any, node: Any, *, lossy_only: bool = False) -> None:
        for tier, copy in list(node.kv.copies.items()):
            if not (lossy_only and copy.is_exact):
                self.remove_copy(node, tier)

    def show(self: Any, node: Any) -> None:
        """Let the record of a node that is not on the GPU say what its fastest copy is."""
        copy, kv = node.kv.copies[tier_of(node)], node.kv
        kv.form, kv.layout, kv.is_lossy_prefix, kv.origin = copy.form, copy.layout, copy.is_lossy_prefix, copy.origin
        kv.slots = NOWHERE
        if copy.tier == Tier.SSD and copy.layout is not None:
            copy.layout.pack()

    def split_copies(self: Any, upper: Any, lower: Any) -> None:
        """``upper`` was split off ``lower``: both have their pieces of every copy. While the GPU has it, a small piece
        of an SSD entry is given up: to get it back all of that would be read, and by itself it is soon written."""
        upper.kv.copies = {}
        for tier, copy in list(lower.kv.copies.items()):
            left, right = copy.split(len(upper.key))
            upper.kv.copies[tier], lower.kv.copies[tier] = left, right
            if tier == Tier.HOST:
                self.host.hold(copy.entry, upper.id)
                if upper.value is not None:
                    self._redundant.add(upper.id)
                continue
            copy.entry.owners.add(upper.id)
            least = SMALL_SHARE * copy.entry.header.payload_bytes
            for node, piece in ((upper, left), (lower, right)) if upper.value is not None else ():
                # but the exact KV of what is lossy now, which only the SSD has
                if piece.num_slots * self.menu.slot_bytes < least and not (piece.is_exact and is_lossy(node)):
                    self.remove_copy(node, tier)
            if upper.value is None and tier_of(lower) == Tier.SSD:
                for piece in (left, right):
                    if piece.layout is not None:
                        piece.layout.pack()

    # ---- moving down

    def evict_from_gpu(self: Any, node_id: int, tier: Tier) -> int:
        """Free what a node holds above ``tier``, where it has a copy, and is as that is. Returns the slots freed."""
        node = self.nodes[node_id]
        if node.lock_ref > 0 or tier not in node.kv.copies or tier <= tier_of(node):
            raise RuntimeError(f"evicpress: node {node_id} is locked or has no copy on tier {tier.label} below its own")
        freed, former, is_resident = num_slots(node), node.kv.layout, node.value is not None
        try:  # what can fail comes first
            for above in [above for above in node.kv.copies if above < tier]:
                self.remove_copy(node, above)
            if is_resident:
                self._leave_gpu(node)
        except Exception:
            if node.value is None:
                self.show(node)
            self.changes.changed(node)
            raise
        if not is_resident:
            self.show(node)
            self.changes.changed(node)
        if former is not None and not _is_same_layout(former, node.kv.layout):
            self.drop_overlaps(node)
        self.tier_counts["released"] += 1
        return freed

    def _leave_gpu(self: Any, node: Any) -> None:
        freed = num_slots(node)
        self.ledger.free(slots_of(node))  # first: where it fails nothing has changed
        node.kv.version += 1
        node.value = None
        self._redundant.discard(node.id)
        self.show(node)
        self.ledger.remove(freed)
        self._record_remove_event(node)
        self.changes.changed(node)
        self.changes.left_gpu(node)

    def backup_parent(self: Any, node: Any) -> None:
        """A node that is not on the GPU holds its parent there until that has a copy: see that it gets one."""
        parent = node.parent
        is_held = parent is not self.root_node and parent.value is not None
        if is_held and not self.lower_copies_of.get(parent.id) and parent.kv.job is None:
            self.start_copy(parent, Tier.HOST, is_modest=True)

    def demote(self: Any, node_id: int, tier: Tier, form: Form, *, at_once: bool = False) -> int:
        """Bring a node to ``form`` on a lower tier: at once where that is there already, else once it was copied, or,
        with ``at_once``, as far as it comes now. Returns the slots freed now. A node whose children are still on their
        way off the GPU stays until another plan sends it."""
        if at_once:
            return int(self.demote_at_once(node_id, tier, form))
        node, freed = self.nodes[node_id], 0
        copy, is_resident = node.kv.copies.get(tier), node.value is not None
        if tier_of(node) >= tier:
            return 0  # another move of the same plan has sent it down
        if tier == Tier.SSD and self.adapters.ssd_scope(node.key.extra_key) is None:
            return 0 if node.children or node.lock_ref else int(self.drop(node_id))
        if copy is not None and copy.form == form:
            return 0 if is_resident and has_child_on_gpu(node) else int(self.evict_from_gpu(node_id, tier))
        if form != node.kv.form:
            is_begun = self.compress_on_host(node, form, leaves_for=tier)
            num_kept = self.slots_in(node, form, start_of(node))
            if is_begun or not is_resident or num_kept is None or num_kept >= size_of(node):
                return 0  # it may have been to become what a copy is that another move of the same plan has cost it
            freed = self.compress(node_id, form)
            if node_id not in self.nodes:
                return freed  # there was no memory to compress it
        # What was chosen to be on the SSD in a lossy form is, even where its exact KV is already: it comes back sooner.
        is_free = not (is_resident and has_child_on_gpu(node))
        if not self._leave_by_copy(node, tier) and copy is not None and copy.is_exact and is_free:
            freed += int(self.evict_from_gpu(node_id, tier))  # `_leave_by_copy` makes no room of it
        return freed

    def _leave_by_copy(self: Any, node: Any, tier: Tier) -> bool:
        """Begin to copy a node to a lower tier; it leaves its own when it is there. Whether it was begun."""
        job = node.kv.job
        if isinstance(job, Backup) and job.version == node.kv.version:  # it is copied ahead right now
            job.goes_on = job.goes_on or tier == Tier.SSD
            node.kv.is_leaving = True
            return True
        node.kv.is_leaving, is_begun = True, False  # before: the copy may be there at once
        try:
            is_begun = self.start_copy(node, tier, keep=(node.id,))
        finally:
            node.kv.is_leaving = node.kv.is_leaving and is_begun
        return is_begun

    def start_copy(
        self: Any,
        node: Any,
        tier: Tier,
        keep: Collection[int] = (),
        *,
        keeps_planned: bool = False,
        is_modest: bool = False,
    ) -> bool:
        """Begin to copy what a node holds to a lower tier. False when there is no room or no budget for it; the spare
        copies of the nodes ``keep`` (few), and with ``keeps_planned`` of those that are to leave the GPU soon, do not
        make room, and nothing does for a modest copy."""
        if not node.kv.is_text:
            return False  # no entry can say what it is of
        if node.value is None:
            copy = node.kv.copies.get(Tier.HOST)
            return copy is not None and tier == Tier.SSD and self.start_write(copy.entry)
        if self.has_same(node, Tier.HOST):
            return tier == Tier.SSD and self.start_write(node.kv.copies[Tier.HOST].entry)
        if self.is_arriving(node):
            return False  # its slots do not hold it yet
        if node.kv.job is not None or self._copying_bytes > MOST_COPIED_SHARE * self.host.num_bytes:
            return False
        num_bytes = max(1, sum(self.copier.sizes(size_of(node), node.kv.layout is not None)))  # or all are holes
        if is_modest:
            runs = self.host.arena.extents.alloc(num_bytes)
        else:
            runs = self.host_room(num_bytes, keep=keep, keeps_planned=keeps_planned)
        if runs is None:
            self._host_wanted = max(self._host_wanted, num_bytes)
            self.tier_counts["copies_without_room"] += 1
            return False
        with self.given_back_after_an_error(runs):
            Backup(self, node, runs, goes_on=tier == Tier.SSD).start()
        return True

    # ---- losing and emptying

    def invalidate_copy(self: Any, node: Any, tier: Tier, reason: str) -> None:
        """A copy cannot be read: a miss. What is below it is shown instead; a node that has nothing left goes, and all
        below it in the tree."""
        self.tier_errors[f"{tier.label}_{reason}"] += 1
        self.remove_copy(node, tier)
        self.after_loss(node)

    def after_loss(self: Any, node: Any) -> None:
        if node.value is None and not node.kv.copies:
            self.drop_tree(node)
            return
        if node.value is None:
            self.show(node)
            self.drop_overlaps(node)
        self.changes.changed(node)

    def drop_overlaps(self: Any, node: Any) -> None:
        """A node holds other KV than before: give up compressed copies below it that hold some of its positions too.

        The lower part of a node that was split after it was compressed holds, in some heads, survivors from above the
        split; behind the exact KV of these tokens they would be attended to twice.
        """
        begin = start_of(node)
        end = begin + len(node.key)
        for below in list(iter_nodes(node)):
            if below.id not in self.nodes:
                continue
            for tier, copy in list(below.kv.copies.items()):
                if copy.layout is not None and copy.layout.has_any(begin, end):
                    self.remove_copy(below, tier)
                    self.after_loss(below)

    def drop_tree(self: Any, node: Any) -> None:
        """Forget a node and all below it in the tree; none of them may be locked."""
        for below in reversed([node, *iter_nodes(node)]):
            self.drop(below.id)

    def flush_tier_copies(self: Any, tier: Tier) -> None:
        """Forget every copy on a tier that nobody uses now; nodes that have one below stay. Shadows go with the GPU."""
        if tier == Tier.GPU:
            self.shadows.release_shadows()
        for node in list(iter_nodes(self.root_node))[::-1]:
            if node.id not in self.nodes or node.lock_ref > 0:
                continue
            if tier == Tier.GPU:
                if node.value is None or has_child_on_gpu(node):
                    continue
                if not node.kv.copies:
                    self.drop_tree(node)
                else:
                    self._leave_gpu(node)
                    self.drop_overlaps(node)
            elif tier in node.kv.copies:
                self.remove_copy(node, tier)
                self.after_loss(node)
        if tier == Tier.SSD and self.ssd is not None:
            self.ssd.clear(self.workers["write"])

    def reset_tiers(self: Any) -> None:
        """The tree is gone, and with it every copy: an SSD entry too, as the weights may be others now."""
        for node in self.nodes.values():
            node.kv.version += 1
            self.remove_copies(node)
        self.prefetches.clear()
        self.prefetch_nodes.clear()
        self.lower_copies_of.clear()
        self._redundant.clear()
        self._fragments.clear()
        self.ssd_fragments.clear()
        if self.ssd is not None and self.nodes:
            self.ssd.clear(self.workers["write"])
        self.is_mixed = False
        identity = self.identity_now()
        if identity != self.adapters.identity or self._parted_ssd is not None:
            self.change_identity(identity)

    # ---- names

    def header_of(self: Any, node: Any, extents: Any) -> Header:
        """Header of an entry with the node's present KV."""
        kv, path = node.kv, path_to(node)
        identity, namespace = self.adapters.identity, node.key.extra_key
        scope = self.adapters.ssd_scope(namespace) or SsdScope(identity, namespace)  # else never written
        hashed = PathHash(*scope)
        for above in path[:-1]:
            hashed.update(above.key.raw_token_ids())
        parent_key = hashed.key
        tokens = token_bytes(node.key.raw_token_ids())
        hashed.update(node.key.raw_token_ids())
        return Header(
            fingerprint=identity,
            namespace=namespace_digest(scope.namespace),
            parent_key=parent_key,
            key=hashed.key,
            start=start_of(node),
            tokens=tokens,
            form=kv.form,
            is_lossy_prefix=kv.is_lossy_prefix,
            num_slots=size_of(node),
            shape=self.copier.shape,
            extents=extents,
        )


def tier_of(node: Any) -> Tier:
    """The fastest tier that has the node; a node that is nowhere is about to go."""
    if node.value is not None:
        return Tier.GPU
    return Tier(min(node.kv.copies, default=Tier.GPU))


def _is_same_layout(left: SurvivorLayout, right: SurvivorLayout | None) -> bool:
    if right is None or left.num_slots != right.num_slots:
        return False
    return left is right or torch.equal(left.positions, right.positions)


def _same(kv: Any, copy: Copy, num_held: int) -> bool:
    layouts: tuple[SurvivorLayout | None, SurvivorLayout | None] = (kv.layout, copy.layout)
    return (
        kv.form == copy.form
        and kv.is_lossy_prefix == copy.is_lossy_prefix
        and num_held == copy.num_slots
        and (layouts[0] is None) == (layouts[1] is None)
    )
