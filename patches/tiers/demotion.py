"""Moving nodes down a tier: in the background, or at once where a request waits for their slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.types import Copies, GpuForms, Names, Removals
from sglang_evicpress.patches.tree.node import has_child_on_gpu, size_of, start_of
from sglang_evicpress.patches.tree.types import Node


class HostForms(Protocol):
    """Compressing in host memory."""

    def compress_on_host(self, node: Node, form: Form, *, leaves_for: Tier | None = None) -> bool:
        """Begin to bring what the host has of a node to ``form``; the node goes to ``leaves_for`` then."""


class Backups(Protocol):
    """Copying to lower tiers."""

    def leave_by_copy(self, node: Node, tier: Tier) -> bool:
        """Begin to copy a node to a lower tier; it leaves its own when it is there."""

    def copy_at_once(self, node: Node) -> bool:
        """Copy what a node holds to the host, so that its slots may be freed."""


class Demotion:
    """Sends nodes down."""

    def __init__(
        self,
        nodes: Mapping[int, Node],
        names: Names,
        placement: Copies,
        removal: Removals,
        gpu: GpuForms,
        host: HostForms,
        backup: Backups,
    ) -> None:
        self._nodes = nodes
        self._names = names
        self._placement = placement
        self._removal = removal
        self._gpu = gpu
        self._host = host
        self._backup = backup

    def demote(self, node_id: int, tier: Tier, form: Form, *, at_once: bool = False) -> int:
        """Bring a node to ``form`` on a lower tier: at once where that is there already, else once it was copied, or,
        with ``at_once``, as far as it comes now. Returns the slots freed now. A node whose children are still on their
        way off the GPU stays until another plan sends it."""
        if at_once:
            return self.demote_at_once(node_id, tier, form)
        node, freed = self._nodes[node_id], 0
        copy, is_resident = node.kv.copies.get(tier), node.value is not None
        if tier_of(node) >= tier:
            return 0  # another move of the same plan has sent it down
        if tier == Tier.SSD and self._names.ssd_scope(node.key.extra_key) is None:
            return 0 if node.children or node.lock_ref else self._removal.drop(node_id)
        if copy is not None and copy.form == form:
            return 0 if is_resident and has_child_on_gpu(node) else self._removal.release(node_id, tier)
        if form != node.kv.form:
            is_begun = self._host.compress_on_host(node, form, leaves_for=tier)
            num_kept = self._gpu.slots_in(node, form, start_of(node))
            if is_begun or not is_resident or num_kept is None or num_kept >= size_of(node):
                return 0  # it may have been to become what a copy is that another move of the same plan has cost it
            freed = self._gpu.compress(node_id, form)
            if node_id not in self._nodes:
                return freed  # there was no memory to compress it
        # What was chosen to be on the SSD in a lossy form is, even where its exact KV is already: it comes back sooner.
        is_free = not (is_resident and has_child_on_gpu(node))
        if not self._backup.leave_by_copy(node, tier) and copy is not None and copy.is_exact and is_free:
            freed += self._removal.release(node_id, tier)  # `leave_by_copy` makes no room of it
        return freed

    def demote_at_once(self, node_id: int, tier: Tier, form: Form) -> int:
        """Bring a node off the GPU now, as what it is or as a copy that is below; it goes on to ``tier`` and ``form``
        in the background. Returns the slots freed: none where there is no room for a copy, unless the node can shrink
        to ``form`` where it is."""
        node, freed = self._nodes[node_id], 0
        if node.value is None or node.lock_ref > 0 or has_child_on_gpu(node):
            return self.demote(node_id, tier, form)
        below = node.kv.copies.get(tier)
        if below is not None and below.form == form:
            return self._removal.release(node_id, tier)
        if not self._is_on_host(node, form) and not self._backup.copy_at_once(node):
            if form == node.kv.form or self._gpu.slots_in(node, form, start_of(node)) is None:
                return 0
            freed = self._gpu.compress(node_id, form)
            if node_id not in self._nodes or not self._backup.copy_at_once(node):
                return freed
        freed += self._removal.release(node_id, Tier.HOST)
        if tier != Tier.HOST or form != node.kv.form:
            self.demote(node_id, tier, form)
        return freed

    def _is_on_host(self, node: Node, form: Form) -> bool:
        """True if the host has the node as it is, or as it is to be."""
        copy = node.kv.copies.get(Tier.HOST)
        return copy is not None and (self._placement.has_same(node, Tier.HOST) or copy.form == form)
