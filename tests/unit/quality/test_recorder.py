"""Records of real requests: the newest of everything, within every bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.quality.recorder import Query, Recorder

ONE, TWO = b"one", b"two"


def query(*tokens: int, answer: tuple[int, ...] = (9,), predicted: float | None = None) -> Query:
    return Query(tokens, answer, predicted)


def asked(recorder: Recorder, key: bytes) -> list[tuple[int, ...]]:
    return [tuple(each.tokens) for each in recorder.queries_of(key)]


def test_a_context_is_stored_once_with_its_questions_oldest_first() -> None:
    recorder = Recorder()
    recorder.record(ONE, [1, 2, 3], "user", query(4, 5))
    recorder.record(ONE, np.array([1, 2, 3]), "user", query(6, predicted=0.9))
    context = recorder.context_of(ONE)
    assert (list(context.tokens), context.namespace) == ([1, 2, 3], "user")
    assert (context.num_hits, context.num_lossy_hits) == (2, 1)
    assert asked(recorder, ONE) == [(4, 5), (6,)]
    assert recorder.num_tokens == 3 + 2 + 1 + 1 + 1


def test_lossy_hits_are_numbered_and_exact_ones_are_not() -> None:
    recorder = Recorder()
    for token, predicted in ((4, None), (5, 0.9), (6, None), (7, 0.9)):
        recorder.record(ONE, [1], None, query(token, predicted=predicted))
    assert [each.lossy_hit for each in recorder.queries_of(ONE)] == [0, 1, 0, 2]


def test_the_newest_answer_to_a_question_wins_and_makes_it_the_newest() -> None:
    recorder = Recorder()
    recorder.record(ONE, [1], None, query(4, answer=(7, 7, 7), predicted=0.5))
    recorder.record(ONE, [1], None, query(5))
    recorder.record(ONE, [1], None, query(4, answer=(8,), predicted=0.7))
    assert asked(recorder, ONE) == [(5,), (4,)]
    newest = recorder.queries_of(ONE)[-1]
    assert (list(newest.answer), newest.predicted, newest.lossy_hit) == ([8], 0.7, 2)
    assert recorder.num_tokens == 1 + 2 + 2


def test_of_too_many_questions_the_oldest_goes() -> None:
    recorder = Recorder(max_queries=2)
    for token in (4, 5, 4, 6):
        recorder.record(ONE, [1], None, query(token))
    assert asked(recorder, ONE) == [(4,), (6,)]


def test_the_context_recorded_longest_ago_goes_first() -> None:
    recorder = Recorder(max_contexts=2)
    for key in (ONE, TWO, ONE, b"three"):
        recorder.record(key, [1], None, query(4))
    assert list(recorder) == [ONE, b"three"]
    assert recorder.context_of(TWO) is None
    assert recorder.queries_of(TWO) == ()
    assert recorder.num_tokens == 2 * 3


def test_tokens_are_bounded_by_letting_other_contexts_go_and_then_old_questions() -> None:
    recorder = Recorder(max_tokens=10)
    recorder.record(ONE, [1, 2], None, query(4))
    recorder.record(TWO, [1, 2, 3], None, query(4, 4))
    assert (list(recorder), recorder.num_tokens) == ([ONE, TWO], 10)
    recorder.record(TWO, [1, 2, 3], None, query(5, 5))
    assert (list(recorder), recorder.num_tokens) == ([TWO], 9)
    recorder.record(TWO, [1, 2, 3], None, query(6, 6))
    assert (asked(recorder, TWO), recorder.num_tokens) == ([(5, 5), (6, 6)], 9)


def test_what_is_too_long_is_left_out_or_cut() -> None:
    recorder = Recorder(max_tokens=8, max_query_tokens=2, max_answer_tokens=2)
    recorder.record(ONE, [1] * 9, None, query(4))
    assert len(recorder) == 0
    recorder.record(ONE, [1], None, query(4, 4, 4, predicted=0.5))
    recorder.record(ONE, [1], None, query(predicted=0.5))
    context = recorder.context_of(ONE)
    assert (context.num_hits, context.num_lossy_hits, asked(recorder, ONE)) == (2, 2, [])
    recorder.record(ONE, [1], None, query(4, answer=(7, 8, 9)))
    assert list(recorder.queries_of(ONE)[0].answer) == [7, 8]


def test_a_forgotten_context_leaves_nothing() -> None:
    recorder = Recorder()
    recorder.record(ONE, [1], None, query(4))
    recorder.forget(ONE)
    recorder.forget(TWO)
    assert (len(recorder), recorder.num_tokens, recorder.context_of(ONE)) == (0, 0, None)


def test_a_token_out_of_range_changes_nothing() -> None:
    recorder = Recorder()
    recorder.record(ONE, [1], None, query(4))
    for tokens, bad in (([1], query(-1)), ([1], query(5, answer=(2**32,)))):
        with pytest.raises(ValueError, match="out of range"):
            recorder.record(ONE, tokens, None, bad)
    with pytest.raises(ValueError, match="out of range"):
        recorder.record(TWO, [-1], None, query(5))
    assert (list(recorder), asked(recorder, ONE), recorder.num_tokens) == ([ONE], [(4,)], 3)


def test_no_content_shows_when_it_is_printed() -> None:
    recorder = Recorder()
    recorder.record(ONE, [123_457], "secret", query(765_431))
    shown = f"{recorder.context_of(ONE)} {recorder.queries_of(ONE)} {recorder!r}"
    assert not any(content in shown for content in ("123457", "765431", "secret"))


@pytest.mark.parametrize("name", ["max_contexts", "max_queries", "max_tokens", "max_query_tokens", "max_answer_tokens"])
def test_a_bound_is_at_least_1(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Recorder(**{name: 0})


Hit = tuple[int, int, int, bool]
HITS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 6), st.booleans()), max_size=60)


def replay(hits: list[Hit]) -> Recorder:
    recorder = Recorder(max_contexts=3, max_queries=2, max_tokens=30, max_query_tokens=3, max_answer_tokens=4)
    for context, question, answer, is_lossy in hits:
        tokens = [context] * (1 + 2 * context)
        asks = query(*[question] * question, answer=(7,) * answer, predicted=0.5 if is_lossy else None)
        recorder.record(bytes([context]), tokens, None, asks)
        if (context, question) == (5, 4):
            recorder.forget(bytes([answer]))
    return recorder


@given(hits=HITS)
def test_no_bound_is_ever_passed_and_the_count_of_tokens_is_right(hits: list[Hit]) -> None:
    for end in range(len(hits) + 1):
        recorder = replay(hits[:end])
        held = 0
        for key in recorder:
            context, queries = recorder.context_of(key), recorder.queries_of(key)
            assert len(queries) <= 2
            assert len({tuple(each.tokens) for each in queries}) == len(queries)
            assert all(1 <= len(each.tokens) <= 3 and len(each.answer) <= 4 for each in queries)
            assert len(queries) <= context.num_hits
            assert context.num_lossy_hits <= context.num_hits
            held += len(context.tokens) + sum(len(each.tokens) + len(each.answer) for each in queries)
        assert recorder.num_tokens == held <= 30
        assert len(recorder) <= 3
        if end and hits[end - 1][:2] != (5, 4):
            assert list(recorder)[-1] == bytes([hits[end - 1][0]])
