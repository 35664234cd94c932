"""The lines that profiles are written as: a checksum, JSON text, an end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import orjson
import xxhash

from sglang_evicpress.profiler.profile import Profile

HEADER = {"format": "evicpress profiles", "version": 1}
"""The first line."""

_DIGEST = 32


class StoreError(Exception):
    """The store cannot be used; one sentence names its file and says why."""


class StoreDamaged(StoreError):
    """What the file holds is not what was put there, or it is no profile store; a repair saves what it can."""


class Name(NamedTuple):
    """What a line is about: ``identity`` of the model, and the ``key`` of the context; both in hex."""

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
    """What a line is about. Raises ValueError for one that is not about a profile."""
    identity, profile = found.get("identity"), found.get("profile")
    key = profile.get("key") if isinstance(profile, dict) else None
    if not isinstance(identity, str) or not isinstance(key, str):
        raise ValueError("a line is about no profile")
    return Name(identity, key)


def live_of(path: Path, lines: list[bytes]) -> tuple[Live, int]:
    """The valid line of every context, and how many lines there are. Raises StoreDamaged."""
    live: Live = {}
    for number, line in enumerate(lines, start=1):
        try:
            found = read_line(line)
            if number == 1:
                if found != HEADER:
                    raise ValueError(f"its first line is {found!r:.100}, expected {HEADER!r}")
                continue
            name = name_of(found)
        except ValueError as error:
            raise damaged(path, f"line {number}: {error}") from None
        live.pop(name, None)
        live[name] = line
    return live, len(lines)


def profile_of(path: Path, line: bytes) -> Profile:
    """Raises StoreDamaged."""
    try:
        return Profile.from_json(read_line(line)["profile"])
    except ValueError as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, why: str) -> StoreDamaged:
    return StoreDamaged(f"profile store {path} is damaged ({why}): run `evicpress profile repair {path}`")
