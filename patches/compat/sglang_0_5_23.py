"""SGLang 0.5.23: all lengths are at ``req.kv``, a prefix is a length and no list of slots, and a lock is a receipt.

``req.prefix_indices`` is ours here: SGLang counts the prefix by ``req.prefix_len`` and asks the tree for its slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.compat.event_hashes import MEDIA, SaltedNode, UnsaltedNode, hash_above
from sglang_evicpress.patches.compat.sglang_0_5_17 import ALLOCATION as ALLOCATION
from sglang_evicpress.patches.compat.sglang_0_5_17 import EVICTS_SHORTFALL as EVICTS_SHORTFALL
from sglang_evicpress.patches.compat.sglang_0_5_17 import batch_of as batch_of
from sglang_evicpress.patches.compat.sglang_0_5_17 import current_batch as current_batch
from sglang_evicpress.patches.tree.namespaces import salt_of

PREFIX_SLOTS = "_prefix_kv_indices"
BEAMS = "sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init"
SENT_ONCE = (
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer."
    "is_request_level_customized_info_key"
)
UPDATE_SESSIONS = True
KEY_FIELDS = frozenset({"token_ids", "extra_key", "is_bigram", "limit", "cache_salt"})
REQUEST_FIELDS = frozenset(
    {"kv", "prefix_len", "lock", "cache_salt", "last_node", "best_match_node", "host_hit_length", "storage_hit_length"}
)
KV_FIELDS = frozenset({"req_pool_idx", "cache_protected_len", "kv_committed_len", "kv_allocated_len"})


class KVInfo(Protocol):
    """SGLang's ReqKvInfo."""

    req_pool_idx: int | None
    cache_protected_len: int
    kv_allocated_len: int
    kv_committed_len: int


class RequestWithKV(Protocol):
    """SGLang's Req, with ``prefix_indices``."""

    kv: KVInfo
    prefix_len: int
    prefix_indices: torch.Tensor
    lock: object
    last_node: object


class Retracting(Protocol):
    """SGLang's ScheduleBatch."""

    def release_req(self, index: int, num_left: int, offload_kv: bool) -> None: ...


class RetractingScheduler(Protocol):
    """SGLang's Scheduler, with those that run."""

    running_batch: Retracting


class Budget(Protocol):
    """SGLang's PrefillBudget."""

    total_offset: int


class Adder(Protocol):
    """SGLang's PrefillAdder."""

    memory_budget: Budget


class Locking(Protocol):
    """The tree, which gives receipts to who holds a node."""

    def lock(self, node: object) -> object: ...
    def unlock(self, lock: object) -> None: ...


class Pages(Protocol):
    """SGLang's PagedTokenToKVPoolAllocator."""

    def get_all_free_pages(self) -> torch.Tensor: ...
    def free_page_ids(self, page_ids: torch.Tensor) -> None: ...


class AdapterNames(Protocol):
    """SGLang's KvEventLoraNames: adapters by the extra keys of their requests."""

    def get(self, extra_key: str | None) -> str | None: ...
    def register(self, req: object, lora_name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Named:
    """A request, as far as it is read to name its adapter."""

    extra_key: str | None
    lora_id: str


class Events(Protocol):
    """SGLang's KVCacheEventRecorder."""

    enabled: bool
    page_size: int

    lora_names: AdapterNames

    def record_store(self, node: object, medium: StorageMedium) -> None: ...
    def record_remove(self, node: object, medium: StorageMedium) -> None: ...


class Telling(Protocol):
    """The tree, which tells of KV events."""

    kv_events: Events


def row_of(req: RequestWithKV) -> int | None:
    return req.kv.req_pool_idx


def holds_kv(req: RequestWithKV) -> bool:
    return req.kv.req_pool_idx is not None


def allocated_len(req: RequestWithKV) -> int:
    return req.kv.kv_allocated_len


def shorten(req: RequestWithKV, num_tokens: int) -> None:
    req.kv.kv_committed_len -= num_tokens
    req.kv.kv_allocated_len -= num_tokens


def protected_len(req: RequestWithKV) -> int:
    return req.kv.cache_protected_len


def set_protected_len(req: RequestWithKV, num_tokens: int) -> None:
    req.kv.cache_protected_len = num_tokens


def prefix_len(req: RequestWithKV) -> int:
    return req.prefix_len


def set_prefix(req: RequestWithKV, indices: torch.Tensor) -> None:
    req.prefix_indices, req.prefix_len = indices, len(indices)


def match_result(
    indices: torch.Tensor, req: RequestWithKV | None, on_gpu: object, last: object, num_below: int
) -> MatchResult:
    if req is not None:
        req.prefix_indices = indices
    return MatchResult(
        device_prefix_len=len(indices),
        last_device_node=on_gpu,
        last_host_node=last,
        best_match_node=last,
        host_hit_length=num_below,
    )


def loaded(req: RequestWithKV, indices: torch.Tensor, last: object) -> tuple[int, object]:
    req.prefix_indices = torch.cat([req.prefix_indices, indices])
    return len(indices), last


def relock(tree: Locking, req: RequestWithKV, node: object) -> None:
    tree.unlock(req.lock)
    req.lock, req.last_node = tree.lock(node), node


def ranks_of(runner: object) -> tuple[int, int]:
    from sglang.srt.runtime_context import get_parallel  # older releases lack it

    ranks = get_parallel()
    return ranks.tp_rank, ranks.tp_size


def total_offset(adder: Adder) -> int:
    return adder.memory_budget.total_offset


def set_total_offset(adder: Adder, num_tokens: int) -> None:
    adder.memory_budget.total_offset = num_tokens


def send_back(scheduler: RetractingScheduler, index: int) -> None:
    scheduler.running_batch.release_req(index, 0, False)


def free_pages(allocator: Pages) -> torch.Tensor:
    return allocator.get_all_free_pages()


def give_back_pages(allocator: Pages, pages: torch.Tensor) -> None:
    allocator.free_page_ids(pages)


def tell_stored(tree: Telling, node: SaltedNode, tier: Tier) -> None:
    hash_above(node, tree.kv_events.page_size)
    tree.kv_events.record_store(_unsalted(tree, node), MEDIA[tier])


def tell_removed(tree: Telling, node: SaltedNode, tier: Tier) -> None:
    tree.kv_events.record_remove(_unsalted(tree, node), MEDIA[tier])


def event_salt(extra_key: str | None) -> str:
    return salt_of(extra_key)


def _unsalted(tree: Telling, node: SaltedNode) -> UnsaltedNode:
    """The node, whose adapter SGLang knows by the extra key that has no salt in it as well."""
    unsalted, names = UnsaltedNode(node), tree.kv_events.lora_names
    name = names.get(node.key.extra_key)
    if name is not None and names.get(unsalted.key.extra_key) is None:
        names.register(Named(unsalted.key.extra_key, name), name)
    return unsalted
