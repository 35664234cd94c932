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

MAX_HELD_REQUESTS = 64  # a window waits from the prefill of a request until its node is in the tree
POOL_SHARE = 64  # all windows that nodes keep take at most this part of the pool's bytes


@dataclass(frozen=True, slots=True)
class _LayerQueries:
    """``queries`` [w, q_heads, head_dim] of one layer; ``end``: position after the last of them."""

    queries: torch.Tensor
    end: int


class QueryCapture:
    """Windows of running requests by request id, and those of nodes by key; both bounded, the oldest go first."""

    active: QueryCapture | None = None

    def __init__(self, window: int, num_layers: int, first_layer: int, max_bytes: int) -> None:
        self.window = window
        self._num_layers = num_layers
        self._first_layer = first_layer
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, list[_LayerQueries | None]] = OrderedDict()
        self._kept: OrderedDict[int, QueryWindow] = OrderedDict()
        self._kept_bytes = 0
        self._next_key = 0
        self._batch: list[tuple[str, int, int]] = []

    @classmethod
    def install_on(cls, model_runner: Any) -> None:
        """Wrap the backend's ``forward_extend`` when some form needs queries; otherwise nothing is captured."""
        from sglang_evicpress.patches.server_args import config_of
        from sglang_evicpress.press import get_press

        config = config_of(model_runner.server_args)
        if not any(form.press and get_press(form.press).needs_queries for form in config.menu_forms):
            cls.active = None
            return
        pool = model_runner.token_to_kv_pool
        row_bytes = pool.head_num * pool.head_dim * pool.store_dtype.itemsize
        pool_bytes = 2 * pool.layer_num * pool.size * row_bytes
        capture = cls(config.window, pool.layer_num, pool.start_layer, pool_bytes // POOL_SHARE)
        cls.active = capture
        backend = model_runner.attn_backend
        attend = backend.forward_extend

        def forward_extend(
            q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
        ) -> Any:
            capture.observe(q, layer)
            return attend(q, k, v, layer, forward_batch, *args, **kwargs)

        backend.forward_extend = forward_extend

    def begin_batch(self, batch: Any) -> None:
        """Note whose prompts the coming pass computes; capture and warm-up passes come without.

        A decoding request in a mixed batch is left out: its one query says nothing of its prompt.
        """
        self._batch = []
        if batch.forward_mode.is_extend():
            decoding = {req.rid for req in batch.decoding_reqs or ()}
            ends = batch.seq_lens_cpu.tolist()
            for req, length, end in zip(batch.reqs, batch.extend_lens, ends, strict=True):
                self._batch.append(("" if req.rid in decoding else req.rid, length, end))

    def observe(self, q: torch.Tensor, layer: Any) -> None:
        """Append this pass's queries of one layer to each request's window (chunks of a prompt add up)."""
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if len(queries) != sum(length for _, length, _ in self._batch):
            return  # not the batch that was announced: a graph being captured or warmed up
        index = layer.layer_id - self._first_layer
        begin = 0
        for rid, length, end in self._batch:
            tail = queries[begin : begin + length][-self.window :]
            begin += length
            if not rid:
                continue
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

    def keep(self, rid: str, start: int) -> tuple[int | None, list[int]]:
        """Keep the window of a request for a node: the key under which ``kept`` finds it, None without a window, and
        the keys of those that had to make room (its own too, if it alone is too large)."""
        window = self.window_of(rid, start)
        lost: list[int] = []
        if window is None:
            return None, lost
        self._next_key += 1
        self._kept[self._next_key] = window
        self._kept_bytes += window.queries.nbytes
        while self._kept_bytes > self._max_bytes and self._kept:
            key, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.queries.nbytes
            lost.append(key)
        return self._next_key, lost

    def kept(self, key: int | None) -> QueryWindow | None:
        """The window kept under ``key``, None once it had to make room."""
        return None if key is None else self._kept.get(key)

    def forget(self, rid: str) -> None:
        """Let a request's window go: its prompt is in the tree, or the request is gone."""
        self._held.pop(rid, None)
