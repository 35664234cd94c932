"""The record of a radix-tree node beside SGLang's own fields: form, survivors, lineage and statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.press import QueryWindow
from sglang_evicpress.survivors import SurvivorLayout
from sglang_evicpress.tiers.entry.copies import Copy, ExternalCopy


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
    what its fastest copy is. ``external`` is what the external store was last seen to have of it.

    ``version`` changes whenever its slots do; ``job`` copies them to the host now, and
    ``is_leaving`` says that they are to be freed then. ``load`` brings what they are to hold, for a request
    (tiers/load_back.py). ``num_prefetches`` waiting requests will load it (tiers/prefetch.py).
    ``is_shadow``: it belongs to a shadow (profiling/shadows.py).

    ``profiles`` are the profiled contexts that end in the node or below it, newest last, by key, with their length;
    ``curve`` is the quality of every form of the menu that those show which make up most of the node, None while that
    is what an unprofiled node is taken for. ``is_text``: every token of it and of the path above it is in the
    model's vocabulary; what is not has no profile, and goes to no lower tier; nor does what is not ``is_finite``: it
    holds NaN or Inf, which no codec stores. ``unfit_codec``: one that has no room for what it holds. ``is_aside``: a
    move of it has failed, and no plan is about it for a while; ``has_failed``: one did, and it is not compressed any
    more; ``room_bytes``: for a while it gets no smaller copy of more than that, for which there was no room.
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
    external: ExternalCopy | None = None
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
    room_bytes: int | None = None


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
