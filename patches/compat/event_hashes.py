"""Names of blocks in KV events. SGLang chains them: a block's name holds that of the one before it."""

from __future__ import annotations

from typing import Protocol

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_hash_values

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tree.namespaces import salt_of, unsalted_key

MEDIA = {Tier.GPU: StorageMedium.GPU, Tier.HOST: StorageMedium.CPU, Tier.SSD: StorageMedium.DISK}
"""How SGLang calls the tiers."""


class HashedNode(Protocol):
    """SGLang's TreeNode."""

    @property
    def parent(self) -> HashedNode | None: ...

    key: RadixKey
    hash_value: list[str] | None


class SaltedNode(HashedNode, Protocol):
    """That of releases in which salts are apart from extra keys."""

    @property
    def parent(self) -> SaltedNode | None: ...

    event_hash_value: list[str] | None


def hash_above(node: HashedNode, page_size: int) -> None:
    """Name the blocks of all nodes above. SGLang names a node's where it tells of them, and takes a parent without
    names for the root; of one that was never on the GPU it tells nothing."""
    nameless = []
    above = node.parent
    while above is not None and above.hash_value is None:
        nameless.append(above)
        above = above.parent
    for each in reversed(nameless):
        each.hash_value = compute_node_hash_values(each, page_size)


class UnsaltedNode:
    """A node as SGLang would have it: the salt of its requests beside their extra key. What it is named is kept in the
    node itself."""

    def __init__(self, node: SaltedNode) -> None:
        self._node = node
        extra_key = node.key.extra_key
        extra_key = extra_key and extra_key.encode("utf-8", "replace").decode()  # SGLang encodes it strictly
        self.key = RadixKey(node.key.token_ids, unsalted_key(extra_key), cache_salt=salt_of(extra_key) or None)

    @property
    def parent(self) -> UnsaltedNode | None:
        return None if self._node.parent is None else UnsaltedNode(self._node.parent)

    @property
    def hash_value(self) -> list[str] | None:
        return self._node.hash_value

    @hash_value.setter
    def hash_value(self, names: list[str]) -> None:
        self._node.hash_value = names

    @property
    def event_hash_value(self) -> list[str] | None:
        return self._node.event_hash_value

    @event_hash_value.setter
    def event_hash_value(self, names: list[str]) -> None:
        self._node.event_hash_value = names
