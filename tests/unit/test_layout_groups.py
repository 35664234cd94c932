"""Layouts whose layers keep different numbers of tokens: a split takes from each what lies before it, no more."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_evicpress.device import HostCopy
from sglang_evicpress.survivors import EMPTY, Filling, SurvivorLayout, place, place_groups


def drawn(seed: int) -> tuple[list[torch.Tensor], int, int, int]:
    """Positions of groups of layers [layers, heads, count], the node's start, its tokens and the page size."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    page_size = rng.choice([1, 1, 4])
    num_tokens, start = rng.randint(1, 30) * page_size, rng.choice([0, 8])
    groups = []
    for _ in range(rng.randint(1, 4)):
        count = rng.randint(0, num_tokens // page_size) * page_size
        noise = torch.rand(rng.randint(1, 2), 2, num_tokens, generator=generator)
        if rng.random() < 0.5:  # heads that keep mostly first or mostly last tokens are the hard case
            noise += torch.linspace(0, 1, num_tokens) * rng.choice([-3, 3])
        groups.append((noise.topk(count).indices.sort().values + start).to(torch.int32))
    return groups, start, num_tokens, page_size


def layout_of(groups: list[torch.Tensor], start: int, page_size: int) -> SurvivorLayout:
    logical, places = place_groups([each.amax(dim=(0, 1)).to(torch.int64) for each in groups], start, page_size)
    group_of = tuple(group for group, each in enumerate(groups) for _ in each)
    positions = torch.full((len(group_of), 2, len(logical)), EMPTY, dtype=torch.int32)
    for layer, group in enumerate(group_of):
        positions[layer][:, places[group]] = groups[group][layer - group_of.index(group)]
    filling = Filling(group_of, places)
    return SurvivorLayout(HostCopy(positions), HostCopy(logical), len(logical), filling)


def by_layer(layout: SurvivorLayout) -> list[torch.Tensor]:
    return [layout.positions_of(layer) for layer in range(layout.shape[0])]


@pytest.mark.parametrize("seed", range(200))
def test_slots_ascend_and_every_survivor_is_shown_at_its_position_or_later(seed: int) -> None:
    groups, start, num_tokens, page_size = drawn(seed)
    logical, places = place_groups([each.amax(dim=(0, 1)).to(torch.int64) for each in groups], start, page_size)
    assert len(logical) == max(each.shape[-1] for each in groups)
    assert (logical[1:] > logical[:-1]).all() and ((logical >= 0) & (logical < num_tokens)).all()
    for positions, place_of_group in zip(groups, places, strict=True):
        assert len(place_of_group) == positions.shape[-1]
        assert (place_of_group[1:] > place_of_group[:-1]).all()
        assert (positions - start < (logical[place_of_group] // page_size + 1) * page_size).all()


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_lower_part_of_a_split_node_shows_no_slot_before_its_begin(page_size: int) -> None:
    """Its fullest group may hold only what comes before it, in slots that another group had shown later."""
    fullest, other = torch.tensor([2, 10]), torch.tensor([18])
    last = [
        torch.repeat_interleave(each * page_size, page_size) + torch.arange(page_size).repeat(len(each))
        for each in (fullest, other)
    ]
    logical, _ = place_groups(last, 10 * page_size, page_size)
    assert (logical >= 0).all() and (logical[1:] > logical[:-1]).all()
    assert logical.max() == 9 * page_size - 1


@pytest.mark.parametrize("seed", range(100))
def test_pages_stay_whole(seed: int) -> None:
    groups, start, _, page_size = drawn(seed)
    logical, places = place_groups([each.amax(dim=(0, 1)).to(torch.int64) for each in groups], start, page_size)
    for indices in (logical, *places):
        pages = indices.view(-1, page_size)
        assert (pages[:, 0] % page_size == 0).all() and (pages - pages[:, :1] == torch.arange(page_size)).all()


@pytest.mark.parametrize("seed", range(100))
def test_one_group_is_placed_as_layers_that_keep_the_same(seed: int) -> None:
    groups, start, _, page_size = drawn(seed)
    logical, (places,) = place_groups([groups[0].amax(dim=(0, 1)).to(torch.int64)], start, page_size)
    assert torch.equal(logical, place(groups[0], start, page_size))
    assert torch.equal(places, torch.arange(groups[0].shape[-1]))


@pytest.mark.parametrize("seed", range(100))
def test_a_split_takes_only_what_lies_before_it_and_loses_nothing(seed: int) -> None:
    groups, start, num_tokens, page_size = drawn(seed)
    layout = layout_of(groups, start, page_size)
    whole = by_layer(layout)
    for cut in range(0, num_tokens + 1, page_size):
        left, right = layout.split(cut)
        assert left.num_slots == layout.slots_before(cut) and right.num_slots == layout.num_slots - left.num_slots
        assert left.mean_slots == layout.mean_before(cut)
        for before, above, below in zip(whole, by_layer(left), by_layer(right), strict=True):
            assert (above < start + cut).all()
            assert torch.equal(torch.cat([above, below], -1), before)
        assert torch.equal(torch.cat([left.positions, right.positions], -1), layout.positions)
        for piece in (left, right):
            assert [piece.count_of(layer) for layer in range(layout.shape[0])] == [
                each.shape[-1] for each in by_layer(piece)
            ]


def test_layers_that_keep_less_lose_little_by_a_cut() -> None:
    """The survivors of both are spread evenly: a cut in the middle leaves half of each."""
    many, few = torch.arange(0, 100, 2), torch.arange(0, 100, 10)
    groups = [each.to(torch.int32).expand(1, 2, -1) for each in (many, few)]
    left, right = layout_of(groups, 0, 1).split(50)
    assert [left.count_of(0), left.count_of(1)] == [25, 5]
    assert [right.count_of(0), right.count_of(1)] == [25, 5]


@pytest.mark.parametrize("seed", range(40))
def test_packed_positions_read_as_before(seed: int) -> None:
    layout = layout_of(*(drawn(seed)[index] for index in (0, 1, 3)))
    positions, whole = layout.positions.clone(), by_layer(layout)
    layout.pack()
    assert torch.equal(layout.positions, positions)
    assert all(torch.equal(*pair) for pair in zip(by_layer(layout), whole, strict=True))
    for begin in range(0, 130, 7):
        held = ((positions >= begin) & (positions < begin + 5)).any()
        assert layout.has_any(begin, begin + 5) == bool(held)


def test_slots_by_layer_and_their_share() -> None:
    groups = [torch.arange(count, dtype=torch.int32).expand(layers, 2, -1) for count, layers in ((8, 1), (2, 3))]
    layout = layout_of(groups, 0, 1)
    assert layout.layer_slots == (8, 2, 2, 2)
    assert (layout.mean_slots, layout.filled) == (3.5, 3.5 / 8)
    even = layout_of([groups[0], groups[0]], 0, 1)
    assert even.layer_slots == ()
    assert even.filled == 1.0
