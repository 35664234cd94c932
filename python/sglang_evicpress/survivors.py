"""Survivors of a compressed node: the M layout, which makes splits and partial matches free.

Survivors differ per (layer, kv head) but their number does not: the j-th survivor of every head lives in the node's
j-th physical slot. That slot is shown at the logical index M_j = max over (layer, head) of the position of the j-th
survivor. M is strictly increasing, so whoever takes the first p tokens of the node gets exactly the slots with M_j < p,
and those hold positions < p in every layer and head.

Where layers keep different numbers of tokens, the groups of layers that keep fewer leave slots empty: ``place_groups``
puts each of their survivors into the first free slot that is shown at its position or later, so that M stays that of
the fullest group but where another has a later survivor, and a split takes from every layer what is before it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_evicpress.device import HostCopy, to_device

EMPTY = -1
"""Position in a slot that holds nothing in a layer."""


class Filling:
    """Slots of a node that hold KV, for each group of layers.

    ``group_of`` [layers]: the group of each. ``places``: int64 [sum of ``counts``], indices of a node's slots,
    ascending, those of one group behind the other's. ``counts``: slots that a layer of each group fills.
    """

    __slots__ = ("_source", "counts", "group_of", "places")

    def __init__(self, group_of: tuple[int, ...], places: Sequence[torch.Tensor]) -> None:
        """``places``: the indices of each group, int64 [count] on one device."""
        joined = torch.cat(list(places))
        self.group_of, self.counts = group_of, tuple(len(each) for each in places)
        self.places = HostCopy(joined)
        self._source = joined if joined.is_cuda else None  # until the copy is there: nobody waits for it

    def index_of(self, group: int, device: torch.device | str) -> torch.Tensor:
        """``of_group`` on a device. Waits for nothing there; the current stream may read it until its work is done."""
        self.settle()
        if self._source is None:
            return to_device(self.of_group(group), device)
        self._source.record_stream(torch.cuda.current_stream(self._source.device))  # it was made on another
        begin = sum(self.counts[:group])
        return self._source[begin : begin + self.counts[group]]

    def settle(self) -> None:
        """Give up the indices on the device once the host has them."""
        if self._source is not None and self.places.has_arrived:
            self._source = None

    def of_group(self, group: int) -> torch.Tensor:
        """int64 [count]: indices of the slots that a group fills."""
        begin = sum(self.counts[:group])
        return self.places.read()[begin : begin + self.counts[group]]

    def of_layer(self, layer: int) -> torch.Tensor:
        """int64 [count]: indices of the slots that a layer fills."""
        return self.of_group(self.group_of[layer])

    def counts_before(self, cut: int) -> tuple[int, ...]:
        """What each group fills of the first ``cut`` slots."""
        return tuple(int(torch.searchsorted(self.of_group(group), cut)) for group in range(len(self.counts)))

    def split(self, cut: int) -> tuple[Filling, Filling]:
        """Those of the first ``cut`` slots, and of the others, counted from 0 again."""
        before = self.counts_before(cut)
        groups = [self.of_group(group) for group in range(len(self.counts))]
        left = [places[:count].clone() for places, count in zip(groups, before, strict=True)]
        right = [places[count:] - cut for places, count in zip(groups, before, strict=True)]
        return Filling(self.group_of, left), Filling(self.group_of, right)

    def mean(self, counts: Sequence[int] | None = None) -> float:
        """Slots that a layer fills on average, or would with these ``counts`` of groups."""
        counts = self.counts if counts is None else counts
        return sum(counts[group] for group in self.group_of) / len(self.group_of)


@dataclass(frozen=True, slots=True, eq=False)
class _PackedPositions:
    """Positions as one bit for each token from ``low`` on: ``bits`` is uint8 [layers * heads, bytes], ``counts`` the
    positions in a head of each layer."""

    bits: np.ndarray
    low: int
    heads: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, layers: Sequence[torch.Tensor]) -> _PackedPositions | None:
        """Those of ``layers``, int32 [heads, count] each. None where that would save less than half."""
        heads, counts = layers[0].shape[0] if layers else 0, tuple(each.shape[1] for each in layers)
        filled = [each for each in layers if each.numel()]
        if not filled or any(each.dtype != torch.int32 for each in layers):
            return None
        low = min(int(each.min()) for each in filled)
        row_bytes = (max(int(each.max()) for each in filled) - low) // 8 + 1
        if 2 * row_bytes * len(counts) > 4 * sum(counts):
            return None
        bits = np.empty((len(counts) * heads, row_bytes), dtype=np.uint8)
        for layer, positions in enumerate(layers):  # a layer at a time: a bit takes a byte on the way
            mask = np.zeros((heads, 8 * row_bytes), dtype=bool)
            np.put_along_axis(mask, positions.numpy().astype(np.int64) - low, True, axis=1)
            if int(mask.sum()) != positions.numel():
                return None  # a head holds a position twice
            bits[layer * heads : (layer + 1) * heads] = np.packbits(mask, axis=1, bitorder="little")
        return cls(bits, low, heads, counts)

    def read(self, layer: int) -> torch.Tensor:
        """The positions of a layer, int32 [heads, count]."""
        rows = self.bits[layer * self.heads : (layer + 1) * self.heads]
        mask = np.unpackbits(rows, axis=1, bitorder="little")
        begins = np.arange(self.heads)[:, None] * 8 * self.bits.shape[1] - self.low  # of the heads, in the mask
        positions = np.flatnonzero(mask.view(bool)).reshape(self.heads, self.counts[layer]) - begins
        return torch.from_numpy(positions.astype(np.int32))

    def has_any(self, begin: int, end: int) -> bool:
        """True if any head holds a position of [begin, end)."""
        first, last = max(0, begin - self.low), min(end - self.low, 8 * self.bits.shape[1])
        if first >= last:
            return False
        part = np.unpackbits(self.bits[:, first // 8 : (last - 1) // 8 + 1], axis=1, bitorder="little")
        return bool(part[:, first % 8 : first % 8 + last - first].any())


_CHANGES: deque[tuple[int, int]] = deque()
"""Of what all layouts hold, noted without a lock: a layout may go at any point."""
_TOTALS = {"open_bytes": 0, "packed_bytes": 0}
_COUNTING = threading.Lock()


def survivor_bytes() -> dict[str, int]:
    """Host memory of all layouts, in bytes: as numbers, and packed, as those of nodes that only the SSD has are."""
    with _COUNTING:
        while _CHANGES:
            num_open, num_packed = _CHANGES.popleft()
            _TOTALS["open_bytes"] += num_open
            _TOTALS["packed_bytes"] += num_packed
        return dict(_TOTALS)


class SurvivorLayout:
    """Placement of one compressed node's survivors; immutable.

    ``positions``: int32 [layers, kv_heads, m], absolute logical position held by slot j of each head, ascending in j.
    ``logical``: int64 [m], the node-relative logical index at which slot j is shown, strictly increasing. Positions
    that are ``pack``ed take one bit per token and head, and are worked out anew each time. ``filling`` says which slots
    each layer fills, None where all fill all; positions of the others are EMPTY.
    """

    __slots__ = (
        "__weakref__",
        "_counted",
        "_last_split",
        "_low",
        "_logical",
        "_packed",
        "_positions",
        "_shape",
        "filling",
        "num_slots",
    )

    def __init__(self, positions: HostCopy, logical: HostCopy, num_slots: int, filling: Filling | None = None) -> None:
        self._positions: HostCopy | _PackedPositions = positions
        layers, heads, _ = positions.shape
        self._shape = layers, heads, num_slots
        self.filling = filling
        self._packed: _PackedPositions | None = None
        self._logical = logical
        self._last_split: tuple[int, weakref.ref[SurvivorLayout], weakref.ref[SurvivorLayout]] | None = None
        self._counted = (0, 0)
        self._low: float | None = None
        self.num_slots = num_slots
        self._count()

    def __del__(self) -> None:
        _CHANGES.append((-self._counted[0], -self._counted[1]))

    @property
    def positions(self) -> torch.Tensor:
        positions = self._positions
        if isinstance(positions, HostCopy):
            return positions.read()
        opened = torch.full(self._shape, EMPTY, dtype=torch.int32)
        for layer, layer_positions in enumerate(opened):
            places = slice(None) if self.filling is None else self.filling.of_layer(layer)
            layer_positions[:, places] = positions.read(layer)
        return opened

    @property
    def shape(self) -> tuple[int, int, int]:
        """[layers, kv_heads, m] of the positions, without reading them."""
        return self._shape

    def positions_of(self, layer: int) -> torch.Tensor:
        """int32 [kv_heads, count]: the positions in the slots that a layer fills, without opening the others."""
        positions = self._positions
        if not isinstance(positions, HostCopy):
            return positions.read(layer)
        opened = positions.read()[layer]
        return opened if self.filling is None else opened[:, self.filling.of_layer(layer)]

    def count_of(self, layer: int) -> int:
        """Slots that a layer fills."""
        return self.num_slots if self.filling is None else self.filling.counts[self.filling.group_of[layer]]

    @property
    def layer_slots(self) -> tuple[int, ...]:
        """Slots that each layer fills; () where all fill all."""
        if self.filling is None or all(count == self.num_slots for count in self.filling.counts):
            return ()
        return tuple(self.filling.counts[group] for group in self.filling.group_of)

    @property
    def mean_slots(self) -> float:
        """Slots that a layer fills on average."""
        return self.num_slots if self.filling is None else self.filling.mean()

    @property
    def filled(self) -> float:
        """Share of its slots, over all layers, that hold KV."""
        if self.filling is not None:
            self.filling.settle()
        return self.mean_slots / self.num_slots if self.filling is not None and self.num_slots else 1.0

    @property
    def logical(self) -> torch.Tensor:
        return self._logical.read()

    def shown_at(self, logical: torch.Tensor) -> SurvivorLayout:
        """The same survivors, whose slots are shown at ``logical``, int64 [m]."""
        return SurvivorLayout(HostCopy(self.positions), HostCopy(logical), self.num_slots, self.filling)

    @property
    def num_bytes(self) -> int:
        """Host memory it takes."""
        return sum(self._counted)

    def prepare_pack(self) -> None:
        """Do the work of ``pack``, on any thread."""
        if self._packed is None:
            self._packed = _PackedPositions.of([self.positions_of(layer) for layer in range(self._shape[0])])
            self._count()

    def pack(self) -> None:
        """Keep the positions in a sixth or less of the memory, where that can be."""
        self.prepare_pack()
        if self._packed is not None and self._positions is not self._packed:
            self._positions = self._packed
            self._count()

    def has_any(self, begin: int, end: int) -> bool:
        """True if any head holds a position of [begin, end)."""
        packed = self._packed
        if packed is not None:
            return packed.has_any(begin, end)
        if end <= self._least():
            return False
        positions = self.positions
        return bool(((positions >= begin) & (positions < end)).any())

    def _least(self) -> float:
        """The least position held, infinity without any; only a piece of a split holds one before its node."""
        if self._low is None:
            positions = self.positions
            if self.filling is None:
                positions = positions[:, :, :1]  # they rise
            held = positions[positions >= 0]
            self._low = int(held.min()) if held.numel() else math.inf
        return self._low

    def slots_before(self, num_tokens: int) -> int:
        """Number of slots for a request that matches the node's first ``num_tokens`` tokens."""
        return int(torch.searchsorted(self.logical, num_tokens))

    def mean_before(self, num_tokens: int) -> float:
        """Slots that such a request gets in a layer on average."""
        cut = self.slots_before(num_tokens)
        return cut if self.filling is None else self.filling.mean(self.filling.counts_before(cut))

    def split(self, num_tokens: int) -> tuple[SurvivorLayout, SurvivorLayout]:
        """The layouts of the first ``num_tokens`` tokens and of the rest (its logical indices start at 0 again).

        They share no memory with this one; a node and its copies, which are split one after the other, share them.
        """
        if self._last_split is not None and self._last_split[0] == num_tokens:
            left, right = self._last_split[1](), self._last_split[2]()
            if left is not None and right is not None:
                return left, right
        cut = self.slots_before(num_tokens)
        positions, logical = self.positions, self.logical
        above, below = (None, None) if self.filling is None else self.filling.split(cut)
        left = SurvivorLayout(HostCopy(positions[..., :cut].clone()), HostCopy(logical[:cut].clone()), cut, above)
        right = SurvivorLayout(
            HostCopy(positions[..., cut:].clone()), HostCopy(logical[cut:] - num_tokens), self.num_slots - cut, below
        )
        self._last_split = num_tokens, weakref.ref(left), weakref.ref(right)
        return left, right

    def _count(self) -> None:
        """Positions are int32, logical indices int64."""
        with _COUNTING:
            positions, packed = self._positions, self._packed
            num_open = 4 * positions.num_elements if isinstance(positions, HostCopy) else 0
            num_open += 0 if self.filling is None else 8 * self.filling.places.num_elements
            counted = num_open + 8 * self.num_slots, 0 if packed is None else packed.bits.nbytes
            _CHANGES.append((counted[0] - self._counted[0], counted[1] - self._counted[1]))
            self._counted = counted


def place(positions: torch.Tensor, start: int, page_size: int) -> torch.Tensor:
    """Logical index of each slot: int64 [m], node-relative, strictly increasing.

    ``positions``: [layers, kv_heads, m] absolute and ascending; ``start``: absolute position of the node's first token.
    With pages (m is a whole number of them), physical page j is shown at logical page floor(M of its last slot /
    page_size): it holds only positions below that page's end, and pages stay whole.
    """
    last = positions.amax(dim=(0, 1)).to(torch.int64) - start
    if page_size == 1:
        return last
    page = last.view(-1, page_size)[:, -1] // page_size
    offsets = torch.arange(page_size, device=last.device)
    return (page[:, None] * page_size + offsets).reshape(-1)


def place_groups(last: Sequence[torch.Tensor], start: int, page_size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Slots of groups of layers that keep different numbers of tokens: the logical index of each of the m slots, int64
    [m], node-relative and strictly increasing, and for each group the indices of the slots that it fills, int64
    [count], ascending. m is what the fullest group keeps.

    ``last``: int64 [count] for each group, the greatest position of each survivor over its layers and heads, absolute
    and ascending; counts are whole pages, and pages stay whole. Every survivor is in a slot that is shown at its
    position or later. From the last one on each takes the first slot that is free and shown late enough, and where
    there is none the last that is free, which is shown later then. Waits for nothing on the device.
    """
    pages = [
        (positions.view(-1, page_size)[:, -1] - start) // page_size for positions in map(torch.Tensor.contiguous, last)
    ]
    fullest = max(range(len(pages)), key=lambda group: len(pages[group]))
    count, offsets = len(pages[fullest]), torch.arange(page_size, device=pages[fullest].device)
    # Of the lower part of a split node the fullest group may have nothing but what comes before it: other groups had
    # its slots shown later.
    shown = pages[fullest].maximum(torch.arange(count, device=offsets.device))
    places = []
    for group, own in enumerate(pages):
        index = torch.arange(len(own), device=shown.device)
        slots = index
        if group != fullest and len(own):
            wanted = torch.searchsorted(shown, own).clamp_(max=count - 1).maximum(index)
            # No later one may be taken twice: slot i is at most slot i + 1 less 1.
            slots = (wanted - index).flip(0).cummin(0).values.flip(0) + index
            shown[slots] = shown[slots].maximum(own)
        places.append((slots[:, None] * page_size + offsets).reshape(-1))
    return (shown[:, None] * page_size + offsets).reshape(-1), places
