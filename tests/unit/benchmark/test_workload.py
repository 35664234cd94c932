"""Schedule of questions."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from sglang_evicpress.benchmark.arrivals import poisson, read_trace, spread, stretched
from sglang_evicpress.benchmark.config import Config, load_config
from sglang_evicpress.benchmark.contexts import Context
from sglang_evicpress.benchmark.workload import plan, popularity, warm_up, write_training
from sglang_evicpress.profiler.contexts import GivenQuestion, read_contexts

CONTEXTS = [
    Context(
        f"text {i}", tuple(GivenQuestion(f"q{i}.{j}", f"a{i}.{j}") for j in range(6)), "even" if i % 2 else "odd", 100
    )
    for i in range(20)
]


def make(folder: Path, **values: object) -> Config:
    given = {"model": "m", "contexts": {"command": "true"}, "requests": 400, "memory": {"gpu": 1}, **values}
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(given))
    return load_config(path)


def test_the_same_config_plans_the_same_and_everything_else_something_else(tmp_path: Path) -> None:
    config = make(tmp_path)
    first = plan(config, CONTEXTS, 0, 2.0)
    assert plan(make(tmp_path, systems=["lru"], repetitions=9), CONTEXTS, 0, 2.0) == first
    asked = [request.item.question for request in first]
    for other in (plan(config, CONTEXTS, 1, 2.0), plan(config, CONTEXTS, 0, 3.0)):
        assert [request.item.question for request in other] != asked
        assert [request.arrival_s for request in other] != [request.arrival_s for request in first]
    assert plan(make(tmp_path, seed=1), CONTEXTS, 0, 2.0) != first


def test_requests_come_in_order_at_the_rate_of_their_level(tmp_path: Path) -> None:
    config = make(tmp_path, requests=2000)
    for rate in (0.5, 8.0):
        planned = plan(config, CONTEXTS, 3, rate)
        times = [request.arrival_s for request in planned]
        assert len(planned) == 2000 and all(earlier < later for earlier, later in pairwise(times))
        assert times[-1] == pytest.approx(2000 / rate, rel=0.1)
        assert [request.index for request in planned] == list(range(2000))
        assert {(request.repetition, request.rate) for request in planned} == {(3, rate)}


def test_one_client_at_a_time_has_all_its_requests_from_the_start(tmp_path: Path) -> None:
    assert {request.arrival_s for request in plan(make(tmp_path), CONTEXTS, 0, 0.0)} == {0.0}


def test_contexts_are_asked_about_by_their_rank(tmp_path: Path) -> None:
    config = make(tmp_path, requests=20_000, popularity=1.0)
    shares = popularity(config, len(CONTEXTS))
    assert sorted(shares, reverse=True) == [1 / rank for rank in range(1, 21)] != shares
    counts = Counter(request.item.context for request in plan(config, CONTEXTS, 0, 1.0))
    for number, share in enumerate(shares):
        assert counts[number] / 20_000 == pytest.approx(share / sum(shares), rel=0.25)
    assert set(popularity(make(tmp_path, popularity=0), 20)) == {1.0}


def test_no_question_is_asked_again_before_all_others_of_its_context(tmp_path: Path) -> None:
    asked: dict[int, list[str]] = {}
    for request in plan(make(tmp_path), CONTEXTS, 0, 1.0):
        asked.setdefault(request.item.context, []).append(request.item.question)
    for number, questions in asked.items():
        for begin in range(0, len(questions), 6):
            assert len(set(questions[begin : begin + 6])) == len(questions[begin : begin + 6])
        assert set(questions) <= {question.text for question in CONTEXTS[number].questions}
    assert max(map(len, asked.values())) > 6


def test_an_item_is_a_question_in_the_template(tmp_path: Path) -> None:
    config = make(tmp_path, template="<{context}|{question}>")
    for request in plan(config, CONTEXTS, 0, 1.0):
        item, context = request.item, CONTEXTS[request.item.context]
        question = next(each for each in context.questions if each.text == item.question)
        assert (item.family, item.reference) == (context.family, question.answer)
        assert item.messages == [{"role": "user", "content": f"<{context.text}|{item.question}>"}]


def test_training_questions_are_never_asked_and_go_to_the_profiler(tmp_path: Path) -> None:
    config = make(tmp_path, profiles={"questions": 4})
    training = [context.questions[:4] for context in CONTEXTS]
    asked = {request.item.question for request in plan(config, CONTEXTS, 0, 1.0)}
    assert asked and not asked & {question.text for each in training for question in each}
    write_training(config, CONTEXTS, tmp_path / "t.jsonl")
    given = read_contexts(tmp_path / "t.jsonl")
    assert [context.text for context in given] == [context.text for context in CONTEXTS]
    for context, questions in zip(given, training, strict=True):
        assert [each.text for each in context.questions] == [each.text for each in questions]
        assert all(each.answer is None for each in context.questions)  # compared with that of exact KV


def test_warm_up_asks_about_every_context_once(tmp_path: Path) -> None:
    config = make(tmp_path, profiles={"questions": 1})
    items = warm_up(config, CONTEXTS)
    assert sorted(item.context for item in items) == list(range(20)) and warm_up(config, CONTEXTS) == items
    assert [item.context for item in items] != list(range(20))
    assert {item.question for item in items} == {f"q{i}.0" for i in range(20)}  # those of training
    assert warm_up(make(tmp_path, warm_up=0), CONTEXTS) == []
    twice = warm_up(make(tmp_path, warm_up=2, profiles={"questions": 2}), CONTEXTS)
    assert {item.question for item in twice[20:]} == {f"q{i}.1" for i in range(20)}
    assert twice[:20] == items and [item.context for item in twice[20:]] != [item.context for item in items]


def test_rates_may_have_fewer_requests(tmp_path: Path) -> None:
    config = make(tmp_path, rates=[0, 3], requests=7, extra_rates={"rates": [2, 3], "systems": ["lru"], "requests": 4})
    assert [len(plan(config, CONTEXTS, 0, rate)) for rate in (0.0, 2.0, 3.0)] == [7, 4, 7]


def test_a_high_rate_lasts_as_long_as_a_low_one(tmp_path: Path) -> None:
    extra_rates = {"rates": [1, 2.5], "systems": ["lru"], "seconds": 3, "requests": 4}
    config = make(tmp_path, rates=[0], requests=7, extra_rates=[extra_rates, {"rates": [1], "systems": ["full-cache"]}])
    assert [len(plan(config, CONTEXTS, 0, rate)) for rate in (0.0, 1.0, 2.5)] == [7, 7, 8]


def write_trace(folder: Path, text: str) -> Path:
    (folder / "t.csv").write_text(text)
    return folder / "t.csv"


def test_a_trace_keeps_its_gaps_at_another_rate(tmp_path: Path) -> None:
    write_trace(tmp_path, "TIMESTAMP,Tokens\n" + "".join(f"{time},7\n" for time in (10, 11, 14, 15, 25)))
    config = make(tmp_path, requests=4, arrivals="trace t.csv")
    times = [request.arrival_s for request in plan(config, CONTEXTS, 0, 0.5)]
    assert times == pytest.approx([8 * gap / 15 for gap in (1, 4, 5, 15)])  # 4 requests in 8 s
    assert plan(config, CONTEXTS, 0, 0.0)[-1].arrival_s == 0.0


def test_every_repetition_goes_on_in_the_trace_and_behind_its_end_at_its_beginning() -> None:
    trace = [0.0, 1.0, 3.0, 6.0]
    assert stretched(trace, 2, 2 / 3, 0) == pytest.approx([1.0, 3.0])
    assert stretched(trace, 2, 2 / 4, 1) == pytest.approx([3.0, 4.0])  # gaps 3 and, from the beginning, 1
    with pytest.raises(ValueError, match="arrivals 0 to 2 of the trace all come at one time"):
        stretched([1.0, 1.0, 1.0, 2.0], 2, 1.0, 0)


def test_times_are_seconds_or_dates(tmp_path: Path) -> None:
    dates = "TIMESTAMP,a\n2023-11-16 18:15:46.6805900,1\n\n2023-11-16 18:15:50.9951690,2\n"
    first, second = read_trace(write_trace(tmp_path, dates))
    assert second - first == pytest.approx(4.314579, abs=1e-5)
    assert read_trace(write_trace(tmp_path, "3\n1.5,x\n")) == [1.5, 3.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [("a\n1\nb,2\n", "line 3 begins with 'b': expected a time"), ("a\n1\n", "has 1 times in its first column")]
    + [("1\nnan\n2\n", "line 2 begins with 'nan'"), ("", "has 0 times")],
)
def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_trace(write_trace(tmp_path, text))


def test_poisson_gaps_have_the_spread_of_a_poisson_process() -> None:
    times = poisson(20_000, 4.0, random.Random(0))
    gaps = [later - earlier for earlier, later in pairwise([0.0, *times])]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.05) and deviation == pytest.approx(mean, rel=0.05)


def test_arrivals_of_a_level_under_load_fill_its_time_exactly(tmp_path: Path) -> None:
    given = {"of_saturation": [0.5, 2], "reference": "evicpress a=1", "seconds": 20}
    config = make(tmp_path, rates=[0], load=given).saturated_at(10.04)
    assert config.rates == (0.0, 5.02, 20.1)
    assert config.load.multiples == {5.02: 0.5, 20.1: 2.0}
    for rate, count in ((5.02, 100), (20.1, 402)):
        times = [request.arrival_s for request in plan(config, CONTEXTS, 0, rate)]
        assert len(times) == count and times == sorted(times)
        assert times[0] > 0 and 20 * 0.9 < times[-1] < 20
    assert len(plan(config, CONTEXTS, 0, 0.0)) == 400


def test_bursts_have_gaps_of_more_variance() -> None:
    def variance(shape: float) -> float:
        times = spread(20_000, 20_000.0, shape, random.Random(1))
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert sum(gaps) / len(gaps) == pytest.approx(1.0, rel=0.01)
        return sum((gap - 1.0) ** 2 for gap in gaps) / len(gaps)

    assert variance(1.0) == pytest.approx(1.0, rel=0.1)
    assert variance(0.5) == pytest.approx(2.0, rel=0.1)


def test_bursts_come_at_the_rate_of_a_level_without_a_load_too(tmp_path: Path) -> None:
    times = [request.arrival_s for request in plan(make(tmp_path, arrivals="gamma 0.5"), CONTEXTS, 0, 8.0)]
    assert len(times) == 400 and 45 < times[-1] < 50
