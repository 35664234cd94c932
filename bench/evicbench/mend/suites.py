"""Tests of every item that needs no real server, run and counted."""

from __future__ import annotations

from collections.abc import Iterator

from evicbench.pytest_runs import run_tests, together, verdict
from evicbench.report import Line

SUITES: dict[str, tuple[str, ...]] = {
    "tests: identity of weights and adapters, released weights, after an exception (W1, W5, W6, W8, C1, C2)": (
        "tests/unit/tiers/entry/test_weights_digest.py",
        "tests/contract/tree/test_model_identity.py",
        "tests/contract/tiers/test_identity_on_ssd.py",
        "tests/contract/scheduler/test_shutdown.py",
        "tests/contract/scheduler/test_scheduling.py",
    ),
    "tests: text only, ranks, grafts, failing moves, bounded work (W2, W3, W4, W7, C4, C7, P9)": (
        "tests/contract/cache/test_not_text.py",
        "tests/contract/cache/test_ranks.py",
        "tests/contract/attention/test_rank_agreement.py",
        "tests/contract/tiers/test_grafting.py",
        "tests/contract/cache/test_failing_moves.py",
        "tests/contract/cache/test_room_work.py",
    ),
    "tests: SSD folders, keys, deadlines, host memory (S5, C5, C6)": (
        "tests/unit/tiers/ssd/test_planted.py",
        "tests/unit/tiers/entry/test_key.py",
        "tests/unit/tiers/ssd/test_deadline.py",
        "tests/unit/test_layout_memory.py",
        "tests/contract/tiers/test_ssd_safety.py",
    ),
    "tests: who may call what, pages, threads, logs (S1, S2, S3, S6, C3)": (
        "tests/contract/http/test_control.py",
        "tests/contract/http/test_online_profiler.py",
        "tests/unit/introspect/test_introspect.py",
        "tests/unit/test_threads.py",
        "tests/unit/introspect/test_census.py",
        "tests/unit/tiers/test_worker.py",
    ),
    "tests: decode budgets with small pages, floors for clients (P3, S4)": (
        "tests/unit/decode_budget",
        "tests/contract/decode_budget/test_decode_admission.py",
        "tests/kernels/test_nodes.py",
    ),
    "tests: contract of evict, requests never matched, refusals, grammar, moves by hand": (
        "tests/contract/cache/test_eviction.py",
        "tests/contract/test_last_word.py",
        "tests/contract/test_server_args.py",
    ),
}


def measure() -> Iterator[Line]:
    """All suites in one process: to load SGLang for each would take a minute."""
    found = run_tests(*(word for suite in SUITES.values() for word in suite))
    for what, suite in SUITES.items():
        yield verdict(what, "every test passes, none is skipped", together(found, *suite))
