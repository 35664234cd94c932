"""Copying what nodes hold on the GPU to the host, ahead of need or at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.patches.tiers.types import Copies, Evictions, HostMemory, Removals, Runs, SsdWrites, Tiers
from sglang_evicpress.patches.tree.node import has_child_on_gpu, size_of, slots_of
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry
from sglang_evicpress.tiers.entry.header import Extent
from sglang_evicpress.tiers.jobs import DOES_NOT_FIT, NOT_FINITE, Job

if TYPE_CHECKING:
    from sglang_evicpress.patches.tree.compressor import Compressor


SPARE_SHARE = 1 / 4
"""Of host memory: what copies that nothing calls for leave free."""


@dataclass(eq=False, repr=False)
class Backup:
    """Begins copies to the host. ``is_arriving``: a load still brings what a node is to hold. ``evictions``: those in
    which copies are made at once."""

    nodes: Mapping[int, Node]
    storage: Tiers
    placement: Copies
    removal: Removals
    room: HostMemory
    ssd: SsdWrites
    streams: Compressor
    is_arriving: Callable[[Node], bool]
    evictions: Evictions

    def __post_init__(self) -> None:
        self.unfit_codecs = set[str]()  # that had no room for a node: no copy that is made at once is by one of them

    def backup_parent(self, node: Node) -> None:
        """A node that is not on the GPU holds its parent there until that has a copy: see that it gets one."""
        parent = node.parent
        is_held = parent.parent is not None and parent.value is not None
        if is_held and not parent.kv.copies and parent.kv.job is None:
            self.start_copy(parent, Tier.HOST, is_modest=True)

    def start_copy(
        self,
        node: Node,
        tier: Tier,
        keep: Collection[int] = (),
        *,
        codec: str | None = None,
        keeps_planned: bool = False,
        is_modest: bool = False,
    ) -> bool:
        """Begin to copy what a node holds to a lower tier, by another ``codec`` if one is given. False when there is no
        room or no budget for it; the spare copies of the nodes ``keep`` (few), and with ``keeps_planned`` of those that
        are to leave the GPU soon, do not make room, and nothing does for a modest copy."""
        if not (node.kv.is_text and node.kv.is_finite):
            return False  # no entry can say what it is of, or none may hold it
        if node.value is None:
            copy = node.kv.copies.get(Tier.HOST)
            return copy is not None and tier == Tier.SSD and self.ssd.start_write(copy.entry)
        form = _form_by(node, codec, node.kv.unfit_codec)
        if not node.kv.form.can_take(form.codec):
            return False  # it was to become what a copy was that it has no more
        if self.placement.has_same(node, Tier.HOST, form):
            return tier == Tier.SSD and self.ssd.start_write(node.kv.copies[Tier.HOST].entry)
        if self.is_arriving(node):
            return False  # its slots do not hold it yet
        if node.kv.job is not None or self.room.is_busy:
            return False
        num_bytes = self._num_bytes(node, form)
        if is_modest:
            runs = self.room.free_room(num_bytes)
        else:
            runs = self.room.host_room(num_bytes, keep=keep, keeps_planned=keeps_planned)
        if runs is None:
            self.room.want(num_bytes)
            self.storage.counts["copies_without_room"] += 1
            return False
        with self.room.given_back_after_an_error(runs):
            BackupJob(self, node, form, runs, goes_on=tier == Tier.SSD).start()
        return True

    def copy_if_free(self, node: Node) -> bool:
        """Begin to copy a node to the host where it has more room than is kept free there."""
        if node.value is None or self.is_arriving(node):
            return False
        least = int(SPARE_SHARE * self.storage.host.num_bytes) + self._num_bytes(node, node.kv.form)
        return self.storage.host.free_bytes >= least and self.start_copy(node, Tier.HOST, is_modest=True)

    def leave_by_copy(self, node: Node, tier: Tier, codec: str | None = None) -> bool:
        """Begin to copy a node to a lower tier, as ``start_copy``; it leaves its own when it is there. Whether it was
        begun."""
        job = node.kv.job
        if isinstance(job, BackupJob) and job.version == node.kv.version:  # it is copied ahead right now
            job.goes_on = job.goes_on or tier == Tier.SSD
            node.kv.is_leaving = True
            return True
        node.kv.is_leaving, is_begun = True, False  # before: the copy may be there at once
        try:
            is_begun = self.start_copy(node, tier, keep=(node.id,), codec=codec)
        finally:
            node.kv.is_leaving = node.kv.is_leaving and is_begun
        return is_begun

    def copy_at_once(self, node: Node, codec: str | None = None) -> bool:
        """Copy what a node holds to the host, as ``start_copy``, so that its slots may be freed; whether that is so. On
        a device the copy is only queued. One that is on its way already is not waited for."""
        if not (node.kv.is_text and node.kv.is_finite):
            return False
        form = _form_by(node, codec, node.kv.unfit_codec, *self.unfit_codecs)
        if not node.kv.form.can_take(form.codec):
            return False
        if self.placement.has_same(node, Tier.HOST, form):
            return True
        num_bytes = self._num_bytes(node, form)
        runs = self.room.host_room(num_bytes, keep=(node.id,))
        if runs is None:
            self.room.want(num_bytes)
            self.evictions.counts["copies_without_room"] += 1
            return False
        begin = time.perf_counter()
        try:
            with self.room.given_back_after_an_error(runs):
                BackupJob(self, node, form, runs, goes_on=False).begin_here()
        except torch.OutOfMemoryError:  # what layers keep of their own is put aside on the device
            self.evictions.counts["copies_without_memory"] += 1
            return False
        self.evictions.counts["copies"] += 1
        self.evictions.counts["copied_bytes"] += num_bytes
        self.evictions.seconds["copying"] += time.perf_counter() - begin
        return self.placement.has_same(node, Tier.HOST, form)

    def _num_bytes(self, node: Node, form: Form) -> int:
        layer_slots = () if node.kv.layout is None else node.kv.layout.layer_slots
        sizes = self.storage.copier.sizes(size_of(node), form.press is not None, form.codec, layer_slots)
        return max(1, sum(sizes))  # all of it may be holes


def _form_by(node: Node, codec: str | None, *unfit_codecs: str | None) -> Form:
    """The form of a copy by a codec, None for that of what the node holds."""
    form = node.kv.form if codec is None else replace(node.kv.form, codec=codec)
    return form.pressed if form.codec in unfit_codecs else form


class BackupJob(Job):
    """Copies what a resident node holds to the host in ``form``, which may differ by its codec. What the node holds
    when it is done must be what it held."""

    def __init__(self, owner: Backup, node: Node, form: Form, runs: Runs, *, goes_on: bool) -> None:
        super().__init__()
        kv = node.kv
        self.owner, self.node_id, self.version, self.goes_on = owner, node.id, kv.version, goes_on
        self.form, self.layout, self.origin = form, kv.layout, kv.origin
        self.slots = slots_of(node).clone()
        self.num_bytes = sum(run.num_bytes for run in runs)
        self.after = owner.streams.written_event()
        self.entry = HostEntry(replace(owner.placement.header_of(node), form=form), runs)
        self.end_saving: Callable[[], tuple[Extent, ...]] | None = None

    def start(self) -> None:
        owner = self.owner
        owner.storage.submit("copy", self)  # first: where it fails nothing has changed
        owner.nodes[self.node_id].kv.job = self
        owner.room.begin_copy(self.num_bytes)
        owner.storage.host.pin(self.entry)

    def begin_here(self) -> None:
        """Begin on this thread, behind all that was launched and before whatever overwrites the node's slots: they may
        be freed at once. The node has the copy from now on; until it is there nobody can load it. On the CPU it is
        there."""
        owner, node = self.owner, self.owner.nodes[self.node_id]
        copier, host = owner.storage.copier, owner.storage.host
        with owner.streams.ahead_of_next_pass():
            self.end_saving = copier.begin_save(self.slots, self.layout, host.arena, self.entry.runs, self.form.codec)
        owner.room.begin_copy(self.num_bytes, is_held=True)
        host.pin(self.entry)
        self.entry.arrival = self
        owner.placement.add_copy(node, self._copy_of(node))
        if copier.is_in_place(self.form.codec):
            self.execute()
            owner.storage.hand_over("copy", self)
        else:
            owner.storage.submit("copy", self)

    def run(self) -> None:
        storage = self.owner.storage
        host = storage.host
        if host.faults is not None:
            host.faults.maybe_delay()
        if self.end_saving is not None:
            extents = self.end_saving()
        else:
            extents = storage.copier.save(
                self.slots, self.layout, host.arena, self.entry.runs, self.after, self.form.codec
            )
        header = self.entry.header
        self.entry.header = replace(header, extents=extents)

    def finish(self) -> None:
        owner = self.owner
        owner.room.end_copy(self.num_bytes, is_held=self.end_saving is not None)
        if self.error is None:
            self.entry.checked_s = owner.storage.now_s()
        if self.entry.arrival is self:
            self._arrive()
            return
        node, is_leaving = owner.nodes.get(self.node_id), False
        if node is not None and node.kv.job is self:
            node.kv.job = None
            is_leaving, node.kv.is_leaving = node.kv.is_leaving, False
        if self.error is not None:
            owner.storage.errors[f"host_{self.error}"] += 1
            if self.error == DOES_NOT_FIT:
                owner.unfit_codecs.add(self.form.codec)
            if node is not None and node.kv.version == self.version:
                if self.error == NOT_FINITE:
                    node.kv.is_finite = False
                elif self.error == DOES_NOT_FIT:
                    owner.placement.note_unfit(node, self.form.codec)
        elif node is not None and node.kv.version == self.version:
            owner.placement.add_copy(node, self._copy_of(node))
            owner.storage.counts["backed_up"] += 1
            if self.goes_on:
                owner.ssd.start_write(self.entry)
            if is_leaving and node.lock_ref == 0 and not has_child_on_gpu(node):
                owner.removal.release(node.id, Tier.HOST)
        else:
            owner.storage.counts["copies_outdated"] += 1
        owner.storage.host.unpin(self.entry)

    def _copy_of(self, node: Node) -> Copy:
        is_lossy_prefix = node.kv.is_lossy_prefix
        return Copy(Tier.HOST, self.form, self.entry, 0, len(self.slots), self.layout, is_lossy_prefix, self.origin)

    def _arrive(self) -> None:
        """The copy that nodes have already is there, or never will be."""
        owner, entry = self.owner, self.entry
        entry.arrival = None
        if self.error == DOES_NOT_FIT:
            owner.unfit_codecs.add(self.form.codec)
        if self.error is not None:
            owner.removal.invalidate_entry(entry, Tier.HOST, self.error)
        else:
            owner.storage.counts["backed_up"] += 1
            if self.goes_on and entry.owners and not owner.ssd.start_write(entry):
                for node_id in entry.owners:
                    owner.nodes[node_id].kv.is_leaving = False
        owner.storage.host.unpin(entry)
