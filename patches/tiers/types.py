"""Narrow views that the parts of the tiers have of each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from sglang_evicpress.core import Decision, Form, Tier
from sglang_evicpress.patches.tree.adapters import SsdScope
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.press import QueryWindow
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry, SsdEntry
from sglang_evicpress.tiers.entry.encoding import Extent, Header
from sglang_evicpress.tiers.entry.payload import PayloadCopier
from sglang_evicpress.tiers.host.arena import Run
from sglang_evicpress.tiers.host.tier import HostTier
from sglang_evicpress.tiers.jobs import Job, Workers
from sglang_evicpress.tiers.ssd.read_timer import ReadTimer
from sglang_evicpress.tiers.ssd.tier import SsdTier

Runs = Sequence[Run]


class Tiers(Protocol):
    """Memory, folder and threads below the GPU."""

    ssd: SsdTier | None
    workers: dict[str, Workers]
    counts: Counter[str]
    errors: Counter[str]
    read_timer: ReadTimer

    @property
    def has_host(self) -> bool:
        """There is any tier below the GPU."""

    @property
    def host(self) -> HostTier:
        """Raises RuntimeError where there is none."""

    @property
    def copier(self) -> PayloadCopier:
        """Raises RuntimeError where nothing is copied."""

    def submit(self, name: str, job: Job) -> None:
        """Hand a job to the threads of that name."""


class Names(Protocol):
    """Names that KV has on the SSD."""

    @property
    def identity(self) -> bytes:
        """Identity of the model now."""

    def ssd_scope(self, namespace: str | None) -> SsdScope | None:
        """Scope of a namespace's KV; None: it must not be on the SSD."""


class Slots(Protocol):
    """Counts of slots, and giving them back."""

    def add(self, num_slots: int, *, is_locked: bool = False) -> None:
        """A node holds so many more."""

    def remove(self, num_slots: int) -> None:
        """An unlocked node holds so many less."""

    def free(self, slots: torch.Tensor) -> None:
        """Give slots [n] back to the pool."""

    def free_or_keep(self, slots: torch.Tensor) -> None:
        """Give slots [n] back that no node holds; where that fails they are nobody's."""


class Changes(Protocol):
    """Signals of the tree."""

    def changed(self, node: Node) -> None:
        """Tell that a node holds something else."""

    def left_gpu(self, node: Node) -> None:
        """A node's slots were freed."""


class Copies(Protocol):
    """Table of the copies that nodes have below the GPU."""

    def has_same(self, node: Node, tier: Tier) -> bool:
        """A lower tier has just what the node holds now."""

    def add_copy(self, node: Node, copy: Copy) -> None:
        """The node has ``copy`` from now on."""

    def remove_copy(self, node: Node, tier: Tier) -> None:
        """Give a copy up, if there is one."""

    def remove_copies(self, node: Node, *, lossy_only: bool = False) -> None:
        """Give all copies up."""

    def show(self, node: Node) -> None:
        """Let the record of a node that is not on the GPU say what its fastest copy is."""

    def note_left_gpu(self, node: Node) -> None:
        """Count what the host has of the node as spare no more."""

    def note_resident(self, node: Node) -> None:
        """Count what the host has of the node as spare."""

    def header_of(self, node: Node, extents: tuple[Extent, ...] = ()) -> Header:
        """Identity of an entry that holds what the node holds now."""


class SpareCopies(Protocol):
    """Host copies of nodes that the GPU has too."""

    def remove_copy(self, node: Node, tier: Tier) -> None:
        """Give a copy up."""

    def next_spare(self, keep: Collection[int], *, keeps_planned: bool) -> int | None:
        """The node whose host copy is to be given up first."""


class EntryCopies(Protocol):
    """Copies in entries, and entries that are to be looked at."""

    def add_copy(self, node: Node, copy: Copy) -> None:
        """The node has ``copy`` from now on."""

    def remove_copy(self, node: Node, tier: Tier) -> None:
        """Give a copy up."""

    def header_of(self, node: Node, extents: tuple[Extent, ...] = ()) -> Header:
        """Identity of an entry that holds what the node holds now."""

    def note_fragment(self, entry: HostEntry) -> None:
        """A host entry is to be looked at again."""

    def spare_ssd_entries(self, limit: int) -> list[SsdEntry]:
        """Entries of which every piece lies on a faster tier too."""

    def take_host_fragments(self) -> Iterator[HostEntry]:
        """Entries of which a node has given up its piece."""

    def take_ssd_fragments(self) -> Iterator[SsdEntry]:
        """Entries of which a node has given up its piece."""


class Removals(Protocol):
    """Nodes and copies that go."""

    def drop(self, node_id: int, cause: str = "lost", number: int | None = None) -> int:
        """Forget a childless, unlocked node; the slots freed."""

    def drop_tree(self, node: Node) -> None:
        """Forget a node and all below it in the tree."""

    def invalidate_copy(self, node: Node, tier: Tier, reason: str) -> None:
        """A copy cannot be read."""

    def drop_overlaps(self, node: Node) -> None:
        """Give up compressed copies below a node that hold positions of it."""

    def release(self, node_id: int, tier: Tier) -> int:
        """Free what a node holds above ``tier``; the slots freed."""


class Plans(Protocol):
    """The policy in use."""

    def plan_without_copies(self, tier: Tier, num_bytes: int) -> Sequence[Decision]:
        """Decisions that free so many bytes on a tier at once."""

    def held_bytes(self, tier: Tier) -> int:
        """Bytes that nodes hold on a tier."""

    def num_nodes(self, tier: Tier) -> int:
        """Nodes on a tier."""

    def bounded(self, tier: Tier, num_bytes: int) -> int:
        """So many of the bytes as a plan of bounded length frees."""


class HostMemory(Protocol):
    """Room in host memory, and what is being copied into it."""

    @property
    def is_busy(self) -> bool:
        """Too much is on its way to begin another copy."""

    def host_room(self, num_bytes: int, *, keep: Collection[int] = (), keeps_planned: bool = False) -> Runs | None:
        """Runs of host memory; None without room."""

    def free_room(self, num_bytes: int) -> Runs | None:
        """Runs of memory that is free now."""

    def give_back(self, runs: Runs) -> None:
        """Free runs that nothing was copied to."""

    def given_back_after_an_error(self, runs: Runs) -> AbstractContextManager[None]:
        """Free runs for which a copy could not be begun."""

    def want(self, num_bytes: int) -> None:
        """So many bytes were wanted, and there was no room."""

    def begin_copy(self, num_bytes: int) -> None:
        """So many bytes are on their way."""

    def end_copy(self, num_bytes: int) -> None:
        """They are not any more."""


class SsdWrites(Protocol):
    """Writing host entries to the SSD."""

    def start_write(self, entry: HostEntry) -> bool:
        """Begin to write a host entry, for all nodes that hold a piece of it."""


class GpuForms(Protocol):
    """Forms that nodes can be brought to."""

    def slots_in(self, node: Node, form: Form, start: int, current: Form | None = None) -> int | None:
        """Slots of a node once brought to ``form``; None when it cannot be."""

    def window_of(self, node: Node) -> QueryWindow | None:
        """The queries kept for a node, if any."""

    def compress(self, node_id: int, form: Form) -> int:
        """Bring a node on the GPU to ``form`` in place; the slots freed."""
