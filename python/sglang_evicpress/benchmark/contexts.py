"""The contexts that are asked about: read from a file, or from what a command prints.

A line is a JSON object: ``{"context": TEXT, "questions": [{"question": TEXT, "answer": TEXT or null}, ...], "family":
TEXT or null, "tokens": NUMBER or null}``; a question may be a bare text, and the last two may be left out.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import orjson

from sglang_evicpress.benchmark.config import Config, Source
from sglang_evicpress.files import WholeFile

DEFAULT_FAMILY = "all"
_KEYS = {"context", "questions", "family", "tokens"}
_NUM_ERROR_LINES = 5


@dataclass(frozen=True, slots=True)
class Question:
    """``answer`` is the true one, where it is known."""

    text: str
    answer: str | None


@dataclass(frozen=True, slots=True)
class Context:
    """``tokens`` as the file says, or the model's tokenizer counts them."""

    text: str
    questions: tuple[Question, ...]
    family: str
    tokens: int


def load_contexts(config: Config, folder: Path) -> list[Context]:
    """All that are not too long. What a command prints is kept in ``folder`` and not made again. Raises ValueError."""
    path = config.contexts.file if config.contexts.file is not None else _printed(config.contexts, folder)
    try:
        with path.open("rb") as file:
            found = list(parse_contexts(str(path), file))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): expected a file of JSON lines") from None
    contexts = _counted(config, found)
    chosen = [context for context in contexts if config.tokens is None or context.tokens <= config.tokens]
    if not contexts:
        raise ValueError(f"{path} is empty: expected at least one context")
    if not chosen:
        shortest = min(context.tokens for context in contexts)
        raise ValueError(f"{path} has no context of at most {config.tokens} tokens, the shortest has {shortest}")
    num_training = 0 if config.profiles is None else config.profiles.questions
    for number, context in enumerate(chosen, start=1):
        if len(context.questions) <= num_training:
            raise ValueError(
                f"{path}: context {number} of those used has {len(context.questions)} questions, and the first "
                f"{num_training} are for profiling: expected more"
            )
    return chosen


def parse_contexts(where: str, lines: Iterable[bytes]) -> Iterator[Context]:
    """One for each line that is not blank, with 0 tokens where the line says nothing. Raises ValueError."""
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        context = _context(f"{where} line {number}", line)
        if (earlier := seen.setdefault(context.text, number)) != number:
            raise ValueError(f"{where} line {number} has the context of line {earlier}: expected every one once")
        yield context


def _counted(config: Config, contexts: Sequence[Context]) -> list[Context]:
    counter: Callable[[str], int] | None = None
    counted = []
    for context in contexts:
        if not context.tokens:
            if counter is None:
                from sglang_evicpress.benchmark.model import make_counter

                counter = make_counter(config)
            context = replace(context, tokens=counter(context.text))
        counted.append(context)
    return counted


def _printed(source: Source, folder: Path) -> Path:
    """The file with what the command printed, now or the last time; its name tells commands apart."""
    digest = sha256(repr((source.command, str(source.folder))).encode()).hexdigest()[:16]
    path = folder / f"contexts-{digest}.jsonl"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    words = " ".join(source.command)
    with WholeFile(str(path)) as file:
        try:
            done = subprocess.run(
                source.command,
                stdout=file.stream,
                stderr=subprocess.PIPE,
                cwd=source.folder,
                env=os.environ,
                check=False,
            )
        except OSError as error:
            raise ValueError(f"contexts: {words!r} cannot be run in {source.folder} ({error.strerror})") from None
        if done.returncode:
            last = " / ".join(done.stderr.decode("utf-8", "replace").splitlines()[-_NUM_ERROR_LINES:])
            raise ValueError(f"contexts: {words!r} in {source.folder} ended with {done.returncode}: {last}")
        file.commit()
    return path


def _context(where: str, line: bytes) -> Context:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON ({error.msg}): expected an object with context and questions") from None
    if not isinstance(value, Mapping) or not {"context", "questions"} <= set(value) <= _KEYS:
        keys = ", ".join(value) if isinstance(value, Mapping) else repr(value)
        raise ValueError(f"{where} has {keys:.100}: expected context and questions, and at most family and tokens")
    given = value["questions"]
    if not isinstance(given, list) or not given:
        raise ValueError(f"{where} has questions {given!r:.100}: expected a list of at least one")
    questions = tuple(_question(f"{where} question {place}", each) for place, each in enumerate(given, start=1))
    if len({question.text for question in questions}) < len(questions):
        raise ValueError(f"{where} has a question twice: expected every one once")
    tokens = value.get("tokens")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise ValueError(f"{where} has tokens {tokens!r:.100}: expected a whole number of at least 1, or null")
    family = value.get("family")
    return Context(
        text=_text(f"{where} context", value["context"]),
        questions=questions,
        family=DEFAULT_FAMILY if family is None else _text(f"{where} family", family),
        tokens=tokens or 0,
    )


def _question(where: str, given: object) -> Question:
    if not isinstance(given, Mapping):
        return Question(_text(where, given), None)
    if not {"question"} <= set(given) <= {"question", "answer"}:
        raise ValueError(f"{where} is {dict(given)!r:.100}: expected a text, or an object with question and answer")
    answer = given.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"{where} has answer {answer!r:.100}: expected a text or null")
    return Question(_text(where, given["question"]), answer)


def _text(where: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} is {value!r:.100}: expected a text that is not empty")
    return value
