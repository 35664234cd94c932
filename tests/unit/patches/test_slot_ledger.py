"""Counts of slots, without a tree and without SGLang."""

from __future__ import annotations

import pytest
import torch

from sglang_evicpress.patches.tree.slot_ledger import SlotLedger


class Pool:
    def __init__(self) -> None:
        self.freed: list[list[int]] = []
        self.is_broken = False

    def give_back(self, slots: torch.Tensor) -> None:
        if self.is_broken:
            raise RuntimeError("not now")
        self.freed.append(slots.tolist())


def counts(ledger: SlotLedger) -> tuple[int, int, int]:
    return ledger.evictable, ledger.protected, ledger.reserved


def test_nodes_slots_move_between_evictable_and_protected() -> None:
    ledger = SlotLedger(Pool().give_back)
    ledger.add(10)
    ledger.add(5, is_locked=True)
    assert counts(ledger) == (10, 5, 0)
    ledger.lock(4)
    assert counts(ledger) == (6, 9, 0)
    ledger.unlock(9)
    ledger.remove(15)
    assert counts(ledger) == (0, 0, 0)


def test_reserved_slots_count_as_protected_until_they_are_released() -> None:
    ledger = SlotLedger(Pool().give_back)
    ledger.reserve(7)
    assert counts(ledger) == (0, 7, 7)
    ledger.release(7)
    assert counts(ledger) == (0, 0, 0)


def test_slots_that_cannot_be_freed_are_reserved_until_somebody_takes_them() -> None:
    pool = Pool()
    ledger = SlotLedger(pool.give_back)
    pool.is_broken = True
    for slots in ([1, 2], [3]):
        with pytest.raises(RuntimeError, match="not now"):
            ledger.free_or_keep(torch.tensor(slots))
    assert ledger.has_unfreed and counts(ledger) == (0, 3, 3) and not pool.freed
    pool.is_broken = False
    for slots in ledger.take_unfreed():
        ledger.free_or_keep(slots)
    assert pool.freed == [[3], [1, 2]] and not ledger.has_unfreed and counts(ledger) == (0, 0, 0)


def test_a_flush_leaves_only_what_loads_may_still_write_to() -> None:
    ledger = SlotLedger(Pool().give_back)
    ledger.add(10)
    ledger.reserve(3)
    ledger.clear(2)
    assert counts(ledger) == (0, 2, 2)
