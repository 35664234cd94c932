"""Summaries of runs, on folders whose figures were computed by hand."""

from __future__ import annotations

import random
from pathlib import Path

import orjson
import pytest
from tests.unit.benchmark.raw import request, requests, write_plan, write_run, write_scores, write_settings

from sglang_evicpress.benchmark.curves import Curve, Point, best_at_quality, capacity, curve, gaps, unloaded_p95
from sglang_evicpress.benchmark.ratios import paired
from sglang_evicpress.benchmark.results import read_results
from sglang_evicpress.benchmark.summary import Cell, Qualities, Summary, summarise
from sglang_evicpress.benchmark.tables import write_report


def summary_of(folder: Path, family: str | None = None) -> Summary:
    return summarise(read_results(folder), family)


def cell_of(folder: Path, system: str = "ours", rate: float = 2.0) -> Cell:
    found = summary_of(folder).cell(system, rate)
    assert found is not None
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two systems at two rates, two repetitions of four requests."""
    write_plan(tmp_path, {"full-cache": "full-cache", "ours": "evicpress"})
    for repetition in (0, 1):
        write_run(tmp_path, "full-cache", 0, requests([0.1, 0.1, 0.2, 0.4]), repetition)
        write_run(tmp_path, "full-cache", 2, requests([0.2, 0.2, 0.2, 0.2]), repetition)
        write_run(tmp_path, "ours", 0, requests([0.2, 0.2, 0.2, 0.2]), repetition)
    write_run(tmp_path, "ours", 2, requests([0.1, 0.2, 0.3, 0.4]), 0)
    write_run(tmp_path, "ours", 2, requests([0.5, 0.6, 0.7, None]), 1)
    return tmp_path


def test_times_are_those_of_complete_requests_over_all_repetitions(folder: Path) -> None:
    cell = cell_of(folder)
    assert (cell.num_repetitions, cell.num_requests, cell.num_failed) == (2, 8, 1)
    assert cell.ttft.mean_s == pytest.approx(0.4)
    assert cell.ttft.p50_s == pytest.approx(0.4)
    assert cell.ttft.p95_s == pytest.approx(0.6 + 0.7 * 0.1)  # 5.7 steps above the least of seven
    assert cell.ttft_p95_of_all_s == float("inf")
    assert cell.itl.mean_s == pytest.approx(0.1)
    assert cell.itl.p95_s == pytest.approx(0.15)
    assert cell.latency.mean_s == pytest.approx(0.6)
    assert cell.completed_rps == pytest.approx(7 / 8)
    assert not cell.is_comparable


def test_latency_begins_at_the_planned_arrival_and_with_one_client_at_sending(tmp_path: Path) -> None:
    write_plan(tmp_path, {"ours": "evicpress"})
    late = request(0, arrival_s=1.0, sent_s=1.5, end_s=4.0)
    write_run(tmp_path, "ours", 2, [late])
    write_run(tmp_path, "ours", 0, [late])
    assert cell_of(tmp_path).latency.mean_s == pytest.approx(3.0)
    assert cell_of(tmp_path).late_p95_s == pytest.approx(0.5)
    assert cell_of(tmp_path, rate=0.0).latency.mean_s == pytest.approx(2.5)
    assert (
        "the client was late: its 95th percentile reaches 500 ms after the planned arrivals"
        in summary_of(tmp_path).notes
    )


def test_overhead_is_the_bounds_median_with_one_client(folder: Path) -> None:
    assert summary_of(folder).overhead_s == pytest.approx(0.15)


def test_overhead_is_that_of_the_faster_of_two_bounds(tmp_path: Path) -> None:
    write_plan(
        tmp_path, {"full-cache": "full-cache", "full-cache+attention": "full-cache+attention", "ours": "evicpress"}
    )
    for system, ttft_s in (("full-cache", 0.3), ("full-cache+attention", 0.1), ("ours", 0.05)):
        write_run(tmp_path, system, 0, requests([ttft_s, ttft_s, 2 * ttft_s]))
    assert summary_of(tmp_path).overhead_s == pytest.approx(0.1)


def test_the_bound_is_compared_by_pairs_with_and_without_overhead(folder: Path) -> None:
    cell = cell_of(folder)
    assert cell.over_full_cache.ratio == pytest.approx(2.0)
    assert cell.over_full_cache.num_pairs == 7  # what failed in one is left out in both
    assert cell.over_full_cache.median_of_repetitions == pytest.approx((1.25 + 3.0) / 2)
    assert cell.over_full_cache.median_of_pairs == pytest.approx(2.0)
    assert cell.over_full_cache_net.ratio == pytest.approx((0.4 - 0.15) / (0.2 - 0.15))


def test_ratios_are_of_shared_repetitions_only(folder: Path) -> None:
    write_run(folder, "ours", 2, requests([9.0] * 4), 2)
    found = paired(read_results(folder), "ours", "full-cache", 2.0)
    assert (found.num_repetitions, found.ratio) == (2, pytest.approx(2.0))


def test_an_interval_is_a_point_where_every_pair_has_the_same_ratio(tmp_path: Path) -> None:
    write_plan(tmp_path, {"full-cache": "full-cache", "ours": "evicpress"})
    write_run(tmp_path, "full-cache", 2, requests([0.1, 0.2, 0.3, 0.4]))
    write_run(tmp_path, "ours", 2, requests([0.3, 0.6, 0.9, 1.2]))
    found = paired(read_results(tmp_path), "ours", "full-cache", 2.0)
    assert [found.low, found.ratio, found.high] == pytest.approx([3.0, 3.0, 3.0])


def test_an_interval_holds_the_ratio_and_widens_with_the_spread(tmp_path: Path) -> None:
    write_plan(tmp_path, {"full-cache": "full-cache", "calm": "lru", "wild": "lru"})
    write_run(tmp_path, "full-cache", 2, requests([0.1] * 100))
    write_run(tmp_path, "calm", 2, requests(random.Random(1).sample([0.19, 0.21] * 50, 100)))
    write_run(tmp_path, "wild", 2, requests([0.01] * 50 + [0.39] * 50))
    results = read_results(tmp_path)
    calm, wild = (paired(results, name, "full-cache", 2.0) for name in ("calm", "wild"))
    assert calm.low < calm.ratio < calm.high
    assert wild.high - wild.low > 10 * (calm.high - calm.low)


def test_a_ratio_counts_what_was_cut_with_the_time_it_waited(tmp_path: Path) -> None:
    write_plan(tmp_path, {"full-cache": "full-cache", "ours": "evicpress"})
    write_run(tmp_path, "full-cache", 2, requests([0.2] * 4))
    cut = [request(index, None, error=None, is_cut=True, end_s=index + 9.9) for index in (2, 3)]
    write_run(tmp_path, "ours", 2, [*requests([0.1, 0.1]), *cut])
    cell = cell_of(tmp_path)
    assert cell.over_full_cache.ratio == pytest.approx((0.1 + 0.1 + 9.9 + 9.9) / 0.8) and cell.num_cut == 2
    assert cell.over_full_cache.ratio == pytest.approx(cell.ttft.mean_s / 0.2)
    assert cell.over_full_cache.num_pairs == 4
    found = paired(read_results(tmp_path), "full-cache", "ours", 2.0, overhead_s=0.1)
    assert found.ratio == pytest.approx(0.4 / (9.8 + 9.8))


def test_no_ratio_where_more_than_next_to_none_is_refused(tmp_path: Path) -> None:
    write_plan(tmp_path, {"full-cache": "full-cache", "ours": "evicpress", "few": "lru"})
    write_run(tmp_path, "full-cache", 2, requests([0.2] * 200))
    for name, num_refused in (("ours", 3), ("few", 2)):
        refused = [request(index, None, is_refused=True) for index in range(num_refused)]
        write_run(tmp_path, name, 2, [*refused, *requests([0.1] * 200)[num_refused:]])
    assert cell_of(tmp_path).over_full_cache is None
    assert cell_of(tmp_path, "few").over_full_cache.ratio == pytest.approx(0.5)


def test_no_ratio_over_what_is_all_overhead(folder: Path) -> None:
    assert paired(read_results(folder), "ours", "full-cache", 2.0, overhead_s=0.2) is None


def test_a_family_has_its_own_figures(tmp_path: Path) -> None:
    write_plan(tmp_path, {"full-cache": "full-cache", "ours": "evicpress"})
    for name, other in (("full-cache", 0.1), ("ours", 0.5)):
        write_run(tmp_path, name, 2, [request(0, 0.1, family="a"), request(1, other, family="b")])
    write_scores(tmp_path, [("ours", 0, 2.0, 0, 1.0), ("ours", 0, 2.0, 1, 0.5)])
    cell = summary_of(tmp_path, "b").cell("ours", 2.0)
    assert (cell.num_requests, cell.ttft.mean_s, cell.qualities.f1_full_cache) == (1, pytest.approx(0.5), 0.5)
    assert cell.over_full_cache.ratio == pytest.approx(5.0)
    assert read_results(tmp_path).families == ["a", "b"]


def test_quality_is_the_mean_of_what_has_a_score(folder: Path) -> None:
    write_scores(folder, [("ours", 0, 2.0, 0, 1.0), ("ours", 0, 2.0, 1, 0.5), ("ours", 1, 2.0, 0, None)])
    cell = cell_of(folder)
    assert cell.qualities == Qualities(0.75, 0.75, 0.75)
    assert cell_of(folder, "full-cache").qualities.f1_full_cache is None
    with pytest.raises(ValueError, match="'taste' is not measured"):
        cell.quality("taste")


def test_hits_are_shares_of_prompt_tokens(tmp_path: Path) -> None:
    write_plan(tmp_path, {"ours": "evicpress", "unknown": "lru"})
    tiers = {"device": 30, "host": 20, "storage": 10}
    write_run(
        tmp_path,
        "ours",
        2,
        [request(0, cached_tokens=60, cached_by_tier=tiers), request(1), request(2, prompt_tokens=50)],
    )
    write_run(tmp_path, "unknown", 2, [request(0, cached_tokens=60)])
    cell = cell_of(tmp_path)
    assert cell.held.hit_share == pytest.approx(60 / 250)
    assert cell.held.hits == pytest.approx({"gpu": 30 / 250, "host": 20 / 250, "ssd": 10 / 250})
    assert cell_of(tmp_path, "unknown").held.hit_share == pytest.approx(0.6)
    assert cell_of(tmp_path, "unknown").held.hits is None


def test_bytes_forms_and_decisions_are_those_of_the_servers(tmp_path: Path) -> None:
    write_plan(tmp_path, {"ours": "evicpress", "one tier": "evicpress"})
    for repetition, used in ((0, 100), (1, 300)):
        write_run(
            *(tmp_path, "ours", 2, [request(0)], repetition),
            tiers={"tiers": {"gpu": {"used_bytes": used}, "host": {"used_bytes": 8}}},
            stats_before={"decisions": {"dropped": 1, "compressed": {"keydiff": 2}}},
            stats={"decisions": {"dropped": 4, "compressed": {"keydiff": 7, "knorm": 1}}},
            resident={"gpu": {"exact": {"tokens": used}}, "host": {"keydiff@0.5": {"tokens": 10}}},
        )
    write_run(tmp_path, "one tier", 2, [request(0)], stats={"cached_slots": 10})
    cell = cell_of(tmp_path)
    assert cell.held.tier_bytes == {"gpu": 200.0, "host": 8.0}
    assert cell.held.forms == {"gpu": {"exact": 200.0}, "host": {"keydiff@0.5": 10.0}}
    assert cell.work.decisions == {"dropped": 6.0, "compressed keydiff": 10.0, "compressed knorm": 2.0}
    assert cell_of(tmp_path, "one tier").held.tier_bytes == {"gpu": 20480.0}
    assert cell_of(tmp_path, "one tier").work.decisions is None


def test_utility_lost_is_what_was_lost_in_the_runs_over_their_requests(tmp_path: Path) -> None:
    write_plan(tmp_path, {"ours": "evicpress", "other": "lru"})
    for repetition, (before, after) in enumerate(((1.0, 4.0), (2.0, 7.0))):
        write_run(
            *(tmp_path, "ours", 2, [request(0, family="a"), request(1, None, family="b")], repetition),
            stats_before={"utility_lost_s": before},
            stats={"utility_lost_s": after, "cached_slots": 1},
        )
    write_run(tmp_path, "ours", 2, [request(0)], 2, stats={"cached_slots": 1})  # of a server that did not say
    none = {"utility_lost_s": None, "cached_slots": 1}
    write_run(tmp_path, "other", 2, [request(0)], stats_before=none, stats=none)
    assert cell_of(tmp_path).work.utility_lost_s == pytest.approx(8.0 / 4)
    found = summary_of(tmp_path, "a").cell("ours", 2.0)
    assert found.work.utility_lost_s == pytest.approx(8.0 / 4)
    assert cell_of(tmp_path, "other").work.utility_lost_s is None
    write_report(tmp_path)
    lines = (tmp_path / "tables.md").read_text().splitlines()
    (at,) = [number for number, line in enumerate(lines) if "| utility lost per request |" in line]
    column = lines[at].split(" | ").index("utility lost per request")
    rows = [line.split(" | ") for line in lines[at + 2 : at + 4]]
    assert [(row[0], row[column]) for row in rows] == [("| ours", "2.0000"), ("| other", "-")]
    assert any(line.startswith("- utility lost: ") for line in lines)


def test_notes_say_what_casts_doubt(folder: Path) -> None:
    write_run(folder, "full-cache", 2, requests([0.1]), 1, is_stock_checked=False, commit="aaa")
    write_run(folder, "ours", 0, requests([0.1]), 1, check={"ok": False}, commit="bbb")
    (folder / "runs" / "ours" / "0-0.jsonl").unlink()
    notes = summary_of(folder).notes
    assert "1 runs of the plan are missing" in notes
    assert "hicache was left out: it needs CUDA" in notes
    assert "it was not checked that these were stock: full-cache" in notes
    assert "the cache was not in order after a run of: ours" in notes
    assert "the runs are of several commits: aaa, bbb" in notes
    assert "the answers were not scored" in notes
    assert "ours failed 1 of 8 requests at rate 2" in notes


def test_a_note_says_that_hicache_is_not_slowed(tmp_path: Path) -> None:
    note = "hicache read its SSD at full speed: ssd_bandwidth slows the reads of EvicPress's tiers only"
    for number, (config, is_noted) in enumerate((({}, True), ({"ssd_bandwidth": None}, False))):
        folder = tmp_path / str(number)
        write_plan(folder, {"hicache": "hicache", "ours": "evicpress"}, **config)
        write_run(folder, "ours", 0, requests([0.1]))
        assert note not in summary_of(folder).notes
        write_run(folder, "hicache", 0, requests([0.1]))
        assert (note in summary_of(folder).notes) == is_noted


def test_runs_of_extra_rates_that_are_missing_are_counted(tmp_path: Path) -> None:
    extra = [{"rates": [2, 4], "systems": ["evicpress"]}, {"rates": [4, 8], "systems": ["ours", "full-cache"]}]
    systems = {"full-cache": "full-cache", "ours": "evicpress", "other": "lru"}
    write_plan(tmp_path, systems, repetitions=2, rates=[2], extra_rates=extra)
    for name in systems:
        for repetition in (0, 1):
            write_run(tmp_path, name, 2, requests([0.1]), repetition)
    assert "4 runs of the plan are missing" in summary_of(tmp_path).notes  # two rates of two systems
    write_run(tmp_path, "ours", 4, requests([0.1]))
    assert "3 runs of the plan are missing" in summary_of(tmp_path).notes


def test_a_note_says_which_repetitions_ran_on_several_starts_of_the_server(folder: Path) -> None:
    assert not [note for note in summary_of(folder).notes if "starts" in note]  # runs that name none
    for repetition, (first, second) in enumerate((("a", "a"), ("b", "c"))):
        write_run(folder, "ours", 0, requests([0.1] * 4), repetition, start_id=first)
        write_run(folder, "ours", 2, requests([0.1] * 4), repetition, start_id=second)
    write_run(folder, "full-cache", 2, requests([0.1] * 4), 1, start_id="d")
    assert [note for note in summary_of(folder).notes if "starts" in note] == [
        "full-cache, repetition 2: its rates ran on 2 starts of the server, each warmed up anew",
        "ours, repetition 2: its rates ran on 2 starts of the server, each warmed up anew",
    ]


def test_notes_say_where_runs_are_of_several_versions_and_machines(folder: Path) -> None:
    same = {"versions": {"sglang": "1.2.3", "python": "3.11"}, "machine": "a machine", "num_cpus": 2}
    write_run(folder, "ours", 0, requests([0.1] * 4), 1, **same)
    assert not [note for note in summary_of(folder).notes if "several" in note]  # the others are of the plan's
    versions = {"sglang": "1.3.0", "python": "3.11"}
    write_run(folder, "ours", 2, requests([0.1] * 4), 1, **{**same, "versions": versions, "num_cpus": 4})
    assert [note for note in summary_of(folder).notes if "several" in note] == [
        "the runs are of several versions of sglang: 1.2.3, 1.3.0",
        "the runs are of several machines: a machine, 2 CPUs / a machine, 4 CPUs",
    ]


def test_a_run_that_is_not_complete_does_not_count(folder: Path) -> None:
    path = folder / "runs" / "ours" / "1-2.jsonl"
    path.rename(path.with_suffix(".part"))
    assert cell_of(folder).num_repetitions == 1


# ---- curves

LINE = Curve((Point("low", 0.6, 0.1), Point("worse", 0.7, 0.5), Point("high", 1.0, 0.3)))


def test_an_envelope_leaves_out_what_another_setting_beats() -> None:
    assert [point.system for point in LINE.envelope] == ["low", "high"]


def test_a_curve_is_straight_between_settings_and_ends_with_them() -> None:
    assert LINE.ttft_at(0.8) == pytest.approx(0.2)
    assert LINE.ttft_at(0.6) == pytest.approx(0.1)
    assert LINE.ttft_at(1.0) == pytest.approx(0.3)
    assert LINE.ttft_at(0.59) is None
    assert LINE.ttft_at(1.01) is None
    assert LINE.quality_at(0.2) == pytest.approx(0.8)
    assert LINE.quality_at(0.4) == pytest.approx(1.0)  # slower than the best, as `worse` is
    assert LINE.quality_at(0.09) is None
    assert LINE.quality_at(0.6) is None


def test_worse_and_slower_settings_do_not_lower_a_curve() -> None:
    found = Curve((Point("bad", 0.2, 0.9), Point("good", 0.8, 0.3)))
    assert found.ttft_at(0.5) == pytest.approx(0.3)
    assert Curve(()).ttft_at(0.5) is None


def test_gaps_are_at_every_setting_that_both_reach() -> None:
    other = Curve((Point("a", 0.8, 0.6), Point("b", 1.2, 1.0)))
    found = gaps(LINE, other)
    assert [gap.quality for gap in found] == [0.8, 1.0]
    assert [gap.ratio for gap in found] == pytest.approx([0.6 / 0.2, 0.8 / 0.3])
    assert found[0].net_ratio(0.1) == pytest.approx(0.5 / 0.1)
    assert found[0].net_ratio(0.2) is None


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    write_settings(
        tmp_path,
        {
            "full-cache": ("full-cache", {0: (0.1, 1.0), 2: (0.1, 1.0), 4: (0.1, 1.0)}),
            "fixed low": ("fixed", {0: (0.1, 0.5), 2: (0.2, 0.5), 4: (0.3, 0.5)}),
            "fixed high": ("fixed", {0: (0.1, 0.95), 2: (0.4, 0.95), 4: (0.9, 0.95)}),
            "ours 1": ("evicpress", {0: (0.1, 0.98), 2: (0.15, 0.98), 4: (0.25, 0.9)}),
            "ours 2": ("evicpress", {0: (0.1, 0.9), 2: (0.12, 0.9), 4: (0.15, 0.7)}),
        },
    )
    return tmp_path


def test_best_at_quality_is_the_fastest_that_is_good_enough(settings: Path) -> None:
    summary = summary_of(settings)
    for least, name in ((0.0, "ours 2"), (0.9, "ours 2"), (0.95, "ours 1")):
        best = best_at_quality(summary, ("evicpress",), 2.0, least)
        assert best.system == name
    assert best_at_quality(summary, ("evicpress",), 2.0, 0.99) is None


def test_what_fails_too_often_is_not_compared(settings: Path) -> None:
    write_run(settings, "ours 2", 2, requests([0.01, None, 0.01, 0.01]))
    best = best_at_quality(summary_of(settings), ("evicpress",), 2.0, 0.9)
    assert best.system == "ours 1"


def test_what_refuses_too_often_is_not_compared(settings: Path) -> None:
    refused = [request(index, None, error="status 503: too many", is_refused=True) for index in range(1, 4)]
    write_run(settings, "ours 2", 2, [request(0, 0.01), *refused])
    summary = summary_of(settings)
    assert not cell_of(settings, "ours 2").is_comparable
    assert best_at_quality(summary, ("evicpress",), 2.0, 0.9).system == "ours 1"
    note = "ours 2 refused 3 of 4 requests at rate 2: its times are those of the others, and not compared"
    assert [each for each in summary.notes if "of 4 requests" in each] == [note]
    write_report(settings)
    lines = (settings / "tables.md").read_text().splitlines()
    (head, *_) = (line.split(" | ") for line in lines if line.startswith("| system | TTFT mean, ms |"))
    (row,) = (line.split(" | ") for line in lines if line.startswith("| ours 2 | 10.0 |"))
    assert [row[head.index(name)] for name in ("refused", "failed")] == ["3 of 4", "0 of 4"]


def test_a_kinds_curve_has_a_point_for_each_setting(settings: Path) -> None:
    found = curve(summary_of(settings), ("fixed",), 2.0)
    assert found.ttft_at(0.725) == pytest.approx(0.3)
    assert found.ttft_at(0.96) is None


@pytest.mark.parametrize(
    ("system", "limit_s", "rps", "is_at_least"),
    [
        ("full-cache", 0.2, 4.0, True),
        ("fixed high", 0.2, 2 * 0.1 / 0.3, False),
        ("ours 1", 0.2, 3.0, False),
        ("ours 1", 0.3, 4.0, True),
        ("ours 2", 0.2, 3.0, False),  # quality falls through 0.8 half-way between 2 and 4
        ("fixed low", 9.0, 0.0, False),  # never good enough
        ("ours 1", 0.05, 0.0, False),
    ],
)
def test_capacity_ends_where_a_limit_is_crossed(
    settings: Path, system: str, limit_s: float, rps: float, is_at_least: bool
) -> None:
    found = capacity(summary_of(settings), system, limit_s)
    assert (found.rps, found.is_at_least) == (pytest.approx(rps), is_at_least)


def test_failures_end_capacity_at_the_level_below(settings: Path) -> None:
    write_run(settings, "ours 1", 4, requests([0.1, 0.1, None, 0.1]))
    found = capacity(summary_of(settings), "ours 1", 0.3)
    assert (found.rps, found.is_at_least) == (2.0, False)


def test_a_rate_without_quality_ends_capacity(settings: Path) -> None:
    write_run(settings, "ours 1", 3, requests([0.1] * 4))  # not scored
    found = capacity(summary_of(settings), "ours 1", 0.3)
    assert (found.rps, found.is_at_least) == (2.0, False)
    write_run(settings, "ours 1", 3, requests([None] * 4))
    found = capacity(summary_of(settings), "ours 1", 0.3)
    assert (found.rps, found.is_at_least) == (2.0, False)
    (settings / "scores.jsonl").unlink()
    assert capacity(summary_of(settings), "ours 1", 0.3) is None


def test_unloaded_is_with_one_client(settings: Path) -> None:
    assert unloaded_p95(summary_of(settings), "fixed high") == pytest.approx(0.1)


# ---- the report


def test_report_has_a_table_for_each_level_and_a_row_for_each_system(settings: Path) -> None:
    write_report(settings)
    text = (settings / "tables.md").read_text()
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("## ")] == [
        "## One client, the next request after each answer",
        "## 2 requests/s",
        "## 4 requests/s",
        "## Requests/s that are sustained at F1 with the full cache of 0.8 and more",
    ]
    assert sum(line.startswith("| ours 1 |") for line in lines) == 3 * 2 + 1
    (row,) = [line for line in lines if line.startswith("| fixed high | 400 | 400 | 400 | 4.00 (4.00 to 4.00)")]
    assert "| 0.950 | 0.950 | 0.950 |" in row
    for said in ("GPU pool 4000 tokens (8 %)", "SSD reads slowed to 500 MB/s", "sglang 1.2.3", "commit 0123abc"):
        assert said in text
    (equal,) = [line for line in lines if line.startswith("| fixed | 0.900 to 0.950 |") and "3.15x | 2.88x" in line]
    assert "2.67x (ours 1 against fixed high)" in equal


def test_report_can_be_read_by_a_program(settings: Path) -> None:
    write_run(settings, "ours 2", 4, requests([0.1, None, None, 0.1]))
    write_report(settings)
    told = orjson.loads((settings / "summary.json").read_bytes())
    assert told["settings"]["pool_tokens"] == 4000
    assert told["overhead_s"] == pytest.approx(0.1)
    cells = {(cell["system"], cell["rate"]): cell for cell in told["cells"]}
    assert cells["fixed high", 2.0]["over_full_cache"]["ratio"] == pytest.approx(4.0)
    assert cells["ours 2", 4.0]["ttft_p95_of_all_s"] is None  # endless
    assert cells["ours 2", 4.0]["num_failed"] == 2


def test_report_of_nothing_but_a_plan_is_still_one(tmp_path: Path) -> None:
    write_plan(tmp_path, {"full-cache": "full-cache"})
    assert write_report(tmp_path).cells == ()
    assert "4 runs of the plan are missing" in (tmp_path / "tables.md").read_text()
