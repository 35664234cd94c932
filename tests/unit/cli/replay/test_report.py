"""Sums over outcomes and the table made of them, against figures computed by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from sglang_evicpress.cli.replay.report import Result, Spread, lru_over, table
from sglang_evicpress.cli.replay.units import Size, parse_rate, show_bytes, three_digits
from sglang_evicpress.core import Tier
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.simulator.replay import Machine, Outcome
from sglang_evicpress.simulator.runs import Run, Settings, make_replay
from sglang_evicpress.traces import Request, Trace

TIERS = (Tier.GPU, Tier.SSD)
COSTS = CostSnapshot(PrefillCost(0.0, 1.0, 0.0), {Tier.SSD: TransferCost(0.0, 1.0)}, {})


def outcome(ttft_s: float, hits: dict[Tier, int], quality: float = 1.0, recompute_s: float = 9.0) -> Outcome:
    """100 tokens; half a second of the TTFT is waiting."""
    return Outcome(
        arrival_s=0.0,
        num_tokens=100,
        hit_tokens=hits,
        load_s=0.0,
        prefill_s=ttft_s - 0.5,
        ttft_s=ttft_s,
        recompute_s=recompute_s,
        regret_s=max(0.0, ttft_s - 0.5 - recompute_s),
        predicted_regret_s=0.25,
        quality=quality,
    )


def summed(run: Run, num_expected: int, outcomes: Sequence[Outcome], **counted: Counter[str]) -> Result:
    trace = Trace("none", 1, [Request(0.0, (), 100)] * num_expected)
    settings = Settings(Machine(dict.fromkeys(TIERS, 100), COSTS), 1, ())
    replay = make_replay(trace, run, settings)
    vars(replay).update(counted)
    return Result.of(run, replay, outcomes, wall_s=1.5)


def result(policy: str, ttft_s: float, num_expected: int = 2) -> Result:
    return summed(Run(policy), num_expected, [outcome(ttft_s, {})] * 2)


def test_sums() -> None:
    outcomes = [
        outcome(1.0, {}),
        outcome(2.0, {Tier.GPU: 50}, quality=0.5),
        outcome(5.0, {Tier.GPU: 30, Tier.SSD: 60}, quality=0.9, recompute_s=4.0),
    ]
    counted = {"moved_bytes": Counter({"ssd to gpu": 7}), "decisions": Counter({"drop": 3})}
    found = summed(Run("evicpress", 2.0), 5, outcomes, **counted)
    assert (found.num_requests, found.num_expected, found.num_tokens, found.is_partial) == (3, 5, 300, True)
    assert found.ttft == Spread(*map(pytest.approx, (8 / 3, 2.0, 4.7)))
    assert found.alone == Spread(*map(pytest.approx, (6.5 / 3, 1.5, 4.2)))
    assert found.hit_share == pytest.approx({"gpu": 80 / 300, "ssd": 60 / 300})
    assert found.prefilled_share == pytest.approx(160 / 300)
    assert found.quality == pytest.approx(2.4 / 3)
    assert found.hit_quality == pytest.approx(0.7)
    assert (found.regret_s, found.regret_share) == (pytest.approx(0.5), pytest.approx(0.5 / 8))
    assert (found.predicted_regret_s, found.predicted_regret_share) == (0.75, pytest.approx(0.75 / 8))
    assert found.requests_per_minute == pytest.approx(120.0)
    assert (found.moved_bytes, found.decisions) == ({"ssd to gpu": 7}, {"drop": 3})
    record = found.record()
    assert record["ttft"] == {"mean_s": pytest.approx(8 / 3), "p50_s": 2.0, "p95_s": pytest.approx(4.7)}
    assert record["is_partial"] is True


def test_ratio_to_lru_only_over_the_same_requests() -> None:
    fast, lru, partial = result("evicpress", 2.0), result("lru", 3.0), result("lfu", 1.0, num_expected=9)
    assert lru_over(fast, [fast, lru, partial]) == pytest.approx(1.5)
    assert lru_over(lru, [fast, lru, partial]) == 1.0
    assert lru_over(partial, [fast, lru, partial]) is None
    assert lru_over(fast, [fast, result("lru", 3.0, num_expected=9)]) is None
    assert lru_over(fast, [fast]) is None


def test_columns_are_aligned_and_queueing_is_optional() -> None:
    results = [result("evicpress", 2.0), result("lru", 3000.0, num_expected=9)]
    names, *lines, note = table(results, queued=True).splitlines()
    assert "alone p95" in names
    end = names.index("TTFT s") + len("TTFT s")
    assert [line[:end].split()[-1] for line in lines] == ["2.00", "3,000"]
    assert len({len(line) for line in (names, *lines)}) == 1
    assert note == "PARTIAL: lru was interrupted after 2 of 9 requests"
    assert "alone" not in table(results, queued=False)
    assert table([], queued=False) == ""


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1%", 1_000),
        ("12.5 %", 12_500),
        ("150%", 150_000),
        ("30GB", 30 * 10**9),
        ("30gib", 30 * 2**30),
        ("1.5KiB", 1536),
        ("7B", 7),
        ("500", 5_000),
        ("500tok", 5_000),
        ("5ktok", 50_000),
        (".5Mtok", 5_000_000),
        ("0", 0),
        ("0%", 0),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    """Sizes of a working set of 10,000 tokens of 10 bytes."""
    assert Size.parse(text).num_bytes(10_000, 10) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 2", "1e3", "1%%", "nan", "inf", "0x10", "1,000", "1GB/s", "½"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected a share of the working set"):
        Size.parse(text)


def test_rates() -> None:
    assert parse_rate("20GB/s") == 20e9
    assert parse_rate("0.5 mib/s") == 2**19
    for text in ("20", "20GB", "0GB/s", "20tok/s", "GB/s", f"{'9' * 400}GB/s"):
        with pytest.raises(ValueError, match="expected bytes a second above 0"):
            parse_rate(text)


def test_figures_for_people() -> None:
    assert [show_bytes(size) for size in (0, 999, 1000, 1.5e9, 999.9e6, 2.5e15)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.50 GB",
        "1.00 GB",
        "2,500 TB",
    ]
    assert [three_digits(value) for value in (0.0, 0.00012, 0.01234, 1.0, 12.34, 999.0, 1234.5)] == [
        "0",
        "1.20e-04",
        "0.0123",
        "1.00",
        "12.3",
        "999",
        "1,234",
    ]
