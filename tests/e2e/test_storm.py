"""A short storm, and what one compression frees, on the real server with pages of 1 and 16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from evicbench.correctness import frees
from evicbench.correctness.storm import Storm, arguments
from evicbench.stress import CHECKS
from evicbench.testbed.server import Server

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]

SECONDS = 40.0


@pytest.fixture(scope="module", params=(1, 16), ids=lambda page_size: f"page{page_size}")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(*arguments(request.param), env=CHECKS) as running:
        yield running


def page_size_of(server: Server) -> int:
    return int(server.get("/evicpress/stats")["page_size"])


def test_compression_gives_exactly_the_other_slots_back(server: Server) -> None:
    line = frees.measure(server, page_size_of(server), num_tokens=64)  # one chunk, hence one node
    assert line.ok, f"{line.target}, measured {line.figure}"


def test_storm_leaves_a_whole_cache_and_every_slot_free(server: Server) -> None:
    outcome = Storm(server, SECONDS, seed=page_size_of(server), check_every=20).run()
    assert not outcome.problems, "\n".join(outcome.problems[:20])
    assert outcome.num_requests > 0
    assert outcome.presses["compress 200"] > 0
