"""Changes to the tiers from outside: what the admin routes of ``/evicpress`` do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sglang_evicpress.core import CODECS, Decision, Form, Option, Tier
from sglang_evicpress.introspect.operations import NodeBusy, UnknownNode
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.types import NodeHolds, Removals, Rounds, Tiers
from sglang_evicpress.patches.tree.node import size_of
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.menu import Menu

MOVE_WAIT_S = 0.5
"""How long a question waits for the move that it asked for; the move goes on after that."""


class Folders(Protocol):
    """The SSD folder in use."""

    def attach(self, folder: str, gb: float, write_gb_per_day: float | None) -> None: ...
    def detach(self) -> None: ...


@dataclass(eq=False, repr=False)
class TierAdmin:
    """``InspectableTiers``. ``execute`` has decisions carried out; ``describe_tiers`` answers what the tiers are after
    a change."""

    nodes: Mapping[int, Node]
    storage: Tiers
    removal: Removals
    execute: Callable[[Sequence[Decision]], int]
    holds: NodeHolds
    rounds: Rounds
    folders: Folders
    describe_tiers: Callable[[], dict[str, object]]
    release_shadows: Callable[[], int]
    menu: Menu

    def flush_tier(self, tier: Tier) -> dict[str, object]:
        tiers = self.storage.tiers
        if tier not in tiers:
            raise ValueError(f"there is no {tier.label} tier: expected one of {_labels(tiers)}")
        if tier == Tier.GPU:
            self.release_shadows()
        self.removal.flush_tier_copies(tier)
        self.rounds.settle(lambda: False, MOVE_WAIT_S)
        return {"tier": tier.label, **self.describe_tiers()}

    def demote_node(
        self, node_id: int, tier: Tier, hold_s: float = 0.0, *, codec: str | None = None
    ) -> dict[str, object]:
        """See ``Inspectable.demote_node``."""
        node = self._movable(node_id, tier)
        form = node.kv.form if codec is None else self._coded(node, codec)
        self.holds.hold(node_id, hold_s)

        def is_there() -> bool:
            moved_node = self.nodes.get(node_id)
            return moved_node is None or (tier_of(moved_node) >= tier and moved_node.kv.form == form)

        deadline_s = self.storage.now_s() + MOVE_WAIT_S
        while not is_there() and self.storage.now_s() < deadline_s:
            if node.lock_ref > 0:  # a request that waits keeps it where it is
                raise NodeBusy(node_id)
            if node.kv.job is None and not node.kv.is_leaving:
                slot_bytes, layout = size_of(node) * self.menu.slot_bytes, node.kv.layout
                raw_bytes = slot_bytes * (1.0 if layout is None else layout.filled)
                is_resident = node.value is not None
                num_bytes = slot_bytes if is_resident else self.menu.stored_bytes(node.kv.form, raw_bytes)
                source = Option(node.kv.form, tier_of(node), num_bytes)
                option = Option(form, Tier.HOST if is_resident else tier, self.menu.stored_bytes(form, raw_bytes))
                self.execute([Decision(node_id, source, option, num_bytes, node.kv.weight)])
            if not is_there() and not self.rounds.has_jobs:
                break  # there is no room, or nothing may be written now
            self.rounds.settle(is_there, MOVE_WAIT_S)
        moved_node = self.nodes.get(node_id)
        if moved_node is None:
            raise ValueError(f"node {node_id} was dropped on its way: see GET /evicpress/tiers for errors")
        return {
            "id": node_id,
            "tier": tier_of(moved_node).label,
            "form": str(moved_node.kv.form),
            "is_there": is_there(),
            "hold_seconds_left": self.holds.left_s(node_id),
        }

    def _movable(self, node_id: int, tier: Tier) -> Node:
        """The node, if it can be moved down to the tier."""
        node, tiers = self.nodes.get(node_id), self.storage.tiers
        if node is None:
            raise UnknownNode(node_id)
        if tier not in tiers:
            raise ValueError(f"there is no {tier.label} tier: expected one of {_labels(tiers[1:])}")
        if node.lock_ref > 0:
            raise NodeBusy(node_id)
        if node.kv.is_shadow:
            raise NodeBusy(node_id, "it belongs to a shadow", change="moved")
        if tier_of(node) > tier:
            raise ValueError(f"node {node_id} is on tier {tier_of(node).label} already: expected a tier below that")
        above = [child.id for child in node.children.values() if tier_of(child) < tier]
        if above:
            raise ValueError(f"node {node_id} has children above tier {tier.label}, such as {above[0]}: move it first")
        return node

    def _coded(self, node: Node, codec: str) -> Form:
        """The form of a node in ``codec``, if it can be made of what the node holds."""
        form, ratio = node.kv.form, self.menu.codec_ratio
        is_fine = form.codec in CODECS and CODECS[form.codec].is_fine
        coarser = [other for other in ratio if is_fine and ratio[other] < ratio[form.codec]]
        if codec != form.codec and codec not in coarser:
            accepted = ", ".join((form.codec, *coarser))
            raise ValueError(f"node {node.id} holds {form} and cannot be stored by {codec}: expected one of {accepted}")
        return replace(form, codec=codec)

    def attach_ssd(self, folder: str, gb: float, write_gb_per_day: float | None) -> dict[str, object]:
        self.folders.attach(folder, gb, write_gb_per_day)
        return self.describe_tiers()

    def detach_ssd(self) -> dict[str, object]:
        self.folders.detach()
        return self.describe_tiers()


def _labels(tiers: tuple[Tier, ...]) -> str:
    return ", ".join(tier.label for tier in tiers)
