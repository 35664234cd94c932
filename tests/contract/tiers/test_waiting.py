"""Requests while they wait: in turn, with what they need kept for them, and each tokens once."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tests.contract.releases import FakeRequest
from tests.contract.tiers.test_tiers_model import SLOTS, Opened, TierWalk, blocked, cached, sent

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers import prefetch
from sglang_evicpress.patches.tiers.host_checks import VERIFIED_S
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.prefetches import WINDOW
from sglang_evicpress.policy.cost_model import PrefillCost

pytestmark = pytest.mark.sglang

SLOW = PrefillCost(0.0, 1e-3, 0.0)  # a context of 100 tokens is computed in 0.1 s


@pytest.fixture
def walk(opened: Opened) -> TierWalk:
    return opened(is_exact=True, cost=SLOW)


def gone(walk: TierWalk) -> None:
    """Nobody waits any more."""
    walk.waiting.clear()
    walk.cache.queued_hits.keep_only([])
    walk.tiers.prefetches.keep_only([])


# ---- in turn


def test_nobody_is_late_before_the_turn(walk: TierWalk) -> None:
    """However long a read has taken: the request could not have run."""
    tokens, node = cached(walk, 100, Tier.SSD)
    blocks = blocked(walk, "read", 2)
    request = walk.wait([*tokens, 59])
    prefetch = walk.tiers.prefetches.by_request[id(request)]
    for _ in range(40):  # twice as long as computing takes
        time.sleep(0.005)
        walk.tick()
    assert prefetch.turn_s is None and not prefetch.is_late
    walk.go_on(*blocks)
    walk.until_ready(request)
    assert walk.admit(request) == 100 and walk.tree.storage.counts["prefetches_late"] == 0
    walk.end_all()


def test_a_late_read_serves_the_request_all_the_same_if_it_could_not_be_admitted(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100, Tier.SSD)
    blocks = blocked(walk, "read", 2)
    request = walk.ready([*tokens, 59])
    assert walk.tree.storage.counts["prefetches_late"] == 1  # and then there was no room for it
    walk.go_on(*blocks)
    assert walk.admit(request) == 100
    walk.end_all()


def test_what_was_verified_stays_good_while_it_stays_where_it_is(walk: TierWalk) -> None:
    """Also where the node was on the GPU when the request came, and left it since."""
    tokens, node = cached(walk, 100)
    walk.copy_to(node, Tier.HOST)
    entry = node.kv.copies[Tier.HOST].entry
    entry.checked_s -= VERIFIED_S / 2
    request = walk.wait([*tokens, 59])
    for _ in walk.tiers.prefetches.release_from_tail():
        pass
    assert walk.cache.evict(EvictParams(num_tokens=100)).num_tokens_evicted == 100
    assert tier_of(node) == Tier.HOST and entry.check is None
    assert walk.admit(request) == 100 and walk.cache.parts.recomputation.counts.computed["unverified"] == 0
    walk.end_all()
    walk.settle()
    entry = node.kv.copies[Tier.HOST].entry
    entry.checked_s -= 2 * VERIFIED_S
    walk.cache.evict(EvictParams(num_tokens=SLOTS))
    request = walk.wait([*tokens, 58])
    assert entry.check is not None  # too long ago
    walk.until_ready(request)
    assert walk.admit(request) == 100
    walk.end_all()


def test_only_the_next_reads_are_begun_ahead(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MOST_READS", 2)
    walk = opened(is_exact=True, cost=PrefillCost(0.0, 1.0, 0.0), host_bytes=600 << 10)
    walk.cache.parts.idle_promotion._next_look_s = math.inf  # else a slow machine promotes one of them meanwhile
    contexts = [cached(walk, 100, Tier.SSD) for _ in range(4)]
    blocks = blocked(walk, "read", 2)
    requests = [walk.wait([*tokens, 59]) for tokens, _ in contexts]
    assert len(walk.tiers.ssd_io.reads) == 2
    prefetches = [walk.tiers.prefetches.by_request[id(request)] for request in requests]
    assert [each.short_of for each in prefetches] == [None, None, "turn", "turn"]
    walk.waiting.pop(0)
    walk.tiers.prefetches.keep_only(walk.waiting)
    assert walk.tiers.prefetcher.is_prefetching(requests[3]) and len(walk.tiers.ssd_io.reads) == 3  # its turn has come
    walk.go_on(*blocks)
    for request in requests[1:]:
        walk.until_ready(request)
        assert walk.admit(request) == 100
        walk.end(request)


def passed_by(walk: TierWalk, requests: list[object], room: int) -> list[bool]:
    """List of flags: True if a request is passed over in a round that has room for so many tokens."""
    walk.cache.parts.admission.slots_ahead = 0
    adder = SimpleNamespace(rem_total_tokens=room, rem_chunk_tokens=None)
    for request in requests:
        request.prefix_indices, request.host_hit_length = torch.empty(0, dtype=torch.int64), 0
        request.last_node = walk.cache.root_node
    return [walk.cache.parts.admission.is_passed_by(adder, request) for request in requests]


def test_only_those_for_whom_there_is_room_have_their_turn(opened: Opened) -> None:
    """Else a long queue would have its turn at once, and be late together."""
    walk = opened(is_exact=True, cost=PrefillCost(0.0, 1.0, 0.0), host_bytes=600 << 10)
    contexts = [cached(walk, 100, Tier.SSD) for _ in range(3)]
    blocks = blocked(walk, "read", 2)
    requests = [walk.wait([*tokens, 59]) for tokens, _ in contexts]
    prefetches = [walk.tiers.prefetches.by_request[id(request)] for request in requests]
    assert passed_by(walk, requests, room=300) == [True] * 3  # each needs 111
    assert [prefetch.turn_s is None for prefetch in prefetches] == [False, False, True]
    assert passed_by(walk, requests, room=10) == [True] * 3
    assert passed_by(walk, requests[2:], room=10) == [True] and prefetches[2].turn_s is not None  # the first always has
    walk.go_on(*blocks)
    assert passed_by(walk, requests, room=300) == [False] * 3
    for request in requests:
        assert walk.admit(request) == 100
        walk.end(request)


def test_one_that_nobody_has_looked_at_does_not_go_before_its_turn(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_evicpress.patches.tiers.prefetches.WINDOW", 1)
    walk = opened(is_exact=True, cost=PrefillCost(0.0, 1.0, 0.0))
    first, second = (cached(walk, 100, tier)[0] for tier in (Tier.SSD, Tier.HOST))
    (block, _) = blocked(walk, "read", 2)
    requests = [walk.wait([*tokens, 59]) for tokens in (first, second)]
    assert passed_by(walk, requests, room=200) == [True, True]
    assert passed_by(walk, requests, room=400) == [True, False]  # it is ready, and there is room for both
    assert walk.admit(requests[1]) == 100
    block.may_end.set()
    gone(walk)


def test_reads_take_no_more_of_the_host_than_waiting_requests_may_hold(opened: Opened) -> None:
    """Also when the turn of all has come: what leaves the GPU needs room there too."""
    walk = opened(is_exact=True, cost=PrefillCost(0.0, 1.0, 0.0), host_bytes=100 << 10)  # 512 bytes a token
    contexts = [cached(walk, 48) for _ in range(4)]
    for _, node in contexts:
        sent(walk, node, Tier.SSD)
    blocks = blocked(walk, "read", 2)
    requests = [walk.wait([*tokens, 59]) for tokens, _ in contexts]
    assert all(walk.tiers.prefetcher.is_prefetching(request) for request in requests)
    assert len(walk.tiers.ssd_io.reads) == 2 and walk.tiers.reservations.num_bytes <= walk.cache.host.num_bytes / 2
    for block in blocks:
        block.may_end.set()
    for request in requests:
        walk.until_ready(request)
        assert walk.admit(request) == 48
        walk.end(request)


def test_those_far_back_in_the_queue_are_not_looked_at(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_evicpress.patches.tiers.prefetches.WINDOW", 2)
    walk = opened(is_exact=True, cost=SLOW)
    tokens, _ = cached(walk, 100, Tier.HOST)
    requests = [walk.wait([*tokens, last]) for last in (57, 58, 59)]
    held = [bool(walk.tiers.prefetches.by_request[id(request)].reserved) for request in requests]
    assert held == [True, True, False]
    walk.waiting.pop(0)
    walk.tiers.prefetches.keep_only(walk.waiting)
    walk.tick()
    assert walk.tiers.prefetches.by_request[id(requests[2])].reserved
    gone(walk)


# ---- what they need is kept


def test_what_the_head_of_the_queue_needs_stays_on_the_gpu_and_is_given_up_from_the_tail(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_evicpress.patches.tiers.reservations.MOST_PINNED_SHARE", 0.55)
    walk = opened(is_exact=True, cost=SLOW)
    contexts = [cached(walk, 100) for _ in range(3)]
    requests = [walk.wait([*tokens, 59]) for tokens, _ in contexts]
    assert [node.lock_ref for _, node in contexts] == [1, 1, 0]  # no more than its share of the pool
    assert walk.tiers.reservations.pinned_slots == 200 and walk.cache.evictable_size_ == 100
    walk.cache.evict(EvictParams(num_tokens=150))
    assert [tier_of(node) for _, node in contexts] == [Tier.GPU, Tier.HOST, Tier.HOST]
    assert contexts[0][1].lock_ref == 1
    for request in requests:
        walk.until_ready(request)
        walk.admit(request)
        walk.end(request)
    walk.settle()
    assert walk.tiers.reservations.pinned_slots == 0
    assert not any(node.lock_ref for _, node in contexts)


def test_a_pinned_node_may_be_split(walk: TierWalk) -> None:
    tokens, node = cached(walk, 60)
    walk.wait([*tokens, 59])
    walk.serve([*tokens[:30], 58])
    assert (node.lock_ref, node.parent.lock_ref) == (1, 1)
    gone(walk)
    assert (node.lock_ref, node.parent.lock_ref) == (0, 0)


def test_room_is_kept_for_the_next_requests(walk: TierWalk) -> None:
    for _ in range(3):
        cached(walk, 100)
    walk.settle()
    assert walk.allocator.available_size() == SLOTS - 300
    walk.wait([walk.rng.randrange(50) for _ in range(90)])
    for _ in range(5):
        walk.tree.background_clock.mark_dirty(at_once=True)
        walk.tick()
        walk.settle()
    assert walk.allocator.available_size() >= 90 and walk.cache.parts.controller.num_dropped == 0
    gone(walk)


# ---- the queue


def test_who_is_on_the_way_is_not_looked_up_and_keeps_the_place(opened: Opened) -> None:
    walk = opened(is_exact=True, cost=PrefillCost(0.0, 1.0, 0.0))
    tokens, _ = cached(walk, 100, Tier.SSD)
    blocks = blocked(walk, "read", 2)
    first, loading, last = walk.wait([1, 2, 3]), walk.wait([*tokens, 59]), walk.wait([4, 5, 6])
    policy = SimpleNamespace(policy=CacheAgnosticPolicy.LOF)
    scheduler = SimpleNamespace(waiting_queue=[first, loading, last], policy=policy)
    walk.cache.parts.admission.hide_waiting(scheduler)
    assert scheduler.waiting_queue == [first, loading, last]  # its turn has not come
    walk.cache.parts.admission.show_waiting(scheduler)
    assert walk.tiers.prefetcher.is_prefetching(loading)
    walk.cache.parts.admission.hide_waiting(scheduler)
    assert scheduler.waiting_queue == [first, last]
    retracted = SimpleNamespace()
    scheduler.waiting_queue = [last, retracted]  # the first one runs
    walk.cache.parts.admission.show_waiting(scheduler)
    assert scheduler.waiting_queue == [loading, last, retracted]
    walk.go_on(*blocks)
    walk.cache.parts.admission.hide_waiting(scheduler)
    assert scheduler.waiting_queue == [loading, last, retracted]
    walk.cache.parts.admission.show_waiting(scheduler)
    assert scheduler.waiting_queue == [loading, last, retracted]


@pytest.mark.parametrize(
    ("policy", "sorts", "is_hidden"), [("fcfs", False, True), ("fcfs", True, False), ("lof", False, False)]
)
def test_of_a_long_queue_only_the_head_is_looked_up(opened: Opened, policy: str, sorts: bool, is_hidden: bool) -> None:
    walk = opened(is_exact=True)
    queue = [walk.wait([walk.rng.randrange(50) for _ in range(9)]) for _ in range(WINDOW + 3)]
    scheduler = SimpleNamespace(
        waiting_queue=list(queue),
        policy=SimpleNamespace(policy=CacheAgnosticPolicy(policy)),
        enable_priority_scheduling=sorts,
    )
    walk.cache.parts.admission.hide_waiting(scheduler)
    assert scheduler.waiting_queue == (queue[:WINDOW] if is_hidden else queue)
    scheduler.waiting_queue = scheduler.waiting_queue[1:]  # the first one runs
    walk.cache.parts.admission.show_waiting(scheduler)
    assert scheduler.waiting_queue == queue[1:]


def request_of(tokens: list[int], num_cached: int = 0, extra_key: str | None = None) -> FakeRequest:
    return FakeRequest(
        req_pool_idx=None,
        origin_input_ids=tokens,
        prefix_indices=range(num_cached),
        host_hit_length=0,
        extra_key=extra_key,
        cache_protected_len=num_cached,
        is_retracted=False,
        finished=lambda: False,
        sampling_params=SimpleNamespace(custom_params=None),
    )


def test_a_request_waits_while_another_computes_what_it_misses(walk: TierWalk) -> None:
    walk.wait([1, 2, 3])
    context = [walk.rng.randrange(50) for _ in range(200)]
    computing = request_of([*context, 51], 40)
    admission = walk.cache.parts.admission
    admission.note_admitted(computing)
    assert admission.is_being_computed(request_of([*context, 52], 40))
    assert not admission.is_being_computed(computing)
    assert not admission.is_being_computed(request_of([*context, 52], 40, "another"))
    assert not admission.is_being_computed(request_of([*context[:90], 53, *context[91:]], 40))  # 50 tokens in common
    assert not admission.is_being_computed(request_of([49 - context[0], *context[1:]], 40))  # another prompt
    computing.cache_protected_len = 200
    assert not admission.is_being_computed(request_of([*context, 52], 40))  # the tree had it by now
    computing.cache_protected_len = 40
    computing.finished = lambda: True
    assert not admission.is_being_computed(request_of([*context, 52], 40)) and not admission.computing


def test_a_request_does_not_wait_for_another_for_ever(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_evicpress.patches.cache.admission.COMPUTING_S", 0.0)
    monkeypatch.setattr("sglang_evicpress.patches.cache.admission.COMPUTING_TIMES", 0.0)
    walk = opened(is_exact=True, cost=SLOW)
    walk.wait([1, 2, 3])
    context = [walk.rng.randrange(50) for _ in range(200)]
    walk.cache.parts.admission.note_admitted(request_of([*context, 51]))
    assert not walk.cache.parts.admission.is_being_computed(request_of([*context, 52]))


def lacks_room(walk: TierWalk, request: object, chunk: int | None = None) -> bool:
    walk.cache.parts.admission.is_out_of_room = False
    return walk.cache.parts.admission.lacks_room(SimpleNamespace(rem_chunk_tokens=chunk), request)


def matched(node: object, num_tokens: int = 101) -> object:
    """A request of so many tokens, the first 100 of which are in a node below the GPU."""
    return FakeRequest(
        host_hit_length=100,
        best_match_node=node,
        last_node=node.parent,
        prefix_indices=[],
        full_untruncated_fill_ids=[0] * num_tokens,
    )


@pytest.mark.parametrize(("is_running", "waits"), [(True, True), (False, False)])
def test_a_load_without_room_waits_while_others_run(walk: TierWalk, is_running: bool, waits: bool) -> None:
    walk.is_sound = False
    tokens, node = cached(walk, 100, Tier.HOST)
    taken = walk.allocator.alloc(SLOTS - 60)
    walk.cache.scheduler = SimpleNamespace(running_batch=SimpleNamespace(is_empty=lambda: not is_running, reqs=[]))
    assert lacks_room(walk, matched(node)) is waits
    assert walk.tree.storage.counts["loads_deferred"] == int(waits) and node.lock_ref == 0
    assert walk.cache.parts.admission.is_out_of_room is waits
    walk.allocator.free(taken)
    assert not lacks_room(walk, matched(node))
    assert lacks_room(walk, matched(node, SLOTS + 1)) is waits  # what it computes needs room too,
    assert not lacks_room(walk, matched(node, SLOTS + 1), chunk=50)  # as much as one batch computes


def test_nobody_is_evicted_for_a_request_behind_one_that_has_no_room(walk: TierWalk) -> None:
    _, node = cached(walk, 100, Tier.HOST)
    _, other = cached(walk, 100)
    while walk.allocator.available_size() >= 100:
        cached(walk, 60)
    walk.cache.parts.admission.is_out_of_room = True
    num_free = walk.allocator.available_size()
    adder = SimpleNamespace(rem_chunk_tokens=None)
    assert walk.cache.parts.admission.lacks_room(adder, matched(node)) and walk.allocator.available_size() == num_free
    walk.cache.parts.admission.is_out_of_room = False
    assert (
        not walk.cache.parts.admission.lacks_room(adder, matched(node)) and walk.allocator.available_size() > num_free
    )


def test_nothing_is_dropped_for_a_load_while_room_below_is_on_its_way(opened: Opened) -> None:
    """Else what has no copy yet is: here a context whose copy the host has no room for before another is written."""
    walk = opened(is_exact=True, cost=SLOW, host_bytes=52 << 10)  # of 512 bytes a token
    _, node = cached(walk, 100, Tier.HOST)
    tokens, other = cached(walk, 100)
    taken = walk.allocator.alloc(walk.allocator.available_size() - 60)
    scheduler = SimpleNamespace(running_batch=SimpleNamespace(is_empty=lambda: True, reqs=[]))
    former, walk.cache.scheduler = walk.cache.scheduler, scheduler
    (block,) = blocked(walk, "write")
    assert lacks_room(walk, matched(node)) and other.id in walk.cache.nodes
    walk.go_on(block)
    walk.cache.evict(EvictParams(num_tokens=40))
    assert other.id in walk.cache.nodes and other.value is None, "the host has room for its copy by now"
    walk.allocator.free(taken)
    walk.cache.scheduler = former


def test_what_is_not_ready_any_more_is_matched_anew(walk: TierWalk) -> None:
    """A read for a request may take the room of what was ready for it."""
    _, node = cached(walk, 100, Tier.HOST)
    assert not lacks_room(walk, matched(node))
    walk.until(lambda: walk.cache.parts.admin.demote_node(node.id, Tier.SSD)["is_there"])
    assert lacks_room(walk, matched(node))


# ---- why tokens were computed


def test_what_is_not_worth_loading_is_told_with_what_it_would_have_taken(opened: Opened) -> None:
    walk = opened(is_exact=True, cost=PrefillCost(0.0, 1e-9, 0.0))
    tokens, _ = cached(walk, 100, Tier.SSD)
    assert walk.serve([*tokens, 59]) == 0
    told = walk.cache.inspector.describe_stats()["admission"]
    assert told["computed_tokens"]["not_worth"] == 100
    assert told["not_worth_s"]["load"] > told["not_worth_s"]["predicted"] > 0.0
