"""Choice between loading and recomputing, and the deadline of a load."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.core import Tier
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.load_or_recompute import Piece, deadline_s, num_worth_loading

COSTS = CostSnapshot(
    PrefillCost(5.0, 1.0, 0.0),  # a second per token; the fixed cost is paid anyhow
    {Tier.HOST: TransferCost(0.0, 10.0), Tier.SSD: TransferCost(4.0, 1.0)},
    {"int8": TransferCost(1.0, 10.0)},
)

TERMS = st.integers(0, 64).map(lambda number: number / 16)  # sums of few of them are exact, so that ties are ties


def _path(*parts: tuple[int, Tier, int], codec: str = "raw") -> list[Piece]:
    pieces, depth = [], 0
    for tokens, tier, num_bytes in parts:
        pieces.append(Piece(tokens, depth, tier, num_bytes, codec))
        depth += tokens
    return pieces


def _predicted_s(pieces: list[Piece], costs: CostSnapshot, number: int, overlap: float) -> float:
    loaded = pieces[:number]
    load_s = sum(costs.load_seconds(one.tier, one.num_bytes, one.codec) for one in loaded)
    num_on_host = sum(one.tier == Tier.HOST for one in loaded)
    load_s -= max(0, num_on_host - 1) * costs.load[Tier.HOST].fixed_s if Tier.HOST in costs.load else 0.0  # one load
    recompute_s = sum(costs.prefill.marginal_seconds(one.num_tokens, one.depth_tokens) for one in pieces[number:])
    return load_s + recompute_s - overlap * min(load_s, recompute_s)


def test_what_loads_sooner_than_it_is_recomputed_is_loaded() -> None:
    assert num_worth_loading([], COSTS) == 0
    assert num_worth_loading(_path((10, Tier.HOST, 50)), COSTS) == 1  # 5 s against 10 s
    assert num_worth_loading(_path((10, Tier.HOST, 100)), COSTS) == 0  # as long: the fewest
    assert num_worth_loading(_path((10, Tier.HOST, 150)), COSTS) == 0


def test_a_beginning_on_the_host_is_loaded_and_a_rest_on_the_ssd_recomputed() -> None:
    assert num_worth_loading(_path((10, Tier.HOST, 50), (10, Tier.SSD, 50)), COSTS) == 1


def test_a_slow_piece_is_loaded_for_what_lies_behind_it() -> None:
    assert num_worth_loading(_path((10, Tier.SSD, 10), (10, Tier.HOST, 10)), COSTS) == 2  # 14 + 1 s against 20 s
    assert num_worth_loading(_path((10, Tier.SSD, 20), (10, Tier.HOST, 10)), COSTS) == 0  # 24 + 1 s


def test_what_a_tier_was_asked_for_before_comes_first() -> None:
    near, far = _path((10, Tier.HOST, 50)), _path((10, Tier.SSD, 2))  # 5 s and 6 s against 10 s
    assert num_worth_loading(far, COSTS, waits={Tier.SSD: 3.75}) == 1
    assert num_worth_loading(far, COSTS, waits={Tier.SSD: 4.0}) == 0
    assert num_worth_loading(near, COSTS, waits={Tier.SSD: 99.0}) == 1
    both = _path((10, Tier.SSD, 2), (10, Tier.SSD, 2))  # 12 s against 20 s: one wait for both
    assert num_worth_loading(both, COSTS, waits={Tier.SSD: 7.5}) == 2


def test_every_piece_pays_the_fixed_cost_of_its_transfer_and_for_decoding_its_bytes() -> None:
    assert num_worth_loading(_path((4, Tier.SSD, 2)), COSTS) == 0  # 4 + 2 s against 4 s
    assert num_worth_loading(_path((8, Tier.SSD, 2)), COSTS) == 1
    assert num_worth_loading(_path(*[(4, Tier.SSD, 1)] * 2), COSTS) == 0  # 2 x 5 s against 8 s
    assert num_worth_loading(_path((7, Tier.SSD, 2), codec="int8"), COSTS) == 1  # 6 + 0.2 s against 7 s
    assert num_worth_loading(_path((7, Tier.SSD, 2.9), codec="int8"), COSTS) == 0  # 6.9 + 0.29 s
    assert num_worth_loading(_path((7, Tier.SSD, 2.9)), COSTS) == 1


def test_what_is_on_the_host_comes_in_one_load_however_many_nodes_it_is() -> None:
    costs = replace(COSTS, load={Tier.HOST: TransferCost(20.0, 10.0), Tier.SSD: TransferCost(20.0, 10.0)})
    assert num_worth_loading(_path(*[(10, Tier.HOST, 10)] * 5), costs) == 5  # 25 s against 50 s
    assert num_worth_loading(_path(*[(10, Tier.SSD, 10)] * 5), costs) == 0  # each is read by itself: 105 s


def test_what_overlaps_is_split_even_on_one_tier() -> None:
    path = _path(*[(10, Tier.HOST, 120)] * 5)  # 12 s to load each, 10 s to recompute
    assert num_worth_loading(path, COSTS) == 0
    assert num_worth_loading(path, COSTS, overlap=1.0) == 2  # 24 s beside 30 s


@pytest.mark.parametrize("overlap", [-0.1, 1.1, math.nan])
def test_an_overlap_that_is_no_share_is_refused(overlap: float) -> None:
    with pytest.raises(ValueError, match="expected a share between 0 and 1"):
        num_worth_loading([], COSTS, overlap=overlap)


def test_a_tier_without_a_law_is_refused() -> None:
    with pytest.raises(ValueError, match="no load cost for tier EXTERNAL"):
        num_worth_loading(_path((1, Tier.EXTERNAL, 1)), COSTS)


@given(
    parts=st.lists(st.tuples(st.integers(0, 64), st.sampled_from(tuple(Tier)[:3]), st.integers(0, 64)), max_size=8),
    prefill=st.tuples(TERMS, TERMS, TERMS),
    fixed=st.tuples(TERMS, TERMS),
    speeds=st.tuples(*[st.sampled_from((0.25, 1.0, 8.0))] * 2),
    overlap=st.sampled_from((0.0, 0.25, 1.0)),
    codec=st.sampled_from(("raw", "int8")),
    depth=st.integers(0, 1000),
)
def test_it_is_the_best_of_all_splits_with_the_fewest_pieces(
    parts: list[tuple[int, Tier, int]],
    prefill: tuple[float, float, float],
    fixed: tuple[float, float],
    speeds: tuple[float, float],
    overlap: float,
    codec: str,
    depth: int,
) -> None:
    costs_by_tier = [TransferCost(fixed_s, speed) for fixed_s, speed in zip(fixed, speeds, strict=True)]
    load = dict(zip((Tier.HOST, Tier.SSD), costs_by_tier, strict=True))
    costs = CostSnapshot(PrefillCost(*prefill), load, {"int8": TransferCost(0.5, 4.0)})
    pieces = [
        Piece(one.num_tokens, depth + one.depth_tokens, one.tier, one.num_bytes, one.codec)
        for one in _path(*parts, codec=codec)
    ]
    totals = [_predicted_s(pieces, costs, number, overlap) for number in range(len(pieces) + 1)]
    chosen = num_worth_loading(pieces, costs, overlap=overlap)
    assert chosen == totals.index(min(totals))
    assert totals[chosen] <= totals[0]


@given(
    count=st.integers(1, 20),
    tokens=st.integers(1, 64),
    num_bytes=st.integers(0, 640),
    per_pair_s=TERMS,
    tier=st.sampled_from((Tier.HOST, Tier.SSD)),
)
def test_like_pieces_on_one_tier_are_loaded_all_or_not_at_all(
    count: int, tokens: int, num_bytes: int, per_pair_s: float, tier: Tier
) -> None:
    costs = CostSnapshot(PrefillCost(0.0, 1.0, per_pair_s), COSTS.load, {})
    assert num_worth_loading(_path(*[(tokens, tier, num_bytes)] * count), costs) in (0, count)


@pytest.mark.parametrize(
    ("load_s", "recompute_s", "expected"),
    [
        (0.01, 10.0, 1.0),  # three times fits into a tenth
        (0.3, 10.0, 1.0),
        (2.0, 10.0, 3.0),
        (9.0, 10.0, 10.0),
        (50.0, 10.0, 10.0),
        (1.0, 0.0, 0.0),
    ],
)
def test_deadlines_by_hand(load_s: float, recompute_s: float, expected: float) -> None:
    assert deadline_s(load_s, recompute_s) == pytest.approx(expected)


SECONDS = st.floats(0.0, 1e6)


@given(load_s=SECONDS, recompute_s=SECONDS, more=SECONDS)
def test_a_load_that_stalls_costs_little(load_s: float, recompute_s: float, more: float) -> None:
    waited_s = deadline_s(load_s, recompute_s)
    assert waited_s + recompute_s <= 2.0 * recompute_s
    if load_s <= recompute_s / 15:
        assert waited_s + recompute_s <= 1.1 * recompute_s * (1 + 1e-12)
    assert waited_s >= min(1.5 * load_s, recompute_s)
    assert deadline_s(load_s + more, recompute_s) >= waited_s
    assert deadline_s(load_s, recompute_s + more) >= waited_s


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_seconds_below_0_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="load_s is .*: expected seconds, 0 or more"):
        deadline_s(seconds, 1.0)
    with pytest.raises(ValueError, match="recompute_s is .*: expected seconds, 0 or more"):
        deadline_s(1.0, seconds)


def test_what_is_read_before_the_turn_comes_costs_nothing() -> None:
    far = _path((10, Tier.SSD, 90))
    before = num_worth_loading(far, COSTS)
    assert before == 0
    assert num_worth_loading(far, COSTS, slack_s=1e6) == 1
    near = _path((10, Tier.HOST, 150))  # what goes from the host to the GPU takes its time whenever the turn is
    assert num_worth_loading(near, COSTS, slack_s=1e6) == 0


def test_computing_counts_for_all_whom_it_holds_up() -> None:
    near = _path((10, Tier.HOST, 150))  # 15 s against 10 s
    assert [num_worth_loading(near, COSTS, congestion=times) for times in (1.0, 1.5, 1.6)] == [0, 0, 1]


@pytest.mark.parametrize(("slack_s", "congestion"), [(-1.0, 1.0), (math.nan, 1.0), (0.0, 0.5), (0.0, math.nan)])
def test_slack_and_congestion_are_checked(slack_s: float, congestion: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        num_worth_loading([], COSTS, slack_s=slack_s, congestion=congestion)
