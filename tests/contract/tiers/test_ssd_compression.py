"""Copies on the SSD in another form than the host's, and nodes that shrink there, on EvicPressCache with real threads,
against the rows that only the oracle of the tiers' walk knows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.contract.cache.test_radix_cache_model import FORMS
from tests.contract.tiers.test_tiers_model import Opened, TierWalk, blocked, cached, sent

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost

pytestmark = pytest.mark.sglang

KNORM = Form("knorm", 0.5)


def on_ssd(walk: TierWalk, *others: Form) -> tuple[list[int], object]:
    """A node of 128 tokens that only the SSD has."""
    tokens, node = cached(walk, 128)
    for form in others:
        walk.cache.parts.moves.compress(node.id, form)
    sent(walk, node, Tier.HOST)
    sent(walk, node, Tier.SSD)
    assert tier_of(node) == Tier.SSD and list(node.kv.copies) == [Tier.SSD]
    return tokens, node


def rewritten(walk: TierWalk, node: object, form: Form) -> None:
    """An idle server with no request for a while, which has nothing to promote, brings the node to ``form``."""
    walk.cache.parts.idle_promotion._next_look_s = math.inf
    walk.tiers.ssd_compression.begin(node.id, form)
    walk.until(lambda: not walk.tiers.ssd_compression.is_busy and walk.tree.storage.num_pending_jobs == 0)


class SsdWalk(TierWalk):
    """A walk that makes copies for the SSD, and shrinks what lies there, also when there is no need."""

    def copy_down(self) -> None:
        nodes = [node for node in self.cache.nodes.values() if Tier.HOST in node.kv.copies]
        if nodes:
            self.tiers.host_compression.copy_to_ssd(self.rng.choice(nodes), self.rng.choice(FORMS))

    def shrink(self) -> None:
        nodes = [node for node in self.cache.nodes.values() if list(node.kv.copies) == [Tier.SSD]]
        if nodes:
            self.tiers.ssd_compression.begin(self.rng.choice(nodes).id, self.rng.choice(FORMS))

    def moves(self) -> dict[Callable[[], None], float]:
        return {**super().moves(), self.copy_down: 10.0, self.shrink: 6.0, self.rest: 3.0}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("host_bytes", [64 << 10, 192 << 10])
def test_random_walks_keep_every_row(tmp_path: Path, page_size: int, host_bytes: int) -> None:
    walk = SsdWalk(7 + page_size, page_size, tmp_path, host_bytes=host_bytes)
    walk.cost = None
    try:
        walk.run(400)
        for _ in range(24):  # what finds room there is up to threads
            if host_bytes >= 192 << 10 and not walk.tree.storage.counts["compressed_for_ssd"]:
                walk.run(200)
    finally:
        walk.close()
    assert host_bytes < 192 << 10 or walk.tree.storage.counts["compressed_for_ssd"] > 0


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("first", [None, Form("knorm", 0.8)])
def test_what_shrinks_on_the_ssd_is_what_compressing_on_the_gpu_makes(
    opened: Opened, page_size: int, first: Form | None
) -> None:
    rows, layouts = [], []
    for is_on_ssd in (True, False):
        walk = opened(0, page_size, has_ssd=is_on_ssd)
        pressed = () if first is None else (first,)
        if is_on_ssd:
            tokens, node = on_ssd(walk, *pressed)
            rewritten(walk, node, KNORM)
            assert {tier: copy.form for tier, copy in node.kv.copies.items()} == {Tier.SSD: KNORM}
            assert node.kv.form == KNORM and tier_of(node) == Tier.SSD
            (entry,) = walk.cache.ssd.entries()
            assert entry.header.payload_bytes == sum(walk.tree.storage.copier.sizes(node.kv.layout.num_slots, True))
            assert walk.serve([*tokens, 59]) == 128
        else:
            tokens, node = cached(walk, 128)
            for form in (*pressed, KNORM):
                walk.cache.parts.moves.compress(node.id, form)
        rows.append(walk.read(node.kv.slots))
        layouts.append(node.kv.layout)
        walk.check()
        walk.check_rows()
        walk.close()
    assert torch.equal(*rows)
    assert torch.equal(*(layout.positions for layout in layouts))


def test_a_copy_for_the_ssd_leaves_that_on_the_host_as_it_is(opened: Opened) -> None:
    walk = opened(0)
    tokens, node = cached(walk, 128)
    walk.copy_to(node, Tier.SSD)
    sent(walk, node, Tier.HOST)
    assert {tier: copy.form for tier, copy in node.kv.copies.items()} == {Tier.HOST: EXACT, Tier.SSD: EXACT}
    assert walk.tiers.host_compression.copy_to_ssd(node, KNORM)
    walk.settle()
    assert {tier: copy.form for tier, copy in node.kv.copies.items()} == {Tier.HOST: EXACT, Tier.SSD: KNORM}
    assert node.kv.form == EXACT and walk.tree.storage.counts["compressed_for_ssd"] == 1
    walk.tiers.removal.release(node.id, Tier.SSD)
    assert node.kv.form == KNORM
    assert walk.serve([*tokens, 59]) == 128
    walk.check_rows()


def test_a_copy_for_the_ssd_of_a_node_that_has_changed_is_forgotten(opened: Opened) -> None:
    walk = opened(0)
    tokens, node = cached(walk, 128)
    sent(walk, node, Tier.HOST)
    blocks = blocked(walk, "write")
    assert walk.tiers.host_compression.copy_to_ssd(node, KNORM)
    walk.until(lambda: walk.tree.storage.workers["write"].num_pending > 1)
    walk.look_up(walk.wait(tokens[:64]))  # which splits it
    walk.go_on(*blocks)
    assert walk.tree.storage.counts["copies_outdated"] == 1
    assert not any(Tier.SSD in each.kv.copies for each in walk.cache.nodes.values())
    walk.end_all()
    walk.settle()
    walk.check_nothing_leaks()


def test_a_node_that_a_request_takes_meanwhile_is_not_shrunk(opened: Opened) -> None:
    walk = opened(0)
    tokens, node = on_ssd(walk)
    walk.tiers.ssd_compression.begin(node.id, KNORM)
    assert walk.serve([*tokens, 59]) == 128
    walk.until(lambda: not walk.tiers.ssd_compression.is_busy)
    assert node.kv.form == EXACT and node.value is not None


@pytest.mark.parametrize("is_held", [False, True])
def test_an_idle_server_shrinks_what_is_read_for_too_long_unless_it_is_held(opened: Opened, is_held: bool) -> None:
    walk = opened(0, policy="evicpress", curves={"knorm": {"0.5": 0.99, "0.2": 0.1}})
    _, node = on_ssd(walk)
    walk.tiers.holds.hold(node.id, 60.0 if is_held else 0.0)
    slow = {Tier.HOST: TransferCost(0.0, 1e9), Tier.SSD: TransferCost(0.0, node.kv.copies[Tier.SSD].num_bytes / 0.5)}
    walk.count += 2
    walk.cache.terms.advance(walk.count * 11.0, CostSnapshot(PrefillCost(0.0, 1.0, 0.0), slow, {}))
    walk.cache.parts.idle_promotion._next_look_s = math.inf
    deadline = time.monotonic() + 30.0
    while node.kv.form == EXACT and time.monotonic() < deadline:
        walk.tree.storage.arrival.wait(0.005)
        walk.tick()
        if is_held and walk.cache.parts.idle_compression._next_look_s > 0.0:
            break
    walk.until(lambda: not walk.tiers.ssd_compression.is_busy and walk.tree.storage.num_pending_jobs == 0)
    assert node.kv.form == (EXACT if is_held else KNORM) and tier_of(node) == Tier.SSD
    moves = walk.cache.inspector.describe_node(node.id, positions=False, tokens=False)["decisions"]
    assert [each["to"] for each in moves if each["from"].endswith("ssd")] == ([] if is_held else ["knorm@0.5/ssd"])
