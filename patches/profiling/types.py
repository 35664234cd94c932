"""Narrow types of the cache for shadows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_evicpress.core import Form
from sglang_evicpress.patches.tree.types import Allocator, Node
from sglang_evicpress.press import QueryWindow
from sglang_evicpress.survivors import SurvivorLayout


class ShadowTree(Protocol):
    """The tree, as far as shadows stand in it."""

    now_s: float
    root_node: Node
    page_size: int
    vocab_size: int

    def inc_lock_ref(self, node: Node) -> object:
        """Lock a path."""

    def dec_lock_ref(self, node: Node) -> object:
        """Give up a lock."""

    def _steps(self, key: RadixKey) -> list[tuple[Node, int]]:
        """The nodes that spell the longest known prefix with the tokens each matches."""

    def _take(self, steps: list[tuple[Node, int]]) -> list[Node]:
        """Make the path end at a node boundary, and note its use."""

    def _add_leaf(self, parent: Node, key: RadixKey, value: torch.Tensor, priority: int, is_lossy_prefix: bool) -> Node:
        """A new node."""

    def _replace(self, node: Node, value: torch.Tensor, is_lossy_prefix: bool) -> None:
        """Give a node full KV in place of what it holds."""

    def _delete_leaf(self, node: Node) -> None:
        """Forget a leaf whose slots are somebody else's by now."""


class Load(Protocol):
    """KV on its way to the GPU."""

    def join(self) -> None:
        """Wait until it is queued."""


class ShadowSlots(Protocol):
    """Slots of the GPU, as far as shadows need some."""

    token_to_kv_pool_allocator: Allocator
    loads: Sequence[Load]

    @property
    def num_shadow_slots(self) -> int:
        """Slots that nodes of shadows hold."""

    def free_slots(self, wanted: int) -> int:
        """Free so many by the policy's plan."""


class ShadowLedger(Protocol):
    """Counts of slots."""

    evictable: int

    def remove(self, num_slots: int) -> None:
        """An unlocked node holds so many slots less."""

    def free(self, slots: torch.Tensor) -> None:
        """Give slots back to the pool."""


class FormSizes(Protocol):
    """The menu of forms."""

    def num_slots(self, form: Form, num_tokens: int, sinks: int) -> int:
        """Slots of so many tokens in a form."""


class ShadowNodes(Protocol):
    """Kept queries of nodes, and their sinks."""

    def window_of(self, node: Node) -> QueryWindow | None:
        """Queries that were kept for the node."""

    def sinks_of(self, num_tokens: int, start: int) -> int:
        """Number of these tokens that every press keeps."""


class ShadowCompressor(Protocol):
    """The compressor, as far as shadows are copied by it."""

    def copy(self, parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Copy exact KV into other slots."""

    def copy_compressed(
        self,
        *,
        form: Form,
        parts: Sequence[torch.Tensor],
        num_tokens: int,
        into: torch.Tensor,
        window: QueryWindow | None,
    ) -> tuple[SurvivorLayout, torch.Tensor]:
        """Write what a form keeps of exact KV into other slots."""


class KnownContexts(Protocol):
    """Contexts whose quality may become known."""

    profile_identity: bytes

    def know_context(self, key: bytes, tokens: array[int], namespace: str | None) -> None:
        """A profile of it may follow."""
