"""Contexts with questions: read, counted, printed by a command once, and generated of the testbed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from evicbench.testbed.contexts import generate, line
from evicbench.testbed.tasks import FAMILIES, ONE_QUESTION
from evicbench.testbed.vocabulary import ASK, BOS, load_vocabulary
from transformers import AutoTokenizer

from sglang_evicpress.benchmark.config import Config, load_config
from sglang_evicpress.benchmark.contexts import Context, load_contexts, parse_contexts
from sglang_evicpress.profiler.contexts import GivenQuestion as Question

MODEL = Path(__file__).parents[3] / "bench" / "evicbench" / "testbed" / "model"
MANY = tuple(family for family in FAMILIES if family not in ONE_QUESTION)


def config_of(folder: Path, contexts: object, **values: object) -> Config:
    given = {"model": str(MODEL), "contexts": contexts, "requests": 1, "memory": {"gpu": 1}, **values}
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(given))
    return load_config(path)


def from_lines(folder: Path, *lines: object, **values: object) -> list[Context]:
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return load_contexts(config_of(folder, {"file": "in.jsonl"}, **values), folder / "out")


def test_a_line_is_a_context_with_questions(tmp_path: Path) -> None:
    found = from_lines(
        tmp_path,
        {
            "context": "a b",
            "questions": ["q", {"question": "r", "answer": None}, {"question": "s", "answer": "t"}],
            "family": "f",
            "tokens": 9,
        },
    )
    assert found == [Context("a b", (Question("q", None), Question("r", None), Question("s", "t")), "f", 9)]


def test_tokens_are_counted_where_the_file_does_not_say_them(tmp_path: Path) -> None:
    words = "code bova v0 s7 f4 s6 ."
    given = [{"context": words, "questions": ["q"]}, {"context": "code", "questions": ["q"], "tokens": 70}]
    counted, told = from_lines(tmp_path, *given)
    assert (counted.tokens, told.tokens, counted.family) == (7, 70, "all")


def test_long_contexts_are_left_out(tmp_path: Path) -> None:
    lines = [{"context": str(tokens), "questions": ["q"], "tokens": tokens} for tokens in (50, 51, 10)]
    assert [context.tokens for context in from_lines(tmp_path, *lines, tokens=50)] == [50, 10]
    with pytest.raises(ValueError, match="no context of at most 9 tokens, the shortest has 10"):
        from_lines(tmp_path, *lines, tokens=9)


def test_a_question_is_left_to_ask_besides_those_of_profiling(tmp_path: Path) -> None:
    lines = [{"context": "a", "questions": ["q", "r"], "tokens": 5}]
    assert len(from_lines(tmp_path, *lines, profiles={"questions": 1})) == 1
    with pytest.raises(ValueError, match="context 1 of those used has 2 questions, and the first 2 are for profiling"):
        from_lines(tmp_path, *lines, profiles={"questions": 2})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "in line 1 is .{., which is no JSON"),
        ("[]", r"in line 1 is \[\]: expected an object with context, questions"),
        ('{"context": "a"}', "line 1 has no questions: expected a list of at least one"),
        (
            '{"context": "a", "questions": ["q"], "id": 1}',
            "line 1 has the unknown key 'id': expected context, questions",
        ),
        ('{"context": " ", "questions": ["q"]}', "line 1: context is ' ': expected a text"),
        ('{"context": "a", "questions": []}', r"line 1: questions is \[\]: expected a list of at least one"),
        ('{"context": "a", "questions": [3]}', r"line 1: questions is \[3\]: expected a list of at least one text"),
        ('{"context": "a", "questions": ["q", {"q": 1}]}', "line 1: questions has .*question"),
        (
            '{"context": "a", "questions": [{"question": "q", "answer": 1}]}',
            "line 1: questions: answer is 1: expected a text",
        ),
        ('{"context": "a", "questions": ["q", "q"]}', r"line 1: questions is \['q', 'q'\]: expected .* every one once"),
        ('{"context": "a", "questions": ["q"], "tokens": 0}', "line 1: tokens is 0: expected a whole number"),
        ('{"context": "a", "questions": ["q"], "tokens": true}', "line 1: tokens is True: expected a whole number"),
        ('{"context": "a", "questions": ["q"], "family": ""}', "line 1: family is '': expected a text"),
        ('\n{"context": "a", "questions": ["q"]}\n{"context": "a", "questions": ["r"]}', "line 3 has the context of"),
    ],
)
def test_a_line_that_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(parse_contexts("in", text.encode().splitlines()))


def test_a_file_without_a_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in.jsonl is empty"):
        from_lines(tmp_path)


COUNTING = """
import json, pathlib
file = pathlib.Path("count")
file.write_text(file.read_text() + "x" if file.exists() else "x")
print(json.dumps({"context": "a", "questions": ["q"], "tokens": 4}))
"""


def test_a_command_runs_once_in_its_folder(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"command": ["python", "-c", COUNTING]})
    first = load_contexts(config, tmp_path / "out")
    assert load_contexts(config, tmp_path / "out") == first and first[0].tokens == 4
    assert (tmp_path / "count").read_text() == "x"
    load_contexts(config_of(tmp_path, {"command": ["python", "-c", COUNTING + "#"]}), tmp_path / "out")
    assert (tmp_path / "count").read_text() == "xx"  # another command


def test_a_command_that_fails_leaves_nothing_to_read(tmp_path: Path) -> None:
    code = "import sys; print('{}'); print('why', file=sys.stderr); sys.exit(3)"
    for _ in range(2):
        with pytest.raises(ValueError, match="ended with 3: why"):
            load_contexts(config_of(tmp_path, {"command": [sys.executable, "-c", code]}), tmp_path / "out")
    with pytest.raises(ValueError, match="'no-such-program' cannot be run in"):
        load_contexts(config_of(tmp_path, {"command": ["no-such-program"]}), tmp_path / "out")


def test_the_testbed_makes_contexts_of_every_family_and_length(tmp_path: Path) -> None:
    made = list(generate(2 * len(MANY), (400, 600), 6, 0, MANY))
    assert [context.family for context in made] == [*MANY, *MANY]
    assert [len(context.tokens) for context in made] == [400] * len(MANY) + [600] * len(MANY)
    assert made == list(generate(2 * len(MANY), (400, 600), 6, 0, MANY))
    assert made != list(generate(2 * len(MANY), (400, 600), 6, 1, MANY))
    with pytest.raises(ValueError, match="a context of family title and 400 tokens has 1 questions: expected 6"):
        list(generate(1, (400,), 6, 0, ("title",)))


def test_what_the_testbed_prints_can_be_read_and_says_its_tokens() -> None:
    encode = load_vocabulary().encode
    made = list(generate(len(MANY), (500,), 6, 3, MANY))
    read = list(parse_contexts("it", [line(context, 6).encode() for context in made]))
    for context, again in zip(made, read, strict=True):
        assert again.family == context.family and len(again.questions) == 6
        assert again.tokens == 500 == len(encode("<bos> " + again.text))
        assert all(each.answer and set(each.answer.split()) <= set(again.text.split()) for each in again.questions)


def test_the_chat_template_writes_the_first_token_of_a_context() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for context in generate(7, [128], 1, 0, MANY):
        text = f"{context.text} {ASK} {context.questions[0].text}"
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        tokens = tokenizer(chat, add_special_tokens=False)["input_ids"]
        assert tokens == tokenizer(f"{BOS} {text}", add_special_tokens=True)["input_ids"]
        assert len(tokens) == 128 + 1 + len(context.questions[0].text.split())
