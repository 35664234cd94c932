"""Objective of a search: the questions' mean score over survivors in the numbers that budgets give."""

from __future__ import annotations

import random

import pytest
import torch
from evicbench.testbed.tasks import make_context
from evicbench.testbed.vocabulary import ASK, MODEL_DIR, load_vocabulary

from sglang_evicpress.press import get_press, select
from sglang_evicpress.profiler.engine import Answer
from sglang_evicpress.profiler.local.model import LocalModel
from sglang_evicpress.profiler.local.objective import (
    OBJECTIVES,
    Objective,
    Task,
    TaskScore,
    adaptive_heads,
    even_heads,
    get_objective,
    prepare,
)
from sglang_evicpress.profiler.measure import Asked


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel(MODEL_DIR)


@pytest.fixture(scope="module")
def tasks(model: LocalModel) -> list[Task]:
    """Three contexts, two of one length, with two questions each but for the last."""
    rng, vocabulary = random.Random("tasks"), load_vocabulary()
    contexts = list[tuple[list[int], list[Asked]]]()
    for num_tokens, num_questions in ((128, 2), (128, 2), (160, 1)):
        context = make_context("needle", num_tokens, rng)
        asked = [Asked(vocabulary.encode(f"{ASK} {each.text}"), each.answer) for each in context.questions]
        contexts.append(([vocabulary.ids[word] for word in context.tokens], asked[:num_questions]))
    return list(prepare(model, get_press("snapkv"), contexts, 8, batch=2))


def test_scores_are_the_same_however_contexts_are_batched(model: LocalModel, tasks: list[Task]) -> None:
    scorer = get_objective("task-f1")
    one, all_at_once = (Objective(model, tasks, scorer, 8, batch=size).by_question((50, 44, 60)) for size in (1, 3))
    assert one == all_at_once
    assert [len(row) for row in one] == [2, 2, 1]


@pytest.mark.parametrize("name", ["task-f1", "logprob", "f1"])
def test_budgets_beyond_the_contexts_are_exact_kv(model: LocalModel, tasks: list[Task], name: str) -> None:
    objective = Objective(model, tasks, get_objective(name), 8, batch=2)
    if name == "task-f1":
        assert objective((500, 500, 500)) == objective.exact == 1.0
    else:
        assert objective((500, 500, 500)) == pytest.approx(1.0, abs=1e-5)
        assert objective.exact is None


@pytest.mark.parametrize("name", ["task-exact", "logprob"])
def test_a_context_that_lost_its_facts_scores_less(model: LocalModel, tasks: list[Task], name: str) -> None:
    objective = Objective(model, tasks, get_objective(name), 8)
    assert objective((4, 4, 4)) < 0.7 * objective((500, 500, 500))


def test_the_mean_is_over_questions(model: LocalModel, tasks: list[Task]) -> None:
    objective = Objective(model, tasks, get_objective("logprob"), 8)
    scores = [score for row in objective.by_question((40, 40, 40)) for score in row]
    assert objective((40, 40, 40)) == pytest.approx(sum(scores) / 5)


def test_even_heads_are_the_plain_press(tasks: list[Task]) -> None:
    task = tasks[0]
    plain = select(get_press("snapkv"), task.context.node, 40, 4)
    survivors = even_heads(task.scores, (40, 40, 40))
    assert torch.equal(torch.stack(list(survivors.indices)), plain.long()) and survivors.is_kept is None
    assert [index.shape[1] for index in even_heads(task.scores, (40, 7, 999)).indices] == [40, 7, 128]


def test_adaptive_heads_share_the_slots_of_their_layer(tasks: list[Task]) -> None:
    survivors = adaptive_heads(tasks[0].scores, (40, 7, 999))
    assert survivors.is_kept is not None
    assert [int(kept.sum()) for kept in survivors.is_kept] == [80, 14, 256]
    for layer, (index, kept) in enumerate(zip(survivors.indices, survivors.is_kept, strict=True)):
        for head in range(2):
            positions = index[head][kept[head]]
            assert bool((positions[1:] > positions[:-1]).all())
            best = tasks[0].scores[layer, head].topk(len(positions)).values.sort().values
            assert torch.equal(tasks[0].scores[layer, head][positions].sort().values, best)


def test_all_of_the_safeguard_is_even_heads(tasks: list[Task]) -> None:
    even, safe = even_heads(tasks[0].scores, (40, 40, 40)), adaptive_heads(tasks[0].scores, (40, 40, 40), 1.0)
    assert all(torch.equal(one, other) for one, other in zip(even.indices, safe.indices, strict=True))


def test_a_task_score_needs_an_expected_answer() -> None:
    answer = Answer((1,), (0.0,), "b1")
    assert TaskScore("task-exact").score(answer, answer, None, "b1") == 1.0
    with pytest.raises(ValueError, match="objective task-f1 has no answer or no expected one"):
        TaskScore("task-f1").score(answer, answer, None, None)


def test_an_unknown_objective_names_those_there_are() -> None:
    assert {"task-f1", "logprob"} < set(OBJECTIVES)
    with pytest.raises(ValueError, match="objective 'task-bleu' is unknown: expected one of task-f1"):
        get_objective("task-bleu")
