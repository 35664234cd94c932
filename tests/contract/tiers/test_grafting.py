"""Entries of an earlier server on the SSD come into the tree only where they continue a path of it."""

from __future__ import annotations

from array import array

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from tests.contract.tiers.test_tiers_model import Opened, TierWalk, cached

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers import grafting

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
