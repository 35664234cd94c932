"""Making room costs the scheduler thread the same however many entries there are: calls are counted, not seconds."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from tests.contract.tiers.test_tiers_model import Opened, TierWalk

from sglang_evicpress.core import EXACT, Tier
from sglang_evicpress.patches.tiers.host_room import MOST_GIVEN_UP
from sglang_evicpress.patches.tiers.ssd_io import MOST_DROPPED
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry
from sglang_evicpress.tiers.ssd.index import Ref
from sglang_evicpress.tiers.ssd.tier import SsdTier

pytestmark = pytest.mark.sglang

NUM_TOKENS, FEW, MANY = 8, 300, 1200


def calls_of(task: Callable[[], object]) -> int:
    """The functions, of Python and of C, that it calls."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        task()
    finally:
        sys.setprofile(None)
    return num_calls


def entry_bytes(walk: TierWalk) -> int:
    return NUM_TOKENS * int(walk.cache.policy.menu.slot_bytes)


def on_ssd(walk: TierWalk, number: int) -> list[object]:
    """Nodes that are on the SSD alone."""
    cache, nodes = walk.cache, []
    for index in range(number):
        header = SimpleNamespace(payload_bytes=entry_bytes(walk), num_slots=NUM_TOKENS, extents=())
        entry = cache.ssd.hold(Ref(10_000, index, header.payload_bytes, NUM_TOKENS), header)
        copy = Copy(Tier.SSD, EXACT, entry, 0, NUM_TOKENS, None, False, None)
        key = RadixKey(array("q", [index, *[1] * (NUM_TOKENS - 1)]))
        nodes.append(cache.add_absent_leaf(cache.root_node, key, copy))
    return nodes


def on_host_too(walk: TierWalk, node: object) -> None:
    header = SimpleNamespace(payload_bytes=0, num_slots=NUM_TOKENS, extents=())
    walk.cache.placement.add_copy(node, Copy(Tier.HOST, EXACT, HostEntry(header, ()), 0, NUM_TOKENS, None, False, None))


@pytest.fixture
def roomy(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> Callable[[], TierWalk]:
    """Makes walks whose SSD lacks just what is asked for."""

    def open_one() -> TierWalk:
        walk = opened(has_ssd=True, is_exact=True)
        monkeypatch.setattr(SsdTier, "lacking", lambda self, num_bytes: max(0, num_bytes - self.store.given_up))
        monkeypatch.setattr(SsdTier, "reclaim", lambda self, workers: None)
        store = walk.cache.ssd.store
        store.given_up = 0

        def remove(ref: Ref, *, is_lazy: bool) -> None:
            store.given_up += ref.num_bytes

        monkeypatch.setattr(store, "remove", remove)
        return walk

    return open_one


def make_room_calls(roomy: Callable[[], TierWalk], number: int, is_on_host: Callable[[int], bool]) -> int:
    """Number of calls until there is room for four entries."""
    walk = roomy()
    for index, node in enumerate(on_ssd(walk, number)):
        if is_on_host(index):
            on_host_too(walk, node)
    num_bytes = 4 * entry_bytes(walk)
    num_calls = calls_of(lambda: walk.tiers.ssd_io.make_ssd_room(num_bytes))
    assert walk.cache.ssd.store.given_up == num_bytes
    walk.cache.ssd.store.close()
    walk.is_closed = True
    return num_calls


@pytest.mark.parametrize("case", ["all nowhere else", "the last also on the host", "all also on the host"])
def test_room_on_the_ssd_costs_no_more_where_there_are_more_entries(roomy: Callable[[], TierWalk], case: str) -> None:
    def is_on_host(index: int) -> bool:
        return case.startswith("all also") or (case.startswith("the last") and index % FEW >= FEW - 8)

    few, many = (make_room_calls(roomy, number, is_on_host) for number in (FEW, MANY))
    assert many <= 1.2 * few + 50, (few, many)


@pytest.mark.parametrize("is_on_host", [False, True])
def test_so_many_entries_go_between_two_ticks_and_no_more(roomy: Callable[[], TierWalk], is_on_host: bool) -> None:
    walk = roomy()
    for node in on_ssd(walk, MANY):
        if is_on_host:
            on_host_too(walk, node)
    gone = []
    for _ in range(2):
        for _ in range(3):  # as often as writes find no room
            walk.tiers.ssd_io.make_ssd_room(10_000 * entry_bytes(walk))
        gone.append(walk.cache.ssd.store.given_up // entry_bytes(walk))
        walk.tiers.ssd_io.begin_round()
    most = MOST_GIVEN_UP if is_on_host else 3 * MOST_DROPPED
    assert most <= gone[0] <= most + 8 and 2 * most <= gone[1] <= 2 * (most + 8), gone
    walk.cache.ssd.store.close()
    walk.is_closed = True


@pytest.mark.parametrize("num_planned", [0, 100])
def test_room_on_the_host_costs_no_more_where_there_are_more_spare_copies(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, num_planned: int
) -> None:
    counts = []
    for number in (FEW, MANY):
        walk = opened(has_ssd=True, is_exact=True)
        nodes = on_ssd(walk, number)
        for node in nodes:
            node.value = node.key  # as if it were on the GPU
            on_host_too(walk, node)
        if num_planned:
            walk.cache.placement.plan_to_leave([node.id for node in nodes[:num_planned]])
        spare, extents = walk.cache.placement._redundant, walk.cache.host.arena.extents

        def alloc(self: object, num_bytes: int, spare: object = spare, least: int = number - 3) -> tuple[()] | None:
            return () if len(spare) <= least else None

        monkeypatch.setattr(type(extents), "alloc", alloc)
        monkeypatch.setattr(type(extents), "free_bytes", property(lambda self: 1 << 40))
        counts.append(calls_of(lambda walk=walk, nodes=nodes: walk.tiers.host_room.host_room(64, keep=(nodes[-1].id,))))
        assert len(spare) == number - 3 and nodes[-1].id in spare
        walk.cache.ssd.store.close()
        walk.is_closed = True
    few, many = counts
    assert many <= 1.2 * few + 50, (few, many)
