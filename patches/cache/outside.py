"""The tree and the pool, as the parts of the cache see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_evicpress.core import LowerCopy, NodeStats, Tier
from sglang_evicpress.patches.cache.admission import LockedTree
from sglang_evicpress.patches.cache.late_checkpoints import Keep
from sglang_evicpress.patches.profiling.quality import QualityTree
from sglang_evicpress.patches.profiling.types import ShadowTree
from sglang_evicpress.patches.scheduler.paged_allocator import PagedPool
from sglang_evicpress.patches.tiers.grafting import GraftedTree
from sglang_evicpress.patches.tiers.late_loads import FreePages
from sglang_evicpress.patches.tiers.layer_gate import LayerGate
from sglang_evicpress.patches.tiers.prefetch import WaitingTree as PrefetchedTree
from sglang_evicpress.patches.tree.types import Allocator, Node, WaitingTree


class GatedPool(Protocol):
    """SGLang's KV pool."""

    def register_layer_transfer_counter(self, counter: LayerGate) -> None:
        """From now on attention waits for what the counter says."""


class Pool(Allocator, PagedPool, FreePages, Protocol):
    """SGLang's allocator, with its pages."""

    def get_kvcache(self) -> GatedPool: ...


class Tree(GraftedTree, PrefetchedTree, QualityTree, ShadowTree, WaitingTree, LockedTree, Protocol):
    """The tree, whose nodes are locked and looked up, and which takes what running requests have."""

    @property
    def keep_running(self) -> Keep: ...


@dataclass(frozen=True)
class Outside:
    """What the parts ask of the tree and of the parts above them, each by one function."""

    root_of: Callable[[], Node]
    namespaces: Callable[[], Iterable[str | None]]
    delete: Callable[[Node], None]
    num_running: Callable[[], int]
    tree: Tree

    @property
    def root(self) -> Node:
        return self.root_of()


@dataclass(frozen=True)
class Later:
    """What parts ask of those that are made after them, each by one function."""

    lower_copies_of: Callable[[], Mapping[int, Sequence[LowerCopy]]]
    stats_of: Callable[[Node], NodeStats]
    note_drop: Callable[[Node, str, int | None], None]
    free_bytes: Callable[[Tier, int], int]
    make_room: Callable[[int], None]
