"""Each line of `make show-decode` is MISSED when what it promises does not hold."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from evicbench.correctness.findings import Finding
from evicbench.decode_budget import accuracy, backend_and_scratch, capacity, guide, identical, interference
from evicbench.decode_budget.requests import PLAIN_SCORES, Request, context_prompt, random_prompt


@pytest.mark.sglang
def test_the_guides_numbers_hold_on_the_real_allocator() -> None:
    assert [line.ok for line in guide.measure()] == [True, True]


@pytest.mark.sglang
def test_copies_are_counted_in_memory() -> None:
    nothing = torch.arange(8)
    assert guide.Pool.holding(8, 4).move(nothing, "repack") == (0, 0, list(range(8)))
    assert guide.Pool.holding(8, 4).move(torch.tensor([0, 5, 6]), "repack") == (1, 2, [0, 5, 6])
    assert guide.Pool.holding(8, 4).move(torch.tensor([0, 2, 6]), "holefill") == (1, 1, [0, 6, 2])


# ---- capacity

LOG = """
Decode batch, #running-req: 7, #token: 3584
Decode batch, #running-req: 40, #token: 4000
KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 100
KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 100
Prefill batch, #new-seq: 48, #running-req: 48
"""


def test_a_run_is_read_from_the_log() -> None:
    assert capacity.read_log(LOG, 48, 2.0) == capacity.Run(40, 4, 48, 2.0)
    assert capacity.read_log("", 0, 1.0).most_running == 0


def test_room_is_missed_by_few_at_once_by_one_sent_back_and_by_one_unanswered() -> None:
    full, budgeted = capacity.Run(9, 30, 48, 20.0), capacity.Run(48, 0, 48, 10.0)
    assert [line.ok for line in capacity.lines([full], [budgeted])] == [True, True]
    for worse in (
        replace(budgeted, most_running=31),
        replace(budgeted, num_retracted=1),
        replace(budgeted, num_done=47),
    ):
        assert [line.ok for line in capacity.lines([full] * 2, [budgeted, worse])][0] is False
    assert [line.ok for line in capacity.lines([full], [replace(budgeted, seconds=20.0)])] == [True, False]


# ---- interference


def test_neighbours_must_meet_the_budgets_and_notice_nothing() -> None:
    alone = interference.Seen((320,) * 20, tuple((number,) for number in range(20)), 0)
    beside = replace(alone, num_meeting=15)
    assert interference.line(alone, beside, alone).ok
    assert not interference.line(alone, replace(beside, num_meeting=5), alone).ok
    assert not interference.line(alone, replace(beside, cached=(304, *beside.cached[1:])), alone).ok
    assert not interference.line(alone, replace(beside, answers=((99,), *beside.answers[1:])), alone).ok
    missed = replace(alone, cached=(0,) * 20)
    assert not interference.line(missed, replace(missed, num_meeting=15), missed).ok


# ---- identical


def outcome(**given: object) -> identical.Outcome:
    good = Finding("r0", (), 1e-5, 100)
    bad = Finding("r0", (), 0.5, 100, wrong=40)
    kinds = {"copy_out", "page", "repack", "holefill"}
    return replace(identical.Outcome([good], kinds, 0, [bad] * 10, [bad] * 4), **given)  # type: ignore[arg-type]


def test_one_wrong_token_or_a_kind_of_pass_that_was_not_made_is_missed() -> None:
    setup = identical.SETUPS[0]
    assert identical.exact_line(setup, outcome()).ok
    assert not identical.exact_line(setup, outcome(findings=[Finding("r0", (), 1e-5, 100, wrong=1)])).ok
    assert not identical.exact_line(setup, outcome(findings=[Finding("r0", ("refused",))])).ok
    assert not identical.exact_line(setup, outcome(kinds={"copy_out", "page", "repack"})).ok


def test_controls_that_look_right_are_missed() -> None:
    good = Finding("r0", (), 1e-5, 100)
    assert identical.control_line([outcome()]).ok
    assert not identical.control_line([outcome(full=[good] * 10)]).ok
    assert not identical.control_line([outcome(spoiled=[good] * 4)]).ok
    assert not identical.control_line([outcome(spoiled=[])]).ok


@pytest.mark.parametrize("setup", identical.SETUPS, ids=lambda setup: f"{setup.model}-{setup.page_size}")
def test_every_ask_can_be_asked(setup: identical.Setup) -> None:
    from sglang_evicpress.decode_budget import schedule
    from sglang_evicpress.decode_budget.settings import DecodeSettings

    requests = identical.draw_requests(
        identical.MODEL if setup.model == "testbed" else identical.Path(), setup.page_size, 1
    )
    budgeted = [request for request in requests if request.budget]
    assert (
        len(budgeted) == identical.NUM_PROMPTS and len({(request.method, request.score) for request in budgeted}) == 25
    )
    for request in budgeted:
        assert request.interval is not None
        schedule.check(
            DecodeSettings(request.budget, request.method, request.score, request.interval), setup.page_size, 4
        )
        assert len(request.prompt) + request.num_new > request.budget + request.interval, "or nothing would be dropped"


# ---- accuracy


def cells(figure: float = 0.5) -> dict[accuracy.Cell, float]:
    grid = itertools.product(accuracy.PAGES, accuracy.METHODS, PLAIN_SCORES, accuracy.BUDGETS)
    return {cell: figure if cell[3] == accuracy.BUDGETS[0] else 0.9 for cell in grid}


def test_the_table_has_a_row_for_every_method_score_and_page() -> None:
    rows = accuracy.table(cells()).splitlines()
    assert "| 32 | holefill | h2o | 50 | 90 | 90 | 90 | 90 |" in rows
    assert sum(row.startswith(("| 16 ", "| 32 ")) for row in rows) == 2 * len(accuracy.METHODS) * len(PLAIN_SCORES)
    both = accuracy.tables({16: 1.0, 32: 1.0}, cells(), cells(0.25)).splitlines()
    assert "| 32 | holefill | h2o | 25 | 90 | 90 | 90 | 90 |" in both[len(both) // 2 :]


def test_accuracy_is_missed_without_a_cell_or_where_a_whole_budget_changes_an_answer() -> None:
    full = {16: 1.0, 32: 1.0}
    assert accuracy.line(full, cells(), cells(), 48, 24).ok
    assert not accuracy.line(full, cells(), cells(), 47, 24).ok
    assert not accuracy.line(full, cells(0.95), cells(), 48, 24).ok
    assert not accuracy.line(full, cells(), cells(0.95), 48, 24).ok
    fewer = cells()
    fewer.popitem()
    assert not accuracy.line(full, fewer, cells(), 48, 24).ok
    assert not accuracy.line(full, cells(), fewer, 48, 24).ok
    other = {cell: figure - 0.01 * (cell[1] == "holefill") for cell, figure in cells().items()}
    assert not accuracy.line(full, cells(), other, 48, 24).ok


def test_questions_are_the_same_each_time_and_of_every_family() -> None:
    questions = accuracy.draw_questions()
    assert questions == accuracy.draw_questions()
    assert len(questions) == len(accuracy.FAMILIES) * accuracy.CONTEXTS_PER_FAMILY * accuracy.QUESTIONS


# ---- backend and scratch


def test_live_bytes_are_those_at_one_time() -> None:
    def work() -> torch.Tensor:
        for _ in range(3):
            made = torch.zeros(1000)
            made.view(10, 100).add_(1)
            del made
        return torch.zeros(500)

    assert backend_and_scratch.peak_bytes(work) == 4000


def test_what_grows_with_the_square_is_missed() -> None:
    linear = {("paged", "knorm"): [10, 20, 40], ("repack", "h2o"): [100, 150, 300]}
    assert backend_and_scratch.scratch_line(linear).ok
    assert not backend_and_scratch.scratch_line(linear | {("repack", "tova"): [10, 20, 60]}).ok


def test_a_matrix_of_all_pairs_would_be_seen() -> None:
    def squares(num: int) -> int:
        return backend_and_scratch.peak_bytes(lambda: torch.ones(num, 8) @ torch.ones(8, num))

    assert squares(512) > 3 * squares(256)


# ---- asks


def test_prompts_have_exactly_the_tokens_asked_for() -> None:
    import random

    for num_tokens in (5, 30, 64, 240):
        assert len(context_prompt(random.Random(1), num_tokens)) == num_tokens
        assert len(random_prompt(random.Random(1), num_tokens)) == num_tokens


def test_only_a_request_with_a_budget_asks_for_one() -> None:
    assert "custom_params" not in Request((1,), 4).body("r")["sampling_params"]
    params = Request((1,), 4, 64).body("r")["sampling_params"]["custom_params"]
    assert params["kv_decode_budget"] == 64 and params["kv_decode_trace"] is True
