"""Entries of an earlier server on the SSD come into the tree only where they continue a path of it."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from tests.contract.profiling.test_shadows import HALF
from tests.contract.tiers.test_tiers_model import Opened, TierWalk, cached

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers import grafting
from sglang_evicpress.tiers.entry.identity import token_bytes

pytestmark = pytest.mark.sglang

PAGE = 16


def left_behind(opened: Opened) -> tuple[TierWalk, list[int]]:
    """A server whose SSD has one context of an earlier one."""
    walk = opened(0, PAGE, is_exact=True)
    tokens, node = cached(walk, 4 * PAGE, Tier.SSD)
    walk.close()
    return opened(1, PAGE, is_exact=True), tokens


def test_an_entry_that_shares_less_than_its_first_page_is_not_taken(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk, tokens = left_behind(opened)
    monkeypatch.setattr(grafting, "lookup_key_of", lambda key, page: lookup_key)  # a crafted collision
    (lookup_key,) = walk.cache.ssd.store._index._newest
    other = [*tokens[: PAGE - 1], 55, *tokens[PAGE:]]
    assert walk.serve([*other, 59]) == 0
    assert walk.tree.storage.counts["found_again"] == 0
    walk.check()
    assert walk.serve([*tokens, 59]) == 4 * PAGE  # its own path finds it still


def test_what_stands_in_the_tree_is_never_put_out_of_it(opened: Opened) -> None:
    walk = opened(0, PAGE, is_exact=True)
    tokens, node = cached(walk, 4 * PAGE, Tier.SSD)
    copy = node.kv.copies[Tier.SSD]
    key = RadixKey(array("q", [*tokens[:PAGE], *[3] * PAGE]))
    with pytest.raises(RuntimeError, match="has a child"):
        walk.cache.add_absent_leaf(walk.cache.root_node, key, copy)
    assert list(walk.cache.root_node.children.values()) == [node]


def test_what_was_computed_upon_a_lossy_prefix_is_not_put_behind_an_exact_one(opened: Opened) -> None:
    """Nobody knows any more what that prefix was worth."""
    walk = opened(0, PAGE)
    tokens, node = cached(walk, 8 * PAGE)
    more = [3] * PAGE
    key = RadixKey(array("q", [*tokens, *more]))
    header = replace(walk.cache.placement.header_of(node), start=len(tokens), tokens=token_bytes(more))
    lossy_header = replace(header, is_lossy_prefix=True)
    place_of = walk.cache.parts.tiers.prefetcher.grafting._place_of
    assert place_of(key, header) is not None and place_of(key, lossy_header) is None
    walk.cache.parts.moves.compress(node.id, HALF)
    assert place_of(key, lossy_header) is not None
