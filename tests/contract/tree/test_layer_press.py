"""Compression of a node to different numbers of tokens in each group of layers: each keeps what its own scores say."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_evicpress.core import Form
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.node_kv import NodeSlots
from sglang_evicpress.policy.layer_counts import LayerGroups
from sglang_evicpress.press import PressInput, QueryWindow, get_press, select
from sglang_evicpress.survivors import SurvivorLayout

pytestmark = pytest.mark.sglang

LAYERS, HEADS, Q_HEADS, DIM, SLOTS, TOKENS, START = 4, 2, 4, 8, 128, 64, 0
GROUPS = LayerGroups((0, 1, 1, 2), {"b": (4, 2, 1)})
PRESSES = ("keydiff", "knorm", "snapkv", "value_key_ratio", "streaming", "random")


class World:
    """A pool of noise, and a node of TOKENS tokens in it."""

    def __init__(self, page_size: int, groups: LayerGroups = GROUPS) -> None:
        torch.manual_seed(7)
        self.pool = MHATokenToKVPool(SLOTS, page_size, torch.float32, HEADS, DIM, LAYERS, "cpu", False)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.normal_()
        self.compressor = Compressor(self.pool, page_size, 4, groups=groups)
        pages = torch.randperm(SLOTS // page_size)[: TOKENS // page_size] * page_size
        self.slots = (pages[:, None] + torch.arange(page_size)).reshape(-1)
        window = QueryWindow(torch.randn(LAYERS, 8, Q_HEADS, DIM), torch.arange(TOKENS - 8, TOKENS))
        self.node = NodeSlots(self.slots, None, START, TOKENS, window)
        self.before = [buffer.clone() for buffer in (*self.pool.k_buffer, *self.pool.v_buffer)]

    def survivors(self, press: str, count: int) -> torch.Tensor:
        """Positions [layers, heads, count] that a press keeps in all layers."""
        every = torch.arange(TOKENS, dtype=torch.int32).expand(LAYERS, HEADS, -1)
        given = PressInput(
            k_buffers=self.pool.k_buffer,
            v_buffers=self.pool.v_buffer,
            slots=self.slots,
            positions=every,
            start=START,
            num_tokens=TOKENS,
            window=self.node.window,
            scale=DIM**-0.5,
        )
        return select(get_press(press), given, count, 4)

    def check_rows(self, layout: SurvivorLayout, slots: torch.Tensor) -> None:
        """The slots that a layer fills hold what was there at the positions it says."""
        buffers = (*self.pool.k_buffer, *self.pool.v_buffer)
        for index, (buffer, before) in enumerate(zip(buffers, self.before, strict=True)):
            layer = index % LAYERS
            places = torch.arange(layout.num_slots) if layout.filling is None else layout.filling.of_layer(layer)
            for head, positions in enumerate(layout.positions_of(layer).long()):
                assert torch.equal(buffer[slots[places], head], before[self.slots[positions], head])


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("press", PRESSES)
def test_each_group_keeps_what_its_own_scores_say(press: str, page_size: int) -> None:
    world, counts = World(page_size), (48, 24, 8)
    wanted = [world.survivors(press, count) for count in counts]
    layout, value = world.compressor.compress(Form(press, 0.4, budget="b"), world.node, counts)
    assert layout.layer_slots == (48, 24, 24, 8)
    for layer, group in enumerate(GROUPS.group_of):
        if press == "random" and group:
            continue  # it draws by a layer's place among those it is given
        assert torch.equal(layout.positions_of(layer), wanted[group][layer])
    world.check_rows(layout, world.slots)
    assert torch.equal(value[layout.logical], world.slots[:48])
    assert int((value != 0).sum()) == 48 - int((world.slots[:48] == 0).sum())


def test_equal_counts_are_the_uniform_form_bit_for_bit() -> None:
    even, uneven = World(1), World(1)
    layout, value = even.compressor.compress(Form("snapkv", 0.5), even.node, 32)
    same, same_value = uneven.compressor.compress(Form("snapkv", 0.5, budget="b"), uneven.node, (32, 32, 32))
    assert same.filling is None
    assert torch.equal(same.positions, layout.positions) and torch.equal(same.logical, layout.logical)
    assert torch.equal(same_value, value)
    for one, other in zip(even.pool.k_buffer + even.pool.v_buffer, uneven.pool.k_buffer + uneven.pool.v_buffer,
                          strict=True):  # fmt: skip
        assert torch.equal(one, other)


@pytest.mark.parametrize("page_size", [1, 8])
def test_a_node_is_compressed_again_from_what_each_layer_has(page_size: int) -> None:
    world = World(page_size)
    layout, _ = world.compressor.compress(Form("knorm", 0.4, budget="b"), world.node, (48, 24, 8))
    node = NodeSlots(world.slots[:48], layout, START, TOKENS, None)
    again, _ = world.compressor.compress(Form("knorm", 0.2, budget="b"), node, (24, 8, 8))
    assert again.layer_slots == (24, 8, 8, 8)
    for layer in range(LAYERS):
        for now, before in zip(again.positions_of(layer).tolist(), layout.positions_of(layer).tolist(), strict=True):
            assert set(now) <= set(before)
    world.check_rows(again, world.slots)


def test_a_copy_in_other_slots_leaves_the_node_as_it_is() -> None:
    world = World(1)
    into = torch.tensor(sorted(set(range(SLOTS)) - set(world.slots.tolist())))[:48]
    layout, value = world.compressor.copy_compressed(
        form=Form("keydiff", 0.4, budget="b"),
        parts=[world.slots[:20], world.slots[20:]],
        num_tokens=TOKENS,
        into=into,
        window=None,
        num_kept=(48, 24, 8),
    )
    world.check_rows(layout, into)
    assert torch.equal(value[layout.logical], into)
    for buffer, before in zip((*world.pool.k_buffer, *world.pool.v_buffer), world.before, strict=True):
        assert torch.equal(buffer[world.slots], before[world.slots])


def test_what_a_codec_does_to_it_is_done_to_the_rows_of_each_layer() -> None:
    world = World(1)
    layout, _ = world.compressor.compress(Form("knorm", 0.4, budget="b"), world.node, (48, 33, 8))
    held = [buffer.clone() for buffer in (*world.pool.k_buffer, *world.pool.v_buffer)]
    world.compressor.recode(world.slots[:48], "int4", layout)
    assert layout.filling is not None
    for index, (buffer, before) in enumerate(zip((*world.pool.k_buffer, *world.pool.v_buffer), held, strict=True)):
        filled = world.slots[:48][layout.filling.of_layer(index % LAYERS)]
        others = torch.ones(len(buffer), dtype=torch.bool)
        others[filled] = False
        assert torch.equal(buffer[others], before[others])
        if index >= LAYERS or len(filled) >= 32:  # keys are coded in groups of 32 slots
            assert not torch.equal(buffer[filled], before[filled])
        assert (buffer[filled] - before[filled]).abs().max() < 1.0


def test_overlaps_go_first_and_each_group_gives_up_as_many_as_its_worst_head() -> None:
    world = World(1)
    layout, _ = world.compressor.compress(Form("knorm", 0.4, budget="b"), world.node, (48, 24, 8))
    trimmed = world.compressor.trim(
        Form("knorm", 0.4, budget="b"), NodeSlots(world.slots[:48], layout, START, TOKENS, None), (0, 16)
    )
    assert trimmed is not None
    after = trimmed[0]
    for layers in ((0,), (1, 2), (3,)):
        before = torch.stack([layout.positions_of(layer) for layer in layers])
        most = int((before < 16).sum(-1).max())
        for layer in layers:
            assert after.count_of(layer) == before.shape[-1] - most
            assert (after.positions_of(layer) >= 16).all()
    world.check_rows(after, world.slots)
    nothing = NodeSlots(world.slots[:48], after, START, TOKENS, None)
    assert world.compressor.trim(Form("knorm", 0.4, budget="b"), nothing, (0, 16)) is None
