"""The loads that one round of the scheduler begins: which are one, which a batch uses, and who unlocks what."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from tests.contract.tiers.test_tiers_model import TierWalk, blocked, cached, opened, sent

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tree.node import path_to

__all__ = ["opened"]


def on_host(walk: TierWalk, num_tokens: int) -> tuple[list[int], Any]:
    tokens, node = cached(walk, num_tokens)
    sent(walk, node, Tier.HOST)
    return tokens, node


def asked(walk: TierWalk, tokens: list[int]) -> Any:
    """A request that could be admitted now."""
    request = walk.wait([*tokens, 59])
    walk.until(lambda: not walk.cache.is_prefetching(request))
    return request


def matched(walk: TierWalk, request: Any) -> int:
    """Do as SGLang's PrefillAdder until a request's load is begun; returns the tokens that are loaded."""
    key = RadixKey(array("q", request.tokens), request.extra_key, limit=len(request.tokens) - 1)
    match = walk.cache.match_prefix(MatchPrefixParams(key=key, req=request))
    request.last_node = match.last_device_node
    if not match.host_hit_length:
        return 0
    params = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request)
    loaded, request.last_node = walk.cache.init_load_back(params)
    return len(loaded)


def batch_of(*requests: Any, mode: ForwardMode = ForwardMode.EXTEND) -> Any:
    return SimpleNamespace(reqs=list(requests), forward_mode=mode)


def test_the_loads_of_a_batch_are_one_and_each_path_is_unlocked(opened: Callable[..., TierWalk]) -> None:
    walk = opened(has_ssd=False)
    contexts = [on_host(walk, num_tokens) for num_tokens in (60, 50)]
    requests = [asked(walk, tokens) for tokens, _ in contexts]
    (block,) = blocked(walk, "load")
    assert [matched(walk, request) for request in requests] == [60, 50]
    assert [node.lock_ref for _, node in contexts] == [1, 1]
    walk.cache.start_loads(batch_of(*requests))
    (load,) = walk.cache.loads
    assert len(load.parts) == 2 and walk.cache.loads_of(batch_of(requests[1])) == [load]
    assert walk.cache.storage.counts["loads"] == 2
    block.may_end.set()
    walk.settle()
    assert [node.lock_ref for _, node in contexts] == [0, 0]
    assert all(node.kv.load is None for _, node in contexts)
    assert [entry.pins for entry in walk.cache.host.entries()] == [0, 0]
    walk.check_rows()
    walk.check()


def test_what_was_begun_for_a_request_that_did_not_get_in_is_loaded_by_itself(opened: Callable[..., TierWalk]) -> None:
    walk = opened(has_ssd=False)
    contexts = [on_host(walk, num_tokens) for num_tokens in (60, 50)]
    first, second = [asked(walk, tokens) for tokens, _ in contexts]
    (block,) = blocked(walk, "load")
    assert (matched(walk, second), matched(walk, first)) == (50, 60)
    admitted = batch_of(first)
    walk.cache.start_loads(admitted)
    mine, other = walk.cache.loads_of(admitted), walk.cache.loads_of(batch_of(second))
    assert len(mine) == len(other) == 1 and mine != other
    assert [load.is_started for load in walk.cache.loads] == [True, True]
    waited: list[object] = []
    for load in walk.cache.loads:
        load.wait_for = lambda layer, load=load: waited.append(load)  # type: ignore[method-assign]
    with walk.cache.launching(admitted):
        walk.pool.get_kv_buffer(0)
    assert waited == mine
    with walk.cache.launching(batch_of()):
        walk.pool.get_kv_buffer(0)
    assert waited == mine
    with walk.cache.launching(batch_of(second, mode=ForwardMode.DECODE)):
        assert set(waited) == {*mine, *other}
    for load in walk.cache.loads:
        del load.wait_for
    block.may_end.set()
    walk.settle()
    walk.check_rows()


def test_a_batch_uses_a_load_that_was_begun_for_another_request(opened: Callable[..., TierWalk]) -> None:
    """Also by the upper part of a node that was split since."""
    walk = opened(has_ssd=False)
    tokens, node = on_host(walk, 60)
    request, follower = asked(walk, tokens), asked(walk, tokens[:40])
    (block,) = blocked(walk, "load")
    assert (matched(walk, request), matched(walk, follower)) == (60, 0)
    assert len(path_to(node)) == 2 and follower.last_node is node.parent
    walk.cache.start_loads(None)
    (load,) = walk.cache.loads
    assert walk.cache.loads_of(batch_of(follower)) == [load] and walk.cache.loads_of(None) == []
    assert walk.cache.is_arriving(node.parent) and not walk.cache.backup.start_copy(node.parent, Tier.HOST)
    block.may_end.set()
    walk.settle()
    assert walk.cache.loads == [] and node.kv.load is None and node.parent.kv.load is None
    assert (node.lock_ref, node.parent.lock_ref) == (0, 0)
    walk.check_rows()


def test_what_arrives_is_not_copied_from_before_it_is_there(opened: Callable[..., TierWalk]) -> None:
    """Its host copy may have had to make room meanwhile."""
    walk = opened(has_ssd=False)
    tokens, node = on_host(walk, 60)
    request = asked(walk, tokens)
    (block,) = blocked(walk, "load")
    assert matched(walk, request) == 60
    walk.cache.placement.remove_copy(node, Tier.HOST)
    walk.cache.changes.changed(node)
    assert not walk.cache.backup.start_copy(node, Tier.HOST)
    block.may_end.set()
    walk.settle()
    walk.check_rows()
    assert walk.cache.backup.start_copy(node, Tier.HOST)
    walk.settle()
    assert walk.cache.placement.has_same(node, Tier.HOST)


def test_a_round_without_a_batch_and_a_flush_start_what_was_begun(opened: Callable[..., TierWalk]) -> None:
    walk = opened(has_ssd=False)
    for is_flush in (False, True):
        tokens, node = on_host(walk, 60)
        request = asked(walk, tokens)
        assert matched(walk, request) == 60 and not walk.cache.loads[0].is_started
        if is_flush:
            walk.reset()
        walk.tick()
        walk.settle()
        assert walk.cache.loads == [] and (is_flush or node.lock_ref == 0)
        assert not any(entry.pins for entry in walk.cache.host.entries())
        assert walk.cache.inspector.check_integrity()["ok"]
