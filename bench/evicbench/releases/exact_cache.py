"""A pytest plugin: SGLang's radix cache is ours with exact forms, for SGLang's own tests of it (``own_tests``).

Caches that these tests make have no pool, or a mock of an allocator. Ours gets a small pool, no free slot where the
allocator does not know (``evict`` frees what is short, and nothing where nothing is), and an empty row for no rows.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import NonCallableMock

import torch
from sglang.srt.mem_cache import radix_cache
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.core import EXACT
from sglang_evicpress.patches.cache.lifecycles import cache_class
from sglang_evicpress.patches.tree.compressor import Compressor

NUM_SLOTS = 4096
OURS = cache_class()


class FullAllocator(TokenToKVPoolAllocator):
    """Has no free slots but those that were given back, which it only counts: the tests make their slots up."""

    num_free = 0

    def available_size(self) -> int:
        return self.num_free

    def free(self, free_index: torch.Tensor) -> None:
        self.num_free += len(free_index)


def pool_of(page_size: int) -> MHATokenToKVPool:
    return MHATokenToKVPool(NUM_SLOTS, page_size, torch.float32, 1, 4, 1, "cpu", False)


def completed(allocator: Any, page_size: int) -> Any:
    """An allocator that says what our cache asks."""
    pool = pool_of(page_size)
    if allocator is None:
        return FullAllocator(NUM_SLOTS, torch.float32, "cpu", pool, False)
    if isinstance(allocator, NonCallableMock):
        allocator.get_kvcache.return_value = pool
        allocator.size, allocator.page_size = NUM_SLOTS, page_size
        allocator.is_not_in_free_group = False  # pages go back by ``free``
        if isinstance(allocator.device, NonCallableMock):
            allocator.device = torch.device("cpu")
        if not isinstance(allocator.available_size.return_value, int):
            allocator.available_size.return_value = 0
        return allocator
    missing = {
        "get_kvcache": lambda: pool,
        "size": NUM_SLOTS,
        "page_size": page_size,
        "device": torch.device("cpu"),
        "available_size": lambda: 0,
    }
    for name, value in missing.items():
        if not hasattr(allocator, name):
            setattr(allocator, name, value)
    return allocator


class ExactCache(OURS):
    """Made as SGLang's own is: of its parameters."""

    def __init__(self, params: Any) -> None:
        params.token_to_kv_pool_allocator = completed(params.token_to_kv_pool_allocator, params.page_size)
        config = EvicPressConfig("evicpress", forms=(EXACT,), host_gb=0.0)
        compressor = Compressor(pool_of(params.page_size), params.page_size, config.sinks)
        super().__init__(params, config, compressor)


radix_cache.RadixCache = ExactCache
