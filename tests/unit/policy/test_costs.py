"""The cost model against costs it does not know: it finds them, follows them, and is not thrown off."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_evicpress.core import Tier
from sglang_evicpress.policy.cost_model import CostModel, CostSnapshot, PrefillCost, TransferCost

START = CostSnapshot(
    PrefillCost(0.01, 1e-4, 1e-9),
    {Tier.HOST: TransferCost(1e-4, 1e10), Tier.SSD: TransferCost(1e-3, 1e9)},
    {"int8": TransferCost(1e-4, 2e10)},
)
HIDDEN = TransferCost(7e-4, 3e9)
HIDDEN_PREFILL = PrefillCost(0.03, 5e-5, 4e-9)
SIZES = tuple(2**power for power in range(16, 31))
NOISE = 0.05
SEEDS = range(5)

Chunks = list[tuple[int, int]]


def sizes(rng: random.Random, count: int) -> list[int]:
    return [int(2 ** rng.uniform(16, 30)) for _ in range(count)]


def feed(model: CostModel, cost: TransferCost, rng: random.Random, num_bytes: list[int]) -> None:
    for size in num_bytes:
        model.observe_load(Tier.HOST, size, cost.seconds(size) * (1 + rng.gauss(0, NOISE)))


def off(found: TransferCost, true: TransferCost, at: tuple[int, ...] = SIZES) -> float:
    """The largest relative error over the sizes."""
    return max(abs(found.seconds(size) / true.seconds(size) - 1) for size in at)


def batches(rng: random.Random, count: int, requests: int, deepest: int = 17) -> list[Chunks]:
    def chunk() -> tuple[int, int]:
        depth = int(2 ** rng.uniform(8, deepest)) if deepest and rng.random() < 0.5 else 0
        return int(2 ** rng.uniform(5, 14)), depth

    return [[chunk() for _ in range(rng.randint(1, requests))] for _ in range(count)]


def feed_prefill(model: CostModel, cost: PrefillCost, rng: random.Random, observed: list[Chunks]) -> None:
    for chunks in observed:
        seconds = cost.fixed_s + sum(cost.marginal_seconds(*chunk) for chunk in chunks)
        model.observe_prefill(chunks, seconds * (1 + rng.gauss(0, NOISE)))


def prefill_off(
    found: PrefillCost, true: PrefillCost, depths: tuple[int, ...] = (0, 1024, 16384, 131072)
) -> list[float]:
    at = [(tokens, depth) for tokens in (128, 512, 2048, 8192, 16384) for depth in depths]
    return [abs(found.seconds(*chunk) / true.seconds(*chunk) - 1) for chunk in at]


# The costs.


def test_prefill_law_is_the_sum_of_its_terms() -> None:
    cost = PrefillCost(0.5, 0.25, 0.125)
    assert cost.marginal_seconds(4, 10) == 0.25 * 4 + 0.125 * 4 * (10 + 2)
    assert cost.seconds(4, 10) == 0.5 + cost.marginal_seconds(4, 10)


def test_time_beyond_that_of_raw_bytes_is_of_decoding() -> None:
    model, rng = CostModel(START), random.Random(0)
    raw, decode = TransferCost(2e-4, 8e9), TransferCost(1e-4, 1e9)
    for _ in range(60):
        size = int(2 ** rng.uniform(18, 26))
        model.observe_load(Tier.HOST, size, raw.seconds(size) * (1 + rng.gauss(0, NOISE)))
        model.observe_load(
            Tier.HOST, size, (raw.seconds(size) + decode.seconds(size)) * (1 + rng.gauss(0, NOISE)), "int4"
        )
    for size in (2**19, 2**22, 2**25):
        assert model.costs.load_seconds(Tier.HOST, size) == pytest.approx(raw.seconds(size), rel=0.15)
        both = raw.seconds(size) + decode.seconds(size)
        assert model.costs.load_seconds(Tier.HOST, size, "int4") == pytest.approx(both, rel=0.15)
        assert model.costs.load_seconds(Tier.HOST, size, "int2") == model.costs.load_seconds(Tier.HOST, size)


def test_what_decoding_takes_is_told_anew_when_raw_loads_turn_out_slower() -> None:
    model, slow = CostModel(START), TransferCost(1e-4, 1e9)
    for _ in range(60):
        model.observe_load(Tier.HOST, 2**24, 1.05 * slow.seconds(2**24), "int4")
    assert model.costs.load_seconds(Tier.HOST, 2**24, "int4") == pytest.approx(1.05 * slow.seconds(2**24), rel=0.1)
    for _ in range(60):
        model.observe_load(Tier.HOST, 2**24, slow.seconds(2**24))
    assert model.costs.load_seconds(Tier.HOST, 2**24, "int4") == pytest.approx(1.05 * slow.seconds(2**24), rel=0.1)


def test_only_loads_from_the_host_decode() -> None:
    with pytest.raises(ValueError, match=r"load by codec int4 from tier SSD: expected one from HOST"):
        CostModel(START).observe_load(Tier.SSD, 2**20, 0.1, "int4")


def test_bytes_that_come_decoded_sooner_than_raw_ones_were_expected_make_these_faster() -> None:
    model = CostModel(START)
    for _ in range(200):
        model.observe_load(Tier.HOST, 2**24, START.load[Tier.HOST].seconds(2**24) / 4, "int8")
    assert model.costs.load_seconds(Tier.HOST, 2**24, "int8") == pytest.approx(
        START.load[Tier.HOST].seconds(2**24) / 4, rel=0.1
    )


def test_load_is_transfer_and_decode_and_nothing_on_the_gpu() -> None:
    assert START.load_seconds(Tier.GPU, 10**9, "int8") == 0.0
    raw = START.load_seconds(Tier.SSD, 10**9)
    assert raw == pytest.approx(1.001)
    assert START.load_seconds(Tier.SSD, 10**9, "fp8") == raw
    assert START.load_seconds(Tier.SSD, 10**9, "int8") == pytest.approx(raw + 1e-4 + 0.05)


def test_a_tier_without_a_law_is_named() -> None:
    with pytest.raises(ValueError, match="EXTERNAL.*HOST, SSD"):
        START.load_seconds(Tier.EXTERNAL, 1)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["fixed_s", "per_token_s", "per_pair_s"])
def test_a_bad_prefill_coefficient_is_named(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {bad!r}"):
        dataclasses.replace(START.prefill, **{name: bad})


@pytest.mark.parametrize(
    ("name", "bad"), [("fixed_s", -1.0), ("fixed_s", math.nan), ("bytes_per_s", 0.0), ("bytes_per_s", math.inf)]
)
def test_a_bad_transfer_coefficient_is_named(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {bad!r}"):
        dataclasses.replace(HIDDEN, **{name: bad})


# Learning.


def test_the_starting_values_hold_until_something_is_observed() -> None:
    model = CostModel(START)
    assert model.costs == START
    feed(model, HIDDEN, random.Random(0), [10**6])
    assert model.costs.load[Tier.HOST] != START.load[Tier.HOST]
    assert model.costs.load[Tier.SSD] == START.load[Tier.SSD]
    assert (model.costs.prefill, model.costs.decode) == (START.prefill, START.decode)


def test_a_snapshot_does_not_change() -> None:
    model = CostModel(START)
    before = model.costs
    feed(model, HIDDEN, random.Random(0), [10**6])
    model.observe_prefill([(10, 0)], 1.0)
    assert before == START


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fixed_s", [1e-5, 7e-4, 0.05])
def test_a_hidden_transfer_law_is_found(fixed_s: float, seed: int) -> None:
    rng, model, hidden = random.Random(seed), CostModel(START), TransferCost(fixed_s, 3e9)
    feed(model, hidden, rng, sizes(rng, 150))
    assert off(START.load[Tier.HOST], hidden) > 0.5
    assert off(model.costs.load[Tier.HOST], hidden) < 0.05


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hidden_law_of_copies_is_found_from_plans_of_several_nodes(seed: int) -> None:
    model, rng = CostModel(START), random.Random(seed)
    for _ in range(60):
        num_copies, num_bytes = rng.randint(1, 20), rng.choice(SIZES)
        model.observe_copy(num_copies, num_bytes, (5e-4 * num_copies + num_bytes / 4e8) * (1 + rng.gauss(0, NOISE)))
    costs = model.costs
    assert costs.copy_seconds(10, 2**20) == pytest.approx(5e-3 + 2**20 / 4e8, rel=0.15)
    assert costs.load == START.load and costs.prefill == START.prefill


@pytest.mark.parametrize(("num_copies", "num_bytes", "seconds"), [(0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0)])
def test_copies_of_nothing_are_named(num_copies: int, num_bytes: int, seconds: float) -> None:
    model = CostModel(START)
    with pytest.raises(ValueError, match="cop"):
        model.observe_copy(num_copies, num_bytes, seconds)
    assert model.costs == START


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("requests", [1, 6])
def test_a_hidden_prefill_law_is_found(requests: int, seed: int) -> None:
    rng, model = random.Random(seed), CostModel(START)
    feed_prefill(model, HIDDEN_PREFILL, rng, batches(rng, 300, requests))
    assert max(prefill_off(START.prefill, HIDDEN_PREFILL)) > 0.5
    errors = prefill_off(model.costs.prefill, HIDDEN_PREFILL)
    assert sum(errors) / len(errors) < 0.05
    assert max(errors) < 0.1


def test_a_hidden_prefill_law_without_noise_is_found_exactly() -> None:
    rng, model = random.Random(0), CostModel(START)
    for chunks in batches(rng, 300, 6):
        cost = HIDDEN_PREFILL
        model.observe_prefill(chunks, cost.fixed_s + sum(cost.marginal_seconds(*chunk) for chunk in chunks))
    assert max(prefill_off(model.costs.prefill, HIDDEN_PREFILL)) < 1e-3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_changed_bandwidth_is_followed_within_20_observations(factor: float, seed: int) -> None:
    rng, model = random.Random(seed), CostModel(START)
    feed(model, HIDDEN, rng, sizes(rng, 150))
    changed = TransferCost(HIDDEN.fixed_s, HIDDEN.bytes_per_s * factor)
    feed(model, changed, rng, sizes(rng, 20))
    assert off(model.costs.load[Tier.HOST], HIDDEN) > 0.8
    assert model.costs.load[Tier.HOST].bytes_per_s == pytest.approx(changed.bytes_per_s, rel=0.1)
    # Where the fixed cost is most of it, too few of the 20 were seen to know it again.
    assert off(model.costs.load[Tier.HOST], changed, SIZES[4:]) < 0.1


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_changed_bandwidth_is_followed_at_one_size(factor: float) -> None:
    rng, model = random.Random(0), CostModel(START)
    feed(model, HIDDEN, rng, [2**24] * 150)
    changed = TransferCost(HIDDEN.fixed_s, HIDDEN.bytes_per_s * factor)
    feed(model, changed, rng, [2**24] * 20)
    assert off(model.costs.load[Tier.HOST], changed, (2**24,)) < 0.1


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_one_stall_does_not_matter(factor: float) -> None:
    rng, model = random.Random(1), CostModel(START)
    feed(model, HIDDEN, rng, sizes(rng, 100))
    before = model.costs.load[Tier.HOST]
    model.observe_load(Tier.HOST, 2**24, factor * HIDDEN.seconds(2**24))
    assert off(model.costs.load[Tier.HOST], before) < 0.03
    assert off(model.costs.load[Tier.HOST], HIDDEN) < 0.06


def test_a_stall_at_the_very_start_is_forgotten() -> None:
    rng, model = random.Random(1), CostModel(START)
    model.observe_load(Tier.HOST, 2**24, 100 * HIDDEN.seconds(2**24))
    feed(model, HIDDEN, rng, sizes(rng, 20))
    assert off(model.costs.load[Tier.HOST], HIDDEN) < 0.1


def test_observations_of_one_size_scale_the_starting_law() -> None:
    model, start = CostModel(START), START.load[Tier.HOST]
    for _ in range(50):
        model.observe_load(Tier.HOST, 2**20, 8 * start.seconds(2**20))
    found = model.costs.load[Tier.HOST]
    assert found.fixed_s == pytest.approx(8 * start.fixed_s)
    assert found.bytes_per_s == pytest.approx(start.bytes_per_s / 8)


def test_noisy_observations_of_one_size_stay_near_the_scaled_law() -> None:
    rng, model, start = random.Random(0), CostModel(START), START.load[Tier.HOST]
    for _ in range(500):
        model.observe_load(Tier.HOST, 2**20, 8 * start.seconds(2**20) * (1 + rng.gauss(0, NOISE)))
    scaled = TransferCost(8 * start.fixed_s, start.bytes_per_s / 8)
    assert off(model.costs.load[Tier.HOST], scaled) < 0.1


def test_prefill_at_depth_0_is_found_and_stays_sane_below() -> None:
    rng, model = random.Random(0), CostModel(START)
    feed_prefill(model, HIDDEN_PREFILL, rng, batches(rng, 300, 1, deepest=0))
    assert max(prefill_off(model.costs.prefill, HIDDEN_PREFILL, depths=(0,))) < 0.1
    ratio = model.costs.prefill.seconds(1024, 131072) / HIDDEN_PREFILL.seconds(1024, 131072)
    assert 0.5 < ratio < 2.0


def test_prefill_batches_all_alike_scale_the_starting_law() -> None:
    model, start = CostModel(START), START.prefill
    for _ in range(50):
        model.observe_prefill([(512, 0)], 3 * start.seconds(512, 0))
    scaled = PrefillCost(3 * start.fixed_s, 3 * start.per_token_s, 3 * start.per_pair_s)
    assert max(prefill_off(model.costs.prefill, scaled)) < 1e-6


def test_a_start_of_zeros_learns_too() -> None:
    rng = random.Random(0)
    model = CostModel(dataclasses.replace(START, prefill=PrefillCost(0.0, 0.0, 0.0)))
    feed_prefill(model, HIDDEN_PREFILL, rng, batches(rng, 300, 1))
    assert max(prefill_off(model.costs.prefill, HIDDEN_PREFILL)) < 0.1


# Bad observations.


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_seconds_are_named_and_change_nothing(bad: float) -> None:
    model = CostModel(START)
    with pytest.raises(ValueError, match=f"load seconds is {bad!r}"):
        model.observe_load(Tier.HOST, 1, bad)
    with pytest.raises(ValueError, match=f"prefill seconds is {bad!r}"):
        model.observe_prefill([(1, 0)], bad)
    assert model.costs == START


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_bad_sizes_are_named(bad: int) -> None:
    model = CostModel(START)
    with pytest.raises(ValueError, match=f"load num_bytes is {bad!r}"):
        model.observe_load(Tier.HOST, bad, 1.0)
    assert model.costs == START


@pytest.mark.parametrize("bad", [(0, 5), (-1, 5), (3, -1), (math.nan, 0), (3, math.inf)])
def test_bad_chunks_are_named(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="prefill chunk is"):
        CostModel(START).observe_prefill([(1, 0), bad], 1.0)


def test_no_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks are empty"):
        CostModel(START).observe_prefill([], 1.0)


@pytest.mark.parametrize("tier", [Tier.GPU, Tier.EXTERNAL])
def test_a_load_from_a_tier_without_a_law_is_refused(tier: Tier) -> None:
    with pytest.raises(ValueError, match=f"{tier.name}.*HOST, SSD"):
        CostModel(START).observe_load(tier, 1, 1.0)


# Drift.


@pytest.mark.parametrize(
    "changed",
    [
        dataclasses.replace(START, prefill=PrefillCost(0.01, 1.3e-4, 1e-9)),
        dataclasses.replace(START, prefill=PrefillCost(0.01, 1e-4, 2e-9)),
        dataclasses.replace(START, load={**START.load, Tier.SSD: TransferCost(1e-3, 1.3e9)}),
        dataclasses.replace(START, load={**START.load, Tier.SSD: TransferCost(2e-3, 1e9)}),
        dataclasses.replace(START, decode={"int8": TransferCost(1e-4, 1e10)}),
        dataclasses.replace(START, load={Tier.HOST: START.load[Tier.HOST]}),
        dataclasses.replace(START, decode={}),
    ],
)
def test_any_law_that_changed_has_drifted(changed: CostSnapshot) -> None:
    assert changed.drifted_from(START, 0.2)
    assert START.drifted_from(changed, 0.2)


def test_small_changes_are_no_drift() -> None:
    assert not START.drifted_from(START, 0.0)
    slower = dataclasses.replace(START, load={**START.load, Tier.HOST: TransferCost(1.1e-4, 0.92e10)})
    assert not slower.drifted_from(START, 0.2)
    assert slower.drifted_from(START, 0.05)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_a_bad_tolerance_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match=f"tolerance is {bad!r}"):
        START.drifted_from(START, bad)


@pytest.mark.parametrize("seconds", [1e-300, 1e300])
def test_a_first_duration_that_cannot_be_spoils_no_law(seconds: float) -> None:
    model = CostModel(START)
    model.observe_load(Tier.HOST, 2**20, seconds)
    for _ in range(40):
        model.observe_load(Tier.HOST, 2**20, 0.01)
    assert model.costs.load[Tier.HOST].seconds(2**20) == pytest.approx(0.01, rel=0.1)


# Properties.

SECONDS = st.floats(1e-12, 1e12)
OBSERVATIONS = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 2**50), SECONDS),
        st.tuples(st.lists(st.tuples(st.integers(1, 10**7), st.integers(0, 10**7)), min_size=1, max_size=4), SECONDS),
    ),
    max_size=40,
)


def after(observations: list[tuple[int | Chunks, float]]) -> CostSnapshot:
    model = CostModel(START)
    for what, seconds in observations:
        if isinstance(what, int):
            model.observe_load(Tier.HOST, what, seconds)
        else:
            model.observe_prefill(what, seconds)
    return model.costs


@settings(max_examples=60, deadline=None)
@given(OBSERVATIONS)
def test_laws_are_never_negative_nor_infinite_and_repeat(observations: list[tuple[int | Chunks, float]]) -> None:
    """The costs check their own coefficients; what they predict is finite and above 0 too."""
    costs = after(observations)
    predicted = [costs.load_seconds(Tier.HOST, size, "new") for size in SIZES]
    predicted += [costs.prefill.seconds(*chunk) for chunk in ((1, 0), (10**5, 10**6))]
    assert all(math.isfinite(seconds) and seconds > 0.0 for seconds in predicted)
    assert predicted[: len(SIZES)] == sorted(predicted[: len(SIZES)])
    assert after(observations) == costs
