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
        for name in ("num_published", "num_removed", "num_found"):
            counts[name] += getattr(result, name)
        problems += [f"kill {seed}: {problem}" for problem in result.problems[:1]]
    return counts, problems


def measure_kills(num_kills: int = NUM_KILLS) -> Iterator[Line]:
    begin = time.monotonic()
    counts: Counter[str] = Counter()
    problems = []
    # In processes, not threads: a child that is being started would hold on to the lock of another thread's store.
    processes = ProcessPoolExecutor(NUM_CHAINS, multiprocessing.get_context("spawn"))
    with scratch(DISK_BYTES) as folder, processes:
        seeds = range(num_kills)
        chains = [
            processes.submit(_run, folder / f"rank-{chain}", seeds[chain::NUM_CHAINS]) for chain in range(NUM_CHAINS)
        ]
        for chain in chains:
            found, bad = chain.result()
            counts += found
            problems += bad
    seconds = (time.monotonic() - begin) * NUM_CHAINS / num_kills
    published, removed, num_read = (counts[name] for name in ("num_published", "num_removed", "num_found"))
    figure = (
        f"{num_kills} kills, {seconds:.1f} s each: {published} published and {removed} removed, {num_read} times an "
    )
    figure += f"entry was found, read and verified; {len(problems)} kills with a problem"
    if problems:
        figure += f", the first: {problems[0]}"
    yield Line(
        f"kill -9 at {num_kills} random moments of writing and removing, sync {', '.join(_load_test().MODES)} in turn",
        "every published entry is read back and verified, every removed one gone, index and bytes used are right",
        figure,
        not problems and published > num_kills and removed > num_kills,
    )
