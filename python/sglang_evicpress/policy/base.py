"""Protocols between a policy and the index of nodes, and the candidates both read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from sglang_evicpress.core import Form, LowerCopy, NodeStats, Tier
from sglang_evicpress.policy.menu import Menu

DROPPED = len(Tier)
"""The tier of a node that is nowhere: below every tier."""

Entry = tuple[float, int, int]
"""(key, last_use, id): the order in which steps are taken, total and the same on every rank."""


class Step(NamedTuple):
    """The next step of a node: hold ``form`` in ``num_bytes`` on the tier ``tier`` (DROPPED: forget it).

    The step with the smallest ``key`` is taken first. ``loss`` is the utility it gives up, unweighted.
    """

    key: float
    tier: int
    form: Form | None
    num_bytes: int
    quality: float = 1.0
    delay_s: float = 0.0
    loss: float = 0.0


class Candidate:
    """A node in the index: its ``NodeStats`` in a form that can change, and its place in the tree and in a heap.

    ``num_children`` counts children by tier (None: it never had any). ``memo`` is the policy's own, forgotten when
    anything but weight or use changes. ``queued`` is the candidate's entry in the heap of its tier.
    """

    __slots__ = (
        "allowed_forms",
        "curve",
        "depth_tokens",
        "exact_on",
        "external",
        "filled",
        "form",
        "id",
        "is_locked",
        "last_use",
        "lower_copies",
        "memo",
        "num_bytes",
        "num_children",
        "num_hits",
        "num_tokens",
        "parent_id",
        "quality",
        "queued",
        "sinks",
        "tier",
        "weight",
    )

    def __init__(self, node: NodeStats | Candidate) -> None:
        self.num_children: list[int] | None = None
        self.queued: Entry | None = None
        self.read(node)

    def read(self, node: NodeStats | Candidate) -> None:
        self.id: int = node.id
        self.parent_id: int | None = node.parent_id
        self.tier: int = int(node.tier)
        self.form: Form = node.form
        self.num_tokens: int = node.num_tokens
        self.num_bytes: int = node.num_bytes
        self.depth_tokens: int = node.depth_tokens
        self.quality: float = node.quality
        self.curve: Sequence[float] = node.curve
        self.allowed_forms: int = node.allowed_forms
        self.weight: float = node.weight
        self.num_hits: int = node.num_hits
        self.last_use: int = node.last_use
        self.sinks: int = node.sinks
        self.is_locked: bool = node.is_locked
        self.exact_on: Tier | None = node.exact_on
        self.lower_copies: Sequence[LowerCopy] = node.lower_copies
        self.filled: float = node.filled
        self.external: LowerCopy | None = node.external
        self.memo: object = None

    def copy(self) -> Candidate:
        """A candidate a plan may change: the same node, in no heap."""
        twin = Candidate(self)
        twin.memo = self.memo
        twin.num_children = None if self.num_children is None else list(self.num_children)
        return twin

    @property
    def lowest_tier(self) -> int:
        """The lowest tier it may move to: a node leaves a tier only once no child is there or above."""
        if self.num_children is not None:
            for tier, count in enumerate(self.num_children):
                if count:
                    return tier
        return DROPPED

    def count_child(self, tier: int, change: int) -> None:
        if self.num_children is None:
            self.num_children = [0] * DROPPED
        if tier < DROPPED:
            self.num_children[tier] += change


def smaller_forms(menu: Menu, candidate: Candidate) -> list[tuple[int, int]]:
    """(index of a form, bytes) for the forms that can be made of the node where it is and are smaller than what it
    holds. On the GPU its codec only says what it was stored with: there it stays."""
    allowed_forms = candidate.allowed_forms
    if allowed_forms and candidate.tier == Tier.GPU:
        allowed_forms &= menu.of_codec(candidate.form.codec)
    return _smaller_than(candidate.num_bytes, menu, candidate, allowed_forms, candidate.tier)


def lower_forms(menu: Menu, candidate: Candidate) -> list[tuple[int, int]]:
    """(index of a form, bytes) for the forms it can be in below the GPU that are smaller there than what it holds."""
    return _smaller_than(lower_bytes(menu, candidate), menu, candidate, candidate.allowed_forms, Tier.HOST)


def lower_bytes(menu: Menu, candidate: Candidate) -> int:
    """Bytes of the node, as it is, below the GPU."""
    num_bytes = candidate.num_bytes
    if candidate.tier != Tier.GPU:
        return num_bytes
    return menu.stored_bytes(candidate.form, num_bytes if candidate.filled == 1.0 else num_bytes * candidate.filled)


def _smaller_than(
    num_bytes: int, menu: Menu, candidate: Candidate, allowed_forms: int, tier: int
) -> list[tuple[int, int]]:
    if not allowed_forms:
        return []
    sizes = menu.sizes(candidate.num_tokens, candidate.sinks, tier)
    return [(index, size) for index, size in enumerate(sizes) if size < num_bytes and allowed_forms >> index & 1]


class Policy(Protocol):
    """Policy: the order of nodes and the step for the first of them.

    ``name``: as it was asked for. ``menu``: the forms and tiers it chooses from. ``weighs_quality``: it chooses forms
    by their quality; then it is only offered those whose quality is known. ``compresses``: it may choose another form
    than the exact one.
    """

    name: str
    menu: Menu
    weighs_quality: bool
    compresses: bool

    def step(
        self, candidate: Candidate, excluded_tiers: int = 0, lower_copies: Sequence[LowerCopy] | None = None
    ) -> Step | None:
        """The next step of a node that frees bytes on its tier, None when there is none.

        Tiers whose bit is set in ``excluded`` cannot take it. Nothing below ``candidate.lowest_tier`` may be chosen.
        With ``lower_copies`` it may go to a lower tier only as one of those.
        """
        ...

    def delay_s(self, candidate: Candidate) -> float:
        """Seconds to get the node back to the GPU from where it is; 0 for a policy that does not weigh it."""
        ...


@runtime_checkable
class Watcher(Protocol):
    """A policy that besides also has to know what happens to nodes; a plan, which only may happen, is not told."""

    def used(self, candidate: Candidate) -> None:
        """The node is new to the index, to its tier or below its parent, or was used; its candidate says so already."""
        ...

    def left(self, candidate: Candidate, tier: int) -> None:
        """The node goes to the tier of ``tier`` (DROPPED: is forgotten); its candidate still says where it was."""
        ...


@runtime_checkable
class Preparer(Protocol):
    """A policy that keeps what it has worked out of a node's step in its memo, and can do so for many nodes sooner than
    one by one."""

    def forget_steps(self) -> None:
        """What the memos of all nodes say is outdated."""
        ...

    def prepare(self, candidates: Iterable[Candidate]) -> None:
        """Fill the memo of every candidate whose own says nothing that holds."""
        ...
