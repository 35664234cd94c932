"""Cached tokens by the tier and form that they were found in, and decisions by kind and occasion, of a walk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.patches.cache.served_hits import ServedHits
from sglang_evicpress.policy.cost_model import PrefillCost

pytestmark = pytest.mark.sglang

KEYDIFF = Form("keydiff", 0.5)


def node(node_id: int, num_tokens: int, form: Form = EXACT) -> Any:
    return SimpleNamespace(id=node_id, key=range(num_tokens), kv=SimpleNamespace(form=form))


def hits(per_pair_s: float = 0.0) -> ServedHits:
    return ServedHits(SimpleNamespace(costs=SimpleNamespace(prefill=PrefillCost(1.0, 0.5, per_pair_s))))


def test_what_was_loaded_counts_where_it_was_and_the_rest_on_the_gpu() -> None:
    served = hits()
    loaded = {2: (Tier.SSD, Form("keydiff", 0.5, "int8")), 3: (Tier.HOST, EXACT)}
    req = SimpleNamespace(retracted_stain=False, evicpress_loaded=loaded)
    served.count_admitted(req, [node(1, 10), node(2, 6, KEYDIFF), node(3, 4)], 18)  # the last one in part
    assert served.counts.describe() == {
        "tokens": {"gpu": {"exact": 10}, "host": {"exact": 2}, "ssd": {"keydiff@0.5+int8": 6}},
        "saved_s": {"gpu": 5.0, "ssd": 3.0, "host": 1.0},
    }


def test_seconds_saved_are_those_at_the_depth_of_the_tokens() -> None:
    served = hits(per_pair_s=0.25)
    served.count_admitted(SimpleNamespace(retracted_stain=False), [node(1, 4), node(2, 4)], 8)
    whole = PrefillCost(1.0, 0.5, 0.25).marginal_seconds(8, 0)
    assert served.counts.describe()["saved_s"] == {"gpu": pytest.approx(whole)}


def test_a_retracted_request_finds_what_it_computed_itself() -> None:
    served = hits()
    served.count_admitted(SimpleNamespace(retracted_stain=True), [node(1, 4)], 4)
    assert served.counts.describe() == {"tokens": {}, "saved_s": {}}
