"""The testbed's contexts: exact lengths, reproducible, and every answer follows from the context alone."""

from __future__ import annotations

import random
import re

import pytest
from evicbench.testbed.tasks import FAMILIES, MIN_CONTEXT_TOKENS, Context, make_context
from evicbench.testbed.vocabulary import ASK, EOS, KEYWORDS, MODEL_DIR, load_vocabulary
from tokenizers import Tokenizer

LENGTHS = (MIN_CONTEXT_TOKENS, 131, 512, 1024, 2048)
_WORD = r"(\S+)"


def context_of(family: str, num_tokens: int, seed: int = 0) -> Context:
    return make_context(family, num_tokens, random.Random(seed))


def solve(text: str, question: str) -> set[str]:
    """All answers that the text supports, found by patterns and not by how the text was made."""
    if question.startswith("code boss "):
        employee = question.removeprefix("code boss ")
        return {
            f"{boss} {code}"
            for boss in re.findall(rf"\bboss {employee} {_WORD} \.", text)
            for code in solve(text, f"code {boss}")
        }
    end = ";" if question.startswith("->") else "."
    return set(re.findall(rf"(?:^| ){re.escape(question)} ([^.;]+) {re.escape(end)}", text))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_every_question_has_the_one_answer_that_its_context_supports(family: str, num_tokens: int) -> None:
    for seed in range(5):
        context = context_of(family, num_tokens, seed)
        assert context.questions
        for question, answer in context.questions:
            assert solve(context.text, question) == {answer}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_context_has_exactly_the_asked_number_of_tokens(family: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    for num_tokens in (*LENGTHS, *range(200, 220)):
        context = context_of(family, num_tokens)
        assert len(context.tokens) == num_tokens
        assert len(tokenizer.encode(f"<bos> {context.text}").ids) == num_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_context_and_another_seed_another(family: str) -> None:
    assert context_of(family, 512, seed=3) == context_of(family, 512, seed=3)
    assert context_of(family, 512, seed=3) != context_of(family, 512, seed=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_context_and_question_tokenize_apart_as_they_do_together(family: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    vocabulary = load_vocabulary()
    unknown = vocabulary.ids["<unk>"]
    context = context_of(family, 512)
    for question, answer in context.questions:
        together = tokenizer.encode(context.prompt(question)).ids
        apart = [tokenizer.encode(part).ids for part in (" ".join(context.tokens), f"{ASK} {question}")]
        assert together == apart[0] + apart[1] == vocabulary.encode(context.prompt(question))
        assert unknown not in together
        assert unknown not in vocabulary.encode(f"{answer} {EOS}")


def test_word_classes_are_disjoint_and_of_the_sizes_the_model_was_trained_with() -> None:
    words = load_vocabulary()
    classes = (words.names, words.values, words.nouns, words.verbs, words.colours)
    assert [len(members) for members in classes] == [200, 128, 96, 24, 16]
    assert len(set().union(*classes)) == 200 + 128 + 96 + 24 + 16
    assert not KEYWORDS & set().union(*classes)
    assert set(words.ids.values()) == set(range(512))


@pytest.mark.parametrize(
    ("family", "num_questions"),
    [("needle", 4), ("multikv", 51), ("redundant", 4), ("hop", 8), ("record", 16), ("title", 1), ("note", 1)],
)
def test_a_context_of_512_tokens_holds_the_familys_usual_number_of_questions(family: str, num_questions: int) -> None:
    assert len(context_of(family, 512).questions) == num_questions


def test_redundant_contexts_repeat_every_fact_and_needles_do_not() -> None:
    redundant, needle = context_of("redundant", 1024), context_of("needle", 1024)
    assert all(redundant.text.count(f"{q} {a} .") >= 10 for q, a in redundant.questions)
    assert all(needle.text.count(f"{q} {a} .") == 1 for q, a in needle.questions)


def test_a_title_opens_its_context_and_a_note_closes_it() -> None:
    assert context_of("title", 515).text.startswith("title : ")
    assert re.search(r"note : [^.]+ \.$", context_of("note", 515).text)


def test_mixed_contexts_ask_every_kind_of_question() -> None:
    kinds = {question.split()[0] for question, _ in context_of("mixed", 1024).questions}
    assert kinds == {"code", "log", "->", "title", "note"}
    assert any(question.startswith("code boss ") for question, _ in context_of("mixed", 1024).questions)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_context_at_the_models_longest_length_still_finds_names(family: str) -> None:
    assert len(context_of(family, 4096).tokens) == 4096


def test_a_context_too_short_to_hold_a_fact_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 64 tokens, not 63"):
        context_of("needle", 63)


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown family 'top'"):
        context_of("top", 512)
