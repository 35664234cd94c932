"""R nodes of n slots in one launch give what R launches give, bit for bit."""

from __future__ import annotations

import pytest
import torch

from sglang_evicpress.kernels.compact import compact
from sglang_evicpress.kernels.redundancy import redundancy
from sglang_evicpress.kernels.score import key_difference
from sglang_evicpress.kernels.window_attention import window_attention

BACKENDS = ("triton", "torch")
LAYERS, HEADS, DIM, NODES, N = 2, 2, 32, 3, 90


def pool(device: str) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    layers = [torch.randn(NODES * N + 9, HEADS, DIM).to(device) for _ in range(2 * LAYERS)]
    slots = torch.randperm(NODES * N + 9)[: NODES * N].view(NODES, N)
    return layers[:LAYERS], layers[LAYERS:], slots.to(device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compact(device: str, backend: str) -> None:
    k, v, slots = pool(device)
    chosen = torch.rand(LAYERS, HEADS, NODES, N).argsort(-1)[..., :50].sort(-1).values.int().to(device)
    alone = [[layer.clone() for layer in layers] for layers in (k, v)]
    for node in range(NODES):
        compact(*alone, slots[node], chosen[:, :, node], backend=backend)  # type: ignore[arg-type]
    compact(k, v, slots, chosen, backend=backend)  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip([*k, *v], [*alone[0], *alone[1]], strict=True))
    with pytest.raises(ValueError, match="do not fit 2 layers of 2 heads and 90 slots in 3 nodes"):
        compact(k, v, slots, chosen[:, :, :2], backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores(device: str, backend: str) -> None:
    k, _, slots = pool(device)
    recent = torch.rand(LAYERS, HEADS, NODES, N).argsort(-1)[..., :8].int().to(device)
    queries = torch.randn(LAYERS, NODES, 5, 2 * HEADS, DIM).to(device)
    at = (torch.arange(NODES)[:, None] * 7 + torch.arange(80, 85)).to(device)
    keys_at = torch.rand(LAYERS, HEADS, NODES, N).argsort(-1).int().to(device)
    differences = key_difference(k, slots, backend=backend)  # type: ignore[arg-type]
    repeated = redundancy(k, slots, recent, backend=backend)  # type: ignore[arg-type]
    attention = window_attention(queries, k, slots, at, keys_at, 0.2, backend=backend)  # type: ignore[arg-type]
    for node in range(NODES):
        one = key_difference(k, slots[node], backend=backend)  # type: ignore[arg-type]
        assert torch.equal(differences[:, :, node], one)
        one = redundancy(k, slots[node], recent[:, :, node], backend=backend)  # type: ignore[arg-type]
        assert torch.equal(repeated[:, :, node], one)
        inputs = queries[:, node], k, slots[node], at[node], keys_at[:, :, node], 0.2
        assert torch.equal(attention[:, :, node], window_attention(*inputs, backend=backend))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not fit 3 nodes"):
        window_attention(queries[:, :2], k, slots, at, keys_at, 0.2, backend=backend)  # type: ignore[arg-type]
