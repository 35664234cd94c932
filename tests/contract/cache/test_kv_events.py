"""KV events: a router's view, rebuilt from them, is the tree, and blocks are named as by SGLang's own tree."""

from __future__ import annotations

from array import array

import msgspec
import pytest
import torch
from evicbench.trust.view import MEDIA, BlockView
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64
from tests.contract.releases import tell_kv_events
from tests.contract.tiers.test_tiers_model import Opened, TierWalk, sent

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tree.namespaces import salted_key
from sglang_evicpress.patches.tree.node import iter_nodes, start_of, tokens_to
from sglang_evicpress.policy.cost_model import PrefillCost

pytestmark = pytest.mark.sglang


def follow(view: BlockView, cache: RadixCache) -> BlockView:
    """Apply what was told since, as it is on the wire."""
    view.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(cache.take_events())))
    assert not view.problems, view.problems[:3]
    return view


def view_of_sglang(page_size: int, *contexts: list[int]) -> BlockView:
    tree = RadixCache.create_simulated(page_size=page_size, enable_kv_cache_events=True)
    for tokens in contexts:
        tree.insert(InsertParams(key=RadixKey(array("q", tokens))))
    return follow(BlockView(), tree)


class FollowedWalk:
    """A walk whose events a router follows; after every step of it the router's view is compared with the tree."""

    def __init__(self, walk: TierWalk) -> None:
        tell_kv_events(walk.cache)
        self.walk, self.view, self.names = walk, BlockView(), dict[tuple[int, ...], list[int]]()
        check = walk.check

        def check_view() -> None:
            check()
            self.compare()

        walk.check = check_view

    def compare(self) -> None:
        follow(self.view, self.walk.cache)
        assert not self.view.differences(self.expected())

    def expected(self) -> dict[str, set[int]]:
        page, blocks = self.walk.page, {medium: set[int]() for medium in MEDIA.values()}
        for node in iter_nodes(self.walk.cache.root_node):
            names = self.names_of(tuple(tokens_to(node)))[start_of(node) // page :]
            for tier in [*node.kv.copies, *([] if node.value is None else [Tier.GPU])]:
                blocks[MEDIA[tier.label]].update(names)
        return blocks

    def names_of(self, tokens: tuple[int, ...]) -> list[int]:
        if tokens not in self.names:
            hashes = get_hash_str(RadixKey(array("q", tokens)), None, page_size=self.walk.page)
            self.names[tokens] = [hash_str_to_int64(each) for each in hashes]
        return self.names[tokens]


@pytest.mark.parametrize(("seed", "page_size", "has_ssd"), [(0, 1, True), (2, 16, True), (3, 4, False)])
def test_a_routers_view_is_the_tree(opened: Opened, seed: int, page_size: int, has_ssd: bool) -> None:
    walk = opened(seed, page_size, has_ssd=has_ssd, dtype=torch.float16)
    walk.cost = None
    FollowedWalk(walk)
    walk.run(100)
    assert walk.tree.storage.counts["released"] > 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_blocks_are_named_by_all_that_is_before_them(opened: Opened, page_size: int) -> None:
    """Also by what the GPU never had: a restarted server finds contexts on its SSD. Salted blocks are SGLang's."""
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
    view = follow(BlockView(), walk.cache)
    assert view.links == view_of_sglang(page_size, tokens).links and view.blocks["GPU"] == set(view.links)
    walk.serve(tokens, salted_key("a salt", ""))
    links = follow(BlockView(), walk.cache).links
    if "cache_salt" not in RadixKey.__slots__:
        assert links == view.links  # salts were no part of names
        return
    tree = RadixCache.create_simulated(page_size=page_size, enable_kv_cache_events=True)
    tree.insert(InsertParams(key=RadixKey(array("q", tokens), cache_salt="a salt")))
    assert links == follow(BlockView(), tree).links and not links.keys() & view.links.keys()
