"""Common value of every trace, and the checks every format shares.

A trace names the tokens of a prompt by block ids, not by text: that is what public traces give, and all that
the hit of a prefix cache depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

MAX_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the length of its answer.

    ``arrival_s``: seconds from the start of the trace, at least 0. ``blocks``: ids of the full blocks of the
    prompt, in order; two prompts have the same tokens up to and with a block when their ids are equal up to
    and with it. ``num_tokens``: tokens of the prompt, those after the last full block included.
    """

    arrival_s: float
    blocks: tuple[int, ...]
    num_tokens: int
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival, those of one instant in the order of the file.

    ``block_tokens``: tokens in every block of every request. ``num_skipped``: bad lines that were left out.
    """

    name: str
    block_tokens: int
    requests: Sequence[Request]
    num_skipped: int = 0

    @property
    def working_set_tokens(self) -> int:
        """Tokens in full blocks that a cache which never drops anything holds at the end; a shared prefix counts once.

        Sorts all prompts at every call (seconds for tens of millions of ids): keep the result.
        """
        distinct = 0
        before: tuple[int, ...] = ()
        # Sorted, a prompt shares with the one before it the longest prefix it shares with any before it.
        for blocks in sorted(request.blocks for request in self.requests):
            distinct += len(blocks) - shared_blocks(before, blocks)
            before = blocks
        return distinct * self.block_tokens


@dataclass(frozen=True, slots=True)
class Reading:
    """What a file does not say, or says otherwise: the unit of its timestamps (s, ms, us or ns), and the tokens of a
    block. None: as its format has them."""

    time_unit: str | None = None
    block_tokens: int | None = None


class Format(Protocol):
    """One file format: turns a line, already parsed, into requests. May remember earlier lines."""

    block_tokens: int
    """Known after the first good line."""

    relative: bool
    """Whether arrivals count from an arbitrary origin, so that the reader moves the earliest one to 0."""

    def requests(self, record: Mapping[str, object]) -> Sequence[Request]:
        """The requests of one line, in any order. ValueError says what is wrong with it, not where it is."""
        ...


@runtime_checkable
class Adjustable(Protocol):
    """A format that can be read in other units than its own."""

    def read_as(self, reading: Reading) -> None:
        """Before the first request. ValueError where the file says otherwise itself."""
        ...


def shared_blocks(a: tuple[int, ...], b: tuple[int, ...], begin: int = 0) -> int:
    """Length of the longest common prefix of ``a`` from ``begin`` on and ``b``, in blocks; compares slices, which C
    does, not elements."""
    low, high = 0, min(len(a) - begin, len(b))
    if a[begin : begin + high] == b[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if a[begin + low : begin + middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def member(record: Mapping[str, object], key: str) -> object:
    """``record[key]``, or a ValueError that lists what is there instead."""
    if key not in record:
        raise ValueError(f"key {key!r} is missing: there are {', '.join(sorted(record)) or 'none'}")
    return record[key]


def count(record: Mapping[str, object], key: str, least: int = 0) -> int:
    """An integer in [least, 2**63)."""
    value = member(record, key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_ID:
        raise ValueError(f"{key!r} is {value!r:.60}: expected an integer of at least {least}")
    return value


def text(record: Mapping[str, object], key: str) -> str:
    """A string."""
    value = member(record, key)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {value!r:.60}: expected a string")
    return value


def ids(record: Mapping[str, object], key: str) -> list[int]:
    """A list of integers in [0, 2**63); may be empty."""
    value = member(record, key)
    if not isinstance(value, list):
        raise ValueError(f"{key!r} is {value!r:.60}: expected a list of block ids")
    # The two questions below are answered by C loops; which id is to blame is only asked when one is.
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_ID):
        for index, item in enumerate(value):
            if type(item) is not int or not 0 <= item <= MAX_ID:
                raise ValueError(f"{key}[{index}] is {item!r:.60}: expected an integer of at least 0")
    return value


def full_blocks(blocks: list[int], num_tokens: int, block_tokens: int, key: str) -> list[int]:
    """``blocks`` without a partial last one. ValueError when they hold more than ``num_tokens`` can fill."""
    if len(blocks) > -(-num_tokens // block_tokens):
        raise ValueError(
            f"{key!r} has {len(blocks)} blocks of {block_tokens} tokens for a prompt of {num_tokens} tokens"
        )
    return blocks[: num_tokens // block_tokens]
