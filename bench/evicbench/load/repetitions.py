"""One repetition of a setting under load, as the lines need it, and the file that has those of earlier sessions.

Saturation is measured anew wherever runs begin, so that rates of two repetitions may differ: what they share is how
many times saturation a rate is. A repetition in the file counts as long as the code, the setting's config and its
contexts are those of its commit.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from evicbench.paths import ROOT
from sglang_evicpress.benchmark.load import loaded
from sglang_evicpress.benchmark.results import Results
from sglang_evicpress.benchmark.summary import Cell, Held, Work
from sglang_evicpress.files import write_whole

FILE = "load-repetitions.json"
"""In bench/results."""

CODE = ("python", "patches", "kernels")
CONTEXTS = "bench/evicbench/testbed"
REFUSING = "--kv-max-queue-seconds"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting. ``ours`` is the system that is judged, ``kinds`` are those of all systems, ``f1`` names the
    quality that is known, and ``load_s`` is the time in which the SSD reads an exact context of mean length; 0 where
    its reads are not slowed. ``refuses``: servers answer 503 where a request would wait too long."""

    name: str
    ours: str
    kinds: Mapping[str, str]
    f1: str
    load_s: float
    refuses: bool

    @classmethod
    def of(cls, results: Results) -> Setting:
        """Raises ValueError for a folder whose config has no load, or whose saturation is not known."""
        config = results.plan["config"]
        if not results.multiples:
            raise ValueError(
                f"{results.run_dir} has no rates at multiples of saturation: expected a config with a load"
            )
        return cls(
            str(config.get("name") or results.run_dir.name),
            str(config["load"]["reference"]),
            {system["name"]: system["kind"] for system in results.systems},
            results.f1,
            load_s(results),
            any(str(flag).startswith(REFUSING) for flag in config.get("policy_flags") or ()),
        )


@dataclass(frozen=True)
class Repetition:
    """All systems at all rates, once. ``number`` counts from 0 in the folder it was made in, ``where`` names versions
    and machine. ``multiples``: rate in requests/s -> how many times saturation it is."""

    setting: Setting
    number: int
    commit: str
    where: str
    begin_unix_s: float
    multiples: Mapping[float, float]
    cells: tuple[Cell, ...]

    @property
    def identity(self) -> tuple[object, ...]:
        """Key that another repetition has not, and the same one has again when it is read or published again."""
        return self.setting.name, self.number, self.commit, tuple(sorted(self.multiples))

    @cached_property
    def rates(self) -> dict[float, float]:
        """The other way round; 0, one client, is 0 times saturation."""
        return {0.0: 0.0, **{multiple: rate for rate, multiple in self.multiples.items()}}

    def at(self, system: str, multiple: float) -> Cell | None:
        rate = self.rates.get(multiple)
        return next((cell for cell in self.cells if (cell.system, cell.rate) == (system, rate)), None)


def load_s(results: Results) -> float:
    """Seconds to read all bytes of a context of mean length, exact, at the bandwidth that reads of the SSD are slowed
    to; 0 where they are not."""
    settings, bandwidth = results.plan.get("settings") or {}, results.plan["config"].get("ssd_bandwidth")
    if not bandwidth:
        return 0.0
    tokens = settings["working_set_tokens"] / settings["num_contexts"]
    return float(tokens * settings["kv_bytes_per_token"] / bandwidth)


def repetitions_of(results: Results) -> Iterator[Repetition]:
    """Repetitions of a folder, in order. Raises ValueError as ``Setting.of`` does."""
    setting, cells = Setting.of(results), loaded(results)
    for number in sorted({run.repetition for run in results.runs}):
        headers = [run.header for run in results.runs if run.repetition == number]
        yield Repetition(
            setting,
            number,
            str(headers[0].get("commit")),
            where(results.plan),
            min(float(header["begin_unix_s"]) for header in headers),
            results.multiples,
            tuple(_for_lines(cell) for cell in cells if cell.repetition == number),
        )


def where(plan: Mapping[str, Any]) -> str:
    """Versions and machine of a folder's runs."""
    environment = plan["environment"]
    versions = [f"{name} {version}" for name, version in environment["versions"].items()]
    return ", ".join((*versions, f"{environment['machine']}, {environment['num_cpus']} CPUs"))


def read(folder: Path, commit: str, root: Path = ROOT) -> list[Repetition]:
    """Repetitions of the file that count beside runs of ``commit``; none without a file. Says why another one does not.
    Raises ValueError for a file that ``write`` did not write."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found = []
    try:
        for row in json.loads(text):
            name, number, made_at = row["setting"]["name"], row["number"], row["commit"]
            why = changed(made_at, root, config_of(name), CONTEXTS, to=commit)
            if why is None:
                found.append(_ROW.validate_python(row))
            else:
                print(f"{name}: repetition {number + 1} of {made_at} counts no more: {why}", flush=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / FILE} cannot be read: expected what --publish writes ({error})") from None
    return found


def write(folder: Path, repetitions: Iterable[Repetition]) -> None:
    """A row for each; a time that has no end is Infinity, as Python's ``json`` has it."""
    told = (_ROW.dump_python(each, exclude_defaults=True) for each in repetitions)
    rows = ",\n".join(json.dumps(each, separators=(",", ":")) for each in told)
    write_whole(str(folder / FILE), f"[{rows}]\n".encode())


def together(earlier: Iterable[Repetition], now: Iterable[Repetition]) -> list[Repetition]:
    """The earliest first; of one that is in both, that of now."""
    found = {each.identity: each for each in (*earlier, *now)}
    return sorted(found.values(), key=lambda each: each.begin_unix_s)


def config_of(name: str) -> str:
    """Path of a setting's config in the repository."""
    return f"bench/configs/{name}.yaml"


def changed(commit: str, root: Path = ROOT, *paths: str, to: str | None = None) -> str | None:
    """Why the code, and what else is at ``paths``, is not that of the commit; None where it is. It is looked for in the
    commit ``to``, or among the files that are there."""
    watched = (*CODE, *paths)
    done = _git(root, "diff", "--quiet", *filter(None, (commit, to)), "--", *watched)
    if done.returncode == 1:
        names = [f"{name}/" if name in CODE else name for name in watched]
        return f"{', '.join(names[:-1])} or {names[-1]} changed since {commit}"
    if done.returncode:
        return f"git cannot compare with {commit}"
    if to is not None:
        return None
    new = _git(root, "ls-files", "--others", "--exclude-standard", "--", *watched).stdout.split()
    return f"{new[0]} is new since {commit}" if new else None


_ROW = TypeAdapter(Repetition)


def _for_lines(cell: Cell) -> Cell:
    """Without what only the tables show, which is most of it."""
    return replace(cell, held=Held(), work=Work(computed=cell.work.computed, not_worth_s=cell.work.not_worth_s))


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(("git", *words), cwd=root, capture_output=True, text=True, check=False)
