"""Out folders of a benchmark under load that never ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.unit.benchmark.raw import write_plan, write_run, write_scores

SECONDS = 10.0
SATURATION = 4.0
MULTIPLES = (0.5, 1.0, 2.0)
NAMES = {
    "full-cache+attention": "full-cache+attention",
    "tiers-lru": "tiers-lru",
    "keydiff@0.8+lru": "fixed",
    "keydiff@0.5+lru": "fixed",
    "evicpress a=0.5": "evicpress",
    "evicpress a=2": "evicpress",
}
OURS = "evicpress a=0.5"


@dataclass(frozen=True)
class At:
    """One run: the TTFT of every request, how many are answered per second (as offered where None; the others are
    cut), their F1, and the tokens of 10,000 that were computed, by reason."""

    ttft_s: float = 0.1
    answers_rps: float | None = None
    f1: float = 0.98
    computed: Mapping[str, int] = field(default_factory=lambda: {"new": 500})
    num_refused: int = 0


Runs = dict[tuple[str, float, int], At]


def good_runs(repetitions: int = 3) -> Runs:
    """Every promise holds. By (system, multiple of saturation, repetition); 0 is one client."""
    runs = {}
    for repetition in range(repetitions):
        for multiple in (0.0, *MULTIPLES):
            for system, ttft_s, f1 in (
                ("full-cache+attention", 0.1, 1.0),
                ("tiers-lru", 0.2 if multiple == 0 else 9.0, 1.0),
                ("keydiff@0.8+lru", 0.2 if multiple == 0 else 0.3 if multiple < 1 else 1.5, 0.98),
                ("keydiff@0.5+lru", 0.05, 0.8),
                ("evicpress a=0.5", 0.1, 0.98),
                ("evicpress a=2", 0.15, 0.99),
            ):
                runs[system, multiple, repetition] = At(ttft_s, 4.0 if multiple > 1 else None, f1)
    return runs


def changed(runs: Runs, system: str, multiple: float, repetition: int | None = None, **values: Any) -> Runs:
    """The same but for one run, or for that of every repetition."""
    return {
        key: replace(at, **values) if key[:2] == (system, multiple) and repetition in (None, key[2]) else at
        for key, at in runs.items()
    }


def write_load(folder: Path, runs: Runs, saturation: float = SATURATION, begin_s: float = 1.8e9, **config: Any) -> Path:
    repetitions = 1 + max(repetition for _, _, repetition in runs)
    load = {"of_saturation": [*MULTIPLES], "reference": OURS, "seconds": SECONDS, "saturation_rps": saturation}
    names = {name: kind for name, kind in NAMES.items() if any(key[0] == name for key in runs)}
    given = {
        **{"name": "made-up", "rates": [0, *(saturation * multiple for multiple in MULTIPLES)], "load": load},
        **{"repetitions": repetitions, "ttft_limit_s": 0.5, "policy_flags": [], **config},
    }
    write_plan(folder, names, **given)
    scores = []
    for (system, multiple, repetition), at in runs.items():
        rate = saturation * multiple
        lines = _lines(at, rate)
        tokens = {"prompt_tokens": 10_000, "computed_tokens": dict(at.computed)}
        seconds = {"not_worth_s": {"predicted": 1.0, "actual": 2.0}} if "not_worth" in at.computed else {}
        before = {"admission": {"prompt_tokens": 0, "computed_tokens": {}}}
        has_policy = not system.startswith("full-cache")
        header = {
            "seconds": SECONDS if rate else None,
            "stats_before": before if has_policy else None,
            "stats": {"cached_slots": 1, "admission": {**tokens, **seconds}} if has_policy else None,
            "commit": "0123456789ab",
            "begin_unix_s": begin_s + 600.0 * repetition,
        }
        write_run(folder, system, rate, lines, repetition, **header)
        scores += [
            (system, repetition, rate, line["index"], at.f1)
            for line in lines
            if line["error"] is None and not line["is_cut"]
        ]
    write_scores(folder, scores)
    return folder


def _lines(at: At, rate: float) -> list[dict[str, Any]]:
    count = round(rate * SECONDS) or 8
    answers = count if at.answers_rps is None else round(at.answers_rps * SECONDS)
    lines = []
    for index in range(count):
        arrival_s = 0.0 if rate == 0 else index * (SECONDS - 0.5) / count
        is_refused = index < at.num_refused
        is_cut = index >= answers
        end_s = SECONDS + 5.0 if is_cut else min(arrival_s + at.ttft_s, SECONDS)
        lines.append(
            {
                **{"index": index, "context": index, "family": "notes", "question": "?", "itl_s": []},
                **{"arrival_s": arrival_s, "sent_s": arrival_s, "end_s": end_s},
                "ttft_s": None if is_cut or is_refused else at.ttft_s,
                **{"prompt_tokens": 100, "cached_tokens": 60, "cached_by_tier": None, "answer": "a", "reference": None},
                "error": "status 503: too many" if is_refused else None,
                **{"is_refused": is_refused, "is_cut": is_cut},
            }
        )
    return lines
