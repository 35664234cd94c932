"""Values and errors between a profiler and a server: shadows of a context, answers, likelihoods of given answers."""

from __future__ import annotations

from dataclasses import dataclass


class EngineError(Exception):
    """The request cannot be carried out; one sentence says why."""


class ShadowRefused(EngineError):
    """There is no room for a shadow now; later there may be."""


class ShadowLost(EngineError):
    """The shadow is gone: users needed its room, or the cache was flushed. What was measured in it before holds."""


class NotMakeable(EngineError):
    """The server makes no such form of this context, now or later."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """A copy of the exact KV of a context's first ``num_tokens`` tokens in a namespace of its own.

    ``key`` (16 bytes) is the context's. ``namespace`` is the ``extra_key`` under which requests find the exact copy.
    """

    id: int
    key: bytes
    num_tokens: int
    namespace: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated tokens with their log-probabilities (natural; after temperature 1), and the text they spell."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Per token of a given continuation: ``logprobs`` its own log-probability, ``best`` that of the likeliest token
    there."""

    logprobs: tuple[float, ...]
    best: tuple[float, ...] = ()
