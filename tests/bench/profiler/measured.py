"""Contexts with made-up scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evicbench.profiler.study import ALL_FORMS, JUDGES, NUM_JUDGED, Measured
from evicbench.profiler.subjects import NUM_HELD_OUT, NUM_TRAINING

from sglang_evicpress.core import Form

__all__ = ["NUM_HELD_OUT", "NUM_TRAINING", "context"]


def context(
    number: int,
    quality: Callable[[Form], float],
    *,
    held_out: Callable[[Form], float] | None = None,
    family: str = "needle",
) -> Measured:
    """Every question of a form has the same score; ``held_out`` is that of held-out questions where it differs."""
    later = held_out or quality
    one_question = family in ("title", "note")
    return Measured(
        family,
        number.to_bytes(16, "big"),
        1984,
        {} if one_question else repeated(quality, NUM_TRAINING),
        {
            "logprob": repeated(later, 1 if one_question else NUM_HELD_OUT),
            **{name: repeated(later, 1 if one_question else NUM_JUDGED) for name in JUDGES},
        },
    )


def repeated(quality: Callable[[Form], float], count: int) -> dict[Form, Sequence[float]]:
    return {form: [quality(form)] * count for form in ALL_FORMS}
