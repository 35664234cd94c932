"""Making room on EvicPressCache while somebody waits: nothing in it waits, and nothing is lost that can be kept."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from tests.contract.cache.test_radix_cache_model import Walk, finished
from tests.contract.tiers.test_tiers_model import CHEAP, DEAR, SLOTS, Opened, TierWalk, blocked, cached, nodes_of, sent
from tests.unit.tiers.test_transfers import Device

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.patches.cache import scheduler_hooks
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tree.node import path_to, slots_of
from sglang_evicpress.tiers.entry.payload import PayloadCopier
from sglang_evicpress.tiers.host.arena import Arena
from sglang_evicpress.tiers.transfers import Transfers

pytestmark = pytest.mark.sglang


@pytest.fixture
def walk(opened: Opened) -> TierWalk:
    return opened(is_exact=True)


def full(walk: TierWalk) -> list[object]:
    """Three contexts on the GPU, with no copy below."""
    nodes = [cached(walk, 100)[1] for _ in range(3)]
    walk.settle()
    for node in nodes:
        walk.cache.placement.remove_copies(node)
        walk.cache.changes.changed(node)
    return nodes


def test_what_is_worth_a_copy_is_copied_where_it_leaves(walk: TierWalk) -> None:
    nodes = full(walk)
    assert walk.cache.parts.eviction.free_slots(150) >= 150
    assert walk.cache.parts.eviction.log.counts["copies"] == 2 and walk.cache.parts.controller.num_dropped == 0
    assert sorted(tier_of(node) for node in nodes) == [Tier.GPU, Tier.HOST, Tier.HOST]
    (told,) = walk.cache.parts.eviction.log.describe_evictions()["last"]
    assert told["way"] == "with_copies" and told["freed_slots"] >= 150
    assert told["lost_without_copies_s"] > told["lost_s"] + told["copy_s"]


def test_nothing_is_copied_where_computing_anew_takes_less(opened: Opened) -> None:
    walk = opened(is_exact=True, cost=CHEAP)
    full(walk)
    assert walk.cache.parts.eviction.free_slots(150) >= 150
    assert walk.cache.parts.eviction.log.counts["copies"] == 0 and walk.cache.parts.controller.num_dropped == 2
    assert walk.cache.parts.recomputation.counts.describe_drops()["best_by_utility"]["nodes"] == 2


def under_a_few_tokens(walk: TierWalk) -> tuple[object, list[object]]:
    """Contexts on the SSD that nobody seems to use again, and the tokens they share, which only the GPU has."""
    shared = [walk.rng.randrange(50) for _ in range(3)]
    for first in (48, 49):
        walk.serve([*shared, first, *(walk.rng.randrange(48) for _ in range(99))])
    head = next(node for node in walk.cache.nodes.values() if len(node.key) == 3)
    contexts = list(head.children.values())
    for node in contexts:
        sent(walk, node, Tier.SSD)
    walk.settle()
    for node in (head, *contexts):
        node.kv.weight = 1e-9
        walk.cache.changes.changed(node)
    walk.cache.placement.remove_copies(head)
    walk.cache.changes.changed(head)
    return head, contexts


def test_contexts_below_are_not_lost_for_the_few_slots_above_them(walk: TierWalk) -> None:
    head, contexts = under_a_few_tokens(walk)
    assert walk.cache.parts.eviction.free_slots(2) >= 2
    assert tier_of(head) == Tier.HOST and walk.cache.parts.controller.num_dropped == 0
    assert all(node.id in walk.cache.nodes for node in contexts)


def test_where_they_must_be_lost_a_request_that_could_wait_has_no_room(walk: TierWalk) -> None:
    head, contexts = under_a_few_tokens(walk)
    extents = walk.cache.host.arena.extents
    taken = extents.alloc(extents.free_bytes)
    assert not walk.cache.parts.eviction.has_room(walk.allocator.available_size() + 1)
    assert head.value is not None and all(node.id in walk.cache.nodes for node in contexts)
    assert walk.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 3  # whoever runs has to have it
    assert walk.cache.nodes == {}
    extents.free(taken)


def test_evicting_waits_for_no_thread(opened: Opened) -> None:
    walk = opened(is_exact=True, cost=DEAR, host_bytes=400 << 10)
    nodes = full(walk)
    blocks = [*blocked(walk, "copy"), *blocked(walk, "write"), *blocked(walk, "read", 2)]
    assert walk.tiers.backup.start_copy(nodes[0], Tier.HOST)  # never ends
    walk.tree.storage.arrival.wait = None  # whoever waits fails
    assert walk.cache.evict(EvictParams(num_tokens=300)).num_tokens_evicted == 300
    del walk.tree.storage.arrival.wait
    assert [tier_of(node) for node in nodes] == [Tier.HOST] * 3 and walk.cache.parts.controller.num_dropped == 0
    walk.go_on(*blocks)
    assert walk.tree.storage.counts["copies_outdated"] == 1


def on_a_device(walk: TierWalk) -> Device:
    """Copies go through lanes in which nothing is done before somebody waits for it."""
    device, pool = Device(0, eagerness=0.0), walk.cache.compressor
    transfers = Transfers(pool.k_buffers, pool.v_buffers, device)
    walk.tree.storage._copier = PayloadCopier(pool.k_buffers, pool.v_buffers, walk.cache.page_size, transfers=transfers)
    return device


def test_slots_are_free_before_the_copy_of_what_they_held_is_made(walk: TierWalk) -> None:
    """On a device: what overwrites them next is queued behind the copy."""
    node = full(walk)[0]
    slots, buffers = slots_of(node).clone(), [*walk.cache.compressor.k_buffers, *walk.cache.compressor.v_buffers]
    copier, device = walk.tree.storage.copier, on_a_device(walk)
    arena, num_bytes = Arena(1 << 20), sum(copier.sizes(len(slots), False))
    expected = copier.save(slots, None, arena, arena.extents.alloc(num_bytes))
    (block,) = blocked(walk, "copy")
    assert walk.cache.parts.moves.demote(node.id, Tier.HOST, EXACT, at_once=True) == len(slots)
    assert node.value is None and device.num_waits == 0
    entry = node.kv.copies[Tier.HOST].entry
    assert walk.tiers.checks.start(entry) is entry.arrival  # who wants to load it waits for it
    assert walk.tiers.ssd_io.start_write(entry) and entry.write is None

    def overwrite() -> None:
        for buffer in buffers:
            buffer[slots] = 7.0

    device.current().run(overwrite)
    walk.go_on(block)
    assert entry.header.extents == expected and tier_of(node) == Tier.HOST
    walk.cache.host.check(entry)
    assert entry.arrival is None and Tier.SSD in node.kv.copies and walk.tree.storage.errors == {}
    arena.close()


def test_what_left_and_never_arrived_is_lost(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100)
    walk.settle()
    walk.cache.placement.remove_copies(node)
    on_a_device(walk)
    (block,) = blocked(walk, "copy")
    assert walk.cache.parts.moves.demote(node.id, Tier.HOST, EXACT, at_once=True) == 100
    upper = walk.cache._split_node(node.key, node, 40)
    entry = node.kv.copies[Tier.HOST].entry

    def fail() -> None:
        raise OSError("on purpose")

    entry.arrival.run = fail
    walk.go_on(block)
    assert {node.id, upper.id}.isdisjoint(walk.cache.nodes) and walk.tree.storage.errors == {"host_io": 2}
    assert not entry.runs


def test_no_quality_is_lost_for_want_of_a_copy(opened: Opened) -> None:
    """The only step without a copy would be to compress as far as it goes."""
    walk = opened(cost=DEAR)
    nodes = full(walk)
    assert walk.cache.parts.eviction.free_slots(60) >= 60
    assert walk.cache.parts.eviction.log.counts["with_copies"] == 1
    assert all(node.kv.form.is_exact for node in nodes)


def test_what_has_no_room_below_is_dropped_and_missed(opened: Opened) -> None:
    walk = opened(is_exact=True, cost=DEAR, host_bytes=60 << 10)  # 512 bytes a token: one context and a bit
    asked = [cached(walk, 100) for _ in range(3)]
    walk.settle()
    for _, node in asked:
        walk.cache.placement.remove_copies(node)
        walk.cache.changes.changed(node)
    walk.tree.storage.use_ssd(None)
    assert walk.cache.parts.eviction.free_slots(300) == 300
    (cause,) = {
        entry["cause"] for entry in walk.cache.inspector.read_journal(0, 99)["entries"] if entry["to"] == "drop"
    }
    gone = [(tokens, node) for tokens, node in asked if node.id not in walk.cache.nodes]
    assert len(gone) == 2 and walk.cache.parts.recomputation.counts.drops[cause].tokens == 200
    computed = walk.cache.parts.recomputation.counts.computed
    before = computed["dropped"] + computed["dropped_full"]
    walk.serve([*gone[0][0], 59])
    assert computed["dropped"] + computed["dropped_full"] - before == 100
    assert walk.cache.parts.recomputation.counts.drops[cause].missed_tokens == 100
    regrets = [
        entry["regret_s"] for entry in walk.cache.inspector.read_journal(0, 99)["entries"] if entry["to"] == "drop"
    ]
    assert sorted(regret > 0.0 for regret in regrets)[-1]
    walk.end_all()


def test_a_node_that_is_copied_ahead_leaves_by_that_copy(walk: TierWalk) -> None:
    node = full(walk)[0]
    made = walk.tree.storage.counts["backed_up"]
    (block,) = blocked(walk, "copy")
    assert walk.tiers.backup.start_copy(node, Tier.HOST)
    assert walk.cache.parts.moves.demote(node.id, Tier.SSD, EXACT) == 0 and node.value is not None
    walk.go_on(block)
    assert walk.tree.storage.counts["backed_up"] == made + 1 and Tier.SSD in node.kv.copies and node.value is None


@pytest.mark.parametrize("has_ssd_parent", [False, True])
@pytest.mark.parametrize("is_waited_for", [False, True])
def test_all_that_counts_as_evictable_can_be_evicted(walk: TierWalk, is_waited_for: bool, has_ssd_parent: bool) -> None:
    """SGLang admits on that: also the parent of what a waiting request holds on the host."""
    tokens, node = cached(walk, 200)
    upper = walk.cache._split_node(node.key, node, 100)
    sent(walk, node, Tier.HOST)
    walk.settle()
    walk.cache.placement.remove_copies(upper)
    if has_ssd_parent:
        walk.copy_to(upper, Tier.SSD)
    if is_waited_for:
        walk.ready([*tokens, 59])
        walk.settle()
        assert node.kv.num_prefetches == 1
    walk.cache.placement.remove_copy(upper, Tier.HOST)
    walk.cache.changes.changed(upper)
    assert walk.allocator.available_size() == SLOTS - 100 and walk.cache.evictable_size_ == 100
    walk.cache.evict(EvictParams(num_tokens=SLOTS))
    assert walk.allocator.available_size() == SLOTS
    walk.waiting.clear()
    walk.cache.queued_hits.keep_only([])
    walk.tiers.prefetches.keep_only([])
    assert not walk.tiers.reservations.node_ids


# ---- what was moved or compressed by hand stays so


def rested(walk: TierWalk) -> None:
    """A server with nothing to do looks for what it could raise, and raises it."""
    for _ in range(3):
        walk.cache.parts.idle_promotion._next_look_s = 0.0
        walk.tick()
        walk.until(lambda: not walk.tiers.promotion.is_busy and walk.tree.storage.num_pending_jobs == 0)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
def test_a_node_demoted_by_hand_stays_where_it_was_put_until_the_hold_ends(walk: TierWalk, tier: Tier) -> None:
    _, node = cached(walk, 100)
    walk.until(lambda: walk.cache.parts.admin.demote_node(node.id, tier, 60.0)["is_there"])
    described = walk.cache.inspector.describe_node(node.id, positions=False, tokens=False)
    assert 0.0 < described["hold_seconds_left"] <= 60.0
    moves = [Tier.HOST] if tier == Tier.HOST else [Tier.HOST, Tier.SSD]
    assert [each["to"] for each in described["decisions"]] == [f"exact/{each.label}" for each in moves]
    rested(walk)
    assert tier_of(node) == tier
    walk.tiers.holds.hold(node.id, 0.0)
    rested(walk)
    assert tier_of(node) == Tier.GPU and walk.tree.storage.counts["promoted"] == 1


def test_a_load_that_was_begun_before_does_not_bring_a_held_node_back(walk: TierWalk) -> None:
    _, node = cached(walk, 100, Tier.HOST)
    walk.cache.parts.idle_promotion._next_look_s = 0.0
    walk.until(lambda: bool(walk.tiers.loads.unfinished))
    walk.cache.parts.admin.demote_node(node.id, Tier.HOST, 60.0)
    rested(walk)
    assert tier_of(node) == Tier.HOST and walk.allocator.available_size() == SLOTS


def test_a_request_ends_the_hold_of_what_it_matches_and_a_split_keeps_it(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100)
    walk.until(lambda: walk.cache.parts.admin.demote_node(node.id, Tier.HOST, 60.0)["is_there"])
    assert walk.serve([*tokens[:40], 59]) == 40
    walk.end_all()
    upper = node.parent
    assert walk.tiers.holds.left_s(upper.id) == 0.0 and walk.tiers.holds.left_s(node.id) > 0.0
    rested(walk)
    assert tier_of(upper) == Tier.GPU and tier_of(node) == Tier.HOST
    assert walk.serve([*tokens, 58]) == 60  # loaded
    walk.end_all()
    assert walk.tiers.holds.left_s(node.id) == 0.0 and tier_of(node) == Tier.GPU


def test_a_node_compressed_by_hand_is_not_made_exact_again_before_the_hold_ends(opened: Opened) -> None:
    walk = opened(cost=DEAR)
    _, node = cached(walk, 100)
    walk.copy_to(node, Tier.HOST)
    walk.cache.inspector.compress_node(node.id, Form("random", 0.5), 60.0)
    rested(walk)
    assert node.kv.layout is not None
    walk.tiers.holds.hold(node.id, 0.0)
    rested(walk)
    assert node.kv.layout is None and walk.tree.storage.counts["upgraded"] == 1


@pytest.mark.parametrize("is_aside", [False, True])
def test_a_node_compressed_by_hand_stands_in_the_journal_and_the_counts(walk: TierWalk, is_aside: bool) -> None:
    _, node = cached(walk, 100)
    if is_aside:
        walk.cache.parts.moves.set_aside(node.id)
    freed = walk.cache.inspector.compress_node(node.id, Form("random", 0.5))["freed_slots"]
    (row,) = walk.cache.inspector.describe_node(node.id)["decisions"]
    slot_bytes = walk.tree.menu.slot_bytes
    assert (row["from"], row["to"]) == ("exact/gpu", "random@0.5/gpu")
    assert row["bytes_before"] == 100 * slot_bytes and row["freed_bytes"] == freed * slot_bytes > 0
    assert walk.cache.parts.controller.num_compressed == {"random@0.5": 1}
    assert walk.cache.parts.controller.freed_slots == freed


def test_pressure_moves_a_held_node_further_down(walk: TierWalk) -> None:
    _, node = cached(walk, 100)
    walk.until(lambda: walk.cache.parts.admin.demote_node(node.id, Tier.HOST, 60.0)["is_there"])
    walk.cache.parts.controller.free_bytes(Tier.HOST, walk.cache.host.num_bytes, room=walk.tiers.host_room.room())
    walk.settle()
    assert node.id not in walk.cache.nodes or tier_of(node) == Tier.SSD


# ---- the two contracts: evict frees n, evict_from_tree_cache the shortfall


def hooked(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, int], None]:
    """SGLang's ``evict_from_tree_cache`` with our hook applied."""

    class Registry(HookRegistry):
        _hooks = type(HookRegistry._hooks)(list)
        _patched: set[str] = set()

    monkeypatch.setattr(common, "evict_from_tree_cache", common.evict_from_tree_cache)  # restored afterwards
    monkeypatch.setattr(schedule_batch, "evict_from_tree_cache", common.evict_from_tree_cache)
    around = scheduler_hooks._around_evict_from_tree_cache
    Registry.register(scheduler_hooks.EVICT, around, HookType.AROUND)
    Registry.apply_hooks()
    assert schedule_batch.evict_from_tree_cache is common.evict_from_tree_cache
    return common.evict_from_tree_cache


def half_full(policy: str = "evicpress", num_slots: int = SLOTS) -> Walk:
    """Four prefixes that together hold half of the pool."""
    walk = Walk(0, 1, policy, num_slots=num_slots)
    for _ in range(4):
        finished(walk, [walk.rng.randrange(50) for _ in range(num_slots // 8)])
    assert walk.allocator.available_size() == num_slots // 2
    return walk


@pytest.mark.parametrize("policy", ["evicpress", "lru", "slru"])
def test_evict_frees_what_it_is_asked_for_also_while_slots_are_free(policy: str) -> None:
    walk = half_full(policy)
    before = walk.allocator.available_size()
    result = walk.cache.evict(EvictParams(num_tokens=40))
    assert result.num_tokens_evicted == walk.allocator.available_size() - before >= 40
    result = walk.cache.evict(EvictParams(num_tokens=10 * SLOTS))  # all that unlocked nodes hold
    assert walk.allocator.available_size() == SLOTS and not walk.cache.nodes
    assert walk.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 0


def test_what_was_inserted_again_outlives_what_came_once_under_slru() -> None:
    """Like SGLang's own test of SLRU, on ``insert`` and ``evict`` alone."""
    walk = Walk(0, 1, "slru")
    walk.is_sound = False
    keys = [RadixKey(array("q", [first, first + 1])) for first in (1, 11, 21, 31)]
    for key in (keys[0], keys[0], *keys):
        walk.cache.insert(InsertParams(key=key, value=walk.allocator.alloc(2)))
    walk.cache.evict(EvictParams(num_tokens=4))
    assert [walk.match(list(key.token_ids)) for key in keys] == [2, 0, 0, 2]


def test_evict_frees_nothing_when_nothing_is_asked_for() -> None:
    walk = half_full()
    assert walk.cache.evict(EvictParams(num_tokens=0, mamba_num=1)).num_tokens_evicted == 0
    assert walk.allocator.available_size() == SLOTS // 2


@pytest.mark.parametrize(("short", "freed"), [(-100, 0), (0, 0), (1, SLOTS // 128), (44, 44)])
def test_sglang_evicts_the_shortfall_and_at_least_the_headroom(
    monkeypatch: pytest.MonkeyPatch, short: int, freed: int
) -> None:
    """``short`` more slots are wanted than are free; the headroom is 1/128 of the pool."""
    walk = half_full("lru")
    hooked(monkeypatch)(walk.cache, SLOTS // 2 + short)
    whole_nodes = -(-freed // (SLOTS // 8)) * (SLOTS // 8)
    assert walk.allocator.available_size() - SLOTS // 2 == whole_nodes


def test_the_hook_leaves_other_caches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EvictParams] = []
    evict_from_tree_cache = hooked(monkeypatch)
    allocator = TokenToKVPoolAllocator(16, torch.float32, "cpu", None, False)
    allocator.alloc(allocator.available_size() - 5)
    other = SimpleNamespace(
        is_chunk_cache=lambda: False,
        supports_prefix_sharing=lambda: True,  # later releases ask this, and for room of an allocation
        token_to_kv_pool_allocator=allocator,
        evict=asked.append,
        evict_for_alloc=asked.append,
    )
    evict_from_tree_cache(other, 8)
    assert [params.num_tokens for params in asked] == [3 if RELEASE.EVICTS_SHORTFALL else 8]
    evict_from_tree_cache(None, 8)


# ---- what waiting requests hold


def test_what_is_read_for_a_waiting_request_stays_until_it_is_loaded(walk: TierWalk) -> None:
    """The policy thinks of uses to come: it would push down again at once what was just read."""
    tokens, node = cached(walk, 60, Tier.SSD)
    request = walk.ready([*tokens, 59])
    assert tier_of(node) == Tier.HOST and walk.cache.policy.planner.index.candidates[node.id].is_locked
    assert walk.cache.parts.controller.free_bytes(Tier.HOST, 1 << 20, room=walk.tiers.host_room.room()) == 0
    assert tier_of(node) == Tier.HOST
    assert walk.admit(request) == 60
    walk.end_all()
    assert node.kv.num_prefetches == 0 and walk.tiers.reservations.num_bytes == 0


def test_what_is_written_to_the_ssd_does_not_leave_a_waiting_request(walk: TierWalk) -> None:
    tokens, node = cached(walk, 60, Tier.HOST)
    (block,) = blocked(walk, "write")
    walk.cache.parts.moves.demote(node.id, Tier.SSD, EXACT)
    request = walk.wait([*tokens, 59])
    walk.go_on(block)
    assert Tier.SSD in node.kv.copies and tier_of(node) == Tier.HOST
    walk.cache.inc_lock_ref(node)
    walk.cache.dec_lock_ref(node)  # as when there was no room to load it
    assert walk.cache.policy.planner.index.candidates[node.id].is_locked
    walk.until_ready(request)
    assert walk.admit(request) == 60
    walk.end_all()


def test_a_request_that_goes_holds_nothing_any_more(walk: TierWalk) -> None:
    tokens, node = cached(walk, 60, Tier.SSD)
    first, second = walk.wait([*tokens, 59]), walk.wait([*tokens, 58])
    walk.until_ready(second)
    (held,) = [copy.entry for tier, copy in node.kv.copies.items() if tier == Tier.HOST]
    assert node.kv.num_prefetches == 2 and walk.tiers.reservations.num_bytes == held.num_bytes  # once
    walk.tiers.prefetches.keep_only([second])
    assert (
        walk.cache.policy.planner.index.candidates[node.id].is_locked
        and first not in walk.tiers.prefetches.by_request.values()
    )
    walk.tiers.prefetches.keep_only([])
    assert not walk.cache.policy.planner.index.candidates[node.id].is_locked and walk.tiers.reservations.num_bytes == 0
    walk.end_all()


def test_a_split_of_what_is_held_leaves_nothing_held_for_ever(walk: TierWalk) -> None:
    tokens, node = cached(walk, 60, Tier.SSD)
    request = walk.ready([*tokens, 59])
    walk.serve([*tokens[:30], 58])
    assert len(path_to(node)) == 2
    walk.until_ready(request)
    walk.admit(request)
    walk.end_all()
    assert not any(each.kv.num_prefetches for each in nodes_of(walk)) and not walk.tiers.reservations.node_ids


def test_waiting_requests_hold_no_more_than_a_share_of_the_host(opened: Opened) -> None:
    walk = opened(is_exact=True, host_bytes=100 << 10)  # 512 bytes a token
    contexts = [cached(walk, 60) for _ in range(4)]
    for _, node in contexts:
        sent(walk, node, Tier.SSD)
    for tokens, _ in contexts:
        walk.wait([*tokens, 59])
    assert walk.tiers.reservations.num_bytes <= walk.cache.host.num_bytes / 2
    assert 1 <= sum(node.kv.num_prefetches for _, node in contexts) < 4
    walk.end_all()
    walk.waiting.clear()
    walk.tiers.prefetches.keep_only([])
    walk.settle()  # what is being read takes its room until then
    assert walk.tiers.reservations.num_bytes == 0


# ---- pieces of an SSD entry


def on_ssd_too(walk: TierWalk) -> tuple[list[int], object]:
    tokens, node = cached(walk, 100)
    walk.copy_to(node, Tier.SSD)
    assert Tier.SSD in node.kv.copies and node.value is not None
    return tokens, node


@pytest.mark.parametrize(
    ("num_upper", "has_upper", "has_lower"), [(10, False, True), (50, True, True), (90, True, False)]
)
def test_a_small_piece_of_an_ssd_entry_is_given_up(
    walk: TierWalk, num_upper: int, has_upper: bool, has_lower: bool
) -> None:
    _, node = on_ssd_too(walk)
    upper = walk.cache._split_node(node.key, node, num_upper)
    assert (Tier.SSD in upper.kv.copies, Tier.SSD in node.kv.copies) == (has_upper, has_lower)
    walk.cache.changes.changed(upper)
    walk.cache.changes.changed(node)


def test_the_exact_kv_of_a_lossy_node_is_kept_however_small(opened: Opened) -> None:
    walk = opened()
    _, node = on_ssd_too(walk)
    walk.cache.parts.moves.compress(node.id, Form("random", 0.5))
    upper = walk.cache._split_node(node.key, node, 10)
    assert upper.kv.copies[Tier.SSD].is_exact and node.kv.copies[Tier.SSD].is_exact


def test_a_compression_that_was_begun_before_does_not_change_what_a_request_waits_for(opened: Opened) -> None:
    walk = opened()
    tokens, node = cached(walk, 100, Tier.HOST)
    (block,) = blocked(walk, "copy")
    assert walk.tiers.host_compression.compress_on_host(node, Form("random", 0.5))
    request = walk.ready([*tokens, 59])
    walk.go_on(block)
    assert node.kv.copies[Tier.HOST].is_exact and walk.tree.storage.counts["copies_outdated"] == 1
    assert walk.admit(request) == 100
    walk.end_all()


def test_a_small_piece_that_is_nowhere_else_is_kept(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100, Tier.SSD)
    upper = walk.cache._split_node(node.key, node, 10)
    assert tier_of(upper) == tier_of(node) == Tier.SSD
    assert walk.serve([*tokens, 59]) == 100


def test_an_entry_is_taken_to_be_read_whole_and_once(opened: Opened) -> None:
    walk = opened()
    _, node = cached(walk, 100)
    walk.cache.parts.moves.compress(node.id, Form("random", 0.5))
    sent(walk, node, Tier.SSD)
    upper = walk.cache._split_node(node.key, node, 40)
    whole = node.kv.copies[Tier.SSD].entry.header.payload_bytes
    assert [piece.num_bytes for piece in walk.tiers.load_terms.pieces([(upper, 40), (node, 60)])] == [whole, 0]
    assert [piece.num_bytes for piece in walk.tiers.load_terms.pieces([(node, 60)])] == [whole]
