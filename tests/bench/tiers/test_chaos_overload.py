"""Chaos above saturation, on a stand-in for the server."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from evicbench.tiers import chaos
from evicbench.tiers.prompts import Question


class Slow:
    """A server that answers one request after the other."""

    def __init__(self, log: Path, answer: tuple[int, ...]) -> None:
        self.log = log
        self.port = 0
        self._answer = answer
        self._turn = threading.Lock()
        log.write_text("")

    def is_alive(self) -> bool:
        return True

    def request(self, method: str, path: str, body: Any, *, timeout_s: float) -> tuple[int, Any]:
        assert (method, path) == ("POST", "/generate")
        with self._turn:
            time.sleep(0.02)
        count = body["sampling_params"]["max_new_tokens"]
        return 200, {"output_ids": list(self._answer[:count]), "meta_info": {}}


@pytest.fixture(autouse=True)
def _no_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_move", "_settle"):
        monkeypatch.setattr(chaos.Chaos, name, lambda self: None)
    monkeypatch.setattr(chaos.Chaos, "_hang_up", lambda self, question, rng: None)
    monkeypatch.setattr(chaos, "sources", lambda given: {})


def storm(folder: Path, answer: tuple[int, ...], **values: Any) -> chaos.Chaos:
    server: Any = Slow(folder / "log", answer)
    return chaos.Chaos(server, [Question([1, 2, 3], (7, 8, 9))], folder, 0.9, 0, **values).run()


def test_requests_are_offered_above_what_was_answered_and_all_are_waited_for(tmp_path: Path) -> None:
    outcome = storm(tmp_path, (7, 8, 9), overload=3.0)
    assert outcome.problems == [] and outcome.num_wrong == 0
    assert 0 < outcome.saturation_rps <= 51
    assert outcome.num_offered > 0
    assert outcome.num_requests > outcome.num_offered * 0.8  # but for those that hang up
    (first, _) = chaos.lines(outcome, 0.9)
    assert f"then {outcome.num_offered} requests at a multiple of their" in first.what


def test_a_wrong_answer_above_saturation_is_seen(tmp_path: Path) -> None:
    outcome = storm(tmp_path, (7, 8, 1), overload=3.0)
    assert outcome.num_wrong > 0 and any(problem.startswith("wrong") for problem in outcome.problems)


def test_without_overload_clients_ask_all_the_time(tmp_path: Path) -> None:
    outcome = storm(tmp_path, (7, 8, 9))
    assert (outcome.num_offered, outcome.saturation_rps) == (0, 0.0)
    assert "multiple" not in chaos.lines(outcome, 0.9)[0].what
