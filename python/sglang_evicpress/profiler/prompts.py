"""From a context and its questions to tokens: the same that users' requests have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Literal, Self

from sglang_evicpress.profiler.contexts import GivenQuestion
from sglang_evicpress.profiler.engine import EngineError
from sglang_evicpress.profiler.measure import Asked
from sglang_evicpress.profiler.transport import Transport
from sglang_evicpress.quality.profile import BLOCK_TOKENS

PromptKind = Literal["chat", "text"]

_PROBE = "~"
"""Stands for a question that begins like no other: what the questions have in common is not the context's."""


class ContextTooShort(ValueError):
    """The prompts share less than one whole block, or page, of tokens."""


@dataclass(frozen=True, slots=True)
class Template:
    """Template around a context and a question. ``parse`` checks it."""

    head: str
    middle: str
    tail: str

    @classmethod
    def parse(cls, text: str) -> Self:
        r"""Read a text with ``{context}`` and, behind it, ``{question}``; ``\n`` in it is a line break.

        Raises ValueError naming the text.
        """
        head, context, rest = text.replace(r"\n", "\n").partition("{context}")
        middle, question, tail = rest.partition("{question}")
        if not context or not question or "{context}" in rest or "{question}" in head + tail:
            raise ValueError(f"{text!r}: expected a text with {{context}} and, behind it, {{question}}, each once")
        return cls(head, middle, tail)

    def fill(self, context: str, question: str) -> str:
        return f"{self.head}{context}{self.middle}{question}{self.tail}"


@dataclass(frozen=True, slots=True)
class Prompts:
    """``tokenize`` gives the tokens of a whole prompt with that text, as users' requests have them; ``page_size``: that
    of the server that holds them."""

    tokenize: Callable[[str], list[int]]
    template: Template
    page_size: int = 1

    def split(self, context: str, questions: Sequence[GivenQuestion]) -> tuple[list[int], list[Asked]]:
        """The tokens of the context, whole blocks and pages that every prompt with it begins with, and the queries
        behind them.

        Raises ContextTooShort, and what ``tokenize`` raises.
        """
        prompts = [self.tokenize(self.template.fill(context, question.text)) for question in questions]
        shared = commonprefix([*prompts, self.tokenize(self.template.fill(context, _PROBE))])
        num_tokens = min(len(shared), *(len(prompt) - 1 for prompt in prompts))  # something is left to be asked
        unit = math.lcm(BLOCK_TOKENS, self.page_size)
        num_tokens -= num_tokens % unit
        if not num_tokens:
            raise ContextTooShort(f"its prompts share {len(shared)} tokens: expected at least {unit}")
        return prompts[0][:num_tokens], [
            Asked(prompt[num_tokens:], question.answer) for prompt, question in zip(prompts, questions, strict=True)
        ]


def served_tokens(transport: Transport, kind: PromptKind, text: str) -> list[int]:
    """Tokens of a prompt as the server makes them. ``kind`` chat: one message of a user, in the chat template of the
    model; text: a prompt to be continued. Raises EngineError."""
    message = {"role": "user", "content": text}
    body = {"messages": [message]} if kind == "chat" else {"prompt": text}
    tokens = transport.ask("POST", "/tokenize", body).get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise EngineError(f"POST /tokenize answered {tokens!r:.100} as tokens: expected a list of numbers")
    return tokens
