"""Mooncake's traces (FAST'25, appendix): ``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids``.

One id per 512 tokens, chained: an equal id means an equal whole prefix. The last id may stand for a partial
block, which no prefix cache of whole blocks shares; it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_evicpress.traces.base import Request, count, full_blocks, ids, number


class Mooncake:
    """One line, one request. Ids become shared integers, so that equal blocks cost one object in memory."""

    block_tokens = 512
    relative = True

    def __init__(self) -> None:
        self._shared: dict[int, int] = {}

    def requests(self, record: Mapping[str, object]) -> Sequence[Request]:
        arrival_ms = number(record, "timestamp")
        num_tokens = count(record, "input_length")
        output_tokens = count(record, "output_length")
        blocks = full_blocks(ids(record, "hash_ids"), num_tokens, self.block_tokens, "hash_ids")
        shared = tuple(map(self._shared.setdefault, blocks, blocks))
        return (Request(arrival_ms / 1000, shared, num_tokens, output_tokens),)
