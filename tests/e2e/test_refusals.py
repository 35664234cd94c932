"""Refusals that only a scheduler process can make, on the real server."""

from __future__ import annotations

import pytest
from evicbench.testbed.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]


def test_what_a_scheduler_refuses_is_the_last_line_and_status_2() -> None:
    words = ("--kv-policy", "lru", "--kv-decode-budget", "64", "--kv-decode-score", "h2o")
    status, lines = Server(*words, "--max-total-tokens", "1024", "--max-running-requests", "512").run_to_end()
    assert status == 2, lines
    assert lines[-1].startswith("sglang: error: --kv-decode-score h2o would keep ")
    assert lines[-1].endswith(": lower --max-running-requests")
    assert not any("Traceback" in line or "OOM" in line for line in lines)
