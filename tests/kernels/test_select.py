from __future__ import annotations

import math

import pytest
import torch

from sglang_evicpress.kernels.select import select_survivors

BACKENDS = ("triton", "torch")


def naive(scores, num_kept):
    """Python's sort by (score, index), NaN last."""

    def order(row, index):
        score = row[index]
        return (1, 0.0, index) if math.isnan(score) else (0, -score, index)

    rows = [
        [sorted(sorted(range(len(row)), key=lambda i: order(row, i))[:num_kept]) for row in head]
        for head in scores.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int32).view(*scores.shape[:2], num_kept)


def random_scores(kind, n):
    scores = torch.randn(2, 2, n)
    if kind == "ties":
        return scores.round()
    if kind == "constant":
        return torch.full_like(scores, 0.25)
    if kind == "special":
        values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, 1.0])
        return values[torch.randint(0, len(values), scores.shape)]
    return scores


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["distinct", "ties", "constant", "special"])
@pytest.mark.parametrize("n", [1, 5, 16, 97, 150])
def test_select_survivors_equals_a_sort_by_score_then_index(device, backend, kind, n):
    scores = random_scores(kind, n)
    for num_kept in sorted({0, 1, n // 5, n // 2, n}):
        actual = select_survivors(scores.to(device), num_kept, backend=backend)
        assert actual.dtype == torch.int32
        assert torch.equal(actual.cpu(), naive(scores, num_kept))


@pytest.mark.parametrize("backend", BACKENDS)
def test_select_survivors_counts_ties_across_blocks(device, backend):
    scores = torch.randint(0, 3, (1, 1, 5000)).float()
    for num_kept in (10, 2500, 4999):
        actual = select_survivors(scores.to(device), num_kept, backend=backend)
        assert torch.equal(actual.cpu(), naive(scores, num_kept))


@pytest.mark.parametrize("backend", BACKENDS)
def test_select_survivors_reads_scores_that_are_not_contiguous(device, backend):
    scores = torch.randn(2, 40, 3).transpose(1, 2)
    assert torch.equal(select_survivors(scores.to(device), 7, backend=backend).cpu(), naive(scores, 7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_of_nothing_is_nothing(device, backend):
    assert select_survivors(torch.empty(2, 3, 0).to(device), 0, backend=backend).shape == (2, 3, 0)


@pytest.mark.parametrize("num_kept", [-1, 6])
def test_select_survivors_refuses_to_keep_more_than_there_is_or_less_than_none(num_kept):
    with pytest.raises(ValueError, match="num_kept is .*: expected between 0 and 5"):
        select_survivors(torch.zeros(1, 1, 5), num_kept)


def test_select_survivors_refuses_scores_of_another_type():
    with pytest.raises(ValueError, match="float32"):
        select_survivors(torch.zeros(1, 1, 5, dtype=torch.float64), 1)
