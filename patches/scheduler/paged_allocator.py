"""Pages on the CPU: SGLang's paged allocator launches Triton kernels, which need a GPU (or the slow interpreter).

Same slots in the same order, computed on the host. Touches
``PagedTokenToKVPoolAllocator.alloc_extend``/``alloc_decode`` only where the pool is on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress.patches.compat.release import RELEASE

TARGET = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator."


class PagedPool(Protocol):
    """SGLang's PagedTokenToKVPoolAllocator."""

    device: str
    page_size: int
    need_sort: bool
    free_pages: torch.Tensor

    def free(self, slots: torch.Tensor) -> None: ...
    def merge_and_sort_free(self) -> None: ...


def _around_alloc_extend(
    original: Callable[..., torch.Tensor | None],
    self: PagedPool,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> torch.Tensor | None:
    """AROUND ``alloc_extend``: fill each sequence's last partial page, then take free pages in order."""
    if self.device != "cpu":
        return original(
            self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
        )
    page = self.page_size
    begins, ends, lasts = prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), last_loc.tolist()
    needed = sum(-(-end // page) - -(-begin // page) for begin, end in zip(begins, ends, strict=True))
    if self.need_sort and needed > len(self.free_pages):
        self.merge_and_sort_free()
    if needed > len(self.free_pages):
        return None
    offsets = torch.arange(page)
    taken, parts = 0, []
    for begin, end, last in zip(begins, ends, lasts, strict=True):
        filled = min(end, -(-begin // page) * page) - begin
        parts.append(torch.arange(last + 1, last + 1 + filled))
        pages = -(-end // page) - -(-begin // page)
        fresh = (self.free_pages[taken : taken + pages, None] * page + offsets).reshape(-1)
        parts.append(fresh[: end - begin - filled])
        taken += pages
    self.free_pages = self.free_pages[taken:]
    return torch.cat(parts).to(torch.int64)


def _around_alloc_decode(
    original: Callable[..., torch.Tensor | None],
    self: PagedPool,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
) -> torch.Tensor | None:
    """AROUND ``alloc_decode``: the next slot of the page, or the first of a free page when it is full."""
    if self.device != "cpu":
        return original(self, seq_lens, seq_lens_cpu, last_loc)
    page = self.page_size
    opens_page = (seq_lens_cpu - 1) % page == 0
    needed = int(opens_page.sum())
    if self.need_sort and needed > len(self.free_pages):
        self.merge_and_sort_free()
    if needed > len(self.free_pages):
        return None
    slots = last_loc.to(torch.int64) + 1
    slots[opens_page] = self.free_pages[:needed] * page
    self.free_pages = self.free_pages[needed:]
    return slots


def free_whole_pages(allocator: PagedPool, *runs: torch.Tensor) -> None:
    """Free the pages of all ``runs`` of slots [n], each of which lies page by page from the first slot of one on; its
    last page may be partial.

    What ``allocator.free`` does without its ``torch.unique``, which waits for the device; once for all runs.
    """
    non_empty = [slots for slots in runs if slots.numel() > 0]
    if not non_empty:
        return
    page = allocator.page_size
    firsts = [slots[::page] for slots in non_empty]
    all_firsts = firsts[0] if len(firsts) == 1 else torch.cat(firsts)
    if page == 1:
        allocator.free(all_firsts)
    else:
        RELEASE.give_back_pages(allocator, all_firsts // page)


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    registry.register(TARGET + "alloc_extend", _around_alloc_extend, hook_type.AROUND)
    registry.register(TARGET + "alloc_decode", _around_alloc_decode, hook_type.AROUND)
