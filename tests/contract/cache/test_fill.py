"""Fate of lossy copies of a context when another one that shares its first tokens recomputes these."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.contract.tiers.test_tiers_model import CHEAP, DEAR, TierWalk, cached, nodes_of, sent

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.patches.tree.node import servable_steps

pytestmark = pytest.mark.sglang


def lossy_below(walk: TierWalk, tier: Tier) -> list[int]:
    """A context of 100 tokens of which only a tier has half."""
    walk.stamp(DEAR)
    tokens, node = cached(walk, 100)
    walk.cache.parts.moves.compress(node.id, Form("random", 0.5))
    sent(walk, node, tier)
    return tokens


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
@pytest.mark.parametrize("num_shared", [1, 7, 30])
def test_the_larger_part_of_a_lossy_context_outlives_a_split(walk: TierWalk, tier: Tier, num_shared: int) -> None:
    """In some heads it holds positions above the split: behind their exact KV they would be attended to twice."""
    tokens = lossy_below(walk, tier)
    walk.stamp(CHEAP)  # nothing is worth loading
    other = [*tokens[:num_shared], 49 - tokens[num_shared], *walk_tokens(walk, 60)]
    assert walk.serve(other) == 0
    walk.check()
    walk.check_rows()
    assert sum(len(node.key) for node in nodes_of(walk)) >= 160
    assert "lost" not in walk.cache.parts.recomputation.counts.describe_drops()
    walk.stamp(DEAR)
    walk.serve([*tokens, 59])
    walk.serve([*other, 58])
    assert walk.cache.parts.recomputation.counts.computed["not_servable"] == 0


def piece(origin: int | None, num_tokens: int, num_slots: int) -> tuple[object, int]:
    """All of a node that keeps so many of its tokens, of a form that promises half of them."""
    layout = None if origin is None else SimpleNamespace(num_slots=num_slots, mean_slots=num_slots)
    kv = SimpleNamespace(origin=origin, layout=layout, form=Form("random", 0.5))
    return SimpleNamespace(kv=kv, key=[0] * num_tokens), num_tokens


@pytest.mark.parametrize(
    ("pieces", "servable"),
    [
        ([(1, 8, 0)], 0),  # nothing of what a match ends in is no prefix
        ([(1, 8, 0), (None, 127, 127)], 0),  # two slots are missing, a quarter of 8: 1/64 of 128
        ([(1, 8, 0), (None, 128, 128)], 2),
        ([(1, 8, 0), (None, 100, 100), (2, 28, 14)], 3),
        ([(1, 8, 0), (None, 128, 128), (3, 8, 0)], 2),
        ([(1, 8, 0), (3, 8, 0), (None, 128, 128)], 0),  # of several it counts together
        ([(1, 8, 0), (3, 8, 0), (None, 248, 248)], 3),
        ([(1, 8, 0), (1, 8, 4)], 2),  # pieces of one compression are judged together
    ],
)
def test_how_much_of_a_path_may_be_missing(pieces: list[tuple[int | None, int, int]], servable: int) -> None:
    assert servable_steps([piece(*one) for one in pieces], 0.5) == servable


def walk_tokens(walk: TierWalk, number: int) -> list[int]:
    return [walk.rng.randrange(50) for _ in range(number)]
