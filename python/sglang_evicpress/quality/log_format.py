"""The lines that profiles are written as: a checksum, JSON text, an end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

import orjson
import xxhash

from sglang_evicpress.quality.profile import Profile

HEADER = {"format": "evicpress profiles", "version": 1}
"""The first line."""

_DIGEST = 32
_HEX, _PRINTABLE = re.compile(rb"[0-9a-f]*"), re.compile(rb"[ -~]*")


class StoreError(Exception):
    """The store cannot be used; one sentence names its file and says why."""


class StoreDamaged(StoreError):
    """The file is damaged, or it is no profile store; a repair saves what it can."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"profile store {path} is damaged ({why}): run `evicpress profile repair {path}`")
        self.why = why


class Name(NamedTuple):
    """Subject of a line: ``identity`` of the model, and the ``key`` of the context; both in hex."""

    identity: str
    key: str


Live: TypeAlias = dict[Name, bytes]
"""The valid line of every context, the oldest put first."""


def line_of(obj: Mapping[str, object]) -> bytes:
    """One line: the xxh3-128 of the JSON text in hex, the text, and the end."""
    text = orjson.dumps(obj, option=orjson.OPT_SERIALIZE_NUMPY)
    return xxhash.xxh3_128_hexdigest(text).encode() + text + b"\n"


def whole_lines(data: bytes) -> list[bytes]:
    """With their ends; without what has none."""
    return [line + b"\n" for line in data.split(b"\n")[:-1]]


def size_of_lines(path: Path, data: bytes) -> int:
    """Bytes of ``data`` up to the last end of a line. Raises StoreDamaged when it does not begin as a file of ours, or
    ends in what a kill does not leave of a line.
    """
    header = line_of(HEADER)
    begin = data[: len(header)]
    if not header.startswith(begin):
        raise StoreDamaged(path, f"it begins with {begin!r}, expected {header!r}")
    size = data.rfind(b"\n") + 1
    if size and foreign_end(data) is not None:
        raise StoreDamaged(path, f"it ends in {data[size:][-40:]!r}, which is no beginning of a line")
    return size


def foreign_end(data: bytes) -> bytes | None:
    """Bytes behind the last end of a line, when they are no line that a kill cut off: with its end, where
    it is a line whose last byte alone is wrong."""
    begin = b'{"identity":"'
    tail = data[data.rfind(b"\n") + 1 :]
    digest, text = tail[:_DIGEST], tail[_DIGEST:]
    with suppress(ValueError):
        read_line(tail)
        return tail[:-1] + b"\n"
    has_begin = text[: len(begin)] == begin[: len(text)]
    is_ours = bool(_HEX.fullmatch(digest)) and has_begin and bool(_PRINTABLE.fullmatch(text))
    return None if is_ours else tail


def text_of(line: bytes) -> bytes:
    """The JSON text of a line."""
    return line[_DIGEST:-1]


def read_line(line: bytes) -> dict[str, object]:
    """Raises ValueError for a line that is not what was written."""
    text = text_of(line)
    if xxhash.xxh3_128_hexdigest(text).encode() != line[:_DIGEST]:
        raise ValueError("a line does not match its checksum")
    found = orjson.loads(text)
    if not isinstance(found, dict):
        raise ValueError("a line is no object")
    return found


def name_of(found: Mapping[str, object]) -> Name:
    """Subject of a line. Raises ValueError for one that is not about a profile."""
    identity, profile = found.get("identity"), found.get("profile")
    key = profile.get("key") if isinstance(profile, dict) else None
    if not isinstance(identity, str) or not isinstance(key, str):
        raise ValueError("a line is about no profile")
    return Name(identity, key)


def live_of(path: Path, data: bytes) -> tuple[Live, int]:
    """The valid line of every context, and how many lines there are. Raises StoreDamaged."""
    lines = whole_lines(data[: size_of_lines(path, data)])
    live: Live = {}
    for number, line in enumerate(lines[1:], start=2):
        try:
            found = read_line(line)
            name = name_of(found)
        except ValueError as error:
            raise StoreDamaged(path, f"line {number}: {error}") from None
        live.pop(name, None)
        live[name] = line
    return live, len(lines)


def profile_of(path: Path, line: bytes) -> Profile:
    """Raises StoreDamaged."""
    try:
        return Profile.from_json(read_line(line)["profile"])
    except ValueError as error:
        raise StoreDamaged(path, str(error)) from None
