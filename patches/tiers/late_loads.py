"""Loads that had not ended in time when the tree went. They may still write into their slots, so nobody gets these, nor
the host memory that they read, before they have ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from sglang_evicpress.patches.tiers.load import Load
from sglang_evicpress.patches.tiers.types import Slots, Tiers

logger = logging.getLogger(__name__)


class FreePages(Protocol):
    """SGLang's allocator: the pages that are free, and making all of them so."""

    page_size: int
    free_pages: torch.Tensor
    clear: Callable[[], None]


class LateLoads:
    """Keeps their slots, which count as protected, by taking the place of the allocator's ``clear``."""

    def __init__(self, storage: Tiers, allocator: FreePages, ledger: Slots) -> None:
        self._storage = storage
        self._allocator = allocator
        self._ledger = ledger
        self._make_all_free = allocator.clear
        self._slots: dict[Load, torch.Tensor] = {}

    def __iter__(self) -> Iterator[Load]:
        return iter(self._slots)

    @property
    def num_slots(self) -> int:
        return sum(map(len, self._slots.values()))

    def add(self, load: Load) -> None:
        """The tree goes, and the load has not ended."""
        self._allocator.clear = self._clear_but_for_these
        self._slots[load] = torch.cat([part.slots for part in load.parts])
        self._storage.errors["load_deadline"] += 1
        logger.error("evicpress: a load has not ended in time: its slots are set apart until it does")

    def take_back(self, load: Load) -> None:
        """A load has ended after the tree that it was for was gone."""
        slots = self._slots.pop(load, None)
        if slots is None:
            return
        self._ledger.release(len(slots))
        self._ledger.free(slots)
        load.unpin()
        if not self._slots:
            self._allocator.clear = self._make_all_free

    def _clear_but_for_these(self) -> None:
        self._make_all_free()
        allocator = self._allocator
        taken = torch.unique(torch.cat(list(self._slots.values())) // allocator.page_size)
        allocator.free_pages = allocator.free_pages[~torch.isin(allocator.free_pages, taken)]
        self._ledger.clear(self.num_slots)
