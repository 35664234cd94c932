"""Counts of the pool's slots that the tree and the loads into it hold, and giving slots back to the pool."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SlotLedger:
    """The only writer of these counts. ``evictable`` slots are unlocked nodes', ``protected`` ones are locked nodes' or
    ``reserved``: nobody's yet, or nobody's any more. ``give_back`` hands slots [n] to the pool's allocator."""

    def __init__(self, give_back: Callable[[torch.Tensor], None]) -> None:
        self._give_back = give_back
        self.evictable = self.protected = self.reserved = 0
        self._unfreed: list[torch.Tensor] = []

    def add(self, num_slots: int, *, is_locked: bool = False) -> None:
        """A node holds so many slots more."""
        if is_locked:
            self.protected += num_slots
        else:
            self.evictable += num_slots

    def remove(self, num_slots: int) -> None:
        """An unlocked node holds so many slots less."""
        self.evictable -= num_slots

    def lock(self, num_slots: int) -> None:
        """Unlocked nodes with so many slots are locked now."""
        self.evictable -= num_slots
        self.protected += num_slots

    def unlock(self, num_slots: int) -> None:
        self.lock(-num_slots)

    def reserve(self, num_slots: int) -> None:
        """So many slots are no node's and not free: a load will fill them."""
        self.reserved += num_slots
        self.protected += num_slots

    def release(self, num_slots: int) -> None:
        """So many reserved slots are a node's, or free, from now on."""
        self.reserve(-num_slots)

    def free(self, slots: torch.Tensor) -> None:
        """Free slots [n] of a node, or of a request from a page's first token on, and wait for nothing on the device.

        They are whole pages: keys are, and so are the slots of forms (``Menu.num_slots``), of what a trim leaves and of
        either side of a split (``survivors.place``). Only a request's last page may be partial.
        """
        self._give_back(slots)

    def free_or_keep(self, slots: torch.Tensor) -> None:
        """Free slots that no node holds any more. Where that fails they are kept as nobody's, to be freed later."""
        try:
            self.free(slots)
        except Exception:
            self._unfreed.append(slots)
            self.reserve(len(slots))
            raise

    def take_unfreed(self) -> list[torch.Tensor]:
        """Slots that could not be freed, the last first; whoever asks frees them."""
        taken, self._unfreed = self._unfreed[::-1], []
        self.release(sum(map(len, taken)))
        return taken

    @property
    def has_unfreed(self) -> bool:
        return bool(self._unfreed)

    def clear(self, num_reserved: int = 0) -> None:
        """Every slot is free but so many that loads may still write to."""
        self.evictable = 0
        self.protected = self.reserved = num_reserved
        self._unfreed.clear()
