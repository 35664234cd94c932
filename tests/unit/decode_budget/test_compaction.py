"""Moves and maps against a walk over one head at a time, and against what the kernels leave in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.decode_budget.compaction import (
    dead_pages,
    hole_moves,
    holefill_copies,
    holefill_positions,
    repack_copies,
    repack_positions,
)
from sglang_evicpress.kernels.compact import compact
from sglang_evicpress.kernels.fill_holes import fill_holes

NUM_LAYERS, NUM_HEADS = 2, 2


@st.composite
def survivors_of_rows(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Survivors of a row of n slots, int32 [2, 2, m], and n."""
    n = draw(st.integers(1, 40))
    m = draw(st.integers(0, n))
    heads = [sorted(draw(st.permutations(range(n)))[:m]) for _ in range(NUM_LAYERS * NUM_HEADS)]
    return torch.tensor(heads, dtype=torch.int32).view(NUM_LAYERS, NUM_HEADS, m), n


def heads_of(survivors):
    return [(layer, head) for layer in range(survivors.shape[0]) for head in range(survivors.shape[1])]


@given(survivors_of_rows())
def test_hole_moves_bring_what_lies_behind_into_the_holes_in_front(drawn):
    survivors, n = drawn
    m = survivors.shape[-1]
    targets, sources = hole_moves(survivors, n)
    assert targets.shape == sources.shape == (NUM_LAYERS, NUM_HEADS, min(m, n - m))
    assert targets.dtype == sources.dtype == torch.int32
    for layer, head in heads_of(survivors):
        kept = survivors[layer, head].tolist()
        holes = [j for j in range(m) if j not in kept]
        behind = [j for j in kept if j >= m]
        missing = [-1] * (min(m, n - m) - len(holes))
        assert targets[layer, head].tolist() == holes + missing
        assert sources[layer, head].tolist() == behind + missing


@given(survivors_of_rows())
def test_copies_are_the_slots_whose_content_changes(drawn):
    survivors, n = drawn
    m = survivors.shape[-1]
    repack, holefill = repack_copies(survivors), holefill_copies(survivors)
    for layer, head in heads_of(survivors):
        kept = survivors[layer, head].tolist()
        assert repack[layer, head] == sum(origin != j for j, origin in enumerate(kept))
        assert holefill[layer, head] == len(set(kept) - set(range(m)))
    assert bool((holefill <= repack).all())
    assert bool((holefill <= min(m, n - m)).all())


@given(survivors_of_rows(), st.integers(0, 2**31))
def test_both_ways_leave_the_same_tokens_where_their_map_says(drawn, seed):
    survivors, n = drawn
    m = survivors.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(n + 5, generator=generator)[:n]
    positions = torch.rand(NUM_LAYERS, NUM_HEADS, n, generator=generator).argsort(-1).int() + 100
    content = torch.full((NUM_LAYERS, n + 5, NUM_HEADS, 16), -1.0)
    content[:, slots] = positions.float().transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, 16)
    targets, sources = hole_moves(survivors, n)
    maps = repack_positions(positions, survivors), holefill_positions(positions, targets, sources, m)
    for way, after in zip(("repack", "holefill"), maps, strict=True):
        k, v = list(content.clone()), list(content.clone() + 0.5)
        if way == "repack":
            compact(k, v, slots, survivors)
        else:
            fill_holes(k, v, slots, targets, sources)
        for layer in range(NUM_LAYERS):
            torch.testing.assert_close(k[layer][slots[:m], :, 0], after[layer].T.float(), rtol=0, atol=0)
            torch.testing.assert_close(v[layer][slots[:m], :, 3], after[layer].T.float() + 0.5, rtol=0, atol=0)
    assert torch.equal(maps[0].sort(-1).values, maps[1].sort(-1).values)


@given(survivors_of_rows())
def test_moves_of_hole_filling_keep_the_order_where_a_repack_copies_no_more(drawn):
    """So that taking the moves of hole-filling is always taking the cheaper way."""
    survivors, n = drawn
    positions = torch.arange(n, dtype=torch.int32).expand(NUM_LAYERS, NUM_HEADS, n)
    filled = holefill_positions(positions, *hole_moves(survivors, n), survivors.shape[-1])
    equal = repack_copies(survivors) == holefill_copies(survivors)
    assert torch.equal(filled[equal], survivors[equal])


def test_position_maps_do_not_change_the_map_they_read():
    positions = torch.arange(6, dtype=torch.int32).view(1, 1, 6)
    survivors = torch.tensor([[[0, 4, 5]]], dtype=torch.int32)
    filled = holefill_positions(positions, *hole_moves(survivors, 6), 3)
    assert filled.tolist() == [[[0, 4, 5]]]
    assert positions.flatten().tolist() == list(range(6))


def test_more_survivors_than_slots_are_refused():
    with pytest.raises(ValueError, match="3 survivors of 2 slots"):
        hole_moves(torch.zeros(1, 1, 3, dtype=torch.int32), 2)


# Worked examples: pages with a slot alive are not free, and 24 tokens in pages of 4.


@pytest.mark.parametrize(("step", "num_evicted"), [(10, 14_400), (16, 15_000)])
def test_scattered_survivors_pin_every_page_and_a_repack_frees_them(step, num_evicted):
    slots, is_alive = torch.arange(16_000), torch.zeros(16_000, dtype=torch.bool)
    is_alive[::step] = True
    num_kept = int(is_alive.sum())
    assert 16_000 - num_kept == num_evicted
    assert dead_pages(slots, is_alive, 16).numel() == 0
    repacked = torch.arange(16_000) < num_kept
    assert dead_pages(slots, repacked, 16).numel() == num_evicted // 16


def test_an_evicted_page_is_free_as_it_lies():
    slots, is_alive = torch.arange(16_000).view(-1, 16).flip(0).flatten(), torch.ones(16_000, dtype=torch.bool)
    is_alive[32:48] = False
    assert dead_pages(slots, is_alive, 16).tolist() == [997]


def test_a_last_page_that_is_not_full_is_free_when_its_slots_are_dead():
    is_alive = torch.tensor([True] * 4 + [False] * 2)
    assert dead_pages(torch.tensor([8, 9, 10, 11, 20, 21]), is_alive, 4).tolist() == [5]
    with pytest.raises(ValueError, match="expected two of"):
        dead_pages(torch.arange(6), is_alive[:4], 4)


def test_24_tokens_free_one_page_with_18_copies_or_with_3():
    dropped = (2, 9, 13, 21)
    survivors = torch.tensor([[[j for j in range(24) if j not in dropped]]], dtype=torch.int32)
    assert (int(repack_copies(survivors)), int(holefill_copies(survivors))) == (18, 3)
    targets, sources = hole_moves(survivors, 24)
    assert (targets.flatten().tolist(), sources.flatten().tolist()) == ([2, 9, 13, -1], [20, 22, 23, -1])
    assert dead_pages(torch.arange(24), torch.arange(24) < survivors.shape[-1], 4).tolist() == [5]
    scattered = torch.tensor([j not in dropped for j in range(24)])
    assert dead_pages(torch.arange(24), scattered, 4).numel() == 0
