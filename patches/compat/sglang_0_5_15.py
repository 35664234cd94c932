"""SGLang 0.5.15.post1: a request has the lengths of its KV itself, and says when it gave it back."""

from __future__ import annotations

from typing import Protocol

from sglang_evicpress.patches.tree.types import Batch

ALLOCATION = "sglang.srt.mem_cache.common"
EVICTS_SHORTFALL = False
KEY_FIELDS = frozenset({"token_ids", "extra_key", "is_bigram", "limit"})
REQUEST_FIELDS = frozenset(
    {"req_pool_idx", "cache_protected_len", "kv_allocated_len", "kv_committed_len", "kv_committed_freed"}
)
KV_FIELDS: frozenset[str] = frozenset()


class RequestWithKV(Protocol):
    """SGLang's Req."""

    req_pool_idx: int | None
    kv_allocated_len: int
    kv_committed_len: int
    kv_committed_freed: bool


class SchedulerWithBatch(Protocol):
    """SGLang's Scheduler."""

    cur_batch: object


def holds_kv(req: RequestWithKV) -> bool:
    return req.req_pool_idx is not None and not req.kv_committed_freed


def allocated_len(req: RequestWithKV) -> int:
    return req.kv_allocated_len


def shorten(req: RequestWithKV, num_tokens: int) -> None:
    req.kv_committed_len -= num_tokens
    req.kv_allocated_len -= num_tokens


def batch_of(plan: Batch | None) -> Batch | None:
    return plan


def current_batch(scheduler: SchedulerWithBatch) -> object:
    return scheduler.cur_batch
