"""The out folder of a benchmark: its plan, one file for each run that is complete, logs, and what servers leave there.

``plan.json``, ``runs/SYSTEM/REPETITION-LEVEL.jsonl``, the tree after it in ``runs/SYSTEM/REPETITION-LEVEL.tree.json``,
``logs/``, and while a server runs ``ssd/``.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from sglang_evicpress.benchmark.results import PLAN, RUNS, SCORES, count_requests, read_object, tree_file
from sglang_evicpress.benchmark.systems import System
from sglang_evicpress.files import write_whole

_FAILED = ".failed"


@dataclass(frozen=True, slots=True)
class RunDir:
    """``path`` is absolute."""

    path: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The folder is made. Raises ValueError when another benchmark runs in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{self.path} is in use by another benchmark: expected a folder of its own") from None
            yield

    # ---- the plan

    def open_plan(
        self, plan: Mapping[str, object], counts: Mapping[Path, int] | None = None, *, is_fresh: bool
    ) -> None:
        """Write the plan; where runs of it are there already, ``environment`` stays that of the first time and
        ``resumed`` lists the later ones.

        ``is_fresh``: older runs are moved away, with their plan and scores. Without it, raises ValueError where the
        plan has another ``identity`` than the one they were made by, or a run of it that is there has another number of
        requests than ``counts`` gives its file: with another number, other questions have the same index.
        """
        older = read_object(self.path / PLAN, "another --out")
        if is_fresh and older is not None:
            self._move_away()
            older = None
        if older is not None:
            if older.get("identity") != plan["identity"]:
                raise ValueError(
                    f"{self.path} has runs of another benchmark, which differs in "
                    f"{', '.join(_differing(older.get('identity'), plan['identity']))}: expected another --out, or "
                    f"--fresh to move them away"
                )
            earlier = older.get("resumed")
            resumed = [*(earlier if isinstance(earlier, list) else ()), plan["environment"]]
            plan = {**plan, "environment": older.get("environment"), "resumed": resumed}
        for path, count in (counts or {}).items():
            there = count_requests(path)
            if there not in (None, count):
                raise ValueError(
                    f"{path} has {there} requests, and the config now asks for {count} at that rate: expected requests "
                    f"and seconds of extra_rates as they were, another --out, or --fresh to move the runs away"
                )
        write_whole(str(self.path / PLAN), orjson.dumps(plan, option=orjson.OPT_INDENT_2) + b"\n")

    def _move_away(self) -> None:
        number = 1
        while (target := self.path / f"{RUNS}.old-{number}").exists():
            number += 1
        (self.path / RUNS).mkdir(exist_ok=True)
        (self.path / RUNS).rename(target)
        for name in (SCORES, PLAN):  # the plan last: while it is there, this can be done again
            if (self.path / name).exists():
                (self.path / name).rename(target / name)

    # ---- runs

    def run_file(self, system: System, repetition: int, rate: float) -> Path:
        return self.path / RUNS / system.slug / f"{repetition}-{rate:g}.jsonl"

    def write_run(
        self, path: Path, header: Mapping[str, object], lines: Iterable[Mapping[str, object]], *, is_failed: bool
    ) -> Path:
        """Write a run, whole or not at all; a failed one, which does not count, beside its place. Returns the file."""
        failed = path.with_name(path.name + _FAILED)
        file = failed if is_failed else path
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(str(file), b"".join(orjson.dumps(line) + b"\n" for line in ({"run": header}, *lines)))
        if not is_failed:
            failed.unlink(missing_ok=True)
        return file

    def write_tree(self, path: Path, nodes: Sequence[Mapping[str, object]]) -> None:
        """Beside the run that left the cache so."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(str(tree_file(path)), orjson.dumps(nodes))

    def log_file(self, system: str, repetition: int | None = None) -> Path:
        return self.path / "logs" / f"{system}{'' if repetition is None else f'-{repetition}'}.log"

    # ---- the SSD tier

    @contextmanager
    def empty_ssd(self, system: System) -> Iterator[None]:
        """The folder of the system's SSD tier is empty before, and gone after."""
        if system.ssd_dir is None:
            yield
            return
        above = self.path / "ssd"
        if above not in system.ssd_dir.parents:
            raise ValueError(f"{system.name} keeps its KV in {system.ssd_dir}: expected a folder in {above}")
        shutil.rmtree(system.ssd_dir, ignore_errors=True)
        system.ssd_dir.mkdir(parents=True)
        try:
            yield
        finally:
            shutil.rmtree(system.ssd_dir, ignore_errors=True)
            if not any(above.iterdir()):
                above.rmdir()


def _differing(older: object, newer: object) -> list[str]:
    if not isinstance(older, Mapping) or not isinstance(newer, Mapping):
        return ["its plan"]
    missing = object()
    return sorted(name for name in {*older, *newer} if older.get(name, missing) != newer.get(name, missing))
