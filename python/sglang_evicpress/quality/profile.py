"""The profile of one context: what was measured of its quality in every form that was tried."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256

from sglang_evicpress.core import Form
from sglang_evicpress.quality.running_stats import RunningStats
from sglang_evicpress.tiers.entry.identity import PathHash, Tokens, token_bytes

BLOCK_TOKENS = 64
"""Contexts are told apart by whole blocks of tokens, so that it does not matter where exactly a question begins."""

MAX_CONTEXT_TOKENS = 2**24
"""Of a profile: more than any model reads."""

FORMS_VERSION = 1
"""Raised whenever a press keeps other tokens than before: what was measured of it holds no more."""


@dataclass(frozen=True, slots=True)
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
            "forms": {_text(form): _figures(seen) for form, seen in self.forms.items()},
            "scorer": self.scorer,
            "query_set": self.query_set,
            "num_queries": self.num_queries,
            "measured_s": self.measured_s,
        }

    @classmethod
    def from_json(cls, obj: object) -> Profile:
        """Raises ValueError, one sentence naming the field and what is accepted."""
        if not isinstance(obj, Mapping) or set(obj) != _FIELDS:
            given = sorted(map(str, obj)) if isinstance(obj, Mapping) else obj
            raise ValueError(f"profile has {given!r:.200}: expected an object with {', '.join(sorted(_FIELDS))}")
        key, forms = obj["key"], obj["forms"]
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(f"profile has key {key!r:.100}: expected 32 hex digits")
        if not isinstance(forms, Mapping) or not forms:
            raise ValueError(f"profile {key} has forms {forms!r:.100}: expected an object of at least one form")
        if not isinstance(obj["query_set"], str) or not _QUERY_SET.fullmatch(obj["query_set"]):
            raise ValueError(f"profile {key} has query_set {obj['query_set']!r:.100}: expected 16 hex digits")
        if not isinstance(obj["scorer"], str) or not _SCORER.fullmatch(obj["scorer"]):
            raise ValueError(f"profile {key} has scorer {obj['scorer']!r:.100}: expected a name such as logprob")
        num_tokens = _whole(key, "num_tokens", obj["num_tokens"], MAX_CONTEXT_TOKENS)
        num_queries = _whole(key, "num_queries", obj["num_queries"], 2**53 - 1)
        if num_tokens % BLOCK_TOKENS:
            raise ValueError(f"profile {key} has num_tokens {num_tokens}: expected whole blocks of {BLOCK_TOKENS}")
        measured_s = obj["measured_s"]
        if isinstance(measured_s, bool) or not isinstance(measured_s, int | float) or not 0 <= measured_s < 1e11:
            raise ValueError(f"profile {key} has measured_s {measured_s!r:.100}: expected Unix seconds")
        stats: dict[Form, RunningStats] = {}
        for text, figures in forms.items():
            form = _form(key, text)
            if form in stats:
                raise ValueError(f"profile {key} has form {text!r:.100} again: expected each form once")
            stats[form] = _stats(key, text, figures)
        return cls(
            bytes.fromhex(key), num_tokens, stats, obj["scorer"], obj["query_set"], num_queries, float(measured_s)
        )


_FIELDS = {"key", "num_tokens", "forms", "scorer", "query_set", "num_queries", "measured_s"}
_KEY = re.compile(r"[0-9a-f]{32}")
_QUERY_SET = re.compile(r"[0-9a-f]{16}")
_SCORER = re.compile(r"[a-z0-9-]{1,32}")
_MAX_COUNT = 2.0**53
_NUMBERS = [[first, second, third] for first in (float, int) for second in (float, int) for third in (float, int)]


def _text(form: Form) -> str:
    """Reads back as the very same form; ``str`` rounds the kept fraction to six digits."""
    return str(form) if form.press is None or form.codec != "raw" else f"{form.press}@{float(form.kept_fraction)!r}"


def _figures(seen: RunningStats) -> list[float]:
    """Plain floats, whatever numpy made of them."""
    return [float(seen.count), float(seen.mean), float(seen.squares)]


def _whole(key: str, name: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"profile {key} has {name} {value!r:.100}: expected a whole number from 1 to {most}")
    return value


@lru_cache(4096)
def _parse(text: str) -> Form:
    """The same few forms come again in every profile."""
    return Form.parse(text)


def _form(key: str, text: object) -> Form:
    try:
        form = _parse(str(text))
    except ValueError as error:
        raise ValueError(f"profile {key}: {error}") from None
    if form.is_exact:
        raise ValueError(f"profile {key} has form 'exact', whose quality is 1 by definition: expected lossy forms")
    return form


def _stats(key: str, text: object, figures: object) -> RunningStats:
    problem = ""
    if isinstance(figures, Sequence) and not isinstance(figures, str) and [*map(type, figures)] in _NUMBERS:
        try:
            stats = RunningStats(*map(float, figures))
        except (ValueError, OverflowError) as error:
            problem = f" ({error})"
        else:
            if 1.0 <= stats.count <= _MAX_COUNT and 0.0 <= stats.mean <= 1.0:
                if stats.squares <= stats.count * 0.2500001:  # half of them 0, half of them 1
                    return stats
                problem = ", which no qualities from 0 to 1 give"
    raise ValueError(
        f"profile {key} has {figures!r:.100} for form {text!r:.100}{problem}: "
        "expected [count, mean, squares] of at least 1 quality from 0 to 1"
    )


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
