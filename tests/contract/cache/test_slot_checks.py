"""Slots are compared with what they held before they are used: what has changed is a miss, computed anew."""

from __future__ import annotations

import pytest
from tests.contract.tiers.test_tiers_model import HALF, Opened, cached, sent

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.patches.tree.node import slots_of

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("share", [1.0, 0.2])
@pytest.mark.parametrize("form", [EXACT, HALF])
def test_slots_that_others_have_written_to_are_a_miss(opened: Opened, form: Form, share: float) -> None:
    walk = opened(page_size=4, slot_checks=share)
    tokens, node = cached(walk, 128)
    if form.is_exact:
        sent(walk, node, Tier.HOST)
        assert walk.serve([*tokens, 59]) == 128
        walk.settle()
    else:
        walk.cache.parts.moves.compress(node.id, form)
    checks = walk.cache.parts.slot_checks
    assert [walk.match(tokens) for _ in range(2)] == [128, 128] and walk.tree.storage.errors["gpu_slots"] == 0
    sample = checks._samples[node.id].slots
    assert len(sample) == -(-len(slots_of(node)) * share // 1) and walk.tree.storage.counts["slots_checked"] > 0
    untouched = next((slot for slot in slots_of(node).tolist() if slot not in sample.tolist()), None)
    if untouched is not None:
        walk.pool.v_buffer[1][untouched, 0, 3] += 1
        assert walk.match(tokens) == 128, "a slot that is not in the sample"
        walk.pool.v_buffer[1][untouched, 0, 3] -= 1
    walk.pool.v_buffer[1][sample[len(sample) // 2], 0, 3] += 1
    assert walk.match(tokens) == 0 and walk.tree.storage.errors["gpu_slots"] == 1
    assert node.id not in walk.cache.nodes
    walk.serve(tokens)
    assert walk.match(tokens) == 128
    walk.check_rows()


def test_a_node_that_is_held_is_a_miss_until_it_can_go(opened: Opened) -> None:
    walk = opened(slot_checks=1.0)
    tokens, node = cached(walk, 100)
    walk.cache.parts.moves.compress(node.id, HALF)
    assert walk.match(tokens) == 100
    node.lock_ref += 1
    slot = slots_of(node)[3]
    walk.pool.k_buffer[0][slot, 0, 0] += 1
    assert walk.match(tokens) == 0 and node.id in walk.cache.nodes
    node.lock_ref -= 1
    assert walk.match(tokens) == 0 and node.id not in walk.cache.nodes


def test_nothing_is_compared_unless_asked(opened: Opened) -> None:
    walk = opened()
    tokens, node = cached(walk, 100)
    walk.cache.parts.moves.compress(node.id, HALF)
    assert walk.match(tokens) == walk.match(tokens) == 100
    assert not walk.cache.parts.slot_checks._samples


def test_a_random_walk_raises_no_alarm(opened: Opened) -> None:
    walk = opened(3, 1, slot_checks=1.0)
    walk.cost = None
    while not walk.tree.storage.counts["slots_checked"]:  # what is loaded depends on how busy the machine is
        walk.step(100)
    walk.run(200)
    assert walk.tree.storage.errors["gpu_slots"] == 0
