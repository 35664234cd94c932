"""The contexts that are asked about: read from a file, or from what a command prints.

A line is a JSON object: ``{"context": TEXT, "questions": [{"question": TEXT, "answer": TEXT or null}, ...], "family":
TEXT or null, "tokens": NUMBER or null}``; a question may be a bare text, and the last two may be left out.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from pydantic import Field
from pydantic.dataclasses import dataclass

from sglang_evicpress.benchmark.config import Config, Source
from sglang_evicpress.files import WholeFile
from sglang_evicpress.profiler.contexts import CHECKED, Questions, Text, read_object
from sglang_evicpress.validation import checked

DEFAULT_FAMILY = "all"
_NUM_ERROR_LINES = 5


@dataclass(frozen=True, slots=True, config=CHECKED)
class Context:
    """``tokens`` as the file says, or the model's tokenizer counts them; 0 until then."""

    text: Text = Field(alias="context", title="a text that is not empty")
    questions: Questions = Field(
        title="a list of at least one text, or object with question and answer, every one once", min_length=1
    )
    family: Text = Field(DEFAULT_FAMILY, title="a text that is not empty")
    tokens: int = Field(0, title="a whole number of at least 1, or null", ge=1, strict=True)


def load_contexts(config: Config, folder: Path) -> list[Context]:
    """All that are not too long. What a command prints is kept in ``folder`` and not made again. Raises ValueError."""
    source, limit = config.workload.contexts, config.workload.tokens
    path = source.file if source.file is not None else _printed(source, folder)
    try:
        with path.open("rb") as file:
            contexts = _counted(config, list(parse_contexts(str(path), file)))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): expected a file of JSON lines") from None
    chosen = [context for context in contexts if limit is None or context.tokens <= limit]
    if not contexts:
        raise ValueError(f"{path} is empty: expected at least one context")
    if not chosen:
        shortest = min(context.tokens for context in contexts)
        raise ValueError(f"{path} has no context of at most {limit} tokens, the shortest has {shortest}")
    for number, context in enumerate(chosen, start=1):
        if len(context.questions) <= config.num_training:
            raise ValueError(
                f"{path}: context {number} of those used has {len(context.questions)} questions, and the first "
                f"{config.num_training} are for profiling: expected more"
            )
    return chosen


def parse_contexts(where: str, lines: Iterable[bytes]) -> Iterator[Context]:
    """One for each line that is not blank, with 0 tokens where the line says nothing. Raises ValueError."""
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        here = f"{where} line {number}"
        values = read_object(Context, line, here)
        context = checked(Context, {name: value for name, value in values.items() if value is not None}, here)
        if (earlier := seen.setdefault(context.text, number)) != number:
            raise ValueError(f"{here} has the context of line {earlier}: expected every one once")
        yield context


def _counted(config: Config, contexts: Sequence[Context]) -> list[Context]:
    if all(context.tokens for context in contexts):
        return list(contexts)
    from sglang_evicpress.benchmark.model import make_counter

    count = make_counter(config)
    return [context if context.tokens else replace(context, tokens=count(context.text)) for context in contexts]


def _printed(source: Source, folder: Path) -> Path:
    """The file with what the command printed, now or the last time; its name tells commands apart."""
    digest = sha256(repr((source.arguments, str(source.folder))).encode()).hexdigest()[:16]
    path = folder / f"contexts-{digest}.jsonl"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    words = " ".join(source.arguments)
    with WholeFile(str(path)) as file:
        try:
            done = subprocess.run(
                source.arguments,
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
