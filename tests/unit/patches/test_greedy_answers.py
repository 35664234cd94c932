"""Answers that are judged by how likely exact KV finds them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_evicpress.patches.tree.greedy_answers import is_plainly_greedy

GREEDY = {
    "top_k": 1,
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "logit_bias")),
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0},
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("top_k", 40), ("json_schema", "{}"), ("regex", "a"), ("ebnf", "a"), ("structural_tag", "a")),
        *(("logit_bias", {"5": 1.0}), ("frequency_penalty", 0.1), ("presence_penalty", -0.1)),
        *(("repetition_penalty", 1.1), ("min_new_tokens", 3)),
    ],
)
def test_what_was_not_chosen_by_likelihood_alone_is_not_judged(field: str, value: object) -> None:
    assert is_plainly_greedy(SimpleNamespace(**GREEDY), None)
    assert not is_plainly_greedy(SimpleNamespace(**GREEDY | {field: value}), None)
    assert not is_plainly_greedy(SimpleNamespace(**GREEDY), "a processor")
