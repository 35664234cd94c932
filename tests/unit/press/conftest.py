"""Nodes in a small pool, made the way the presses' tests need them."""

from __future__ import annotations

import pytest
import torch

from sglang_evicpress.press import PressInput, QueryWindow

NUM_LAYERS, NUM_HEADS, GROUP, HEAD_DIM = 3, 2, 2, 16


class NodeMaker:
    """Makes nodes whose contents depend on ``seed`` and whose place in the pool depends on ``slot_seed``."""

    def __call__(
        self,
        num_tokens: int,
        *,
        num_slots: int | None = None,
        page_size: int = 1,
        start: int = 0,
        window: tuple[int, int] | None = None,
        seed: int = 0,
        slot_seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> PressInput:
        """``num_slots`` below ``num_tokens`` makes a compressed node: survivors of its own per (layer, head).

        The first four tokens survive. ``window`` is the (first, end) absolute positions of the queries, by
        default the node's last 32 tokens.
        """
        n = num_tokens if num_slots is None else num_slots
        contents = torch.Generator().manual_seed(seed)
        shape = (NUM_LAYERS, n, NUM_HEADS, HEAD_DIM)
        keys, values = (torch.randn(shape, generator=contents).to(dtype) for _ in range(2))
        priority = torch.rand(NUM_LAYERS, NUM_HEADS, num_tokens, generator=contents)
        priority[..., :4] = 2.0
        positions = start + priority.topk(n, dim=-1).indices.sort(dim=-1).values.to(torch.int32)
        first, end = window or (max(start, start + num_tokens - 32), start + num_tokens)
        queries = torch.randn(NUM_LAYERS, end - first, NUM_HEADS * GROUP, HEAD_DIM, generator=contents)

        num_pages = -(-n // page_size)
        pages = torch.randperm(num_pages + 3, generator=torch.Generator().manual_seed(slot_seed))[:num_pages]
        slots = (pages.view(-1, 1) * page_size + torch.arange(page_size)).flatten()[:n]
        pool_shape = (NUM_LAYERS, (num_pages + 3) * page_size, NUM_HEADS, HEAD_DIM)
        pools = []
        for content in (keys, values):
            pool = torch.full(pool_shape, 1e3, dtype=dtype)
            pool[:, slots] = content
            pools.append(list(pool))
        return PressInput(
            k_buffers=pools[0],
            v_buffers=pools[1],
            slots=slots,
            positions=positions,
            start=start,
            num_tokens=num_tokens,
            window=QueryWindow(queries.to(dtype), torch.arange(first, end)),
            scale=HEAD_DIM**-0.5,
        )


@pytest.fixture
def make_node() -> NodeMaker:
    return NodeMaker()
