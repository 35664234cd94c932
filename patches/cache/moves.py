"""Moves that the controller makes with nodes, each handed to the part that makes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from sglang_evicpress.core import Decision, Form, Tier
from sglang_evicpress.patches.tiers.types import HostForms, Removals, Slots
from sglang_evicpress.patches.tree.types import LogicalTime, Node


class OnGpu(Protocol):
    """Compressing on the GPU."""

    @property
    def is_alone(self) -> bool: ...
    def compress(self, node_id: int, form: Form) -> int: ...
    def together(self, decisions: Sequence[Decision]) -> AbstractContextManager[None]: ...


class Sends(Protocol):
    """Nodes that move down."""

    def demote(self, node_id: int, tier: Tier, form: Form, *, at_once: bool = False) -> int | None: ...


class OnSsd(Protocol):
    """Compressing what only the SSD has."""

    def begin(self, node_id: int, form: Form) -> None: ...


class Raises(Protocol):
    """Nodes that come up."""

    def promote(self, node_id: int) -> bool: ...


class Aside(Protocol):
    """Nodes of which a move has failed."""

    def add(self, node_id: int, now_s: float) -> None: ...
    def return_due(self, now_s: float) -> None: ...


@dataclass(eq=False, repr=False)
class NodeMoves:
    """The controller's ``NodeOps``. ``reason_to_drop``: why a node can become nothing else; ``num_failed`` counts by
    error what has failed."""

    nodes: Mapping[int, Node]
    gpu: OnGpu
    host: HostForms
    ssd: OnSsd
    removal: Removals
    demotion: Sends
    promotion: Raises
    aside: Aside
    ledger: Slots
    time: LogicalTime
    reason_to_drop: Callable[[Node], str | None]
    num_failed: Counter[str]

    @property
    def is_alone(self) -> bool:
        """True if no other rank must do as this one does."""
        return self.gpu.is_alone

    def compress(self, node_id: int, form: Form) -> int | None:
        """Bring a node to ``form``; returns the slots freed. What is below it is brought there in the background, None
        where that could not be begun."""
        node = self.nodes[node_id]
        if node.value is not None:
            return self.gpu.compress(node_id, form)
        if Tier.HOST in node.kv.copies:
            return 0 if self.host.compress_on_host(node, form) else None
        self.ssd.begin(node_id, form)
        return 0

    def drop(self, node_id: int, cause: str = "lost", number: int | None = None) -> int:
        return self.removal.drop(node_id, cause, number)

    def demote(self, node_id: int, tier: Tier, form: Form, *, at_once: bool = False) -> int | None:
        return self.demotion.demote(node_id, tier, form, at_once=at_once)

    def promote(self, node_id: int) -> bool:
        return self.promotion.promote(node_id)

    def cause_of_drop(self, node_id: int) -> str | None:
        """Why a node can become nothing else, where that is that no form of it was measured."""
        return self.reason_to_drop(self.nodes[node_id])

    def set_aside(self, node_id: int) -> None:
        """A move of the node failed: plans make room of others for a while."""
        self.aside.add(node_id, self.time.now_s)

    def retry_failed(self) -> None:
        """Plan again with nodes that were set aside for long enough, and free what could not be freed."""
        self.aside.return_due(self.time.now_s)
        for slots in self.ledger.take_unfreed():
            try:
                self.ledger.free_or_keep(slots)
            except Exception as error:
                if not self.is_alone:
                    raise
                self.num_failed[f"free {type(error).__name__}"] += 1

    def together(self, decisions: Sequence[Decision]) -> AbstractContextManager[None]:
        return self.gpu.together(decisions)
