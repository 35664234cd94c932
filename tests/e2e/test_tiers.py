"""The real server's KV on host memory and SSD: same answers after every move, and after every kind of end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from evicbench.correctness.reference import make_peaky_model
from evicbench.testbed.server import Server
from evicbench.tiers import restart
from evicbench.tiers.identical import arguments, ask_all, draw_questions, exact_line, lossy_line
from evicbench.tiers.prompts import Question

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]

NUM_REQUESTS = 40
MOVE_SEEDS = range(1, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_peaky_model(tmp_path_factory.mktemp("models") / "peaky")


@pytest.fixture(scope="module")
def asked(model: Path) -> Iterator[tuple[list[Question], int, int]]:
    yield draw_questions(model, NUM_REQUESTS, seed=1)


def test_answers_are_those_of_a_server_without_cache_after_moves_through_every_tier(
    tmp_path: Path, model: Path, asked: tuple[list[Question], int, int]
) -> None:
    """The time of copies decides which nodes lie where, so now and then too little is asked for that the SSD has:
    then other moves follow. No token may be wrong in any of them."""
    questions, num_seen, num_controls = asked
    with Server(*arguments(tmp_path / "ssd", 16, "--kv-forms", "exact"), model=model) as server:
        for seed in MOVE_SEEDS:
            outcome = ask_all(server, questions, seed=seed)
            line = exact_line(outcome, num_seen, num_controls)
            if line.ok or outcome.problems:
                break
    assert line.ok, f"{line.target}, measured {line.figure}"


def test_compressed_nodes_move_through_every_tier_and_leave_the_cache_whole(
    tmp_path: Path, model: Path, asked: tuple[list[Question], int, int]
) -> None:
    """Like the one above; nothing may be wrong in any of the walks."""
    with Server(*arguments(tmp_path / "ssd", 1), model=model) as server:
        for seed in MOVE_SEEDS:
            outcome = ask_all(server, asked[0], seed=seed, is_exact=False)
            line = lossy_line(outcome)
            if line.ok or outcome.problems:
                break
    assert line.ok, f"{line.target}, measured {line.figure}"


def test_the_next_server_hits_what_the_last_one_left_and_serves_nothing_that_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVICPRESS_SSD", str(tmp_path))
    missed = [line for line in restart.measure(seed=1, with_others=False, most_computed=1) if not line.ok]
    assert not missed, "\n".join(f"{line.what}: {line.target}, measured {line.figure}" for line in missed)
