"""Worked examples of eviction and compaction, on SGLang's own paged allocator and by the product's own kernels.

Slot copies are counted in memory: every slot is written with the number of its token, and what reads otherwise after
the kernel was copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from evicbench.report import Line

NUM_TOKENS, PAGE = 16_000, 16
TOY_TOKENS, TOY_PAGE, TOY_DROPPED = 24, 4, (2, 9, 13, 21)


@dataclass(slots=True)
class Pool:
    """A request that holds ``num_tokens`` slots of a pool with as many and one page, on the CPU."""

    allocator: Any
    slots: Tensor
    keys: Tensor
    values: Tensor
    page_size: int

    @classmethod
    def holding(cls, num_tokens: int, page_size: int) -> Pool:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        size = num_tokens + page_size
        kv = MHATokenToKVPool(size, page_size, torch.float32, 1, 8, 1, "cpu", False)
        allocator = PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", kv, False)
        slots = allocator.alloc(num_tokens)
        keys, values = kv.get_key_buffer(0), kv.get_value_buffer(0)
        keys[slots] = torch.arange(num_tokens, dtype=torch.float32)[:, None, None]
        values[slots] = keys[slots] + 0.5
        return cls(allocator, slots, keys, values, page_size)

    @property
    def num_free(self) -> int:
        return int(self.allocator.available_size())

    def free_dead_pages(self, is_alive: Tensor) -> int:
        """Free the pages without survivors as they lie; the pages by which the allocator's count rises."""
        from sglang_evicpress.decode_budget.compaction import dead_pages

        before = self.num_free
        pages = dead_pages(self.slots, is_alive, self.page_size)
        self.allocator.free((pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten())
        return (self.num_free - before) // self.page_size

    def move(self, survivors: Tensor, way: Literal["repack", "holefill"]) -> tuple[int, int, list[int]]:
        """Move the survivors together and free what is empty then: pages freed, slots copied, and the tokens that the
        slots hold."""
        from sglang_evicpress.decode_budget.compaction import hole_moves
        from sglang_evicpress.kernels.compact import compact
        from sglang_evicpress.kernels.fill_holes import fill_holes
        from sglang_evicpress.patches.scheduler.paged_allocator import free_whole_pages

        before, free = self._tokens(), self.num_free
        indices = survivors.int()[None, None]
        if way == "repack":
            compact([self.keys], [self.values], self.slots, indices)
        else:
            fill_holes([self.keys], [self.values], self.slots, *hole_moves(indices, len(self.slots)))
        after, num_kept = self._tokens(), len(survivors)
        free_whole_pages(self.allocator, self.slots[-(-num_kept // self.page_size) * self.page_size :])
        return (self.num_free - free) // self.page_size, int((after != before).sum()), after[:num_kept].tolist()

    def _tokens(self) -> Tensor:
        keys, values = self.keys[self.slots, 0, 0], self.values[self.slots, 0, 0]
        if not torch.equal(keys + 0.5, values):
            raise ValueError("keys and values of a slot are not of one token")
        return keys.int()


def alive_every(step: int, num_tokens: int = NUM_TOKENS) -> Tensor:
    """One token of every ``step`` survives."""
    return torch.arange(num_tokens) % step == 0


def alive_without(dropped: Sequence[int], num_tokens: int) -> Tensor:
    alive = torch.ones(num_tokens, dtype=torch.bool)
    alive[list(dropped)] = False
    return alive


def measure() -> Iterator[Line]:
    scattered, worst = alive_every(10), alive_every(PAGE)
    as_it_lies = Pool.holding(NUM_TOKENS, PAGE).free_dead_pages(scattered)
    repacked, _, held = Pool.holding(NUM_TOKENS, PAGE).move(scattered.nonzero().flatten(), "repack")
    pinned = Pool.holding(NUM_TOKENS, PAGE).free_dead_pages(worst)
    aligned = Pool.holding(NUM_TOKENS, PAGE).free_dead_pages(alive_without(range(32, 48), NUM_TOKENS))
    yield Line(
        f"example: {NUM_TOKENS:,} tokens in {NUM_TOKENS // PAGE:,} pages on SGLang's allocator, by its free count",
        "scattered 90 % dropped: 0 pages freed as it lies, 900 by repack; one token left of every page: 0; one whole "
        "page dropped: 1",
        f"{as_it_lies}, {repacked}; {pinned}; {aligned}; order of the survivors "
        + ("kept" if held == scattered.nonzero().flatten().tolist() else "LOST"),
        (as_it_lies, repacked, pinned, aligned) == (0, 900, 0, 1) and held == scattered.nonzero().flatten().tolist(),
    )
    survivors = alive_without(TOY_DROPPED, TOY_TOKENS).nonzero().flatten()
    pages, copies, repack_held = Pool.holding(TOY_TOKENS, TOY_PAGE).move(survivors, "repack")
    fill_pages, fill_copies, fill_held = Pool.holding(TOY_TOKENS, TOY_PAGE).move(survivors, "holefill")
    is_same = repack_held == sorted(fill_held) == survivors.tolist()
    yield Line(
        f"example: {TOY_TOKENS} tokens in pages of {TOY_PAGE}, tokens {TOY_DROPPED} dropped; slots changed in memory",
        "1 page by 18 copies (repack), 1 page by 3 copies (hole-filling), the same survivors",
        f"{pages} by {copies}, {fill_pages} by {fill_copies}, {'the same' if is_same else 'OTHER'} survivors",
        (pages, copies, fill_pages, fill_copies) == (1, 18, 1, 3) and is_same,
    )
