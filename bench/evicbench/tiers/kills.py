"""A process that writes to SSD is killed at random moments, and a new one looks at what it finds.

One kill is the unit test's `kill_once`: the folder goes on from kill to kill, as a server's would.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from evicbench.paths import ROOT
from evicbench.report import Line
from evicbench.tiers.inputs import scratch

TEST = ROOT / "tests" / "unit" / "tiers" / "ssd" / "test_kill.py"
NUM_KILLS = 200
NUM_CHAINS = 2
"""Folders side by side, each with its share of the kills."""

DISK_BYTES = 1 << 30
COUNTS = ("num_published", "num_removed", "num_found")


def _load_test() -> Any:
    """The test module, by its path: tests are no package."""
    spec = importlib.util.spec_from_file_location("tiers_test_kill", TEST)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{TEST} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _run(folder: Path, seeds: Sequence[int]) -> tuple[Counter[str], list[str]]:
    """Kills one after the other in one folder: counts, and the first problem of each that has one."""
    test = _load_test()
    counts: Counter[str] = Counter()
    problems = []
    for seed in seeds:
        result = test.kill_once(folder, seed)
        counts.update({name: getattr(result, name) for name in COUNTS})
        problems += [f"kill {seed}: {problem}" for problem in result.problems[:1]]
    return counts, problems


def measure(num_kills: int = NUM_KILLS) -> Iterator[Line]:
    begin = time.monotonic()
    counts: Counter[str] = Counter()
    problems = []
    # In processes, not threads: a child that is being started would hold on to the lock of another thread's store.
    processes = ProcessPoolExecutor(NUM_CHAINS, multiprocessing.get_context("spawn"))
    with scratch(DISK_BYTES) as folder, processes:
        folders = [folder / f"rank-{chain}" for chain in range(NUM_CHAINS)]
        seeds = [range(num_kills)[chain::NUM_CHAINS] for chain in range(NUM_CHAINS)]
        for found, bad in processes.map(_run, folders, seeds):
            counts += found
            problems += bad
    seconds = (time.monotonic() - begin) * NUM_CHAINS / num_kills
    published, removed, num_read = (counts[name] for name in COUNTS)
    yield Line(
        f"kill -9 at {num_kills} random moments of writing and removing, sync {', '.join(_load_test().MODES)} in turn",
        "every published entry is read back and verified, every removed one gone, index and bytes used are right",
        f"{num_kills} kills, {seconds:.1f} s each: {published} published and {removed} removed, {num_read} times an "
        f"entry was found, read and verified; {len(problems)} kills with a problem"
        + (f", the first: {problems[0]}" if problems else ""),
        not problems and published > num_kills and removed > num_kills,
    )
