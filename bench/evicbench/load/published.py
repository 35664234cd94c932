"""The grid under load as it was published: its lines, what commit they are of, and whether the code changed since."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from evicbench.load.promises import targets
from evicbench.paths import BENCH, ROOT
from evicbench.report import Line
from sglang_evicpress.benchmark.load_tables import load_lines
from sglang_evicpress.benchmark.results import Results
from sglang_evicpress.benchmark.tables import setting_lines
from sglang_evicpress.tables import markdown

RESULTS = BENCH / "results"
CODE = ("python", "patches", "kernels")
REPETITIONS = 3
"""Of every setting, for the medians that the lines are about."""

_HEAD = ("what", "target", "measured", "")
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


def changed(commit: str, root: Path = ROOT) -> str | None:
    """Why the code is not that of the commit; None where it is."""
    done = _git(root, "diff", "--quiet", commit, "--", *CODE)
    if done.returncode == 1:
        return f"{', '.join(f'{name}/' for name in CODE[:-1])} or {CODE[-1]}/ changed since {commit}"
    if done.returncode:
        return f"git cannot compare with {commit}"
    new = _git(root, "ls-files", "--others", "--exclude-standard", "--", *CODE).stdout.split()
    return f"{new[0]} is new since {commit}" if new else None


def document(results_by_name: Sequence[Results], command: str, absent: Sequence[str] = ()) -> str:
    """Markdown of folders whose last repetition is complete; a line is MISSED for each repetition and each setting
    (``absent``) that was not made. Raises ValueError where a repetition is not complete, or the runs are not all of one
    clean commit."""
    commits = set()
    for results in results_by_name:
        if missing := sum(1 for _ in _missing(results)):
            raise ValueError(f"{results.run_dir} lacks {missing} runs: expected repetitions that are complete")
        commits |= {str(run.header.get("commit")) for run in results.runs}
    if len(commits) != 1 or not all(re.fullmatch("[0-9a-f]{7,40}", each) for each in commits):
        raise ValueError(f"the runs are of {', '.join(sorted(commits))}: expected one commit, and no file that differs")
    (commit,) = commits
    day = datetime.now(UTC).date()
    lines = [line for results in results_by_name for line in (*targets(results), repetitions(results))]
    lines += [Line(f"{name}: repetitions", f"{REPETITIONS}", "not measured", False) for name in absent]
    missed = sum(not line.ok for line in lines)
    parts = [
        "# Under load, measured",
        "",
        f"`{command}` at commit `{commit}`, published on {day}: {len(lines)} lines, {missed} "
        "missed. `bench/README.md` says what is measured.",
        "",
        *markdown(_HEAD, [_row(line) for line in lines]),
    ]
    for results in results_by_name:
        parts += ["", f"# {results.plan['config'].get('name')}", "", *(f"- {line}" for line in setting_lines(results))]
        parts += load_lines(results)
    return "\n".join(parts).replace(f"{ROOT}/", "") + "\n"


def repetitions(results: Results) -> Line:
    config = results.plan["config"]
    made = int(config["repetitions"])
    return Line(f"{config.get('name')}: repetitions", f"{REPETITIONS}", f"{made}", made >= REPETITIONS)


def publish(
    results_by_name: Sequence[Results], command: str, absent: Sequence[str] = (), results: Path = RESULTS
) -> Path:
    """The file it wrote."""
    path = results / f"load-{datetime.now(UTC).date()}.md"
    path.write_text(document(results_by_name, command, absent), encoding="utf-8")
    return path


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


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(("git", *words), cwd=root, capture_output=True, text=True, check=False)
