"""Moving nodes down a tier: in the background, or at once where a request waits for their slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.types import Backups, Copies, GpuForms, HostForms, Names, Removals
from sglang_evicpress.patches.tree.node import has_child_on_gpu, size_of, start_of
from sglang_evicpress.patches.tree.types import Node


@dataclass(eq=False, repr=False)
class Demotion:
    """Sends nodes down."""

    nodes: Mapping[int, Node]
    names: Names
    placement: Copies
    removal: Removals
    gpu: GpuForms
    host: HostForms
    backup: Backups

    def demote(self, node_id: int, tier: Tier, form: Form, *, at_once: bool = False) -> int | None:
        """Bring a node to ``form`` on a lower tier: at once where that is there already, else once it was copied, or,
        with ``at_once``, as far as it comes now. Returns the slots freed now, None where nothing could be begun. A node
        whose children are still on their way off the GPU stays until another plan sends it."""
        if at_once:
            return self.demote_at_once(node_id, tier, form)
        node, freed = self.nodes[node_id], 0
        copy, is_resident, host = node.kv.copies.get(tier), node.value is not None, node.kv.copies.get(Tier.HOST)
        if form.codec == node.kv.unfit_codec:
            form = form.pressed
        if host is not None and host.form.decoded == form:
            form = host.form  # the same KV in fewer bytes
        if tier_of(node) >= tier:
            return 0  # another move of the same plan has sent it down
        if tier == Tier.SSD and self.names.ssd_scope(node.key.extra_key) is None:
            return None if node.children or node.lock_ref else self.removal.drop(node_id)
        if copy is not None and copy.form == form:
            return None if is_resident and has_child_on_gpu(node) else self.removal.release(node_id, tier)
        is_made = form != node.kv.form and (form.pressed != node.kv.form.pressed or not is_resident)
        if is_made:  # else only encoded on its way
            is_begun = self.host.compress_on_host(node, form, leaves_for=tier)
            num_kept = self.gpu.slots_in(node, form, start_of(node))
            if is_begun:
                return 0
            if not is_resident or num_kept is None or num_kept >= size_of(node):
                return None  # it may have been to become what a copy is that another move of the same plan has cost it
            freed = self.gpu.compress(node_id, replace(form, codec=node.kv.form.codec))
            if node_id not in self.nodes:
                return freed  # there was no memory to compress it
        # What was chosen to be on the SSD in a lossy form is, even where its exact KV is already: it comes back sooner.
        is_free = not (is_resident and has_child_on_gpu(node))
        was_leaving, is_begun = node.kv.is_leaving, self.backup.leave_by_copy(node, tier, form.codec)
        if not is_begun and copy is not None and copy.is_exact and is_free:
            return freed + self.removal.release(node_id, tier)  # `leave_by_copy` makes no room of it
        return freed if freed or (is_begun and not was_leaving) else None

    def demote_at_once(self, node_id: int, tier: Tier, form: Form) -> int | None:
        """Bring a node off the GPU now, as what it is or as a copy that is below; it goes on to a ``tier`` below the
        host, and to ``form`` there, in the background. Returns the slots freed: None where there is no room for a copy,
        unless the node can shrink to ``form`` where it is."""
        node, freed = self.nodes[node_id], 0
        if node.value is None or node.lock_ref > 0 or has_child_on_gpu(node):
            return self.demote(node_id, tier, form)
        below = node.kv.copies.get(tier)
        if below is not None and below.form == form:
            return self.removal.release(node_id, tier)
        codec = form.codec if form.pressed == node.kv.form.pressed else None
        if not self._is_on_host(node, form) and not self.backup.copy_at_once(node, codec):
            num_kept = self.gpu.slots_in(node, form, start_of(node))
            if form.pressed == node.kv.form.pressed or num_kept is None or num_kept >= size_of(node):
                return None  # a node of one page keeps all of it, however few of its tokens
            freed = self.gpu.compress(node_id, replace(form, codec=node.kv.form.codec))
            if node_id not in self.nodes or not self.backup.copy_at_once(node, form.codec):
                return freed
        freed += self.removal.release(node_id, Tier.HOST)
        if tier != Tier.HOST:
            self.demote(node_id, tier, form)
        return freed

    def _is_on_host(self, node: Node, form: Form) -> bool:
        """True if the host has the node as it is, or as it is to be."""
        copy = node.kv.copies.get(Tier.HOST)
        return copy is not None and (self.placement.has_same(node, Tier.HOST) or copy.form == form)
