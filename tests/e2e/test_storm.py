"""A short storm, and what one compression frees, on the real server with pages of 16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from evicbench.correctness import frees
from evicbench.correctness.storm import Storm, arguments
from evicbench.stress import CHECKS
from evicbench.testbed.server import Server

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]

SECONDS = 40.0


PAGE_SIZE = 16


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*arguments(PAGE_SIZE), env=CHECKS) as running:
        yield running


def test_compression_gives_exactly_the_other_slots_back(server: Server) -> None:
    line = frees.measure(server, PAGE_SIZE, num_tokens=64)  # one chunk, hence one node
    assert line.ok, f"{line.target}, measured {line.figure}"


def test_storm_leaves_a_whole_cache_and_every_slot_free(server: Server) -> None:
    outcome = Storm(server, SECONDS, seed=PAGE_SIZE, check_every=20).run()
    assert not outcome.problems, "\n".join(outcome.problems[:20])
    assert outcome.num_requests > 0
    assert outcome.presses["compress 200"] > 0
