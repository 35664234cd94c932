"""The radix tree of the simulator: nodes of whole blocks, each on one tier in one form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.traces import Request
from sglang_evicpress.traces.base import shared_blocks


@dataclass(slots=True, eq=False)
class Node:
    """Consecutive blocks that are kept together. ``curve`` is the quality per form of the menu of its tokens alone,
    ``quality`` that of the form it holds, ``lineage`` that of the prefix its KV was computed on: what was computed on
    lossy KV is as lossy, whatever becomes of that, until it is computed anew."""

    id: int
    parent: Node | None
    blocks: tuple[int, ...]
    num_tokens: int
    depth_tokens: int = 0
    children: dict[int, Node] = field(default_factory=dict)
    tier: Tier = Tier.GPU
    form: Form = EXACT
    num_bytes: int = 0
    quality: float = 1.0
    lineage: float = 1.0
    curve: Sequence[float] = ()
    weight: float = 0.0
    num_hits: int = 0
    last_use: int = 0


class Tree:
    """All nodes; the root holds nothing and is in no tier."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.root = Node(0, None, (), 0)
        self.nodes: dict[int, Node] = {}
        self._num_made = 0

    def match(self, request: Request) -> tuple[list[Node], int]:
        """The nodes that spell the longest known prefix, and how many blocks of the last one match."""
        blocks, node, path, begin = request.blocks, self.root, list[Node](), 0
        while begin < len(blocks):
            child = node.children.get(blocks[begin])
            if child is None:
                break
            path.append(child)
            size = len(child.blocks)
            if blocks[begin : begin + size] != child.blocks:
                return path, shared_blocks(blocks, child.blocks, begin)
            begin += size
            node = child
        return path, 0 if not path else len(path[-1].blocks)

    def add(self, parent: Node, blocks: tuple[int, ...]) -> Node:
        self._num_made += 1
        depth_tokens = parent.depth_tokens + parent.num_tokens
        node = Node(self._num_made, parent, blocks, len(blocks) * self.block_tokens, depth_tokens)
        parent.children[blocks[0]] = node
        self.nodes[node.id] = node
        return node

    def split(self, lower: Node, num_blocks: int) -> Node:
        """A new upper node takes the first blocks of ``lower``; it holds the same form on the same tier."""
        parent = lower.parent
        if parent is None or not 0 < num_blocks < len(lower.blocks):
            raise ValueError(f"node {lower.id} of {len(lower.blocks)} blocks cannot be split at {num_blocks}")
        upper = self.add(parent, lower.blocks[:num_blocks])
        for name in ("tier", "form", "quality", "curve", "weight", "num_hits", "last_use"):
            setattr(upper, name, getattr(lower, name))
        upper.lineage = lower.lineage
        lower.blocks = lower.blocks[num_blocks:]
        lower.num_tokens -= upper.num_tokens
        lower.depth_tokens += upper.num_tokens
        lower.parent = upper
        upper.children[lower.blocks[0]] = lower
        return upper

    def remove(self, node: Node) -> None:
        """Forget a node without children."""
        if node.children or node.parent is None:
            raise ValueError(f"node {node.id} has children: expected a leaf")
        del node.parent.children[node.blocks[0]]
        del self.nodes[node.id]
