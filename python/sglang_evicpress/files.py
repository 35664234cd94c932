"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import orjson


def check_output(path: str, inputs: Mapping[str, str]) -> None:
    """Raise ValueError, before work is done, if no file can be written to ``path``, or ``inputs`` name it by another
    flag."""
    real = Path(path).resolve()
    for flag, other in inputs.items():
        if real == Path(other).resolve():
            raise ValueError(f"{path!r} is also {flag}: expected a file of its own")
    with WholeFile(path):
        pass  # it can be written


def read_text(path: str | Path, where: str, expected: str) -> str:
    """Content of a file in UTF-8. Raises ValueError, one sentence about ``where`` that says what is expected."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{where} does not exist: expected {expected}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read ({error}): expected {expected}") from None


def read_json(path: str, where: str, *, file: str = "a JSON file", content: str = "JSON") -> object:
    """Content of a JSON file. Raises ValueError as ``read_text``, and where it is no JSON or an object of it has a name
    twice."""
    text = read_text(path, where, file)
    repeated: list[str] = []

    def as_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
        repeated.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        content_read = json.loads(text, object_pairs_hook=as_object)
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise ValueError(f"{where} is not JSON ({error}): expected {content}") from None
    if repeated:
        raise ValueError(f"{where} has {repeated[0]!r} more than once: expected every name once")
    return content_read


def write_whole(path: str, data: bytes) -> None:
    """Write ``data`` beside ``path`` and rename it there; through a link, what it leads to is replaced. Raises as
    WholeFile."""
    with WholeFile(path) as file:
        file.stream.write(data)
        file.commit()


class WholeFile:
    """A file written beside ``path`` and renamed over it by ``commit``; until then ``path`` is left alone.

    ``stream`` takes its bytes. Opening it finds out whether the path can be written; through a link, what it leads to
    is. Left without ``commit``, it leaves nothing behind. ValueError for a path in a folder that is missing or cannot
    be written to, and for one that is something else than a file: renaming would put a file in the place of a device.
    """

    def __init__(self, path: str) -> None:
        try:
            self.path = Path(path).resolve()
            if self.path.is_dir():
                raise ValueError(f"{path!r} is a directory: expected the path of a file")
            if self.path.exists() and not self.path.is_file():
                raise ValueError(f"{path!r} is a device, a pipe or a socket: expected the path of a file")
            if not self.path.parent.is_dir():
                raise ValueError(f"{path!r}: the folder {str(Path(path).parent)!r} does not exist")
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".evicpress.")
        except RuntimeError:  # what Path says of it
            raise ValueError(f"{path!r} cannot be written: its links lead in a circle") from None
        except OSError as error:
            raise ValueError(f"{path!r} cannot be written: {error.strerror or error}") from None
        self._temporary = Path(name)
        self.stream = os.fdopen(handle, "wb")

    def write(self, record: Mapping[str, object]) -> None:
        """Add one object as a line of JSON."""
        self.stream.write(orjson.dumps(record) + b"\n")

    def commit(self) -> None:
        """Put the file in its place."""
        self.stream.close()
        umask = os.umask(0)
        os.umask(umask)
        self._temporary.chmod(0o666 & ~umask)  # mkstemp makes it private; this is a file like any other
        self._temporary.replace(self.path)

    def __enter__(self) -> WholeFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self._temporary.unlink(missing_ok=True)
