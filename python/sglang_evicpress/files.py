"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import orjson


def check_output(path: str, *, inputs: Iterable[str] = ()) -> str:
    """``path``, if a file can be written there that is none of ``inputs``; else ValueError, before work is done."""
    real = Path(path).resolve()
    if any(real == Path(given).resolve() for given in inputs):
        raise ValueError(f"{path!r} is read from: expected a file of its own")
    if real.exists() and not real.is_file():
        raise ValueError(f"{path!r} is no file: expected the path of one")
    if not real.parent.is_dir():
        raise ValueError(f"{path!r}: the folder {str(Path(path).parent)!r} does not exist")
    if not os.access(real.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path!r}: nothing can be written to the folder {str(Path(path).parent)!r}")
    return path


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.close()
        self._temporary.unlink(missing_ok=True)
