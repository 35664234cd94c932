"""Parts of the cache made of fakes: no tree, no pool, no SGLang."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.controller.controller import NOT_MEASURED
from sglang_evicpress.core import DROP, EXACT, Form, Tier
from sglang_evicpress.patches.cache import policy_sync
from sglang_evicpress.patches.cache.fill_replace import FillReplace
from sglang_evicpress.patches.cache.policy_sync import PolicySync
from sglang_evicpress.patches.cache.policy_terms import (
    COMPARE_PAUSE_S,
    LOAD_PAUSE_S,
    LOADS_SEEN,
    REFRESH_S_PER_NODE,
    PolicyTerms,
)
from sglang_evicpress.patches.cache.policy_view import PolicyView
from sglang_evicpress.patches.cache.queued_hits import QueuedHits
from sglang_evicpress.patches.tiers import loads
from sglang_evicpress.patches.tiers import prefetch as prefetching
from sglang_evicpress.patches.tiers.backup import BackupJob
from sglang_evicpress.patches.tiers.grafting import Grafting
from sglang_evicpress.patches.tiers.holds import Holds
from sglang_evicpress.patches.tiers.host_checks import HostChecks
from sglang_evicpress.patches.tiers.host_compression import Compression
from sglang_evicpress.patches.tiers.host_room import HostRoom
from sglang_evicpress.patches.tiers.idle_compression import IdleCompression
from sglang_evicpress.patches.tiers.late_loads import LateLoads
from sglang_evicpress.patches.tiers.load import Part
from sglang_evicpress.patches.tiers.load_back import LoadBack
from sglang_evicpress.patches.tiers.load_terms import LoadTerms
from sglang_evicpress.patches.tiers.loads import Loads
from sglang_evicpress.patches.tiers.placement import Placement, tier_of
from sglang_evicpress.patches.tiers.prefetch import Prefetcher
from sglang_evicpress.patches.tiers.prefetches import Prefetch, Prefetches
from sglang_evicpress.patches.tiers.promotion import MOST_READS, RETRY_S, Promotion
from sglang_evicpress.patches.tiers.removal import Removal
from sglang_evicpress.patches.tiers.reservations import Reservations
from sglang_evicpress.patches.tiers.ssd_compression import SsdCompression
from sglang_evicpress.patches.tiers.ssd_io import Lookup, Read
from sglang_evicpress.patches.tree.adapters import Adapters
from sglang_evicpress.patches.tree.changes import NodeChanges
from sglang_evicpress.patches.tree.node_kv import NodeKV, PrefixView
from sglang_evicpress.patches.tree.node_queries import NodeQueries
from sglang_evicpress.patches.tree.ranks import Ranks
from sglang_evicpress.patches.tree.set_aside import ASIDE_S, SetAside
from sglang_evicpress.patches.tree.slot_ledger import SlotLedger
from sglang_evicpress.policy import index as policy_index
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry, SsdEntry
from sglang_evicpress.tiers.entry.header import Shape
from sglang_evicpress.tiers.host.allocator import Run
from sglang_evicpress.tiers.host.tier import HostTier
from sglang_evicpress.tiers.ssd.index import Ref

MODULES = (
    *(
        "tree.slot_ledger",
        "tree.changes",
        "tree.set_aside",
        "tree.ranks",
        "tree.adapters",
        "tiers.storage",
        "tiers.placement",
    ),
    *("tiers.removal", "tiers.host_room", "tiers.ssd_io", "tiers.backup", "tiers.host_compression", "tiers.demotion"),
    *(
        "cache.moves",
        "cache.fill_replace",
        "cache.policy_sync",
        "cache.policy_terms",
        "cache.policy_view",
    ),
    *("cache.queued_hits", "tree.node_queries", "tiers.idle_promotion"),
    *("tiers.holds", "tiers.late_loads", "tiers.loads", "tiers.load_back", "tiers.host_checks", "tiers.promotion"),
    *("tiers.idle_promotion", "tiers.prefetches", "tiers.reservations", "tiers.load_terms", "tiers.grafting"),
    *("tiers.prefetch", "cache.eviction", "cache.eviction_log", "tiers.background", "tiers.background_clock"),
    *("tiers.ssd_compression", "tiers.idle_compression"),
    *("tiers.rounds", "tiers.ssd_attachment", "tiers.weights", "tiers.admin", "tiers.report", "tiers.shutdown"),
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
    form = EXACT
    payload_bytes, num_slots, extents, form = 64, 4, (None,), EXACT
    shape = Shape(1, 1, 2, "float32", 1)


class World:
    """A root with a chain of nodes of four tokens on the GPU; a host tier with room for four entries."""

    def __init__(self, num_nodes: int) -> None:
        self.root = Node(0, [], None)
        self.nodes: dict[int, Node] = {}
        self.freed: list[int] = []
        self.told: list[tuple[str, int]] = []
        self.ssd, self.external, self.workers, self.has_host = None, None, {}, True
        self.counts, self.errors = Counter[str](), Counter[str]()
        self.host = HostTier(4 * 4096, is_pinned=False)
        self.ranks, self.now_s = Ranks(None), time.monotonic
        self.ledger = SlotLedger(lambda slots: self.freed.extend(slots.tolist()))
        self.changes = NodeChanges()
        self.adapters = Adapters(bytes(16), lambda: (), has_tiers=True)
        self.placement = Placement(
            self,
            self.adapters,
            self.ledger,
            lambda node, copy: 1.0,
            self.changes.changed,
            lambda form, size: size,
            16,
        )
        self.changes.changed.subscribe(self.placement.note_copies)
        self.removal = Removal(
            self.nodes,
            self,
            self,
            self.placement,
            self.ledger,
            self.changes,
            self.tell_dropped,
            self.remove,
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


def test_a_node_is_placed_on_the_gpu_again() -> None:
    world = World(1)
    node = world.nodes[1]
    world.backup(node)
    world.removal.release(1, Tier.HOST)
    node.lock_ref = 1
    world.placement.place(node, node.kv.copies[Tier.HOST], torch.arange(8, 12))
    assert tier_of(node) == Tier.GPU and world.placement.num_spare == 1
    assert node.value.tolist() == [8, 9, 10, 11] and (world.ledger.evictable, world.ledger.protected) == (0, 4)


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


def test_a_node_without_slots_takes_those_of_a_request() -> None:
    world = World(2)
    for node_id in (1, 2):
        world.backup(world.nodes[node_id])
    for node_id in (2, 1):
        world.removal.release(node_id, Tier.HOST)
    unused = lambda node: None  # noqa: E731
    terms = SimpleNamespace(is_alone=True), 0.5, unused, unused, lambda node: world.tell("wanted", node)
    parts = world.placement, world.removal, world.ledger, world.changes
    fill = FillReplace(world.nodes, *parts, *terms)
    fill.fill(world.nodes[1], torch.arange(40, 44), is_lossy_prefix=False)
    assert world.nodes[1].value.tolist() == [40, 41, 42, 43] and world.ledger.evictable == 4
    assert world.placement.num_spare == 1, "its host copy is one that can be given up again"
    assert world.told[-1:] == [("wanted", 2)]
    assert fill.would_change_view([(world.nodes[1], 4)], 0, PrefixView(torch.arange(4), is_lossy=True))
    assert not fill.would_change_view([(world.nodes[1], 4)], 0, PrefixView(torch.arange(4)))


def test_queries_that_made_room_are_no_nodes_any_more() -> None:
    world, changed = World(3), list[int]()
    queries = NodeQueries(lambda node: changed.append(node.id))
    queries.keep(world.nodes[1], 7, ())
    world.nodes[2].kv.window = 7
    queries.split(world.nodes[2], world.nodes[1])
    queries.keep(world.nodes[3], 8, (7, 5))
    assert [node.kv.window for node in world.nodes.values()] == [None, None, 8] and changed == [1, 2]


TERMS = EvicPressConfig(policy="evicpress", forms=("keydiff@0.5",))


class Unmeasured:
    """Quality of nodes of which nothing is known."""

    mean_curve = vector = (1.0, 0.5)
    known = 0

    def expectation_of(self, node: Node) -> Unmeasured:
        return self

    def quality_of(self, node: Node) -> float:
        return 1.0


class Followed(World):
    """A world whose nodes the policy follows."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)
        self.terms, self.num_failed = PolicyTerms(TERMS, self.nodes, has_host=True), Counter()
        quality = self.quality = Unmeasured()
        menu, copies = Menu(TERMS.menu_forms, (Tier.GPU, Tier.HOST), 16, 4), self.placement.lower_copies_of
        follow = lambda node: self.view.stats_of(node)  # noqa: E731
        self.policy = PolicySync(
            TERMS,
            menu,
            self.nodes,
            self.terms,
            lambda: menu.tiers,
            lambda: quality.mean_curve,
            lambda: copies,
            follow,
            self.tick,
            self.num_failed,
        )
        self.policy.renew()
        pressed = SimpleNamespace(window_of=lambda node: None, sinks_of=lambda num_tokens, start: 0)
        self.view = PolicyView(menu, 1, self.policy, quality, pressed, copies)
        self.changes.changed.subscribe(self.policy.on_node_changed)
        for node in self.nodes.values():
            self.changes.changed(node)
        self.hits = QueuedHits(self.nodes, self.terms, self.policy)
        for node in self.nodes.values():
            self.hits.add(node, 1)

    def tick(self) -> None:
        """Something may be planned that could not be."""


def test_the_policy_knows_each_node_as_it_is() -> None:
    world = Followed(2)
    assert world.policy.held_bytes(Tier.GPU) == 128 and world.policy.num_nodes(Tier.GPU) == 2
    assert world.policy.census.num_slots == 8 and world.view.options_of(world.nodes[1]) == (DROP,)
    assert world.view.cause_of_drop(world.nodes[1]) == NOT_MEASURED
    world.nodes[1].kv.weight = float("nan")
    world.changes.changed(world.nodes[1])
    assert world.nodes[1].kv.weight == 0.0 and world.num_failed == {"note weight": 1}
    (decision,) = world.policy.plan_without_copies(Tier.GPU, 64)
    assert decision.node_id == 2 and decision.option.is_drop
    world.policy.on_node_deleted(world.nodes[2])
    assert world.policy.num_nodes(Tier.GPU) == 1 and world.policy.census.num_nodes == 1


def test_a_waiting_request_hits_what_it_will_use_until_it_goes() -> None:
    world, request = Followed(2), object()
    before = world.nodes[1].kv.weight
    world.hits.on_queued(request, [(world.nodes[1], 4)])
    assert len(world.hits) == 1 and world.nodes[1].kv.weight == before + 1.0
    assert world.policy.planner.index.candidates[1].weight == before + 1.0
    world.hits.keep_only([])
    assert not len(world.hits) and world.nodes[1].kv.weight == before


def test_what_is_expected_of_many_nodes_anew_is_told_some_nodes_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (policy_sync, policy_index):
        monkeypatch.setattr(module, "SMALL", 0)
    world = Followed(100)
    candidates = world.policy.planner.index.candidates
    world.nodes[7].kv.curve = object()  # its own
    world.quality.known = 0b10
    world.policy.expect_anew(forms_changed=True)
    assert not any(candidate.allowed_forms for candidate in candidates.values())
    told = []
    while len(told) < 2 or told[-1] > told[-2]:
        world.policy.advance()
        told.append(sum(candidate.allowed_forms == 0b10 for candidate in candidates.values()))
    assert told[0] == policy_sync.TOLD_PER_ROUND and told[-1] == 99
    world.quality.known = 0
    world.policy.expect_anew(forms_changed=True)
    world.policy.finish()
    assert not any(candidate.allowed_forms for node_id, candidate in candidates.items() if node_id != 7)


def test_time_goes_on_by_stamps_and_costs_change_when_they_must() -> None:
    world, told = Followed(0), list[object]()
    world.terms.advanced.subscribe(lambda: told.append(world.terms.now_s))
    world.terms.costs_changed.subscribe(told.append)
    costs = world.terms.costs
    world.terms.advance(100.0, costs)
    world.terms.advance(90.0, costs)
    world.terms.advance(130.0, costs, 5.0)
    assert told == [0.0, 0.0, 30.0, world.terms.weighed] and world.terms.recompute_weight == 5.0
    world.terms.advance(230.0, costs, 5.0, 3.0)
    assert world.terms.read_weight == 3.0 and world.terms.recompute_weight == 5.0
    world.terms.advance(330.0, costs, 5.0, 8.0)
    assert world.terms.read_weight == world.terms.recompute_weight == 5.0  # what is stored can be computed as well
    world.terms.advance(430.0, costs, 5.0, 3.0)
    known, weighed = costs.of_a_part(), world.terms.weighed
    assert weighed.load_seconds(Tier.SSD, 10**6) == pytest.approx(3.0 * known.load_seconds(Tier.SSD, 10**6))
    assert weighed.load[Tier.HOST] == known.load[Tier.HOST] and world.terms.costs == costs
    world.terms.observe_load(Tier.HOST, 0, 1.0)
    assert world.terms.cost_model.costs.load == costs.load, "nothing was loaded"


def test_of_many_loads_some_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    now, learned = SimpleNamespace(s=50.0), list[tuple[Tier, str, float]]()
    terms = PolicyTerms(TERMS, {}, has_host=True, clock=lambda: now.s)
    note = lambda tier, num_bytes, seconds, codec: learned.append((tier, codec, seconds))  # noqa: E731
    monkeypatch.setattr(terms.cost_model, "observe_load", note)
    for index in range(LOADS_SEEN + 3):
        terms.observe_load(Tier.HOST, 10, 1.0 + index)
    assert len(learned) == LOADS_SEEN and learned[-1] == (Tier.HOST, "raw", float(LOADS_SEEN))
    terms.observe_load(Tier.SSD, 10, 1.0)
    terms.observe_load(Tier.HOST, 10, 1.0, "int8")
    assert learned[-2:] == [(Tier.SSD, "raw", 1.0), (Tier.HOST, "int8", 1.0)], "each by itself"
    now.s += LOAD_PAUSE_S
    for seconds in (2.0, 3.0):
        terms.observe_load(Tier.HOST, 10, seconds)
    assert learned[-1] == (Tier.HOST, "raw", 2.0), "then one in a while"
    for seconds in (math.nan, math.inf, 0.0):
        terms.observe_load(Tier.EXTERNAL, 10, seconds)
    assert learned[-1] == (Tier.HOST, "raw", 2.0), "no figure"


def test_loads_go_by_a_slower_disk_long_before_the_policy_looks_at_many_nodes() -> None:
    terms = PolicyTerms(TERMS, range(20_000), has_host=True)
    told, slower = list[CostSnapshot](), {**terms.costs.load, Tier.SSD: TransferCost(4e-3, 0.7e9)}
    terms.costs_changed.subscribe(told.append)
    terms.advance(0.0, terms.costs)
    terms.advance(0.5, replace(terms.costs, load=slower))
    assert terms.costs.load[Tier.SSD] != slower[Tier.SSD], "not compared so often"
    terms.advance(COMPARE_PAUSE_S, replace(terms.costs, load=slower))
    assert terms.costs.load == slower and not told and terms.policy_costs.load != slower
    terms.advance(REFRESH_S_PER_NODE * 20_000 * 1.2, terms.costs)
    assert [each.load[Tier.SSD] for each in told] == [slower[Tier.SSD]] and terms.policy_costs == terms.costs


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
    world.placement.plan_to_leave([1, 2, 3, 4])
    assert room.free_room(4096, takes_spares=True) is None, "they are to leave the GPU by these"
    world.placement.plan_to_leave([])
    spare = room.free_room(4096, takes_spares=True)
    assert spare is not None
    world.host.arena.extents.free(spare)
    world.backup(next(node for node in world.nodes.values() if Tier.HOST not in node.kv.copies))
    assert room.host_room(4096, keep=(4,)) is not None
    assert [Tier.HOST in node.kv.copies for node in world.nodes.values()].count(False) == 1
    assert Tier.HOST in world.nodes[4].kv.copies
    assert room.host_room(5 * 4096) is None, "more than there is"


def test_spare_copies_that_are_being_read_are_not_given_up_for_room() -> None:
    world = World(4)
    for node in world.nodes.values():
        world.backup(node)
    room = HostRoom(world.nodes, world, world.placement, world.removal, NoPlans(), world.changes)
    hottest = world.placement.next_spare((), keeps_planned=False)
    assert hottest is not None
    world.host.pin(world.nodes[hottest].kv.copies[Tier.HOST].entry)
    assert room.host_room(4096) is not None
    have_copies = {node.id for node in world.nodes.values() if Tier.HOST in node.kv.copies}
    assert hottest in have_copies and len(have_copies) == 3


def test_room_is_made_of_planned_copies_where_the_only_other_one_is_being_read() -> None:
    world = World(4)
    for node in world.nodes.values():
        world.backup(node)
    room = HostRoom(world.nodes, world, world.placement, world.removal, NoPlans(), world.changes)
    world.placement.plan_to_leave([1, 2, 3])
    world.host.pin(world.nodes[4].kv.copies[Tier.HOST].entry)
    assert room.free_room(4096, takes_spares=True) is None, "they are to leave the GPU by these"
    assert room.host_room(4096) is not None
    assert Tier.HOST in world.nodes[4].kv.copies


def test_nothing_goes_for_host_memory_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still to be taken from the system is free, and comes; KV that went for it would have gone in vain."""
    world = World(4)
    for node in world.nodes.values():
        world.backup(node)
    room = HostRoom(world.nodes, world, world.placement, world.removal, NoPlans(), world.changes)
    monkeypatch.setattr(type(world.host.arena), "is_growing", True)
    monkeypatch.setattr(type(world.host), "free_bytes", 4096)
    assert room.host_room(4096) is None
    room.want(4096)
    assert room.wanted_bytes == 0 and all(Tier.HOST in node.kv.copies for node in world.nodes.values())
    assert room.host_room(8192) is not None, "more than is coming"


def test_what_is_read_from_the_ssd_takes_host_memory() -> None:
    world = World(1)
    room = HostRoom(world.nodes, world, world.placement, world.removal, NoPlans(), world.changes)
    free = room.room()[Tier.HOST]
    room.begin_copy(4096, is_read=True)
    assert room.room() == {Tier.HOST: free - 4096} and not room.is_busy and not room.copying_bytes
    room.end_copy(4096, is_read=True)
    assert room.room() == {Tier.HOST: free}


def test_what_a_node_holds_already_takes_host_memory_once_though_it_is_still_on_its_way() -> None:
    world, held = World(4), [0]
    plans = SimpleNamespace(held_bytes=lambda tier: held[0])
    room = HostRoom(world.nodes, world, world.placement, world.removal, plans, world.changes)
    free = world.host.num_bytes
    room.begin_copy(4096)
    assert room.room() == {Tier.HOST: free - 4096}
    room.end_copy(4096)
    room.begin_copy(4096, is_held=True)
    held[0] = 4096
    assert room.room() == {Tier.HOST: free - 4096} and room.copying_bytes == 4096
    room.end_copy(4096, is_held=True)
    assert room.room() == {Tier.HOST: free - 4096} and room.copying_bytes == 0


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


def test_a_hold_ends_with_its_time_or_a_use_and_a_split_keeps_it() -> None:
    holds = Holds({1, 2, 3}, time.monotonic)
    for node_id in (1, 2, 9):
        holds.hold(node_id, 60.0)
    holds.split(3, 1)
    holds.end([2])
    assert holds.node_ids() == {1, 3} and holds.left_s(2) == 0.0 < holds.left_s(1) <= 60.0
    holds.hold(1, 0.0)
    assert holds.node_ids() == {3}


class Pool:
    """An allocator with free pages of one slot."""

    page_size, size, device = 1, 16, "cpu"

    def __init__(self) -> None:
        self.release_pages = torch.arange(0)
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, 17)

    def available_size(self) -> int:
        return len(self.free_pages)

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        if num_slots > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:num_slots], self.free_pages[num_slots:]
        return taken


class Copier:
    """Copies nothing; there is one layer."""

    num_layers = 1
    is_by_threads = False

    def layers_at_once(self, *_: object) -> int:
        return 1

    def load_layers(self, *_: object) -> None: ...

    def finish_layers(self) -> None: ...


class Loading(World):
    """A node on the host, a pool to load it into, and a thread that never begins."""

    def __init__(self) -> None:
        super().__init__(1)
        (self.node,) = self.nodes.values()
        self.entry = self.backup(self.node)
        self.removal.release(1, Tier.HOST)
        self.freed.clear()
        self.pool, self.copier, self.submitted = Pool(), Copier(), list[object]()
        self.late = LateLoads(self, self.pool, self.ledger)
        self.loads = Loads(self, self.late, lambda: None, lambda *_: None, self.unlock, is_cuda=False)

    def submit(self, name: str, job: object) -> None:
        self.submitted.append(job)

    def lock(self, node: Node) -> None:
        node.lock_ref += 1

    def unlock(self, node: Node) -> None:
        node.lock_ref -= 1


def test_a_request_takes_a_node_from_the_host_once_there_is_room() -> None:
    world, request = Loading(), SimpleNamespace(last_node=None)
    wanted: list[int] = []
    load_back = LoadBack(
        world,
        world.pool,
        world.loads.add,
        world.placement.place,
        world.lock,
        world.unlock,
        wanted.append,
        lambda req: [world.entry],
        "cpu",
    )
    taken = world.pool.alloc(16)
    assert len(load_back.bring_back(request, world.node)[0]) == 0 and request.evicpress_without_room
    assert (world.node.lock_ref, world.entry.pins, wanted) == (0, 0, [4])
    world.pool.free_pages = taken
    indices, last = load_back.bring_back(request, world.node)
    assert indices.tolist() == [1, 2, 3, 4] and last is world.node and world.loads.is_arriving(world.node)
    assert (world.node.lock_ref, world.entry.pins, request.storage_hit_length) == (1, 1, 4)
    world.loads.start(None)
    (load,) = world.submitted
    load.join()
    load.finish()
    assert (world.node.lock_ref, world.entry.pins, len(world.loads)) == (0, 0, 0)


def test_nobody_gets_the_slots_of_a_load_that_outlives_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "END_S", 0.0)
    world, ended = Loading(), list[object]()
    slots = world.pool.alloc(4)
    load = world.loads.start_unseen(Part(world.node.kv.copies[Tier.HOST], slots), ended.append)
    world.loads.end_all()
    world.pool.clear()
    assert world.pool.free_pages.tolist() == list(range(5, 17)) and world.ledger.reserved == 4
    assert world.loads.unfinished == [load] and world.entry.pins == 1
    load.finish()
    assert world.freed == [1, 2, 3, 4] and (world.ledger.reserved, world.entry.pins, ended) == (0, 0, [])
    world.pool.clear()
    assert world.pool.available_size() == 16


def holds_in(held: dict[int, float]) -> SimpleNamespace:
    """Seconds for which nodes stay where they are, by id."""
    return SimpleNamespace(hold=held.__setitem__, left_s=lambda node_id: held.get(node_id, 0.0))


@pytest.mark.parametrize("is_used_meanwhile", [False, True])
def test_a_node_is_verified_loaded_and_promoted_unless_it_was_used_meanwhile(is_used_meanwhile: bool) -> None:
    world = Loading()
    checks = HostChecks(world, world.removal.invalidate_entry)
    promotion = Promotion(
        world.nodes,
        world,
        world.pool,
        world.ledger,
        SimpleNamespace(reads=()),
        world.loads.start_unseen,
        checks.start,
        world.placement.place,
        lambda node, slots, is_lossy: None,
        holds_in({}),
        lambda: None,
        lambda: 0.0,
    )
    promotion.promote(1)
    promotion.advance()
    (check,) = world.submitted
    check.finish()
    world.entry.checked_s = time.perf_counter()
    promotion.advance()
    assert world.node.kv.job is world.submitted[1] and world.ledger.reserved == 4 and promotion.is_busy
    world.node.kv.version += is_used_meanwhile
    world.node.kv.job.finish()
    assert world.node.kv.job is None and (world.ledger.reserved, world.entry.pins) == (0, 0)
    assert (tier_of(world.node) == Tier.HOST, world.freed == [1, 2, 3, 4]) == (is_used_meanwhile, is_used_meanwhile)


def test_what_is_read_for_a_promotion_and_has_to_go_at_once_is_not_read_for_ever() -> None:
    entry, held = SimpleNamespace(header=Header, num_vain=0), dict[int, float]()
    copies = {Tier.SSD: SimpleNamespace(entry=entry, is_exact=True)}
    node = SimpleNamespace(lock_ref=0, value=None, kv=SimpleNamespace(job=None, copies=copies))
    read: list[object] = []
    promotion = Promotion(
        {1: node},
        SimpleNamespace(now_s=lambda: 100.0),
        *(None, None, SimpleNamespace(reads=(), start_read=lambda entry: read.append(entry) or entry)),
        *(None, None, None, None, holds_in(held)),
        lambda: CostSnapshot(PrefillCost(0.0, 1.0, 0.0), {Tier.SSD: TransferCost(1e-3, 1e9)}, {}),
        lambda: 0.0,
    )
    assert promotion.promote(1)
    for _ in range(10):
        promotion.advance()
    assert len(read) == MOST_READS and not promotion.is_busy
    assert held == {1: RETRY_S}, "others come up meanwhile"
    held.clear()
    assert promotion.promote(1)
    for _ in range(10):
        promotion.advance()
    assert len(read) == 2 * MOST_READS and held == {1: 2 * RETRY_S}


def any_request() -> SimpleNamespace:
    """A request that takes any KV."""
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None))


class Waiting(Loading):
    """A node on the host that two requests wait for; the disk reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[object, None] = {}
        self.seen_s, self.is_freeing_host, self.looked_up, self.used = time.perf_counter(), False, 0, 0
        self.is_answering, self.external = True, None
        self.reservations = Reservations(
            self.nodes, self, self, self.changes.changed, self.lock, self.unlock, self.pool.size
        )
        self.prefetches = Prefetches(self.reservations, time.monotonic)
        self.cost = PrefillCost(0.0, 1.0, 0.0)
        self.terms = LoadTerms(
            lambda: CostSnapshot(
                self.cost, {Tier.HOST: TransferCost(1e-3, 1e9), Tier.SSD: TransferCost(1e-3, 1e9)}, {}
            ),
            self,
            lambda: self.prefetches.num_ready,
        )
        self.prefetcher = Prefetcher(
            self.nodes,
            self,
            self.prefetches,
            self.reservations,
            self.terms,
            self,
            self,
            self,
            lambda num_ahead: 0.0,
            lambda: 0,
            HostChecks(self, self.removal.invalidate_entry).start,
            1,
        )

    def key_of_waiting(self, req: object) -> list[int]:
        return [1] * 4

    def _steps(self, key: object) -> list[tuple[Node, int]]:
        return [(self.node, 4)]

    def usable_steps(self, req: object, steps: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
        return steps

    def touch(self, node: Node) -> None:
        self.used += 1

    def look_up(self, *_: object) -> None:
        self.looked_up += 1


def test_a_request_is_passed_over_until_what_it_waits_for_was_verified() -> None:
    world, first, second = Waiting(), any_request(), any_request()
    for request in (first, second):
        world.prefetcher.begin(request)
    assert world.prefetches.num_waiting == 2 and world.node.kv.num_prefetches == 2 and len(world.submitted) == 1
    assert world.prefetcher.is_prefetching(first) and world.prefetches.is_passed_over(first)
    assert world.prefetcher.ready_to_load(first, [(world.node, 4)], 0) == 0
    (check,) = world.submitted
    world.entry.checked_s, check.is_finished = time.perf_counter(), True
    check.finish()
    assert not world.prefetcher.is_prefetching(first) and world.looked_up == 1
    assert world.prefetcher.ready_to_load(first, [(world.node, 4)], 0) == 1
    world.prefetches.keep_only([second])
    assert world.node.kv.num_prefetches == 1 and list(world.reservations.node_ids) == [1]
    assert len(list(world.prefetches.release_from_tail())) == 1 and not world.reservations.node_ids


def test_where_the_queue_is_sorted_anew_an_earlier_request_makes_way_too() -> None:
    """Else one that came first, and is behind in the queue, would hold what the first in the queue needs for ever."""
    world, first, last = Waiting(), any_request(), any_request()
    for request in (first, last):
        world.prefetcher.begin(request)
    assert len(list(world.prefetches.release_from_tail(until=last))) == 0
    world.prefetches.is_in_order = False
    assert len(list(world.prefetches.release_from_tail(until=last))) == 1
    assert world.prefetches.by_request[id(last)].reserved or world.prefetches.by_request[id(last)].pinned


def test_one_for_which_all_is_ready_is_looked_at_again_once_something_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "RELOOK_S", 0.0)
    monkeypatch.setattr(prefetching, "SETTLED_S", 1000.0)
    world, request = Waiting(), any_request()
    world.prefetcher.begin(request)
    (check,) = world.submitted
    world.entry.checked_s, check.is_finished = time.perf_counter(), True
    check.finish()
    for _ in range(3):
        world.prefetcher.advance()
    assert world.looked_up == 1
    world.entry.checked_s = -math.inf
    world.prefetcher.advance()
    assert len(world.submitted) == 2


def test_an_entry_that_is_being_filled_counts_by_the_memory_that_it_has() -> None:
    """Its header says how much is in it once it is filled, on some ranks sooner than on others."""
    world = Waiting()
    header = SimpleNamespace(payload_bytes=0)
    assert world.reservations.may_reserve(HostEntry(header, (Run(0, 16),)))
    assert not world.reservations.may_reserve(HostEntry(header, (Run(0, world.host.num_bytes),)))


def test_what_is_sooner_computed_is_not_waited_for() -> None:
    world, request = Waiting(), any_request()
    world.cost = PrefillCost(0.0, 1e-9, 0.0)
    world.prefetcher.begin(request)
    assert not world.prefetcher.is_prefetching(request) and not world.submitted and not world.reservations.node_ids


def test_a_request_pins_what_is_on_the_gpu_within_its_share() -> None:
    world, request = Waiting(), any_request()
    world.placement.place(world.node, world.node.kv.copies[Tier.HOST], torch.arange(4))
    world.prefetcher.begin(request)
    assert world.node.lock_ref == 1 and world.reservations.pinned_slots == 4  # a quarter of the pool
    other = Prefetch(SimpleNamespace())
    world.node.lock_ref = 0
    world.reservations.pin(other, [world.node])
    assert other.pinned is None and world.reservations.pinned_slots == 4
    world.node.lock_ref = 1
    world.prefetches.keep_only([])
    assert world.node.lock_ref == 0 and world.reservations.pinned_slots == 0


def test_a_lookup_is_for_text_whose_namespace_may_be_on_the_ssd() -> None:
    world, prefetch = Waiting(), Prefetch(SimpleNamespace())
    world.asked, world.page_size, world.vocab_size = list[object](), 1, 50
    ref = Ref(1, 1, 64, 4)
    store = SimpleNamespace(num_entries=1, find=lambda key: [ref])
    world.ssd = SimpleNamespace(store=store, has_former=True, is_held=lambda ref: False)
    disk = SimpleNamespace(look_up=lambda *asked: world.asked.append(asked) or "job")
    look_outside = lambda *asked: pytest.fail("the SSD may have it")  # noqa: E731
    may_ask = lambda: False  # noqa: E731
    grafting = Grafting(world, world.adapters, disk.look_up, may_ask, look_outside, world.terms, world, 16, 1, True)

    class Key(SimpleNamespace):
        extra_key = None

        def __len__(self) -> int:
            return len(self.token_ids)

    grafting.look_up(prefetch, Key(token_ids=array("q", [7, 51])), [])
    assert not world.asked  # 51 is no token of the model
    grafting.look_up(prefetch, Key(token_ids=array("q", [7, 8])), [])
    assert not world.asked  # it has been looked at from there
    prefetch.looked_at.clear()
    grafting.look_up(prefetch, Key(token_ids=array("q", [7, 8])), [])
    assert prefetch.jobs == ["job"] and world.asked[0][0] == [ref] and prefetch.max_wait_s > 0.0


def test_an_adapter_that_came_with_other_tensors_stays_off_the_ssd() -> None:
    loaded = {"a" * 32: b"one"}
    adapters = Adapters(bytes(16), lambda: (), has_tiers=True)
    adapters.attach(loaded.__getitem__, lambda: loaded)
    scope = adapters.ssd_scope("tenant" + "a" * 32)
    assert scope is not None and scope.namespace == "tenant" and scope.model != adapters.identity
    loaded["a" * 32] = b"two"
    adapters.know_adapters()
    assert adapters.ssd_scope("tenant" + "a" * 32) is None and adapters.ssd_scope("tenant") is not None


def test_what_is_copied_off_the_gpu_goes_before_what_is_compressed_on_the_host() -> None:
    assert BackupJob.priority < Compression.priority and Read.priority == Lookup.priority == 0


class Disk(World):
    """One node, which the SSD alone has, with a disk that reads at once and compresses when it is told to."""

    def __init__(self) -> None:
        super().__init__(1)
        self.node, self.reads, self.asked, self.busy_s = self.nodes[1], {}, list[tuple[str, object]](), 0.0
        entry = SsdEntry(Header(), None)
        self.placement.add_copy(self.node, Copy(Tier.SSD, EXACT, entry, 0, 4, None, False, None))
        self.removal.release(1, Tier.SSD)
        self.num_pending_jobs = 0
        costs = CostSnapshot(PrefillCost(0.0, 1.0, 0.0), {Tier.SSD: TransferCost(5.0, 1e9)}, {})
        self.ssd_compression = SsdCompression(
            self.nodes,
            self,
            self,
            self,
            self.removal,
            costs=lambda: costs,
            busy_s=lambda: self.busy_s,
            room=lambda: {Tier.HOST: self.host.free_bytes},
        )

    def start_read(self, entry: SsdEntry, *, is_awaited: bool = True) -> object:
        assert not is_awaited, "nothing but spare copies makes room for it"
        self.asked.append(("read", entry))
        self.backup(self.node)
        return entry

    def copy_to_ssd(self, node: Node, form: Form) -> bool:
        self.asked.append(("compress", form))
        return self.can_compress

    can_compress = True


@pytest.mark.parametrize("can_compress", [True, False])
def test_what_shrinks_on_the_ssd_leaves_host_memory_as_it_was(can_compress: bool) -> None:
    world, form = Disk(), Form("knorm", 0.5)
    world.can_compress = can_compress
    assert tier_of(world.node) == Tier.SSD and not world.ssd_compression.is_busy
    world.ssd_compression.begin(1, form)
    world.busy_s = time.monotonic()
    world.ssd_compression.advance()
    assert not world.asked, "a request that comes within the time of the read would wait for it"
    world.busy_s -= 6.0
    while world.ssd_compression.is_busy:
        world.ssd_compression.advance()
    assert [what for what, _ in world.asked] == ["read", "compress"]
    assert tier_of(world.node) == Tier.SSD and world.host.num_entries == 0
    assert world.ssd_compression.has_failed(world.node), "here nothing was written: it is not tried again"


def test_an_idle_look_is_about_what_only_the_ssd_has_and_nobody_holds() -> None:
    world, looked, held = Disk(), list[list[int]](), set[int]()
    world.ssd = object()

    def plan(nodes: Iterable[Node], room: int) -> list[object]:
        looked.append([node.id for node in nodes])
        return []

    writing = SimpleNamespace(may_write=True)
    made = IdleCompression(
        world.nodes,
        world,
        world.ssd_compression,
        writing,
        plan,
        lambda: {Tier.HOST: 4096, Tier.SSD: 7},
        lambda: held,
        lambda decisions: None,
    )
    made.advance()
    made.advance()
    assert looked == [[1]], "what was looked at in vain is not looked at again at once"
    for change in (lambda: held.add(1), lambda: (held.clear(), world.backup(world.node))):
        change()
        made._next_look_s = 0.0
        made.advance()
    assert looked == [[1]] and not made.is_busy
    held.clear()
    world.removal.release(1, Tier.SSD)
    writing.may_write, made._next_look_s = False, 0.0
    made.advance()
    assert looked == [[1]], "nothing is read that could not be written"


def test_no_part_needs_sglang() -> None:
    imports = "; ".join(f"import sglang_evicpress.patches.{module}" for module in MODULES)
    check = "import sys; assert not [name for name in sys.modules if name.split('.')[0] == 'sglang']"
    subprocess.run([sys.executable, "-c", f"{imports}; {check}"], check=True)
