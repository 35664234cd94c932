"""Copies of a node below the GPU, and the entries they are pieces of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.survivors import SurvivorLayout
from sglang_evicpress.tiers.entry.header import Header
from sglang_evicpress.tiers.host.allocator import Run


@dataclass(slots=True, eq=False)
class HostEntry:
    """An entry in the arena. ``owners`` are the ids of the nodes that hold a piece of it; its ``runs`` are freed once
    there is none and nobody who reads or writes it has it ``pinned``. ``checked_s``: when its checksums were last seen
    to hold; ``is_damaged``: a thread has seen on this rank that one does not, and its job will say so. ``check``,
    ``arrival`` and ``write`` are the jobs that verify it, fill it and write it to SSD now, ``ssd`` is the same payload
    there."""

    header: Header
    runs: Sequence[Run]
    owners: set[int] = field(default_factory=set)
    pins: int = 0
    checked_s: float = -math.inf
    is_damaged: bool = False
    check: Any = None
    arrival: Any = None
    write: Any = None
    ssd: SsdEntry | None = None
    check_seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(run.num_bytes for run in self.runs)

    def take_check_seconds(self) -> float:
        """Seconds of the last verification, told once: it is part of what the load after it costs."""
        seconds, self.check_seconds = self.check_seconds, 0.0
        return seconds


@dataclass(slots=True, eq=False)
class SsdEntry:
    """An entry on SSD; ``ref`` is the store's name for it, ``read`` the job that reads it now; ``num_vain``: so
    many times it was read while nobody waited for it, and could not be kept."""

    header: Header
    ref: Any
    owners: set[int] = field(default_factory=set)
    read: Any = None
    num_vain: int = 0


class Rows(NamedTuple):
    """``num_rows`` of a layer of an entry from ``begin`` on, of the ``total`` that the layer has."""

    begin: int
    num_rows: int
    total: int


class ExternalCopy(NamedTuple):
    """Copy of a node in the external store, if that keeps it: its form, the bytes of its entry, which may go on behind
    the node, and the slots of which a layer has KV, on average."""

    form: Form
    num_bytes: int
    mean_slots: float
    is_exact: bool


@dataclass(slots=True, eq=False)
class Copy:
    """Copy of a node on a tier: the slots [begin, begin + num_slots) of ``entry``, in ``form``. ``layout`` is that of
    these slots, None for a full form; ``origin`` as that of a node. ``begins``: what each group of layers fills of the
    slots before, () where that is all of them."""

    tier: Tier
    form: Form
    entry: Any
    begin: int
    num_slots: int
    layout: SurvivorLayout | None
    is_lossy_prefix: bool
    origin: int | None
    begins: tuple[int, ...] = ()

    def rows_of(self, layer: int) -> Rows:
        """Rows of a layer of its entry that are its own."""
        header, filling = self.entry.header, None if self.layout is None else self.layout.filling
        if filling is None:
            return Rows(self.begin, self.num_slots, header.num_slots)
        group = filling.group_of[layer]
        begin = self.begins[group] if self.begins else self.begin
        return Rows(begin, filling.counts[group], header.slots_of(layer))

    @property
    def is_exact(self) -> bool:
        """True if it holds the exact KV of its tokens."""
        return self.form.is_exact and not self.is_lossy_prefix

    @property
    def filled(self) -> float:
        """Share of its slots, over all layers, that hold KV."""
        return 1.0 if self.layout is None else self.layout.filled

    @property
    def mean_slots(self) -> float:
        """Slots of which a layer has KV, on average."""
        return self.num_slots if self.layout is None else self.layout.mean_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of the KV of its slots, as an entry of their own would have it."""
        shape = self.entry.header.shape
        if self.layout is None or self.layout.filling is None:
            return int(shape.num_layers * shape.stored_bytes(self.num_slots, self.form.codec))
        counts = map(self.layout.count_of, range(shape.num_layers))
        return int(sum(shape.stored_bytes(count, self.form.codec) for count in counts))

    def split(self, num_tokens: int) -> tuple[Copy, Copy]:
        """The copies of the node's first ``num_tokens`` tokens and of the rest."""
        above, below, cut, begins = None, None, num_tokens, self.begins
        if self.layout is not None:
            above, below = self.layout.split(num_tokens)
            cut = above.num_slots
            if above.filling is not None:
                counts = above.filling.counts
                begins = tuple(map(sum, zip(begins or (self.begin,) * len(counts), counts, strict=True)))
        return (
            replace(self, num_slots=cut, layout=above),
            replace(self, begin=self.begin + cut, num_slots=self.num_slots - cut, layout=below, begins=begins),
        )
