"""Narrow types of the cache for shadows."""

from __future__ import annotations

from array import array
from typing import Protocol

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_evicpress.patches.tree.types import Allocator, Node


class ShadowTree(Protocol):
    """The tree, as far as shadows stand in it."""

    root_node: Node
    page_size: int
    vocab_size: int
    token_to_kv_pool_allocator: Allocator

    def inc_lock_ref(self, node: Node) -> object: ...
    def dec_lock_ref(self, node: Node) -> object: ...
    def _steps(self, key: RadixKey) -> list[tuple[Node, int]]: ...
    def _take(self, steps: list[tuple[Node, int]]) -> list[Node]: ...
    def _add_leaf(
        self, parent: Node, key: RadixKey, value: torch.Tensor, priority: int, is_lossy_prefix: bool
    ) -> Node: ...
    def _delete_leaf(self, node: Node) -> None:
        """Forget a leaf whose slots are somebody else's by now."""


class KnownContexts(Protocol):
    """Contexts whose quality may become known."""

    profile_identity: bytes

    def know_context(self, key: bytes, tokens: array[int], namespace: str | None) -> None: ...
