"""LMCache's agent traces: ``timestamp`` us, ``input`` and ``output`` as text, ``session_id``.

There is no tokenizer here. **One token is taken to be 4 bytes of UTF-8**, about what English text and code
come to; a block of 64 tokens, unless read otherwise, is then 256 bytes, and a block's id is a hash of its bytes
and of the id before it, so an equal id means an equal whole prefix, between sessions too. Counts of tokens are
approximate, and reuse ends at a boundary of bytes where a server's ends at one of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from sglang_evicpress.traces.base import Reading, Request, text
from sglang_evicpress.traces.times import Clock

BYTES_PER_TOKEN = 4


class AgentText:
    """One line, one request. Ids are 63 bits of a hash: the same in every process."""

    block_tokens = 64
    relative = True

    def __init__(self) -> None:
        self._shared: dict[int, int] = {}
        self._clock = Clock("us", has_dates=True)

    def read_as(self, reading: Reading) -> None:
        self._clock.unit = reading.time_unit or self._clock.unit
        self.block_tokens = reading.block_tokens or self.block_tokens

    def requests(self, record: Mapping[str, object]) -> Sequence[Request]:
        arrival_s = self._clock.seconds(record, "timestamp")
        prompt = text(record, "input").encode()
        answer = text(record, "output").encode()
        return (Request(arrival_s, self._blocks(prompt), _tokens(prompt), _tokens(answer)),)

    def _blocks(self, prompt: bytes) -> tuple[int, ...]:
        width = self.block_tokens * BYTES_PER_TOKEN
        chain, blocks = b"", []
        for start in range(0, len(prompt) - width + 1, width):
            chain = blake2b(chain + prompt[start : start + width], digest_size=8).digest()
            block = int.from_bytes(chain, "big") >> 1
            blocks.append(self._shared.setdefault(block, block))
        return tuple(blocks)


def _tokens(encoded: bytes) -> int:
    return -(-len(encoded) // BYTES_PER_TOKEN)
