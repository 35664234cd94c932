"""Copies of nodes below the GPU: which there are, showing the fastest, and naming what holds them.

A node is on the fastest tier that has it; its record (``node.kv``) describes what it is there. Further copies below are
spare: they make a later move down free, or hold the exact KV of a node that is lossy above.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from sglang_evicpress.core import Form, LowerCopy, Tier
from sglang_evicpress.device import to_device
from sglang_evicpress.patches.tiers.path_hashes import PathHashes
from sglang_evicpress.patches.tiers.redundant import RedundantHostCopies, RedundantSsdEntries
from sglang_evicpress.patches.tiers.types import Names, Slots, Tiers
from sglang_evicpress.patches.tree.adapters import SsdScope
from sglang_evicpress.patches.tree.changes import Listener
from sglang_evicpress.patches.tree.node import is_lossy, size_of, start_of
from sglang_evicpress.patches.tree.node_kv import NodeKV
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.survivors import SurvivorLayout
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry, SsdEntry
from sglang_evicpress.tiers.entry.header import Extent, Header
from sglang_evicpress.tiers.entry.identity import namespace_digest, token_bytes

Entry = TypeVar("Entry", HostEntry, SsdEntry)
NOWHERE = torch.empty(0, dtype=torch.int64)
SMALL_SHARE = 1 / 4  # of an SSD entry


@dataclass(eq=False, repr=False)
class Placement:
    """Table of copies. ``lower_copies_of``: by node id, what lower tiers have of it. ``on_changed`` is told
    every node whose copies change. ``stored_bytes``: what a form takes below the GPU, by its raw bytes."""

    storage: Tiers
    names: Names
    ledger: Slots
    quality_of_copy: Callable[[Node, Copy], float]
    on_changed: Listener
    stored_bytes: Callable[[Form, float], int]
    slot_bytes: int

    def __post_init__(self) -> None:
        self.lower_copies_of: dict[int, tuple[LowerCopy, ...]] = {}
        self._redundant, self._ssd_spare = RedundantHostCopies(), RedundantSsdEntries()
        self._host_fragments: dict[HostEntry, None] = {}  # of which a node has given up its piece
        self._ssd_fragments: dict[SsdEntry, None] = {}
        self._hashes = PathHashes()

    def note_copies(self, node: Node) -> None:
        """Work out anew as what the node can be on lower tiers at once."""
        own_tier, slot_bytes = tier_of(node), self.slot_bytes
        lower_copies = tuple(
            LowerCopy(
                int(tier),
                copy.form,
                self.stored_bytes(copy.form, copy.num_slots * slot_bytes * copy.filled),
                self.quality_of_copy(node, copy),
            )
            for tier, copy in sorted(node.kv.copies.items())
            if tier > own_tier
        )
        if lower_copies:
            self.lower_copies_of[node.id] = lower_copies
        else:
            self.lower_copies_of.pop(node.id, None)
        copy = node.kv.copies.get(Tier.SSD)
        if copy is not None:
            self._ssd_spare.note(copy.entry, node.id, is_lowest=own_tier == Tier.SSD)

    def has_same(self, node: Node, tier: Tier, form: Form | None = None) -> bool:
        """True if a lower tier has just what the node holds now, in ``form`` if one is given, or bit for bit that."""
        copy = node.kv.copies.get(tier)
        return copy is not None and _same(node.kv, copy, size_of(node), form or node.kv.form)

    def add_copy(self, node: Node, copy: Copy) -> None:
        """The node has ``copy`` from now on, instead of one that it had on that tier."""
        self.remove_copy(node, copy.tier)
        kv = node.kv
        kv.copies[copy.tier] = copy
        if copy.tier == Tier.HOST:
            self.storage.host.hold(copy.entry, node.id)
            if node.value is not None:
                self._redundant.add(node.id, is_coldest=True)
        else:
            copy.entry.owners.add(node.id)
        if node.value is None and tier_of(node) == copy.tier:
            self.show(node)
        self.on_changed(node)

    def remove_copy(self, node: Node, tier: Tier) -> None:
        """Give a copy up, if there is one. Whoever calls sees to the node when that was all it had."""
        copy = node.kv.copies.pop(tier, None)
        if copy is None:
            return
        if tier == Tier.HOST:
            self._redundant.discard(node.id)
            self.storage.host.release(copy.entry, node.id)
            if copy.entry.owners:
                self._host_fragments[copy.entry] = None
        else:
            copy.entry.owners.discard(node.id)
            self._ssd_spare.leave(copy.entry, node.id)
            if copy.entry.owners:
                self._ssd_fragments[copy.entry] = None
            elif self.storage.ssd is not None:
                self.storage.ssd.remove(copy.entry, self.storage.workers["write"])

    def remove_copies(self, node: Node, *, lossy_only: bool = False) -> None:
        for tier, copy in list(node.kv.copies.items()):
            if not (lossy_only and copy.is_exact):
                self.remove_copy(node, tier)

    def note_unfit(self, node: Node, codec: str) -> None:
        """A codec has no room for what the node holds: it goes down without."""
        node.kv.unfit_codec = codec
        self.on_changed(node)

    def place(self, node: Node, copy: Copy, slots: torch.Tensor) -> torch.Tensor:
        """Give a node its slots; what they hold is there, or on its way and the node locked. Returns its value."""
        kv = node.kv
        _describe(kv, copy)
        kv.form = copy.form.decoded
        kv.is_leaving = False  # it was to go to the SSD, of which its owner may have been told no end
        kv.version += 1
        if copy.layout is None:
            kv.slots, value = None, slots.clone()
        else:
            kv.slots = slots.clone()
            value = torch.zeros(len(node.key), dtype=torch.int64, device=slots.device)
            value[to_device(copy.layout.logical, slots.device)] = slots
        node.value = value
        self.ledger.add(len(slots), is_locked=node.lock_ref > 0)
        self.note_resident(node)
        self.on_changed(node)
        return value

    def show(self, node: Node) -> None:
        """Let the record of a node that is not on the GPU say what its fastest copy is."""
        copy, kv = node.kv.copies[tier_of(node)], node.kv
        _describe(kv, copy)
        kv.slots = NOWHERE
        if copy.tier == Tier.SSD and copy.layout is not None:
            copy.layout.pack()

    def split_copies(self, upper: Node, lower: Node) -> None:
        """``upper`` was split off ``lower``: both have their pieces of every copy. While the GPU has it, a small piece
        of an SSD entry is given up: to get it back all of that would be read, and by itself it is soon written. So is
        the lower piece of a compressed copy that has survivors from above the split, unless ``upper`` shows the other
        piece of it: behind other KV of these tokens they would be attended to twice."""
        upper.kv.copies = {}
        upper.kv.external, lower.kv.external = lower.kv.external, None  # found where ``upper`` begins
        for tier, copy in list(lower.kv.copies.items()):
            left, right = copy.split(len(upper.key))
            upper.kv.copies[tier], lower.kv.copies[tier] = left, right
            if tier == Tier.HOST:
                self.storage.host.hold(copy.entry, upper.id)
                if upper.value is not None:
                    self._redundant.add(upper.id)
                continue
            copy.entry.owners.add(upper.id)
            least = SMALL_SHARE * copy.entry.header.payload_bytes
            for node, piece in ((upper, left), (lower, right)) if upper.value is not None else ():
                # but the exact KV of what is lossy now, which only the SSD has
                if piece.num_bytes < least and not (piece.is_exact and is_lossy(node)):
                    self.remove_copy(node, tier)
            if upper.value is None and tier_of(lower) == Tier.SSD:
                for piece in (left, right):
                    if piece.layout is not None:
                        piece.layout.pack()
        pressed = [tier for tier, copy in lower.kv.copies.items() if copy.layout is not None]
        begin, end = start_of(upper), start_of(lower)
        have_some = self.storage.ranks.any_of(
            [_is_other_with_any(lower.kv.copies[tier].layout, lower.kv.layout, begin, end) for tier in pressed]
        )
        for tier, has_some in zip(pressed, have_some, strict=True):
            if has_some:
                self.remove_copy(lower, tier)

    def header_of(self, node: Node, extents: tuple[Extent, ...] = ()) -> Header:
        """Identity of an entry that holds what the node holds now."""
        kv, identity, namespace = node.kv, self.names.identity, node.key.extra_key
        scope = self.names.ssd_scope(namespace) or SsdScope(identity, namespace)  # else never written
        return Header(
            fingerprint=identity,
            namespace=namespace_digest(scope.namespace),
            parent_key=self._hashes.of(node.parent, scope).key,
            key=self._hashes.of(node, scope).key,
            start=start_of(node),
            tokens=token_bytes(node.key.raw_token_ids()),
            form=kv.form,
            is_lossy_prefix=kv.is_lossy_prefix,
            num_slots=size_of(node),
            shape=self.storage.copier.shape,
            extents=extents,
            layer_slots=() if kv.layout is None else kv.layout.layer_slots,
        )

    # ---- copies that can be given up

    def note_resident(self, node: Node) -> None:
        """The GPU has the node now: what the host has of it is spare."""
        if Tier.HOST in node.kv.copies:
            self._redundant.add(node.id)

    def note_left_gpu(self, node: Node) -> None:
        """The GPU has the node no more: what the host has of it is not spare."""
        self._redundant.discard(node.id)

    def plan_to_leave(self, node_ids: Iterable[int]) -> None:
        """These nodes are to leave the GPU soon, the first first; what they have on the host is given up last."""
        self._redundant.plan(node_ids)

    def next_spare(self, keep: Collection[int], *, keeps_planned: bool) -> int | None:
        """See ``RedundantHostCopies.next``."""
        return self._redundant.next(keep, keeps_planned=keeps_planned)

    def spare_ssd_entries(self, limit: int) -> list[SsdEntry]:
        return self._ssd_spare.first(limit)

    @property
    def num_spare(self) -> int:
        return len(self._redundant)

    def take_host_fragments(self) -> Iterator[HostEntry]:
        """Entries of which a node has given up its piece; each is taken for looked at when it is given."""
        return _taken(self._host_fragments)

    def take_ssd_fragments(self) -> Iterator[SsdEntry]:
        return _taken(self._ssd_fragments)

    def note_fragment(self, entry: HostEntry) -> None:
        """A host entry is to be looked at again."""
        self._host_fragments[entry] = None

    def forget(self, node: Node) -> None:
        """The node is gone."""
        self.lower_copies_of.pop(node.id, None)

    def clear(self, nodes: Iterable[Node]) -> None:
        """The tree of these nodes goes, and with it every copy."""
        for node in nodes:
            node.kv.version += 1
            self.remove_copies(node)
        self.lower_copies_of.clear()
        self._redundant.clear()
        self._host_fragments.clear()
        self._ssd_fragments.clear()
        self._hashes.clear()

    def use_no_ssd_entry(self) -> None:
        """The SSD tier is another one, or none."""
        self._ssd_spare = RedundantSsdEntries()


def tier_of(node: Node) -> Tier:
    """The fastest tier that has the node; a node that is nowhere is about to go."""
    if node.value is not None:
        return Tier.GPU
    return Tier(min(node.kv.copies, default=Tier.GPU))


def exact_tier_of(node: Node) -> Tier | None:
    """The fastest tier below that holds the exact KV of a lossy node as well."""
    if not is_lossy(node):
        return None
    own_tier = tier_of(node)
    return min((tier for tier, copy in node.kv.copies.items() if tier > own_tier and copy.is_exact), default=None)


def _describe(kv: NodeKV, copy: Copy) -> None:
    kv.form, kv.layout, kv.is_lossy_prefix, kv.origin = copy.form, copy.layout, copy.is_lossy_prefix, copy.origin


def _is_other_with_any(layout: SurvivorLayout | None, present: SurvivorLayout | None, begin: int, end: int) -> bool:
    """True if a layout is not the present one, and has survivors of positions [begin, end)."""
    return layout is not None and not is_same_layout(layout, present) and layout.has_any(begin, end)


def is_same_layout(left: SurvivorLayout, right: SurvivorLayout | None) -> bool:
    if right is None or left.num_slots != right.num_slots:
        return False
    return left is right or torch.equal(left.positions, right.positions)  # EMPTY where a layer fills no slot


def _taken(fragments: dict[Entry, None]) -> Iterator[Entry]:
    for entry in list(fragments):
        del fragments[entry]
        yield entry


def _same(kv: NodeKV, copy: Copy, num_held: int, form: Form) -> bool:
    return (
        form in (copy.form, copy.form.decoded)
        and kv.is_lossy_prefix == copy.is_lossy_prefix
        and num_held == copy.num_slots
        and (kv.layout is None) == (copy.layout is None)
        and (kv.layout is None or copy.layout is None or kv.layout.layer_slots == copy.layout.layer_slots)
    )
