"""Measurements of a context: its length, its questions, and every score of every form."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from evicbench.profiler.study import (
    ALL_FORMS,
    COMPARED_FORMS,
    FORMS,
    JUDGED_FORMS,
    NUM_COMPARED,
    NUM_JUDGED,
    Measured,
    measure_study_context,
    to_json,
)
from evicbench.profiler.subjects import (
    NUM_HELD_OUT,
    NUM_QUESTIONS,
    NUM_TOKENS,
    NUM_TRAINING,
    make_study_context,
)
from evicbench.testbed.tasks import FAMILIES, ONE_QUESTION
from tests.bench.profiler.measured import context
from tests.unit.profiler.fake_engine import FakeEngine

from sglang_evicpress.cli.profile.command import DEFAULT_FORMS
from sglang_evicpress.core import Form
from sglang_evicpress.profiler.scorers.reference import WordOverlap


@dataclass(frozen=True)
class Renamed(WordOverlap):
    """f1 under the name of another judge."""

    def score(self, *given: object) -> float:
        return WordOverlap("f1").score(*given)


JUDGES = (Renamed("minilm"), WordOverlap("f1"))
QUALITIES = {form: round(0.05 + 0.05 * number % 0.9, 2) for number, form in enumerate(ALL_FORMS)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_subject_is_whole_blocks_with_different_questions(family: str) -> None:
    subject = make_study_context(family, 3)
    assert len(subject.tokens) == NUM_TOKENS
    assert NUM_TOKENS % 64 == 0
    assert len(set(subject.questions)) == len(subject.questions) == (1 if family in ONE_QUESTION else NUM_QUESTIONS)
    assert subject == make_study_context(family, 3)
    assert subject.tokens != make_study_context(family, 4).tokens


def test_forms_are_those_that_profile_measures_by_default_without_a_codec() -> None:
    assert {str(form) for form in FORMS} == {text for text in DEFAULT_FORMS.split(",") if "+" not in text}
    assert len(ALL_FORMS) == len(set(ALL_FORMS)) == 22


def test_every_form_is_scored_on_every_question() -> None:
    engine = FakeEngine(QUALITIES)
    measured = measure_study_context(engine, make_study_context("needle", 0), JUDGES)
    assert engine.num_opened == 1
    assert not engine.open
    assert not engine.made
    for forms, num_training, num_held_out in (
        (FORMS, NUM_TRAINING, NUM_HELD_OUT),
        (COMPARED_FORMS, NUM_COMPARED, NUM_COMPARED),
    ):
        for form in forms:
            assert measured.training[form] == pytest.approx([QUALITIES[form]] * num_training)
            assert measured.held_out["logprob"][form] == pytest.approx([QUALITIES[form]] * num_held_out)
    for name in ("minilm", "f1"):
        assert set(measured.held_out[name]) == set(JUDGED_FORMS)
        assert {len(scores) for scores in measured.held_out[name].values()} == {NUM_JUDGED}


def test_the_only_question_is_held_out() -> None:
    measured = measure_study_context(FakeEngine(QUALITIES), make_study_context("title", 0), JUDGES)
    assert not measured.has_training
    assert not measured.training
    assert measured.quality(FORMS[0]) == pytest.approx(QUALITIES[FORMS[0]])
    assert {len(scores) for scores in measured.held_out["f1"].values()} == {1}


def test_a_form_that_cannot_be_made_stops_the_study() -> None:
    engine = FakeEngine(QUALITIES, impossible=[FORMS[3]])
    with pytest.raises(RuntimeError, match="14 of 15 forms"):
        measure_study_context(engine, make_study_context("hop", 0), JUDGES)
    assert not engine.open


def test_a_profile_has_the_training_questions_only() -> None:
    measured = context(1, lambda form: 0.8, held_out=lambda form: 0.1)
    profile = measured.profile()
    assert profile.key == measured.key
    assert {(seen.count, round(seen.mean, 6)) for seen in profile.forms.values()} == {(NUM_TRAINING, 0.8)}


def test_quality_is_over_all_questions_of_the_scorer() -> None:
    measured = context(1, lambda form: 0.8, held_out=lambda form: 0.2)
    assert measured.quality(Form("knorm", 0.5)) == pytest.approx(0.56)  # 30 training, 20 held-out
    assert measured.quality(Form("knorm", 0.5), "f1") == pytest.approx(0.2)


def test_json_has_a_line_for_each_context() -> None:
    contexts: list[Measured] = [context(1, lambda form: 0.8), context(2, lambda form: 0.3, family="note")]
    text = to_json(contexts)
    read = json.loads(text)
    assert len(text.splitlines()) == 4
    assert [each["family"] for each in read] == ["needle", "note"]
    assert read[0]["training"]["keydiff@0.5"] == 0.8
    assert read[1]["f1"]["snapkv@0.2"] == 0.3
