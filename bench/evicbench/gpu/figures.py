"""Results of a GPU phase: lines with a verdict, as JSON lines and as a table with versions.

Nothing is invented: a promise that was not measured is a line that says so and why, and figures that do not come from a
whole run on a GPU are printed with a warning and never written.
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_evicpress.files import write_whole
from sglang_evicpress.quantiles import quantile
from sglang_evicpress.tables import markdown

LIMIT_S = 560.0
"""A phase starts no further part after this. Nothing cuts a running part short: a phase ends within 10 minutes only
where its boot and what its last part still takes fit the other 40 s. Of a run that is killed then, every part that had
ended is written, and the one that was running is lost."""

CUT_OFF = "the run ended before it"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line. ``value`` in ``unit``, None when it was not measured; ``detail`` says the rest in words. ``ok`` is None
    where nothing was promised; a time decides it where ``is_timed``. ``spread``: the quartiles of what ``value`` is the
    median of."""

    what: str
    value: float | None
    unit: str = ""
    target: str = ""
    ok: bool | None = None
    detail: str = ""
    spread: tuple[float, float] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    is_timed: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "" if self.ok is None else ("ok" if self.ok else "MISSED")

    @property
    def measured(self) -> str:
        """The figure as words."""
        parts = []
        if self.value is not None and (self.unit or not self.detail):
            parts.append(f"{_shown(self.value)} {self.unit}".strip())
        if self.spread is not None:
            parts[-1] += f" ({_shown(self.spread[0])} to {_shown(self.spread[1])})"
        return "; ".join([*parts, *filter(None, [self.detail])])


def missing(what: str, why: str, target: str = "") -> Figure:
    """A promise that was not measured."""
    return Figure(what, None, target=target, detail=why)


def check(what: str, ok: bool, detail: str, target: str) -> Figure:
    """A promise that holds or does not; the value is 1 or 0."""
    return Figure(what, float(ok), target=target, ok=ok, detail=detail)


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one thing."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quantile(self.values, 0.25), quantile(self.values, 0.75)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a phase; ``targets`` are the lines that stand for it where it does not get to measure."""

    name: str
    targets: tuple[str, ...]
    measure: Callable[[], Iterator[Figure]]


def run_parts(
    parts: Sequence[Part],
    *,
    only: str = "",
    limit_s: float = LIMIT_S,
    say: Callable[[Figure], None],
    keep: Callable[[Sequence[Figure]], None] = lambda figures: None,
) -> tuple[list[Figure], bool]:
    """Measure the parts whose name holds ``only``; returns every figure and whether no part failed.

    A part that raises is one failed line and its promises that have none; so is one for which there is no time left.
    ``keep`` gets the figures after every part that was measured, with the promises of those after it as not measured.
    """
    begin, figures, is_whole = time.monotonic(), [], True
    for index, part in enumerate(parts):
        found: list[Figure] = []
        is_late, is_asked_for = time.monotonic() - begin >= limit_s, only in part.name
        why = f"no time left: the phase stops after {limit_s:g} s" if is_asked_for else f"not asked for (--only {only})"
        if is_measured := is_asked_for and not is_late:
            start = time.monotonic()
            print(f"-- {part.name}", flush=True)
            try:
                for figure in part.measure():
                    say(figure)
                    found.append(figure)
                why = "the part ended without it"
            except Exception as error:  # noqa: BLE001  the parts after it are still worth their time
                traceback.print_exc()
                is_whole = False
                why = f"the part failed: {type(error).__name__}: {error}".partition("\n")[0]
            print(f"   {part.name}: {time.monotonic() - start:.0f} s", flush=True)
        left = [text for text in part.targets if not any(figure.what.startswith(text) for figure in found)]
        for text in left:
            found.append(missing(text, why))
            say(found[-1])
        figures += found
        later = [missing(text, CUT_OFF) for other in parts[index + 1 :] for text in other.targets]
        if is_measured or not later:
            keep([*figures, *later])
    return figures, is_whole


def untimed(figure: Figure) -> Figure:
    """Without a verdict where it is a matter of time: on a CPU nothing is promised."""
    return replace(figure, ok=None) if figure.is_timed else figure


def print_figure(figure: Figure) -> None:
    target = f" | target: {figure.target}" if figure.target else ""
    print(f"{figure.verdict:12} {figure.what}{target} | {figure.measured}", flush=True)


def status_of(figures: Sequence[Figure], is_whole: bool) -> int:
    """0 where something was measured, nothing failed and nothing is missed; else 1."""
    measured = any(figure.value is not None for figure in figures)
    return 0 if is_whole and measured and not any(figure.ok is False for figure in figures) else 1


def write_results(out: Path, phase: str, machine: Mapping[str, Any], figures: Sequence[Figure]) -> Path:
    """``PHASE.jsonl``, the machine first, and ``PHASE.md``; a run with ``--only``, or its next part, adds to what
    is there of the same commit and machine. Returns the table."""
    out.mkdir(parents=True, exist_ok=True)
    lines = out / f"{phase}.jsonl"
    kept = _earlier(lines, machine, {figure.what for figure in figures if figure.value is not None})
    known = {entry["what"] for entry in kept}
    entries = kept + [
        asdict(figure) | {"verdict": figure.verdict, "measured": figure.measured, "when": machine.get("when")}
        for figure in figures
        if figure.value is not None or figure.what not in known
    ]
    text = [json.dumps({"machine": dict(machine), "phase": phase})]
    write_whole(str(lines), "\n".join([*text, *map(json.dumps, entries), ""]).encode())
    table = out / f"{phase}.md"
    write_whole(str(table), document(phase, machine, entries).encode())
    return table


def document(phase: str, machine: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    rows = [f"# GPU: {phase}", "", ", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    columns = ("what", "target", "measured", "verdict")
    known = [[entry[name] for name in columns] for entry in entries if entry["value"] is not None]
    rows += markdown(columns, known, num_text=4)
    left = [entry for entry in entries if entry["value"] is None]
    if left:
        rows += ["", "Not measured:", ""]
        rows += [f"- {entry['what']}: {entry['detail']}" for entry in left]
    return "\n".join(rows) + "\n"


def _earlier(lines: Path, machine: Mapping[str, Any], replaced: set[str]) -> list[dict[str, Any]]:
    try:
        head, *rest = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    same = all(head["machine"].get(name) == machine.get(name) for name in ("commit", "gpu", "driver"))
    return [entry for entry in rest if entry["value"] is not None and entry["what"] not in replaced] if same else []


def _shown(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"
