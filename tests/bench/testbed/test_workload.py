"""The testbed's workload: what is shared and how often."""

from __future__ import annotations

from collections import Counter

import pytest
from evicbench.testbed.tasks import FAMILIES
from evicbench.testbed.vocabulary import MODEL_DIR
from evicbench.testbed.workload import make_workload
from transformers import AutoTokenizer


def test_a_workload_is_the_same_for_the_same_seed_only() -> None:
    assert make_workload(6, 4, 256, seed=1) == make_workload(6, 4, 256, seed=1)
    assert make_workload(6, 4, 256, seed=1) != make_workload(6, 4, 256, seed=2)


def test_turns_of_one_context_share_its_text_and_no_other_contexts() -> None:
    turns = make_workload(12, 5, 256, seed=0)
    texts = {turn.context_id: turn.context for turn in turns}
    assert all(turn.context == texts[turn.context_id] for turn in turns)
    assert len(set(texts.values())) == len(texts) == 12
    assert {turn.family for turn in turns} == set(FAMILIES)


@pytest.mark.parametrize("zipf", [0.0, 0.7, 1.0, 2.0])
def test_a_workload_has_all_its_turns_and_forgets_no_context(zipf: float) -> None:
    turns = make_workload(10, 6, 128, seed=0, zipf=zipf)
    assert len(turns) == 60
    assert {turn.context_id for turn in turns} == set(range(10))


def test_popular_contexts_come_back_more_often_the_larger_zipf_is() -> None:
    def most_asked(zipf: float) -> int:
        turns = make_workload(10, 8, 128, seed=0, zipf=zipf)
        return Counter(turn.context_id for turn in turns).most_common(1)[0][1]

    assert most_asked(0.0) == 8
    assert most_asked(0.0) < most_asked(0.5) < most_asked(1.0) < most_asked(2.0)


def test_questions_of_one_context_are_interleaved_with_others() -> None:
    turns = make_workload(8, 8, 128, seed=0, zipf=0.0)
    returns = sum(a.context_id == b.context_id for a, b in zip(turns, turns[1:], strict=False))
    assert returns < len(turns) / 3


def test_a_context_asks_all_its_questions_before_it_repeats_one() -> None:
    turns = make_workload(1, 8, 512, seed=0, families=["needle"])
    asked = Counter(turn.question for turn in turns)
    assert sorted(asked.values()) == [2, 2, 2, 2]


def test_chat_and_raw_prompt_are_the_same_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    for turn in make_workload(9, 1, 128, seed=0):
        chat = tokenizer.apply_chat_template(turn.messages, tokenize=False, add_generation_prompt=True)
        raw = tokenizer(turn.prompt, add_special_tokens=True)["input_ids"]
        assert tokenizer(chat, add_special_tokens=False)["input_ids"] == raw
        assert tokenizer.decode(raw[:1]) == "<bos>"
        assert len(raw) == 128 + 1 + len(turn.question.split())


@pytest.mark.parametrize(
    ("num_contexts", "questions", "zipf", "families"),
    [(0, 1, 1.0, None), (1, 0, 1.0, None), (1, 1, -1.0, None), (1, 1, 1.0, ["top"])],
)
def test_a_workload_that_makes_no_sense_is_refused(
    num_contexts: int, questions: int, zipf: float, families: list[str] | None
) -> None:
    with pytest.raises(ValueError):
        make_workload(num_contexts, questions, 128, seed=0, zipf=zipf, families=families)
