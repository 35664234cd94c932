"""Compressing what lies in host memory, on EvicPressCache with real threads, against the rows that only the oracle of
the tiers' walk knows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.contract.cache.test_radix_cache_model import FORMS
from tests.contract.tiers.test_tiers_model import SLOTS, Opened, TierWalk, blocked, cached, sent, some_tokens
from tests.unit.geometry.made import make_geometry, make_rope

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.node import num_slots
from sglang_evicpress.patches.tree.set_aside import WITHOUT_ROOM_S
from sglang_evicpress.press import QueryWindow

pytestmark = pytest.mark.sglang

KNORM = Form("knorm", 0.5)


def start(walk: TierWalk, node: object, form: Form) -> None:
    assert walk.tiers.host_compression.compress_on_host(node, form)


def compressed(walk: TierWalk, node: object, form: Form) -> None:
    start(walk, node, form)
    walk.settle()
    assert walk.tree.storage.counts["compressed_on_host"] > 0 and node.kv.form == form


class HostWalk(TierWalk):
    """A walk that compresses what is on the host also when there is no need."""

    def shrink(self) -> None:
        """A node, a form it can have, and perhaps on to the SSD."""
        nodes = [node for node in self.cache.nodes.values() if Tier.HOST in node.kv.copies]
        if nodes:
            tier = self.rng.choice([None, None, *self.tree.storage.tiers[1:]])
            node, form = self.rng.choice(nodes), self.rng.choice(FORMS)
            self.tiers.host_compression.compress_on_host(node, form, leaves_for=tier)

    def moves(self) -> dict[Callable[[], None], float]:
        return {**super().moves(), self.shrink: 10.0}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("has_ssd", [False, True])
@pytest.mark.parametrize("host_bytes", [64 << 10, 192 << 10])
def test_random_walks_keep_every_row(tmp_path: Path, page_size: int, has_ssd: bool, host_bytes: int) -> None:
    walk = HostWalk(24 + page_size, page_size, tmp_path if has_ssd else None, host_bytes=host_bytes)
    walk.cost = None
    try:
        walk.run(200)
    finally:
        walk.close()
    assert host_bytes < 192 << 10 or walk.tree.storage.counts["compressed_on_host"] > 0  # else there may be no room


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("first", [None, Form("knorm", 0.8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_compressing_on_the_gpu_makes(
    opened: Opened, page_size: int, first: Form | None, dtype: torch.dtype
) -> None:
    rows, layouts, served = [], [], []
    for is_on_host in (True, False):
        walk = opened(0, page_size, has_ssd=False, dtype=dtype)
        tokens, node = cached(walk, 128)
        if first is not None:
            walk.cache.parts.moves.compress(node.id, first)
        if is_on_host:
            sent(walk, node, Tier.HOST)
            compressed(walk, node, KNORM)
        else:
            walk.cache.parts.moves.compress(node.id, KNORM)
        served.append(walk.serve([*tokens, 59]))
        assert node.value is not None and num_slots(node) == node.kv.layout.num_slots
        rows.append(walk.read(node.kv.slots))
        layouts.append(node.kv.layout)
        walk.check()
        walk.check_rows()
        walk.close()
    assert served == [128, 0]  # tokens that were loaded
    assert torch.equal(*rows)
    assert torch.equal(*(layout.positions for layout in layouts))
    assert torch.equal(*(layout.logical for layout in layouts))


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_compressed_copy_is_not_split_from_exact_kv(opened: Opened, page_size: int) -> None:
    """Its lower piece has, in some heads, survivors from above the split, where the upper node keeps its exact KV."""
    walk = opened(0, page_size)
    tokens, node = cached(walk, 160)
    walk.copy_to(node, Tier.HOST)
    assert walk.tiers.host_compression.compress_on_host(node, Form("random", 0.5))
    walk.settle()
    assert node.kv.form == EXACT and not node.kv.copies[Tier.HOST].is_exact
    walk.serve([*tokens[:80], 59])
    for tier in list(node.kv.copies):
        walk.tiers.removal.release(node.id, tier)
    walk.serve([*tokens, 58])  # sees that no request attends to an entry twice


def test_one_layer_at_a_time_keeps_what_all_at_once_do(opened: Opened) -> None:
    """With the queries of a window, which the walks do not capture."""
    pool = opened().pool
    num_layers, num_heads, dim = len(pool.k_buffer), *pool.k_buffer[0].shape[1:]
    geometry = make_geometry(num_layers, 2 * num_heads, num_heads, make_rope(dim))
    compressor = Compressor(pool, 1, 4, window=8, geometry=geometry)
    slots = torch.randperm(200)[:100]
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    window = QueryWindow(torch.randn(len(pool.k_buffer), 8, 4, 16), torch.arange(96, 104))
    keys, values = ([buffer[slots].clone() for buffer in side] for side in (pool.k_buffer, pool.v_buffer))
    for form in (Form("snapkv", 0.3), Form("keydiff", 0.3), Form("geometry", 0.3)):
        pieces = [
            compressor.kept_of_layer(
                form=form,
                layer=layer,
                keys=keys[layer],
                values=values[layer],
                layout=None,
                start=0,
                num_tokens=100,
                num_kept=30,
                window=window,
            )
            for layer in range(len(keys))
        ]
        layout = compressor.layout_of(torch.stack([positions for _, positions in pieces]), 0)
        into = torch.arange(300, 330)
        whole, _ = compressor.copy_compressed(form=form, parts=[slots], num_tokens=100, into=into, window=window)
        assert torch.equal(layout.positions, whole.positions) and torch.equal(layout.logical, whole.logical)
        for layer, ((kept_keys, kept_values), _) in enumerate(pieces):
            assert torch.equal(kept_keys, pool.k_buffer[layer][into])
            assert torch.equal(kept_values, pool.v_buffer[layer][into])


def test_damaged_bytes_are_not_given_new_checksums(opened: Opened) -> None:
    walk = opened(has_ssd=False)
    tokens, node = cached(walk, 100, Tier.HOST)
    walk.damage(node.kv.copies[Tier.HOST].entry)
    start(walk, node, KNORM)
    walk.settle()
    assert walk.tree.storage.errors == {"host_checksum": 1} and node.id not in walk.cache.nodes
    assert walk.serve([*tokens, 59]) == 0
    walk.check_rows()
    walk.check_nothing_leaks()


def test_a_node_that_was_wanted_meanwhile_stays_as_it_was_on_the_gpu(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100, Tier.HOST)
    (block,) = blocked(walk, "copy")
    start(walk, node, KNORM)
    assert not walk.tiers.host_compression.compress_on_host(node, KNORM)  # once is enough
    assert walk.serve([*tokens, 59]) == 100
    walk.go_on(block)
    assert node.value is not None and node.kv.form == EXACT and node.kv.job is None
    assert (
        walk.cache.parts.moves.compress(node.id, Form("knorm", 0.8)) == 20
    )  # and what it becomes there is its own affair
    assert [way.form for way in walk.cache.placement.lower_copies_of[node.id]] == [KNORM]
    walk.check()
    walk.check_rows()
    walk.check_nothing_leaks()


@pytest.mark.parametrize("is_lossy", [False, True])
def test_what_goes_on_is_on_the_ssd_in_its_smaller_form_and_its_exact_copy_is_not(
    walk: TierWalk, is_lossy: bool
) -> None:
    tokens, node = cached(walk, 100)
    walk.copy_to(node, Tier.SSD)
    sent(walk, node, Tier.HOST)
    if is_lossy:
        compressed(walk, node, KNORM)
    assert node.kv.copies[Tier.SSD].is_exact
    walk.cache.parts.moves.demote(node.id, Tier.SSD, KNORM)
    walk.settle()
    assert tier_of(node) == Tier.SSD and node.kv.form == KNORM and not node.kv.is_leaving
    assert walk.cache.host.num_entries == 0 and walk.cache.ssd.store.num_entries == 1
    assert walk.serve([*tokens, 59]) == 100 and node.kv.form == KNORM


def test_without_room_for_both_copies_a_node_stays_as_it_is(opened: Opened) -> None:
    walk = opened(has_ssd=False, host_bytes=64 << 10)
    _, node = cached(walk, 120)  # 60 KiB
    sent(walk, node, Tier.HOST)
    assert not walk.tiers.host_compression.compress_on_host(node, KNORM)
    assert walk.tree.storage.counts["compressions_without_room"] == 1
    assert node.kv.job is None and node.kv.form == EXACT
    walk.settle()


def test_a_node_without_room_for_a_copy_still_gets_a_smaller_one(opened: Opened) -> None:
    walk = opened(policy="evicpress", has_ssd=False, host_bytes=64 << 10)
    _, node = cached(walk, 100)  # 50 KiB
    sent(walk, node, Tier.HOST)
    assert not walk.tiers.host_compression.compress_on_host(node, KNORM)
    free, menu = walk.cache.host.arena.extents.free_bytes, walk.tree.menu
    allowed = walk.cache.parts.view.stats_of(node).allowed_forms
    forms = [form for index, form in enumerate(menu.forms) if allowed >> index & 1]
    assert forms and all(menu.num_bytes(form, 100, tier=Tier.HOST) <= free for form in forms) and KNORM not in forms
    compressed(walk, node, forms[0])
    walk.check()
    walk.check_rows()


def test_no_form_is_tried_again_for_which_there_was_no_room_after_all(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = opened(policy="evicpress", has_ssd=False)
    _, node = cached(walk, 100)
    sent(walk, node, Tier.HOST)
    monkeypatch.setattr(walk.cache.host.arena, "alloc", lambda num_bytes: None)  # as for an entry with its positions
    forms, num_tried = walk.tree.menu.forms, 0
    while allowed := walk.cache.parts.view.stats_of(node).allowed_forms & ~1:
        form = forms[(allowed & -allowed).bit_length() - 1]  # the largest first
        assert not walk.tiers.host_compression.compress_on_host(node, form)
        num_tried += 1
        assert num_tried <= len(forms)
    assert num_tried > 1
    monkeypatch.undo()
    walk.settle()


def test_a_node_that_cannot_shrink_is_planned_otherwise_for_a_while_also_where_no_request_comes(opened: Opened) -> None:
    walk = opened(has_ssd=False)
    _, node = cached(walk, 120)
    sent(walk, node, Tier.HOST)
    small = Form("random", 0.2)
    assert walk.tiers.host_compression.compress_on_host(node, small)
    walk.settle()
    assert node.kv.form == small and node.kv.room_bytes is None
    assert walk.cache.parts.moves.compress(node.id, Form("random", 0.5, "int4")) is None, "more tokens in fewer bytes"
    assert node.kv.room_bytes == 0
    walk.tick()
    assert node.kv.room_bytes == 0
    time.sleep(WITHOUT_ROOM_S)
    walk.tick()
    assert node.kv.room_bytes is None


def test_a_copy_to_fall_back_on_is_not_given_up_to_make_room(opened: Opened) -> None:
    """A node compressed on the GPU has its exact copy in a host memory that has no room for both."""
    walk = opened(has_ssd=False, host_bytes=64 << 10)
    tokens, node = cached(walk, 120, Tier.HOST)
    assert walk.serve([*tokens, 59]) == 120
    walk.end_all()
    walk.settle()
    (tail,) = node.children.values()
    walk.tiers.removal.drop(tail.id)
    walk.cache.parts.moves.compress(node.id, KNORM)
    assert walk.cache.parts.moves.demote(node.id, Tier.HOST, node.kv.form) == 60
    walk.settle()
    assert tier_of(node) == Tier.HOST and node.kv.form == EXACT
    assert walk.serve([*tokens, 59]) == 120


def test_a_piece_of_an_entry_that_is_nobodys_any_more_gets_one_of_its_own(opened: Opened) -> None:
    walk = opened(has_ssd=False)
    tokens = some_tokens(walk, 120)
    walk.serve(tokens)
    (node,) = walk.cache.nodes.values()
    sent(walk, node, Tier.HOST)
    walk.serve([*tokens[:110], 57, 58, 59])  # splits it: both parts are pieces of one entry
    walk.settle()
    upper = node.parent
    assert (len(upper.key), len(node.key)) == (110, 10)
    entry = node.kv.copies[Tier.HOST].entry
    assert entry is upper.kv.copies[Tier.HOST].entry
    start(walk, upper, KNORM)
    walk.settle()
    assert upper.kv.copies[Tier.HOST].form == KNORM
    walk.tiers.host_compression.repack()
    walk.settle()
    assert walk.tree.storage.counts["repacked"] == 1 and not entry.runs
    held = sum(sum(walk.tree.storage.copier.sizes(count, is_lossy)) for count, is_lossy in ((55, True), (10, False)))
    assert walk.cache.host.arena.extents.used_bytes <= held + 3 * 4096
    assert walk.serve([*tokens, 59]) == 120 - 110 * (upper.value is not None)


def test_a_way_out_that_is_gone_is_not_taken(opened: Opened) -> None:
    walk = opened(has_ssd=False)
    _, node = cached(walk, 100)
    walk.cache.parts.moves.compress(node.id, KNORM)
    assert walk.cache.parts.moves.demote(node.id, Tier.HOST, EXACT) is None, "it lay there so when the plan was made"
    assert node.value is not None and node.kv.form == KNORM and not node.kv.is_leaving


# ---- without device memory


@pytest.mark.parametrize("has_tiers", [False, True])
def test_without_device_memory_to_compress_it_a_node_is_dropped(
    walk: TierWalk, monkeypatch: pytest.MonkeyPatch, has_tiers: bool
) -> None:
    tokens, node = cached(walk, 100)
    walk.serve([*tokens, 57, 58, 59])
    walk.end_all()
    walk.settle()
    if has_tiers:
        walk.until(
            lambda: walk.cache.parts.admin.demote_node(next(iter(node.children.values())).id, Tier.HOST)["is_there"]
        )

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(walk.cache.compressor, "compress", fail)
    with pytest.raises(IntrospectionError, match="no memory"):
        walk.cache.inspector.compress_node(node.id, KNORM)
    assert not walk.cache.nodes
    assert walk.allocator.available_size() == SLOTS
    walk.settle()
    walk.check_nothing_leaks()


@pytest.mark.parametrize("seed", range(7, 9))
@pytest.mark.parametrize("has_ssd", [False, True])
def test_random_walks_go_on_where_device_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_ssd: bool, seed: int
) -> None:
    walk = HostWalk(seed, 1, tmp_path if has_ssd else None, host_bytes=192 << 10)
    walk.cost = None
    compressor, failures = walk.cache.compressor, []
    compress = compressor.compress

    def perhaps(*arguments: object) -> object:
        if walk.rng.random() < 0.7:
            failures.append(arguments)
            raise torch.OutOfMemoryError("none left")
        return compress(*arguments)

    monkeypatch.setattr(compressor, "compress", perhaps)
    try:
        walk.run(200)
    finally:
        walk.close()
    assert failures


# ---- what is on its way already


def test_a_move_that_is_under_way_is_not_begun_again(opened: Opened) -> None:
    """Else a plan in which nothing is left to be begun looked as if room were being made."""
    walk = opened()
    _, node = cached(walk, 100, Tier.HOST)
    (block,) = blocked(walk, "write")
    assert walk.cache.parts.moves.demote(node.id, Tier.SSD, EXACT) == 0
    assert node.kv.is_leaving
    assert walk.cache.parts.moves.demote(node.id, Tier.SSD, EXACT) is None
    walk.go_on(block)
    walk.settle()
    assert tier_of(node) == Tier.SSD


def test_a_node_that_the_ssd_refuses_when_its_copy_is_there_does_not_stay_about_to_leave(opened: Opened) -> None:
    walk = opened()
    _, node = cached(walk, 100)
    walk.tree.storage.copier.is_in_place = lambda codec: False  # as on a device
    (block,) = blocked(walk, "copy")
    assert walk.cache.parts.moves.demote(node.id, Tier.SSD, EXACT, at_once=True) == 100
    assert node.kv.is_leaving and tier_of(node) == Tier.HOST
    walk.cache.ssd.wear.allows = lambda now_s: False
    walk.go_on(block)
    walk.settle()
    assert not node.kv.is_leaving and tier_of(node) == Tier.HOST
    start(walk, node, KNORM)
    walk.settle()
    assert node.kv.form == KNORM
