"""Questions about contexts of the testbed: answers and attention over any KV of the context, without a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from evicbench.correctness.reference import KV, Reference
from evicbench.testbed.contexts import generate
from evicbench.testbed.tasks import FAMILIES, ONE_QUESTION
from evicbench.testbed.vocabulary import ASK, EOS, load_vocabulary

MAX_NEW_TOKENS = 14
LENGTHS = (1700, 2400, 3100)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One context: its exact KV with values of bfloat16, the queries that its prefill had, and per question the prompt
    behind the context, the greedy answer over exact KV, and the queries of both."""

    family: str
    kv: KV
    queries: Tensor
    prompts: tuple[list[int], ...]
    exact: tuple[list[int], ...]
    asked: Tensor  # [layers, q_heads, tokens of all questions and answers, head_dim]

    @property
    def num_tokens(self) -> int:
        return self.kv.num_tokens

    def answers(self, reference: Reference, kv: KV) -> list[list[int]]:
        """Greedy answers to all questions over other KV of the context."""
        pairs = zip(self.prompts, self.exact, strict=True)
        return [greedy(reference, kv, self.num_tokens, *pair) for pair in pairs]

    def error(self, kv: KV) -> float:
        """Relative error of the attention output over the context: the mean over layers of the norm of the difference
        over all heads, questions and answers, over the norm of the exact output."""
        return relative_error(attended(self.asked, self.kv), attended(self.asked, kv))


def cases(reference: Reference, num_contexts: int, num_questions: int, seed: int) -> Iterator[Case]:
    vocabulary = load_vocabulary()
    families = [family for family in FAMILIES if family not in ONE_QUESTION]
    for context in generate(num_contexts, LENGTHS, num_questions, seed, families):
        ids = [vocabulary.ids[word] for word in context.tokens]
        whole = reference.prefill(ids)
        kv = KV(whole.kv.keys.bfloat16().float(), whole.kv.values.bfloat16().float())
        prompts = tuple(vocabulary.encode(f"{ASK} {each.text}") for each in context.questions[:num_questions])
        exact = tuple(greedy(reference, kv, len(ids), prompt, []) for prompt in prompts)
        passes = [
            reference.extend(kv, len(ids), [*prompt, *answer]).queries
            for prompt, answer in zip(prompts, exact, strict=True)
        ]
        yield Case(context.family, kv, whole.queries, prompts, exact, torch.cat(passes, 2))


def greedy(reference: Reference, kv: KV, start: int, prompt: Sequence[int], expected: Sequence[int]) -> list[int]:
    """Greedy answer with its <eos> to a prompt that begins at position ``start``. One pass finds how far it is
    ``expected``; behind that, a pass for every token."""
    end = load_vocabulary().ids[EOS]
    last = reference.extend(kv, start, [*prompt, *expected])
    likeliest = last.logprobs[len(prompt) - 1 :].argmax(-1).tolist()
    agreeing = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(likeliest, expected, strict=False)))
    if expected and agreeing == len(expected):
        return list(expected)
    answer = likeliest[: agreeing + 1]
    past = kv.then(last.kv.first(len(prompt) + agreeing))
    while answer[-1] != end and len(answer) < MAX_NEW_TOKENS:
        last = reference.extend(past, start + len(prompt) + len(answer) - 1, answer[-1:])
        past = past.then(last.kv)
        answer.append(int(last.logprobs[-1].argmax()))
    return answer


def text_of(answer: Sequence[int]) -> str:
    words = {token_id: word for word, token_id in load_vocabulary().ids.items()}
    return " ".join(words[token_id] for token_id in answer if words[token_id] != EOS)


def attended(queries: Tensor, kv: KV) -> Tensor:
    """Output of attention of [layers, q_heads, tokens, head_dim] over all of ``kv``, in the same shape but for the
    heads of a KV head being one after the other."""
    layers, heads, _, dim = kv.keys.shape
    grouped = queries.reshape(layers, heads, -1, dim)
    return (grouped @ kv.keys.transpose(-1, -2) * dim**-0.5).softmax(-1) @ kv.values


def relative_error(exact: Tensor, given: Tensor) -> float:
    """Mean over layers of norms of the difference over norms of ``exact``."""
    difference = (given.double() - exact.double()).flatten(1).norm(dim=1)
    return float((difference / exact.double().flatten(1).norm(dim=1)).mean())
