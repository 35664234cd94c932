"""Keeps the last queries of every prompt, for presses that score by attention (snapkv). Touches no kernel.

The attention backend's ``forward_extend`` gets the queries after RoPE, whatever fused the KV write before it; the last
``window`` rows of every request are copied there, on the device, by one operation per layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_evicpress.device import to_device
from sglang_evicpress.patches.attention.types import AttentionLayer, ForwardMode, ModelRunner
from sglang_evicpress.patches.kv_flags import config_of
from sglang_evicpress.patches.tree.types import Request
from sglang_evicpress.press import QueryWindow, get_press

MAX_HELD_REQUESTS = 64
"""Or those of two passes, if these have more: a window waits from the prefill of a request until its node is in the
tree, while the next pass is computed already."""

POOL_SHARE = 64  # all windows that nodes keep take at most this part of the pool's bytes


@dataclass(frozen=True, slots=True)
class _Held:
    """``queries`` [L, w, q_heads, head_dim] of one request; ``end``: position after the last of them."""

    queries: torch.Tensor
    end: int


class _Pass:
    """The last queries of all requests of one pass, one behind the other: ``queries`` [L, n, q_heads, head_dim], of
    which ``tokens`` [n] says where they are among those of the pass. ``parts``: request id, how many of them are its
    own, and where its tokens of this pass begin and end in its text."""

    def __init__(self, batch: list[tuple[str, int, int]], window: int, num_layers: int, like: torch.Tensor) -> None:
        tokens: list[int] = []
        self.parts: list[tuple[str, int, int, int]] = []
        begin = 0
        for rid, length, end in batch:
            count = min(length, window)
            begin += length
            if rid and count:
                tokens += range(begin - count, begin)
                self.parts.append((rid, count, end - length, end))
        self.tokens = to_device(torch.tensor(tokens, dtype=torch.int64), like.device)
        self.queries = like.new_empty((num_layers, len(tokens), *like.shape[1:]))
        self.seen: set[int] = set()


class AnnouncedBatch(Protocol):
    """SGLang's ScheduleBatch, before its forward pass."""

    forward_mode: ForwardMode
    reqs: Sequence[Request]
    decoding_reqs: Sequence[Request] | None
    extend_lens: Sequence[int]
    seq_lens_cpu: torch.Tensor
    req_pool_indices_cpu: torch.Tensor


class PromptQueries:
    """Windows of running requests by request id, and those of nodes by key; both bounded, the oldest go first."""

    active: PromptQueries | None = None

    def __init__(self, window: int, num_layers: int, first_layer: int, max_bytes: int) -> None:
        self.window = window
        self._num_layers = num_layers
        self._first_layer = first_layer
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._kept: OrderedDict[int, QueryWindow] = OrderedDict()
        self._kept_bytes = 0
        self._next_key = 0
        self._batch: list[tuple[str, int, int]] = []
        self._pass: _Pass | None = None

    @classmethod
    def install_on(cls, model_runner: ModelRunner) -> None:
        """Wrap the backend's ``forward_extend`` when some form needs queries; otherwise nothing is captured."""
        config = config_of(model_runner.server_args)
        if not any(form.press and get_press(form.press).needs_queries for form in config.menu_forms):
            cls.active = None
            return
        pool = model_runner.token_to_kv_pool
        row_bytes = pool.head_num * pool.head_dim * pool.store_dtype.itemsize
        pool_bytes = 2 * pool.layer_num * pool.size * row_bytes
        prompt_queries = cls(config.window, pool.layer_num, pool.start_layer, pool_bytes // POOL_SHARE)
        cls.active = prompt_queries
        backend = model_runner.attn_backend
        attend = backend.forward_extend

        def forward_extend(
            q: torch.Tensor, k: object, v: object, layer: AttentionLayer, *args: object, **kwargs: object
        ) -> torch.Tensor:
            prompt_queries.observe(q, layer)
            return attend(q, k, v, layer, *args, **kwargs)

        backend.forward_extend = forward_extend

    def begin_batch(self, batch: AnnouncedBatch) -> None:
        """Note whose prompts the coming pass computes; capture and warm-up passes come without.

        A decoding request in a mixed batch is left out: its one query says nothing of its prompt.
        """
        self._batch, self._pass = [], None
        if batch.forward_mode.is_extend():
            decoding = {req.rid for req in batch.decoding_reqs or ()}
            ends = batch.seq_lens_cpu.tolist()
            for req, length, end in zip(batch.reqs, batch.extend_lens, ends, strict=True):
                self._batch.append(("" if req.rid in decoding else req.rid, length, end))

    def observe(self, q: torch.Tensor, layer: AttentionLayer) -> None:
        """Copy this pass's queries of one layer; with the last of them they become the requests' windows."""
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if not self._batch or len(queries) != sum(length for _, length, _ in self._batch):
            return  # not the batch that was announced: a graph being captured or warmed up
        if self._pass is None:
            self._pass = _Pass(self._batch, self.window, self._num_layers, queries)
        now, index = self._pass, layer.layer_id - self._first_layer
        torch.index_select(queries, 0, now.tokens, out=now.queries[index])
        now.seen.add(index)
        if len(now.seen) == self._num_layers:
            self._hold(now)
            self._batch, self._pass = [], None

    def _hold(self, now: _Pass) -> None:
        """Every request gets its part, in memory of its own: the others' is not kept for it. Chunks of a prompt add
        up."""
        parts = now.queries.split([count for _, count, _, _ in now.parts], dim=1)
        for (rid, count, begin, end), part in zip(now.parts, parts, strict=True):
            earlier = self._held.get(rid)
            if earlier is not None and earlier.end == begin and count < self.window:
                part = torch.cat([earlier.queries[:, count - self.window :], part], dim=1)
            elif len(parts) > 1:
                part = part.clone()
            self._held[rid] = _Held(part, end)
        while len(self._held) > max(MAX_HELD_REQUESTS, 2 * len(parts)):
            self._held.popitem(last=False)

    def window_of(self, rid: str, start: int) -> QueryWindow | None:
        """The last queries of a request's prompt so far, for a node that starts at ``start``.

        None when they are not there, or when all of them came before the node and so cannot have looked at it.
        """
        queries = self._held.get(rid)
        if queries is None or queries.end <= start:
            return None
        positions = torch.arange(queries.end - queries.queries.shape[1], queries.end, device=queries.queries.device)
        return QueryWindow(queries=queries.queries, positions=positions)

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
