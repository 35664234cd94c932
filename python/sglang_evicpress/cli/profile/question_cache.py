"""Questions that were made once, kept in a folder: one file for each text and way to make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import orjson

from sglang_evicpress.files import write_whole
from sglang_evicpress.profiler.contexts import GivenQuestion


class QuestionCache:
    """``make`` makes questions about a text; ``settings`` are all that they depend on besides it. What is kept in
    ``folder`` is only used where ``is_read``, and always replaced by what is made.
    """

    def __init__(
        self,
        folder: Path,
        settings: Sequence[object],
        make: Callable[[str], list[GivenQuestion]],
        *,
        is_read: bool,
    ) -> None:
        """Makes the folder. Raises ValueError when nothing can be written there."""
        self._folder, self._settings, self._make, self._is_read = folder, settings, make, is_read
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

    def of(self, text: str) -> list[GivenQuestion]:
        """Raises what ``make`` raises, and ValueError when the questions cannot be kept."""
        asked = repr((*self._settings, text)).encode("utf-8", "surrogatepass")
        path = self._folder / f"{sha256(asked).hexdigest()[:32]}.json"
        if self._is_read and (kept := _read(path)):
            return kept
        made = self._make(text)
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
