"""Compressing what lies in host memory: a node below the GPU is brought to a smaller form off the scheduler thread,
layer by layer, and written to the host anew; it has its old copy until the smaller one is complete, and keeps it where
the smaller one is for the SSD."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.patches.tiers.ssd_io import LEAST_HELD_SHARE
from sglang_evicpress.patches.tiers.types import EntryCopies, GpuForms, HostMemory, Removals, Runs, SsdWrites, Tiers
from sglang_evicpress.patches.tree.node import has_child_on_gpu, is_reserved, start_of
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.survivors import SurvivorLayout
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry
from sglang_evicpress.tiers.jobs import DOES_NOT_FIT, INTERNAL, IO, NOT_FINITE, Job

if TYPE_CHECKING:
    from sglang_evicpress.patches.tree.compressor import Compressor

RECENT_S = 1.0
"""A host entry that was verified so shortly before is not verified again before it is written anew."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """``num_slots`` of a copy, and how many of them each layer fills."""

    num_slots: int
    by_layer: tuple[int, ...]

    @classmethod
    def of_copy(cls, copy: Copy) -> _Kept:
        num_layers = copy.entry.header.shape.num_layers
        return cls(copy.num_slots, tuple(copy.rows_of(layer).num_rows for layer in range(num_layers)))

    @property
    def total(self) -> int:
        return sum(self.by_layer)

    @property
    def layer_slots(self) -> tuple[int, ...]:
        """As an entry's header has it."""
        return self.by_layer if any(count < self.num_slots for count in self.by_layer) else ()


@dataclass(eq=False, repr=False)
class HostCompression:
    """Compresses below the GPU. On the scheduler thread but for ``run`` of its job. ``lacks_room`` is told of a node
    that only the host has and for whose copy in a form there is no room, with the bytes that are free, 0 where it
    would not be smaller."""

    nodes: Mapping[int, Node]
    storage: Tiers
    placement: EntryCopies
    removal: Removals
    room: HostMemory
    ssd: SsdWrites
    gpu: GpuForms
    press: Compressor
    lacks_room: Callable[[Node, Form, int], None]

    def copy_to_ssd(self, node: Node, form: Form) -> bool:
        """Begin to give a node that the host has a copy on the SSD in a smaller form, instead of one that is there.
        False as ``compress_on_host`` says."""
        return self.compress_on_host(node, form, is_for_ssd=True)

    def compress_on_host(
        self,
        node: Node,
        form: Form,
        *,
        leaves_for: Tier | None = None,
        is_for_ssd: bool = False,
    ) -> bool:
        """Begin to bring what the host has of a node to ``form``; the node goes to the tier ``leaves_for`` then. False
        when it cannot be now: there is nothing, or only something too small, something is done with it already, or
        there is no room for both copies, for which redundant copies are given up, but those of nodes that are to leave
        the GPU soon: a node in fewer bytes is not worth that others are on the SSD for it."""
        copy = node.kv.copies.get(Tier.HOST)
        if copy is None or form in (copy.form, copy.form.decoded) or form.codec == node.kv.unfit_codec:
            return False
        if not copy.form.can_take(form.codec):
            return False
        kept = _Kept.of_copy(copy)
        if form.pressed != copy.form.pressed:
            kept = self._kept_in(node, form, copy) or kept
            if kept.total >= _Kept.of_copy(copy).total:  # a piece that was split off an entry may keep few tokens
                if node.value is None:
                    self.lacks_room(node, form, 0)
                return False
        if node.lock_ref > 0 or is_reserved(node) or self._is_copied(node):
            return False
        num_bytes = self._num_bytes(form, kept)
        if is_for_ssd and not self.ssd.has_room_for(num_bytes):
            return False
        runs = self.room.host_room(num_bytes, keep=(node.id,), keeps_planned=True)
        if runs is None:
            self.room.want(num_bytes)
            self.storage.counts["compressions_without_room"] += 1
            if node.value is None:
                self.lacks_room(node, form, self.storage.host.arena.extents.free_bytes)
            return False
        if node.kv.copies.get(Tier.HOST) is not copy:  # it had to make room itself
            self.room.give_back(runs)
            return False
        with self.room.given_back_after_an_error(runs):
            Compression(self, node, copy, form, kept, runs, leaves_for=leaves_for, is_for_ssd=is_for_ssd).start()
        return True

    def _kept_in(self, node: Node, form: Form, copy: Copy) -> _Kept | None:
        """What is kept of what the host has of a node in another form."""
        kept = self.gpu.kept_in(node, form, start_of(node), copy.form, copy.layout)
        if kept is None or isinstance(kept, int):
            return None if kept is None else _Kept(kept, (kept,) * self.storage.copier.num_layers)
        return _Kept(max(kept), tuple(kept[group] for group in self.press.groups.group_of))

    def _num_bytes(self, form: Form, kept: _Kept) -> int:
        sizes = self.storage.copier.sizes(kept.num_slots, form.press is not None, form.codec, kept.layer_slots)
        return max(1, sum(sizes))  # all of it may be holes

    def repack(self) -> None:
        """Give pieces of host entries of which most is nobody's any more entries of their own: until then all of such
        an entry is taken."""
        for entry in self.placement.take_host_fragments():
            nodes = [self.nodes[node_id] for node_id in sorted(entry.owners)]
            num_bytes = sum(node.kv.copies[Tier.HOST].num_bytes for node in nodes)
            for node in nodes if num_bytes < LEAST_HELD_SHARE * entry.num_bytes else ():
                self._repack_piece(node, node.kv.copies[Tier.HOST])

    def _repack_piece(self, node: Node, copy: Copy) -> None:
        kept = _Kept.of_copy(copy)
        runs = None if self._is_copied(node) else self.room.free_room(self._num_bytes(copy.form, kept))
        if runs is None:
            self.placement.note_fragment(copy.entry)  # later
            return
        with self.room.given_back_after_an_error(runs):
            Compression(self, node, copy, copy.form, kept, runs, leaves_for=None).start()

    def _is_copied(self, node: Node) -> bool:
        """True if something is done with it already, or too much with others."""
        copy = node.kv.copies.get(Tier.HOST)
        is_busy = node.kv.job is not None or node.kv.is_leaving or (copy is not None and copy.entry.arrival is not None)
        return is_busy or self.room.is_busy


class Compression(Job):
    """Makes a smaller copy of what a node has on the host, instead of that, or, with the form it has already, one that
    is no piece of a larger entry. The node must have the same still when it is done."""

    priority = 2  # what is copied off the GPU first

    def __init__(
        self,
        owner: HostCompression,
        node: Node,
        copy: Copy,
        form: Form,
        kept: _Kept,
        runs: Runs,
        *,
        leaves_for: Tier | None,
        is_for_ssd: bool = False,
    ) -> None:
        super().__init__()
        self.owner, self.node_id, self.copy, self.form, self.leaves_for = owner, node.id, copy, form, leaves_for
        self.was_on_gpu = node.value is not None
        self.is_for_ssd = is_for_ssd
        self.start_token, self.num_tokens, self.kept = start_of(node), len(node.key), kept
        self.window = owner.gpu.window_of(node)
        self.after = owner.press.written_event()
        self.num_bytes = sum(run.num_bytes for run in runs)
        header = owner.placement.header_of(node)
        header = replace(header, form=form, num_slots=kept.num_slots, is_lossy_prefix=copy.is_lossy_prefix)
        header = replace(header, layer_slots=kept.layer_slots)
        self.entry = HostEntry(header, runs)
        self.layout: SurvivorLayout | None = None

    def start(self) -> None:
        owner = self.owner
        owner.storage.host.pin(self.copy.entry)
        try:
            owner.storage.submit("copy", self)
        except Exception:
            owner.storage.host.unpin(self.copy.entry)
            raise
        owner.nodes[self.node_id].kv.job = self
        owner.room.begin_copy(self.num_bytes)
        owner.storage.host.pin(self.entry)

    def run(self) -> None:
        owner, copy, offset = self.owner, self.copy, 0
        host, copier, source = owner.storage.host, owner.storage.copier, copy.entry
        if source.checked_s < owner.storage.now_s() - RECENT_S:
            host.check(source)  # the new checksums must not bless damaged bytes
        extents, positions, is_kept = [], [], self.form.pressed == copy.form.pressed
        with copier.stream(self.after) as stream:
            for layer in range(copier.num_layers):
                header, rows = source.header, copy.rows_of(layer)
                keys, values = copier.read_layer(
                    layer,
                    host.arena,
                    source.runs,
                    header.extents[layer],
                    rows.begin,
                    rows.num_rows,
                    rows.total,
                    header.form.codec,
                )
                pair = keys, values
                if not is_kept:
                    pair, kept = owner.press.kept_of_layer(
                        form=self.form,
                        layer=layer,
                        keys=keys,
                        values=values,
                        layout=copy.layout,
                        start=self.start_token,
                        num_tokens=self.num_tokens,
                        num_kept=self.kept.by_layer[layer],
                        window=self.window,
                    )
                    positions.append(kept.cpu())
                extents.append(copier.write_layer(pair, host.arena, self.entry.runs, offset, stream, self.form.codec))
                offset += extents[-1].num_bytes
        self.layout = copy.layout
        if not is_kept:
            self.layout = owner.press.layout_of(positions, self.start_token)
        if self.layout is not None:
            extents.append(copier.write_layout(self.layout, host.arena, self.entry.runs, offset))
        self.entry.header = replace(self.entry.header, extents=tuple(extents))

    def values_to_agree(self) -> torch.Tensor | None:
        """Positions at which survivors are shown: ranks have other heads, and must split the node at the same slot."""
        return None if self.layout is None or self.layout is self.copy.layout else self.layout.logical

    def take_agreed(self, values: torch.Tensor) -> None:
        if self.layout is not None:
            self.layout = self.layout.shown_at(values)

    def finish(self) -> None:
        owner, copy = self.owner, self.copy
        owner.room.end_copy(self.num_bytes)
        node = owner.nodes.get(self.node_id)
        if node is not None and node.kv.job is self:
            node.kv.job = None
        if self.error == DOES_NOT_FIT:
            owner.storage.errors[f"host_{self.error}"] += 1
            if node is not None:
                owner.placement.note_unfit(node, self.form.codec)
        elif self.error in (INTERNAL, IO, NOT_FINITE):  # the host has good bytes still
            owner.storage.errors[f"host_{self.error}"] += 1
            if node is not None:
                node.kv.has_failed = True
        elif self.error is not None:
            owner.removal.invalidate_entry(copy.entry, Tier.HOST, self.error)
        elif (
            node is not None
            and node.kv.copies.get(Tier.HOST) is copy
            and (self.form == copy.form or not is_reserved(node))  # who waits for it counts on what it was
            and (self.leaves_for is None or self.was_on_gpu or node.value is None)  # nor what was used since
        ):
            made = self._made(node)
            if self.is_for_ssd:
                owner.ssd.start_write_of(node, made)
            else:
                self._replace(node, made)
        else:
            owner.storage.counts["copies_outdated"] += 1
        owner.storage.host.unpin(copy.entry)
        owner.storage.host.unpin(self.entry)

    def _made(self, node: Node) -> Copy:
        """The smaller copy, on the host."""
        copy = self.copy
        self.entry.checked_s = self.owner.storage.now_s()
        is_kept = self.form.pressed == copy.form.pressed
        origin = node.id if copy.origin is None and not is_kept else copy.origin
        num_slots = self.kept.num_slots
        return Copy(Tier.HOST, self.form, self.entry, 0, num_slots, self.layout, copy.is_lossy_prefix, origin)

    def _replace(self, node: Node, made: Copy) -> None:
        """The node has the smaller copy from now on."""
        owner, copy, kv = self.owner, self.copy, node.kv
        owner.placement.add_copy(node, made)
        owner.storage.counts["repacked" if self.form == copy.form else "compressed_on_host"] += 1
        if self.leaves_for is None or node.lock_ref > 0 or is_reserved(node) or has_child_on_gpu(node):
            return
        if self.leaves_for == Tier.SSD:
            kv.is_leaving = node.value is None
            if not owner.ssd.start_write(self.entry):
                kv.is_leaving = False
        if node.value is not None:
            owner.removal.release(node.id, Tier.HOST)
