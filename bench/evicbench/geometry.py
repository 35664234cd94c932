"""Press geometry beside snapkv and keydiff: token F1 of answers over what each keeps, question by question.

Contexts of the testbed are compressed whole, before the question is known, as the server does with a shared prefix.
Answers are greedy, over the survivors alone, and compared with those over the full cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from evicbench.correctness.reference import KV, SINKS, Reference
from evicbench.paths import out_file
from evicbench.report import Line
from evicbench.testbed.server import MODEL
from evicbench.testbed.tasks import FAMILIES, Context, make_context
from evicbench.testbed.vocabulary import ASK, EOS, load_vocabulary
from sglang_evicpress.geometry.calibrate import CalibratedModel
from sglang_evicpress.geometry.centres import QueryGeometry
from sglang_evicpress.press import Press, PressInput, QueryWindow, get_press, select
from sglang_evicpress.press.band_lengths import BandLengthsPress
from sglang_evicpress.press.geometry import GeometryPress
from sglang_evicpress.profiler.scorers.reference import token_f1
from sglang_evicpress.tables import markdown

OTHERS = ("snapkv", "keydiff")
NAMES = ("geometry", "band_lengths", *OTHERS)
CALIBRATED_TOKENS = 64
FRACTIONS = (0.8, 0.5, 0.35, 0.2, 0.1)
NUM_TOKENS, NUM_CONTEXTS, NUM_QUESTIONS = 512, 12, 4
LEAST_QUESTIONS = 300
WINDOW = 32
LONGEST_ANSWER = 14
NUM_RESAMPLED = 2000


@dataclass(frozen=True, slots=True)
class Asked:
    """One question on one form: the F1 of its answer with that over the full cache, by press and kept fraction."""

    context: int
    family: str
    scores: dict[tuple[str, float], float]


@cache
def geometry() -> QueryGeometry:
    """Of the testbed's model, by prompts with answers, as users would send them, about short contexts of each family
    that nobody is asked about otherwise: 3,026 tokens."""
    encode, texts = load_vocabulary().encode, []
    for family in FAMILIES:
        for number in range(2):
            context = make_context(family, CALIBRATED_TOKENS, random.Random(f"calibrate {family} {number}"))
            texts += [
                encode(f"{context.prompt(question.text)} {question.answer}") for question in context.questions[:3]
            ]
    return CalibratedModel(str(MODEL)).measure(texts)


def presses() -> dict[str, Press]:
    whole = geometry()
    calibrated = {"geometry": GeometryPress(whole), "band_lengths": BandLengthsPress(whole)}
    return {**calibrated, **{name: get_press(name) for name in OTHERS}}


def as_node(kv: KV, queries: torch.Tensor) -> PressInput:
    """A prompt as one exact node; ``queries`` [layers, q_heads, tokens, head_dim]."""
    layers, heads, num_tokens, dim = kv.keys.shape
    window = queries[:, :, -WINDOW:].transpose(1, 2).contiguous()
    return PressInput(
        [keys.transpose(0, 1).contiguous() for keys in kv.keys],
        [values.transpose(0, 1).contiguous() for values in kv.values],
        torch.arange(num_tokens),
        torch.arange(num_tokens, dtype=torch.int32).expand(layers, heads, -1).contiguous(),
        0,
        num_tokens,
        QueryWindow(window, torch.arange(num_tokens - window.shape[1], num_tokens)),
        dim**-0.5,
    )


def answer(reference: Reference, past: KV, start: int, question: Sequence[int]) -> list[int]:
    """Greedy answer to ``question`` at positions from ``start`` on, over ``past``; without <eos>."""
    end, spoken, tokens = load_vocabulary().ids[EOS], list[int](), list(question)
    while len(spoken) < LONGEST_ANSWER:
        extension = reference.extend(past, start, tokens)
        past, start = past.then(extension.kv), start + len(tokens)
        token = int(extension.logprobs[-1].argmax())
        if token == end:
            break
        spoken.append(token)
        tokens = [token]
    return spoken


def ask(reference: Reference, number: int, context: Context, pressed: dict[str, Press]) -> Iterator[Asked]:
    """All questions about a context, in all forms."""
    encode = load_vocabulary().encode
    tokens = encode(" ".join(context.tokens))
    whole = reference.prefill(tokens)
    node = as_node(whole.kv, whole.queries)
    held = {
        (name, kept): whole.kv.gather(select(press, node, math.ceil(kept * len(tokens)), SINKS).long())
        for name, press in pressed.items()
        for kept in FRACTIONS
    }
    for question in context.questions[:NUM_QUESTIONS]:
        asked = encode(f"{ASK} {question.text}")
        full = " ".join(map(str, answer(reference, whole.kv, len(tokens), asked)))
        scores = {}
        for form, kv in held.items():
            given = " ".join(map(str, answer(reference, kv, len(tokens), asked)))
            scores[form] = token_f1(given, full)
        yield Asked(number, context.family, scores)


def measure_all(num_contexts: int) -> list[Asked]:
    """``num_contexts`` of every family."""
    reference, pressed = Reference(MODEL), presses()
    drawn = [(family, index) for index in range(num_contexts) for family in FAMILIES]
    return [
        asked
        for number, (family, index) in enumerate(drawn)
        for asked in ask(
            reference, number, make_context(family, NUM_TOKENS, random.Random(f"held out {family} {index}")), pressed
        )
    ]


def interval(found: Sequence[Asked], kept: float, other: str) -> tuple[float, float, float]:
    """Mean F1 of geometry less that of ``other``, and its 95 % interval: a bootstrap over contexts, as questions about
    one share its survivors."""
    gains: dict[int, list[float]] = {}
    for asked in found:
        gains.setdefault(asked.context, []).append(asked.scores["geometry", kept] - asked.scores[other, kept])
    sums, counts = np.array([sum(each) for each in gains.values()]), np.array([len(each) for each in gains.values()])
    drawn = np.random.default_rng(0).integers(len(sums), size=(NUM_RESAMPLED, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(sums.sum() / counts.sum()), float(low), float(high)


def mean_f1(found: Sequence[Asked], form: tuple[str, float]) -> float:
    return float(np.mean([asked.scores[form] for asked in found]))


def table(found: Sequence[Asked]) -> list[str]:
    """Mean F1 by press and kept fraction, of all questions and of each family."""
    rows = []
    for family in ("all", *FAMILIES):
        some = [asked for asked in found if family in ("all", asked.family)]
        for name in NAMES:
            cells = [f"{mean_f1(some, (name, kept)):.3f}" for kept in FRACTIONS]
            rows.append([f"{family}, {len(some)} questions", name, *cells])
    return list(markdown(["questions", "press", *(f"{kept:g} kept" for kept in FRACTIONS)], rows, num_text=2))


def compare(num_contexts: int = NUM_CONTEXTS) -> Iterator[Line]:
    """A line for each other press: differences at every kept fraction, with intervals. Which one is better is told and
    not judged: a model of 0.66 M parameters says nothing of large ones. ``num_contexts``: of each family."""
    found = measure_all(num_contexts)
    out_file("budgets", "geometry.md").write_text("\n".join([*table(found), ""]), encoding="utf-8")
    for other in NAMES[1:]:
        parts = []
        for kept in FRACTIONS:
            mean, low, high = interval(found, kept, other)
            f1 = mean_f1(found, ("geometry", kept))
            parts.append(f"{kept:g} kept: {f1:.3f}, {mean:+.3f} [{low:+.3f}, {high:+.3f}]")
        yield Line(
            f"geometry: token F1 and its difference to {other} [95 % interval], {len(found)} held-out questions",
            f"at least {LEAST_QUESTIONS} questions, each asked over both",
            "; ".join(parts),
            len(found) >= LEAST_QUESTIONS if num_contexts >= NUM_CONTEXTS else None,
        )
