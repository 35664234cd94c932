"""The loads that one round of the scheduler begins: which are one, which a batch uses, and who unlocks what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from tests.contract.releases import load_back, lock, unlock
from tests.contract.tiers.test_tiers_model import Opened, TierWalk, blocked, cached

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.host_checks import is_verified
from sglang_evicpress.patches.tree.node import path_to
from sglang_evicpress.tiers.entry.header import BadEntry


@pytest.fixture
def walk(opened: Opened) -> TierWalk:
    return opened(has_ssd=False)


def asked(walk: TierWalk, tokens: list[int]) -> Any:
    """A request that could be admitted now."""
    return walk.ready([*tokens, 59])


def matched(walk: TierWalk, request: Any) -> int:
    """Do as SGLang's PrefillAdder until a request's load is begun, for one that it then does not take; returns the
    tokens that are loaded."""
    match = walk.look_up(request)
    if not match.host_hit_length:
        return 0
    lock(walk.cache, request)
    num_loaded = load_back(walk.cache, request, match)
    unlock(walk.cache, request)
    return num_loaded


def batch_of(*requests: Any, mode: ForwardMode = ForwardMode.EXTEND) -> Any:
    return SimpleNamespace(reqs=list(requests), forward_mode=mode)


def test_the_loads_of_a_batch_are_one_and_each_path_is_unlocked(walk: TierWalk) -> None:
    contexts = [cached(walk, num_tokens, Tier.HOST) for num_tokens in (60, 50)]
    requests = [asked(walk, tokens) for tokens, _ in contexts]
    (block,) = blocked(walk, "load")
    assert [matched(walk, request) for request in requests] == [60, 50]
    assert [node.lock_ref for _, node in contexts] == [1, 1]
    walk.tiers.loads.start(batch_of(*requests))
    (load,) = walk.tiers.loads
    assert len(load.parts) == 2 and walk.tiers.loads.used_by(batch_of(requests[1])) == [load]
    assert walk.tree.storage.counts["loads"] == 2
    walk.go_on(block)
    assert [node.lock_ref for _, node in contexts] == [0, 0]
    assert all(node.kv.load is None for _, node in contexts)
    assert [entry.pins for entry in walk.cache.host.entries()] == [0, 0]


def test_what_was_begun_for_a_request_that_did_not_get_in_is_loaded_by_itself(walk: TierWalk) -> None:
    contexts = [cached(walk, num_tokens, Tier.HOST) for num_tokens in (60, 50)]
    first, second = [asked(walk, tokens) for tokens, _ in contexts]
    (block,) = blocked(walk, "load")
    assert (matched(walk, second), matched(walk, first)) == (50, 60)
    admitted = batch_of(first)
    walk.tiers.loads.start(admitted)
    mine, other = walk.tiers.loads.used_by(admitted), walk.tiers.loads.used_by(batch_of(second))
    assert len(mine) == len(other) == 1 and mine != other
    assert [load.is_started for load in walk.tiers.loads] == [True, True]
    waited: list[object] = []
    for load in walk.tiers.loads:
        load.wait_for = lambda layer, load=load: waited.append(load)  # type: ignore[method-assign]
    with walk.tiers.loads.launching(admitted):
        walk.pool.get_kv_buffer(0)
    assert waited == mine
    with walk.tiers.loads.launching(batch_of()):
        walk.pool.get_kv_buffer(0)
    assert waited == mine
    with walk.tiers.loads.launching(batch_of(second, mode=ForwardMode.DECODE)):
        assert set(waited) == {*mine, *other}
    for load in walk.tiers.loads:
        del load.wait_for
    walk.go_on(block)


def test_a_batch_uses_a_load_that_was_begun_for_another_request(walk: TierWalk) -> None:
    """Also by the upper part of a node that was split since."""
    tokens, node = cached(walk, 60, Tier.HOST)
    request, follower = asked(walk, tokens), asked(walk, tokens[:40])
    (block,) = blocked(walk, "load")
    assert (matched(walk, request), matched(walk, follower)) == (60, 0)
    assert len(path_to(node)) == 2 and follower.last_node is node.parent
    walk.tiers.loads.start(None)
    (load,) = walk.tiers.loads
    assert walk.tiers.loads.used_by(batch_of(follower)) == [load] and walk.tiers.loads.used_by(None) == []
    assert walk.tiers.loads.is_arriving(node.parent) and not walk.tiers.backup.start_copy(node.parent, Tier.HOST)
    walk.go_on(block)
    assert not walk.tiers.loads and node.kv.load is None and node.parent.kv.load is None
    assert (node.lock_ref, node.parent.lock_ref) == (0, 0)


def test_what_arrives_is_not_copied_from_before_it_is_there(walk: TierWalk) -> None:
    """Its host copy may have had to make room meanwhile."""
    tokens, node = cached(walk, 60, Tier.HOST)
    request = asked(walk, tokens)
    (block,) = blocked(walk, "load")
    assert matched(walk, request) == 60
    walk.cache.placement.remove_copy(node, Tier.HOST)
    walk.cache.changes.changed(node)
    assert not walk.tiers.backup.start_copy(node, Tier.HOST)
    walk.go_on(block)
    walk.check_rows()
    walk.copy_to(node, Tier.HOST)
    assert walk.cache.placement.has_same(node, Tier.HOST)


def test_a_round_without_a_batch_and_a_flush_start_what_was_begun(walk: TierWalk) -> None:
    for is_flush in (False, True):
        tokens, node = cached(walk, 60, Tier.HOST)
        request = asked(walk, tokens)
        assert matched(walk, request) == 60 and not next(iter(walk.tiers.loads)).is_started
        if is_flush:
            walk.reset()
        walk.tick()
        walk.settle()
        assert not walk.tiers.loads and (is_flush or node.lock_ref == 0)
        assert not any(entry.pins for entry in walk.cache.host.entries())
        assert walk.cache.inspector.check_integrity()["ok"]


def test_what_a_thread_has_seen_damaged_is_not_loaded_though_it_was_good_shortly_before(
    walk: TierWalk,
) -> None:
    tokens, node = cached(walk, 60, Tier.HOST)
    request, entry = asked(walk, tokens), node.kv.copies[Tier.HOST].entry
    (chunk,) = walk.cache.host.arena.buffers(entry.runs, 0, 1)
    chunk[0] ^= 1
    with pytest.raises(BadEntry):  # as on the thread of a job that is not finished yet
        walk.cache.host.check(entry)
    assert is_verified(entry, walk.tree.storage.now_s()) and walk.look_up(request).host_hit_length == 60
    assert walk.admit(request) == 0
    assert walk.tree.storage.counts["loads_of_damaged"] == 1
    walk.check_rows()
    assert entry.pins == 0
    walk.end(request)
    walk.check_rows()
