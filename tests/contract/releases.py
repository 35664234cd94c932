"""Fakes of SGLang's objects, as every supported release wants them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_evicpress.patches.compat import sglang_0_5_15, sglang_0_5_17
from sglang_evicpress.patches.compat.release import RELEASE

ROW_KERNEL = (
    "sglang.srt.mem_cache.triton_ops.common" if RELEASE is sglang_0_5_15 else "sglang.kernels.ops.memory.common"
) + ".write_req_to_token_pool_triton"
"""SGLang's kernel that writes rows."""

NO_BATCH = {"cur_batch": None, "cur_batch_for_debug": None}
"""Of a scheduler between two batches."""


class HasKV:
    """A fake request with the lengths of its KV; later releases look for these at ``req.kv``."""

    req_pool_idx: int | None
    kv_committed_freed: bool = False

    @property
    def kv(self) -> Any:
        is_gone = self.kv_committed_freed or self.req_pool_idx is None
        return None if is_gone and RELEASE is sglang_0_5_17 else self


class FakeRequest(HasKV, SimpleNamespace):
    """A request of so many attributes."""


def checkpoint(cache: Any, request: Any, *, is_chunk: bool = False) -> None:
    """Offer what a running request has computed to the tree, as SGLang does."""
    cache.cache_unfinished_req(request, chunked=is_chunk)


def end_request(cache: Any, request: Any, *, is_insert: bool) -> None:
    """End a request, or let it wait anew, as SGLang does."""
    if RELEASE is sglang_0_5_15:
        cache.cache_finished_req(request, is_insert=is_insert)
    else:
        cache.cache_finished_req(request, is_insert=is_insert, kv_len_to_handle=request.kv_allocated_len)
        request.kv_committed_freed = True


def resolved_arguments(**values: Any) -> Any:
    """A resolved ServerArgs of keywords, as ``sglang.Engine`` makes it; it loads plugins before."""
    from sglang.srt import plugins
    from sglang.srt.entrypoints.engine import Engine

    plugins.load_plugins()
    server_args: Any = Engine.server_args_class(**values)
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    return server_args
