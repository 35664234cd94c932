"""Moves that the controller makes with nodes, each handed to the part that makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from sglang_evicpress.core import Decision, Form, Tier
from sglang_evicpress.patches.tree.types import Node


class OnGpu(Protocol):
    """Compressing on the GPU."""

    def compress(self, node_id: int, form: Form) -> int:
        """Bring a node to ``form`` in place; the slots freed."""

    def together(self, decisions: Sequence[Decision]) -> AbstractContextManager[None]:
        """While a plan is carried out on several ranks."""


class OnHost(Protocol):
    """Compressing in host memory."""

    def compress_on_host(self, node: Node, form: Form) -> bool:
        """Begin to bring what the host has of a node to ``form``."""


class Drops(Protocol):
    """Nodes that go."""

    def drop(self, node_id: int, cause: str = "lost", number: int | None = None) -> int:
        """Forget a childless, unlocked node; the slots freed."""


class Sends(Protocol):
    """Nodes that move down."""

    def demote(self, node_id: int, tier: Tier, form: Form, *, at_once: bool = False) -> int:
        """Bring a node to a lower tier; the slots freed now."""


class Aside(Protocol):
    """Nodes of which a move has failed."""

    def add(self, node_id: int, now_s: float) -> None:
        """A move of the node has failed."""


class NodeMoves:
    """The controller's ``GpuOps``. ``cause_of_drop``: why a node can become nothing else; ``now_s``: logical time."""

    def __init__(
        self,
        nodes: Mapping[int, Node],
        gpu: OnGpu,
        host: OnHost,
        removal: Drops,
        demotion: Sends,
        aside: Aside,
        cause_of_drop: Callable[[Node], str | None],
        now_s: Callable[[], float],
        *,
        is_alone: Callable[[], bool],
    ) -> None:
        self._nodes = nodes
        self._gpu = gpu
        self._host = host
        self._removal = removal
        self._demotion = demotion
        self._aside = aside
        self._cause_of_drop = cause_of_drop
        self._now_s = now_s
        self._is_alone = is_alone

    @property
    def is_alone(self) -> bool:
        """True if no other rank must do as this one does."""
        return self._is_alone()

    def compress(self, node_id: int, form: Form) -> int:
        """Bring a node to ``form``; returns the slots freed. What is on the host is brought there in the background."""
        node = self._nodes[node_id]
        if node.value is not None:
            return self._gpu.compress(node_id, form)
        self._host.compress_on_host(node, form)
        return 0

    def drop(self, node_id: int, cause: str = "lost", number: int | None = None) -> int:
        """See ``Removal.drop``."""
        return self._removal.drop(node_id, cause, number)

    def demote(self, node_id: int, tier: Tier, form: Form, *, at_once: bool = False) -> int:
        """See ``Demotion.demote``."""
        return self._demotion.demote(node_id, tier, form, at_once=at_once)

    def cause_of_drop(self, node_id: int) -> str | None:
        """Why a node can become nothing else, where that is that no form of it was measured."""
        return self._cause_of_drop(self._nodes[node_id])

    def set_aside(self, node_id: int) -> None:
        """A move of the node failed: plans make room of others for a while."""
        self._aside.add(node_id, self._now_s())

    def together(self, decisions: Sequence[Decision]) -> AbstractContextManager[None]:
        """See ``GpuOps.together``."""
        return self._gpu.together(decisions)
