"""Entries of other servers, earlier ones or those that share a store: they are looked for where the tree ends, and put
into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
import torch

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.prefetches import Prefetch, Worth
from sglang_evicpress.patches.tiers.types import Names, Steps, Tiers
from sglang_evicpress.patches.tree.adapters import SsdScope
from sglang_evicpress.patches.tree.node import first_outside, is_lossy, start_of
from sglang_evicpress.patches.tree.types import Node, Request
from sglang_evicpress.policy.load_or_recompute import Piece
from sglang_evicpress.survivors import SurvivorLayout
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry
from sglang_evicpress.tiers.entry.header import BadEntry, Header
from sglang_evicpress.tiers.entry.identity import PathHash, lookup_key_of, namespace_digest, token_bytes
from sglang_evicpress.tiers.entry.payload import check_layout, layout_of
from sglang_evicpress.tiers.ssd.index import Ref

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from sglang_evicpress.patches.tiers.ssd_io import Lookup


class GraftedTree(Protocol):
    """The tree, and the keys that waiting requests will be matched with."""

    root_node: Node
    vocab_size: int

    def key_of_waiting(self, req: Request) -> RadixKey: ...
    def _steps(self, key: RadixKey) -> Steps: ...
    def _take(self, steps: Steps) -> list[Node]: ...
    def add_absent_leaf(self, parent: Node, key: RadixKey, copy: Copy) -> Node: ...


class Place(NamedTuple):
    """Place of an entry: the path above, its last node, and the key of the new one."""

    path: list[Node]
    parent: Node
    key: RadixKey


@dataclass(eq=False, repr=False)
class Grafting:
    """Looks for entries that continue a path, and adds what was found. ``group_of`` [layers]: groups of layers that
    fill the same slots of every node. ``takes_lossy``: this server makes lossy KV itself."""

    storage: Tiers
    names: Names
    start_lookup: Callable[[Sequence[Ref], bytes, bytes, bytes], Lookup]
    is_outside_busy: Callable[[], bool]
    look_outside: Callable[[Prefetch, RadixKey, int, bytes, SsdScope], None]
    terms: Worth
    tree: GraftedTree
    slot_bytes: int
    page_size: int
    takes_lossy: bool
    group_of: tuple[int, ...] = ()

    def look_up(self, prefetch: Prefetch, key: RadixKey, steps: Steps) -> None:
        """Ask the SSD, and if it has none the external store, for an entry that continues the path where the tree
        ends."""
        storage, begin = self.storage, sum(matched for _, matched in steps)
        if begin in prefetch.looked_at or len(key) - begin < self.page_size:
            return
        has_former = storage.ssd is not None and storage.ssd.has_former
        may_look_outside = storage.external is not None and storage.external.may_read
        is_deferred = may_look_outside and self.is_outside_busy()
        if not is_deferred:
            prefetch.looked_at.add(begin)
        if not has_former and (is_deferred or not may_look_outside):
            return
        scope = self.names.ssd_scope(key.extra_key)
        tokens = key.token_ids[: len(key)]
        if scope is None or first_outside(tokens, self.tree.vocab_size) is not None:
            return  # nothing of it was ever written
        hashed = PathHash(*scope)
        hashed.update(tokens[:begin])
        if has_former and self._look_on_ssd(prefetch, key, begin, hashed.key, scope):
            prefetch.looked_at.add(begin)
        elif not is_deferred:
            self.look_outside(prefetch, key, begin, hashed.key, scope)

    def _look_on_ssd(self, prefetch: Prefetch, key: RadixKey, begin: int, path_key: bytes, scope: SsdScope) -> bool:
        """False where the SSD surely has nothing."""
        ssd, tokens = self.storage.ssd, key.token_ids[: len(key)]
        if ssd is None:
            return False
        refs = ssd.store.find(lookup_key_of(path_key, tokens[begin : begin + self.page_size]))
        refs = [ref for ref in refs if not ssd.is_held(ref)]
        num_tokens = len(key) - begin
        if self.storage.ranks.is_alone:  # else others may have found some
            if not refs:
                return False
            num_tokens = min(max(ref.num_tokens for ref in refs), num_tokens)
        pieces = [Piece(num_tokens, begin, Tier.SSD, num_tokens * self.slot_bytes)]
        if self.terms.num_worth(prefetch, pieces) == 0:
            return True
        prefetch.max_wait_s = max(prefetch.max_wait_s, self.terms.max_wait_s(prefetch, pieces))
        ahead, namespace = token_bytes(tokens[begin:]), namespace_digest(scope.namespace)
        prefetch.jobs.append(self.start_lookup(refs, ahead, path_key, namespace))
        return True

    def graft(self, req: Request, job: Lookup) -> None:
        """Put what a lookup for a request has found into the tree, if it still continues a path there."""
        ssd, tree = self.storage.ssd, self.tree
        if ssd is None or job.found is None or job.error is not None or job.ssd is not ssd:
            return
        ref, header = job.found
        key = tree.key_of_waiting(req)
        ahead = key.token_ids[: len(key)][header.start :][: len(job.tokens) // 4]
        if first_outside(ahead, tree.vocab_size) is not None or token_bytes(ahead) != job.tokens:
            return
        place = self._place_of(key, header)
        if place is None:
            return
        layout = self._survivors(job.survivors, header)
        is_usable = self._is_whole(place, job.survivors, layout) and not ssd.is_held(ref) and ref in ssd.store
        if not self.storage.ranks.is_alone:
            is_usable, layout = self._agreed(is_usable, layout, header)
        if not is_usable:
            return
        entry = ssd.hold(ref, header)
        copy = Copy(Tier.SSD, header.form, entry, 0, header.num_slots, layout, header.is_lossy_prefix, None)
        tree.add_absent_leaf(place.parent, place.key, copy)
        self.storage.counts["found_again"] += 1

    def graft_read(
        self, key: RadixKey, header: Header, survivors: bytes | None, entry: HostEntry
    ) -> Node | Literal["taken", "unusable"]:
        """Put an entry into the tree that the host has now, and that continues a path of ``key``; the node. "taken":
        the tree goes on there by now; "unusable": it cannot be put behind this path."""
        place = self._place_of(key, header)
        if place is None:
            return "taken"
        layout = self._survivors(survivors, header, "external")
        if not self._is_whole(place, survivors, layout):
            return "unusable"
        copy = Copy(Tier.HOST, header.form, entry, 0, header.num_slots, layout, header.is_lossy_prefix, None)
        return self.tree.add_absent_leaf(place.parent, place.key, copy)

    def _place_of(self, key: RadixKey, header: Header) -> Place | None:
        """Place of an entry whose first tokens are some of ``key``; None where it does not continue a path, or is
        lossy on a server that makes nothing so."""
        tree = self.tree
        if not self.takes_lossy and (header.is_lossy_prefix or not header.form.is_exact):
            return None
        steps = tree._steps(key)
        if sum(matched for _, matched in steps) != header.start:
            return None
        if header.is_lossy_prefix and not any(is_lossy(node) for node, _ in steps):
            return None  # what it was computed upon is exact by now, and nobody knows what it was worth
        path = tree._take(steps)
        parent = path[-1] if path else tree.root_node
        tokens = key.token_ids[:0]
        tokens.extend(np.frombuffer(header.tokens, "<u4").tolist())
        key_found = type(key)(tokens, key.extra_key)
        is_new = key_found.child_key(self.page_size) not in parent.children
        if not is_new or not parent.kv.is_text or first_outside(tokens, tree.vocab_size) is not None:
            return None
        return Place(path, parent, key_found)

    def _is_whole(self, place: Place, survivors: bytes | None, layout: SurvivorLayout | None) -> bool:
        """True if a layout was read wherever there is one, and holds nothing that the path does."""
        return (layout is None) == (survivors is None) and (layout is None or not _repeats(place.path, layout))

    def _survivors(self, survivors: bytes | None, header: Header, where: str = "ssd") -> SurvivorLayout | None:
        """Survivors of a lossy entry; None also where that cannot be read, which is counted."""
        if survivors is None:
            return None
        numbers = torch.frombuffer(bytearray(survivors), dtype=torch.uint8)
        try:
            layout = layout_of(numbers, header.shape, header.num_slots, header.layer_slots, self.group_of)
            check_layout(layout, header.start, header.num_tokens)
            return layout
        except BadEntry as error:
            self.storage.errors[f"{where}_{error.reason}"] += 1
            return None

    def _agreed(
        self, is_usable: bool, layout: SurvivorLayout | None, header: Header
    ) -> tuple[bool, SurvivorLayout | None]:
        """True if every rank can use its entry, and the layout shown where all ranks show theirs."""
        shown = torch.zeros(header.num_slots, dtype=torch.int64) if layout is None else layout.logical
        highest = self.storage.ranks.highest(torch.cat([torch.tensor([not is_usable]), shown]))
        return not highest[0], layout if layout is None else layout.shown_at(highest[1:])


def _repeats(path: list[Node], layout: SurvivorLayout) -> bool:
    """True if survivors behind a path are of positions that the path holds itself in the same head: the entry is the
    lower part of a node that was split after it was compressed, and the path holds other KV now (see drop_overlaps)."""
    if not path or not layout.has_any(0, start_of(path[-1]) + len(path[-1].key)):
        return False  # as nearly always: only a piece of a split holds one before its node
    for node in path:
        begin = start_of(node)
        if node.kv.layout is None:
            if layout.has_any(begin, begin + len(node.key)):
                return True
            continue
        for layer in range(layout.shape[0]):
            known, survivors = node.kv.layout.positions_of(layer), layout.positions_of(layer)
            if any(bool(torch.isin(*pair).any()) for pair in zip(survivors, known, strict=True)):
                return True
    return False
