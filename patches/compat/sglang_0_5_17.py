"""SGLang 0.5.17: ``req.kv`` is there while a request holds KV, and a round answers with a plan."""

from __future__ import annotations

from typing import Protocol

from sglang_evicpress.patches.tree.types import Batch

ALLOCATION = "sglang.srt.mem_cache.allocation"
EVICTS_SHORTFALL = True  # since 0.5.17
KEY_FIELDS = frozenset({"token_ids", "extra_key", "is_bigram", "limit"})
REQUEST_FIELDS = frozenset({"req_pool_idx", "cache_protected_len", "kv_committed_len", "kv"})
KV_FIELDS = frozenset({"kv_allocated_len"})


class KVInfo(Protocol):
    """SGLang's ReqKvInfo."""

    kv_allocated_len: int


class RequestWithKV(Protocol):
    """SGLang's Req."""

    kv: KVInfo | None
    kv_committed_len: int


class NextBatchPlan(Protocol):
    """SGLang's NextBatchPlan."""

    batch_to_run: Batch | None


class SchedulerWithBatch(Protocol):
    """SGLang's Scheduler."""

    cur_batch_for_debug: object


def holds_kv(req: RequestWithKV) -> bool:
    return req.kv is not None


def allocated_len(req: RequestWithKV) -> int:
    return 0 if req.kv is None else req.kv.kv_allocated_len


def shorten(req: RequestWithKV, num_tokens: int) -> None:
    req.kv_committed_len -= num_tokens
    if req.kv is not None:
        req.kv.kv_allocated_len -= num_tokens


def batch_of(plan: NextBatchPlan) -> Batch | None:
    return plan.batch_to_run


def current_batch(scheduler: SchedulerWithBatch) -> object:
    return scheduler.cur_batch_for_debug
