"""Nodes that a codec has changed: what they hold is never taken for exact KV again, nor for better than it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.tiers.test_codecs import INT4, INT8, LossyWalk, sent
from tests.contract.tiers.test_tiers_model import TierWalk, cached

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.patches.tiers import admin
from sglang_evicpress.patches.tree.node import is_lossy
from sglang_evicpress.tiers.entry.header import extent_of


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TierWalk:
    monkeypatch.setattr(admin, "MOVE_WAIT_S", 0.02)
    return LossyWalk(0, 1, tmp_path, policy="exact+int4+lru")


def decoded(walk: TierWalk, form: Form = INT4) -> object:
    """A node of 100 tokens on the GPU that was stored in a form, without a copy below."""
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.HOST, form)
    assert walk.serve([*tokens, 59]) == 100 and node.kv.form == form
    walk.until(lambda: node.lock_ref == 0)
    walk.cache.placement.remove_copies(node)
    walk.cache.placement.on_changed(node)
    return node


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("held", "wanted"), [(INT4, EXACT), (INT4, INT8), (INT8, EXACT)], ids=str)
def test_what_was_decoded_is_not_stored_as_something_better(
    walk: TierWalk, held: Form, wanted: Form, at_once: bool, tier: Tier
) -> None:
    node = decoded(walk, held)
    walk.cache.parts.moves.demote(node.id, tier, wanted, at_once=at_once)  # a copy of it was given up before
    walk.settle()
    assert node.kv.form == held and is_lossy(node)
    assert all(copy.form == held for copy in node.kv.copies.values())


@pytest.mark.parametrize("wanted", [EXACT, INT8], ids=str)
def test_what_lies_encoded_is_not_written_anew_as_something_better(walk: TierWalk, wanted: Form) -> None:
    _, node = cached(walk, 100)
    sent(walk, node, Tier.HOST, INT4)
    assert not walk.tiers.host_compression.compress_on_host(node, wanted)
    walk.cache.parts.moves.demote(node.id, Tier.SSD, wanted)
    walk.settle()
    assert {copy.form for copy in node.kv.copies.values()} == {INT4}


@pytest.mark.parametrize("at", [0, 1, 2, 4, 8, 12], ids=["version", "bits", "group", "window", "slots", "rest"])
def test_a_foreign_header_of_a_layer_is_a_miss(walk: TierWalk, at: int) -> None:
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.HOST, INT4)
    entry, arena = node.kv.copies[Tier.HOST].entry, walk.cache.host.arena
    extents = list(entry.header.extents)
    offset, num_bytes, _ = extents[1]
    (chunk,) = arena.buffers(entry.runs, offset, num_bytes)
    chunk[at] ^= 3
    extents[1] = extent_of(offset, [chunk])  # whoever wrote it meant it
    entry.header, entry.checked_s = replace(entry.header, extents=extents), 0.0
    assert walk.serve([*tokens, 59]) == 0
    assert walk.tree.storage.errors["host_header"] == 1


def test_the_host_counts_what_is_encoded_as_what_it_takes(walk: TierWalk) -> None:
    _, node = cached(walk, 100)
    assert walk.tiers.backup.start_copy(node, Tier.HOST, codec="int4")
    walk.settle()
    copy, background = node.kv.copies[Tier.HOST], walk.cache.parts.background_demotion
    background._plan_to_leave([node.id])
    assert copy.num_bytes == copy.entry.header.payload_bytes == background._prepared_bytes()


def test_a_small_piece_of_what_is_encoded_gets_an_entry_of_its_own(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.HOST, INT4)
    whole = node.kv.copies[Tier.HOST].entry.num_bytes
    walk.cache._split_node(node.key, node, 32)  # a group: less is no smaller
    walk.tiers.removal.invalidate_copy(node, Tier.HOST, "lost")
    (left,) = walk.cache.nodes.values()
    walk.tiers.host_compression.repack()
    walk.settle()
    assert left.kv.copies[Tier.HOST].entry.num_bytes < whole / 2
    assert walk.serve([*tokens[:32], 59]) == 32


def test_what_was_decoded_stays_so_when_it_is_compressed_by_hand(walk: TierWalk) -> None:
    node = decoded(walk)
    for child in list(node.children.values()):
        walk.cache.parts.moves.drop(child.id)
    walk.cache.inspector.compress_node(node.id, Form("knorm", 0.5))
    assert node.kv.form == Form("knorm", 0.5, "int4")
