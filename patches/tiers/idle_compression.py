"""Smaller forms for what lies on the SSD, looked for while the server is idle. The policy chooses
(``Planner.plan_rewrites``), the controller acts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_evicpress.core import Decision, Tier
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.rounds import IdleWork
from sglang_evicpress.patches.tiers.types import Tiers
from sglang_evicpress.patches.tree.node import is_reserved
from sglang_evicpress.patches.tree.types import Node

PAUSE_S = 0.5
"""Between two looks that have found nothing."""

MOST_LOOKED = 256
"""Nodes that one look is about: some milliseconds."""


class Rewrites(IdleWork, Protocol):
    """Rewriting, a step at a time."""

    def has_failed(self, node: Node) -> bool: ...


class SsdWriting(Protocol):
    """Whether the SSD takes writes."""

    @property
    def may_write(self) -> bool: ...


@dataclass(eq=False, repr=False)
class IdleCompression:
    """Looks at some of the nodes at a time. ``plan``: decisions for nodes, by the free bytes of the SSD; ``room``: free
    bytes below the GPU; ``held``: nodes that stay as they are; ``execute`` has decisions carried out."""

    nodes: Mapping[int, Node]
    storage: Tiers
    compression: Rewrites
    ssd: SsdWriting
    plan: Callable[[Iterable[Node], int], Sequence[Decision]]
    room: Callable[[], Mapping[Tier, int]]
    held: Callable[[], Collection[int]]
    execute: Callable[[Sequence[Decision]], object]

    def __post_init__(self) -> None:
        self._next_look_s = 0.0
        self._left: list[int] = []  # ids still to be looked at

    @property
    def is_busy(self) -> bool:
        """True if something is being compressed."""
        return self.compression.is_busy

    def advance(self) -> None:
        """Go on with what is being compressed; when that is done, look for more."""
        now_s = self.storage.now_s()
        is_due = now_s >= self._next_look_s and self.storage.num_pending_jobs == 0
        is_free = is_due and not self.compression.is_busy and self.ssd.may_write
        has_begun = is_free and self._look()
        self.compression.advance()
        if is_free and not (has_begun and self.compression.is_busy):  # else what finds no room is begun for ever
            self._next_look_s = now_s + PAUSE_S

    def _look(self) -> bool:
        """Begin the best of some nodes; whether there was one."""
        self._left = self._left or list(self.nodes)
        looked, self._left = self._left[:MOST_LOOKED], self._left[MOST_LOOKED:]
        held = self.held()
        present = [node for one in looked if one not in held and (node := self.nodes.get(one)) is not None]
        on_ssd = [node for node in present if self._is_free_on_ssd(node)]
        decisions = self.plan(on_ssd, self.room().get(Tier.SSD, 0)) if on_ssd else ()
        self.execute(decisions[:1])
        return bool(decisions)

    def _is_free_on_ssd(self, node: Node) -> bool:
        """True if only the SSD has it, in an entry of its own for which host memory is free, or taken by copies of
        what the GPU has, and nobody waits for it."""
        if node.lock_ref > 0 or is_reserved(node) or node.kv.job is not None or tier_of(node) != Tier.SSD:
            return False
        entry = node.kv.copies[Tier.SSD].entry
        fits = entry.header.payload_bytes <= self.room().get(Tier.HOST, 0)
        return fits and len(entry.owners) == 1 and not self.compression.has_failed(node)
