"""Signals of the tree: what becomes of a node is told to whoever keeps books of nodes."""

from __future__ import annotations

from collections.abc import Callable

from sglang_evicpress.patches.tree.types import Node

Listener = Callable[[Node], None]


class NodeChanges:
    """Calls its listeners in the order in which they subscribed."""

    def __init__(self) -> None:
        self._on_changed: list[Listener] = []
        self._on_left_gpu: list[Listener] = []

    def subscribe(self, on_changed: Listener) -> None:
        self._on_changed.append(on_changed)

    def subscribe_to_leaving(self, on_left_gpu: Listener) -> None:
        self._on_left_gpu.append(on_left_gpu)

    def changed(self, node: Node) -> None:
        """A node is new, or what it holds, covers or can become has changed."""
        for listener in self._on_changed:
            listener(node)

    def left_gpu(self, node: Node) -> None:
        """A node's slots were freed; lower tiers have it."""
        for listener in self._on_left_gpu:
            listener(node)
