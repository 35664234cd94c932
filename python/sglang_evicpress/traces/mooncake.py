"""Mooncake's traces (FAST'25, appendix): ``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids``.

One id per 512 tokens, unless read otherwise, chained: an equal id means an equal whole prefix. The last id may
stand for a partial block, which no prefix cache of whole blocks shares; it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_evicpress.traces.base import Reading, Request, count, full_blocks, ids
from sglang_evicpress.traces.times import Clock


class Mooncake:
    """One line, one request. Ids become shared integers, so that equal blocks cost one object in memory."""

    block_tokens = 512
    relative = True

    def __init__(self) -> None:
        self._shared: dict[int, int] = {}
        self._clock = Clock("ms", has_dates=True)

    def read_as(self, reading: Reading) -> None:
        self._clock.unit = reading.time_unit or self._clock.unit
        self.block_tokens = reading.block_tokens or self.block_tokens

    def requests(self, record: Mapping[str, object]) -> Sequence[Request]:
        arrival_s = self._clock.seconds(record, "timestamp")
        num_tokens = count(record, "input_length")
        output_tokens = count(record, "output_length")
        blocks = full_blocks(ids(record, "hash_ids"), num_tokens, self.block_tokens, "hash_ids")
        shared = tuple(map(self._shared.setdefault, blocks, blocks))
        return (Request(arrival_s, shared, num_tokens, output_tokens),)
