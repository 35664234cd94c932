"""Walks and moves of caches whose KV is encoded on its way down. Rows of the oracle are whole numbers below 64: int8
moves none of them by half, so that what was rounded is known to be right or wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from tests.contract.cache.test_radix_cache_model import Request
from tests.contract.tiers.test_tiers_model import HEADS, TierWalk, cached, nodes_of, some_tokens

from sglang_evicpress.codec import get_codec
from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.patches.cache.lifecycles import cache_class
from sglang_evicpress.patches.tiers import admin
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.node import is_lossy, size_of, slots_of
from sglang_evicpress.quality.expectation import Expectation
from sglang_evicpress.tiers.host.allocator import GRANULE

INT8, INT4, LOSSLESS = Form(codec="int8"), Form(codec="int4"), Form(codec="lossless")


class CodecWalk(TierWalk):
    """Computes rows of whole numbers, and reads them as such."""

    def expected(self, hashes: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        return super().expected(hashes, positions).remainder(64) + 0.0  # no negative zero

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        return super().read(slots).float().round().to(self.dtype) + 0.0


class LossyWalk(TierWalk):
    """Of which rows are compared by the test alone: int4 moves whole numbers to others."""

    def view_of(self, request: Request) -> list[set[tuple[int, int]]]:
        return []

    def check_rows(self) -> None:
        """See above."""


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., TierWalk]:
    monkeypatch.setattr(admin, "MOVE_WAIT_S", 0.02)

    def open_walk(
        seed: int = 0,
        page_size: int = 1,
        *,
        policy: str = "exact+int8+lru",
        has_ssd: bool = True,
        checks_rows: bool = True,
        **options: object,
    ) -> TierWalk:
        is_lossless = "lossless" in f"{policy} {options.get('forms')}"
        made = TierWalk if is_lossless else CodecWalk
        if "int4" in policy or not checks_rows:
            made = LossyWalk
        return made(seed, page_size, tmp_path if has_ssd else None, policy=policy, **options)

    return open_walk


@pytest.mark.parametrize(
    ("seed", "page_size", "dtype", "policy", "has_ssd"),
    [
        (0, 1, torch.float32, "exact+int8+lru", True),
        (1, 16, torch.bfloat16, "exact+int8+lru", True),
        (2, 1, torch.float16, "knorm@0.8+int8+lru", True),
        (3, 4, torch.float32, "random@0.5+int8+lru", True),
        (4, 1, torch.bfloat16, "knorm@0.5+int8+lru", False),
    ],
)
def test_random_walk_keeps_every_row(
    coded: Callable[..., TierWalk], seed: int, page_size: int, dtype: torch.dtype, policy: str, has_ssd: bool
) -> None:
    walk = coded(seed, page_size, dtype=dtype, policy=policy, has_ssd=has_ssd)
    walk.cost = None
    seen = set()
    for number in range(160):
        walk.step(10)
        seen |= {copy.form.codec for node in nodes_of(walk) for copy in node.kv.copies.values()}
        if number >= 15 and "int8" in seen:  # when copies are made is up to threads
            break
    walk.run(1)
    assert walk.tree.storage.counts["released"] > 0 and "int8" in seen


@pytest.mark.parametrize(
    ("seed", "page_size", "dtype", "has_ssd"),
    [(0, 1, torch.bfloat16, True), (1, 16, torch.float32, False)],
)
def test_random_walk_that_chooses_among_codecs_keeps_every_row(
    coded: Callable[..., TierWalk], seed: int, page_size: int, dtype: torch.dtype, has_ssd: bool
) -> None:
    names = "knorm@0.8", "exact+int8", "knorm@0.8+int8", "knorm@0.5+int8", "random@0.5+int8"
    curves = {"knorm": {"0.8": 0.99, "0.5": 0.9}, "random": {"0.5": 0.7}, "exact+int8": 1.0}
    forms = tuple(map(Form.parse_stored, names))
    settings = {"dtype": dtype, "has_ssd": has_ssd, "forms": forms, "curves": curves, "alpha": 1e-4}
    walk = coded(seed, page_size, policy="evicpress", **settings)
    walk.cost, seen = None, set()
    for _ in range(40):
        walk.step(10)
        seen |= {node.kv.form for node in nodes_of(walk)} - {EXACT}
    assert len(seen) > 1 and any(form.codec == "int8" for form in seen)


def sent(walk: TierWalk, node: object, tier: Tier, form: Form) -> None:
    def is_there() -> bool:
        walk.cache.parts.moves.demote(node.id, tier, form)
        return tier_of(node) == tier

    walk.until(is_there)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("form", [INT4, Form("knorm", 0.5, "int4")], ids=str)
def test_what_comes_back_is_what_the_codec_makes_of_it(
    coded: Callable[..., TierWalk], form: Form, page_size: int, tier: Tier
) -> None:
    walk = coded(page_size=page_size, policy=f"{form}+lru")
    tokens, node = cached(walk, 96)
    if form.press is not None:
        walk.cache.parts.moves.compress(node.id, form.pressed)
    before = TierWalk.read(walk, slots_of(node)).clone()  # [K or V, layers, heads, slots, dim]
    layout = node.kv.layout
    sent(walk, node, tier, form)
    assert node.kv.form == form and node.kv.layout is layout and is_lossy(node)
    assert walk.serve([*tokens, 59]) == 96 and node.kv.form == form
    codec = get_codec("int4")
    found = TierWalk.read(walk, slots_of(node))
    for layer in range(2):
        keys, values = (before[which, layer].transpose(0, 1).flatten(1).contiguous() for which in (0, 1))
        stored = torch.empty(codec.num_bytes(*keys.shape, keys.dtype), dtype=torch.uint8)
        codec.encode(keys, values, stored)
        codec.decode(stored, len(keys), 0, keys, values)
        for which, rows in enumerate((keys, values)):
            assert torch.equal(found[which, layer].transpose(0, 1).flatten(1), rows.view(len(rows), -1))
    assert found.shape[2] == HEADS


def test_what_went_down_and_up_goes_down_as_the_same_bytes(coded: Callable[..., TierWalk]) -> None:
    walk = coded(policy="exact+int4+lru")
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.HOST, INT4)
    digests = [extent.digest for extent in node.kv.copies[Tier.HOST].entry.header.extents]
    request = walk.ready([*tokens, 59])
    assert walk.admit(request) == 100
    walk.tiers.loads.join_all()
    copier, arena = walk.tree.storage.copier, walk.cache.host.arena
    runs = arena.extents.alloc(sum(copier.sizes(100, False, "int4")))
    again = copier.save(slots_of(node), None, arena, runs, codec="int4")
    arena.extents.free(runs)
    assert [extent.digest for extent in again] == digests
    walk.end(request)


def test_a_codec_takes_the_bytes_that_it_says(coded: Callable[..., TierWalk]) -> None:
    walk = coded(policy="exact+int4+lru")
    _, node = cached(walk, 100)
    sent(walk, node, Tier.HOST, INT4)
    entry = node.kv.copies[Tier.HOST].entry
    assert entry.header.payload_bytes == sum(walk.tree.storage.copier.sizes(100, False, "int4"))
    assert entry.num_bytes - entry.header.payload_bytes < walk.cache.host.arena.extents.granule
    stats = walk.cache.parts.view.stats_of(node)
    assert stats.num_bytes == walk.tree.menu.stored_bytes(INT4, 100 * walk.tree.menu.slot_bytes)


def occupied(folder: Path) -> int:
    """Bytes of the blocks that the files of segments have on the disk."""
    num_blocks = 0
    for path in folder.rglob("segment-*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # some file systems allocate late
        num_blocks += path.stat().st_blocks
    return 512 * num_blocks


def test_bytes_that_are_charged_are_bytes_that_are_occupied(coded: Callable[..., TierWalk], tmp_path: Path) -> None:
    """On both tiers in whole granules of 4 KiB (an entry's last one is charged in full), and on the SSD the records of
    a segment as well. The policy charges by a codec's ratio: it is off by an entry's last granule and by the fewer than
    32 slots behind its last group, which stay as they are."""
    forms = (EXACT, INT8, INT4)
    settings = {"forms": forms, "curves": {"exact+int8": 1.0, "exact+int4": 0.9}, "dtype": torch.bfloat16}
    walk = coded(policy="evicpress", num_slots=4096, host_bytes=4 << 20, ssd_bytes=8 << 20, **settings)
    walk.is_sound = False  # int4 moves whole numbers to others
    host, slot_bytes = walk.cache.host, walk.tree.menu.slot_bytes
    for tier in (Tier.HOST, Tier.SSD):
        charged = 0
        for index, form in enumerate(3 * forms):
            tokens = [9 * tier + index, *some_tokens(walk, 149 + 27 * index)]  # no two begin alike
            walk.serve(tokens)
            node = next(node for node in nodes_of(walk) if list(node.key.raw_token_ids()) == tokens)
            sent(walk, node, tier, form)
            if tier == Tier.HOST:
                entry = node.kv.copies[tier].entry
                by_policy = walk.cache.parts.view.stats_of(node).num_bytes
                assert 0 <= entry.num_bytes - entry.header.payload_bytes < GRANULE
                assert abs(entry.num_bytes - by_policy) < GRANULE + 32 * slot_bytes
                assert form.codec == "raw" or entry.num_bytes < 0.8 * size_of(node) * slot_bytes
                charged += entry.num_bytes
        walk.settle()
        if tier == Tier.HOST:
            assert charged == sum(entry.num_bytes for entry in host.entries()) == host.arena.extents.used_bytes
    store = walk.cache.ssd.store
    assert store.num_entries == 9
    assert abs(store.used_bytes - occupied(tmp_path)) <= GRANULE, "a file system may keep a small file in its directory"
    held = {str(form): walk.tree.policy.forms_on(Tier.SSD)[str(form)]["nodes"] for form in forms}
    assert held == dict.fromkeys(map(str, forms), 3)


def test_a_node_without_room_below_stays_where_its_smaller_form_takes_as_many_slots(
    coded: Callable[..., TierWalk],
) -> None:
    """It was to be fewer bytes on the host, by its codec: to ask the press for fewer slots is an error, which would end
    a server of several ranks."""
    walk = coded(page_size=16, policy="evicpress", has_ssd=False, host_bytes=4096)  # half of what the node takes
    _, node = cached(walk, 16)
    form = Form("random", 0.5, "int8")
    assert walk.cache.parts.moves.demote(node.id, Tier.HOST, form, at_once=True) is None
    assert node.kv.form == EXACT and node.value is not None and not node.kv.copies


def test_exact_kv_takes_the_place_of_what_was_decoded(coded: Callable[..., TierWalk]) -> None:
    walk = coded(policy="exact+int8+lru")
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.HOST, INT8)
    walk.serve([*tokens, 59])
    assert node.kv.form == INT8 and is_lossy(node)
    walk.cache.parts.tiers.fill_replace.replace(node, walk.allocator.alloc(100), False)
    assert node.kv.form == EXACT and not is_lossy(node) and not node.kv.copies
    walk.is_sound = False


def test_what_holds_nan_is_not_stored_and_counted(coded: Callable[..., TierWalk]) -> None:
    walk = coded(policy="exact+int8+lru")
    _, node = cached(walk, 100)
    walk.pool.k_buffer[1][slots_of(node)[50], 0, 3] = torch.nan
    walk.cache.parts.moves.demote(node.id, Tier.HOST, INT8)
    walk.settle()
    assert node.kv.copies == {} and node.value is not None
    assert walk.tree.storage.errors["host_not_finite"] == 1
    walk.cache.parts.moves.demote(node.id, Tier.HOST, INT8)
    walk.settle()
    assert walk.tree.storage.errors["host_not_finite"] == 1  # it is not tried again
    walk.is_sound = False


@pytest.mark.parametrize("start", [Tier.GPU, Tier.HOST])
def test_a_node_is_stored_by_the_codec_that_is_asked_for(coded: Callable[..., TierWalk], start: Tier) -> None:
    walk = coded(policy="evicpress")
    _, node = cached(walk, 100)
    demote = walk.cache.parts.admin.demote_node
    if start == Tier.HOST:
        walk.until(lambda: demote(node.id, start)["is_there"])
        assert node.kv.form == EXACT
    walk.until(lambda: demote(node.id, Tier.HOST, codec="int8")["is_there"])
    assert node.kv.form == INT8 and set(node.kv.copies) == {Tier.HOST}
    walk.until(lambda: demote(node.id, Tier.SSD, codec="int4")["is_there"])
    assert node.kv.form == INT4 and set(node.kv.copies) == {Tier.SSD}
    for codec in ("int8", "raw"):
        with pytest.raises(ValueError, match=f"exact.int4 .* stored by {codec}: expected one of int4$"):
            demote(node.id, Tier.SSD, codec=codec)
    walk.is_sound = False


def test_an_entry_of_a_codec_is_found_again_after_a_restart(coded: Callable[..., TierWalk]) -> None:
    walk = coded(policy="exact+int8+lru")
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.SSD, INT8)
    walk.close()
    again = coded(policy="exact+int8+lru")
    assert again.serve([*tokens, 59]) == 100
    (found,) = [each for each in nodes_of(again) if each.kv.form == INT8]
    assert len(found.key) == 100


@pytest.mark.parametrize(
    ("seed", "page_size", "policy", "has_ssd"),
    [(0, 1, "exact+lossless+lru", True), (1, 16, "exact+lossless+lru", True), (2, 4, "knorm@0.5+lossless+lru", False)],
)
def test_random_walk_keeps_every_bit(
    coded: Callable[..., TierWalk], seed: int, page_size: int, policy: str, has_ssd: bool
) -> None:
    walk = coded(seed, page_size, dtype=torch.bfloat16, policy=policy, has_ssd=has_ssd)
    walk.cost, seen = None, set()
    for number in range(200):
        walk.step(10)
        seen |= {copy.form.codec for node in nodes_of(walk) for copy in node.kv.copies.values()}
        assert not any(node.kv.form.codec == "lossless" for node in nodes_of(walk) if node.value is not None)
        if number >= 20 and "lossless" in seen:
            break  # when memory is short first depends on how fast the threads are
    walk.run(1)
    assert walk.tree.storage.counts["released"] > 0 and "lossless" in seen
    assert not walk.tree.storage.errors["host_does_not_fit"]


def test_evicpress_walk_with_lossless_keeps_every_bit(coded: Callable[..., TierWalk]) -> None:
    forms = tuple(map(Form.parse_stored, ("exact+lossless", "knorm@0.8", "knorm@0.5+lossless")))
    curves = {"knorm": {"0.8": 0.99, "0.5": 0.9}}
    room = {"host_bytes": 48 << 10, "ssd_bytes": 256 << 10}
    walk = coded(policy="evicpress", dtype=torch.bfloat16, forms=forms, curves=curves, alpha=1.0, **room)
    walk.cost, seen = None, set()
    for _ in range(40):
        walk.step(10)
        seen |= {copy.form for node in nodes_of(walk) for copy in node.kv.copies.values()}
    assert LOSSLESS in seen and len(seen) > 1


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
@pytest.mark.parametrize("page_size", [1, 16])
def test_lossless_is_exact_wherever_it_is(coded: Callable[..., TierWalk], page_size: int, tier: Tier) -> None:
    walk = coded(page_size=page_size, policy="exact+lossless+lru", dtype=torch.bfloat16)
    tokens, node = cached(walk, 96)
    before = TierWalk.read(walk, slots_of(node)).clone()
    sent(walk, node, tier, LOSSLESS)
    entry = node.kv.copies[tier].entry
    assert node.kv.form == LOSSLESS and not is_lossy(node) and node.kv.copies[tier].is_exact
    assert entry.header.payload_bytes < 0.79 * 96 * walk.tree.menu.slot_bytes
    if tier == Tier.SSD:
        walk.close()
        walk = coded(page_size=page_size, policy="exact+lossless+lru", dtype=torch.bfloat16)
    request = walk.ready([*tokens, *[59] * 20])
    assert walk.admit(request) == 96
    walk.tiers.loads.join_all()
    (node,) = [each for each in nodes_of(walk) if len(each.key) == 96]
    assert torch.equal(TierWalk.read(walk, slots_of(node)).view(torch.int16), before.view(torch.int16))
    assert node.kv.form == EXACT and not is_lossy(node) and not request.evicpress.is_lossy
    walk.end(request)
    (child,) = node.children.values()
    assert not child.kv.is_lossy_prefix
    assert walk.cache.parts.tiers.placement.has_same(node, Tier.HOST)  # it goes down again without a copy


def test_what_does_not_fit_goes_down_raw_and_is_not_tried_again(coded: Callable[..., TierWalk]) -> None:
    walk = coded(policy="exact+lossless+lru", dtype=torch.bfloat16, checks_rows=False)
    tokens, node = cached(walk, 100)
    wide = torch.tensor([1.0, 2.0**-20]).bfloat16().repeat(8)
    walk.pool.k_buffer[1][slots_of(node)] = wide
    walk.cache.parts.moves.demote(node.id, Tier.HOST, LOSSLESS)
    walk.settle()
    assert walk.tree.storage.errors["host_does_not_fit"] == 1 and node.value is not None
    assert not walk.cache.parts.view.stats_of(node).allowed_forms >> walk.tree.menu.forms.index(LOSSLESS) & 1
    sent(walk, node, Tier.HOST, LOSSLESS)
    sent(walk, node, Tier.SSD, LOSSLESS)
    assert node.kv.form == EXACT and walk.tree.storage.errors["host_does_not_fit"] == 1
    assert walk.serve([*tokens, 59]) == 100
    walk.tiers.loads.join_all()
    assert torch.equal(walk.pool.k_buffer[1][slots_of(node)][:, 0], wide.expand(100, -1))
    walk.is_sound = False


def test_what_does_not_fit_stays_as_it_is_on_the_host(coded: Callable[..., TierWalk]) -> None:
    walk = coded(policy="exact+lossless+lru", dtype=torch.bfloat16, checks_rows=False)
    _, node = cached(walk, 100)
    walk.pool.k_buffer[1][slots_of(node)] = torch.tensor([1.0, 2.0**-20]).bfloat16().repeat(8)
    sent(walk, node, Tier.HOST, EXACT)
    compress = walk.cache.parts.tiers.host_compression.compress_on_host
    assert compress(node, LOSSLESS)
    walk.settle()
    assert node.kv.form == EXACT and walk.tree.storage.errors["host_does_not_fit"] == 1
    assert not compress(node, LOSSLESS)
    walk.is_sound = False


def test_what_does_not_fit_at_once_is_lost_but_once(coded: Callable[..., TierWalk]) -> None:
    walk = coded(policy="exact+lossless+lru", dtype=torch.bfloat16, checks_rows=False)
    for number, expected in enumerate(({}, {Tier.HOST: EXACT})):
        _, node = cached(walk, 100)
        walk.pool.k_buffer[1][slots_of(node)] = torch.tensor([1.0, 2.0**-20]).bfloat16().repeat(8)
        walk.cache.parts.moves.demote(node.id, Tier.HOST, LOSSLESS, at_once=True)
        walk.settle()
        assert {tier: copy.form for tier, copy in node.kv.copies.items()} == expected, number
        assert walk.tree.storage.errors["host_does_not_fit"] == 1
    walk.is_sound = False


@pytest.mark.parametrize(("policy", "forms"), [("exact+lossless+lru", (EXACT,)), ("evicpress", (LOSSLESS,))])
def test_lossless_is_refused_where_kv_is_not_bfloat16(
    coded: Callable[..., TierWalk], policy: str, forms: tuple[Form, ...]
) -> None:
    walk = coded(policy="lru", has_ssd=False)
    params = CacheInitParams(False, walk.rows, walk.allocator, walk.page)
    config = walk.configured(policy, {"forms": forms})
    with pytest.raises(ValueError, match=r"form exact\+lossless cannot be stored, as KV is float32: expected --dtype"):
        cache_class()(params, config, Compressor(walk.pool, walk.page, config.sinks), walk.identity)


def test_what_loses_nothing_needs_no_measurement() -> None:
    expected = Expectation.of((), (EXACT, LOSSLESS, Form("knorm", 0.5, "lossless")))
    assert expected.known == 0b010 and expected.vector == (1.0, 1.0, 0.0)
