"""SGLang 0.5.15.post1: a request has the lengths of its KV itself, and says when it gave it back."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.compat.event_hashes import MEDIA, HashedNode, hash_above
from sglang_evicpress.patches.tree.types import Batch

ALLOCATION = "sglang.srt.mem_cache.common"
PREFIX_SLOTS = ""
BEAMS = ""
SENT_ONCE = ""
EVICTS_SHORTFALL = False
UPDATE_SESSIONS = False
KEY_FIELDS = frozenset({"token_ids", "extra_key", "is_bigram", "limit"})
REQUEST_FIELDS = frozenset(
    {
        *("req_pool_idx", "cache_protected_len", "kv_allocated_len", "kv_committed_len", "kv_committed_freed"),
        *("prefix_indices", "last_node", "best_match_node", "host_hit_length", "storage_hit_length"),
    }
)
KV_FIELDS: frozenset[str] = frozenset()


class RequestWithKV(Protocol):
    """SGLang's Req."""

    req_pool_idx: int | None
    cache_protected_len: int
    kv_allocated_len: int
    kv_committed_len: int
    kv_committed_freed: bool
    prefix_indices: torch.Tensor
    last_node: object


class SchedulerWithBatch(Protocol):
    """SGLang's Scheduler."""

    cur_batch: object


class Retracting(Protocol):
    """SGLang's ScheduleBatch."""

    def release_req(self, index: int, num_left: int, server_args: object) -> None: ...


class RetractingScheduler(Protocol):
    """SGLang's Scheduler, with those that run."""

    running_batch: Retracting
    server_args: object


class Pages(Protocol):
    """SGLang's PagedTokenToKVPoolAllocator."""

    page_size: int
    need_sort: bool
    is_not_in_free_group: bool
    free_pages: torch.Tensor
    release_pages: torch.Tensor

    def free(self, free_index: torch.Tensor) -> None: ...


class Ranked(Protocol):
    """SGLang's ModelRunner."""

    tp_rank: int
    tp_size: int


class Adder(Protocol):
    """SGLang's PrefillAdder."""

    rem_total_token_offset: int


class Locking(Protocol):
    """The tree, which counts who holds a node."""

    def inc_lock_ref(self, node: object) -> object: ...
    def dec_lock_ref(self, node: object) -> object: ...


class Telling(Protocol):
    """The tree, which tells of KV events."""

    enable_kv_cache_events: bool
    page_size: int

    def _record_store_event(self, node: object, medium: StorageMedium) -> None: ...
    def _record_remove_event(self, node: object, medium: StorageMedium) -> None: ...


def row_of(req: RequestWithKV) -> int | None:
    return req.req_pool_idx


def holds_kv(req: RequestWithKV) -> bool:
    return req.req_pool_idx is not None and not req.kv_committed_freed


def allocated_len(req: RequestWithKV) -> int:
    return req.kv_allocated_len


def shorten(req: RequestWithKV, num_tokens: int) -> None:
    req.kv_committed_len -= num_tokens
    req.kv_allocated_len -= num_tokens


def protected_len(req: RequestWithKV) -> int:
    return req.cache_protected_len


def set_protected_len(req: RequestWithKV, num_tokens: int) -> None:
    req.cache_protected_len = num_tokens


def prefix_len(req: RequestWithKV) -> int:
    return len(req.prefix_indices)


def set_prefix(req: RequestWithKV, indices: torch.Tensor) -> None:
    req.prefix_indices = indices


def match_result(indices: torch.Tensor, req: object, on_gpu: object, last: object, num_below: int) -> MatchResult:
    return MatchResult(
        device_indices=indices,
        last_device_node=on_gpu,
        last_host_node=last,
        best_match_node=last,
        host_hit_length=num_below,
    )


def loaded(req: object, indices: torch.Tensor, last: object) -> tuple[torch.Tensor, object]:
    return indices, last


def relock(tree: Locking, req: RequestWithKV, node: object) -> None:
    if req.last_node is not None:
        tree.dec_lock_ref(req.last_node)
    tree.inc_lock_ref(node)
    req.last_node = node


def ranks_of(runner: Ranked) -> tuple[int, int]:
    return runner.tp_rank, runner.tp_size


def total_offset(adder: Adder) -> int:
    return adder.rem_total_token_offset


def set_total_offset(adder: Adder, num_tokens: int) -> None:
    adder.rem_total_token_offset = num_tokens


def send_back(scheduler: RetractingScheduler, index: int) -> None:
    scheduler.running_batch.release_req(index, 0, scheduler.server_args)


def batch_of(plan: Batch | None) -> Batch | None:
    return plan


def current_batch(scheduler: SchedulerWithBatch) -> Any:
    return scheduler.cur_batch


def free_pages(allocator: Pages) -> torch.Tensor:
    return torch.cat([allocator.free_pages, allocator.release_pages])


def give_back_pages(allocator: Pages, pages: torch.Tensor) -> None:
    if not allocator.is_not_in_free_group:
        allocator.free(pages * allocator.page_size)
    elif allocator.need_sort:
        allocator.release_pages = torch.cat((pages, allocator.release_pages))
    else:
        allocator.free_pages = torch.cat((pages, allocator.free_pages))


def tell_stored(tree: Telling, node: HashedNode, tier: Tier) -> None:
    hash_above(node, tree.page_size)
    tree._record_store_event(node, MEDIA[tier])


def tell_removed(tree: Telling, node: object, tier: Tier) -> None:
    tree._record_remove_event(node, MEDIA[tier])


def event_salt(extra_key: str | None) -> str:
    return ""
