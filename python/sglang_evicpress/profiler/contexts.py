"""Contexts to profile, from a file of JSON lines.

A line is an object: ``{"context": TEXT, "questions": [TEXT or {"question": TEXT, "answer": TEXT}, ...], "extra_key":
TEXT, "id": TEXT}``, all but ``context`` optional. Blank lines are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import orjson
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from sglang_evicpress.validation import checked, fields_of

CHECKED = ConfigDict(extra="forbid", validate_by_name=True, validate_by_alias=True)
_TEXT = "a string that is not empty"


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("nothing is in it")
    return text


def _asked(value: object) -> object:
    """A list of questions, each of which may be a bare text."""
    if not isinstance(value, list):
        return value
    return tuple({"question": each} if isinstance(each, str) else each for each in value)


def _distinct(questions: tuple[GivenQuestion, ...]) -> tuple[GivenQuestion, ...]:
    if len({question.text for question in questions}) < len(questions):
        raise ValueError("a question is there twice")
    return questions


Text = Annotated[str, AfterValidator(_not_blank)]


@dataclass(frozen=True, slots=True, config=CHECKED)
class GivenQuestion:
    """``answer`` is the reference answer, where one is known."""

    text: Text = Field(alias="question", title=_TEXT)
    answer: str | None = Field(None, title="a text or null")


Questions = Annotated[tuple[GivenQuestion, ...], BeforeValidator(_asked), AfterValidator(_distinct)]


@dataclass(frozen=True, slots=True, config=CHECKED)
class GivenContext:
    """``namespace`` is the ``extra_key`` that users' requests with this context carry. ``id`` names it in reports:
    ``line 3`` when the file says nothing. Without ``questions``, they are to be made."""

    id: Text = Field(title=_TEXT)
    text: Text = Field(alias="context", title=_TEXT)
    questions: Questions = Field((), title="a list of texts, or objects with question and answer, every question once")
    namespace: Text | None = Field(None, alias="extra_key", title=f"{_TEXT}, or null")


def read_contexts(path: Path) -> list[GivenContext]:
    """All of them. Raises ValueError, one sentence with the line, for what is wrong, given twice or not there."""
    contexts: list[GivenContext] = []
    lines_of: dict[bytes | str, int] = {}
    for number, line in _lines(path):
        where = f"{path} line {number}"
        context = checked(GivenContext, {"id": f"line {number}", **read_object(GivenContext, line, where)}, where)
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


def read_object(kind: type, line: bytes, where: str) -> Mapping[str, object]:
    """The JSON object in a line that is to become a ``kind``. Raises ValueError."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        shown = line[:60].decode("utf-8", "replace")
        raise ValueError(f"{where} is {shown!r}, which is no JSON ({error.msg}): expected one object") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r:.100}: expected an object with {', '.join(fields_of(kind))}")
    return value
