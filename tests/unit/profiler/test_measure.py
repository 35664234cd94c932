"""Profiles are what the engine's tables say, and no shadow is left behind however it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.profiler.fake_engine import BEST_LOGPROB, IDENTITY, FakeEngine

from sglang_evicpress.core import EXACT, Form
from sglang_evicpress.profiler.engine import Answer, EngineError, Likelihood, Shadow, ShadowLost, ShadowRefused
from sglang_evicpress.profiler.measure import Asked, measure_forms, observe, profile_context
from sglang_evicpress.profiler.scorers.logprob import LogProb
from sglang_evicpress.profiler.transport import Unreachable
from sglang_evicpress.quality.profile import BLOCK_TOKENS, Profile, context_keys, query_set
from sglang_evicpress.quality.recorder import Query

CONTEXT = list(range(5, 5 + 2 * BLOCK_TOKENS))
QUERIES = [Asked((7, 8)), Asked((9,), "reference")]
MILD, HARD, HARDER = Form("keydiff", 0.5), Form("knorm", 0.25), Form("snapkv", 0.1)
TABLE = {MILD: 0.95, HARD: 0.6, HARDER: 0.3}


@dataclass
class SameTokens:
    """The share of the exact answer's tokens that the given answer has in the same place."""

    name: str = "same-tokens"
    needs_generation: bool = True
    needs_reference: bool = True
    prepared: list[str] = field(default_factory=list)
    references: list[str | None] = field(default_factory=list)

    def prepare(self, texts: Sequence[str]) -> None:
        self.prepared.extend(texts)

    def score(self, exact: Answer, given: Answer | None, likelihood: Likelihood | None, reference: str | None) -> float:
        assert likelihood is None
        assert {exact.text, given.text} <= set(self.prepared)
        self.references.append(reference)
        pairs = zip(exact.token_ids, given.token_ids, strict=True)
        return sum(one == other for one, other in pairs) / len(exact.token_ids)


class Interrupted(LogProb):
    """Ctrl-C while the first form is scored."""

    def score(self, exact: Answer, given: Answer | None, likelihood: Likelihood | None, reference: str | None) -> float:
        raise KeyboardInterrupt


def profile(engine: FakeEngine, **more: object) -> Profile:
    arguments = {"queries": QUERIES, "forms": TABLE, "scorer": LogProb(), "clock": lambda: 12.0, **more}
    return profile_context(engine, CONTEXT, "user", **arguments)  # type: ignore[arg-type]


def assert_nothing_is_left(engine: FakeEngine) -> None:
    assert engine.num_opened == 1
    assert not engine.open
    assert not engine.made


@pytest.mark.parametrize("scorer", [LogProb(), SameTokens()], ids=lambda scorer: scorer.name)
def test_a_profile_has_what_the_table_says(scorer: LogProb | SameTokens) -> None:
    engine = FakeEngine(TABLE)
    result = profile(engine, scorer=scorer, forms=[EXACT, *TABLE, MILD])
    assert {form: seen.mean for form, seen in result.forms.items()} == pytest.approx(TABLE)
    assert [seen.count for seen in result.forms.values()] == [2.0, 2.0, 2.0]
    assert result.key == context_keys(IDENTITY, "user", CONTEXT)[-1]
    assert (result.num_tokens, result.num_queries, result.measured_s) == (len(CONTEXT), 2, 12.0)
    assert (result.scorer, result.query_set) == (scorer.name, query_set([(7, 8), (9,)]))
    assert Profile.from_json(result.to_json()) == result
    assert_nothing_is_left(engine)


def test_queries_that_suffer_differently_show_as_spread() -> None:
    stats = profile(FakeEngine({HARD: 0.5}, of_question={(9,): 0.5}), forms=[HARD]).forms[HARD]
    assert stats.mean == pytest.approx((0.5 + 0.25) / 2)
    assert stats.variance == pytest.approx(2 * 0.125**2)


def test_one_form_at_a_time_is_held_beside_the_exact_copy() -> None:
    engine = FakeEngine(TABLE)
    profile(engine)
    assert engine.most_tokens == len(CONTEXT) + len(CONTEXT) // 2


def test_references_reach_the_scorer() -> None:
    scorer = SameTokens()
    profile(FakeEngine(TABLE), scorer=scorer, forms=[MILD])
    assert scorer.references == [None, "reference"]


def test_fifteen_forms_by_log_probability_cost_at_most_a_quarter_of_the_forwards_of_generating() -> None:
    presses = ("keydiff", "knorm", "snapkv", "value_key_ratio", "streaming")
    forms = {Form(press, kept): 0.8 for press in presses for kept in (0.2, 0.4, 0.6)}
    scored, generated = FakeEngine(forms, answer_tokens=32), FakeEngine(forms, answer_tokens=32)
    profile(scored, forms=forms)
    profile(generated, forms=forms, scorer=SameTokens())
    assert scored.num_forwards == 2 * (32 + 15)
    assert generated.num_forwards == 2 * (32 + 15 * 32)
    assert scored.num_forwards <= 0.25 * generated.num_forwards


def test_answers_are_as_long_as_is_asked() -> None:
    engine = FakeEngine(TABLE)
    profile(engine, max_new_tokens=3, forms=[MILD])
    assert engine.num_forwards == 2 * 3 + 2


def test_a_form_that_cannot_be_made_is_left_out() -> None:
    engine, seen = FakeEngine(TABLE, impossible={HARD}), []
    result = profile(engine, on_progress=lambda: seen.append(None))
    assert list(result.forms) == [MILD, HARDER]
    assert len(seen) == 3
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("error", [Unreachable("no answer"), EngineError("status 500")])
def test_a_server_that_fails_is_no_form_that_cannot_be_made(error: EngineError) -> None:
    class Failing(FakeEngine):
        def make_form(self, shadow: Shadow, form: Form) -> str:
            if form == HARD:
                raise error
            return super().make_form(shadow, form)

    engine, seen = Failing(TABLE), []
    with pytest.raises(type(error), match=str(error)):
        profile(engine, on_progress=lambda: seen.append(None))
    assert len(seen) == 1
    assert_nothing_is_left(engine)


def test_a_form_named_twice_is_measured_once() -> None:
    once, twice = FakeEngine(TABLE), FakeEngine(TABLE)
    assert profile(twice, forms=[*TABLE, *TABLE]) == profile(once)
    assert twice.num_forwards == once.num_forwards


def test_a_form_that_cannot_be_dropped_counts_and_goes_with_the_shadow() -> None:
    class Clinging(FakeEngine):
        def drop_form(self, shadow: Shadow, form: Form) -> None:
            raise EngineError(f"{form} cannot be dropped now")

    engine = Clinging(TABLE)
    assert list(profile(engine).forms) == list(TABLE)
    assert_nothing_is_left(engine)


def test_when_no_form_can_be_made_it_says_so() -> None:
    engine = FakeEngine(TABLE, impossible=TABLE)
    with pytest.raises(EngineError, match="none of keydiff@0.5, knorm@0.25, snapkv@0.1"):
        profile(engine)
    assert_nothing_is_left(engine)


def test_a_refused_shadow_is_told_and_nothing_is_asked() -> None:
    engine = FakeEngine(TABLE, room_tokens=len(CONTEXT) - 1)
    with pytest.raises(ShadowRefused):
        profile(engine)
    assert (engine.num_opened, engine.num_forwards) == (0, 0)


def test_when_the_room_ends_the_forms_before_it_are_kept() -> None:
    engine = FakeEngine(TABLE, room_tokens=len(CONTEXT) + 20)
    assert list(profile(engine, forms=[HARDER, MILD, HARD]).forms) == [HARDER]
    assert_nothing_is_left(engine)


@pytest.mark.parametrize(
    ("lose_after", "kept"),
    [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3)],
    ids=lambda number: str(number),
)
def test_when_the_shadow_is_lost_the_complete_forms_are_kept(lose_after: int, kept: int) -> None:
    """One use for the exact answers, then two for each form."""
    engine = FakeEngine(TABLE, lose_after=lose_after)
    if kept:
        assert list(profile(engine).forms) == list(TABLE)[:kept]
    else:
        with pytest.raises(ShadowLost):
            profile(engine)
    assert_nothing_is_left(engine)


@given(
    forms=st.lists(st.sampled_from([MILD, HARD, HARDER]), min_size=1, unique=True),
    impossible=st.sets(st.sampled_from([MILD, HARD, HARDER])),
    lose_after=st.integers(0, 8) | st.just(math.inf),
    room_tokens=st.sampled_from([1, 128, 141, 160, 192, math.inf]),
    generates=st.booleans(),
)
def test_what_is_kept_is_right_and_nothing_is_left(
    forms: list[Form], impossible: set[Form], lose_after: float, room_tokens: float, generates: bool
) -> None:
    engine = FakeEngine(TABLE, impossible=impossible, lose_after=lose_after, room_tokens=room_tokens)
    try:
        result = profile(engine, forms=forms, scorer=SameTokens() if generates else LogProb())
    except EngineError:
        pass
    else:
        assert set(result.forms) <= set(forms) - impossible
        assert result.forms
        assert all(seen.mean == pytest.approx(TABLE[form]) for form, seen in result.forms.items())
    assert not engine.open
    assert not engine.made


def test_ctrl_c_closes_the_shadow_and_goes_on_up() -> None:
    engine = FakeEngine(TABLE)
    with pytest.raises(KeyboardInterrupt):
        profile(engine, scorer=Interrupted())
    assert_nothing_is_left(engine)


def test_an_error_while_a_form_is_asked_is_told() -> None:
    """The table lacks a form: the engine fails with what is no EngineError."""
    engine = FakeEngine({MILD: 0.9})
    with pytest.raises(KeyError):
        profile(engine, forms=[MILD, HARD])
    assert_nothing_is_left(engine)


def test_a_query_with_an_empty_answer_does_not_count_as_perfect() -> None:
    exact = [Answer((), ()), Answer(FakeEngine(TABLE).exact_answer([*CONTEXT, 9]), (BEST_LOGPROB,) * 20)]
    engine = FakeEngine(TABLE)
    shadow = engine.open_shadow(CONTEXT, None)
    results = measure_forms(engine, shadow, CONTEXT, QUERIES, list(TABLE), LogProb(), exact)
    assert [(form, seen.count, round(seen.mean, 6)) for form, seen in results] == [
        (form, 1.0, quality) for form, quality in TABLE.items()
    ]
    with pytest.raises(EngineError, match="empty"):
        next(measure_forms(engine, shadow, CONTEXT, QUERIES, list(TABLE), LogProb(), [Answer((), ())] * 2))


@pytest.mark.parametrize("more", [{"queries": []}, {"queries": [Asked(())]}, {"forms": []}, {"forms": [EXACT]}])
def test_nothing_to_ask_or_to_measure_is_refused_before_a_shadow_is_opened(more: dict[str, object]) -> None:
    engine = FakeEngine(TABLE)
    with pytest.raises(ValueError, match="expected at least one"):
        profile(engine, **more)
    assert engine.num_opened == 0


def test_forms_of_an_open_shadow_come_as_they_are_complete() -> None:
    engine = FakeEngine(TABLE)
    shadow = engine.open_shadow(CONTEXT, None)
    exact = engine.generate(shadow.namespace, [[*CONTEXT, *query.tokens] for query in QUERIES], 256)
    results = measure_forms(engine, shadow, CONTEXT, QUERIES, list(TABLE), LogProb(), exact)
    form, stats = next(results)
    assert (form, stats.mean) == (MILD, pytest.approx(0.95))
    results.close()
    assert (list(engine.open), engine.made) == ([shadow.id], {})
    assert engine.num_forwards == 2 * 20 + 2


def test_served_answers_are_judged_under_exact_kv() -> None:
    bad = (501, 502)
    engine = FakeEngine(TABLE, served={bad: 0.4})
    shadow = engine.open_shadow(CONTEXT, None)
    good = engine.exact_answer([*CONTEXT, 7, 8])
    observed = observe(engine, shadow, CONTEXT, [Query((7, 8), good, 0.9), Query((9,), bad, 0.9)])
    assert observed == pytest.approx([1.0, 0.4])
    assert engine.num_forwards == 2


def test_an_empty_served_answer_is_refused() -> None:
    engine = FakeEngine(TABLE)
    shadow = engine.open_shadow(CONTEXT, None)
    with pytest.raises(ValueError, match="at least one token"):
        observe(engine, shadow, CONTEXT, [Query((7,), (), 0.9)])
