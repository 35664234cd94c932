"""KV events name blocks as those of SGLang's own tree do."""

from __future__ import annotations

from array import array

import pytest
from sglang.srt.disaggregation.kv_events import BlockStored
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from tests.contract.releases import tell_kv_events
from tests.contract.tiers.test_tiers_model import Opened, sent

from sglang_evicpress.core import Tier
from sglang_evicpress.policy.cost_model import PrefillCost

pytestmark = pytest.mark.sglang


def links_of(cache: RadixCache) -> dict[int, int | None]:
    """The block before each one that was told to be stored; None before the first."""
    links: dict[int, int | None] = {}
    for event in cache.take_events():
        if isinstance(event, BlockStored):
            before = event.parent_block_hash
            for block in event.block_hashes:  # later releases tell of many in one event
                links[block], before = before, block
    return links


def links_of_sglang(page_size: int, *contexts: list[int]) -> dict[int, int | None]:
    tree = RadixCache.create_simulated(page_size=page_size, enable_kv_cache_events=True)
    for tokens in contexts:
        tree.insert(InsertParams(key=RadixKey(array("q", tokens))))
    return links_of(tree)


@pytest.mark.parametrize("page_size", [1, 16])
def test_blocks_are_named_by_all_that_is_before_them(opened: Opened, page_size: int) -> None:
    """Also by what the GPU never had: a restarted server finds contexts on its SSD."""
    walk = opened(page_size=page_size, is_exact=True, cost=PrefillCost(0.0, 1e-9, 0.0))  # nothing is worth a load
    tokens = [walk.rng.randrange(50) for _ in range(192)]
    for upto in (64, 128):
        walk.serve(tokens[:upto])
    for node in list(walk.cache.nodes.values())[::-1]:
        sent(walk, node, Tier.HOST)
    assert len(walk.cache.nodes) == 2 and all(node.value is None for node in walk.cache.nodes.values())
    tell_kv_events(walk.cache)
    assert walk.serve(tokens) == 0
    assert all(node.value is not None for node in walk.cache.nodes.values()) and len(walk.cache.nodes) > 2
    assert links_of(walk.cache) == links_of_sglang(page_size, tokens)
