"""Room in host memory, of what lies there only to be sooner elsewhere, and what is on its way into it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.types import Changes, Plans, Removals, Runs, SpareCopies, Tiers
from sglang_evicpress.patches.tree.types import Node

MOST_ROUNDS = 8  # of plans for one allocation, each for twice as much as the last
MOST_GIVEN_UP = 512  # copies, for one allocation, and SSD entries between two ticks: some milliseconds
MOST_COPIED_SHARE = 1 / 4  # of the host tier: bytes on their way at once


class HostRoom:
    """Finds host memory. ``copying_bytes`` are on their way there; ``wanted_bytes`` were not to be had when asked for
    last, the most of them."""

    def __init__(
        self,
        nodes: Mapping[int, Node],
        storage: Tiers,
        placement: SpareCopies,
        removal: Removals,
        plans: Plans,
        changes: Changes,
    ) -> None:
        self._nodes = nodes
        self._storage = storage
        self._placement = placement
        self._removal = removal
        self._plans = plans
        self._changes = changes
        self.copying_bytes = self.wanted_bytes = 0

    @property
    def is_busy(self) -> bool:
        """Too much is on its way to begin another copy."""
        return self.copying_bytes > MOST_COPIED_SHARE * self._storage.host.num_bytes

    def begin_copy(self, num_bytes: int) -> None:
        self.copying_bytes += num_bytes

    def end_copy(self, num_bytes: int) -> None:
        self.copying_bytes -= num_bytes

    def want(self, num_bytes: int) -> None:
        """There was no room for so many bytes."""
        self.wanted_bytes = max(self.wanted_bytes, num_bytes)

    def forget_wanted(self) -> None:
        """Room was made, as far as it could be."""
        self.wanted_bytes = 0

    @contextmanager
    def given_back_after_an_error(self, runs: Runs) -> Iterator[None]:
        """Whoever has taken host memory for a copy may fail to begin it."""
        try:
            yield
        except Exception:
            self.give_back(runs)
            raise

    def give_back(self, runs: Runs) -> None:
        self._storage.host.arena.extents.free(runs)

    def free_room(self, num_bytes: int) -> Runs | None:
        """Runs of memory that is free now."""
        return self._storage.host.arena.extents.alloc(num_bytes)

    def host_room(self, num_bytes: int, *, keep: Collection[int] = (), keeps_planned: bool = False) -> Runs | None:
        """Runs of host memory: free ones, else those of redundant copies but of the nodes ``keep`` (few), last, and not
        with ``keeps_planned``, of nodes that are to leave the GPU soon, else of what is on the SSD as well. Nothing is
        lost for it: what the SSD does not have yet makes room when it has (``keep_host_room``)."""
        extents = self._storage.host.arena.extents
        num_bytes = max(1, num_bytes)  # a node may be all holes
        runs: Runs | None = extents.alloc(num_bytes)
        if runs is not None or num_bytes > extents.num_bytes:
            return runs
        for _ in range(MOST_GIVEN_UP):
            node_id = self._placement.next_spare(keep, keeps_planned=keeps_planned)
            if runs is not None or node_id is None:
                break
            node = self._nodes[node_id]
            self._placement.remove_copy(node, Tier.HOST)
            self._changes.changed(node)
            if extents.free_bytes >= num_bytes:
                runs = extents.alloc(num_bytes)
        if runs is None and self._storage.ssd is not None:
            runs = self._room_of_what_is_on_ssd(num_bytes)
        return runs

    def _room_of_what_is_on_ssd(self, num_bytes: int) -> Runs | None:
        """Release what the SSD has as well, least useful first. The pieces of an entry free its memory only together:
        more may have to go than was missing."""
        extents = self._storage.host.arena.extents
        missing = num_bytes - extents.free_bytes
        for _ in range(MOST_ROUNDS):
            num_released = 0
            for decision in self._plans.plan_without_copies(Tier.HOST, missing):
                is_move = decision.option.tier == Tier.SSD and decision.source.tier == Tier.HOST
                node = self._nodes.get(decision.node_id)
                if is_move and node is not None and node.value is None and Tier.SSD in node.kv.copies:
                    self._removal.release(node.id, Tier.SSD)  # else a release before it took its copy
                    num_released += 1
            runs = extents.alloc(num_bytes)
            if runs is not None or not num_released:
                return runs
            missing = max(2 * missing, num_bytes - extents.free_bytes)
        return None

    def room(self) -> dict[Tier, int]:
        """Free bytes below the GPU, redundant copies counted as free."""
        free_bytes = {}
        if self._storage.has_host:
            num_bytes = self._plans.held_bytes(Tier.HOST)
            free_bytes[Tier.HOST] = max(0, self._storage.host.num_bytes - num_bytes - self.copying_bytes)
        if self._storage.ssd is not None:
            free_bytes[Tier.SSD] = self._storage.ssd.room
        return free_bytes
