"""Keeps the last queries of every prompt, for presses that score by attention (snapkv). Touches no kernel.

The attention backend's ``forward_extend`` gets the queries after RoPE, whatever fused the KV write before it; the last
``window`` rows of each request are copied there, layer by layer, on the device.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from sglang_evicpress.press import QueryWindow

MAX_HELD_REQUESTS = 256  # a window is kept from the prefill of a request until its node is in the tree


@dataclass(frozen=True, slots=True)
class _LayerQueries:
    """``queries`` [w, q_heads, head_dim] of one layer; ``end``: position after the last of them."""

    queries: torch.Tensor
    end: int


class QueryCapture:
    """Windows of running requests by request id; the oldest are let go beyond ``MAX_HELD_REQUESTS``."""

    active: QueryCapture | None = None
    window = 0

    def __init__(self, window: int, num_layers: int, first_layer: int) -> None:
        self.window = window
        self._num_layers = num_layers
        self._first_layer = first_layer
        self._held: OrderedDict[str, list[_LayerQueries | None]] = OrderedDict()

    @classmethod
    def install_on(cls, model_runner: Any) -> None:
        """Wrap the backend's ``forward_extend`` when some form needs queries; otherwise nothing is captured."""
        from sglang_evicpress.patches.server_args import config_of
        from sglang_evicpress.press import get_press

        config = config_of(model_runner.server_args)
        if not any(form.press and get_press(form.press).needs_queries for form in config.forms):
            cls.active = None
            return
        pool = model_runner.token_to_kv_pool
        capture = cls(config.window, pool.layer_num, pool.start_layer)
        cls.active = capture
        backend = model_runner.attn_backend
        attend = backend.forward_extend

        def forward_extend(
            q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
        ) -> Any:
            capture.observe(q, layer, forward_batch)
            return attend(q, k, v, layer, forward_batch, *args, **kwargs)

        backend.forward_extend = forward_extend

    def observe(self, q: torch.Tensor, layer: Any, forward_batch: Any) -> None:
        """Append this pass's queries of one layer to each request's window (chunks of a prompt add up)."""
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        index = layer.layer_id - self._first_layer
        begin = 0
        ends = forward_batch.seq_lens_cpu.tolist()
        for rid, length, end in zip(forward_batch.rids, forward_batch.extend_seq_lens_cpu, ends, strict=True):
            tail = queries[begin : begin + length][-self.window :]
            begin += length
            layers = self._held.setdefault(rid, [None] * self._num_layers)
            earlier = layers[index]
            if earlier is not None and earlier.end == end - length and len(tail) < self.window:
                tail = torch.cat([earlier.queries, tail])[-self.window :]
            else:
                tail = tail.clone()
            layers[index] = _LayerQueries(tail, end)
        while len(self._held) > MAX_HELD_REQUESTS:
            self._held.popitem(last=False)

    def window_of(self, rid: str, start: int) -> QueryWindow | None:
        """The last queries of a request's prompt so far, for a node that starts at ``start``.

        None when they are not (all) there, or when all of them came before the node and so cannot have looked at it.
        """
        held = self._held.get(rid)
        if held is None:
            return None
        layers = [layer for layer in held if layer is not None]
        seen = {(len(layer.queries), layer.end) for layer in layers}
        if len(layers) < self._num_layers or len(seen) != 1:
            return None
        ((_, end),) = seen
        if end <= start:
            return None
        queries = torch.stack([layer.queries for layer in layers])
        positions = torch.arange(end - queries.shape[1], end, device=queries.device)
        return QueryWindow(queries=queries, positions=positions)

    def forget(self, rid: str) -> None:
        self._held.pop(rid, None)
