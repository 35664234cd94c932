"""Bringing nodes back from the host for a request: slots now, bytes while the batch that wants them computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.patches.tiers.load import Load, Part
from sglang_evicpress.patches.tiers.types import Tiers
from sglang_evicpress.patches.tree.node import path_to, view_of_path
from sglang_evicpress.patches.tree.node_kv import PrefixView
from sglang_evicpress.patches.tree.types import Allocator, Node, Request
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry


class LoadingRequest(Request, Protocol):
    """A request, with what it takes from below the GPU."""

    host_hit_length: int
    storage_hit_length: int
    evicpress: PrefixView
    evicpress_without_room: bool
    evicpress_loaded: dict[int, tuple[Tier, Form]]


@dataclass(eq=False, repr=False)
class LoadBack:
    """Begins loads. Only physical slots are allocated. ``place`` gives a node its slots; ``make_room`` evicts until so
    many are free; ``from_ssd``: the host entries that were read from the SSD for a request."""

    storage: Tiers
    allocator: Allocator
    add_load: Callable[[Sequence[Part], Node], Load]
    place: Callable[[Node, Copy, torch.Tensor], torch.Tensor]
    lock: Callable[[Node], object]
    unlock: Callable[[Node], object]
    make_room: Callable[[int], None]
    from_ssd: Callable[[Request], Collection[HostEntry]]
    device: str

    def bring_back(self, req: LoadingRequest, last: Node) -> tuple[torch.Tensor, Node]:
        """Bring the path down to ``last`` onto the GPU, whose copies on the host were ready when it was matched.

        Returns the logical indices of the loaded nodes, with holes, and the last of them; nothing and the last node on
        the GPU when there is no room, or a rank has seen since that one is damaged.
        """
        path, host = path_to(last), self.storage.host
        wanted = [node for node in path if node.value is None]
        copies = [node.kv.copies[Tier.HOST] for node in wanted if Tier.HOST in node.kv.copies]
        needed = sum(copy.num_slots for copy in copies)
        self.lock(last)  # they hold no slot yet, and must not go while room is made
        for copy in copies:
            host.pin(copy.entry)
        (is_damaged,) = self.storage.ranks.any_of([any(copy.entry.is_damaged for copy in copies)])
        if not is_damaged:
            self.make_room(needed)
        slots = self.allocator.alloc(needed) if len(copies) == len(wanted) and not is_damaged else None
        if slots is None:
            self.storage.counts["loads_of_damaged" if is_damaged else "loads_without_room"] += 1
            self.unlock(last)
            for copy in copies:
                host.unpin(copy.entry)
            req.host_hit_length, req.evicpress_without_room = 0, True
            return torch.empty(0, dtype=torch.int64, device=self.device), req.last_node
        sizes = [copy.num_slots for copy in copies]
        parts = [Part(copy, own) for copy, own in zip(copies, slots.to(torch.int64).split(sizes), strict=True)]
        values = []
        for node, part in zip(wanted, parts, strict=True):
            values.append(self.place(node, part.copy, part.slots))
        load = self.add_load(parts, last)
        for node in wanted:
            node.kv.load = load
        from_ssd = self.from_ssd(req)  # by entry: the nodes may have been split since
        tiers = [Tier.SSD if copy.entry in from_ssd else Tier.HOST for copy in copies]
        req.storage_hit_length = sum(
            len(node.key) for node, tier in zip(wanted, tiers, strict=True) if tier == Tier.SSD
        )
        found = zip(wanted, tiers, copies, strict=True)
        req.evicpress_loaded = {node.id: (tier, copy.form) for node, tier, copy in found}
        self.storage.counts["loaded_tokens"] += sum(len(node.key) for node in wanted)
        self.storage.counts["loads"] += 1
        req.evicpress = view_of_path(path, slots.device)
        return torch.cat(values), last
