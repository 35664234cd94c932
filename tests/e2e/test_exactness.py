"""Answers over compressed prefixes equal transformers over the same survivors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from evicbench.codecs import path
from evicbench.correctness.exactness import FORMS, PRESSES, Jobs, grid, matches, run_jobs, server_arguments, shapes
from evicbench.correctness.findings import TOLERANCE, Finding
from evicbench.correctness.reference import (
    Node,
    Reference,
    Text,
    expected_match,
    make_peaky_model,
    press_scores,
    selection_problems,
    survivors,
)
from evicbench.testbed.server import Server

NUM_POINTS = 8


@dataclass(frozen=True, slots=True)
class Running:
    server: Server
    reference: Reference
    page_size: int

    def findings(self, jobs: Jobs) -> list[Finding]:
        return run_jobs(self.server, self.reference, self.page_size, jobs)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_peaky_model(tmp_path_factory.mktemp("peaky"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module", params=[1, 16], ids=["page_1", "page_16"])
def running(request: pytest.FixtureRequest, model: Path, reference: Reference) -> Iterator[Running]:
    page_size: int = request.param
    with Server(*server_arguments(page_size), model=model) as server:
        yield Running(server, reference, page_size)


def _bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if not finding.ok]


@pytest.fixture(scope="module")
def grid_findings(running: Running) -> list[Finding]:
    return running.findings(grid(1))


@pytest.mark.e2e
def test_answers_over_every_press_and_kept_fraction_equal_the_reference(grid_findings: list[Finding]) -> None:
    assert not _bad(grid_findings)
    assert len(grid_findings) == len(FORMS)


@pytest.mark.e2e
def test_a_wrong_cache_would_change_every_answer(grid_findings: list[Finding]) -> None:
    controls = [finding.controls for finding in grid_findings if finding.controls]
    assert len(controls) == len(FORMS)
    assert min(min(control) for control in controls) > 100 * TOLERANCE


@pytest.mark.e2e
def test_answers_over_paths_splits_turns_and_batches_equal_the_reference(running: Running) -> None:
    assert not _bad(running.findings(shapes()))


@pytest.mark.e2e
def test_answers_after_partial_matches_equal_the_reference(running: Running) -> None:
    findings = running.findings(matches(NUM_POINTS))
    assert not _bad(findings)
    assert len(findings) >= len(PRESSES) * (NUM_POINTS + 1)


@pytest.mark.e2e
def test_the_cache_is_whole_after_all_that(running: Running) -> None:
    assert running.server.post("/evicpress/check")["violations"] == []


@pytest.mark.e2e
def test_answers_over_kv_that_went_down_as_int4_equal_the_reference_through_the_codec(tmp_path: Path) -> None:
    model, folder = path.make_model(tmp_path), tmp_path / "ssd"
    with Server(*path.server_arguments(folder, 16), model=model) as server:
        setting = path.Setting(server, Reference(model), folder, 16)
        findings = path.play(setting, {"whole": path.whole_node, "split": path.split_node})
        lost = path.not_finite(setting)
        assert server.post("/evicpress/check")["violations"] == []
    assert not _bad(findings)
    controls = [finding.controls for finding in findings if finding.controls]
    assert len(controls) == 2
    assert min(min(control) for control in controls) > 100 * TOLERANCE
    tally = setting.tally
    assert tally.num_values > 0 and tally.num_wrong == 0
    assert (tally.num_again, tally.num_changed) == (1, 0)
    assert lost.ok, lost.figure


# ---- the yardstick itself; no server


@pytest.fixture(scope="module")
def text(reference: Reference) -> Text:
    token_ids = tuple(range(3, 103))
    computed = reference.prefill(token_ids)
    return Text(token_ids, computed.kv, computed.queries, len(token_ids))


def _full(text: Text) -> Node:
    return Node(1, 0, text.token_ids, "exact", "exact", len(text.token_ids), None, None, None, False)


def _compressed(text: Text, press: str) -> Node:
    """Node of a right server after compressing all of ``text`` to a half."""
    every = text.kv.every_position()
    scores = press_scores(press, text.kv, every, text.queries, text.prompt_end)
    if scores is None:
        scores = every.to(torch.float32)
    positions = scores.index_fill(2, torch.arange(4), torch.inf).topk(50).indices.sort(-1).values
    return Node(1, 0, text.token_ids, f"{press}@0.5", "lossy", 50, positions, positions.amax(dim=(0, 1)), 1, False)


@pytest.mark.parametrize("press", PRESSES)
def test_a_right_selection_has_no_problems(text: Text, press: str) -> None:
    assert list(selection_problems(text, _full(text), _compressed(text, press), 1, text.prompt_end)) == []


@pytest.mark.parametrize("press", [press for press in PRESSES if press != "random"])
def test_one_wrong_survivor_in_one_head_is_seen(text: Text, press: str) -> None:
    right = _compressed(text, press)
    assert right.positions is not None
    scores = press_scores(press, text.kv, text.kv.every_position(), text.queries, text.prompt_end)
    assert scores is not None
    kept = right.positions[2, 1]
    dropped = torch.tensor(sorted(set(range(100)) - set(kept.tolist())))
    worst = dropped[scores[2, 1, dropped].argmin()]
    best = kept[4:][scores[2, 1, kept[4:]].argmax()]
    positions = right.positions.clone()
    positions[2, 1] = torch.where(kept == best, worst, kept).sort().values
    wrong = replace(right, positions=positions, logical=positions.amax(dim=(0, 1)))
    problems = list(selection_problems(text, _full(text), wrong, 1, text.prompt_end))
    assert any("a better token was dropped" in problem for problem in problems)


def test_a_slot_shown_before_its_token_is_seen(text: Text) -> None:
    right = _compressed(text, "keydiff")
    assert right.logical is not None
    wrong = replace(right, logical=(right.logical - 1).clamp(min=0))
    assert "a slot is shown before its token" in selection_problems(text, _full(text), wrong, 1, text.prompt_end)


def test_the_reference_over_all_tokens_is_a_plain_forward_pass(reference: Reference, text: Text) -> None:
    cut = 60
    rest = reference.extend(text.kv.first(cut), cut, text.token_ids[cut:])
    whole = reference.prefill(text.token_ids)
    torch.testing.assert_close(rest.logprobs, whole.logprobs[cut:], atol=TOLERANCE, rtol=0)


def test_a_match_that_leaves_too_few_slots_is_expected_to_end_above(text: Text) -> None:
    node = _compressed(text, "streaming")  # tokens 0 to 3 and 54 on
    assert expected_match([node], text.token_ids[:10] + (319,) * 8, 1) == 10
    assert expected_match([node], text.token_ids[:30] + (319,) * 8, 1) == 0
    assert expected_match([node], text.token_ids[:80] + (319,) * 8, 1) == 80
    assert survivors([node], text.kv, 10).tolist() == [[[0, 1, 2, 3]] * 2] * 4
