"""Survivors of a compressed node: the M layout, which makes splits and partial matches free.

Survivors differ per (layer, kv head) but their number does not: the j-th survivor of every head lives in the node's
j-th physical slot. That slot is shown at the logical index M_j = max over (layer, head) of the position of the j-th
survivor. M is strictly increasing, so whoever takes the first p tokens of the node gets exactly the slots with M_j < p,
and those hold positions < p in every layer and head.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from sglang_evicpress.device import HostCopy


@dataclass(frozen=True, slots=True, eq=False)
class _PackedPositions:
    """Positions as one bit for each token from ``low`` on: ``bits`` is uint8 [layers * heads, bytes]."""

    bits: np.ndarray
    low: int
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, positions: torch.Tensor) -> _PackedPositions | None:
        """None where that would save less than half."""
        layers, heads, num_slots = positions.shape
        if not positions.numel() or positions.dtype != torch.int32:
            return None
        flat = positions.reshape(layers * heads, num_slots).numpy()
        low = int(flat.min())
        row_bytes = (int(flat.max()) - low) // 8 + 1
        if 2 * row_bytes > flat.itemsize * num_slots:
            return None
        bits = np.empty((layers * heads, row_bytes), dtype=np.uint8)
        for begin in range(0, len(flat), heads):  # a layer at a time: a bit takes a byte on the way
            rows = flat[begin : begin + heads]
            mask = np.zeros((len(rows), 8 * row_bytes), dtype=bool)
            np.put_along_axis(mask, rows.astype(np.int64) - low, True, axis=1)
            if int(mask.sum()) != rows.size:
                return None  # a head holds a position twice
            bits[begin : begin + heads] = np.packbits(mask, axis=1, bitorder="little")
        return cls(bits, low, (layers, heads, num_slots))

    def of_layer(self, layer: int) -> _PackedPositions:
        """Those of one layer, as the only one."""
        _, heads, num_slots = self.shape
        return _PackedPositions(self.bits[layer * heads : (layer + 1) * heads], self.low, (1, heads, num_slots))

    def read(self) -> torch.Tensor:
        """The positions, int32 [layers, heads, slots]."""
        layers, heads, num_slots = self.shape
        positions = np.empty((layers * heads, num_slots), dtype=np.int32)
        begins = np.arange(heads)[:, None] * 8 * self.bits.shape[1] - self.low  # of the heads, in a layer's mask
        for begin in range(0, len(positions), heads):
            mask = np.unpackbits(self.bits[begin : begin + heads], axis=1, bitorder="little")
            positions[begin : begin + heads] = np.flatnonzero(mask.view(bool)).reshape(heads, num_slots) - begins
        return torch.from_numpy(positions.reshape(self.shape))

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
    that are ``pack``ed take one bit per token and head, and are worked out anew each time.
    """

    __slots__ = ("__weakref__", "_counted", "_last_split", "_logical", "_packed", "_positions", "num_slots")

    def __init__(self, positions: HostCopy, logical: HostCopy, num_slots: int) -> None:
        self._positions: HostCopy | _PackedPositions = positions
        self._packed: _PackedPositions | None = None
        self._logical = logical
        self._last_split: tuple[int, weakref.ref[SurvivorLayout], weakref.ref[SurvivorLayout]] | None = None
        self._counted = (0, 0)
        self.num_slots = num_slots
        self._count()

    def __del__(self) -> None:
        _CHANGES.append((-self._counted[0], -self._counted[1]))

    @property
    def positions(self) -> torch.Tensor:
        return self._positions.read()

    @property
    def shape(self) -> tuple[int, int, int]:
        """[layers, kv_heads, m] of the positions, without reading them."""
        layers, heads, num_slots = self._positions.shape
        return layers, heads, num_slots

    def positions_of(self, layer: int) -> torch.Tensor:
        """int32 [kv_heads, m]: the positions of one layer, without opening the others."""
        positions = self._positions
        if isinstance(positions, HostCopy):
            return positions.read()[layer]
        return positions.of_layer(layer).read()[0]

    @property
    def logical(self) -> torch.Tensor:
        return self._logical.read()

    @property
    def num_bytes(self) -> int:
        """Host memory it takes."""
        return sum(self._counted)

    def prepare_pack(self) -> None:
        """Do the work of ``pack``, on any thread."""
        if self._packed is None:
            self._packed = _PackedPositions.of(self.positions)
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
        positions = self.positions
        return bool(((positions >= begin) & (positions < end)).any())

    def slots_before(self, num_tokens: int) -> int:
        """Number of slots for a request that matches the node's first ``num_tokens`` tokens."""
        return int(torch.searchsorted(self.logical, num_tokens))

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
        left = SurvivorLayout(HostCopy(positions[..., :cut].clone()), HostCopy(logical[:cut].clone()), cut)
        right = SurvivorLayout(
            HostCopy(positions[..., cut:].clone()), HostCopy(logical[cut:] - num_tokens), self.num_slots - cut
        )
        self._last_split = num_tokens, weakref.ref(left), weakref.ref(right)
        return left, right

    def _count(self) -> None:
        """Positions are int32, logical indices int64."""
        with _COUNTING:
            positions, packed = self._positions, self._packed
            num_open = 4 * positions.num_elements if isinstance(positions, HostCopy) else 0
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
