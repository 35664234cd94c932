"""The profile of one context: what was measured of its quality in every form that was tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from sglang_evicpress.core import Form
from sglang_evicpress.quality.running_stats import RunningStats
from sglang_evicpress.tiers.entry.header import form_text
from sglang_evicpress.tiers.entry.identity import PathHash, Tokens, token_bytes
from sglang_evicpress.validation import checked, fields_of

BLOCK_TOKENS = 64
"""Contexts are told apart by whole blocks of tokens, so that it does not matter where exactly a question begins."""

MAX_CONTEXT_TOKENS = 2**24
"""Of a profile: more than any model reads."""

FORMS_VERSION = 1
"""Raised whenever a press keeps other tokens than before: what was measured of it holds no more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """``key`` (16 bytes) is the hash of the context's first ``num_tokens`` tokens, whole blocks, in its namespace.

    ``forms`` has the evidence of each measured form: qualities in [0, 1], one per query, by the scorer called
    ``scorer``. ``query_set`` (16 hex digits) tells which ``num_queries`` queries were asked and how, ``measured_s``
    when, in Unix seconds.
    """

    key: bytes
    num_tokens: int
    forms: Mapping[Form, RunningStats]
    scorer: str
    query_set: str
    num_queries: int
    measured_s: float

    def completed(self, earlier: Profile | None) -> Profile:
        """This profile with what an ``earlier`` one of the same context, queries and scorer has of other forms."""
        if earlier is None or (earlier.scorer, earlier.query_set) != (self.scorer, self.query_set):
            return self
        return replace(self, forms={**earlier.forms, **self.forms})

    def merged(self, earlier: Profile | None) -> Profile:
        """This profile together with an ``earlier`` one of the same context by the same scorer, whose evidence counts
        for at most as much as this one's; of another scorer nothing is taken over.
        """
        if earlier is None or earlier.scorer != self.scorer:
            return self
        forms = dict(earlier.forms)
        for form, stats in self.forms.items():
            known = forms.get(form)
            forms[form] = stats if known is None else stats.plus(known.aged(stats.count))
        return replace(self, forms=forms)

    def to_json(self) -> dict[str, object]:
        """JSON object that ``from_json`` reads; evidence is [count, mean, squares]."""
        return {
            "key": self.key.hex(),
            "num_tokens": self.num_tokens,
            "forms": {form_text(form): _figures(seen) for form, seen in self.forms.items()},
            "scorer": self.scorer,
            "query_set": self.query_set,
            "num_queries": self.num_queries,
            "measured_s": self.measured_s,
        }

    @classmethod
    def from_json(cls, obj: object) -> Profile:
        """Raises ValueError, one sentence naming the field and what is accepted."""
        if not isinstance(obj, Mapping):
            raise ValueError(f"profile is {obj!r:.200}: expected an object with {', '.join(fields_of(_Json))}")
        where = f"profile {obj['key']}" if isinstance(obj.get("key"), str) else "profile"
        read = checked(_Json, {str(name): value for name, value in obj.items()}, where)
        forms: dict[Form, RunningStats] = {}
        try:
            for text, figures in read.forms.items():
                form = _parse(text)
                if form.is_exact or form in forms:
                    raise ValueError(f"form {text!r:.100} is given: expected lossy forms, each of them once")
                forms[form] = _stats(text, figures)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        figures_of = read.scorer, read.query_set, read.num_queries, read.measured_s
        return cls(bytes.fromhex(read.key), read.num_tokens, forms, *figures_of)


_STATS = "[count, mean, squares] of at least 1 quality from 0 to 1"
_MAX_COUNT = 2**53


@dataclass(config=ConfigDict(strict=True, extra="forbid"))
class _Json:
    key: str = Field(title="32 hex digits", pattern="^[0-9a-f]{32}$")
    num_tokens: int = Field(
        title=f"whole blocks of {BLOCK_TOKENS} tokens, at most {MAX_CONTEXT_TOKENS}",
        gt=0,
        le=MAX_CONTEXT_TOKENS,
        multiple_of=BLOCK_TOKENS,
    )
    forms: dict[str, list[float]] = Field(title=f"an object of at least one form, each with {_STATS}", min_length=1)
    scorer: str = Field(title="a name such as logprob", pattern="^[a-z0-9-]{1,32}$")
    query_set: str = Field(title="16 hex digits", pattern="^[0-9a-f]{16}$")
    num_queries: int = Field(title="a whole number of at least 1", ge=1, lt=2**53)
    measured_s: float = Field(title="Unix seconds", ge=0, lt=1e11)


_parse = lru_cache(4096)(Form.parse_stored)  # the same few forms come again in every profile


def _figures(seen: RunningStats) -> list[float]:
    """Plain floats, whatever numpy made of them."""
    return [float(seen.count), float(seen.mean), float(seen.squares)]


def _stats(text: str, figures: Sequence[float]) -> RunningStats:
    try:
        stats = RunningStats(*figures)
        is_of_qualities = len(figures) == 3 and 1 <= stats.count <= _MAX_COUNT and 0 <= stats.mean <= 1
        if is_of_qualities and stats.squares <= stats.count * 0.2500001:  # half of them 0, half of them 1
            return stats
        problem = ""
    except (TypeError, ValueError) as error:
        problem = f" ({error})"
    raise ValueError(f"form {text!r:.100} has {figures!r:.100}{problem}: expected {_STATS}")


def context_keys(identity: bytes, namespace: str | None, tokens: Tokens, start: int = 0) -> list[bytes]:
    """The keys of the contexts that end after one, two, ... whole blocks of ``tokens``; only of those that are longer
    than ``start`` tokens.

    ``identity`` (16 bytes) is that of the model, the tokenizer and the version of the forms.
    """
    path = PathHash(identity, namespace)
    begin = start // BLOCK_TOKENS * BLOCK_TOKENS
    path.update(tokens[:begin])
    keys = []
    for end in range(begin + BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        path.update(tokens[end - BLOCK_TOKENS : end])
        keys.append(path.key)
    return keys


def query_set(queries: Sequence[Tokens]) -> str:
    """16 hex digits for these queries, whatever their order."""
    digests = sorted(sha256(token_bytes(query)).digest() for query in queries)
    return sha256(b"".join(digests)).hexdigest()[:16]
