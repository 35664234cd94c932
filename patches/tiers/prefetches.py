"""Prefetches of the requests that wait, in the order in which they came, which is that of their turns where SGLang
serves first come, first served."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from sglang_evicpress.patches.tiers.types import Steps
from sglang_evicpress.patches.tree.types import Node, Request
from sglang_evicpress.policy.load_or_recompute import Piece
from sglang_evicpress.policy.wait_cost import Congestion
from sglang_evicpress.tiers.entry.copies import HostEntry, SsdEntry
from sglang_evicpress.tiers.jobs import Job

WINDOW = 32
"""So many requests from the head of the queue are got ready."""


@dataclass(slots=True, eq=False)
class Prefetch:
    """Prefetch for one waiting request. ``from_ssd``: the entries that came from the SSD for it; ``reserved``: the
    nodes below the GPU that stay where they are for it, by id; ``pinned``: the last node on the GPU that does, with all
    above it, for which ``num_pinned`` slots were locked. ``used``: the nodes that it will use by the last look, the
    first ``num_resident`` of which were on the GPU; none while computing some seems better. ``turn_s``: when it could
    first have run, and ``max_wait_s`` from then on it may be passed over. ``num_to_run``: slots that it needs besides
    what is on the GPU. ``short_of``: for want of what something is not begun yet; ``is_without_room``: there was no
    host memory for a read, nor any to be expected; ``refused_by``: the host's plan after which a read found none."""

    req: Request
    turn_s: float | None = None
    max_wait_s: float = 0.0
    looked_s: float = 0.0
    is_late: bool = False
    is_without_room: bool = False
    short_of: str | None = None
    jobs: list[Job] = field(default_factory=list)
    from_ssd: set[HostEntry] = field(default_factory=set)
    reserved: dict[int, Node] = field(default_factory=dict)
    used: list[Node] = field(default_factory=list)
    num_resident: int = 0
    pinned: Node | None = None
    num_pinned: int = 0
    num_needed: int = 0
    num_to_run: int = 0
    refused_by: int | None = None
    looked_at: set[int] = field(default_factory=set)

    @property
    def is_waiting(self) -> bool:
        """True if anything is on its way, or will be."""
        return bool(self.jobs) or self.short_of is not None

    @property
    def has_unfinished_jobs(self) -> bool:
        return any(not job.is_finished for job in self.jobs)


class Held(Protocol):
    """What waiting requests hold."""

    def pin(self, prefetch: Prefetch, resident: list[Node]) -> None: ...
    def reserve(self, prefetch: Prefetch, node: Node, *, is_first: bool) -> None: ...
    def may_reserve(self, entry: HostEntry | SsdEntry) -> bool: ...
    def release(self, prefetch: Prefetch) -> None: ...
    def split(self, upper: Node, lower: Node, prefetches: Collection[Prefetch]) -> None: ...
    def clear(self) -> None: ...


class Worth(Protocol):
    """Loading against computing."""

    def pieces(self, steps: Steps) -> list[Piece]: ...
    def num_worth(
        self, prefetch: Prefetch, pieces: Sequence[Piece], *, slack_s: float = 0.0, has_to_read: bool = False
    ) -> int: ...
    def max_wait_s(self, prefetch: Prefetch, pieces: Sequence[Piece]) -> float: ...


class Prefetches:
    """``by_request``: by ``id()`` of the request, in the order in which they came; ``is_in_order``: they are served in
    it. ``num_ready``: requests at the head of the queue for which nothing is on its way, ``num_loading``: the others;
    ``congestion``: how many requests a second of computing delays, ``read_congestion``: one of reading."""

    def __init__(self, reservations: Held, now_s: Callable[[], float]) -> None:
        self._reservations = reservations
        self._now_s = now_s
        self.by_request: dict[int, Prefetch] = {}
        self.congestion, self.read_congestion = Congestion(), Congestion()
        self.num_ready, self.num_loading, self.is_in_order = 0, 0, True

    def add(self, req: Request) -> tuple[Prefetch, int]:
        """A request has entered the waiting queue, behind so many."""
        former = self.by_request.pop(id(req), None)
        if former is not None:
            self._reservations.release(former)
        num_ahead = len(self.by_request)
        prefetch = self.by_request[id(req)] = Prefetch(req)
        return prefetch, num_ahead

    def head(self) -> list[Prefetch]:
        """Those that are got ready, the next in turn first."""
        return list(islice(self.by_request.values(), WINDOW))

    def is_first(self, prefetch: Prefetch) -> bool:
        return next(iter(self.by_request.values()), None) is prefetch

    def observe(self, num_ready: int, num_loading: int, now_s: float) -> None:
        """So many wait for nothing but their turn now, and so many for what is read for them."""
        self.congestion.observe(now_s, self.num_ready)
        self.read_congestion.observe(now_s, max(0, self.num_loading - 1))  # one delays itself alone
        self.num_ready, self.num_loading = num_ready, num_loading

    def is_passed_over(self, req: Request) -> bool:
        """True if the request could run and nothing new can be said of it: SGLang need not even look it up."""
        prefetch = self.by_request.get(id(req))
        if prefetch is None or prefetch.turn_s is None or not prefetch.has_unfinished_jobs:
            return False
        return self._now_s() <= prefetch.turn_s + prefetch.max_wait_s

    def keep_only(self, waiting: Collection[Request]) -> None:
        """Forget the prefetches of requests that do not wait any more."""
        if len(self.by_request) > len(waiting):
            ids = {id(req) for req in waiting}
            for key in [key for key in self.by_request if key not in ids]:
                self._reservations.release(self.by_request.pop(key))

    def release_from_tail(self, until: Request | None = None) -> Iterator[None]:
        """Whoever runs needs the room more than those who wait: what these hold is given up, that of the last to come
        first, down to the request ``until``; a step for each who held anything. Where the queue is not served in the
        order in which requests came, that of all but ``until``."""
        for prefetch in list(self.by_request.values())[::-1]:
            if prefetch.req is until:
                if self.is_in_order:
                    return
                continue
            if prefetch.reserved or prefetch.pinned is not None:
                self._reservations.release(prefetch)
                yield

    @property
    def num_waiting(self) -> int:
        """Requests for which something is on its way, or will be."""
        return sum(prefetch.is_waiting for prefetch in self.by_request.values())

    @property
    def num_slots_needed(self) -> int:
        """Slots that the next requests will take."""
        return sum(prefetch.num_needed for prefetch in self.head())

    def from_ssd(self, req: Request) -> Collection[HostEntry]:
        """What was read from the SSD for a request."""
        prefetch = self.by_request.get(id(req))
        return () if prefetch is None else prefetch.from_ssd

    def split(self, upper: Node, lower: Node) -> None:
        """``upper`` was split off ``lower``: both are held by whoever held that."""
        self._reservations.split(upper, lower, self.by_request.values())

    def clear(self) -> None:
        """The tree is gone."""
        self.by_request.clear()
        self._reservations.clear()
