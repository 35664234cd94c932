"""Checks of a walk over all that the cache does at once: rows as they were computed, and slots counted anew."""

from __future__ import annotations

import numpy as np
import torch
from tests.contract.cache.test_radix_cache_model import Request, Walk, held_in, path_hashes
from tests.contract.profiling.test_shadows import without
from tests.contract.tiers.test_tiers_model import DIM, HEADS, LAYERS, TierWalk, bits

from sglang_evicpress.core import Tier
from sglang_evicpress.decode_budget import schedule
from sglang_evicpress.patches.attention.request_holes import RequestHoles
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.decode_budget.state import budget_of, num_logical, num_physical, positions_of
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node import iter_nodes, path_to, slots_of, tokens_to

ROUNDING = {"int8": 1.5, "int4": 11.0, "int2": 46.0}
"""Error of a value from -125 to 125 that comes back, at most: half of what lies between two codes, that of the codec
that it may have had before, and the rounding to 16 bits."""


class MachineOracle(TierWalk):
    """The checks. ``held`` are nodes that somebody has locked; ``seen`` is what requests were last seen to read; a row
    is off by ``rounding`` at most."""

    rounding: float
    held: list[object]
    seen: dict[int, tuple[bytes, list[set[tuple[int, int]]]]]
    table: RequestHoles
    is_looking = False  # without waiting for what is being loaded, as attention does

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        if not self.is_looking:
            return super().read(slots)
        buffers = (*self.pool.k_buffer, *self.pool.v_buffer)
        found = torch.stack([buffer[slots] for buffer in buffers])
        return found.view(2, LAYERS, len(slots), HEADS, DIM).transpose(2, 3)

    def view_of(self, request: Request) -> list[set[tuple[int, int]]]:
        """View as of TierWalk; rows that a codec has rounded are those of the request's tokens that they are like."""
        if self.rounding == 0.0:
            return super().view_of(request)
        rows = torch.stack([self.read(self.row_of(request, layer))[:, layer] for layer in range(LAYERS)])
        data = bits(rows).tobytes()
        if id(request) in self.seen and self.seen[id(request)][0] == data:
            return self.seen[id(request)][1]
        num_tokens = len(request.tokens)
        hashes = np.array(path_hashes(request.tokens, self.adapter_of(request.extra_key)))
        at = np.broadcast_to(np.arange(num_tokens), (LAYERS, HEADS, num_tokens))
        known = self.expected(hashes[at], at).transpose(0, 1).float()  # [layers, K or V, heads, tokens, dim]
        views = []
        for layer in range(LAYERS):
            for head in range(HEADS):
                own = rows[layer, :, head].float().transpose(0, 1).flatten(1)
                others = known[layer, :, head].transpose(0, 1).flatten(1)
                distance = torch.cdist(own, others, p=float("inf"))
                nearest = distance.min(1)
                assert (nearest.values <= self.rounding).all(), "no row was ever computed so"
                positions = nearest.indices.tolist()
                assert len(set(positions)) == len(positions), "an entry twice"
                views.append({(int(hashes[position]), position) for position in positions})
        self.seen[id(request)] = data, views
        return views

    def verify(self, request: Request) -> None:
        state = budget_of(request)
        if state is None or not state.has_left_tree:
            super().verify(request)
            assert state is None or state.num_dropped == 0
            return
        assert state.num_dropped % self.page == 0, "own holes are whole pages"
        assert int(self.table.host[request.req_pool_idx]) == state.num_dropped
        assert request.evicpress.holes == request.cache_protected_len == 0
        num_slots = num_physical(request)
        assert num_logical(request) == len(request.tokens)
        assert num_slots <= schedule.peak(state.settings, self.page)
        held = positions_of(state.positions, num_logical(request), num_slots, "cpu").long()
        held = held.expand(LAYERS, HEADS, -1).numpy()
        hashes = np.array(path_hashes(request.tokens, self.adapter_of(request.extra_key)))
        row = self.rows.req_to_token[request.req_pool_idx, :num_slots].long()
        self.compare(self.read(row), self.expected(hashes[held], held), self.rounding, request.rid)
        for before, now in zip(request.frozen_view, self.view_of(request), strict=True):
            assert before <= now, "something was dropped without a pass"

    def compare(self, found: torch.Tensor, wanted: torch.Tensor, rounding: float, what: str) -> None:
        if rounding == 0.0:
            assert np.array_equal(bits(found), bits(wanted)), f"{what} holds other rows than were computed"
        elif found.numel():
            distance = float((found.float() - wanted.float()).abs().max())
            assert distance <= rounding, f"{what} holds rows that are off by {distance}"

    def check_rows(self) -> None:
        """Check every node on the GPU against what was computed for its tokens: bit for bit, or within what its codec
        rounds. Layers that are still on their way are left out."""
        arriving = list(self.tiers.loads)
        for node in iter_nodes(self.cache.root_node):
            if node.value is None:
                continue
            load = None if node.kv.load is None else node.kv.load.whole
            hashes = np.array(path_hashes(tokens_to(node), self.adapter_of(node.key.extra_key)))
            for layer in range(LAYERS):
                if load in arriving and not load._here[layer].is_set():
                    continue
                slots, held = held_in(node, layer)
                held = held.numpy().astype(np.int64)
                positions = np.broadcast_to(held, (LAYERS, *held.shape))
                found, wanted = self.read(slots)[:, layer], self.expected(hashes[positions], positions)[:, layer]
                rounding = ROUNDING[node.kv.form.codec] if node.kv.form.has_lossy_codec else 0.0
                self.compare(found, wanted, rounding, f"node {node.id} in form {node.kv.form}, layer {layer},")

    def check_slots(self) -> None:
        """Count slots without the product: each is free, a node's, a request's or a load's, and only that."""
        owners = [("free", RELEASE.free_pages(self.allocator))]
        owners += [(f"node {node.id}", slots_of(node) // self.page) for node in iter_nodes(self.cache.root_node)]
        for request in self.running:
            own = request.cache_protected_len - request.evicpress.holes
            end = request.kv_allocated_len - request.evicpress.holes
            row = self.rows.req_to_token[request.req_pool_idx, own:end].long()
            owners.append((request.rid, row // self.page))
        for load in [*self.tiers.loads._unseen, *self.tiers.loads.late]:
            owners += [("a load", part.slots // self.page) for part in load.parts]
        pages: dict[int, str] = {}
        for name, held in owners:
            for page in torch.unique(held).tolist() if name != "free" else held.tolist():
                assert page not in pages, f"page {page} is {name}'s and {pages[page]}'s"
                pages[page] = name
        assert sorted(pages) == list(range(1, self.allocator.size // self.page + 1)), "a page is nobody's"

    def check_tiers(self) -> None:
        """Check that all above a node on the GPU is there too, that no node is nowhere, that each lock has a holder."""
        locks: dict[int, int] = {}
        holders = [request.last_node for request in self.running] + self.held
        holders += [each.pinned for each in self.tiers.prefetches.by_request.values() if each.pinned is not None]
        holders += [last for load in self.tiers.loads for last in load.last_nodes]
        for holder in holders:
            for node in path_to(holder) if holder is not self.cache.root_node else ():
                locks[node.id] = locks.get(node.id, 0) + 1
        for node in self.cache.nodes.values():
            is_top = node.parent is self.cache.root_node
            assert node.value is not None or node.kv.copies, f"node {node.id} is nowhere"
            assert is_top or node.value is None or node.parent.value is not None, f"node {node.id} hangs in the air"
            assert is_top or node.parent.id in self.cache.nodes
            assert node.kv.is_shadow == is_shadow_name(node.key.extra_key)
            assert not (node.kv.is_shadow and tier_of(node) != Tier.GPU), "a shadow was moved"
            assert node.lock_ref == locks.get(node.id, 0), f"node {node.id} has other locks than holders"

    def check(self) -> None:
        self.is_looking = True
        try:
            background = [request for request in self.waiting if is_shadow_name(request.extra_key)]
            with without(self.waiting, background):  # they queued hit nothing
                Walk.check(self)
            for request in self.running:
                assert all(node.key.extra_key == request.extra_key for node in path_to(request.last_node))
            assert not [name for name in self.tree.storage.errors if name.endswith("internal")]
            assert not self.cache.parts.controller.num_failed, self.cache.parts.controller.num_failed
            self.check_slots()
            self.check_tiers()
            self.check_rows()
        finally:
            self.is_looking = False
