"""From a path or a name to a trace: tells the format, counts lines, and says where a bad one is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import orjson

from sglang_evicpress.traces.agent_text import AgentText
from sglang_evicpress.traces.base import Adjustable, Format, Reading, Request, Trace
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
    reading: Reading | None = None,
) -> Trace:
    """Read ``source``: a file in one of the formats of ``READERS``, plain, .zst or .gz, or ``synthetic:KIND[:SEED]``.

    The keys of the first line tell the format. A bad line is a ValueError that names file, line and fault;
    with ``skip_bad`` it is left out, counted in ``num_skipped``, and its message goes to ``on_bad``. A bad line
    of a WEKA file is a whole session. What spoils more than a line (an unknown format, a bad header, a file
    that is missing, empty, binary or cut off, a line without end, no request at all) is a ValueError either way.

    ``limit`` keeps the first requests in the order of the file, which is then read no further; in the order of
    arrival where a session's are on one line, and for synthetic traces.

    ``reading`` gives other units than the format's; ValueError where the trace has units of its own.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: expected at least 1, or None for the whole trace")
    if source.startswith(PREFIX):
        if reading is not None:
            raise ValueError(f"{source} is made up in seconds and blocks of its own: expected a file to read otherwise")
        trace = synthetic_trace(source)
        return trace if limit is None else dataclasses.replace(trace, requests=trace.requests[:limit])
    return _read_file(Path(source), skip_bad, limit, on_bad, reading)


def _read_file(
    path: Path,
    skip_bad: bool,
    limit: int | None,
    on_bad: Callable[[str], None] | None,
    reading: Reading | None,
) -> Trace:
    format: Format | None = None
    requests: list[Request] = []
    is_empty, num_skipped = True, 0
    for line_number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        is_empty = is_opening = False
        try:
            record = _parsed(line)
            has_header = False
            if format is None:
                reader = _reader_of(record)
                is_opening, has_header = True, reader.has_header
                format = _opened(reader, record, reading)
                is_opening = False
            found = () if has_header else format.requests(record)
        except ValueError as error:
            message = f"{path}, line {line_number}: {error}"
            # With a wrong header no line after it can be read.
            if not skip_bad or is_opening or (format is None and num_skipped >= PATIENCE):
                raise ValueError(message) from None
            num_skipped += 1
            if on_bad is not None:
                on_bad(message)
            continue
        if limit is not None:
            found = sorted(found, key=attrgetter("arrival_s"))[: limit - len(requests)]
        requests.extend(found)
        if len(requests) == limit:
            break
    if is_empty:
        raise ValueError(f"{path} is empty: expected a trace, one JSON object a line")
    if format is None or not requests:
        skipped = f"; {num_skipped} bad lines were skipped" if num_skipped else ""
        raise ValueError(f"{path} has no requests{skipped}")
    requests.sort(key=attrgetter("arrival_s"))
    start_s = requests[0].arrival_s if format.relative else 0.0
    if start_s:
        requests = [dataclasses.replace(request, arrival_s=request.arrival_s - start_s) for request in requests]
    name = format.name if isinstance(format, Jsonl) else None
    return Trace(name or path.name, format.block_tokens, tuple(requests), num_skipped)


def _opened(reader: Reader, record: Mapping[str, object], reading: Reading | None) -> Format:
    format = reader.open(record)
    if reading is not None:
        if not isinstance(format, Adjustable):
            raise ValueError(f"{reader.about} has units of its own: expected neither a time unit nor a size of blocks")
        format.read_as(reading)
    return format


def _parsed(line: bytes) -> dict[str, object]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}): {line[:200]!r:.60}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{record!r:.60} is no JSON object")
    return record


def _reader_of(record: Mapping[str, object]) -> Reader:
    """By the key only one format has, so that a first line that lacks another is a bad line of that format."""
    for reader in READERS:
        if any(key in record for key in reader.keys):
            return reader
    known = ", ".join(reader.about for reader in READERS)
    raise ValueError(f"unknown format, keys {sorted(record)!r:.60}: expected one of {known}")
