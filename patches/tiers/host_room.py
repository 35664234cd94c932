"""Room in host memory, of what lies there only to be sooner elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_evicpress.core import Tier

MOST_ROUNDS = 8  # of plans for one allocation, each for twice as much as the last
MOST_GIVEN_UP = 512  # copies, for one allocation, and SSD entries between two ticks: some milliseconds


class HostRoom:
    """The part of EvicPressCache that finds host memory. Everything here runs on the scheduler thread."""

    @contextmanager
    def given_back_after_an_error(self: Any, runs: Any) -> Iterator[None]:
        """Whoever has taken host memory for a copy may fail to begin it."""
        try:
            yield
        except Exception:
            self.host.arena.extents.free(runs)
            raise

    def host_room(
        self: Any,
        num_bytes: int,
        *,
        keep: Collection[int] = (),
        keeps_planned: bool = False,
    ) -> Any:
        """Runs of host memory: free ones, else those of redundant copies but of the nodes ``keep`` (few), last, and not
        with ``keeps_planned``, of nodes that are to leave the GPU soon, else of what is on the SSD as well. Nothing is
        lost for it: what the SSD does not have yet makes room when it has (``keep_host_room``)."""
        extents = self.host.arena.extents
        num_bytes = max(1, num_bytes)  # a node may be all holes
        runs = extents.alloc(num_bytes)
        if runs is not None or num_bytes > extents.num_bytes:
            return runs
        for _ in range(MOST_GIVEN_UP):
            node_id = self._redundant.next(keep, keeps_planned=keeps_planned)
            if runs is not None or node_id is None:
                break
            node = self.nodes[node_id]
            self.remove_copy(node, Tier.HOST)
            self.changes.changed(node)
            if extents.free_bytes >= num_bytes:
                runs = extents.alloc(num_bytes)
        if runs is None and self.ssd is not None:
            runs = self._room_of_what_is_on_ssd(num_bytes)
        return runs

    def _room_of_what_is_on_ssd(self: Any, num_bytes: int) -> Any:
        """Release what the SSD has as well, least useful first. The pieces of an entry free its memory only together:
        more may have to go than was missing."""
        extents = self.host.arena.extents
        missing = num_bytes - extents.free_bytes
        for _ in range(MOST_ROUNDS):
            num_released = 0
            for decision in self.planner.plan(Tier.HOST, missing, lower_copies_of=self.lower_copies_of):
                is_move = decision.option.tier == Tier.SSD and decision.source.tier == Tier.HOST
                node = self.nodes.get(decision.node_id)
                if is_move and node is not None and node.value is None and Tier.SSD in node.kv.copies:
                    self.evict_from_gpu(node.id, Tier.SSD)  # else a release before it took its copy
                    num_released += 1
            runs = extents.alloc(num_bytes)
            if runs is not None or not num_released:
                return runs
            missing = max(2 * missing, num_bytes - extents.free_bytes)
        return None

    def room(self: Any) -> dict[Tier, int]:
        """Free bytes below the GPU, redundant copies counted as free."""
        free_bytes = {}
        if self.host is not None:
            num_bytes = self.planner.index.num_bytes[Tier.HOST]
            free_bytes[Tier.HOST] = max(0, self.host.num_bytes - num_bytes - self._copying_bytes)
        if self.ssd is not None:
            free_bytes[Tier.SSD] = self.ssd.room
        return free_bytes
