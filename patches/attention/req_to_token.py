"""Compact request rows: ``req_to_token`` holds physical slots, one integer per row holds its holes.

SGLang keeps counting logically. Here, and only here, the logical lengths of a batch become physical ones while its row
is written; ``HOLES[row]`` says by how much. Touches the functions that give a batch its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress.device import to_device
from sglang_evicpress.patches.attention.prompt_queries import AnnouncedBatch, PromptQueries
from sglang_evicpress.patches.attention.types import RowPool
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.tree.node_kv import PrefixView


class RequestHoles:
    """Holes per request row: one tensor for kernels on the pool's device and its mirror for host-side planning.

    ``device``: int64 [rows]; ``host``: int64 [rows] on the CPU. Both are written when a row is, on the scheduler thread
    and its stream, i.e. under the same barrier that guards ``req_to_token`` itself.
    """

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        self.device = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.host = self.device if self.device.device.type == "cpu" else torch.zeros(num_rows, dtype=torch.int64)
        self._with_holes: set[int] = set()
        self.batch: list[int] = []

    def write(self, rows_device: torch.Tensor, rows_host: torch.Tensor, holes: Sequence[int]) -> torch.Tensor:
        """Set the holes of these rows; returns them as a device tensor (copied without waiting for the device)."""
        host = self.note(rows_host, holes)
        if self.device is self.host:
            return host
        moved = to_device(host, self.device.device)
        self.device[rows_device] = moved
        return moved

    def note(self, rows_host: torch.Tensor, holes: Sequence[int]) -> torch.Tensor:
        """Set what the host knows of these rows; returns ``holes`` as a tensor."""
        for row, count in zip(rows_host.tolist(), holes, strict=True):
            if count:
                self._with_holes.add(row)
            else:
                self._with_holes.discard(row)
        values = torch.tensor(holes, dtype=torch.int64)
        self.host[rows_host] = values
        return values

    def add(self, rows: Sequence[int], num_holes: int, rows_device: torch.Tensor) -> None:
        """So many more tokens of each row have no slot; ``rows_device``: the same rows, int64 on the device."""
        self._with_holes.update(rows)
        self.host[torch.tensor(rows)] += num_holes
        if self.device is not self.host:
            self.device.index_add_(0, rows_device, torch.full_like(rows_device, num_holes))

    def begin_batch(self, rows_host: torch.Tensor | None) -> None:
        """Remember the holes of the batch that is about to run, in batch order."""
        self.batch = [] if rows_host is None or not self._with_holes else self.host[rows_host].tolist()

    def has_holes(self, rows_host: torch.Tensor) -> bool:
        """True if any of these rows has holes. Asked in every step: an operation on tensors takes 20 microseconds."""
        return bool(self._with_holes) and not self._with_holes.isdisjoint(rows_host.tolist())


class AdoptedViews(Protocol):
    """Prefixes that requests take from the cache."""

    def adopt(self, req: object) -> PrefixView: ...


class AdoptingCache(Protocol):
    """The cache, which knows what each request took from it."""

    views: AdoptedViews


class PrefixCache(Protocol):
    """The cache, which knows the slots of a request's prefix."""

    def prefix_device_indices(self, req: object) -> torch.Tensor: ...


class PrefixBatch(Protocol):
    """A batch whose prefixes are read."""

    tree_cache: PrefixCache


class ExtendBatch(Protocol):
    """A batch whose prompts get their slots."""

    reqs: Sequence[object]
    tree_cache: AdoptingCache


class DecodeBatch(Protocol):
    """A batch whose next tokens get their slots."""

    req_pool_indices: torch.Tensor
    req_pool_indices_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor


_table: RequestHoles | None = None
_extending: list[ExtendBatch] = []


def attach(table: RequestHoles) -> None:
    """Make ``table`` the one that the hooks below fill (one model runner per process has the target pool)."""
    global _table
    _table = table


def table() -> RequestHoles:
    if _table is None:
        raise RuntimeError("evicpress: the table of holes is not there yet; no attention backend has been initialised")
    return _table


def _around_alloc_for_extend(original: Callable[..., object], batch: ExtendBatch) -> object:
    """AROUND ``alloc_for_extend``: the write below needs the requests, which its arguments do not carry."""
    _extending.append(batch)
    try:
        return original(batch)
    finally:
        _extending.pop()


def _around_prefix_slots(original: Callable[..., object], batch: PrefixBatch, req: object) -> torch.Tensor:
    """AROUND ``_prefix_kv_indices``, which reads the row of a request that has one by its logical length."""
    return batch.tree_cache.prefix_device_indices(req)


def _around_write_cache_indices(
    original: Callable[..., None],
    out_cache_loc: torch.Tensor,
    rows: torch.Tensor,
    rows_cpu: torch.Tensor,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    extend_lens: torch.Tensor,
    extend_lens_cpu: torch.Tensor,
    prefix_tensors: list[torch.Tensor],
    req_to_token_pool: RowPool,
) -> None:
    """AROUND ``write_cache_indices``: write physical, left-justified rows and record their holes."""
    batch = _extending[-1]
    cache = batch.tree_cache
    views = [cache.views.adopt(req) for req in batch.reqs]
    holes = [view.holes for view in views]
    slots = [view.slots for view in views]
    if not any(holes) and not table().has_holes(rows_cpu):  # the usual case, and a dozen small operations
        lengths = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, extend_lens, extend_lens_cpu
        original(out_cache_loc, rows, rows_cpu, *lengths, slots, req_to_token_pool)
        return
    holes_device = table().write(rows, rows_cpu, holes)
    holes_cpu = torch.tensor(holes, dtype=torch.int64)
    original(
        out_cache_loc,
        rows,
        rows_cpu,
        prefix_lens - holes_device.to(prefix_lens.dtype),
        prefix_lens_cpu - holes_cpu,
        seq_lens - holes_device.to(seq_lens.dtype),
        seq_lens_cpu - holes_cpu,
        extend_lens,
        extend_lens_cpu,
        slots,
        req_to_token_pool,
    )
    # A stale tail between the physical and the logical length would look like a use after free to SGLang's debug
    # checker.
    for row, seq_len, num_holes in zip(rows_cpu.tolist(), seq_lens_cpu.tolist(), holes, strict=True):
        if num_holes:
            req_to_token_pool.req_to_token[row, seq_len - num_holes :] = 0


def _around_alloc_for_decode(original: Callable[..., object], batch: DecodeBatch, token_per_req: int) -> object:
    """AROUND ``alloc_for_decode``: the last slot of a row, and the place of the next, are physical."""
    rows = table()
    if not rows.has_holes(batch.req_pool_indices_cpu):
        return original(batch, token_per_req)
    seq_lens, seq_lens_cpu = batch.seq_lens, batch.seq_lens_cpu
    holes_cpu = rows.host[batch.req_pool_indices_cpu]
    batch.seq_lens = seq_lens - rows.device[batch.req_pool_indices].to(seq_lens.dtype)
    batch.seq_lens_cpu = seq_lens_cpu - holes_cpu.to(seq_lens_cpu.dtype)
    try:
        return original(batch, token_per_req)
    finally:
        batch.seq_lens, batch.seq_lens_cpu = seq_lens, seq_lens_cpu


def _after_init_new(result: object, cls: object, batch: AnnouncedBatch, model_runner: object, **_: object) -> None:
    """AFTER ``ForwardBatch.init_new``: a ForwardBatch has no host copy of its rows; copies lose attributes."""
    if _table is not None:
        _table.begin_batch(batch.req_pool_indices_cpu)
    if PromptQueries.active is not None:
        PromptQueries.active.begin_batch(batch)


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    allocation = RELEASE.ALLOCATION + "."
    registry.register(allocation + "alloc_for_extend", _around_alloc_for_extend, hook_type.AROUND)
    registry.register(allocation + "write_cache_indices", _around_write_cache_indices, hook_type.AROUND)
    if RELEASE.PREFIX_SLOTS:
        registry.register(allocation + RELEASE.PREFIX_SLOTS, _around_prefix_slots, hook_type.AROUND)
    registry.register(allocation + "alloc_for_decode", _around_alloc_for_decode, hook_type.AROUND)
    registry.register(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", _after_init_new, hook_type.AFTER
    )
