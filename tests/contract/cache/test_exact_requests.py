"""Requests that take exact KV only: what they match, wait for and leave behind."""

from __future__ import annotations

import pytest
import torch
from tests.contract.cache.test_radix_cache_model import Request
from tests.contract.tiers.test_tiers_model import HALF, TierWalk, blocked, cached, nodes_of, sent

from sglang_evicpress.asked_quality import served_kv as served
from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tree.node import is_lossy

pytestmark = pytest.mark.sglang


def lossy(walk: TierWalk, num_tokens: int = 100) -> list[int]:
    """A context that the GPU holds compressed."""
    tokens, node = cached(walk, num_tokens)
    walk.cache.parts.moves.compress(node.id, HALF)
    return tokens


def running(walk: TierWalk, tokens: list[int], *, is_exact: bool = False) -> Request:
    """A request that runs, with what it took from the tree as its prefix."""
    request = walk.wait(tokens, is_exact=is_exact)
    walk.admit(request)
    return request


def served_kv(request: Request) -> tuple[int, int]:
    (counts,) = request.customized_info["kv_cache"]
    return counts["exact_tokens"], counts["lossy_tokens"]


def test_a_lossy_prefix_is_computed_and_takes_the_place_of_the_lossy_one(walk: TierWalk) -> None:
    tokens = lossy(walk)
    request = running(walk, [*tokens, 59], is_exact=True)
    assert served_kv(request) == (0, 0) and not request.evicpress.is_lossy
    walk.end(request)
    assert [node for node in nodes_of(walk) if is_lossy(node)] == []
    walk.check_rows()
    after = running(walk, [*tokens, 58], is_exact=True)
    assert served_kv(after) == (100, 0)
    walk.end(after)


def test_any_other_request_takes_the_lossy_prefix_and_says_so(walk: TierWalk) -> None:
    tokens = lossy(walk)
    request = running(walk, [*tokens, 59])
    assert served_kv(request) == (0, 100)
    assert walk.cache.parts.recomputation.counts.computed["asked_exact"] == 0
    walk.end(request)


def test_the_exact_part_above_a_lossy_node_is_taken(walk: TierWalk) -> None:
    tokens = lossy(walk)
    begin = tokens[:40]
    walk.end(running(walk, [*begin, 57, 56], is_exact=True))  # its 40 tokens are exact now, the others behind them not
    both = running(walk, [*tokens, 59])
    assert served_kv(both) == (40, 60)
    walk.end(both)
    request = running(walk, [*tokens, 58], is_exact=True)
    assert served_kv(request) == (40, 0)
    assert walk.cache.parts.recomputation.counts.computed["asked_exact"] == 60 + 40  # of this one and of the first
    walk.end(request)


def test_what_was_computed_behind_a_lossy_prefix_is_not_taken(walk: TierWalk) -> None:
    tokens = lossy(walk)
    longer = [*tokens, *range(50, 58)]
    walk.end(running(walk, longer))
    below = next(node for node in nodes_of(walk) if node.kv.is_lossy_prefix)
    assert below.kv.form.is_exact
    other = running(walk, [*longer, 59])
    assert served_kv(other) == (0, len(longer))
    walk.end(other)
    request = running(walk, [*longer, 58], is_exact=True)
    assert served_kv(request) == (0, 0)
    walk.end(request)
    assert not is_lossy(below) and not below.kv.is_lossy_prefix


def test_exact_kv_behind_a_node_that_was_compressed_later_is_not_taken(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100)
    longer = [*tokens, *range(50, 58)]
    walk.end(running(walk, longer))
    walk.cache.parts.moves.compress(node.id, HALF)
    (below,) = node.children.values()
    assert is_lossy(node) and not is_lossy(below)
    other = running(walk, [*longer, 59])
    assert served_kv(other) == (8, 100)
    request = running(walk, [*longer, 58], is_exact=True)
    assert served_kv(request) == (0, 0)
    walk.end(request)
    walk.end(other)


def test_while_others_run_on_the_lossy_node_it_stays_and_the_request_keeps_its_own(walk: TierWalk) -> None:
    tokens = lossy(walk)
    other = running(walk, [*tokens, 59])
    request = running(walk, [*tokens, 58], is_exact=True)
    walk.check()
    assert len(request.evicpress.slots) == 101 and other.evicpress.is_lossy and other.evicpress.holes
    walk.end(other)
    walk.end(request)
    assert [len(node.key) for node in nodes_of(walk) if is_lossy(node)] == [1]  # what the other one has added


def test_only_exact_nodes_get_the_hit_of_a_request_that_waits(walk: TierWalk) -> None:
    tokens = lossy(walk)
    (node,) = nodes_of(walk)
    request = walk.wait([*tokens, 59], is_exact=True)
    assert not node.kv.queued_hits
    other = walk.wait([*tokens, 58])
    assert len(node.kv.queued_hits) == 1
    for each in (other, request):
        walk.admit(each)
        walk.end(each)


def test_the_counts_are_those_of_the_first_time_a_request_ran(walk: TierWalk) -> None:
    tokens = lossy(walk)
    request = running(walk, [*tokens, 59])
    walk.end(request, is_insert=False)  # it is retracted
    walk.end(running(walk, [*tokens, 58], is_exact=True))
    request.kv_committed_freed, request.req_pool_idx = False, None
    walk.waiting.append(request)
    walk.cache.parts.admission.on_queued(request)
    walk.admit(request)
    assert not request.evicpress.is_lossy and served_kv(request) == (0, 100)
    walk.end(request)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
def test_lossy_kv_below_the_gpu_is_neither_waited_for_nor_loaded(walk: TierWalk, tier: Tier) -> None:
    tokens, node = cached(walk, 100)
    walk.cache.parts.moves.compress(node.id, HALF)
    sent(walk, node, tier)
    blocks = blocked(walk, "read", 2)
    request = walk.wait([*tokens, 59], is_exact=True)
    prefetch = walk.tiers.prefetches.by_request[id(request)]
    assert not prefetch.is_waiting and not prefetch.reserved and not walk.tiers.ssd_io.reads
    assert not walk.tiers.prefetcher.is_prefetching(request)
    assert walk.admit(request) == 0 and served_kv(request) == (0, 0)
    walk.end(request)
    walk.go_on(*blocks)
    assert not is_lossy(node) and node.value is not None
    assert all(copy.is_exact for copy in node.kv.copies.values())


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
def test_exact_kv_below_the_gpu_is_loaded_down_to_the_first_lossy_node(walk: TierWalk, tier: Tier) -> None:
    tokens, node = cached(walk, 100)
    longer = [*tokens, *range(50, 58)]
    walk.end(running(walk, longer))
    (below,) = node.children.values()
    walk.cache.parts.moves.compress(below.id, HALF)
    sent(walk, below, tier)
    sent(walk, node, tier)
    request = walk.ready([*longer, 59], is_exact=True)
    assert walk.admit(request) == 100 and served_kv(request) == (100, 0)
    assert request.customized_info is not None
    assert request.customized_info["kv_cache"] == [served(100, 0, tiers={tier.label: 100})]
    walk.end(request)
    assert walk.cache.parts.recomputation.counts.computed["asked_exact"] == 8


def test_an_exact_copy_below_a_lossy_node_is_computed_and_not_waited_for(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100)
    walk.copy_to(node, Tier.HOST)
    walk.cache.parts.moves.compress(node.id, HALF)
    assert node.kv.copies[Tier.HOST].is_exact and is_lossy(node)
    request = walk.ready([*tokens, 59], is_exact=True)
    assert walk.admit(request) == 0 and served_kv(request) == (0, 0)
    walk.end(request)
    assert not is_lossy(node) and node.kv.copies[Tier.HOST].is_exact


def test_a_request_waits_for_another_only_if_that_computes_what_it_can_use(walk: TierWalk) -> None:
    tokens = lossy(walk)
    longer = [*tokens, *(index % 50 for index in range(140))]
    admission = walk.cache.parts.admission
    other = running(walk, [*longer, 59], is_exact=True)
    request = walk.wait([*longer, 58], is_exact=True)
    request.prefix_indices, request.host_hit_length = torch.empty(0, dtype=torch.int64), 0
    admission.computing[id(other)] = other, float("inf")
    other.cache_protected_len, before = 0, other.cache_protected_len
    assert admission.is_being_computed(request)
    other.evicpress.is_lossy = True
    assert not admission.is_being_computed(request)
    request.is_exact = False
    assert admission.is_being_computed(request)
    request.is_exact, other.evicpress.is_lossy, other.cache_protected_len = True, False, before
    admission.computing.clear()
    for each in (other, request):
        if each in walk.waiting:
            walk.admit(each)
        walk.end(each)


def test_a_request_does_not_wait_for_kv_that_cannot_take_the_place_of_lossy_kv(walk: TierWalk) -> None:
    tokens = lossy(walk, 200)
    reader = running(walk, [*tokens, 57])  # keeps the lossy node as it is
    admission = walk.cache.parts.admission
    other = running(walk, [*tokens, 59], is_exact=True)
    request = walk.wait([*tokens, 58], is_exact=True)
    request.prefix_indices, request.host_hit_length = torch.empty(0, dtype=torch.int64), 0
    admission.computing[id(other)] = other, float("inf")
    assert other.cache_protected_len == 0 and not admission.is_being_computed(request)
    walk.end(reader)
    assert admission.is_being_computed(request)
    admission.computing.clear()
    walk.end(other)
    walk.admit(request)
    walk.end(request)
