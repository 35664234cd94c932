"""Judgement of the soak: memory, slots and bytes, answers. `make soak` has servers."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from evicbench.testbed.vocabulary import EOS, load_vocabulary
from evicbench.tiers.accounts import after_flush, at_rest
from evicbench.trust import soak
from evicbench.trust.clients import f1, is_exact
from evicbench.trust.memory import slope

STATS: dict[str, Any] = {
    **{"total_slots": 100, "free_slots": 60, "evictable_slots": 40, "protected_slots": 0, "in_flight_slots": 0},
    **{"shadow_slots": 0, "num_nodes": 3},
}
HOST = {"used_bytes": 4096, "capacity_bytes": 8192, "num_entries": 1, "copying_bytes": 0}
TIERS: dict[str, Any] = {
    "queue": {"read": 0, "write": 0},
    "requests_waiting_for_a_copy": 0,
    "tiers": {
        "host": {**HOST, "forms": {"exact": {"bytes": 4000, "nodes": 1}}},
        "ssd": {"used_bytes": 0, "capacity_bytes": 10, "num_entries": 0},
    },
}


def test_what_adds_up_is_no_problem() -> None:
    assert list(at_rest(STATS, TIERS)) == []


@pytest.mark.parametrize(
    ("part", "name", "value", "said"),
    [
        ("stats", "free_slots", 59, "are not 100"),
        ("stats", "total_slots", 101, "are not 101"),
        ("queue", "read", 2, "2 jobs to read"),
        ("host", "num_entries", 2, "2 host entries for 1 copies"),
        ("host", "used_bytes", 3999, "host copies of 4000 bytes in 3999"),
        ("host", "copying_bytes", 7, "7 host bytes on their way"),
        ("ssd", "used_bytes", 11, "11 of 10 bytes of ssd"),
    ],
)
def test_what_does_not_add_up_is_named(part: str, name: str, value: int, said: str) -> None:
    stats, tiers = deepcopy(STATS), deepcopy(TIERS)
    places = {"stats": stats, "queue": tiers["queue"], **tiers["tiers"]}
    places[part][name] = value
    (problem,) = at_rest(stats, tiers)
    assert said in problem


def test_slots_of_a_request_that_nobody_sent_are_a_problem_but_not_the_profilers() -> None:
    held = {**STATS, "evictable_slots": 30, "protected_slots": 10}
    assert list(at_rest(held, TIERS)) == ["10 protected and 0 slots in flight, and no request"]
    assert list(at_rest({**held, "shadow_slots": 10}, TIERS)) == []


def test_everything_left_after_a_flush_is_named() -> None:
    assert list(after_flush(STATS, TIERS)) == [
        "40 slots left",
        "3 nodes left",
        "4096 host bytes left",
        "1 host entries left",
    ]
    empty = deepcopy(TIERS)
    empty["tiers"]["host"] |= {"used_bytes": 0, "num_entries": 0}
    assert list(after_flush({**STATS, "free_slots": 100, "num_nodes": 0}, empty)) == []


def test_slope_is_that_of_the_samples_after_the_warm_up() -> None:
    samples = [(0.0, 0.0), (1.0, 900e6), *((float(at), 1000e6 + at * 1e5) for at in range(10, 70))]
    assert slope(samples, 10.0) == pytest.approx(6.0)
    with pytest.raises(ValueError, match="0 samples after 99 s"):
        slope(samples, 99.0)


@pytest.mark.parametrize(
    ("kind", "budget", "lossy", "expected"),
    [
        ("exact", 10, 0, True),
        ("any", 10, 0, True),
        ("any", 10, 1, False),
        ("budget", 10, 0, False),
        ("budget", 20, 0, True),
    ],
)
def test_answers_are_exact_unless_something_lossy_was_served_or_cut(
    kind: str, budget: int, lossy: int, expected: bool
) -> None:
    assert is_exact(kind, budget, {"lossy_tokens": lossy}, 20) is expected


def test_f1_is_of_the_tokens_before_the_end() -> None:
    end = load_vocabulary().ids[EOS]
    assert f1((30, 31, end, 40), (30, 31, end, 50)) == 1.0
    assert f1((30, 32, end), (30, 31, end)) == 0.5
    assert f1((33, end), (30, 31, end)) == 0.0


def life(
    num_seconds: int, mb_per_minute: float, *, problems: tuple[str, ...] = (), f1s: tuple[float, ...] = (1.0,)
) -> Any:
    samples = [(float(at), 1e9 + at * mb_per_minute * 1e6 / 60) for at in range(num_seconds)]
    return SimpleNamespace(
        problems=list(problems),
        **dict.fromkeys(("num_requests", "num_exact", "num_cut", "num_torn", "num_checks", "num_rests"), 5),
        **{"num_wrong": 0, "num_hung": 0, "first_s": [0.1, 0.2], "f1s": {"any": list(f1s), "budget": [0.5]}},
        sources=Counter(device=1, host=1, storage=1),
        moves=Counter(attached=1),
        memory=SimpleNamespace(scheduler=samples, whole=samples),
        last={
            "profiles": {"num_profiles": 1},
            "tiers": {"tiers": {"host": {"forms": {"exact+int8": {"nodes": 1}, "keydiff@0.5": {"nodes": 2}}}}},
        },
    )


def judged(*lives: Any, found: tuple[int, ...] = (0, 4)) -> list[bool | None]:
    return [line.ok for line in soak.lines(lives, found, 10.0, 0)]


def test_a_soak_without_problems_is_good_and_its_memory_judged_where_a_life_is_long() -> None:
    assert judged(life(100, 90.0), life(300, 0.5)) == [True] * 6
    assert judged(life(100, 90.0), life(100, 0.5)) == [True, True, True, None, True, True]


@pytest.mark.parametrize(
    ("bad", "place"),
    [
        ({"problems": ("wrong: (1,), expected (2,)",)}, 0),
        ({"f1s": (0.5, 0.6)}, 0),
        ({"problems": ("a request failed: it was torn",)}, 1),
        ({"problems": ("at rest: 3 slots",)}, 2),
        ({"mb_per_minute": 1.1}, 3),
    ],
)
def test_what_goes_wrong_in_one_life_is_missed(bad: dict[str, Any], place: int) -> None:
    assert judged(life(300, 0.0), life(**{"num_seconds": 300, "mb_per_minute": 0.0, **bad}))[place] is False


def test_a_restart_that_finds_nothing_is_missed() -> None:
    assert judged(life(300, 0.0), life(300, 0.0), found=(0, 0))[1] is False
