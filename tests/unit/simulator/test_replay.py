"""A replay does what a server does: lineage, quality of a path, where nodes shrink, loading behind a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.simulator.queue import NO_QUEUE
from sglang_evicpress.simulator.replay import MIN_COMPRESS_TOKENS, Machine, Outcome, Replay
from sglang_evicpress.simulator.runs import Run, Settings, make_replay
from sglang_evicpress.traces import Request, Trace

HALF, QUARTER = Form("keydiff", 0.5), Form("keydiff", 0.25)
CURVES = Curves.from_json({"keydiff": {"0.5": 0.8, "0.25": 0.6}})
COSTS = CostSnapshot(
    PrefillCost(0.0, 0.1, 0.0), {Tier.HOST: TransferCost(0.0, 20.0), Tier.SSD: TransferCost(0.0, 10.0)}, {}
)
"""A token takes 0.1 s to prefill; a slot is a byte, so that a token loads in 0.05 s and 0.1 s."""


def a_replay(
    requests: Sequence[Request],
    policy: str,
    *,
    alpha: float | None = None,
    num_servers: float = NO_QUEUE,
    forms: tuple[Form, ...] = (HALF, QUARTER),
    min_compress_tokens: int = 1,
    costs: CostSnapshot = COSTS,
    **capacity: int,
) -> Replay:
    """A replay of blocks of 10 tokens, with so many bytes by name of the tier."""
    sizes = {tier: capacity[tier.label] for tier in Tier if tier.label in capacity}
    machine = Machine(sizes, costs, num_servers=num_servers)
    settings = Settings(machine, 1, forms, curves=CURVES, recompute="all", min_compress_tokens=min_compress_tokens)
    return make_replay(Trace("t", 10, requests), Run(policy, alpha), settings)


def ask(at_s: float, *blocks: int) -> Request:
    return Request(at_s, blocks, 10 * len(blocks))


def qualities(replay: Replay) -> list[float]:
    return [outcome.quality for outcome in replay.run()]


# lineage, and the quality of a path


def test_a_hit_is_worth_the_mean_over_the_tokens_of_its_path() -> None:
    """30 tokens at 0.8, 10 that were computed while those were exact."""
    replay = a_replay([ask(0.0, 1, 2, 3), ask(1.0, 1, 2, 3, 4)], "lru", gpu=100)
    assert qualities(replay) == [1.0, 1.0]
    first = next(node for node in replay.tree.nodes.values() if node.blocks == (1, 2, 3))
    first.form, first.quality = HALF, 0.8
    assert replay.serve(ask(2.0, 1, 2, 3, 4)).quality == pytest.approx(1.0 - 0.2 * 30 / 40)


def test_what_is_computed_on_lossy_kv_is_as_lossy() -> None:
    requests = [ask(0.0, 1, 2), ask(1.0, 8, 9), ask(2.0, 1, 2, 3), ask(3.0, 1, 2, 3)]
    replay = a_replay(requests, "keydiff@0.5+lru", gpu=35)
    outcomes = list(replay.run())
    # The first prefix is halved to make room for the second; the third request extends it.
    assert [outcome.quality for outcome in outcomes] == pytest.approx([1.0, 1.0, 0.8, 0.8])
    leaf = next(node for node in replay.tree.nodes.values() if node.blocks == (3,))
    assert (leaf.form, leaf.quality, leaf.lineage) == (EXACT, 1.0, pytest.approx(0.8))


def test_the_policy_sees_the_form_and_not_the_lineage() -> None:
    """As on a server, whose ``quality_of`` is 1 for every exact form."""
    replay = a_replay([ask(0.0, 1, 2)], "lru", gpu=100)
    list(replay.run())
    (node,) = replay.tree.nodes.values()
    node.form, node.quality = HALF, 0.8
    replay.serve(ask(1.0, 1, 2, 3))
    leaf = next(node for node in replay.tree.nodes.values() if node.blocks == (3,))
    assert leaf.lineage == pytest.approx(0.8)
    assert replay.planner.index.candidates[leaf.id].quality == 1.0


def test_lineage_outlasts_what_it_came_from_and_a_split() -> None:
    replay = a_replay([ask(0.0, 1, 2)], "lru", gpu=1000)
    list(replay.run())
    (above,) = replay.tree.nodes.values()
    above.form, above.quality = HALF, 0.8
    replay.serve(ask(1.0, 1, 2, 3, 4))
    above.form, above.quality = EXACT, 1.0  # computed anew, by a request that needed no more
    assert replay.serve(ask(2.0, 1, 2, 3, 4)).quality == pytest.approx(1.0 - 0.2 * 20 / 40)
    assert replay.serve(ask(3.0, 1, 2, 3, 5)).quality == pytest.approx(1.0 - 0.2 * 10 / 30)  # splits (3, 4)
    assert replay.serve(ask(4.0, 1, 2, 3, 4)).quality == pytest.approx(1.0 - 0.2 * 20 / 40)


def test_a_lossy_form_of_lossy_lineage_loses_twice() -> None:
    replay = a_replay([ask(0.0, 1)], "lru", gpu=1000)
    list(replay.run())
    (node,) = replay.tree.nodes.values()
    node.form, node.quality, node.lineage = HALF, 0.8, 0.9
    assert replay.serve(ask(1.0, 1)).quality == pytest.approx(0.72)


def test_what_is_computed_anew_is_as_good_as_what_it_was_computed_on() -> None:
    """Loading a token takes a thousand times as long as prefilling it: what is below the GPU is computed anew."""
    slow = replace(COSTS, load={tier: TransferCost(0.0, 0.01) for tier in (Tier.HOST, Tier.SSD)})
    replay = a_replay([ask(0.0, 1, 2)], "lru", gpu=1000, host=1000, costs=slow)
    list(replay.run())
    replay.serve(ask(1.0, 1, 2, 3))
    above, below = sorted(replay.tree.nodes.values(), key=lambda node: node.depth_tokens)
    below.tier, below.form, below.quality, below.lineage = Tier.HOST, HALF, 0.8, 0.5
    replay.used[Tier.GPU] -= below.num_bytes
    replay.used[Tier.HOST] += below.num_bytes
    above.form, above.quality = HALF, 0.9
    outcome = replay.serve(ask(2.0, 1, 2, 3))
    assert (outcome.hit_tokens, outcome.quality) == ({Tier.GPU: 20}, pytest.approx(0.9))
    assert (below.tier, below.form, below.quality) == (Tier.GPU, EXACT, 1.0)
    assert below.lineage == pytest.approx(0.9)


# what can shrink where


@pytest.mark.parametrize(
    ("policy", "alpha", "tiers"),
    [
        ("evicpress", 1.0, {Tier.GPU, Tier.HOST}),
        ("keydiff@0.5+lru", None, {Tier.GPU}),
        ("lru", None, set()),
    ],
)
def test_where_a_policy_may_compress(policy: str, alpha: float | None, tiers: set[Tier]) -> None:
    replay = a_replay([ask(0.0, 1, 2)], policy, alpha=alpha, gpu=1000, host=1000, ssd=1000)
    list(replay.run())
    (node,) = replay.tree.nodes.values()
    found = set()
    for tier in (Tier.GPU, Tier.HOST, Tier.SSD):
        node.tier = tier
        if replay._stats(node).allowed_forms:
            found.add(tier)
    assert found == tiers


def test_a_short_node_and_a_lossy_one_are_left_alone() -> None:
    replay = a_replay([ask(0.0, 1, 2)], "evicpress", alpha=1.0, min_compress_tokens=20, gpu=1000)
    list(replay.run())
    (node,) = replay.tree.nodes.values()
    menu = replay.menu
    assert replay._stats(node).allowed_forms == menu.everything
    node.form = HALF  # by the same press, and fewer tokens
    assert replay._stats(node).allowed_forms == 1 << menu.forms.index(QUARTER)
    node.form = Form("knorm", 0.9)
    assert replay._stats(node).allowed_forms == 0
    node.form, replay.min_compress_tokens = EXACT, 21
    assert replay._stats(node).allowed_forms == 0


def test_the_least_length_is_a_server_s() -> None:
    assert EvicPressConfig(policy="lru").min_compress_tokens == MIN_COMPRESS_TOKENS


# loading behind a queue


def _hit_on(tier: Tier, before: Sequence[Request], num_servers: float, costs: CostSnapshot = COSTS) -> Outcome:
    """The outcome of a request for 20 tokens of ``tier`` that arrives at 100 s, after ``before``."""
    replay = a_replay([ask(0.0, 1, 2)], "lru", num_servers=num_servers, costs=costs, gpu=10**6, host=10**6, ssd=10**6)
    list(replay.run())
    (node,) = replay.tree.nodes.values()
    replay.used[node.tier] -= node.num_bytes
    node.tier = tier
    replay.used[tier] += node.num_bytes
    for request in before:
        replay.serve(request)
    return replay.serve(ask(100.0, 1, 2))


def _slow(tier: Tier) -> CostSnapshot:
    """From this tier 20 tokens take 3 s, which prefill in 2 s."""
    return replace(COSTS, load={**COSTS.load, tier: TransferCost(2.0, 20.0)})


def _others(number: int) -> list[Request]:
    """Requests that take 5 s each."""
    return [ask(100.0, *range(100 + 10 * index, 105 + 10 * index)) for index in range(number)]


def test_a_queue_for_the_gpu_hides_what_is_read() -> None:
    assert _hit_on(Tier.SSD, [], 1.0, _slow(Tier.SSD)).hit_tokens == {}
    busy = _hit_on(Tier.SSD, _others(1), 1.0, _slow(Tier.SSD))  # which does not wait: nobody is behind this request
    assert busy.hit_tokens == {Tier.SSD: 20}
    assert busy.ttft_s == pytest.approx(5.0 + 0.1)
    assert busy.regret_s == 0.0  # behind the same queue recomputing takes 7 s
    assert _hit_on(Tier.SSD, _others(1), NO_QUEUE, _slow(Tier.SSD)).hit_tokens == {}


def test_computing_counts_more_while_others_wait() -> None:
    """What comes from the host has to be loaded when it is the request's turn, so that no wait hides it."""
    assert _hit_on(Tier.HOST, _others(1), 1.0, _slow(Tier.HOST)).hit_tokens == {}
    assert _hit_on(Tier.HOST, _others(2), 1.0, _slow(Tier.HOST)).hit_tokens == {Tier.HOST: 20}


def test_a_queue_for_the_link_counts_against_loading() -> None:
    """20 tokens load from the host in 1 s and prefill in 2 s; behind 4 s of others' loading they prefill sooner."""
    assert _hit_on(Tier.HOST, [], 1.0).hit_tokens == {Tier.HOST: 20}
    replay = a_replay([ask(0.0, 1, 2)], "lru", num_servers=1.0, gpu=10**6, host=10**6)
    list(replay.run())
    (node,) = replay.tree.nodes.values()
    replay.used[node.tier] -= node.num_bytes
    node.tier = Tier.HOST
    replay.used[Tier.HOST] += node.num_bytes
    replay.queue.serve(100.0, {Tier.HOST: 4.0}, 0.0)
    outcome = replay.serve(ask(100.0, 1, 2))
    assert outcome.hit_tokens == {}
    assert outcome.ttft_s == pytest.approx(2.0)
