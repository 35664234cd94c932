"""Recorder of the questions of real requests about each context: bounded, in memory only, equal on all ranks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from sglang_evicpress.tiers.entry.identity import Tokens, token_bytes


@dataclass(frozen=True, slots=True)
class Query:
    """One question behind a context and the answer it was served, empty where that is not to be judged; neither is
    shown when this is printed.

    ``predicted`` is the quality that the policy expected of the KV it was served from; None when that was exact.
    ``lossy_hit`` is set by the recorder: which of its context's lossy hits this was, from 1; 0 when it was exact.
    """

    tokens: Sequence[int] = field(repr=False)
    answer: Sequence[int] = field(repr=False)
    predicted: float | None = None
    lossy_hit: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """Whole blocks of ``tokens`` in a ``namespace``; how often they were hit, and how often of these not exact."""

    tokens: Sequence[int] = field(repr=False)
    namespace: str | None = field(repr=False)
    num_hits: int = 0
    num_lossy_hits: int = 0


@dataclass(slots=True)
class _Record:
    context: Context
    queries: list[Query]  # oldest first
    num_tokens: int


class Recorder:
    """The last ``max_queries`` different questions about each of ``max_contexts`` contexts.

    All tokens kept, those of contexts, questions and answers, are at most ``max_tokens`` (4 bytes each); the context
    that was recorded longest ago goes first. A longer question than ``max_query_tokens``, or an empty one, is not kept
    but counts as a hit; of an answer the first ``max_answer_tokens`` are kept. Reads no clock and draws nothing by
    chance: the same calls leave the same behind on every rank. Raises ValueError for a bound below 1.
    """

    def __init__(
        self,
        max_contexts: int = 512,
        max_queries: int = 8,
        max_tokens: int = 4_000_000,
        max_query_tokens: int = 1024,
        max_answer_tokens: int = 256,
    ) -> None:
        bounds = (max_contexts, max_queries, max_tokens, max_query_tokens, max_answer_tokens)
        if min(bounds) < 1:
            raise ValueError(f"bounds are {bounds}: expected whole numbers of at least 1")
        self.max_contexts, self.max_queries, self.max_tokens = max_contexts, max_queries, max_tokens
        self.max_query_tokens, self.max_answer_tokens = max_query_tokens, max_answer_tokens
        self.num_tokens = 0
        self._records: dict[bytes, _Record] = {}  # recorded longest ago first

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[bytes]:
        """The keys of all contexts, the one recorded longest ago first."""
        return iter(self._records)

    def record(self, key: bytes, tokens: Tokens, namespace: str | None, query: Query) -> None:
        """A request that shared the context ``tokens`` was served; a question asked before takes the newer answer.

        A context that is longer than ``max_tokens`` is not recorded. Raises ValueError for a token out of range.
        """
        if len(tokens) > self.max_tokens:
            return
        is_lossy, is_kept = query.predicted is not None, 1 <= len(query.tokens) <= self.max_query_tokens
        if is_kept:
            answer = _row(query.answer[: self.max_answer_tokens])
            query = replace(query, tokens=_row(query.tokens), answer=answer)
        record = self._records.pop(key, None)
        if record is None:
            record = _Record(Context(_row(tokens), namespace), [], len(tokens))
            self.num_tokens += record.num_tokens
        self._records[key] = record  # now the last one
        num_lossy_hits = record.context.num_lossy_hits + is_lossy
        record.context = replace(record.context, num_hits=record.context.num_hits + 1, num_lossy_hits=num_lossy_hits)
        if is_kept:
            self._keep(record, replace(query, lossy_hit=num_lossy_hits if is_lossy else 0))
        self._shrink(record)

    def queries_of(self, key: bytes) -> tuple[Query, ...]:
        """Oldest first; none of a context that is not known."""
        record = self._records.get(key)
        return () if record is None else tuple(record.queries)

    def context_of(self, key: bytes) -> Context | None:
        record = self._records.get(key)
        return None if record is None else record.context

    def forget(self, key: bytes) -> None:
        """Nothing happens when it is not known."""
        record = self._records.pop(key, None)
        if record is not None:
            self.num_tokens -= record.num_tokens

    def _keep(self, record: _Record, query: Query) -> None:
        for place, known in enumerate(record.queries):
            if known.tokens == query.tokens:
                self._drop(record, place)
                break
        else:
            if len(record.queries) == self.max_queries:
                self._drop(record, 0)
        record.queries.append(query)
        self._grow(record, len(query.tokens) + len(query.answer))

    def _drop(self, record: _Record, place: int) -> None:
        gone = record.queries.pop(place)
        self._grow(record, -len(gone.tokens) - len(gone.answer))

    def _grow(self, record: _Record, num_tokens: int) -> None:
        record.num_tokens += num_tokens
        self.num_tokens += num_tokens

    def _shrink(self, newest: _Record) -> None:
        """Other contexts go first; what is then too much are the oldest questions of the newest."""
        while len(self._records) > self.max_contexts or (self.num_tokens > self.max_tokens and len(self._records) > 1):
            self.forget(next(iter(self._records)))
        while self.num_tokens > self.max_tokens:
            self._drop(newest, 0)


def _row(tokens: Tokens) -> array[int]:
    return array("I", token_bytes(tokens))
