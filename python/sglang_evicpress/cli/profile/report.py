"""Report of a profiling run: a table for people, and one line of JSON for each context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import orjson

from sglang_evicpress.cli.profile.offline import Outcome
from sglang_evicpress.core import Form
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.tables import aligned

_MAX_NAME = 24


def table(outcomes: Sequence[Outcome], forms: Sequence[Form]) -> str:
    """A row for each context: its best form of ``forms`` at each kept fraction, with the mean quality over its queries;
    then what was not measured and why."""
    fractions = sorted({form.kept_fraction for form in forms}, reverse=True)
    rows = [["context", "tokens", "queries", *(f"best at {kept:g}" for kept in fractions)]]
    notes = []
    for outcome in outcomes:
        profile = outcome.profile
        if profile is None:
            notes.append(f"{outcome.id!r} {'left out' if outcome.is_skipped else 'failed'}: {outcome.error}")
            continue
        row = [shortened(outcome.id), str(profile.num_tokens), str(profile.num_queries)]
        rows.append([*row, *(_best(profile, forms, kept) for kept in fractions)])
        missing = [str(form) for form in forms if form not in profile.forms]
        if missing:
            notes.append(f"{outcome.id!r} could not be measured in {', '.join(missing)}")
        if outcome.error:
            notes.append(f"{outcome.id!r} is measured in part: {outcome.error}")
    num_there = sum(outcome.was_there for outcome in outcomes)
    if num_there:
        notes.append(f"{num_there} of {len(outcomes)} contexts were measured before")
    return "\n".join([*(aligned(rows) if len(rows) > 1 else []), *notes])


def records(outcomes: Iterable[Outcome]) -> bytes:
    """Lines of JSON."""
    return b"".join(orjson.dumps(record(outcome)) + b"\n" for outcome in outcomes)


def record(outcome: Outcome) -> dict[str, object]:
    """JSON object of one context."""
    if outcome.profile is None:
        return {"id": outcome.id, "error": outcome.error, "is_skipped": outcome.is_skipped}
    left = {"error": outcome.error} if outcome.error else {}
    return {"id": outcome.id, "profile": outcome.profile.to_json(), "was_there": outcome.was_there, **left}


def shortened(name: str) -> str:
    """On one line of a terminal."""
    line = "".join(letter if letter.isprintable() else "?" for letter in name)
    return line if len(line) <= _MAX_NAME else f"{line[: _MAX_NAME - 3]}..."


def _best(profile: Profile, forms: Sequence[Form], kept: float) -> str:
    means = {form: profile.forms[form].mean for form in forms if form.kept_fraction == kept and form in profile.forms}
    if not means:
        return "-"
    form = max(means, key=means.__getitem__)
    return f"{form.press or form} {means[form]:.3f}"
