"""Contexts to profile, from a file of JSON lines.

A line is an object: ``{"context": TEXT, "questions": [TEXT or {"question": TEXT, "answer": TEXT}, ...], "extra_key":
TEXT, "id": TEXT}``, all but ``context`` optional. Blank lines are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import orjson


@dataclass(frozen=True, slots=True)
class GivenQuestion:
    """``answer`` is the reference answer, where one is known."""

    text: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class GivenContext:
    """``namespace`` is the ``extra_key`` that users' requests with this context carry. ``id`` names it in reports:
    ``line 3`` when the file says nothing. Without ``questions``, they are to be made."""

    id: str
    text: str
    questions: tuple[GivenQuestion, ...] = ()
    namespace: str | None = None


def read_contexts(path: Path) -> list[GivenContext]:
    """All of them. Raises ValueError, one sentence with the line, for what is wrong, given twice or not there."""
    contexts: list[GivenContext] = []
    lines_of: dict[bytes | str, int] = {}
    for number, line in _lines(path):
        where = f"{path} line {number}"
        context = _context(where, number, line)
        digest = sha256(repr((context.namespace, context.text)).encode("utf-8", "surrogatepass")).digest()
        for seen, what in ((digest, "context and extra_key"), (context.id, f"id {context.id!r:.100}")):
            if (earlier := lines_of.setdefault(seen, number)) != number:
                raise ValueError(f"{where} has the same {what} as line {earlier}: expected every one once")
        contexts.append(context)
    if not contexts:
        raise ValueError(f"{path} has no context: expected at least one line with a JSON object")
    return contexts


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered from 1, the blank ones left out."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                stripped = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
                if stripped:
                    yield number, stripped
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): expected a file of JSON lines") from None


_ACCEPTED = {"context", "questions", "extra_key", "id"}


def _context(where: str, number: int, line: bytes) -> GivenContext:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        shown = line[:60].decode("utf-8", "replace")
        raise ValueError(f"{where} is {shown!r}, which is no JSON ({error.msg}): expected one object") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r:.100}: expected an object with context and questions")
    if unknown := sorted(set(value) - _ACCEPTED):
        raise ValueError(f"{where} has {', '.join(unknown)!r:.100}: expected only {', '.join(sorted(_ACCEPTED))}")
    questions = value.get("questions", [])
    if not isinstance(questions, list):
        raise ValueError(f"{where} has questions {questions!r:.100}: expected a list")
    return GivenContext(
        id=_text(where, "id", value.get("id", f"line {number}")),
        text=_text(where, "context", value.get("context")),
        questions=_unique(where, [_question(where, place, given) for place, given in enumerate(questions, start=1)]),
        namespace=None if value.get("extra_key") is None else _text(where, "extra_key", value["extra_key"]),
    )


def _question(where: str, place: int, given: object) -> GivenQuestion:
    name = f"question {place}"
    if not isinstance(given, Mapping):
        return GivenQuestion(_text(where, name, given))
    if not {"question"} <= set(given) <= {"question", "answer"}:
        raise ValueError(f"{where} has {name} {given!r:.100}: expected a string, or an object with question and answer")
    answer = given.get("answer")
    return GivenQuestion(
        _text(where, name, given["question"]),
        None if answer is None else _text(where, f"the answer to {name}", answer),
    )


def _unique(where: str, questions: list[GivenQuestion]) -> tuple[GivenQuestion, ...]:
    places: dict[str, int] = {}
    for place, question in enumerate(questions, start=1):
        if (earlier := places.setdefault(question.text, place)) != place:
            raise ValueError(f"{where} has question {place} equal to question {earlier}: expected every one once")
    return tuple(questions)


def _text(where: str, name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} has {name} {value!r:.100}: expected a string that is not empty")
    return value
