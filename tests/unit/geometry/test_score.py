"""Scores by geometry, against the series of the paper written out in float64 for one query head and key at a time."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import pytest
import torch
from tests.unit.geometry.made import make_geometry, make_rope
from torch import Tensor

from sglang_evicpress.decode_budget.scores import score
from sglang_evicpress.geometry.centres import QueryGeometry
from sglang_evicpress.geometry.rope import Rope
from sglang_evicpress.geometry.score import geometry_scores
from sglang_evicpress.press import PressInput
from sglang_evicpress.press.geometry import GeometryPress

ROPES = {
    "whole": make_rope(16),
    "interleaved": make_rope(16, is_interleaved=True),
    "partial": make_rope(16, 3),
    "yarn": make_rope(16, factor=1.25),
    "partial-yarn": make_rope(12, 4, factor=1.4, is_interleaved=True),
}


def expected_logit(geometry: QueryGeometry, layer: int, head: int, key: Tensor, position: int, last: int) -> float:
    """Mean over the future distances of what a key, as it is cached for ``position``, can expect of one query head."""
    rope = geometry.rope
    centre, lengths = geometry.centres[layer, head].tolist(), geometry.lengths[layer, head].tolist()
    num, values = rope.num_turning, key.tolist()
    gain, total = rope.factor**2, 0.0
    for band, freq in enumerate(rope.inv_freq.tolist()):
        one, other = (2 * band, 2 * band + 1) if rope.is_interleaved else (band, band + num)
        middle = complex(centre[one], centre[other])
        cached = complex(values[one], values[other])
        pre = cached * cmath.exp(-1j * freq * position) / rope.factor
        size, turn = abs(middle) * abs(pre), cmath.phase(middle) - cmath.phase(pre)
        distances = [last + 2**power - position for power in range(64) if 2**power <= geometry.max_offset]
        total += gain * size * sum(math.cos(freq * far + turn) for far in distances) / len(distances)
        total += gain * (lengths[band] - abs(middle)) * abs(pre)
    for dim in range(2 * num, rope.head_dim):
        length = lengths[num + dim - 2 * num]
        total += centre[dim] * values[dim] + (length - abs(centre[dim])) * abs(values[dim])
    return total


def expected_scores(geometry: QueryGeometry, keys: Tensor, positions: Tensor, last: int) -> Tensor:
    """float64 [layers, kv_heads, n] of keys [layers, n, kv_heads, head_dim] at positions [layers, kv_heads, n]."""
    facts = geometry.model
    group = facts.num_heads // facts.num_kv_heads
    result = torch.empty(positions.shape, dtype=torch.float64)
    for layer in range(facts.num_layers):
        for kv_head in range(facts.num_kv_heads):
            of_group = []
            for head in range(kv_head * group, (kv_head + 1) * group):
                logits = torch.tensor(
                    [
                        expected_logit(geometry, layer, head, keys[layer, index, kv_head], position, last)
                        for index, position in enumerate(positions[layer, kv_head].tolist())
                    ],
                    dtype=torch.float64,
                )
                of_group.append((logits - logits.mean()) / logits.std(correction=0))
            result[layer, kv_head] = torch.stack(of_group).amax(0)
    return result


def draw(rope: Rope, num_tokens: int, last: int, num_layers: int = 3, num_kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    """Cached keys [layers, n, kv_heads, head_dim], and their positions: other ones in every head, in no order."""
    generator = torch.Generator().manual_seed(num_tokens)
    pre = torch.randn(num_layers, num_tokens, num_kv_heads, rope.head_dim, generator=generator, dtype=torch.float64)
    positions = torch.stack(
        [torch.randperm(last + 1, generator=generator)[:num_tokens] for _ in range(num_layers * num_kv_heads)]
    ).view(num_layers, num_kv_heads, num_tokens)
    return rope.apply(pre, positions.transpose(1, 2)).float(), positions


@pytest.mark.parametrize("num_heads", [2, 4, 8], ids=["mha", "gqa-2", "gqa-4"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_scores_are_the_series_of_the_paper(rope: Rope, num_heads: int) -> None:
    geometry, last = make_geometry(3, num_heads, 2, rope, max_offset=100), 140
    keys, positions = draw(rope, 25, last)
    scores = geometry_scores(geometry, list(keys), torch.arange(25)[None], torch.tensor([last]))
    assert scores.shape == (3, 2, 1, 25) and scores.dtype == torch.float32
    expected = expected_scores(geometry, keys.double(), positions, last)
    torch.testing.assert_close(scores[:, :, 0].double(), expected, atol=2e-5, rtol=2e-5)


def test_far_positions_are_as_exact_as_near_ones() -> None:
    geometry, far = make_geometry(), 1_000_000
    draw_near, positions = draw(geometry.rope, 25, 140)
    pre = geometry.rope.undo(draw_near.double(), positions.transpose(1, 2))
    moved = geometry.rope.apply(pre, positions.transpose(1, 2) + far).float()
    slots = torch.arange(25)[None]
    near = geometry_scores(geometry, list(draw_near), slots, torch.tensor([140]))
    torch.testing.assert_close(geometry_scores(geometry, list(moved), slots, torch.tensor([140 + far])), near)


def test_rows_of_a_batch_score_as_each_by_itself() -> None:
    geometry = make_geometry()
    keys, _ = draw(geometry.rope, 60, 300)
    slots, last = torch.stack([torch.randperm(60)[:20] for _ in range(3)]), torch.tensor([90, 300, 5000])
    together = geometry_scores(geometry, list(keys), slots, last)
    alone = [geometry_scores(geometry, list(keys), slots[row : row + 1], last[row : row + 1]) for row in range(3)]
    torch.testing.assert_close(together, torch.cat(alone, 2))
    order = slots[0].argsort()
    sorted_slots = geometry_scores(geometry, list(keys), slots[:1, order], last[:1])
    torch.testing.assert_close(sorted_slots, together[:, :, :1, order])


def test_a_key_that_points_to_the_centre_of_a_head_is_asked_for_before_others() -> None:
    rope = make_rope(16)
    geometry = make_geometry(1, 2, 1, rope, max_offset=1)
    keys = 0.1 * torch.randn(30, 1, 16)
    keys[11, 0] = rope.apply(4 * geometry.centres[0, 1], torch.tensor(31))  # of the second query head
    scores = geometry_scores(geometry, [keys], torch.arange(30)[None], torch.tensor([30]))
    assert int(scores[0, 0, 0].argmax()) == 11


def test_equal_keys_score_alike_and_one_key_is_a_number() -> None:
    geometry = make_geometry(1, 2, 1)
    keys = torch.ones(5, 1, 16)
    for num_slots in (1, 5):
        slots = torch.zeros(1, num_slots, dtype=torch.int64)
        scores = geometry_scores(geometry, [keys], slots, torch.tensor([4]))
        torch.testing.assert_close(scores, torch.zeros(1, 1, 1, num_slots))


def test_a_pool_of_another_model_is_refused() -> None:
    geometry = make_geometry()
    keys = [torch.zeros(4, 3, 16)] * 3
    with pytest.raises(ValueError, match=r"\(3, 3, 16\): expected \(3, 2, 16\)"):
        geometry_scores(geometry, keys, torch.arange(4)[None], torch.tensor([3]))


@pytest.mark.parametrize(("num_kv_heads", "size", "own"), [(4, 2, 2), (2, 2, 1), (2, 4, 1), (1, 2, 1)])
def test_ranks_score_the_heads_that_they_hold(num_kv_heads: int, size: int, own: int) -> None:
    geometry = make_geometry(2, 8, num_kv_heads)
    keys, _ = draw(geometry.rope, 20, 60, 2, num_kv_heads)
    slots, last = torch.arange(20)[None], torch.tensor([60])
    whole = geometry_scores(geometry, list(keys), slots, last)
    for rank in range(size):
        part = geometry.of_rank(rank, size)
        first = rank * num_kv_heads // size
        assert part.model.num_kv_heads == own
        held = keys[:, :, first : first + own].contiguous()
        scores = geometry_scores(part, list(held), slots, last)
        if num_kv_heads >= size:
            torch.testing.assert_close(scores, whole[:, first : first + own])
        else:  # a rank has some query heads of the group alone
            assert bool((scores <= whole[:, first : first + own] + 1e-5).all())
    with pytest.raises(ValueError, match="over 3 ranks"):
        geometry.of_rank(0, 3)


def test_a_layer_by_itself_scores_as_among_the_others() -> None:
    geometry = make_geometry()
    keys, _ = draw(geometry.rope, 20, 60)
    slots, last = torch.arange(20)[None], torch.tensor([60])
    whole = geometry_scores(geometry, list(keys), slots, last)
    for layer in range(3):
        one = geometry_scores(geometry.of_layers([layer]), [keys[layer]], slots, last)
        torch.testing.assert_close(one[0], whole[layer])


def test_what_does_not_belong_together_is_no_geometry() -> None:
    geometry = make_geometry()
    for changes, words in (
        ({"centres": geometry.centres[:, :3]}, r"centres are torch.float32 \(3, 3, 16\)"),
        ({"lengths": geometry.lengths.double()}, "lengths are torch.float64"),
        ({"model": replace(geometry.model, num_kv_heads=3)}, "4 query heads for 3 KV heads"),
        ({"model": replace(geometry.model, head_dim=32)}, "RoPE of heads of 16: expected heads of 32"),
        ({"max_offset": 0}, "max_offset 0"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(geometry, **changes)


def test_values_that_are_no_lengths_are_told() -> None:
    geometry = make_geometry()
    geometry.check_values()
    rope = Rope(geometry.rope.inv_freq * torch.inf, 16)
    for changes, words in (
        ({"centres": geometry.centres * torch.nan}, "centres hold NaN or Inf"),
        ({"lengths": geometry.lengths * torch.nan}, "lengths hold NaN or Inf"),
        ({"lengths": geometry.lengths - 100}, "lengths hold numbers below 0"),
        ({"rope": rope}, "inv_freq hold NaN or Inf"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(geometry, **changes).check_values()


def test_no_value_is_read_from_the_device() -> None:
    """On the meta device, which has none, reading one raises."""
    meta = torch.device("meta")
    geometry = make_geometry().to(meta)
    keys = [torch.empty(30, 2, 16, device=meta)] * 3
    node = PressInput(
        keys, keys, torch.empty(20, dtype=torch.int64, device=meta),
        torch.empty(3, 2, 20, dtype=torch.int32, device=meta), 5, 40, None, 0.25,
    )  # fmt: skip
    assert GeometryPress(geometry).score(node).shape == (3, 2, 20)
    assert score("geometry", node, 8, geometry).shape == (3, 2, 20)
    with pytest.raises((NotImplementedError, RuntimeError)):
        bool(geometry.centres.any())


def test_every_part_that_scores_depend_on_changes_the_digest() -> None:
    geometry = make_geometry()
    rope = geometry.rope
    others = [
        replace(geometry, centres=geometry.centres + 1),
        replace(geometry, lengths=geometry.lengths + 1),
        replace(geometry, max_offset=63),
        replace(geometry, rope=Rope(rope.inv_freq, 16, True)),
        replace(geometry, rope=Rope(rope.inv_freq / 2, 16)),
        replace(geometry, model=replace(geometry.model, checkpoint="1" * 32)),
    ]
    assert len({each.digest for each in (geometry, *others)}) == 7
    assert replace(geometry, num_tokens=5).digest == geometry.digest
