"""Comparison of the answers of two servers, and adapters on disk: `make show-trust` has the servers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from evicbench.testbed.server import MODEL
from evicbench.trust.behaviours import Behaviour, Outcome, differences, line
from evicbench.trust.lora import make_adapter
from evicbench.trust.scenarios import Given, Played
from safetensors.torch import load_file

GIVEN = Given((5, 6, 7), (-0.1, -0.2, -0.3), (1.0, 1.0, 1.0), (-2.0,))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Given((5, 8, 7), (-0.1, -0.2, -0.3), (1.0, 1.0, 1.0), (-2.0,)), "token 1 is 8, stock's 6 led by 1.0e+00"),
        (Given((5, 6), (-0.1, -0.2), (1.0, 1.0), (-2.0,)), "2 tokens, 3 of stock"),
        (Given((5, 6, 7), (-0.1, -0.2, -0.31), (1.0, 1.0, 1.0), (-2.0,)), "a log probability is 1.0e-02 off"),
        (Given((5, 6, 7), (-0.1, -0.2, -0.3), (1.0, 1.0, 1.0), (-2.1,)), "a log probability is 1.0e-01 off"),
        (Given((5, 6, 7), (-0.1, -0.2, -0.3), (1.0, 1.0, 1.0)), "0 tokens of the prompt, 1 of stock"),
    ],
)
def test_what_differs_is_said(other: Given, said: str) -> None:
    num_ties, (wrong,) = differences([other], [GIVEN])
    assert num_ties == 0 and said in wrong


def test_answers_that_part_at_a_tie_are_counted_and_what_follows_is_not_compared() -> None:
    tied = Given((5, 8, 9), (-0.1, -0.2, -9.0), (1.0, 5e-5, 1.0), (-2.0,))
    assert differences([tied, GIVEN], [GIVEN, GIVEN]) == (1, [])
    assert differences([GIVEN], []) == (0, ["1 answers, 0 of stock"])


def test_a_line_is_good_only_where_it_happened_and_kv_was_moved_and_loaded() -> None:
    behaviour = Behaviour(lambda server, rng: Played(), ("aborted",), ("hung",))

    def outcome(**counts: int) -> Outcome:
        return Outcome(Played([GIVEN], Counter(counts), Counter(host=3)), Counter(demoted=1))

    good = outcome(aborted=2)
    assert line("x", behaviour, good, good).ok
    assert not line("x", behaviour, outcome(), good).ok
    assert not line("x", behaviour, good, outcome(aborted=1, hung=1)).ok
    idle = Outcome(Played([GIVEN], Counter(aborted=2), Counter(device=3)), Counter(demoted=1))
    assert not line("x", behaviour, idle, good).ok
    refused = Outcome(problems=["refused"])
    assert not line("x", behaviour, good, refused).ok and "stock: refused" in line("x", behaviour, good, refused).figure


def test_an_adapter_has_two_matrices_for_each_it_changes(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "one", MODEL, 1)
    config, found = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    weights = load_file(MODEL / "model.safetensors")
    changed = [name for name in weights if any(f".{target}." in name for target in config["target_modules"])]
    assert changed and len(found) == 2 * len(changed)
    for name in changed:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        change = found[f"{prefix}.lora_B.weight"] @ found[f"{prefix}.lora_A.weight"]
        assert change.shape == weights[name].shape
        assert float(change.norm() / weights[name].norm()) == pytest.approx(0.5, rel=1e-3)
