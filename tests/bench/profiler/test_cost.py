"""The cost of requests is counted from the server's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from evicbench.profiler.cost import Cost, Counting, cost_of, share


def meta(prompt: int, cached: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": completion}


@pytest.mark.parametrize(
    ("said", "cost"),
    [
        (meta(110, 100, 0), Cost(1, 1, 0, 10)),  # an answer that is scored: one pass
        (meta(104, 100, 1), Cost(1, 1, 1, 4)),  # the first token comes with the prompt's pass
        (meta(104, 100, 6), Cost(1, 6, 6, 9)),
    ],
)
def test_a_request_costs_a_pass_for_each_token_and_at_least_one(said: dict[str, int], cost: Cost) -> None:
    assert cost_of(said) == cost


class Fixed:
    """Answers every request alike."""

    def ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        return {"path": path}

    def generate(self, body: Mapping[str, object]) -> list[dict[str, Any]]:
        return [{"meta_info": meta(104, 100, 6)}, {"meta_info": meta(110, 100, 0)}]


def test_counting_adds_up_and_passes_on() -> None:
    counting = Counting(Fixed())
    assert counting.ask("GET", "/evicpress/profiles") == {"path": "/evicpress/profiles"}
    assert counting.generate({}) == Fixed().generate({})
    counting.generate({})
    assert counting.cost == Cost(4, 14, 12, 38)
    assert Counting(Fixed()).cost == Cost()


def test_share_says_both_counts() -> None:
    assert share(1, 8) == "12.5% (1 of 8)"
