"""Every line about a setting under load, both ok and MISSED, on folders that never ran."""

from __future__ import annotations

from pathlib import Path

import pytest
from evicbench.load.repetitions import load_s
from evicbench.load.targets import Grid, one_client_ratio, targets
from evicbench.report import Line
from tests.unit.benchmark.loads import OURS, Runs, changed, good_runs, write_load

from sglang_evicpress.benchmark.results import read_results

MEAN, P95, ANSWERS = (
    "mean TTFT of evicpress a=0.5, how",
    "p95 TTFT of evicpress a=0.5 over",
    "answers/s of evicpress a=0.5",
)
FALL, FIXED_FALL, GOODPUT = "answers/s of evicpress", "answers/s of fixed presses on our tiers", "goodput with"
HELD, DROPPED = "recomputed by evicpress although", "recomputed by evicpress because"
RATE = "requests/s at TTFT p95 <= 2x its own with one client and F1 >= 0.97, beside"
EXACT_RATE, FIXED_RATE = f"{RATE} exact LRU", f"{RATE} the best fixed press"
FULL_CACHE, ONE_CLIENT = "p95 TTFT of evicpress a=0.5 at half", "one client"
FIXED, LOW = "keydiff@0.8+lru", "keydiff@0.5+lru"


def line(folder: Path, runs: Runs, name: str, **config: object) -> Line:
    """The only line of that name, or the only one that begins with it, on a folder made anew."""
    number = sum(1 for _ in folder.glob("made-*"))
    found = list(targets(Grid.of(read_results(write_load(folder / f"made-{number}", runs, **config)))))
    called = {each.what.removeprefix("made-up: "): each for each in found}
    if name in called:
        return called[name]
    (one,) = (each for what, each in called.items() if what.startswith(name))
    return one


def test_every_line_holds_in_a_good_folder(tmp_path: Path) -> None:
    found = list(targets(Grid.of(read_results(write_load(tmp_path, good_runs())))))
    assert [f"{each.what}: {each.figure}" for each in found if not each.ok] == []
    assert len(found) == 3 + 2 + 2 + 2 + 1 + 1
    assert all(each.what.startswith("made-up: ") for each in found)


def test_mean_ttft_must_be_lower_at_every_rate_up_to_saturation(tmp_path: Path) -> None:
    found = line(tmp_path, changed(good_runs(), FIXED, 0.5, ttft_s=0.12), MEAN)
    assert not found.ok
    assert "2/s, 0.5 x saturation: 1.20x (1.20, 1.20, 1.20; keydiff@0.8+lru)" in found.figure
    assert line(tmp_path, changed(good_runs(), FIXED, 0.5, 1, ttft_s=0.12), MEAN).ok  # the median holds
    assert line(tmp_path, changed(good_runs(), FIXED, 2.0, ttft_s=0.12), MEAN).ok  # above saturation


def test_a_fixed_press_is_beside_us_from_a_hundredth_less_f1(tmp_path: Path) -> None:
    found = line(tmp_path, changed(good_runs(), LOW, 1.0, f1=0.9701), MEAN)
    assert not found.ok and LOW in found.figure
    assert line(tmp_path, changed(good_runs(), LOW, 1.0, f1=0.9699), MEAN).ok
    none = changed(changed(good_runs(), FIXED, 1.0, f1=0.5), "tiers-lru", 1.0, ttft_s=0.12)
    found = line(tmp_path, none, MEAN)
    assert not found.ok and "1.20x (1.20, 1.20, 1.20; tiers-lru)" in found.figure


def test_a_repetition_that_is_missing_misses_the_line(tmp_path: Path) -> None:
    runs = {key: at for key, at in good_runs().items() if key != (OURS, 1.0, 2)}
    found = line(tmp_path, runs, MEAN)
    assert not found.ok and "4/s, 1 x saturation: repetition 3 was not measured" in found.figure


def test_p95_must_not_be_above(tmp_path: Path) -> None:
    assert not line(tmp_path, changed(good_runs(), OURS, 1.0, ttft_s=1.6), P95).ok
    assert line(tmp_path, changed(good_runs(), OURS, 1.0, ttft_s=1.5), P95).ok


def test_answers_must_be_as_many(tmp_path: Path) -> None:
    found = line(tmp_path, changed(good_runs(), OURS, 1.0, answers_rps=3.9), f"{ANSWERS} over")
    assert not found.ok and "less 1 %" in found.target
    assert line(tmp_path, changed(good_runs(), FIXED, 1.0, answers_rps=3.9), f"{ANSWERS} over").ok


@pytest.mark.parametrize(("name", "system"), [(FALL, OURS), (FALL, "evicpress a=2"), (FIXED_FALL, FIXED)])
def test_answers_must_not_fall_up_to_twice_saturation(tmp_path: Path, name: str, system: str) -> None:
    found = line(tmp_path, changed(good_runs(), system, 2.0, answers_rps=3.7), name)
    assert not found.ok and f"{system} -7.5%" in found.figure
    assert line(tmp_path, changed(good_runs(), system, 2.0, answers_rps=3.8), name).ok


def test_goodput_must_not_fall_where_servers_refuse(tmp_path: Path) -> None:
    flags = {"policy_flags": ["--kv-max-queue-seconds", "0.5"]}
    runs = changed(good_runs(), FIXED, 1.0, ttft_s=0.3)
    assert line(tmp_path, changed(runs, FIXED, 2.0, ttft_s=0.3), GOODPUT, **flags).ok
    found = line(tmp_path, changed(runs, FIXED, 2.0, ttft_s=0.6), GOODPUT, **flags)
    assert not found.ok and "keydiff@0.8+lru -100.0%" in found.figure


@pytest.mark.parametrize("reason", ["late", "no_gpu_room", "a reason of the future"])
def test_what_was_held_must_hardly_be_computed_at_any_rate(tmp_path: Path, reason: str) -> None:
    runs = changed(good_runs(), "evicpress a=2", 2.0, 1, computed={"new": 50, reason: 101, "dropped": 500})
    found = line(tmp_path, runs, HELD)
    assert not found.ok
    assert "at most 1.01% (evicpress a=2, 8/s, 2 x saturation, repetition 2)" in found.figure
    assert line(tmp_path, changed(good_runs(), OURS, 0.0, computed={reason: 100}), HELD).ok


def test_what_was_not_worth_loading_is_printed_apart(tmp_path: Path) -> None:
    found = line(tmp_path, changed(good_runs(), OURS, 1.0, 0, computed={"new": 5, "not_worth": 3000}), HELD)
    assert found.ok
    assert "not worth loading, at most 30.00%" in found.figure and "predicted 1.0 s, actual 2.0 s" in found.figure


def test_what_was_dropped_for_nothing_must_hardly_be_computed(tmp_path: Path) -> None:
    found = line(tmp_path, changed(good_runs(), OURS, 0.5, 2, computed={"dropped": 101}), DROPPED)
    assert not found.ok and "1.01%" in found.figure
    assert line(tmp_path, changed(good_runs(), OURS, 0.5, computed={"dropped": 100}), DROPPED).ok


def test_servers_that_do_not_say_why_miss_both(tmp_path: Path) -> None:
    write_load(tmp_path, good_runs(1))
    path = tmp_path / "runs" / "evicpress-a=2" / "0-8.jsonl"
    path.write_text(path.read_text().replace('"admission"', '"older"'))
    found = [each for each in targets(Grid.of(read_results(tmp_path))) if "recomputed" in each.what]
    assert [each.ok for each in found] == [False, False]
    assert {each.figure for each in found} == {"the server does not say why tokens were computed"}


def test_requests_per_second_must_hold_in_two_of_three_repetitions(tmp_path: Path) -> None:
    def slow(runs: Runs, repetition: int) -> Runs:
        for system in (OURS, "evicpress a=2"):
            runs = changed(runs, system, 0.5, repetition, ttft_s=9.0)
        return runs

    once = slow(good_runs(), 0)
    found = line(tmp_path, once, FIXED_RATE)
    assert found.ok and found.target == ">= 1.3x in 2 of 3 repetitions" and found.figure.count(" (evicpress a=") == 3
    assert not line(tmp_path, slow(once, 1), FIXED_RATE).ok
    assert line(tmp_path, good_runs(), EXACT_RATE).ok
    assert not line(tmp_path, changed(good_runs(), "tiers-lru", 0.5, ttft_s=0.2), EXACT_RATE).ok


def test_requests_per_second_are_those_of_answers_that_are_good_enough(tmp_path: Path) -> None:
    runs = changed(good_runs(), OURS, 0.0, f1=0.96)
    found = line(tmp_path, runs, FIXED_RATE)
    assert found.ok and "evicpress a=2 4" in found.figure
    assert not line(tmp_path, changed(runs, "evicpress a=2", 0.0, f1=0.96), FIXED_RATE).ok


def test_at_half_of_saturation_ttft_is_near_that_of_infinite_memory(tmp_path: Path) -> None:
    results = read_results(write_load(tmp_path / "results", good_runs()))
    assert load_s(results) == pytest.approx(2500 * 2048 / 5e8)
    limit_s = 1.5 * 0.1 + load_s(results)
    found = line(tmp_path, changed(good_runs(), OURS, 0.5, ttft_s=limit_s + 0.001), FULL_CACHE)
    assert not found.ok and "bound 100 ms" in found.figure and "+ 10 ms" in found.target
    assert line(tmp_path, changed(good_runs(), OURS, 0.5, ttft_s=limit_s - 0.001), FULL_CACHE).ok
    without = {key: at for key, at in good_runs().items() if key[0] != "full-cache+attention"}
    assert not line(tmp_path, without, FULL_CACHE).ok


def test_one_client_is_a_ratio_to_exact_lru(tmp_path: Path) -> None:
    results = read_results(write_load(tmp_path / "results", good_runs()))
    assert one_client_ratio(Grid.of(results)) == pytest.approx(0.5)
    found = line(tmp_path, good_runs(), ONE_CLIENT)
    assert found.ok and found.figure == "0.500x"
    without = {key: at for key, at in good_runs().items() if key[0] != "tiers-lru"}
    assert not line(tmp_path, without, ONE_CLIENT).ok


def test_a_folder_without_a_load_says_so(tmp_path: Path) -> None:
    results = read_results(write_load(tmp_path, good_runs(1), load=None))
    with pytest.raises(ValueError, match="no rates at multiples of saturation"):
        Grid.of(results)
