"""Fakes of SGLang's objects, as every supported release wants them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

from sglang_evicpress.patches.compat import sglang_0_5_15, sglang_0_5_17, sglang_0_5_23
from sglang_evicpress.patches.compat.release import RELEASE, REQUEST_KV

ROW_KERNEL = (
    "sglang.srt.mem_cache.triton_ops.common" if RELEASE is sglang_0_5_15 else "sglang.kernels.ops.memory.common"
) + ".write_req_to_token_pool_triton"
"""SGLang's kernel that writes rows."""

NO_BATCH = {"cur_batch": None, "cur_batch_for_debug": None}
"""Of a scheduler between two batches."""


UPDATE_SOURCES = ("disk", "distributed", "tensor", "ipc")
"""Of new weights."""

RELEASED = SimpleNamespace(req_pool_idx=None, cache_protected_len=0, kv_committed_len=0, kv_allocated_len=0)
"""Of a request that gave its row back."""


class HasKV:
    """A fake request with the lengths of its KV; later releases look for these at ``req.kv``."""

    req_pool_idx: int | None
    prefix_indices: torch.Tensor
    kv_committed_freed: bool = False
    lock: object = None
    cache_salt: str | None = None

    @property
    def kv(self) -> Any:
        is_gone = self.kv_committed_freed or self.req_pool_idx is None
        if is_gone and RELEASE is sglang_0_5_17:
            return None
        return RELEASED if self.kv_committed_freed and RELEASE is sglang_0_5_23 else self

    @property
    def prefix_len(self) -> int:
        return len(self.prefix_indices)

    @prefix_len.setter
    def prefix_len(self, num_tokens: int) -> None:
        assert num_tokens == len(self.prefix_indices)


class FakeRequest(HasKV, SimpleNamespace):
    """A request of so many attributes."""


class FakePages(SimpleNamespace):
    """An allocator of whole pages, which are freed at once: attributes of it, and for all others SGLang's own
    methods."""

    def __init__(self, **values: Any) -> None:
        settled = {"is_not_in_free_group": True, "free_group": None, "need_sort": False, "debug_mode": False}
        super().__init__(**settled, **values)

    def __getattr__(self, name: str) -> Any:
        return MethodType(getattr(PagedTokenToKVPoolAllocator, name), self)


def matched_slots(cache: Any, match: Any) -> torch.Tensor:
    """Slots of the prefix that was found on the GPU; a hole is slot 0."""
    if RELEASE is sglang_0_5_23:
        slots: torch.Tensor = cache.path_device_indices(match.last_device_node)
        assert len(slots) == match.device_prefix_len
    else:
        slots = match.device_indices
    return slots


def lock(cache: Any, request: Any) -> None:
    """Hold the last node of a request, as SGLang does before it runs."""
    if RELEASE is sglang_0_5_23:
        request.lock = cache.lock(request.last_node)
    else:
        cache.inc_lock_ref(request.last_node)


def unlock(cache: Any, request: Any) -> None:
    """Let go of it."""
    if RELEASE is sglang_0_5_23:
        cache.unlock(request.lock)
        request.lock = None
    else:
        cache.dec_lock_ref(request.last_node)


def load_back(cache: Any, request: Any, match: Any) -> int:
    """Take what is below the GPU into the prefix of a request, which holds its last node then; returns how many tokens
    are loaded."""
    loaded, last = cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request))
    if RELEASE is not sglang_0_5_23:
        request.prefix_indices = torch.cat([request.prefix_indices, loaded])
        loaded = len(loaded)
    REQUEST_KV.relock(cache, request, last)
    return int(loaded)


def checkpoint(cache: Any, request: Any, *, is_chunk: bool = False) -> None:
    """Offer what a running request has computed to the tree, as SGLang does."""
    if RELEASE is sglang_0_5_23:
        cache.checkpoint(request, up_to=len(request.get_fill_ids()))
    else:
        cache.cache_unfinished_req(request, chunked=is_chunk)


def end_request(cache: Any, request: Any, *, is_insert: bool) -> None:
    """End a request, or let it wait anew, as SGLang does."""
    if RELEASE is sglang_0_5_15:
        cache.cache_finished_req(request, is_insert=is_insert)
    elif RELEASE is sglang_0_5_23:
        assert not cache.claim_kv_row(request)
        if is_insert:
            cache.checkpoint(request, up_to=request.kv_allocated_len)
        cache.free_kv_row(request.kv, [(request.cache_protected_len, request.kv_allocated_len)])
        unlock(cache, request)
        request.kv_committed_freed = True
    else:
        cache.cache_finished_req(request, is_insert=is_insert, kv_len_to_handle=request.kv_allocated_len)
        request.kv_committed_freed = True


def tell_kv_events(cache: Any) -> None:
    """Let a tree tell of KV events from now on, as a server with ``--kv-events-config`` does from its start."""
    if RELEASE is sglang_0_5_23:
        cache.kv_events.enabled = True
    else:
        cache.enable_kv_cache_events = True
    cache.block_events.follow(cache.changes)


def updates_weights(update: Callable[[], Any]) -> dict[str, Any]:
    """Attributes of SGLang's weight updater, in the midst of a session where there are any, and its model's workers:
    whatever writes the weights is ``update``."""

    def write(*_: object, **__: object) -> Any:
        return update()

    if RELEASE is not sglang_0_5_23:
        return {"tp_worker": SimpleNamespace(**{f"update_weights_from_{source}": write for source in UPDATE_SOURCES})}
    from sglang.srt.managers.scheduler_components.weight_updater import _WeightUpdateSession

    names = ["load_weights_from_distributed", "begin_weight_update", "end_weight_update"]
    names += [f"update_weights_from_{source}" for source in UPDATE_SOURCES if source != "distributed"]
    written = SimpleNamespace(receive_weights_from_distributed=lambda **_: [], **dict.fromkeys(names, write))
    runner = SimpleNamespace(weight_updater=written)
    worker = SimpleNamespace(
        model_runner=runner,
        weight_update_runners=lambda: [("target", runner)],
        deserialize_own_rank=lambda given: given,
    )
    scheduler = SimpleNamespace(record_weight_version_change=lambda **_: None)
    return {"tp_worker": worker, "scheduler": scheduler, "_session": _WeightUpdateSession("all")}


def only_rank() -> AbstractContextManager[object]:
    """While it is open, this process is the only one of its model, where SGLang knows that of the process."""
    if RELEASE is not sglang_0_5_23:
        return nullcontext()
    from sglang.srt.runtime_context import get_parallel

    override: AbstractContextManager[object] = get_parallel().override(tp_rank=0, tp_size=1)
    return override


def resolved_arguments(**values: Any) -> Any:
    """A resolved ServerArgs of keywords, as ``sglang.Engine`` makes it; it loads plugins before."""
    from sglang.srt import plugins
    from sglang.srt.entrypoints.engine import Engine

    plugins.load_plugins()
    return resolved(Engine.server_args_class(**values))


def resolved(server_args: Any) -> Any:
    """The same ServerArgs, resolved: later releases do that at last, when they are about to use it."""
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    return server_args
