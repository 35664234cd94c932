"""Refusals that only a scheduler process can make, on the real server."""

from __future__ import annotations

import subprocess

import pytest
from evicbench.testbed.server import START_S, Server

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]


def test_what_a_scheduler_refuses_is_the_last_line_and_status_2() -> None:
    words = ("--kv-policy", "lru", "--kv-decode-budget", "64", "--kv-decode-score", "h2o")
    server = Server(*words, "--max-total-tokens", "1024", "--max-running-requests", "512")
    ended = subprocess.run(
        server.command,
        env=server._env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S,
        check=False,
    )
    lines = ended.stdout.rstrip().splitlines()
    assert ended.returncode == 2, ended.stdout
    assert lines[-1].startswith("sglang: error: --kv-decode-score h2o would keep ")
    assert lines[-1].endswith(": lower --max-running-requests")
    assert not any("Traceback" in line or "OOM" in line for line in lines)
