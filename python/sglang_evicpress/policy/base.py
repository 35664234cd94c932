"""Protocols between a policy and the index of nodes, and the records both read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from sglang_evicpress.core import Form, NodeStats, Tier, Way
from sglang_evicpress.policy.menu import Menu

DROPPED = len(Tier)
"""The rank of a node that is nowhere: below every tier."""

Entry = tuple[float, int, int]
"""(key, last_use, id): the order in which steps are taken, total and the same on every rank."""


class Step(NamedTuple):
    """The next step of a node: hold ``form`` in ``num_bytes`` on the tier of rank ``rank`` (DROPPED: forget it).

    The step with the smallest ``key`` is taken first. ``loss`` is the utility it gives up, unweighted.
    """

    key: float
    rank: int
    form: Form | None
    num_bytes: int
    quality: float = 1.0
    delay_s: float = 0.0
    loss: float = 0.0


class Record:
    """A node in the book: its ``NodeStats`` in a form that can change, and its place in the tree and in a heap.

    ``num_children`` counts children by rank (None: it never had any). ``memo`` is the rule's own, forgotten when
    anything but weight or use changes. ``queued`` is the record's entry in the heap of its tier.
    """

    __slots__ = (
        "curve",
        "depth_tokens",
        "exact_on",
        "form",
        "id",
        "is_locked",
        "last_use",
        "memo",
        "num_bytes",
        "num_children",
        "num_hits",
        "num_tokens",
        "parent_id",
        "quality",
        "queued",
        "rank",
        "reachable",
        "sinks",
        "ways",
        "weight",
    )

    def __init__(self, node: NodeStats) -> None:
        self.num_children: list[int] | None = None
        self.queued: Entry | None = None
        self.read(node)

    def read(self, node: NodeStats) -> None:
        self.id = node.id
        self.parent_id = node.parent_id
        self.rank: int = int(node.tier)
        self.form: Form = node.form
        self.num_tokens = node.num_tokens
        self.num_bytes = node.num_bytes
        self.depth_tokens = node.depth_tokens
        self.quality = node.quality
        self.curve: Sequence[float] = node.curve
        self.reachable = node.reachable
        self.weight = node.weight
        self.num_hits = node.num_hits
        self.last_use = node.last_use
        self.sinks = node.sinks
        self.is_locked = node.is_locked
        self.exact_on = node.exact_on
        self.ways = node.ways
        self.memo: object = None

    def copy(self) -> Record:
        """A record a plan may change: the same node, in no heap."""
        twin = Record.__new__(Record)
        twin.id, twin.parent_id, twin.rank, twin.form = self.id, self.parent_id, self.rank, self.form
        twin.num_tokens, twin.num_bytes, twin.depth_tokens = self.num_tokens, self.num_bytes, self.depth_tokens
        twin.quality, twin.curve, twin.reachable, twin.sinks = self.quality, self.curve, self.reachable, self.sinks
        twin.weight, twin.num_hits, twin.last_use = self.weight, self.num_hits, self.last_use
        twin.is_locked, twin.exact_on, twin.memo = self.is_locked, self.exact_on, self.memo
        twin.ways = self.ways
        twin.num_children = None if self.num_children is None else list(self.num_children)
        twin.queued = None
        return twin

    @property
    def floor(self) -> int:
        """The lowest rank it may move to: a node leaves a tier only once no child is there or above."""
        if self.num_children is not None:
            for rank, count in enumerate(self.num_children):
                if count:
                    return rank
        return DROPPED

    def count_child(self, rank: int, change: int) -> None:
        if self.num_children is None:
            self.num_children = [0] * DROPPED
        if rank < DROPPED:
            self.num_children[rank] += change


class Rule(Protocol):
    """Rule of a policy: the order of nodes and the step for the first of them."""

    @property
    def name(self) -> str:
        """Name, as it was asked for."""
        ...

    @property
    def menu(self) -> Menu:
        """The forms and tiers it chooses from."""
        ...

    @property
    def rises_only(self) -> bool:
        """True if a hit never makes a key of 0 or more smaller; its entry may then wait in the heap until on top."""
        ...

    @property
    def weighs_quality(self) -> bool:
        """True if it chooses forms by their quality; then it is only offered those whose quality is known."""
        ...

    def step(self, record: Record, barred: int = 0, ways: Sequence[Way] | None = None) -> Step | None:
        """The next step of a node that frees bytes on its tier, None when there is none.

        Tiers whose bit is set in ``barred`` cannot take it. Nothing below ``record.floor`` may be chosen. With
        ``ways`` it may go to a lower tier only as one of those.
        """
        ...

    def delay_s(self, record: Record) -> float:
        """Seconds to get the node back to the GPU from where it is; 0 for a rule that does not weigh it."""
        ...


@runtime_checkable
class Watcher(Protocol):
    """A rule that besides also has to know what happens to nodes; a plan, which only may happen, is not told."""

    def used(self, record: Record) -> None:
        """The node is new to the book, to its tier or below its parent, or was used; its record says so already."""
        ...

    def left(self, record: Record, rank: int) -> None:
        """The node goes to the tier of ``rank`` (DROPPED: is forgotten); its record still says where it was."""
        ...


@runtime_checkable
class Preparer(Protocol):
    """A rule that can work out the steps of many nodes sooner than one by one."""

    def prepare(self, records: Iterable[Record]) -> None:
        """Fill the memo of every record."""
        ...
