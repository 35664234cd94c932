"""Traces made up from a seed, for machines that have no real ones: ``synthetic:KIND[:SEED]``.

The numbers below are rough fits to public traces (``chat``: Mooncake conversation; ``agent``: WEKA coding
agents) or to how question answering is set up (``rag``). They have the shape of the workload, not its detail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from operator import attrgetter
from random import Random

from sglang_evicpress.traces.base import Request, Trace

PREFIX = "synthetic:"


@dataclass(slots=True)
class _Chain:
    """A growing prompt: ids of its full blocks, and its tokens."""

    block_tokens: int
    fresh: Iterator[int]
    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def grow(self, num_tokens: int) -> _Chain:
        self.num_tokens += num_tokens
        missing = self.num_tokens // self.block_tokens - len(self.blocks)
        self.blocks.extend(next(self.fresh) for _ in range(missing))
        return self

    def cut(self, num_tokens: int) -> _Chain:
        """Keep the first ``num_tokens`` tokens; what grows then is new."""
        self.num_tokens = num_tokens
        del self.blocks[num_tokens // self.block_tokens :]
        return self

    def branch(self) -> _Chain:
        return _Chain(self.block_tokens, self.fresh, list(self.blocks), self.num_tokens)

    def request(self, arrival_s: float, output_tokens: int) -> Request:
        return Request(round(arrival_s, 3), tuple(self.blocks), self.num_tokens, output_tokens)


def synthetic_trace(source: str) -> Trace:
    """The trace ``synthetic:KIND[:SEED]`` names; the same name gives the same trace. Seed 0 when none is given.

    ValueError when the kind is unknown or the seed no integer of at least 0.
    """
    kind, colon, seed = source.removeprefix(PREFIX).partition(":")
    if kind not in _KINDS:
        raise ValueError(
            f"{source!r}: unknown kind {kind!r}, expected {PREFIX}KIND[:SEED] with one of {', '.join(_KINDS)}"
        )
    if colon and not (seed.isascii() and seed.isdigit()):
        raise ValueError(f"{source!r}: seed {seed!r}, expected an integer of at least 0")
    number = int(seed) if colon else 0
    block_tokens, generate = _KINDS[kind]
    # A string as seed is hashed with SHA-512: the same everywhere.
    found = generate(Random(f"{kind}:{number}"), block_tokens, count())
    return Trace(f"{PREFIX}{kind}:{number}", block_tokens, tuple(sorted(found, key=attrgetter("arrival_s"))))


def _chat(rng: Random, block_tokens: int, fresh: Iterator[int]) -> Iterator[Request]:
    """3,000 conversations begun within 30 minutes; seven of ten end after one turn; turns two minutes apart.

    A conversation starts with one of 20 system prompts of 500 to 4,000 tokens (Zipf 1). One turn in ten
    replaces the last message instead of adding one.
    """
    heads = [_Chain(block_tokens, fresh).grow(rng.randint(500, 4000)) for _ in range(20)]
    popular = _zipf(len(heads), 1.0)
    for _ in range(3000):
        now_s = rng.uniform(0, 1800)
        chain = rng.choices(heads, cum_weights=popular)[0].branch()
        before = chain.num_tokens
        chain.grow(_about(rng, 4500, 1.2, 20, 120_000))
        more = 0.3
        while True:
            output_tokens = _about(rng, 300, 0.9, 1, 2000)
            yield chain.request(now_s, output_tokens)
            now_s += _seconds(rng, 120, 0.8)
            if now_s > 1800 or rng.random() > more:
                break
            more = 0.5
            if rng.random() < 0.1:
                chain.cut(before)
            else:
                chain.grow(output_tokens)
                before = chain.num_tokens
            chain.grow(_about(rng, 150, 1.5, 5, 30_000))


def _agent(rng: Random, block_tokens: int, fresh: Iterator[int]) -> Iterator[Request]:
    """60 sessions begun within an hour, each a chain of its own that grows by hundreds of tokens every 20 s.

    The head (tools and system, 14,000 tokens) is one of 3, shared. A session of more than 160,000 tokens is
    cut back to its head and a summary.
    """
    heads = [_Chain(block_tokens, fresh).grow(rng.randint(12_000, 16_000)) for _ in range(3)]
    popular = _zipf(len(heads), 1.0)
    for _ in range(60):
        now_s = rng.uniform(0, 3600)
        head = rng.choices(heads, cum_weights=popular)[0]
        chain = head.branch().grow(_about(rng, 8000, 1.0, 500, 100_000))
        for _ in range(_about(rng, 35, 1.0, 3, 250)):
            output_tokens = _about(rng, 220, 1.0, 10, 8000)
            yield chain.request(now_s, output_tokens)
            now_s += _seconds(rng, 18, 0.9)
            chain.grow(output_tokens + _about(rng, 600, 1.3, 10, 40_000))
            if chain.num_tokens > 160_000:
                chain.cut(head.num_tokens).grow(_about(rng, 6000, 0.5, 1000, 20_000))


def _rag(rng: Random, block_tokens: int, fresh: Iterator[int]) -> Iterator[Request]:
    """4,000 questions within 30 minutes on 500 documents (Zipf 0.9), in visits of one to a dozen questions.

    A prompt is the instructions (600 tokens, the same for all), the document, and the question.
    """
    instructions = _Chain(block_tokens, fresh).grow(600)
    documents = [instructions.branch().grow(_about(rng, 6000, 0.8, 500, 60_000)) for _ in range(500)]
    popular = _zipf(len(documents), 0.9)
    asked = 0
    while asked < 4000:
        now_s = rng.uniform(0, 1800)
        document = rng.choices(documents, cum_weights=popular)[0]
        for _ in range(min(_about(rng, 2, 0.9, 1, 12), 4000 - asked)):
            asked += 1
            prompt = document.branch().grow(_about(rng, 40, 0.6, 5, 400))
            yield prompt.request(now_s, _about(rng, 120, 0.8, 1, 1000))
            now_s += _seconds(rng, 30, 0.8)


def _zipf(size: int, power: float) -> Sequence[float]:
    """Cumulative weights of ranks 1 to ``size``."""
    return list(accumulate(1 / rank**power for rank in range(1, size + 1)))


def _seconds(rng: Random, median: float, sigma: float) -> float:
    return median * rng.lognormvariate(0, sigma)


def _about(rng: Random, median: int, sigma: float, least: int, most: int) -> int:
    """A whole number around ``median``, log-normal, held within [least, most]."""
    return min(max(round(median * rng.lognormvariate(0, sigma)), least), most)


_Generator = Callable[[Random, int, Iterator[int]], Iterator[Request]]
_KINDS: dict[str, tuple[int, _Generator]] = {"chat": (512, _chat), "agent": (64, _agent), "rag": (64, _rag)}
