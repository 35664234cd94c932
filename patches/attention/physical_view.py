"""View of a batch whose KV lengths are those of compact rows."""

from __future__ import annotations

import copy

import torch

from sglang_evicpress.patches.attention.request_holes import RequestHoles
from sglang_evicpress.patches.attention.types import ForwardBatch


def physical_view(forward_batch: ForwardBatch, table: RequestHoles) -> ForwardBatch:
    """The batch as attention must see it: every KV length less the holes of its row; the batch itself when there are
    none.

    Positions stay logical. A finished request can still be in the batch in flight, hence the clamps: KV length >= 1,
    prefix >= 0. Nothing here waits for the device: host lengths come from the host mirror of the table.
    """
    if getattr(forward_batch, "is_physical_view", False):  # SGLang's eager planning calls the one for graphs
        return forward_batch
    batch_size = forward_batch.batch_size
    holes = (table.batch + [0] * batch_size)[:batch_size]
    if not any(holes):
        return forward_batch
    view = copy.copy(forward_batch)
    view.is_physical_view = True
    on_device = table.device[forward_batch.req_pool_indices]
    on_host = torch.tensor(holes, dtype=torch.int64)
    extend = forward_batch.forward_mode.is_extend()
    view.seq_lens = _less(forward_batch.seq_lens, on_device, extend)
    if forward_batch.seq_lens_cpu is not None:
        lens = forward_batch.seq_lens_cpu
        view.seq_lens_cpu = _less(lens, on_host[: len(lens)], extend)
        view.seq_lens_sum = int(view.seq_lens_cpu.sum())
    prefix_lens = getattr(forward_batch, "extend_prefix_lens", None)
    if prefix_lens is not None:
        view.extend_prefix_lens = (prefix_lens - on_device.to(prefix_lens.dtype)).clamp_(min=0)
    prefix_lens_cpu = getattr(forward_batch, "extend_prefix_lens_cpu", None)
    if prefix_lens_cpu is not None:
        view.extend_prefix_lens_cpu = [
            max(0, length - gap) for length, gap in zip(prefix_lens_cpu, holes, strict=False)
        ]
    return view


def _less(lens: torch.Tensor, holes: torch.Tensor, extend: bool) -> torch.Tensor:
    """Physical KV lengths. Full prefill graphs pad with sequences of no length, which keep it."""
    return (lens - holes.to(lens.dtype)).clamp_(min=lens.clamp(max=1) if extend else 1)
