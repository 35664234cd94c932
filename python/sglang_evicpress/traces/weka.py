"""WEKA's coding-agent traces: a line is a session with ``block_size``, ``hash_id_scope`` and ``requests``.

A request has ``t`` (seconds from the start of its session), ``in``, ``out`` and ``hash_ids``. An entry of type
``subagent`` has ``requests`` of its own: their ``t`` counts from the subagent's ``t``, and their ids are the
session's (two subagents share the blocks of their common head, none has a block of the parent's).

The first tokens of all sessions (``tool_tokens``, ``system_tokens``) are the same text, but ids of scope
``local`` do not show it: blocks are shared inside a session only. Sessions all start at 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count as counter

from sglang_evicpress.traces.base import Reading, Request, count, full_blocks, ids, member, text
from sglang_evicpress.traces.times import Clock

SCOPES = ("local", "global")


class _Ids(dict[int, int]):
    """Ids of one scope to ids of the whole trace: a new number for each that was not seen in this scope."""

    def __init__(self, fresh: Iterator[int]) -> None:
        super().__init__()
        self._fresh = fresh

    def __missing__(self, key: int) -> int:
        value = self[key] = next(self._fresh)
        return value


class Weka:
    """One line, one session. A bad request makes the session bad: half a session has reuse it never had."""

    relative = False

    def __init__(self) -> None:
        self.block_tokens = 0
        self._fresh = counter()
        self._everywhere = _Ids(self._fresh)
        self._clock = Clock("s", has_dates=False)
        self._why = "as in the lines before"

    def read_as(self, reading: Reading) -> None:
        self._clock.unit = reading.time_unit or self._clock.unit
        if reading.block_tokens is not None:
            self.block_tokens, self._why = reading.block_tokens, "as asked for"

    def requests(self, record: Mapping[str, object]) -> Sequence[Request]:
        block_tokens = count(record, "block_size", least=1)
        if self.block_tokens and block_tokens != self.block_tokens:
            raise ValueError(f"'block_size' is {block_tokens}: expected {self.block_tokens}, {self._why}")
        scope = text(record, "hash_id_scope")
        if scope not in SCOPES:
            raise ValueError(f"'hash_id_scope' is {scope!r}: expected one of {', '.join(SCOPES)}")
        flat = list(_flat(record, block_tokens, self._clock))
        # Only a session that is good as a whole takes numbers and sets the size.
        known = self._everywhere if scope == "global" else _Ids(self._fresh)
        self.block_tokens = block_tokens
        return [
            Request(arrival_s, tuple(map(known.__getitem__, blocks)), num_tokens, output_tokens)
            for arrival_s, blocks, num_tokens, output_tokens in flat
        ]


def _flat(
    session: Mapping[str, object], block_tokens: int, clock: Clock
) -> Iterator[tuple[float, list[int], int, int]]:
    """(t, local ids of the full blocks, in, out) of every request, those of subagents at their place."""
    # A stack, not recursion: how deep subagents nest is the file's choice.
    stack = [(0.0, "", _entries(session))]
    while stack:
        start_s, path, entries = stack[-1]
        index, entry = next(entries, (0, None))
        if entry is None:
            stack.pop()
            continue
        where = f"{path}requests[{index}]"
        if not isinstance(entry, dict):
            raise ValueError(f"{where} is {entry!r:.60}: expected an object")
        try:
            arrival_s = start_s + clock.seconds(entry, "t")
            if math.isinf(arrival_s):
                raise ValueError(f"'t' is {entry['t']} after a start of {start_s}: expected a finite sum")
            if entry.get("type") == "subagent":
                stack.append((arrival_s, f"{where}.", _entries(entry)))
                continue
            num_tokens = count(entry, "in")
            output_tokens = count(entry, "out")
            blocks = full_blocks(ids(entry, "hash_ids"), num_tokens, block_tokens, "hash_ids")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        yield arrival_s, blocks, num_tokens, output_tokens


def _entries(holder: Mapping[str, object]) -> Iterator[tuple[int, object]]:
    entries = member(holder, "requests")
    if not isinstance(entries, list):
        raise ValueError(f"'requests' is {entries!r:.60}: expected a list")
    return iter(enumerate(entries))
