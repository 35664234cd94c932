"""Signals of the tree: whoever must know of a change says so where the parts are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

from sglang_evicpress.patches.tree.types import Node

Listener = Callable[[Node], None]
P = ParamSpec("P")


class Signal(Generic[P]):
    """Calls its listeners in the order in which they subscribed."""

    def __init__(self) -> None:
        self._listeners: list[Callable[P, object]] = []

    def subscribe(self, *listeners: Callable[P, object]) -> None:
        self._listeners.extend(listeners)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for listener in self._listeners:
            listener(*args, **kwargs)


class NodeChanges:
    """``changed``: a node is new, or what it holds, covers or can become has changed. ``left_gpu``: its slots were
    freed, and lower tiers have it. ``split``: the first node was split off the second. ``deleted``: it is gone.
    ``flushed``: all of them are."""

    def __init__(self) -> None:
        self.changed = Signal[[Node]]()
        self.left_gpu = Signal[[Node]]()
        self.split = Signal[[Node, Node]]()
        self.deleted = Signal[[Node]]()
        self.flushed = Signal[[]]()
