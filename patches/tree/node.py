"""Fields of a radix-tree node beside SGLang's own: form, survivors, lineage and statistics."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.introspect.census import Counted
from sglang_evicpress.press import QueryWindow
from sglang_evicpress.survivors import SurvivorLayout
from sglang_evicpress.tiers.entry.copies import Copy


@dataclass(slots=True)
class NodeKV:
    """The record at ``node.kv``.

    ``slots``/``layout`` are None while the node is full: its slots are then ``node.value``. A compressed node shows
    holes (0) in ``node.value``. ``is_lossy_prefix``: its KV was computed on top of a lossy prefix, so it is lossy
    itself, and worth no more than ``prefix_quality``, the mean quality of that prefix then. ``origin`` is the node
    whose compression it comes from (the pieces of a split share it), None while it is full. ``window`` is the key of
    the queries kept for it. ``weight`` is the expected reuse in uses per second, ``num_hits`` counts requests that used
    the node or wait to; ``last_use`` is a logical tick, equal on every rank. ``queued hits`` are those of waiting
    requests, by number (queued_hits.py).

    ``copies`` are what lower tiers have of it; while it is not on the GPU (``node.value`` is None) the fields above say
    what its fastest copy is. ``version`` changes whenever its slots do; ``job`` copies them to the host now, and
    ``is_leaving`` says that they are to be freed then. ``load`` brings what they are to hold, for a request
    (tiers/load_back.py). ``num_prefetches`` waiting requests will load it (tiers/prefetch.py).
    ``is_shadow``: it belongs to a shadow (profiling/shadows.py).

    ``profiles`` are the profiled contexts that end in the node or below it, newest last, by key, with their length;
    ``curve`` is the quality of every form of the menu that those show which make up most of the node, None while that
    is what an unprofiled node is taken for. ``is_text``: every token of it and of the path above it is in the
    model's vocabulary; what is not has no profile, and goes to no lower tier; nor does what is not ``is_finite``: it
    holds NaN or Inf, which no codec stores. ``unfit_codec``: one that has no room for what it holds. ``is_aside``: a
    move of it has failed, and no plan is about it for a while; ``has_failed``: one did, and it is not compressed any
    more.
    """

    form: Form = EXACT
    slots: torch.Tensor | None = None
    layout: SurvivorLayout | None = None
    is_lossy_prefix: bool = False
    prefix_quality: float = 1.0
    weight: float = 1.0
    num_hits: int = 1
    last_use: int = 0
    window: int | None = None
    origin: int | None = None
    queued_hits: dict[int, Any] = field(default_factory=dict)
    copies: dict[Tier, Copy] = field(default_factory=dict)
    version: int = 0
    job: Any = None
    is_leaving: bool = False
    load: Any = None
    num_prefetches: int = 0
    is_shadow: bool = False
    profiles: dict[bytes, Any] = field(default_factory=dict)
    curve: Any = None
    is_text: bool = True
    is_finite: bool = True
    unfit_codec: str | None = None
    is_aside: bool = False
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """KV of a node in the pool: its ``slots`` [n], the ``layout`` of its survivors, None where it is full, the position
    ``start`` of the first of its ``num_tokens``, and the queries kept for it."""

    slots: torch.Tensor
    layout: SurvivorLayout | None
    start: int
    num_tokens: int
    window: QueryWindow | None


@dataclass(frozen=True, slots=True)
class GroupSlots:
    """Slots of the first ``num_slots`` of a prefix that the layers of each group read: ``groups`` holds int64 [count]
    for each group."""

    num_slots: int
    groups: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class PrefixView:
    """The prefix a request took from the tree: its physical ``slots``, the ``holes`` among its logical tokens, and
    whether any of it is lossy. ``is_counted``: the hit is in the nodes' statistics already. ``shared`` is what layers
    read of the tree where they do not all read the same; None where they do."""

    slots: torch.Tensor
    holes: int = 0
    is_lossy: bool = False
    is_counted: bool = False
    shared: GroupSlots | None = None

    def extended(self, own: torch.Tensor, num_tree: int) -> PrefixView:
        """The same request's view with its first ``num_tree`` slots, and then slots ``own`` of one token each."""
        return PrefixView(torch.cat([self.slots[:num_tree], own]), self.holes, self.is_lossy, True, self.shared)


def view_of_path(path: Sequence[Any], device: torch.device) -> PrefixView:
    """The prefix that a request takes from the tree with these nodes."""
    parts = [slots_of(node) for node in path] or [torch.empty(0, dtype=torch.int64, device=device)]
    holes = sum(len(node.key) - num_slots(node) for node in path)
    slots = torch.cat(parts)
    return PrefixView(slots, holes, any(is_lossy(node) for node in path), shared=_group_slots(path, parts, device))


def _group_slots(path: Sequence[Any], parts: Sequence[torch.Tensor], device: torch.device) -> GroupSlots | None:
    """What the layers of each group read of a path whose nodes hold ``parts``; None where all read all."""
    fillings = [None if node.kv.layout is None else node.kv.layout.filling for node in path]
    num_groups = next((len(filling.counts) for filling in fillings if filling is not None), 0)
    if not num_groups:
        return None
    groups = tuple(
        torch.cat(
            [
                part if filling is None else part[filling.index_of(group, device)]
                for part, filling in zip(parts, fillings, strict=True)
            ]
        )
        for group in range(num_groups)
    )
    return GroupSlots(sum(map(len, parts)), groups)


def holes_of(req: Any) -> int:
    """The holes in the prefix of a request; none in one that was never matched."""
    view = getattr(req, "evicpress", None)
    return 0 if view is None else int(view.holes)


def slots_of(node: Any) -> torch.Tensor:
    """The physical slots of a node, in order, without holes."""
    slots = node.kv.slots
    return node.value if slots is None else slots


def kv_of(node: Any, window: QueryWindow | None) -> NodeSlots:
    """KV of a node that is on the GPU, with the queries kept for it."""
    return NodeSlots(slots_of(node), node.kv.layout, start_of(node), len(node.key), window)


def num_slots(node: Any) -> int:
    """The physical slots of a node: none while it is not on the GPU."""
    return 0 if node.value is None else size_of(node)


def census_of(node: Any) -> Counted:
    """The node as it is counted in the totals of ``/evicpress/stats``."""
    kv, on_gpu = node.kv, num_slots(node)
    held = [(copy.tier, copy.form, math.ceil(copy.mean_slots)) for _, copy in sorted(kv.copies.items())]
    if node.value is not None:
        held.insert(0, (Tier.GPU, kv.form, on_gpu))
    return Counted(kv.form, len(node.key), on_gpu, bool(kv.is_shadow), tuple(held))


def is_reserved(node: Any) -> bool:
    """True if a node stays where it is with no request running on it: a shadow's, one of which a move has failed, or
    one below the GPU that a request waits for."""
    return bool(node.kv.is_shadow or node.kv.is_aside) or (node.value is None and node.kv.num_prefetches > 0)


def size_of(node: Any) -> int:
    """The slots that what a node holds takes, wherever it is."""
    layout = node.kv.layout
    return len(node.key) if layout is None else layout.num_slots


def mean_size_of(node: Any) -> float:
    """The slots that a layer of a node fills on average, wherever it is."""
    layout = node.kv.layout
    return len(node.key) if layout is None else float(layout.mean_slots)


def has_child_on_gpu(node: Any) -> bool:
    return any(child.value is not None for child in node.children.values())


def is_lossy(node: Any) -> bool:
    return not node.kv.form.is_exact or node.kv.is_lossy_prefix


MOST_SHORT = 1 / 64
"""Slots that pieces of another compression lack, of the tokens behind them, where these are served all the same."""


def steps_of(root: Any, key: Any, page_size: int) -> list[tuple[Any, int]]:
    """The nodes that spell the longest known prefix of ``key``, a RadixKey, with the tokens each matches."""
    node, steps = root, []
    while len(key) > 0:
        node = node.children.get(key.child_key(page_size))
        if node is None:
            break
        matched = node.key.match(key, page_size=page_size)
        steps.append((node, matched))
        if matched < len(node.key):
            break
        key = key[matched:]
    return steps


def servable_steps(steps: list[tuple[Any, int]], min_match_kept: float) -> int:
    """Number of steps (node, matched tokens) of a path that a request can take from the tree.

    A match that ends inside a compressed node may be left with next to no slots (its survivors lie further back); then
    the request is better off computing those tokens anew. The bar is ``min_match_kept`` of what the form promises to
    keep. The pieces of one compression are judged together, so a split loses nothing on the original path. Of what
    another compression left short, ``MOST_SHORT`` of what follows may be missing: a few tokens, to compute which all
    behind them would be computed anew.
    """
    servable, origin, due, slots, short, behind = 0, None, 0.0, 0.0, 0.0, 0
    for index, (node, matched) in enumerate(steps):
        kv = node.kv
        if kv.origin is None or kv.origin != origin:
            short += max(0.0, due - slots)
            origin, due, slots = kv.origin, 0.0, 0.0
        behind += matched if short else 0
        if kv.layout is not None:
            due += min_match_kept * kv.form.kept_fraction * matched
            slots += kv.layout.mean_slots if matched == len(node.key) else kv.layout.mean_before(matched)
        if short <= MOST_SHORT * behind and (kv.layout is None or 0 < slots >= due):
            servable = index + 1
    return servable


def start_of(node: Any) -> int:
    """Absolute position of the node's first token: the logical length of the path above it."""
    start = 0
    while (node := node.parent) is not None:
        start += len(node.key)
    return start


def path_to(node: Any) -> list[Any]:
    """The nodes from below the root to ``node``."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def tokens_to(node: Any) -> array[int]:
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


def iter_nodes(root: Any) -> Iterator[Any]:
    """Every node below ``root``, parents first, in insertion order (the same on every rank)."""
    stack = list(reversed(root.children.values()))
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children.values()))
