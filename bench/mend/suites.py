"""Tests of every item that needs no real server, run and counted."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from foundation.report import Line

ROOT = Path(__file__).parents[2]


def measure() -> Iterator[Line]:
    for what, words in SUITES.items():
        yield _line(what, words)


def _line(what: str, words: tuple[str, ...]) -> Line:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *words, f"--junitxml={report}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [
        case.get("name")
        for case in cases
        if any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
    ]
    figure = f"{len(cases) - len(failed)} of {len(cases)} pass"
    if failed or done.returncode:
        figure += f"; status {done.returncode}, first: {failed[0] if failed else done.stdout[-200:]}"
    return Line(what, "every test passes, none is skipped", figure, bool(cases) and not failed and not done.returncode)


SUITES: dict[str, tuple[str, ...]] = {
    "tests: identity of weights and adapters, released weights, after an exception (W1, W5, W6, W8, C1, C2)": (
        "tests/unit/test_weights_digest.py",
        "tests/contract/test_model_identity.py",
        "tests/contract/test_identity_on_ssd.py",
        "tests/contract/test_shutdown.py",
        "tests/contract/test_scheduling.py",
    ),
    "tests: text only, ranks, grafts, failing moves, bounded work (W2, W3, W4, W7, C4, C7, P9)": (
        "tests/contract/test_not_text.py",
        "tests/contract/test_ranks.py",
        "tests/unit/test_rank_agreement.py",
        "tests/contract/test_grafting.py",
        "tests/contract/test_failing_moves.py",
        "tests/contract/test_room_work.py",
    ),
    "tests: SSD folders, keys, deadlines, host memory (S5, C5, C6)": (
        "tests/unit/tiers/test_planted.py",
        "tests/unit/tiers/test_key.py",
        "tests/unit/tiers/test_deadline.py",
        "tests/unit/test_layout_memory.py",
        "tests/contract/test_ssd_safety.py",
    ),
    "tests: who may call what, pages, threads, logs (S1, S2, S3, S6, C3)": (
        "tests/contract/test_control.py",
        "tests/contract/test_online_profiler.py",
        "tests/unit/test_introspect.py",
        "tests/unit/test_threads.py",
        "tests/unit/test_census.py",
        "tests/unit/tiers/test_worker.py",
    ),
    "tests: decode budgets with small pages, floors for clients (P3, S4)": (
        "tests/unit/decode",
        "tests/contract/test_decode_intake.py",
        "tests/kernels/test_nodes.py",
    ),
    "tests: contract of evict, requests never matched, refusals, grammar, moves by hand": (
        "tests/contract/test_eviction.py",
        "tests/contract/test_last_word.py",
        "tests/contract/test_server_args.py",
    ),
}
