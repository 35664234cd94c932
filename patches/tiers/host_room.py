"""Room in host memory, of what lies there only to be sooner elsewhere, and what is on its way into it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.types import Changes, EntryCopies, Plans, Removals, Runs, Tiers
from sglang_evicpress.patches.tree.types import Node

MOST_ROUNDS = 8  # of plans for one allocation, each for twice as much as the last
MOST_GIVEN_UP = 64  # copies, for one allocation, and SSD entries between two ticks: some milliseconds
MOST_PINNED = 16  # copies that are passed over, as they are being read, for one allocation
ASKED_KEPT = 0.98  # of what was asked for at a time, with each time that less was
MOST_COPIED_SHARE = 1 / 4  # of the host tier: bytes on their way at once


@dataclass(eq=False, repr=False)
class HostRoom:
    """Finds host memory. ``copying_bytes`` are on their way there, but for reads from the SSD; ``wanted_bytes`` were
    not to be had when asked for since the last of ``num_plans``, the most of them, ``asked_bytes`` are asked for at a
    time, the most of late."""

    nodes: Mapping[int, Node]
    storage: Tiers
    placement: EntryCopies
    removal: Removals
    plans: Plans
    changes: Changes

    def __post_init__(self) -> None:
        self.copying_bytes = self._reading_bytes = self.wanted_bytes = self.num_plans = 0
        self.asked_bytes = 0
        self._held_bytes = 0  # of those on their way: nodes hold them already

    @property
    def is_busy(self) -> bool:
        """Too much is on its way to begin another copy."""
        return self.copying_bytes > MOST_COPIED_SHARE * self.storage.host.num_bytes

    def begin_copy(self, num_bytes: int, *, is_held: bool = False, is_read: bool = False) -> None:
        """``is_held``: its node counts as holding it from now on; ``is_read``: it comes from the SSD."""
        if is_read:
            self._reading_bytes += num_bytes
            return
        self.copying_bytes += num_bytes
        self._held_bytes += num_bytes if is_held else 0

    def end_copy(self, num_bytes: int, *, is_held: bool = False, is_read: bool = False) -> None:
        self.begin_copy(-num_bytes, is_held=is_held, is_read=is_read)

    def want(self, num_bytes: int) -> None:
        """There was no room for so many bytes. Nobody goes for what is only still to be taken from the system."""
        if not self._is_coming(num_bytes):
            self.wanted_bytes = max(self.wanted_bytes, num_bytes)

    def end_plan(self) -> None:
        """Room was made, as far as it could be."""
        self.wanted_bytes = 0
        self.num_plans += 1

    @contextmanager
    def given_back_after_an_error(self, runs: Runs) -> Iterator[None]:
        """Whoever has taken host memory for a copy may fail to begin it."""
        try:
            yield
        except Exception:
            self.give_back(runs)
            raise

    def give_back(self, runs: Runs) -> None:
        self.storage.host.arena.extents.free(runs)

    def free_room(self, num_bytes: int, *, takes_spares: bool = False) -> Runs | None:
        """Runs of memory that is free now, or, where it ``takes_spares``, taken by copies of what the GPU has and is
        not to leave soon."""
        runs: Runs | None = self.storage.host.arena.alloc(num_bytes)
        if runs is None and takes_spares and num_bytes <= self.room()[Tier.HOST] and not self._is_coming(num_bytes):
            runs = self._room_of_spare_copies(num_bytes, (), keeps_planned=True)
        return runs

    def host_room(self, num_bytes: int, *, keep: Collection[int] = (), keeps_planned: bool = False) -> Runs | None:
        """Runs of host memory: free ones, else those of redundant copies but of the nodes ``keep`` (few), last of nodes
        that are to leave the GPU soon, else of what is on the SSD as well; with ``keeps_planned``, for what nobody
        waits for, not those two. Nothing is lost for it: what the SSD does not have yet makes room when it has (see
        ``BackgroundDemotion``)."""
        host = self.storage.host
        num_bytes = max(1, num_bytes)  # a node may be all holes
        self.asked_bytes = max(num_bytes, int(ASKED_KEPT * self.asked_bytes))
        runs: Runs | None = host.arena.alloc(num_bytes)
        if runs is not None or num_bytes > host.num_bytes or self._is_coming(num_bytes):
            return runs
        # Copies that would not make room enough are not given up in vain: they would only be made again.
        is_enough = num_bytes <= self.room()[Tier.HOST]
        if is_enough:
            runs = self._room_of_spare_copies(num_bytes, keep, keeps_planned=keeps_planned)
        if runs is None and self.storage.ssd is not None and not keeps_planned:
            runs = self._room_of_what_is_on_ssd(num_bytes)
            if runs is None and not is_enough and num_bytes <= self.room()[Tier.HOST]:
                runs = self._room_of_spare_copies(num_bytes, keep, keeps_planned=keeps_planned)
        return runs

    def _is_coming(self, num_bytes: int) -> bool:
        """True if so many bytes are free as soon as memory that is on its way is there."""
        host = self.storage.host
        return host.arena.is_growing and host.free_bytes >= num_bytes

    def _room_of_spare_copies(self, num_bytes: int, keep: Collection[int], *, keeps_planned: bool) -> Runs | None:
        arena = self.storage.host.arena
        kept, num_given_up = set(keep), 0
        while num_given_up < MOST_GIVEN_UP and len(kept) < len(keep) + MOST_PINNED:
            node_id = self.placement.next_spare(kept, keeps_planned=keeps_planned)
            if node_id is None:
                return None
            node = self.nodes[node_id]
            if node.kv.copies[Tier.HOST].entry.pins:
                kept.add(node_id)  # its memory would not be free
                continue
            self.placement.remove_copy(node, Tier.HOST)
            self.changes.changed(node)
            num_given_up += 1
            runs = arena.alloc(num_bytes) if arena.extents.free_bytes >= num_bytes else None
            if runs is not None:
                return runs
        return None

    def _room_of_what_is_on_ssd(self, num_bytes: int) -> Runs | None:
        """Release what the SSD has as well, least useful first. The pieces of an entry free its memory only together:
        more may have to go than was missing."""
        arena = self.storage.host.arena
        missing = num_bytes - arena.extents.free_bytes
        for _ in range(MOST_ROUNDS):
            num_released = 0
            for decision in self.plans.plan_without_copies(Tier.HOST, missing):
                is_move = decision.option.tier == Tier.SSD and decision.source.tier == Tier.HOST
                node = self.nodes.get(decision.node_id)
                if is_move and node is not None and node.value is None and Tier.SSD in node.kv.copies:
                    self.removal.release(node.id, Tier.SSD)  # else a release before it took its copy
                    num_released += 1
            runs = arena.alloc(num_bytes)
            if runs is not None or not num_released:
                return runs
            missing = max(2 * missing, num_bytes - arena.extents.free_bytes)
        return None

    def room(self) -> dict[Tier, int]:
        """Free bytes below the GPU, redundant copies counted as free."""
        free_bytes = {}
        if self.storage.has_host:
            taken = self.plans.held_bytes(Tier.HOST) + self._reading_bytes + self.copying_bytes - self._held_bytes
            free_bytes[Tier.HOST] = max(0, self.storage.host.num_bytes - taken)
        if self.storage.ssd is not None:
            free_bytes[Tier.SSD] = self.storage.ssd.room
        return free_bytes
