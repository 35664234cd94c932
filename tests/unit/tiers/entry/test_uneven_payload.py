"""KV of layers that keep different numbers of tokens, through a payload and back: exactly what each layer keeps."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.device import HostCopy
from sglang_evicpress.survivors import EMPTY, Filling, SurvivorLayout
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry
from sglang_evicpress.tiers.entry.header import BadEntry, Header, check_part, problem_of
from sglang_evicpress.tiers.entry.payload import PayloadCopier, layout_of
from sglang_evicpress.tiers.host.arena import Arena

GROUP_OF, HEADS, HEAD_DIM, SLOTS, TOKENS = (0, 1, 1, 0, 2), 2, 8, 60, 48
KEY = bytes(16)


def layout_with(counts: tuple[int, ...], seed: int) -> SurvivorLayout:
    """As many slots as the fullest group fills, in a node of TOKENS tokens at position 0."""
    rng = random.Random(seed)
    num_slots = max(counts)
    logical = torch.arange(TOKENS - num_slots, TOKENS)  # late enough for any survivor
    places = [torch.tensor(sorted(rng.sample(range(num_slots), count)), dtype=torch.int64) for count in counts]
    positions = torch.full((len(GROUP_OF), HEADS, num_slots), EMPTY, dtype=torch.int32)
    for layer, group in enumerate(GROUP_OF):
        for head in range(HEADS):
            # each below the index at which its slot is shown
            drawn = sorted(rng.sample(range(TOKENS - num_slots), counts[group]))
            positions[layer, head, places[group]] = torch.tensor(drawn, dtype=torch.int32)
    return SurvivorLayout(HostCopy(positions), HostCopy(logical), num_slots, Filling(GROUP_OF, places))


class World:
    """A pool with noise in it, and an entry of a node whose layers keep ``counts`` by group."""

    def __init__(self, counts: tuple[int, ...], codec: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.buffers = [
            torch.randn(SLOTS, HEADS, HEAD_DIM, generator=generator).to(dtype) for _ in range(2 * len(GROUP_OF))
        ]
        half = len(GROUP_OF)
        self.copier = PayloadCopier(self.buffers[:half], self.buffers[half:], 1)
        self.layout = layout_with(counts, seed)
        self.slots = torch.tensor(random.Random(seed).sample(range(SLOTS), self.layout.num_slots))
        form = Form("snapkv", 0.5, codec, "pyramid")
        self.sizes = self.copier.sizes(self.layout.num_slots, True, codec, self.layout.layer_slots)
        self.arena = Arena(1 << 20)
        runs = self.arena.extents.alloc(sum(self.sizes))
        assert runs is not None
        self.runs = runs
        extents = self.copier.save(self.slots, self.layout, self.arena, runs, codec=codec)
        self.header = Header(
            *(KEY, KEY, KEY, KEY, 0, bytes(4 * TOKENS), form, False, self.layout.num_slots, self.copier.shape, extents),
            layer_slots=self.layout.layer_slots,
        )
        entry = HostEntry(self.header, runs)
        self.copy = Copy(Tier.HOST, form, entry, 0, self.layout.num_slots, self.layout, False, None)

    def load(self, copy: Copy, slots: torch.Tensor) -> None:
        """Bring a copy into ``slots``, one for each of its own."""
        assert copy.layout is not None and copy.layout.filling is not None
        for layer in range(self.copier.num_layers):
            rows = copy.rows_of(layer)
            own = slots[copy.layout.filling.of_layer(layer)]
            assert len(own) == rows.num_rows
            every, codec = self.header.extents, self.header.form.codec
            layers = range(layer, layer + 1)
            self.copier.load_layers(layers, own, self.arena, self.runs, every, rows.begin, rows.total, codec)

    def survivors(self) -> torch.Tensor:
        return torch.cat(self.arena.tensors(self.runs, *self.header.extents[-1][:2]))


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("counts", [(20, 4, 9), (3, 20, 0), (20, 20, 1)])
def test_each_layer_has_the_rows_it_keeps_and_they_come_back(counts: tuple[int, ...], codec: str) -> None:
    world = World(counts, codec, dtype=torch.bfloat16 if codec == "lossless" else torch.float32)
    assert problem_of(world.header) is None
    for number in range(len(world.header.extents)):
        extent = world.header.extents[number]
        check_part(world.header, number, world.arena.buffers(world.runs, extent.offset, extent.num_bytes))
    if codec == "raw":
        row = 2 * HEADS * HEAD_DIM * 4
        assert [extent.num_bytes for extent in world.header.extents[:-1]] == [row * counts[g] for g in GROUP_OF]
    before = [buffer.clone() for buffer in world.buffers]
    free = torch.tensor(sorted(set(range(SLOTS)) - set(world.slots.tolist())))[: world.layout.num_slots]
    world.load(world.copy, free)
    for buffer, old, layer in zip(world.buffers, before, [*range(5), *range(5)], strict=True):
        assert world.layout.filling is not None
        places = world.layout.filling.of_layer(layer)
        expected = old.clone()
        expected[free[places]] = old[world.slots[places]]
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("cut", [0, 29, 35, 41, TOKENS])
def test_pieces_of_a_split_copy_load_their_own_rows(cut: int) -> None:
    world = World((20, 4, 9), "raw", seed=3)
    before = [buffer.clone() for buffer in world.buffers]
    above, below = world.copy.split(cut)
    if below.num_slots > 1:
        below, rest = below.split(5)  # a split of a split
    else:
        rest = below.split(0)[1]
        below = below.split(0)[0]
    free = torch.tensor(sorted(set(range(SLOTS)) - set(world.slots.tolist())))[: world.layout.num_slots]
    begin = 0
    for piece in (above, below, rest):
        world.load(piece, free[begin : begin + piece.num_slots])
        begin += piece.num_slots
    assert begin == world.layout.num_slots
    for buffer, old, layer in zip(world.buffers, before, [*range(5), *range(5)], strict=True):
        assert world.layout.filling is not None
        places = world.layout.filling.of_layer(layer)
        assert torch.equal(buffer[free[places]], old[world.slots[places]])


def test_bytes_of_a_copy_are_those_of_its_rows() -> None:
    world = World((20, 4, 9), "raw")
    row = 2 * HEADS * HEAD_DIM * 4
    assert world.copy.num_bytes == row * (20 + 4 + 4 + 20 + 9)
    above, below = world.copy.split(35)
    assert above.num_bytes + below.num_bytes == world.copy.num_bytes


def test_the_layout_is_read_as_it_was_written() -> None:
    world = World((20, 4, 9), "raw", seed=5)
    found = layout_of(world.survivors(), world.copier.shape, 20, world.header.layer_slots, GROUP_OF)
    assert torch.equal(found.positions, world.layout.positions)
    assert torch.equal(found.logical, world.layout.logical)
    assert found.filling is not None and world.layout.filling is not None
    assert found.filling.counts == (20, 4, 9)
    assert torch.equal(found.filling.places.read(), world.layout.filling.places.read())


def test_a_server_whose_layers_are_grouped_otherwise_does_not_take_it() -> None:
    world = World((20, 4, 9), "raw")
    numbers, shape, counts = world.survivors(), world.copier.shape, world.header.layer_slots
    with pytest.raises(BadEntry, match="identity: its layers fill different slots that fill the same ones"):
        layout_of(numbers, shape, 20, counts, (0, 1, 1, 0, 1))
    with pytest.raises(BadEntry, match="identity: .* those of this server's forms the same"):
        layout_of(numbers, shape, 20, counts, (0,))
    finer = layout_of(numbers, shape, 20, counts, (0, 1, 2, 3, 4))
    assert torch.equal(finer.positions, world.layout.positions)


def test_slots_that_are_not_as_many_as_the_header_says_are_no_layout() -> None:
    world = World((20, 4, 9), "raw")
    counts = (20, 4, 4, 20, 8)
    with pytest.raises(
        BadEntry, match=r"header: its layers fill \[20, 4, 4, 20, 9\] slots: expected \[20, 4, 4, 20, 8\]"
    ):
        layout_of(world.survivors(), world.copier.shape, 20, counts, GROUP_OF)
