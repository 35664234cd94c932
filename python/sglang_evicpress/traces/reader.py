"""From a path or a name to a trace: tells the format, counts lines, and says where a bad one is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import orjson

from sglang_evicpress.traces.agent_text import AgentText
from sglang_evicpress.traces.base import Format, Request, Trace, short
from sglang_evicpress.traces.jsonl import Jsonl
from sglang_evicpress.traces.lines import read_lines
from sglang_evicpress.traces.mooncake import Mooncake
from sglang_evicpress.traces.synthetic import PREFIX, synthetic_trace
from sglang_evicpress.traces.weka import Weka

PATIENCE = 100
"""Lines that may be skipped before the first that tells the format."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A format: ``about`` names it with its keys. A first line with one of ``keys``, which no other format has, is its.

    ``open`` makes its ``Format`` from that line, which with ``has_header`` holds no request.
    """

    about: str
    keys: tuple[str, ...]
    open: Callable[[Mapping[str, object]], Format]
    has_header: bool = False


READERS = [
    Reader("evicpress-trace (format, version, block_tokens)", ("format",), Jsonl, has_header=True),
    Reader("WEKA (block_size, hash_id_scope, requests)", ("requests",), lambda _: Weka()),
    Reader(
        "Mooncake (timestamp, input_length, output_length, hash_ids)",
        *(("hash_ids", "input_length"), lambda _: Mooncake()),
    ),
    Reader("LMCache agent text (timestamp, input, output)", ("input",), lambda _: AgentText()),
]


def read_trace(
    source: str,
    *,
    skip_bad: bool = False,
    limit: int | None = None,
    on_bad: Callable[[str], None] | None = None,
) -> Trace:
    """Read ``source``: a file in one of the formats of ``READERS``, plain or .zst, or ``synthetic:KIND[:SEED]``.

    The keys of the first line tell the format. A bad line is a ValueError that names file, line and fault;
    with ``skip_bad`` it is left out, counted in ``num_skipped``, and its message goes to ``on_bad``. A bad line
    of a WEKA file is a whole session. What spoils more than a line (an unknown format, a bad header, a file
    that is missing, empty or cut off, no request at all) is a ValueError either way.

    ``limit`` keeps the first requests in the order of the file, which is then read no further; in the order of
    arrival where a session's are on one line, and for synthetic traces.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: expected at least 1, or None for the whole trace")
    if source.startswith(PREFIX):
        trace = synthetic_trace(source)
        return trace if limit is None else dataclasses.replace(trace, requests=trace.requests[:limit])
    return _Reading(Path(source), skip_bad, limit, on_bad).trace()


class _Reading:
    """One pass over one file."""

    def __init__(self, path: Path, skip_bad: bool, limit: int | None, on_bad: Callable[[str], None] | None) -> None:
        self._path = path
        self._skip_bad = skip_bad
        self._limit = limit
        self._on_bad = on_bad
        self._format: Format | None = None
        self._requests: list[Request] = []
        self._num_skipped = 0

    def trace(self) -> Trace:
        num_lines = 0
        for line_number, line in enumerate(read_lines(self._path), 1):
            if not line.strip():
                continue
            num_lines += 1
            self._take(line, f"{self._path}, line {line_number}")
            if self._limit is not None and len(self._requests) >= self._limit:
                break
        if not num_lines:
            raise ValueError(f"{self._path} is empty: expected a trace, one JSON object a line")
        if self._format is None or not self._requests:
            skipped = f"; {self._num_skipped} bad lines were skipped" if self._num_skipped else ""
            raise ValueError(f"{self._path} has no requests{skipped}")
        name = self._format.name if isinstance(self._format, Jsonl) else None
        return Trace(name or self._path.name, self._format.block_tokens, self._sorted(), self._num_skipped)

    def _take(self, line: bytes, where: str) -> None:
        try:
            record = _parsed(line)
            if self._format is None:
                reader = _reader_of(record)
                self._format = _opened(reader, record)
                if reader.has_header:
                    return
            found = self._format.requests(record)
        except _HeaderError as error:
            raise ValueError(f"{where}: {error}") from None
        except ValueError as error:
            message = f"{where}: {error}"
            if not self._skip_bad or (self._format is None and self._num_skipped >= PATIENCE):
                raise ValueError(message) from None
            self._num_skipped += 1
            if self._on_bad is not None:
                self._on_bad(message)
            return
        if self._limit is not None:
            found = sorted(found, key=attrgetter("arrival_s"))[: self._limit - len(self._requests)]
        self._requests.extend(found)

    def _sorted(self) -> tuple[Request, ...]:
        ordered = sorted(self._requests, key=attrgetter("arrival_s"))
        start_s = ordered[0].arrival_s
        if self._format is not None and self._format.relative and start_s:
            ordered = [dataclasses.replace(request, arrival_s=request.arrival_s - start_s) for request in ordered]
        return tuple(ordered)


class _HeaderError(ValueError):
    """The header of a format is wrong: no line after it can be read."""


def _parsed(line: bytes) -> dict[str, object]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}): {short(line[:200])}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{short(record)} is no JSON object")
    return record


def _reader_of(record: Mapping[str, object]) -> Reader:
    """By the key only one format has, so that a first line that lacks another is a bad line of that format."""
    for reader in READERS:
        if any(key in record for key in reader.keys):
            return reader
    known = ", ".join(reader.about for reader in READERS)
    raise ValueError(f"unknown format, keys {short(sorted(record))}: expected one of {known}")


def _opened(reader: Reader, record: Mapping[str, object]) -> Format:
    try:
        return reader.open(record)
    except ValueError as error:
        raise _HeaderError(str(error)) from None
