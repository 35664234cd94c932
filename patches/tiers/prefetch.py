"""Getting what a waiting request will use ready for loading: SSD entries are read, host entries are verified, what the
GPU has is kept there.

The scheduler passes a request over while that goes on, until it is done, or late: then the request takes what is ready
and computes the rest. It can only be late once it could have run: what waits for its turn anyhow waits for nothing.
Whether anything is begun is the cost model's choice, by what is ready when the request's turn is expected and by how
many others computing would hold up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.host_checks import VERIFIED_S, is_verified
from sglang_evicpress.patches.tiers.prefetches import Held, Prefetch, Worth
from sglang_evicpress.patches.tiers.ssd_io import Lookup, Read, SsdReads
from sglang_evicpress.patches.tiers.types import Steps, Tiers
from sglang_evicpress.patches.tree.types import Node, Request
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry, SsdEntry
from sglang_evicpress.tiers.jobs import Job

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey

EXPLORE_S = 10.0
"""After so long without a read from the SSD one is made to see what it costs."""

RELOOK_S = 0.05
"""How often a request that waits is looked at when nothing of it is under way: what it needs may have moved."""

SETTLED_S = 0.5
"""The same of one for which all was ready, unless any of that has moved: with a long queue a whole look at all of its
head every ``RELOOK_S`` takes a tenth of the scheduler's time."""

MOST_READS = 4
"""Reads for requests whose turn has not come that are begun at a time: the next ones are those of the next in turn."""


class Queue(Protocol):
    """Prefetches of the requests that wait."""

    by_request: dict[int, Prefetch]

    def add(self, req: Request) -> tuple[Prefetch, int]: ...
    def head(self) -> list[Prefetch]: ...
    def is_first(self, prefetch: Prefetch) -> bool: ...
    def observe(self, num_ready: int, num_loading: int, now_s: float) -> None: ...


class Grafts(Protocol):
    """Entries of an earlier server."""

    def look_up(self, prefetch: Prefetch, key: RadixKey, steps: Steps) -> None: ...
    def graft(self, req: Request, job: Lookup) -> None: ...


class WaitingTree(Protocol):
    """The tree, and what waiting requests will want of it."""

    def key_of_waiting(self, req: Request) -> RadixKey: ...
    def _steps(self, key: RadixKey) -> Steps: ...
    def usable_steps(self, req: Request, steps: Steps) -> Steps: ...
    def touch(self, node: Node) -> None: ...


@dataclass(eq=False, repr=False)
class Prefetcher:
    """Looks at waiting requests, one by one, and begins what they need. ``wait_s``: seconds until the turn of a request
    behind so many; ``num_host_plans``: plans that were made so far to keep host memory free; ``start_check`` verifies a
    host entry."""

    nodes: Mapping[int, Node]
    storage: Tiers
    prefetches: Queue
    reservations: Held
    terms: Worth
    ssd: SsdReads
    grafting: Grafts
    tree: WaitingTree
    wait_s: Callable[[int], float]
    num_host_plans: Callable[[], int]
    start_check: Callable[[HostEntry], Job]
    page_size: int

    def begin(self, req: Request) -> None:
        """A request has entered the waiting queue."""
        if self.storage.has_host:
            prefetch, num_ahead = self.prefetches.add(req)
            if prefetch in self.prefetches.head():
                self._advance(prefetch, num_ahead)

    def is_prefetching(self, req: Request, *, has_turn: bool = True) -> bool:
        """True if a waiting request is to be passed over for now. ``has_turn``: it could run, were it not for that;
        else what it waits for makes nobody wait for it."""
        prefetch = self.prefetches.by_request.get(id(req))
        if prefetch is None:
            return False
        now = self.storage.now_s()
        if prefetch.turn_s is None and not has_turn:
            return prefetch.is_waiting or not prefetch.looked_s
        if prefetch.turn_s is None:
            prefetch.turn_s = now
        if prefetch.is_late:
            return False  # what else comes is of use if there is no room for the request now
        self._advance(prefetch, 0)
        if not prefetch.is_waiting:
            return False
        if now <= prefetch.turn_s + prefetch.max_wait_s:
            return True
        prefetch.is_late = True
        self.storage.counts["prefetches_late"] += 1
        return False

    def advance(self) -> None:
        """Go on with the requests at the head of the queue, the first first."""
        now = self.storage.now_s()
        num_ready = num_loading = 0
        for num_ahead, prefetch in enumerate(self.prefetches.head()):
            if prefetch.jobs or (now - prefetch.looked_s >= RELOOK_S and not self._is_settled(prefetch, now)):
                self._advance(prefetch, num_ahead)
            num_ready += not prefetch.is_waiting
            num_loading += prefetch.is_waiting
        self.prefetches.observe(num_ready, num_loading, now)

    def _is_settled(self, prefetch: Prefetch, now_s: float) -> bool:
        """True if the last look, not long ago, found ready all that the tree has for it, and it is so still."""
        if prefetch.is_waiting or not prefetch.used or now_s - prefetch.looked_s >= SETTLED_S:
            return False
        return all(
            node.id in self.nodes
            and (node.value is not None) == (index < prefetch.num_resident)
            and (node.value is not None or _is_on_host(node, now_s, VERIFIED_S))
            for index, node in enumerate(prefetch.used)
        )

    def ready_to_load(self, req: Request | None, steps: Steps, num_resident: int) -> int:
        """Number of ``steps``, from the first not on the GPU, that are verified on the host and worth loading."""
        prefetch = self.prefetches.by_request.get(id(req))
        if prefetch is None:
            return 0
        count = num_resident
        while count < len(steps) and _is_on_host(steps[count][0], self.storage.now_s(), 2 * VERIFIED_S):
            count += 1
        return self.terms.num_worth(prefetch, self.terms.pieces(steps[num_resident:count]))

    def _advance(self, prefetch: Prefetch, num_ahead: int) -> None:
        """Take in what is done, and begin whatever the request still needs and is worth it."""
        if prefetch.has_unfinished_jobs:
            return
        lookups = [job for job in prefetch.jobs if isinstance(job, Lookup)]
        prefetch.jobs, prefetch.short_of, prefetch.looked_s = [], None, self.storage.now_s()
        for job in lookups:
            self.grafting.graft(prefetch.req, job)
        key = self.tree.key_of_waiting(prefetch.req)
        known = self.tree._steps(key)
        steps = self.tree.usable_steps(prefetch.req, known)
        num_resident = sum(node.value is not None for node, _ in steps)
        self.reservations.pin(prefetch, [node for node, _ in steps[:num_resident]])
        pieces = self.terms.pieces(steps[num_resident:])
        slack_s = self.wait_s(num_ahead) if prefetch.turn_s is None else 0.0
        num_wanted = self.terms.num_worth(prefetch, pieces, slack_s=slack_s, has_to_read=True)
        wanted = steps[num_resident : num_resident + num_wanted]
        prefetch.used = [node for node, _ in steps] if num_wanted == len(pieces) else []
        prefetch.num_resident = num_resident
        for node, _ in wanted:  # one that is gone has given its room to those before it
            if node.id in self.nodes and not self._fetch(prefetch, node):
                break
        if num_wanted:
            max_wait_s = self.terms.max_wait_s(prefetch, pieces[:num_wanted])
            prefetch.max_wait_s = max(prefetch.max_wait_s, max_wait_s)
        self._explore([node for node, _ in steps[num_resident + num_wanted :]])
        if not prefetch.is_waiting and num_wanted == len(pieces) and len(steps) == len(known):
            self.grafting.look_up(prefetch, key, steps)
        num_cached = sum(matched for _, matched in steps[:num_resident])
        num_holes = sum(matched - copy.num_slots for copy, matched in _copies(wanted))
        prefetch.num_needed = max(0, len(key) + self.page_size - num_cached - max(0, num_holes))

    def _fetch(self, prefetch: Prefetch, node: Node) -> bool:
        """Begin what makes the node ready; False where that cannot begin yet."""
        self.tree.touch(node)  # else what was just read were the least recently used, and the first to go
        copy = node.kv.copies.get(Tier.HOST)
        job: Job | None = None
        if copy is None:
            job = self._read_for(prefetch, node.kv.copies[Tier.SSD].entry)
            if job is None:
                return False
        elif not is_verified(copy.entry, self.storage.now_s()):
            job = self.start_check(copy.entry)
        if job is not None:
            prefetch.jobs.append(job)
        if node.id in self.nodes:
            self.reservations.reserve(prefetch, node, is_first=self.prefetches.is_first(prefetch))
        return True

    def _read_for(self, prefetch: Prefetch, entry: SsdEntry) -> Read | None:
        """The job that reads an SSD entry for a request; None where it cannot begin now: then the prefetch says for
        want of what, unless nothing is on its way that would give room."""
        if entry.read is None and not self.prefetches.is_first(prefetch):
            is_early = prefetch.turn_s is None and len(self.ssd.reads) >= MOST_READS
            if is_early or not self.reservations.may_reserve(entry):
                prefetch.short_of = "turn"
                return None
        read = self.ssd.start_read(entry)
        if read is not None:
            prefetch.from_ssd.add(read.host)
            return read
        if not self.ssd.is_answering:
            return None  # nothing to wait for
        num_host_plans = self.num_host_plans()
        if prefetch.refused_by is None:
            prefetch.refused_by = num_host_plans
        if self.ssd.is_freeing_host or num_host_plans <= prefetch.refused_by + 1:
            prefetch.short_of = "host_room"  # else the plan that followed has found nothing to write
        else:
            prefetch.is_without_room = True
        return None

    def _explore(self, unwanted: list[Node]) -> None:
        """Now and then read an SSD entry that is taken to come too late, with nobody waiting for it: a disk that was
        slow once would otherwise never be seen to be fast again."""
        now = self.storage.now_s()
        for node in unwanted:
            copy = node.kv.copies.get(Tier.SSD)
            if now - self.ssd.seen_s < EXPLORE_S or node.id not in self.nodes:
                return
            if copy is not None and Tier.HOST not in node.kv.copies:
                self.ssd.start_read(copy.entry, is_awaited=False)
                self.ssd.note_seen(now)


def _is_on_host(node: Node, now_s: float, seconds: float) -> bool:
    """True if the host has the node in an entry that was good so shortly before."""
    copy = node.kv.copies.get(Tier.HOST)
    return copy is not None and is_verified(copy.entry, now_s, seconds)


def _copies(steps: Steps) -> Iterator[tuple[Copy, int]]:
    """The fastest copy of each node, and the tokens that are matched of it."""
    for node, matched in steps:
        if node.kv.copies:
            yield node.kv.copies[min(node.kv.copies)], matched
