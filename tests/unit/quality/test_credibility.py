"""Expected qualities of contexts beside their own means, the mean of all, and the estimate from all questions anew."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from sglang_evicpress.core import Form
from sglang_evicpress.quality.credibility import CONFIDENCE, LEAST_VARIANCE, MAX_FORMS, PRIOR_CONTEXTS, Credibility
from sglang_evicpress.quality.running_stats import RunningStats

FORMS = (Form("keydiff", 0.8), Form("keydiff", 0.5), Form(codec="int8"))
Qualities = NDArray[np.float64]  # [contexts, forms, questions]


def seen_of(context: Qualities) -> dict[Form, RunningStats]:
    return {form: RunningStats.of(row.tolist()) for form, row in zip(FORMS, context, strict=True)}


def within(qualities: Qualities) -> Mapping[Form, float]:
    return dict(zip(FORMS, qualities.var(axis=2, ddof=1).mean(axis=0).tolist(), strict=True))


def expected(qualities: Qualities) -> Qualities:
    """[contexts, forms]"""
    credibility = Credibility()
    seen = [seen_of(context) for context in qualities]
    for index, each in enumerate(seen):
        credibility.add(b"%d" % index, each)
    variances = within(qualities)
    found = [credibility.expected(b"%d" % index, variances) for index in range(len(seen))]
    return np.array([[each[form] for form in FORMS] for each in found])


def drawn(contexts: int, questions: int, seed: int = 0) -> tuple[Qualities, Qualities]:
    """True qualities [contexts, forms], and answers about them that are right or wrong. Forms go together."""
    random = np.random.default_rng(seed)
    hard = random.beta(0.5, 4.0, contexts)
    true = 1.0 - np.stack([0.3 * hard, hard, np.full(contexts, 0.01)], axis=1)
    luck = random.random((contexts, len(FORMS), questions))
    return true, (luck < true[:, :, None]).astype(float)


def test_the_estimate_is_the_best_linear_one() -> None:
    _, qualities = drawn(40, 4, seed=3)
    losses = 1.0 - qualities.mean(axis=2)
    noise = np.diag(list(within(qualities).values())) / 4
    values, vectors = np.linalg.eigh(np.cov(losses.T) - noise)
    between = vectors @ np.diag(values.clip(0.0)) @ vectors.T
    between = (39 * between + PRIOR_CONTEXTS * noise * 4) / (39 + PRIOR_CONTEXTS)
    gains = between @ np.linalg.inv(between + noise + LEAST_VARIANCE * np.eye(3))
    doubts = CONFIDENCE * np.sqrt(np.diag(between + noise) / 40)
    best = 1.0 - (losses.mean(axis=0) + (losses - losses.mean(axis=0)) @ gains.T + doubts)
    assert expected(qualities) == pytest.approx(best.clip(0.0, 1.0))


def test_it_is_nearer_to_the_truth_than_the_context_alone_and_than_all_contexts() -> None:
    errors = []
    for seed in range(10):
        true, qualities = drawn(100, 4, seed)
        own = qualities.mean(axis=2)
        estimates = expected(qualities), own, np.broadcast_to(own.mean(axis=0), own.shape)
        errors.append([float(((estimate - true) ** 2).mean()) for estimate in estimates])
    ours, alone, together = np.mean(errors, axis=0)
    assert ours < 0.6 * alone and ours < 0.9 * together


def test_of_contexts_whose_answers_were_all_right_no_more_is_expected_than_they_are_worth() -> None:
    true, qualities = drawn(200, 3, seed=1)
    perfect = qualities.mean(axis=2)[:, 1] == 1.0
    assert expected(qualities)[perfect, 1].mean() == pytest.approx(true[perfect, 1].mean(), abs=0.03)
    assert true[perfect, 1].mean() < 0.95


def test_a_form_is_told_by_another_that_goes_with_it() -> None:
    """Contexts with the same answers in the second form, and others in the first."""
    _, qualities = drawn(60, 4, seed=2)
    qualities[:2, 1] = 0.5
    qualities[0, 0], qualities[1, 0] = 1.0, 0.25
    first, second = expected(qualities)[:2]
    assert first[1] > second[1] + 0.02


def test_one_context_alone_is_believed_less_than_it_shows() -> None:
    credibility = Credibility()
    credibility.add(b"a", {FORMS[0]: RunningStats.of([0.7, 0.9])})
    assert credibility.expected(b"a", {FORMS[0]: 0.02})[FORMS[0]] == pytest.approx(0.8 - CONFIDENCE * 0.03**0.5)


def test_contexts_may_have_other_forms_and_go_again() -> None:
    _, qualities = drawn(12, 3, seed=4)
    variances, other = within(qualities), Form("snapkv", 0.5)
    left, gone = Credibility(), Credibility()
    for index, context in enumerate(qualities):
        seen = seen_of(context)
        if index % 3 == 0:
            del seen[FORMS[index % 2]]
        gone.add(b"%d" % index, seen)
        if index < 8:
            left.add(b"%d" % index, seen)
    gone.add(b"other", {other: RunningStats.of([0.5])})
    assert set(gone.expected(b"other", {**variances, other: 0.05})) == {other}
    for key in (b"other", b"8", b"9", b"10", b"11"):
        gone.remove(key)
    for index in range(8):
        key = b"%d" % index
        assert gone.expected(key, variances) == pytest.approx(left.expected(key, variances), abs=1e-9)


def test_only_so_many_forms_are_judged_together() -> None:
    """Whoever measures a context in thousands of forms stops no server; places that become free are taken."""
    credibility = Credibility()
    many = {Form("keydiff", (index + 1) / 10_000): RunningStats.of([0.5, 0.7]) for index in range(5000)}
    variances = dict.fromkeys((*many, FORMS[2]), 0.02)
    credibility.add(b"many", many)
    credibility.add(b"late", {FORMS[2]: RunningStats.of([0.9])})
    assert list(credibility.expected(b"many", variances)) == list(many)[:MAX_FORMS]
    assert credibility.expected(b"late", variances) == {}
    credibility.remove(b"many")
    credibility.add(b"later", {FORMS[2]: RunningStats.of([0.9])})
    assert set(credibility.expected(b"later", variances)) == {FORMS[2]}
    credibility.remove(b"late")
