"""Questions that were made once, kept in a folder: one file for each text and way to make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import orjson

from sglang_evicpress.files import write_whole
from sglang_evicpress.profiler.contexts import GivenQuestion


def make_folder(folder: Path) -> None:
    """Make it where it is missing. Raises ValueError when nothing can be written there."""
    try:
        folder.mkdir(exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"the questions made cannot be kept in {str(folder)!r} ({error.strerror}): expected --contexts in a "
            "folder that can be written to"
        ) from None


def kept_questions(
    folder: Path,
    settings: Sequence[object],
    make: Callable[[str], list[GivenQuestion]],
    text: str,
    *,
    is_read: bool,
) -> list[GivenQuestion]:
    """Questions that ``make`` makes about a ``text``; ``settings`` are all that they depend on besides it. What is kept
    in ``folder`` is only used where ``is_read``, and always replaced by what is made.

    Raises what ``make`` raises, and ValueError when the questions cannot be kept.
    """
    asked = repr((*settings, text)).encode("utf-8", "surrogatepass")
    path = folder / f"{sha256(asked).hexdigest()[:32]}.json"
    if is_read and (kept := _read(path)):
        return kept
    made = make(text)
    records = [{"question": question.text, "answer": question.answer} for question in made]
    try:
        write_whole(str(path), orjson.dumps(records) + b"\n")
    except (OSError, orjson.JSONEncodeError) as error:
        raise ValueError(f"the questions made cannot be kept as {str(path)!r}: {error}") from None
    return made


def _read(path: Path) -> list[GivenQuestion]:
    """Nothing when there is no such file, or it is none of ours: then the questions are made again."""
    try:
        return [GivenQuestion(str(record["question"]), record["answer"]) for record in orjson.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError, KeyError):
        return []
