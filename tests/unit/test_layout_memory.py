"""Host memory of survivors: not more than they hold, not pinned for longer than they travel, and little of it
while only the SSD has the node."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress import device
from sglang_evicpress.core import Form
from sglang_evicpress.device import HostCopy
from sglang_evicpress.survivors import SurvivorLayout, survivor_bytes
from sglang_evicpress.tiers.entry.encoding import decode, encode
from sglang_evicpress.tiers.entry.header import Extent, Header, Shape


def make_layout(num_tokens: int, num_kept: int, *, layers: int = 2, heads: int = 3, start: int = 0) -> SurvivorLayout:
    torch.manual_seed(num_tokens)
    order = torch.rand(layers, heads, num_tokens).argsort(-1)[..., :num_kept]
    positions = order.sort(-1).values.to(torch.int32) + start
    logical = (positions.amax((0, 1)) - start).to(torch.int64)
    return SurvivorLayout(HostCopy(positions), HostCopy(logical), num_kept)


def storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@given(st.integers(1, 300), st.data(), st.integers(0, 10_000))
def test_packed_positions_are_the_same_positions(num_tokens: int, data: st.DataObject, start: int) -> None:
    num_kept = data.draw(st.integers(0, num_tokens))
    layout = make_layout(num_tokens, num_kept, start=start)
    expected = layout.positions.clone()
    begin = data.draw(st.integers(max(0, start - 20), start + num_tokens + 20))
    end = data.draw(st.integers(begin, start + num_tokens + 40))
    has_any = bool(((expected >= begin) & (expected < end)).any())
    assert layout.has_any(begin, end) == has_any
    layout.pack()
    assert layout.positions.equal(expected) and layout.positions.dtype == torch.int32
    assert layout.has_any(begin, end) == has_any


@pytest.mark.parametrize(("kept", "times"), [(0.8, 20), (0.5, 14), (0.2, 5.5)])
def test_a_node_that_only_the_ssd_has_keeps_a_fraction(kept: float, times: float) -> None:
    """32 layers of 8 heads, 2048 tokens; the logical indices stay."""
    layout = make_layout(2048, int(2048 * kept), layers=32, heads=8)
    numbers = layout.num_bytes
    assert numbers == 4 * 32 * 8 * layout.num_slots + 8 * layout.num_slots
    layout.pack()
    assert layout.num_bytes < numbers / times


def test_one_layer_is_read_without_the_others() -> None:
    layout = make_layout(1000, 600, layers=4)
    expected = layout.positions.clone()
    for _ in range(2):  # as numbers, then packed
        assert layout.shape == tuple(expected.shape)
        assert all(torch.equal(layout.positions_of(layer), expected[layer]) for layer in range(4))
        layout.pack()


def test_positions_that_cannot_be_packed_stay_as_they_are() -> None:
    far = torch.tensor([[[0, 1_000_000]]], dtype=torch.int32)
    layout = SurvivorLayout(HostCopy(far), HostCopy(torch.tensor([0, 1_000_000])), 2)
    twice = SurvivorLayout(HostCopy(torch.zeros(1, 1, 64, dtype=torch.int32)), HostCopy(torch.arange(64)), 64)
    for each in (layout, twice):
        expected = each.positions.clone()
        each.pack()
        assert each.positions.equal(expected)


def test_parts_of_a_split_keep_no_more_than_their_own() -> None:
    layout = make_layout(1000, 500)
    left, right = layout.split(10)
    for part in (left, right):
        assert storage_bytes(part.positions) == 4 * part.positions.numel()
        assert storage_bytes(part.logical) == 8 * part.num_slots
    assert layout.split(10) == (left, right), "a node and its copies share them"
    assert layout.split(11) != (left, right)


def test_all_that_is_held_is_counted() -> None:
    before = survivor_bytes()
    layout = make_layout(1000, 500)
    parts = layout.split(400)
    numbers = survivor_bytes()["open_bytes"] - before["open_bytes"]
    assert numbers == layout.num_bytes + sum(part.num_bytes for part in parts) == 2 * layout.num_bytes
    layout.pack()
    counted = survivor_bytes()
    assert 0 < counted["packed_bytes"] - before["packed_bytes"] == 6 * 125
    del layout, parts
    assert survivor_bytes() == before


class _Event:
    """Event of a copy on its way."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


def on_its_way() -> tuple[HostCopy, _Event, int]:
    """Copy from a GPU that is not read yet; with its event and the address of its pinned memory."""
    copy, event = HostCopy(torch.arange(100)), _Event()
    copy._event = event  # type: ignore[assignment]
    return copy, event, copy._tensor.data_ptr()


def test_a_copy_leaves_pinned_memory_when_it_is_read() -> None:
    copy, _, pinned = on_its_way()
    first = copy.read()
    assert first.equal(torch.arange(100)) and first.data_ptr() != pinned and copy.read() is first


def test_copies_that_nobody_reads_leave_pinned_memory_once_they_are_there() -> None:
    device._PINNED.clear()
    copies = [on_its_way() for _ in range(3)]
    device._PINNED.extend(weakref.ref(copy) for copy, _, _ in copies)
    copies[0][1].is_over = True
    device._unpin_arrived()
    assert [copy._tensor.data_ptr() != pinned for copy, _, pinned in copies] == [True, False, False]
    copies[1][1].is_over = copies[2][1].is_over = True
    device._unpin_arrived()
    assert [copy._tensor.data_ptr() != pinned for copy, _, pinned in copies] == [True] * 3 and not device._PINNED


def test_the_extents_of_a_header_take_what_they_take_on_disk() -> None:
    shape = Shape(32, 8, 128, "bfloat16", 1)
    size, survivors = shape.layer_bytes(100), shape.survivors_bytes(100)
    extents = [Extent(layer * size, size, bytes([layer]) * 16) for layer in range(32)]
    extents.append(Extent(32 * size, survivors, bytes(16)))
    tokens = torch.arange(200, dtype=torch.int32).numpy().tobytes()
    key = bytes(16)
    header = Header(key, key, key, key, 0, tokens, Form("knorm", 0.5), False, 100, shape, extents)
    assert len(header.extents.packed) == 33 * 32
    assert (
        list(header.extents) == extents
        and header.extents == tuple(extents)
        and header.extents[1:3] == tuple(extents[1:3])
    )
    assert header.extents[-1] == extents[-1] and header.extents[5] == extents[5] and len(header.extents) == 33
    with pytest.raises(IndexError):
        header.extents[33]
    assert decode(encode(header))[0] == header == replace(header, extents=tuple(extents))
