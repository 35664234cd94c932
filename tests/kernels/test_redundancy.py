from __future__ import annotations

import pytest
import torch

from sglang_evicpress.kernels.redundancy import redundancy

BACKENDS = ("triton", "torch")


def mean_cosine(pool, recent):
    """The n x W matrix that the kernel never makes, in float64, and its mean."""
    rows = pool.rows(pool.k)
    norms = rows.norm(dim=-1, keepdim=True)
    directions = torch.where(norms > 0, rows / norms, 0.0)
    chosen = directions.gather(2, recent.long().unsqueeze(-1).expand(-1, -1, -1, rows.shape[-1]))
    return (directions @ chosen.transpose(2, 3)).mean(-1).float()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_recent", [1, 8, 100])
def test_redundancy_is_the_mean_cosine_with_the_recent_keys_of_the_head(case, pool, device, backend, num_recent):
    recent = torch.rand(2, case.num_heads, case.n).argsort(-1)[..., :num_recent].int()
    here = pool.to(device)
    got = redundancy(here.k, here.slots, recent.to(device), backend=backend).cpu()
    want = mean_cosine(pool, recent) if case.n else torch.empty(2, case.num_heads, 0)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_repeated_key_is_redundant_and_an_opposite_one_is_not(device, backend):
    layer = torch.zeros(4, 1, 16, device=device)
    layer[:, 0, 0] = torch.tensor([3.0, -0.5, 0.0, 7.0])
    recent = torch.tensor([[[3]]], dtype=torch.int32, device=device)
    got = redundancy([layer], torch.arange(4, device=device), recent, backend=backend)
    assert got.tolist() == [[[1.0, -1.0, 0.0, 1.0]]]


@pytest.mark.parametrize(
    ("recent", "message"),
    [
        (torch.zeros(1, 2, 1, dtype=torch.int64), "must be int32"),
        (torch.zeros(2, 1, dtype=torch.int32), "must be int32"),
        (torch.zeros(2, 2, 1, dtype=torch.int32), "does not fit 1 layers of 2 heads and 4 slots"),
        (torch.zeros(1, 2, 0, dtype=torch.int32), "does not fit"),
        (torch.zeros(1, 2, 5, dtype=torch.int32), "does not fit"),
    ],
)
def test_redundancy_refuses_recent_tokens_that_do_not_fit(recent, message):
    with pytest.raises(ValueError, match=message):
        redundancy([torch.zeros(8, 2, 16)], torch.arange(4), recent)
