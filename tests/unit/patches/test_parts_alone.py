"""Parts of the cache made of fakes: no tree, no pool, no SGLang."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from sglang_evicpress.core import EXACT, Tier
from sglang_evicpress.patches.tiers.host_room import HostRoom
from sglang_evicpress.patches.tiers.placement import Placement, tier_of
from sglang_evicpress.patches.tiers.removal import Removal
from sglang_evicpress.patches.tree.adapters import Adapters
from sglang_evicpress.patches.tree.changes import NodeChanges
from sglang_evicpress.patches.tree.node import NodeKV
from sglang_evicpress.patches.tree.set_aside import ASIDE_S, SetAside
from sglang_evicpress.patches.tree.slot_ledger import SlotLedger
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry
from sglang_evicpress.tiers.host.tier import HostTier

MODULES = (
    *("tree.slot_ledger", "tree.changes", "tree.set_aside", "tree.adapters", "tiers.storage", "tiers.placement"),
    *("tiers.removal", "tiers.host_room", "tiers.ssd_io", "tiers.backup", "tiers.host_compression", "tiers.demotion"),
    *("cache.plans", "cache.moves"),
)


@dataclass(eq=False)
class Node:
    id: int
    key: list[int]
    parent: Node | None
    value: torch.Tensor | None = None
    lock_ref: int = 0
    children: dict[object, Node] = field(default_factory=dict)
    kv: NodeKV = field(default_factory=NodeKV)


class Header:
    payload_bytes, num_slots = 64, 4


class World:
    """A root with a chain of nodes of four tokens on the GPU; a host tier with room for four entries."""

    def __init__(self, num_nodes: int) -> None:
        self.root = Node(0, [], None)
        self.nodes: dict[int, Node] = {}
        self.freed: list[int] = []
        self.told: list[tuple[str, int]] = []
        self.ssd, self.workers, self.has_host = None, {}, True
        self.counts, self.errors = Counter[str](), Counter[str]()
        self.host = HostTier(4 * 4096, is_pinned=False)
        self.ledger = SlotLedger(lambda slots: self.freed.extend(slots.tolist()))
        self.changes = NodeChanges()
        self.adapters = Adapters(bytes(16), lambda: (), has_tiers=True)
        self.placement = Placement(self, self.adapters, lambda node, copy: 1.0, self.changes.changed, 16)
        self.changes.subscribe(self.placement.note_copies)
        self.removal = Removal(
            self.nodes,
            self,
            self,
            self.placement,
            self.ledger,
            self.changes,
            self.tell_dropped,
        )
        above = self.root
        for index in range(1, num_nodes + 1):
            node = Node(index, [index] * 4, above, torch.arange(4) + 4 * index)
            above.children[index] = self.nodes[index] = above = node
            self.ledger.add(4)

    def tell(self, what: str, node: Node) -> None:
        self.told.append((what, node.id))

    def tell_dropped(self, node: Node, cause: str, number: int | None) -> None:
        self.tell(cause, node)

    def tell_removed(self, node: Node) -> None:
        self.tell("removed", node)

    def delete(self, node: Node) -> None:
        del node.parent.children[node.id], self.nodes[node.id]
        self.ledger.remove(0 if node.value is None else 4)

    def remove(self, node_id: int) -> None:
        self.told.append(("forgotten", node_id))

    def backup(self, node: Node) -> HostEntry:
        entry = HostEntry(Header(), self.host.arena.extents.alloc(4096))
        self.placement.add_copy(node, Copy(Tier.HOST, EXACT, entry, 0, 4, None, False, None))
        return entry


def test_a_copy_below_is_spare_until_the_node_has_left_the_gpu() -> None:
    world = World(1)
    node = world.nodes[1]
    entry = world.backup(node)
    assert world.placement.num_spare == 1 and entry.owners == {1} and tier_of(node) == Tier.GPU
    assert [way.num_bytes for way in world.placement.lower_copies_of[1]] == [64]
    assert world.removal.release(1, Tier.HOST) == 4
    assert tier_of(node) == Tier.HOST and world.placement.num_spare == 0 and not world.placement.lower_copies_of
    assert world.freed == [4, 5, 6, 7] and world.ledger.evictable == 0 and world.counts == {"released": 1}


def test_what_loses_its_last_copy_goes_with_all_below_it() -> None:
    world = World(2)
    for node_id in (1, 2):
        world.backup(world.nodes[node_id])
    for node_id in (2, 1):
        world.removal.release(node_id, Tier.HOST)
    world.removal.invalidate_copy(world.nodes[1], Tier.HOST, "checksum")
    assert not world.nodes and world.errors == {"host_checksum": 1} and world.host.num_entries == 0
    assert [node_id for what, node_id in world.told if what == "lost"] == [2, 1]


def test_a_locked_node_is_neither_dropped_nor_released() -> None:
    world = World(1)
    world.backup(world.nodes[1])
    world.nodes[1].lock_ref = 1
    with pytest.raises(RuntimeError, match="locked"):
        world.removal.drop(1)
    with pytest.raises(RuntimeError, match="locked"):
        world.removal.release(1, Tier.HOST)
    assert not world.freed


class NoPlans:
    def plan_without_copies(self, tier: Tier, num_bytes: int) -> list[object]:
        return []

    def held_bytes(self, tier: Tier) -> int:
        return 0


def test_host_room_is_made_of_spare_copies_but_not_of_those_to_keep() -> None:
    world = World(4)
    for node in world.nodes.values():
        world.backup(node)
    room = HostRoom(world.nodes, world, world.placement, world.removal, NoPlans(), world.changes)
    assert room.free_room(4096) is None
    assert room.host_room(4096, keep=(4,)) is not None
    assert [Tier.HOST in node.kv.copies for node in world.nodes.values()].count(False) == 1
    assert Tier.HOST in world.nodes[4].kv.copies
    assert room.host_room(5 * 4096) is None, "more than there is"


def test_a_node_is_set_aside_for_a_while() -> None:
    world, changed = World(2), list[int]()
    aside = SetAside(world.nodes, lambda node: changed.append(node.id))
    aside.add(1, 100.0)
    aside.add(9, 100.0)  # it is gone
    assert list(aside) == [1] and world.nodes[1].kv.is_aside and changed == [1]
    aside.return_due(100.0 + ASIDE_S / 2)
    assert list(aside) == [1]
    aside.return_due(100.0 + ASIDE_S)
    assert not aside and not world.nodes[1].kv.is_aside and changed == [1, 1]


def test_an_adapter_that_came_with_other_tensors_stays_off_the_ssd() -> None:
    loaded = {"a" * 32: b"one"}
    adapters = Adapters(bytes(16), lambda: (), has_tiers=True)
    adapters.attach(loaded.__getitem__, lambda: loaded)
    scope = adapters.ssd_scope("tenant" + "a" * 32)
    assert scope is not None and scope.namespace == "tenant" and scope.model != adapters.identity
    loaded["a" * 32] = b"two"
    adapters.know_adapters()
    assert adapters.ssd_scope("tenant" + "a" * 32) is None and adapters.ssd_scope("tenant") is not None


def test_no_part_needs_sglang() -> None:
    imports = "; ".join(f"import sglang_evicpress.patches.{module}" for module in MODULES)
    check = "import sys; assert not [name for name in sys.modules if name.split('.')[0] == 'sglang']"
    subprocess.run([sys.executable, "-c", f"{imports}; {check}"], check=True)
