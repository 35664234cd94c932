"""Bad input on the real command line: status 2 and one sentence that names the value and what is accepted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from evicbench.report import Line
from evicbench.testbed.server import MODEL


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments after ``--kv-policy evicpress`` and words the one sentence must hold."""

    arguments: tuple[str, ...]
    words: tuple[str, ...]


def cases(folder: Path) -> list[Case]:
    """One of each kind; the contract tests hold the whole table. Writes the bad config files."""
    (folder / "text.json").write_text("alpha = 1\n")
    (folder / "key.json").write_text('{"alhpa": 1}\n')
    config = "--kv-policy-config"
    return [
        Case(("--kv-policy", "evicpres"), ("evicpres", "evicpress", "lru")),
        Case(("--kv-alpha", "much"), ("much",)),
        Case((config, str(folder / "none.json")), ("none.json",)),
        Case((config, str(folder / "text.json")), ("text.json", "JSON")),
        Case((config, str(folder / "key.json")), ("alhpa", "alpha")),
        Case(("--kv-forms", "lz4@0.5"), ("lz4@0.5", "keydiff")),
        Case(("--kv-forms", "keydiff@1.5"), ("1.5", "PRESS@KEPT")),
        Case(("--speculative-algorithm", "NGRAM"), ("--speculative-algorithm",)),
        Case(("--disaggregation-mode", "prefill"), ("--disaggregation-mode",)),
        Case(("--disable-radix-cache",), ("--disable-radix-cache",)),
        Case(("--attention-backend", "intel_amx"), ("intel_amx", "torch_native")),
        Case(("--kv-cache-dtype", "fp8_e4m3"), ("--kv-cache-dtype",)),
    ]


def problem(case: Case) -> str | None:
    """Fault of the answer to one case, None without one."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(MODEL), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--kv-policy", "evicpress", *case.arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
    )
    said = [line for line in done.stderr.splitlines() if "error:" in line]
    if done.returncode != 2 or len(said) != 1 or "Traceback" in done.stderr:
        return f"{' '.join(case.arguments)}: status {done.returncode}, {len(said)} error lines"
    missing = [word for word in case.words if word not in said[0]]
    return f"{' '.join(case.arguments)}: {said[0]!r} does not name {missing}" if missing else None


def measure() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as workers:
        table = cases(Path(folder))
        problems = [found for found in workers.map(problem, table) if found]
    yield Line(
        f"bad input: {len(table)} refusals by the real command line (the whole table is in tests/contract)",
        "status 2, one sentence naming the value and what is accepted",
        f"{len(table) - len(problems)} as promised" + (f"; first problem: {problems[0]}" if problems else ""),
        not problems,
    )
