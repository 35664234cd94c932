"""Keeps the last queries of every running request, for scores that go by attention (tova, h2o). Touches no kernel.

``forward_extend`` and ``forward_decode`` of the attention backend get the queries after RoPE; those of the last
``window`` tokens of a row are copied to a ring on the device, at their position modulo ``window``. In a decode step
that is one indexed write per layer with device tensors only, which CUDA graphs record; without a graph it is left out
while no pass is near that would read it. Nothing is kept, and nothing wrapped, unless the server is started with such a
score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_evicpress import spawn
from sglang_evicpress.device import to_device
from sglang_evicpress.patches.attention.types import AttentionLayer, ForwardBatch, ModelRunner
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.kv_flags import config_of
from sglang_evicpress.patches.unsupported import decode_settings

POOL_SHARE = 32  # the ring takes at most this part of the pool's bytes
STEPS_AHEAD = 2  # of the host: launched before it looks at lengths again


class QueryRing:
    """``queries`` [L, rows, W, Hq, D]: of row r the query of position p is at [:, r, p % W], once p was computed."""

    active: QueryRing | None = None

    def __init__(self, queries: torch.Tensor, first_layer: int) -> None:
        self.queries = queries
        self.window = queries.shape[2]
        self.is_needed = True
        self._is_cuda = queries.is_cuda
        self._first_layer = first_layer
        self._flat = [layer.view(queries.shape[1] * self.window, -1) for layer in queries]
        self._step: torch.Tensor | None = None
        self._batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def install_on(cls, model_runner: ModelRunner) -> None:
        """Wrap the backend before graphs are captured. Raises SystemExit when the ring would be too large."""
        cls.active = None
        settings = decode_settings(config_of(model_runner.server_args))
        if not settings.reads_queries:
            return
        pool, rows = model_runner.token_to_kv_pool, model_runner.req_to_token_pool.req_to_token.shape[0]
        num_heads = model_runner.model_config.num_attention_heads // RELEASE.ranks_of(model_runner)[1]
        shape = (pool.layer_num, rows, settings.window, num_heads, pool.head_dim)
        dtype = model_runner.dtype
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        pool_bytes = 2 * pool.layer_num * pool.size * pool.head_num * pool.head_dim * pool.store_dtype.itemsize
        if num_bytes > pool_bytes // POOL_SHARE:
            raise spawn.refusal(
                f"--kv-decode-score {settings.score} would keep {num_bytes / 1e6:.1f} MB of queries for "
                f"{rows} requests, and at most 1/{POOL_SHARE} of the KV pool, {pool_bytes / POOL_SHARE / 1e6:.1f} MB, "
                "is spent on that: lower --max-running-requests"
            )
        ring = cls(torch.zeros(shape, dtype=dtype, device=pool.device), pool.start_layer)
        cls.active = ring
        backend = model_runner.attn_backend
        backend.forward_extend = ring._observing(backend.forward_extend, ring.observe_extend)
        backend.forward_decode = ring._observing(backend.forward_decode, ring.observe_decode)

    def _observing(
        self, attend: Callable[..., torch.Tensor], observe: Callable[..., None]
    ) -> Callable[..., torch.Tensor]:
        def observed(
            q: torch.Tensor,
            k: object,
            v: object,
            layer: AttentionLayer,
            forward_batch: ForwardBatch,
            *args: object,
            **kwargs: object,
        ) -> torch.Tensor:
            observe(q, layer, forward_batch)
            return attend(q, k, v, layer, forward_batch, *args, **kwargs)

        return observed

    def observe_decode(self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch) -> None:
        """Row 0 belongs to nobody: what pads a batch writes there. Where the queries of a step go is worked out at its
        first layer, on the device."""
        if not self.is_needed and not (self._is_cuda and torch.cuda.is_current_stream_capturing()):
            return  # a graph that is made now is replayed when they are needed again
        index = layer.layer_id - self._first_layer
        if index == 0 or self._step is None:
            places = (forward_batch.seq_lens - 1) % self.window
            self._step = (forward_batch.req_pool_indices * self.window + places).to(torch.int64)
        ring = self._flat[index]
        if q.dim() != 2 or q.dtype != ring.dtype:  # asked first: even what changes nothing takes its microseconds
            q = q.view(-1, ring.shape[1]).to(ring.dtype)
        ring.index_copy_(0, self._step, q)

    def observe_extend(self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch) -> None:
        """The last ``window`` queries of every request; those that decode in a mixed batch have one."""
        index = layer.layer_id - self._first_layer
        if index == 0 or self._batch is None:
            self._batch = self._places(forward_batch)
        tokens, rows, places = self._batch
        queries = q.view(-1, *self.queries.shape[3:])
        self.queries[index][rows, places] = queries[tokens].to(self.queries.dtype)

    def _places(self, forward_batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Places of the queries to keep: their index in the batch, the row they belong to, and their place
        there. Worked out on the host, once for all layers."""
        tokens: list[int] = []
        requests: list[int] = []
        places: list[int] = []
        begin = 0
        lengths, prefixes = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
        for index, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
            kept = range(max(0, length - self.window), length)
            tokens += [begin + each for each in kept]
            places += [(prefix + each) % self.window for each in kept]
            requests += [index] * len(kept)
            begin += length
        moved = to_device(torch.tensor([tokens, requests, places]), self.queries.device)
        return moved[0], forward_batch.req_pool_indices[moved[1]], moved[2]

    def windows_of(
        self, rows: Sequence[int], size: int, nums_tokens: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries of the last ``size`` tokens (at most ``window``) of rows that have ``nums_tokens`` tokens:
        [L, R, size, Hq, D], and their positions, int64 [R, size]."""
        ends, index = to_device(torch.tensor([nums_tokens, rows]), self.queries.device)
        positions = ends[:, None] + torch.arange(-size, 0, device=self.queries.device)
        return self.queries[:, index[:, None], positions % self.window], positions
