"""The grid under load as it was published: its lines, what commit they are of, and whether the code changed since."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from evicbench.load.repetitions import Repetition, changed, read, repetitions_of, together, write
from evicbench.load.targets import Grid, targets
from evicbench.paths import BENCH, ROOT
from evicbench.report import Line
from sglang_evicpress.benchmark.load_tables import load_lines
from sglang_evicpress.benchmark.results import Results
from sglang_evicpress.benchmark.tables import setting_lines
from sglang_evicpress.tables import markdown

RESULTS = BENCH / "results"
REPETITIONS = 3
"""Of every setting, for the medians that the lines are about."""

_HEAD = ("what", "target", "measured", "")
_REPETITIONS_HEAD = ("setting", "repetition", "begun (UTC)", "commit", "saturation, requests/s", "by")
_COMMIT = re.compile(r"commit `([0-9a-f]{7,40})`")


@dataclass(frozen=True, slots=True)
class Published:
    path: Path
    commit: str
    lines: tuple[Line, ...]


def newest(results: Path = RESULTS) -> Published | None:
    """None where nothing is published. Raises ValueError for a file that ``document`` did not write."""
    paths = sorted(results.glob("load-*.md"))
    if not paths:
        return None
    text = paths[-1].read_text(encoding="utf-8")
    commit, lines = _COMMIT.search(text), tuple(_lines(text))
    if commit is None or not lines:
        raise ValueError(f"{paths[-1]} names no commit or has no lines: expected what --publish writes")
    return Published(paths[-1], commit.group(1), lines)


def published_lines(results: Path = RESULTS, root: Path = ROOT) -> Iterator[Line]:
    """Marked as such; all MISSED where the code is not that of the published commit."""
    found = newest(results)
    if found is None:
        yield Line("published grid", "bench/results has one", "none: make bench-load, then --publish", False)
        return
    why = changed(found.commit, root)
    for line in found.lines:
        shown = replace(line, what=f"published {found.commit}: {line.what}")
        yield shown if why is None else replace(shown, figure=f"{why}; then: {line.figure}", ok=False)


def document(
    results_by_name: Sequence[Results],
    command: str,
    absent: Sequence[str] = (),
    earlier: Sequence[Repetition] = (),
) -> str:
    """Markdown of folders whose last repetition is complete, and of ``earlier`` repetitions of theirs or of others; a
    line is MISSED for each repetition and each setting (``absent``) that was not made. Raises ValueError where a
    repetition is not complete, or the runs are not all of one clean commit."""
    commit, grids = commit_of(results_by_name), _grids(earlier, results_by_name)
    lines = [line for grid in grids for line in (*targets(grid), repetitions(grid))]
    names = [name for name in absent if name not in {grid.name for grid in grids}]
    lines += [Line(f"{name}: repetitions", f"{REPETITIONS}", "not measured", False) for name in names]
    missed = sum(not line.ok for line in lines)
    day = datetime.now(UTC).date()
    parts = [
        "# Under load, measured",
        "",
        f"`{command}` at commit `{commit}`, published on {day}: {len(lines)} lines, {missed} "
        "missed. `bench/README.md` says what is measured.",
        "",
        *markdown(_HEAD, [_row(line) for line in lines]),
        "",
        "Repetitions, between which neither the code nor the settings changed; those of another time have a saturation "
        "of their own. What follows is of the runs at this commit alone.",
        "",
        *markdown(_REPETITIONS_HEAD, [row for grid in grids for row in _told(grid)]),
    ]
    for results in results_by_name:
        parts += ["", f"# {results.plan['config'].get('name')}", "", *(f"- {line}" for line in setting_lines(results))]
        parts += load_lines(results)
    return "\n".join(parts).replace(f"{ROOT}/", "") + "\n"


def commit_of(results_by_name: Sequence[Results]) -> str:
    """Raises ValueError as ``document`` does."""
    commits = set()
    for results in results_by_name:
        if missing := sum(1 for _ in _missing(results)):
            raise ValueError(f"{results.run_dir} lacks {missing} runs: expected repetitions that are complete")
        commits |= {str(run.header.get("commit")) for run in results.runs}
    if len(commits) != 1 or not all(re.fullmatch("[0-9a-f]{7,40}", each) for each in commits):
        raise ValueError(f"the runs are of {', '.join(sorted(commits))}: expected one commit, and no file that differs")
    return commits.pop()


def repetitions(grid: Grid) -> Line:
    made = len(grid.repetitions)
    return Line(f"{grid.name}: repetitions", f"{REPETITIONS}", f"{made}", made >= REPETITIONS)


def publish(
    results_by_name: Sequence[Results],
    command: str,
    absent: Sequence[str] = (),
    results: Path = RESULTS,
    root: Path = ROOT,
) -> Path:
    """The file it wrote. What its lines need of the repetitions is kept beside it, for later ones."""
    earlier = read(results, commit_of(results_by_name), root)
    path = results / f"load-{datetime.now(UTC).date()}.md"
    path.write_text(document(results_by_name, command, absent, earlier), encoding="utf-8")
    write(results, (each for grid in _grids(earlier, results_by_name) for each in grid.repetitions))
    return path


def _grids(earlier: Sequence[Repetition], results_by_name: Sequence[Results]) -> list[Grid]:
    """One for each setting that there is anything of, in the order of the folders of now."""
    now = [each for results in results_by_name for each in _planned(results)]
    names = dict.fromkeys(each.setting.name for each in (*now, *earlier))
    found = {name: [each for each in together(earlier, now) if each.setting.name == name] for name in names}
    return [Grid(each[-1].setting, tuple(each)) for each in found.values()]


def _planned(results: Results) -> Iterator[Repetition]:
    """All but one that was begun when more were asked for."""
    return (each for each in repetitions_of(results) if each.number < results.plan["config"]["repetitions"])


def _told(grid: Grid) -> Iterator[list[str]]:
    for number, each in enumerate(grid.repetitions, 1):
        begun = datetime.fromtimestamp(each.begin_unix_s, UTC).strftime("%Y-%m-%d %H:%M")
        yield [grid.name, str(number), begun, each.commit, f"{each.rates.get(1.0, math.nan):g}", each.where]


def _missing(results: Results) -> Iterator[tuple[str, float]]:
    config = results.plan["config"]
    for system in results.plan["systems"]:
        for rate in config["rates"]:
            if len(results.runs_of(system["name"], rate)) < config["repetitions"]:
                yield system["name"], rate


def _row(line: Line) -> list[str]:
    cells = (line.what, line.target, line.figure, "ok" if line.ok else "MISSED")
    return [cell.replace("|", "/") for cell in cells]


def _lines(text: str) -> Iterable[Line]:
    """The rows of the first table."""
    rows = text.splitlines()
    start = next((place for place, row in enumerate(rows) if row == f"| {' | '.join(_HEAD)} |"), len(rows))
    for row in rows[start + 2 :]:
        if not row.startswith("| "):
            return
        what, target, figure, ok = row.removeprefix("| ").removesuffix(" |").split(" | ")
        yield Line(what, target, figure, ok == "ok")
