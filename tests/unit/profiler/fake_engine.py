"""An engine without a model: what it answers follows from tables of qualities, and it can refuse and lose shadows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256

from sglang_evicpress.core import Form
from sglang_evicpress.profiler.engine import (
    Answer,
    Likelihood,
    NotMakeable,
    Shadow,
    ShadowLost,
    ShadowRefused,
)
from sglang_evicpress.quality.profile import BLOCK_TOKENS, context_keys

IDENTITY = bytes(range(16))
BEST_LOGPROB = -0.25
"""Of the likeliest token, everywhere; one drawn there is half as likely."""


class FakeEngine:
    """Deterministic ``Engine``; counts what a model would have computed.

    On a form of quality q an exact answer's tokens are each q times as likely, and the share q of an answer generated
    there is the exact answer's. q comes from ``qualities``, or from ``of_context`` for the key of a context, times
    ``of_question`` for the tokens of a question. On exact KV an answer in ``served`` has that quality, the exact one 1,
    any other 0.1.

    Shadows and forms hold at most ``room_tokens``; forms in ``impossible`` cannot be made. After ``lose_after`` calls
    that use a shadow every one is lost.
    """

    def __init__(
        self,
        qualities: Mapping[Form, float],
        *,
        of_context: Mapping[bytes, Mapping[Form, float]] | None = None,
        of_question: Mapping[tuple[int, ...], float] | None = None,
        served: Mapping[tuple[int, ...], float] | None = None,
        answer_tokens: int = 20,
        impossible: Collection[Form] = (),
        room_tokens: float = math.inf,
        lose_after: float = math.inf,
    ) -> None:
        self.qualities, self.of_context, self.of_question = qualities, of_context or {}, of_question or {}
        self.served = served or {}
        self.answer_tokens, self.impossible = answer_tokens, impossible
        self.room_tokens, self.lose_after = room_tokens, lose_after
        self.num_forwards = 0
        """Passes through the model, one per prompt and one more for each further token generated."""
        self.num_computed_tokens = 0
        """Tokens that went through the model, shadows' own left out."""
        self.num_opened = 0
        self.most_tokens = 0
        self.open: dict[int, Shadow] = {}
        self.made: dict[tuple[int, Form], str] = {}
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._num_uses = 0

    def exact_answer(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """20 tokens, or whatever ``answer_tokens`` says, below 1000; the same for the same prompt."""
        digest = sha256(repr(tuple(prompt)).encode()).digest()
        return tuple(1 + (digest[place % 32] + place) % 999 for place in range(self.answer_tokens))

    def open_shadow(self, tokens: Sequence[int], namespace: str | None) -> Shadow:
        if not len(tokens) or len(tokens) % BLOCK_TOKENS:
            raise ValueError(f"{len(tokens)} tokens: expected whole blocks of {BLOCK_TOKENS}")
        self._take(len(tokens))
        key = context_keys(IDENTITY, namespace, tokens)[-1]
        self.num_opened += 1
        shadow = Shadow(self.num_opened, key, len(tokens), f"shadow {self.num_opened}")
        self.open[shadow.id], self._tokens[shadow.id] = shadow, tuple(tokens)
        return shadow

    def make_form(self, shadow: Shadow, form: Form) -> str:
        self._use(shadow)
        if form in self.impossible:
            raise NotMakeable(f"{form} cannot be made")
        self._take(math.ceil(shadow.num_tokens * form.kept_fraction))
        self.made[shadow.id, form] = f"{shadow.namespace} {form}"
        return self.made[shadow.id, form]

    def drop_form(self, shadow: Shadow, form: Form) -> None:
        if self.made.pop((shadow.id, form), None) is None:
            raise ShadowLost(f"{form} is gone")

    def close_shadow(self, shadow: Shadow, *, adopt: bool = False) -> None:
        if self.open.pop(shadow.id, None) is None:
            raise ShadowLost(f"shadow {shadow.id} is gone")
        self.made = {key: name for key, name in self.made.items() if key[0] != shadow.id}

    def generate(self, namespace: str, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
        shadow, form = self._find(namespace)
        answers = []
        for prompt in prompts:
            best = self.exact_answer(prompt)
            num_same = round(self._quality(shadow, form, prompt) * len(best))
            tokens = (*best[:num_same], *(token + 1000 for token in best[num_same:]))[:max_new_tokens]
            self._count(shadow, prompt, max(0, len(tokens) - 1), num_forwards=max(1, len(tokens)))
            answers.append(Answer(tokens, (BEST_LOGPROB,) * len(tokens), " ".join(map(str, tokens))))
        return answers

    def score(
        self, namespace: str, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, top: int = 0
    ) -> list[Likelihood]:
        shadow, form = self._find(namespace)
        likelihoods = []
        for prompt, answer in zip(prompts, answers, strict=True):
            quality, best = self._quality(shadow, form, prompt), self.exact_answer(prompt)
            if tuple(answer) != best[: len(answer)]:
                quality *= self.served.get(tuple(answer), 0.1)
            self._count(shadow, prompt, len(answer), num_forwards=1)
            logprobs = (BEST_LOGPROB + math.log(quality),) * len(answer)
            if not top:
                likelihoods.append(Likelihood(logprobs))
                continue
            likelihoods.append(Likelihood(logprobs, (BEST_LOGPROB,) * len(answer)))
        return likelihoods

    def _quality(self, shadow: Shadow, form: Form | None, prompt: Sequence[int]) -> float:
        if form is None:
            return 1.0
        question = tuple(prompt[shadow.num_tokens :])
        return self.of_context.get(shadow.key, self.qualities)[form] * self.of_question.get(question, 1.0)

    def _find(self, namespace: str) -> tuple[Shadow, Form | None]:
        for shadow in self.open.values():
            forms = [form for (owner, form), name in self.made.items() if owner == shadow.id and name == namespace]
            if namespace == shadow.namespace or forms:
                self._use(shadow)
                return shadow, forms[0] if forms else None
        raise ShadowLost(f"nothing is in namespace {namespace!r}")

    def _count(self, shadow: Shadow, prompt: Sequence[int], num_more: int, *, num_forwards: int) -> None:
        if tuple(prompt[: shadow.num_tokens]) != self._tokens[shadow.id] or len(prompt) <= shadow.num_tokens:
            raise ShadowLost("a prompt is not the shadow's tokens and a question")
        self.num_forwards += num_forwards
        self.num_computed_tokens += len(prompt) - shadow.num_tokens + num_more

    def _use(self, shadow: Shadow) -> None:
        self._num_uses += 1
        if self._num_uses > self.lose_after:
            self.open.clear()
            self.made.clear()
        if shadow.id not in self.open:
            raise ShadowLost(f"shadow {shadow.id} is gone")

    def _take(self, num_tokens: int) -> None:
        held = sum(shadow.num_tokens for shadow in self.open.values())
        held += sum(math.ceil(self.open[owner].num_tokens * form.kept_fraction) for owner, form in self.made)
        if held + num_tokens > self.room_tokens:
            raise ShadowRefused(f"{num_tokens} tokens do not fit beside {held}: there is room for {self.room_tokens}")
        self.most_tokens = max(self.most_tokens, held + num_tokens)
