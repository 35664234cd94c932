"""Rate and distortion of codecs and presses: bits of a value beside the error of attention's output and of answers.

Offline with transformers: a context is prefilled, its KV is rounded to bfloat16, stored in a form and read back, and
questions are answered greedily over that. Synthetic KV is one head of 128 channels, four of which are outliers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import orjson
import torch
from torch import Tensor

from evicbench.codecs.answers import Case, attended, cases, relative_error, text_of
from evicbench.codecs.quantisers import errors
from evicbench.codecs.stored_forms import (
    BITS,
    GROUPS,
    PRESSES,
    RAW_BYTES,
    StorableForm,
    StoredForm,
    coded_forms,
    pressed_forms,
    rows_of,
)
from evicbench.correctness.reference import KV, Reference
from evicbench.paths import out_file
from evicbench.report import Line
from evicbench.testbed.vocabulary import MODEL_DIR
from sglang_evicpress.benchmark.environment import environment
from sglang_evicpress.benchmark.figures.drawing import legend_above, panels
from sglang_evicpress.policy.hull import upper_hull
from sglang_evicpress.profiler.engine import Answer
from sglang_evicpress.profiler.scorers.minilm import MiniLM
from sglang_evicpress.profiler.scorers.reference import token_f1
from sglang_evicpress.tables import markdown

SEED = 18
OUTLIERS = (5, 37, 70, 101)
NOISE = 1.01
"""Rounding makes two quantisers of the same steps differ by so much."""


@dataclass(slots=True)
class Point:
    """Figures of one form. ``errors`` has one a context, ``f1`` and ``minilm`` one a question."""

    form: StorableForm
    num_bytes: int = 0
    raw_bytes: int = 0
    errors: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    minilm: list[float] = field(default_factory=list)
    synthetic_bits: float = math.nan
    synthetic_error: float = math.nan

    @property
    def bits(self) -> float:
        return 8 * RAW_BYTES * self.num_bytes / self.raw_bytes

    @property
    def margin(self) -> float:
        """Half of a 95 % interval of the mean F1 over contexts."""
        num_contexts = len(self.errors)
        means = np.reshape(self.f1, (num_contexts, -1)).mean(axis=1)
        return float(1.96 * means.std(ddof=1) / math.sqrt(num_contexts))

    def row(self, names_on_hull: Sequence[str]) -> list[str]:
        return [
            self.form.name,
            f"{self.bits:.2f}",
            f"{fmean(self.errors):.4f}",
            f"{self.synthetic_bits:.2f}",
            f"{self.synthetic_error:.4f}",
            f"{fmean(self.f1):.3f} ± {self.margin:.3f}",
            f"{fmean(self.minilm):.3f}",
            "yes" if self.form.name in names_on_hull else "",
        ]


HEAD = (
    *("form", "bits per value", "error of attention output", "synthetic: bits", "synthetic: error"),
    *("F1 with exact", "MiniLM with exact", "on the hull"),
)


def measure(num_contexts: int = 21, num_questions: int = 6) -> Iterator[Line]:
    reference = Reference(MODEL_DIR)
    given = list(cases(reference, num_contexts, num_questions, SEED))
    synthetic = synthetic_kv(32768)
    yield from quantiser_lines(given, synthetic[0])
    points = measured(reference, given, synthetic, [StoredForm(), *coded_forms(), *pressed_forms()])
    write(points, f"{num_contexts} contexts, {sum(len(case.prompts) for case in given)} questions")
    yield from form_lines(points)


def synthetic_kv(num_tokens: int) -> tuple[KV, Tensor]:
    """KV of one head of 128 channels with values of bfloat16, and 96 queries, the last tokens': keys are normal, four
    channels of them have mean 20 and spread 3, which a model's keys have some of (KIVI, arXiv 2402.02750, section 3);
    queries have spread 2, so that some 200 of 32,768 tokens get the attention."""
    draw = torch.Generator().manual_seed(SEED)
    keys, values, queries = (torch.randn(1, 1, num, 128, generator=draw) for num in (num_tokens, num_tokens, 96))
    keys[..., OUTLIERS] = 20.0 + 3.0 * keys[..., OUTLIERS]
    return KV(keys.bfloat16().float(), values.bfloat16().float()), 2.0 * queries


def measured(
    reference: Reference, given: Sequence[Case], synthetic: tuple[KV, Tensor], forms: Iterable[StorableForm]
) -> list[Point]:
    minilm, points = MiniLM(), []
    kv, queries = synthetic
    wanted = attended(queries, kv)
    exact = [[text_of(answer) for answer in case.exact] for case in given]
    for form in forms:
        point = Point(form)
        for case, texts in zip(given, exact, strict=True):
            stored = form.store(case.kv, case.queries)
            point.num_bytes += stored.num_bytes
            point.raw_bytes += RAW_BYTES * (case.kv.keys.numel() + case.kv.values.numel())
            point.errors.append(case.error(stored.kv))
            for text, answer in zip(texts, case.answers(reference, stored.kv), strict=True):
                point.f1.append(1.0 if text_of(answer) == text else token_f1(text_of(answer), text))
                one, other = (Answer((), (), each) for each in (text, text_of(answer)))
                point.minilm.append(minilm.score(one, other, None, None))
        stored = form.store(kv, queries)
        point.synthetic_bits = 8 * stored.num_bytes / (kv.keys.numel() + kv.values.numel())
        point.synthetic_error = relative_error(wanted, attended(queries, stored.kv))
        points.append(point)
        print(f"    {' | '.join(point.row(()))}", flush=True)
    return points


def quantiser_lines(given: Sequence[Case], synthetic: KV) -> Iterator[Line]:
    """Every codec beside the formula in float64 and a library's quantiser, on both kinds of KV."""
    kvs = {"testbed": [case.kv for case in given], "synthetic": [synthetic]}
    for name, held in kvs.items():
        worst, told, ratios = 0.0, [], []
        for bits in BITS:
            for group in GROUPS:
                layers = [
                    errors(rows_of(kv.keys[layer]), rows_of(kv.values[layer]), bits, group)
                    for kv in held
                    for layer in range(kv.keys.shape[0])
                ]
                worst = max(worst, *(each.over_bound for each in layers))
                ours, plain, theirs = (fmean(getattr(each, of) for each in layers) for of in OF_ERRORS)
                told.append(f"int{bits} G{group} {ours:.5f} ({plain:.5f}, {theirs:.5f})")
                ratios += [ours / plain, ours / theirs]
        yield Line(
            f"{name} KV: error of a decoded value over its bound, half a step and the rounding to bfloat16, in float64",
            "<= 1",
            f"{worst:.3f}",
            worst <= 1.0,
        )
        yield Line(
            f"{name} KV: relative L2 error of codec (KIVI's formula in float64, torchao's quantiser)",
            f"above neither by more than {NOISE - 1:.0%}",
            f"{'; '.join(told)}; at most {max(ratios):.4f}x",
            max(ratios) <= NOISE,
        )


OF_ERRORS = ("codec", "float64", "torchao")


def form_lines(points: Sequence[Point]) -> Iterator[Line]:
    by_name = {point.form.name: point for point in points}
    for bits in BITS:
        coded = by_name[StoredForm(bits=bits).name]
        pressed = [point for point in points if "@" in point.form.name and 0.95 < point.bits / coded.bits <= 1.001]
        told = ", ".join(
            f"{point.form.name} {fmean(point.f1):.3f} (error {fmean(point.errors):.3f})" for point in pressed
        )
        best = max((fmean(point.f1) for point in pressed), default=0.0)
        yield Line(
            f"{coded.form.name}, {coded.bits:.2f} bits per value: F1 with exact beside presses in equal bytes",
            "reported",
            f"{fmean(coded.f1):.3f} (error {fmean(coded.errors):.4f}), best press {best:.3f}: {told}",
            True,
        )
    yield Line("forms on the hull of bytes and F1", "reported", ", ".join(hull_names(points)), True)


def hull_names(points: Sequence[Point]) -> list[str]:
    """Forms on the upper hull of bytes and F1, from the smallest on that are like exact."""
    options = [(point.num_bytes, fmean(point.f1), at) for at, point in enumerate(points)]
    options.sort(key=lambda option: (-option[1], option[0]))
    return [points[at].form.name for _, _, at in upper_hull(options)]


def write(points: Sequence[Point], size: str, name: str = "rate-distortion") -> None:
    """Table, plot and raw figures in the out folder."""
    on_hull = hull_names(points)
    settings = environment("make show-codecs, measurement distortion")
    lines = [f"{size}; {settings['versions']}, commit {settings['commit']}, {settings['machine']}.", ""]
    lines += markdown(HEAD, (point.row(on_hull) for point in points))
    out_file("codecs", f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    raw = [
        {"form": point.form.name, "bits": point.bits, "errors": point.errors, "f1": point.f1, "minilm": point.minilm}
        | {"synthetic_bits": point.synthetic_bits, "synthetic_error": point.synthetic_error}
        for point in points
    ]
    out_file("codecs", f"{name}.json").write_bytes(orjson.dumps({**settings, "size": size, "points": raw}))
    draw(points, name)


def draw(points: Sequence[Point], name: str) -> None:
    """Bits of a value beside each of four figures; a curve for every kind of form."""
    figure, axes = panels(4, columns=2, width=5.0)
    kinds: dict[str, list[Point]] = {}
    for point in points[1:]:
        kinds.setdefault(kind_of(point.form.name), []).append(point)
    shown = (
        ("testbed: error of attention output", lambda point: (point.bits, fmean(point.errors))),
        ("synthetic: error of attention output", lambda point: (point.synthetic_bits, point.synthetic_error)),
        ("token F1 with exact", lambda point: (point.bits, fmean(point.f1))),
        ("MiniLM cosine with exact", lambda point: (point.bits, fmean(point.minilm))),
    )
    for (title, of), panel in zip(shown, axes, strict=True):
        for number, (kind, found) in enumerate(kinds.items()):
            places = sorted(map(of, found))
            style = "--" if kind.startswith(PRESSES) else "-"
            panel.plot(*zip(*places, strict=True), style, marker="osv^DPx*h+dp"[number % 12], markersize=4, label=kind)
        panel.set(xlabel="bits per value (raw: 16)", title=title)
        panel.grid(alpha=0.3)
        if "error" in title:
            panel.set_yscale("log")
    legend_above(figure, axes)
    figure.savefig(out_file("codecs", f"{name}.png"), dpi=110)


def kind_of(name: str) -> str:
    """Curve to which a form belongs: a codec by group and window over its bits, a press over kept fractions."""
    press, at, rest = name.partition("@")
    if at:
        return " + ".join([press, *rest.split("+")[1:]])
    codec, *settings = name.removeprefix("exact+").split()
    return " ".join([codec.rstrip("0123456789.") + ", all bits:", *settings])
