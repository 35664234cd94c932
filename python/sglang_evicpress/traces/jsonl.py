"""Our own format: a header line, then one line for each request.

``{"format": "evicpress-trace", "version": 1, "block_tokens": N, "name": "..."}`` and then
``{"t": seconds, "tokens": N, "blocks": [ids], "out": N}``; ``name`` and ``out`` may be left out. Unlike the
other formats it knows full blocks only, and takes ``t`` as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_evicpress.traces.base import Reading, Request, count, ids, member, text
from sglang_evicpress.traces.times import Clock

FORMAT = "evicpress-trace"
VERSION = 1


class Jsonl:
    """One line, one request; the header is given when it is made. ValueError when the header is not ours."""

    relative = False

    def __init__(self, header: Mapping[str, object]) -> None:
        if header["format"] != FORMAT:
            raise ValueError(f"'format' is {header['format']!r:.60}: expected {FORMAT!r}")
        version = member(header, "version")
        if version != VERSION or isinstance(version, bool):
            raise ValueError(f"'version' is {version!r:.60}: expected {VERSION}")
        self.block_tokens = count(header, "block_tokens", least=1)
        self.name = text(header, "name") if "name" in header else None
        self._shared: dict[int, int] = {}
        self._clock = Clock("s", has_dates=False)

    def read_as(self, reading: Reading) -> None:
        if reading.block_tokens not in (None, self.block_tokens):
            raise ValueError(f"'block_tokens' is {self.block_tokens}: expected {reading.block_tokens}, as asked for")
        self._clock.unit = reading.time_unit or self._clock.unit

    def requests(self, record: Mapping[str, object]) -> Sequence[Request]:
        arrival_s = self._clock.seconds(record, "t")
        num_tokens = count(record, "tokens")
        output_tokens = count(record, "out") if "out" in record else 0
        blocks = ids(record, "blocks")
        if len(blocks) * self.block_tokens > num_tokens:
            raise ValueError(
                f"'blocks' has {len(blocks)} full blocks of {self.block_tokens} tokens "
                f"for a prompt of {num_tokens} tokens"
            )
        shared = tuple(map(self._shared.setdefault, blocks, blocks))
        return (Request(arrival_s, shared, num_tokens, output_tokens),)
