"""Interface of a server to the profiler: shadows of a context, answers, and the likelihood of a given answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_evicpress.core import Form


class EngineError(Exception):
    """The request cannot be carried out; one sentence says why."""


class ShadowRefused(EngineError):
    """There is no room for a shadow now; later there may be."""


class ShadowLost(EngineError):
    """The shadow is gone: users needed its room, or the cache was flushed. What was measured in it before holds."""


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
    there, ``expected`` the mean log-probability of a token drawn there (as far as the likeliest tokens show it)."""

    logprobs: tuple[float, ...]
    best: tuple[float, ...] = ()
    expected: tuple[float, ...] = ()


class Engine(Protocol):
    """A server, or something that answers like one. Any call may raise EngineError."""

    def open_shadow(self, tokens: Sequence[int], namespace: str | None) -> Shadow:
        """Copy, or where it is not there compute, the exact KV of ``tokens`` as users' requests with ``extra_key``
        ``namespace`` have it. ``tokens`` are whole blocks. Raises ShadowRefused."""

    def make_form(self, shadow: Shadow, form: Form) -> str:
        """Compress a further copy of the shadow; returns its namespace. Raises ShadowRefused or ShadowLost, and
        EngineError when the form cannot be made of this context."""

    def drop_form(self, shadow: Shadow, form: Form) -> None:
        """Free that copy."""

    def close_shadow(self, shadow: Shadow, *, adopt: bool = False) -> None:
        """Free the shadow and what was made of it. ``adopt``: users' lossy nodes of this context get its exact KV."""

    def generate(self, namespace: str, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
        """The greedy answer to each prompt. The prompts begin with the shadow's tokens; raises ShadowLost when those
        did not come from the cache."""

    def score(
        self, namespace: str, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, top: int = 0
    ) -> list[Likelihood]:
        """Likelihood of each answer behind its prompt, in one forward pass each. ``top``: with how many of the
        likeliest tokens ``best`` and ``expected`` are made; 0 leaves them empty. Raises ShadowLost as ``generate``."""
