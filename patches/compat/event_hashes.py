"""Names of blocks in KV events. SGLang chains them: a block's name holds that of the one before it."""

from __future__ import annotations

from typing import Protocol

from sglang.srt.mem_cache.utils import compute_node_hash_values


class HashedNode(Protocol):
    """SGLang's TreeNode."""

    @property
    def parent(self) -> HashedNode | None: ...

    hash_value: list[str] | None


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
