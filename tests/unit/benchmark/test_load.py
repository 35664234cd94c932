"""Results of runs under load, on folders whose figures were computed by hand."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from tests.unit.benchmark.loads import OURS, changed, good_runs, write_load
from tests.unit.benchmark.raw import request, write_plan, write_run, write_scores

from sglang_evicpress.benchmark.load import knee, loaded, median
from sglang_evicpress.benchmark.load_tables import of, rate_name
from sglang_evicpress.benchmark.results import Results, read_results
from sglang_evicpress.benchmark.summary import Cell, summarise
from sglang_evicpress.benchmark.tables import write_report

LOAD = {"of_saturation": [1], "reference": "ours", "seconds": 4.0, "saturation_rps": 2.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight requests in four seconds: five in time of which two are late, one answered behind the end, one refused, one
    cut; and another repetition with one."""
    write_plan(tmp_path, {"ours": "evicpress"}, load=LOAD, ttft_limit_s=0.5, rates=[0, 2])
    lines = [
        *(request(index, ttft_s, end_s=3.0) for index, ttft_s in enumerate((0.1, 0.2, 0.3, 0.6, 0.8))),
        request(5, 0.4, end_s=4.1),
        request(6, None, error="status 503: too many", is_refused=True),
        request(7, None, arrival_s=3.0, end_s=6.0, error=None, is_cut=True),
    ]
    before = {"prompt_tokens": 1000, "computed_tokens": {"new": 10, "late": 5}, "not_worth_s": {"predicted": 1.0}}
    after = {
        "prompt_tokens": 2000,
        "computed_tokens": {"new": 110, "late": 25, "split": 10, "not_worth": 50, "dropped": 30},
        "not_worth_s": {"predicted": 3.0, "actual": 4.0},
    }
    write_run(
        *(tmp_path, "ours", 2, lines),
        seconds=4.0,
        stats_before={"admission": before, "drops": {"forced": {"nodes": 1}}, "evictions": {"urgent": 2}},
        stats={
            "cached_slots": 1,
            "admission": after,
            "drops": {"forced": {"nodes": 4}},
            "evictions": {"urgent": 9, "why": None},
        },
    )
    write_run(tmp_path, "ours", 2, [request(0, 1.0, end_s=1.0)], 1, seconds=4.0)
    write_run(tmp_path, "ours", 0, [request(0, 0.1), request(1, 0.2)])
    write_scores(tmp_path, [("ours", 0, 2.0, index, 0.5 + 0.1 * (index == 0)) for index in range(6)])
    return tmp_path


def results_of(folder: Path) -> Results:
    return read_results(folder)


def test_answers_and_goodput_are_per_second_in_which_requests_arrive(folder: Path) -> None:
    _, one, other = loaded(results_of(folder))
    assert (one.rate, one.repetition, one.num_requests) == (2.0, 0, 8)
    assert (one.num_refused, one.num_cut, one.num_failed) == (1, 1, 0)
    assert (one.offered_rps, one.completed_rps, one.goodput_rps) == (2.0, 5 / 4, 3 / 4)
    assert (other.offered_rps, other.completed_rps, other.goodput_rps) == (1 / 4, 1 / 4, 0.0)
    cell = summarise(results_of(folder)).cell("ours", 2.0)
    assert cell.completed_rps == pytest.approx(6 / 8)


def test_one_client_offers_nothing(folder: Path) -> None:
    first = loaded(results_of(folder))[0]
    assert (first.rate, first.offered_rps, first.completed_rps) == (0.0, None, 1.0)


def test_a_request_that_was_cut_counts_with_the_time_it_waited(folder: Path) -> None:
    _, one, _ = loaded(results_of(folder))
    assert one.ttft.mean_s == pytest.approx((0.1 + 0.2 + 0.3 + 0.6 + 0.8 + 0.4 + 3.0) / 7)
    assert one.ttft.p50_s == pytest.approx(0.4)
    assert one.ttft.p95_s == pytest.approx(0.8 + 0.7 * 2.2)
    assert one.ttft.p99_s == pytest.approx(0.8 + 0.94 * 2.2)
    assert one.ttft_p95_of_all_s == float("inf")


def test_quality_is_that_of_the_truth_without_a_bound(folder: Path) -> None:
    assert loaded(results_of(folder))[1].qualities.f1_truth == pytest.approx(0.5 + 0.1 / 6)


def test_tokens_computed_are_shares_of_what_was_admitted_in_the_run_by_reason(folder: Path) -> None:
    one, other = (each.work for each in loaded(results_of(folder))[1:])
    assert one.computed == pytest.approx({"new": 0.1, "late": 0.02, "split": 0.01, "not_worth": 0.05, "dropped": 0.03})
    assert one.recomputed == pytest.approx(0.03)
    assert (one.computed_for("dropped"), one.computed_for("no_host_room")) == (pytest.approx(0.03), 0.0)
    assert one.not_worth_s == {"predicted": 2.0, "actual": 4.0}
    assert one.drops == {"forced nodes": 3.0}
    assert one.evictions == {"urgent": 7.0}
    assert (other.computed, other.recomputed, other.computed_for("new"), other.not_worth_s) == (
        None,
        None,
        None,
        None,
    )


def test_the_median_is_of_each_figure_by_itself(tmp_path: Path) -> None:
    runs = good_runs()
    for repetition, (ttft_s, late) in enumerate(((0.1, 10), (0.5, 30), (0.2, 90))):
        runs = changed(runs, OURS, 1.0, repetition, ttft_s=ttft_s, computed={"late": late})
    found = median(loaded(results_of(write_load(tmp_path, runs))))
    (one,) = [each for each in found if (each.system, each.rate) == (OURS, 4.0)]
    assert one.repetition is None
    assert one.ttft.mean_s == pytest.approx(0.2)
    assert one.work.computed == {"late": 0.003}
    assert one.qualities.f1_full_cache == pytest.approx(0.98)


def rates(folder: Path, system: str) -> list[Cell]:
    return of(loaded(results_of(folder)), system, 0)


def test_the_knee_is_the_highest_rate_that_is_answered_soon_enough(tmp_path: Path) -> None:
    runs = changed(good_runs(1), OURS, 2.0, answers_rps=None)
    write_load(tmp_path, runs)
    assert knee(rates(tmp_path, OURS)) == 8.0
    assert knee(rates(tmp_path, "evicpress a=2")) == 4.0  # answers half of what is offered
    assert knee(rates(tmp_path, "keydiff@0.8+lru")) == 2.0  # TTFT above 2 x 0.2 s
    assert knee(rates(tmp_path, "tiers-lru")) == 0.0
    assert knee(rates(tmp_path, OURS)[1:]) is None
    assert knee(rates(tmp_path, OURS)[:1]) is None


def test_a_rate_is_named_with_its_multiple() -> None:
    assert rate_name(0.0, {}) == "one client"
    assert rate_name(8.0, {8.0: 2.0}) == "8/s, 2 x saturation"
    assert rate_name(8.0, {}) == "8/s"


def test_the_report_has_tables_of_load(folder: Path) -> None:
    write_report(folder)
    text = (folder / "tables.md").read_text()
    assert "## Under load: 2/s, 1 x saturation" in text
    assert "- saturation 2.00 requests/s, of ours with ? clients; rates of 4 s at 1 x = 2/s, cut ? s later" in text
    assert "late 2.0 %, split 1.0 %" in text
    assert "| 2.0, 4.0 |" in text
    assert "goodput (TTFT within 0.5 s)" in text
    told = orjson.loads((folder / "summary.json").read_bytes())["load"]
    assert [each["goodput_rps"] for each in told if each["rate"] == 2] == [0.75, 0.0]


def test_the_report_of_a_benchmark_without_a_load_has_none(tmp_path: Path) -> None:
    write_plan(tmp_path, {"ours": "evicpress"})
    write_run(tmp_path, "ours", 2, [request(0)])
    write_report(tmp_path)
    assert "Under load" not in (tmp_path / "tables.md").read_text()


def test_the_bound_with_our_attention_stands_in_for_the_bound(tmp_path: Path) -> None:
    write_plan(
        tmp_path, {"full-cache+attention": "full-cache+attention", "full-cache": "full-cache", "ours": "evicpress"}
    )
    write_run(tmp_path, "full-cache+attention", 2, [request(0)])
    write_run(tmp_path, "ours", 2, [request(0)])
    assert results_of(tmp_path).full_cache == "full-cache+attention"
    write_run(tmp_path, "full-cache", 2, [request(0)])
    assert results_of(tmp_path).full_cache == "full-cache"
