"""Nodes of the radix tree with our record: their slots, their path, and the prefix that a request takes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_evicpress.core import Tier
from sglang_evicpress.introspect.census import Counted
from sglang_evicpress.patches.tree.node_kv import NodeSlots, PrefixView
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.press import QueryWindow

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey


def view_of_path(path: Sequence[Node], device: torch.device) -> PrefixView:
    """The prefix that a request takes from the tree with these nodes."""
    parts = [slots_of(node) for node in path] or [torch.empty(0, dtype=torch.int64, device=device)]
    holes = sum(len(node.key) - num_slots(node) for node in path)
    return PrefixView(torch.cat(parts), holes, any(is_lossy(node) for node in path))


def holes_of(req: object) -> int:
    """The holes in the prefix of a request; none in one that was never matched."""
    view = getattr(req, "evicpress", None)
    return 0 if view is None else int(view.holes)


def slots_of(node: Node) -> torch.Tensor:
    """The physical slots of a node, in order, without holes."""
    slots = node.value if node.kv.slots is None else node.kv.slots
    if slots is None:
        raise ValueError(f"node {node.id} is not on the GPU: it has no slots")
    return slots


def kv_of(node: Node, window: QueryWindow | None) -> NodeSlots:
    """KV of a node that is on the GPU, with the queries kept for it."""
    return NodeSlots(slots_of(node), node.kv.layout, start_of(node), len(node.key), window)


def num_slots(node: Node) -> int:
    """The physical slots of a node: none while it is not on the GPU."""
    return 0 if node.value is None else size_of(node)


def census_of(node: Node) -> Counted:
    """The node as it is counted in the totals of ``/evicpress/stats``."""
    kv, on_gpu = node.kv, num_slots(node)
    held = [(copy.tier, copy.form, copy.num_slots) for _, copy in sorted(kv.copies.items())]
    if node.value is not None:
        held.insert(0, (Tier.GPU, kv.form, on_gpu))
    return Counted(kv.form, len(node.key), on_gpu, bool(kv.is_shadow), tuple(held))


def is_reserved(node: Node) -> bool:
    """True if a node stays where it is with no request running on it: a shadow's, one of which a move has failed, or
    one below the GPU that a request waits for."""
    return bool(node.kv.is_shadow or node.kv.is_aside) or (node.value is None and node.kv.num_prefetches > 0)


def size_of(node: Node) -> int:
    """The slots that what a node holds takes, wherever it is."""
    layout = node.kv.layout
    return len(node.key) if layout is None else layout.num_slots


def has_child_on_gpu(node: Node) -> bool:
    return any(child.value is not None for child in node.children.values())


def is_lossy(node: Node) -> bool:
    return not node.kv.form.is_exact or node.kv.is_lossy_prefix


MOST_SHORT = 1 / 64
"""Slots that pieces of another compression lack, of the tokens behind them, where these are served all the same."""


def steps_of(root: Node, key: RadixKey, page_size: int) -> list[tuple[Node, int]]:
    """The nodes that spell the longest known prefix of ``key``, a RadixKey, with the tokens each matches."""
    node, steps = root, []
    while len(key) > 0:
        child = node.children.get(key.child_key(page_size))
        if child is None:
            break
        node = child
        matched = node.key.match(key, page_size=page_size)
        steps.append((node, matched))
        if matched < len(node.key):
            break
        key = key[matched:]
    return steps


def servable_steps(steps: list[tuple[Node, int]], min_match_kept: float) -> int:
    """Number of steps (node, matched tokens) of a path that a request can take from the tree.

    A match that ends inside a compressed node may be left with next to no slots (its survivors lie further back); then
    the request is better off computing those tokens anew. The bar is ``min_match_kept`` of what the form promises to
    keep. The pieces of one compression are judged together, so a split loses nothing on the original path. Of what
    another compression left short, ``MOST_SHORT`` of what follows may be missing: a few tokens, to compute which all
    behind them would be computed anew.
    """
    servable, origin, due, slots, short, behind = 0, None, 0.0, 0, 0.0, 0
    for index, (node, matched) in enumerate(steps):
        kv = node.kv
        if kv.origin is None or kv.origin != origin:
            short += max(0.0, due - slots)
            origin, due, slots = kv.origin, 0.0, 0
        behind += matched if short else 0
        if kv.layout is not None:
            due += min_match_kept * kv.form.kept_fraction * matched
            slots += kv.layout.num_slots if matched == len(node.key) else kv.layout.slots_before(matched)
        if short <= MOST_SHORT * behind and (kv.layout is None or 0 < slots >= due):
            servable = index + 1
    return servable


def start_of(node: Node) -> int:
    """Absolute position of the node's first token: the logical length of the path above it."""
    start = 0
    while (node := node.parent) is not None:
        start += len(node.key)
    return start


def path_to(node: Node) -> list[Node]:
    """The nodes from below the root to ``node``."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def tokens_to(node: Node) -> array[int]:
    """Tokens of the path down to the node and of itself."""
    tokens = array("q")
    for each in path_to(node):
        tokens.extend(each.key.raw_token_ids())
    return tokens


def first_outside(tokens: Sequence[int], vocab_size: int) -> int | None:
    """The index of the first token that is not in [0, vocab_size); None where there is none."""
    row = np.asarray(tokens)
    if not row.size or (int(row.min()) >= 0 and int(row.max()) < vocab_size):
        return None
    return int(((row < 0) | (row >= vocab_size)).argmax())


def iter_nodes(root: Node) -> Iterator[Node]:
    """Every node below ``root``, parents first, in insertion order (the same on every rank)."""
    stack = list(reversed(root.children.values()))
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children.values()))
