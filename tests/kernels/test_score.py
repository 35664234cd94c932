from __future__ import annotations

import pytest
import torch

from sglang_evicpress.kernels.score import key_difference, key_norm, page_mean, value_key_ratio

BACKENDS = ("triton", "torch")


def assert_near(actual, expected, *, rtol=1e-5, atol=1e-6):
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("backend", BACKENDS)
def test_key_norm_is_the_norm_in_double_precision(pool, device, backend):
    here = pool.to(device)
    expected = pool.rows(pool.k).square().sum(-1).sqrt()
    assert_near(key_norm(here.k, here.slots, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_value_key_ratio_clamps_the_norm_of_the_key_only(pool, device, backend):
    here = pool.to(device)
    key, value = (pool.rows(layers).square().sum(-1).sqrt() for layers in (pool.k, pool.v))
    expected = value / key.clamp(min=1e-6)
    assert_near(value_key_ratio(here.k, here.v, here.slots, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_key_difference_is_minus_the_cosine_to_the_mean_direction(pool, device, backend):
    here = pool.to(device)
    keys = pool.rows(pool.k)
    norms = keys.square().sum(-1, keepdim=True).sqrt()
    anchor = (keys / norms.clamp(min=1e-12)).sum(2, keepdim=True) / max(1, keys.shape[2])
    dot = (keys * anchor).sum(-1)
    length = anchor.square().sum(-1).sqrt().clamp(min=1e-8)
    expected = -dot / (norms.squeeze(-1).clamp(min=1e-8) * length)
    assert_near(key_difference(here.k, here.slots, backend=backend), expected, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_key_difference_adds_the_anchor_over_many_chunks(device, backend):
    keys = torch.randn(1300, 1, 16)
    slots = torch.randperm(1300)
    actual = key_difference([keys.to(device)], slots.to(device), backend=backend)
    rows = keys[slots, 0].double()
    anchor = (rows / rows.norm(dim=-1, keepdim=True)).mean(0)
    assert_near(actual[0, 0], -(rows @ anchor) / (rows.norm(dim=-1) * anchor.norm()), atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("n", [0, 1, 5, 16, 97, 150])
def test_page_mean_divides_a_partial_page_by_its_own_tokens(device, backend, n, page_size):
    scores = torch.randn(2, 3, n)
    actual = page_mean(scores.to(device), page_size, backend=backend)
    pages = [scores[..., i : i + page_size].double().mean(-1) for i in range(0, n, page_size)]
    expected = torch.stack(pages, -1) if pages else torch.empty(2, 3, 0, dtype=torch.float64)
    assert_near(actual, expected)


def test_page_mean_refuses_a_page_of_no_tokens():
    with pytest.raises(ValueError, match="page_size is .*: expected at least 1"):
        page_mean(torch.zeros(1, 1, 4), 0)


def test_page_mean_refuses_scores_of_another_type():
    with pytest.raises(ValueError, match="float32"):
        page_mean(torch.zeros(1, 1, 4, dtype=torch.float16), 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", [key_norm, value_key_ratio, key_difference])
def test_a_key_that_is_no_number_has_no_score(device, backend, score):
    """Not a small one, by which it would be kept first."""
    keys, values = torch.randn(40, 1, 16), torch.randn(40, 1, 16)
    keys[7, 0, 3] = torch.nan
    rows = ([keys.to(device)],) if score is not value_key_ratio else ([keys.to(device)], [values.to(device)])
    scores = score(*rows, torch.arange(40, device=device), backend=backend)[0, 0]
    assert scores[7].isnan() and (score is key_difference or scores.isnan().sum() == 1)
