"""Answers of which each token is the likeliest: what they lost can be told by exact KV alone."""

from __future__ import annotations

from typing import Protocol


class Sampling(Protocol):
    """How SGLang chooses tokens, as far as it is not by likelihood alone."""

    top_k: int
    json_schema: str | None
    regex: str | None
    ebnf: str | None
    structural_tag: str | None
    logit_bias: dict[str, float] | None
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int


def is_plainly_greedy(sampling: Sampling, custom_logit_processor: str | None) -> bool:
    """True if nothing but likelihood chose the tokens. A drawn token, and one that a grammar or a penalty brought, is
    less likely than another under exact KV too, by how much says nothing of the KV that it was served from."""
    grammars = sampling.json_schema, sampling.regex, sampling.ebnf, sampling.structural_tag
    penalties = sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty - 1.0
    others = sampling.logit_bias, sampling.min_new_tokens, custom_logit_processor
    return sampling.top_k == 1 and not any((*grammars, *penalties, *others))
