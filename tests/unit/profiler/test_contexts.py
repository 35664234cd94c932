"""Files of contexts: what is read, and what is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_evicpress.profiler.contexts import GivenContext, GivenQuestion, read_contexts


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "contexts.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes("\n".join(text).encode())
    return path


def test_every_field_is_read_and_all_but_the_context_may_be_left_out(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "id": "contract",
            "context": "The rent is 9.\nIt is due monthly.",
            "extra_key": "tenant-1",
            "questions": [
                "What is the rent?",
                {"question": "When is it due?", "answer": "monthly"},
                {"question": "Why?"},
            ],
        },
        {"context": "Only this.", "extra_key": None, "questions": [{"question": "What?", "answer": None}]},
        {"context": " \u6771\u4eac "},
    )
    assert read_contexts(path) == [
        GivenContext(
            "contract",
            "The rent is 9.\nIt is due monthly.",
            (GivenQuestion("What is the rent?"), GivenQuestion("When is it due?", "monthly"), GivenQuestion("Why?")),
            "tenant-1",
        ),
        GivenContext("line 2", "Only this.", (GivenQuestion("What?"),)),
        GivenContext("line 3", " \u6771\u4eac "),
    ]


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_are_no_error_and_count(tmp_path: Path) -> None:
    path = written(tmp_path, '\ufeff{"context": "one"}\r', "", "  ", '{"context": "two"}\r', "")
    assert [(context.id, context.text) for context in read_contexts(path)] == [("line 1", "one"), ("line 4", "two")]


def test_the_same_text_in_two_namespaces_is_two_contexts(tmp_path: Path) -> None:
    path = written(tmp_path, {"context": "same"}, {"context": "same", "extra_key": "b"})
    assert [context.namespace for context in read_contexts(path)] == [None, "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{context: 1}", r"is '\{context: 1\}', which is no JSON \(.*\): expected one object"),
        ('{"context": "cut', "which is no JSON"),
        ("\x28\udcb5\udcff", "which is no JSON"),
        ([1, 2], r"is \[1, 2\]: expected an object with id, context, questions, extra_key"),
        ({}, "has no context: expected a string that is not empty"),
        ({"context": " \n"}, "context is .*: expected a string that is not empty"),
        ({"context": 7}, "context is 7: expected a string"),
        (
            {"context": "a", "question": "b?"},
            "has the unknown key 'question': expected id, context, questions, extra_key",
        ),
        ({"context": "a", "questions": "b?"}, "questions is 'b\\?': expected a list"),
        ({"context": "a", "questions": ["b?", ""]}, "questions has no question: expected a string that is not empty"),
        ({"context": "a", "questions": [None]}, "questions is .None.: expected a list of texts, or objects"),
        ({"context": "a", "questions": [{"answer": "b"}]}, "questions has no question: expected a string"),
        (
            {"context": "a", "questions": [{"question": "b?", "answers": []}]},
            "has the unknown key 'answers': expected question, answer",
        ),
        ({"context": "a", "questions": [{"question": 3}]}, "questions: question is 3: expected a string"),
        ({"context": "a", "questions": [{"question": "b?", "answer": 3}]}, "questions: answer is 3: expected"),
        ({"context": "a", "questions": ["b?", {"question": "b?"}]}, "expected a list of .*, every question once"),
        ({"context": "a", "extra_key": ""}, "extra_key is '': expected a string that is not empty"),
        ({"context": "a", "id": 3}, "id is 3: expected a string"),
        ({"context": "first"}, "has the same context and extra_key as line 1: expected every one once"),
        ({"context": "a", "id": "one"}, "has the same id 'one' as line 1: expected every one once"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path: Path, line: object, message: str) -> None:
    path = tmp_path / "contexts.jsonl"
    wrong = line if isinstance(line, str) else json.dumps(line)
    path.write_bytes(b'{"context": "first", "id": "one"}\n\n' + wrong.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(ValueError, match=message) as refused:
        read_contexts(path)
    assert str(refused.value).startswith(f"{path} line 3")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_a_file_without_contexts_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "contexts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="has no context: expected at least one line with a JSON object"):
        read_contexts(path)


def test_a_file_that_cannot_be_read_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent.jsonl cannot be read \(No such file or directory\)"):
        read_contexts(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\)"):
        read_contexts(tmp_path)
