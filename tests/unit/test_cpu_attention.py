"""Attention over paged KV on the CPU against softmax(QK)V written out in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from sglang_evicpress.cpu_attention import SequenceRows, batch_rows, causal_mask, paged_attention

DECODE = ((1, 0), (1, 1), (1, 37))
EXTEND = ((5, 0), (17, 0))
EXTEND_OVER_PREFIX = ((5, 11), (12, 64))
MIXED = ((1, 20), (9, 0), (1, 0), (4, 31))


@dataclass(frozen=True, slots=True)
class Sequences:
    """A batch over scattered slots; slots no sequence owns are NaN, so that reading one shows."""

    query: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    rows: list[SequenceRows]


def make_sequences(
    lengths: tuple[tuple[int, int], ...],
    kv_heads: int,
    group: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> Sequences:
    """``lengths``: new tokens and prefix tokens of each sequence."""
    total = sum(new + prefix for new, prefix in lengths)
    order = torch.randperm(total + 13)
    k_buffer = torch.full((total + 13, kv_heads, head_dim), float("nan"), dtype=dtype)
    v_buffer = torch.full((total + 13, kv_heads, v_head_dim), float("nan"), dtype=dtype)
    owned = order[:total]
    k_buffer[owned] = torch.randn(total, kv_heads, head_dim).to(dtype)
    v_buffer[owned] = torch.randn(total, kv_heads, v_head_dim).to(dtype)
    rows, begin = [], 0
    for new, prefix in lengths:
        rows.append(SequenceRows(order[begin : begin + new + prefix], new))
        begin += new + prefix
    query = torch.randn(sum(new for new, _ in lengths), kv_heads * group, head_dim)
    return Sequences(query, k_buffer, v_buffer, rows)


def reference(case: Sequences, scale: float) -> torch.Tensor:
    """One query and one head at a time; query i of n sees the first kv_len - n + i + 1 entries of its row."""
    num_heads, kv_heads = case.query.shape[1], case.k_buffer.shape[1]
    out = torch.zeros(len(case.query), num_heads, case.v_buffer.shape[2], dtype=torch.float64)
    token = 0
    for sequence in case.rows:
        for i in range(sequence.num_queries):
            seen = sequence.slots[: len(sequence.slots) - sequence.num_queries + i + 1]
            for head in range(num_heads):
                kv_head = head * kv_heads // num_heads
                scores = case.k_buffer[seen, kv_head].double() @ case.query[token, head].double() * scale
                weights = (scores - scores.max()).exp()
                out[token, head] = (weights / weights.sum()) @ case.v_buffer[seen, kv_head].double()
            token += 1
    return out


def attend(case: Sequences, scale: float) -> torch.Tensor:
    out = torch.full((*case.query.shape[:2], case.v_buffer.shape[2]), float("nan"))
    paged_attention(case.query, out, case.k_buffer, case.v_buffer, case.rows, scale)
    return out


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("lengths", [DECODE, EXTEND, EXTEND_OVER_PREFIX, MIXED])
def test_attention_equals_the_reference(lengths: tuple[tuple[int, int], ...], group: int) -> None:
    case = make_sequences(lengths, kv_heads=2, group=group, head_dim=64, v_head_dim=64)
    torch.testing.assert_close(attend(case, 0.125).double(), reference(case, 0.125), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(32, 32), (128, 128), (64, 32), (32, 128)])
def test_head_dims_of_keys_and_values_may_differ(head_dim: int, v_head_dim: int) -> None:
    case = make_sequences(MIXED, kv_heads=3, group=2, head_dim=head_dim, v_head_dim=v_head_dim)
    scale = 1 / math.sqrt(head_dim)
    torch.testing.assert_close(attend(case, scale).double(), reference(case, scale), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", [DECODE, EXTEND_OVER_PREFIX])
def test_bfloat16_cache_is_read_in_the_precision_of_the_query(lengths: tuple[tuple[int, int], ...]) -> None:
    case = make_sequences(lengths, 2, 2, 64, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(attend(case, 0.125).double(), reference(case, 0.125), atol=2e-6, rtol=1e-5)


def test_causal_mask_is_aligned_at_the_end() -> None:
    mask = causal_mask(3, 5, torch.device("cpu"))
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert torch.equal(causal_mask(4, 4, torch.device("cpu")), torch.ones(4, 4).tril().bool())


def test_the_order_of_prefix_slots_does_not_matter_but_that_of_new_ones_does() -> None:
    """Compact rows rely on the first half: survivors of a head need no order among themselves."""
    case = make_sequences(((6, 20),), 2, 2, 64, 64)
    slots = case.rows[0].slots
    shuffled = SequenceRows(torch.cat([slots[torch.randperm(20)], slots[20:]]), 6)
    moved = Sequences(case.query, case.k_buffer, case.v_buffer, [shuffled])
    torch.testing.assert_close(attend(moved, 0.125), attend(case, 0.125), atol=1e-6, rtol=1e-5)
    swapped = SequenceRows(torch.cat([slots[:20], slots[20:].flip(0)]), 6)
    other = Sequences(case.query, case.k_buffer, case.v_buffer, [swapped])
    assert (attend(other, 0.125) - attend(case, 0.125)).abs().max() > 1e-2


def test_chunks_of_a_prompt_add_up_to_the_whole_prompt() -> None:
    case = make_sequences(((24, 0),), 2, 2, 64, 64)
    slots, parts = case.rows[0].slots, []
    for begin, end in ((0, 7), (7, 16), (16, 24)):
        chunk = Sequences(case.query[begin:end], case.k_buffer, case.v_buffer, [SequenceRows(slots[:end], end - begin)])
        parts.append(attend(chunk, 0.125))
    torch.testing.assert_close(torch.cat(parts), attend(case, 0.125), atol=1e-6, rtol=1e-5)


def test_rows_are_read_up_to_their_physical_length() -> None:
    req_to_token = torch.arange(40, dtype=torch.int32).view(4, 10)
    rows = batch_rows(req_to_token, [3, 1], [4, 10], [1, 2])
    assert rows[0].slots.tolist() == [30, 31, 32, 33] and rows[0].num_queries == 1
    assert rows[1].slots.tolist() == list(range(10, 20)) and rows[1].num_queries == 2
    assert rows[0].slots.dtype == torch.int64


def test_unequal_lists_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        batch_rows(torch.zeros(2, 4, dtype=torch.int32), [0, 1], [4], [1, 1])
