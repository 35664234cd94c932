"""RoPE and its inverse, against rotations written out one pair of dimensions at a time."""

from __future__ import annotations

import cmath
from itertools import product

import pytest
import torch
from tests.unit.geometry.made import make_rope

from sglang_evicpress.geometry.rope import Rope

KINDS = {
    "whole": make_rope(16),
    "interleaved": make_rope(16, is_interleaved=True),
    "partial": make_rope(16, 3),
    "partial-interleaved": make_rope(16, 5, is_interleaved=True),
    "yarn": make_rope(16, factor=1.25),
    "partial-yarn": make_rope(20, 4, factor=0.7),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def rope(request: pytest.FixtureRequest) -> Rope:
    found: Rope = request.param
    return found


def rotated(rope: Rope, head: list[float], position: int) -> list[float]:
    """One head by the definition, in float64."""
    turned = list(head)
    for band, freq in enumerate(rope.inv_freq.tolist()):
        one, other = (2 * band, 2 * band + 1) if rope.is_interleaved else (band, band + rope.num_turning)
        value = complex(head[one], head[other]) * rope.factor * cmath.exp(1j * freq * position)
        turned[one], turned[other] = value.real, value.imag
    return turned


def test_it_turns_pairs_of_dimensions_by_the_position(rope: Rope) -> None:
    heads = torch.randn(5, 2, rope.head_dim, dtype=torch.float64)
    positions = torch.tensor([0, 1, 17, 4000, 100_000])
    expected = [
        [rotated(rope, head, position) for head in of_token]
        for of_token, position in zip(heads.tolist(), positions.tolist(), strict=True)
    ]
    torch.testing.assert_close(rope.apply(heads, positions[:, None]), torch.tensor(expected, dtype=torch.float64))


def test_undone_it_gives_back_what_was_there_before(rope: Rope) -> None:
    positions = torch.tensor([[0], [3], [511], [131_071]])
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        heads = torch.randn(4, 3, rope.head_dim, dtype=dtype)
        back = rope.undo(rope.apply(heads, positions), positions)
        torch.testing.assert_close(back, heads, atol=tolerance, rtol=0)


def test_splitting_and_joining_loses_nothing(rope: Rope) -> None:
    heads = torch.randn(4, rope.head_dim)
    assert torch.equal(rope.join(*rope.split(heads)), heads)


def test_lengths_of_bands_change_by_the_factor_alone(rope: Rope) -> None:
    heads = torch.randn(6, rope.head_dim, dtype=torch.float64)
    before, after = rope.lengths(heads), rope.lengths(rope.apply(heads, torch.arange(6)))
    assert before.shape == (6, rope.num_bands)
    num = rope.num_turning
    torch.testing.assert_close(after[:, :num], before[:, :num] * rope.factor)
    assert torch.equal(after[:, num:], before[:, num:])


def test_a_distance_is_all_that_a_product_depends_on(rope: Rope) -> None:
    query, key = torch.randn(2, rope.head_dim, dtype=torch.float64)
    products = [
        rope.apply(query, torch.tensor(at + 9)) @ rope.apply(key, torch.tensor(at)) for at in (0, 5, 1000, 60_000)
    ]
    torch.testing.assert_close(torch.stack(products), products[0].expand(4))


@pytest.mark.parametrize(
    ("freq", "head_dim", "factor", "words"),
    [
        (torch.ones(4, dtype=torch.float64), 16, 1.0, "inv_freq is torch.float64"),
        (torch.ones(2, 2), 16, 1.0, r"\(2, 2\): expected torch.float32 \[bands\]"),
        (torch.ones(9), 16, 1.0, "9 bands in heads of 16: expected 1 to 8"),
        (torch.ones(0), 16, 1.0, "0 bands"),
        (torch.ones(4), 16, 0.0, "the factor of RoPE is 0.0"),
    ],
)
def test_what_is_no_rope_is_refused(freq: torch.Tensor, head_dim: int, factor: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rope(freq, head_dim, factor=factor)


def test_every_kind_is_another_one() -> None:
    heads, position = torch.randn(16), torch.tensor(5)
    same = [rope for rope in KINDS.values() if rope.head_dim == 16]
    turned = [rope.apply(heads, position) for rope in same]
    pairs = [(one, other) for one, other in product(range(len(same)), repeat=2) if one < other]
    assert all(not torch.allclose(turned[one], turned[other]) for one, other in pairs)
