"""What becomes of lossy copies of a context when another one that shares its first tokens computes these anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.contract.test_tiers_model import CHEAP, DEAR, TierWalk, cached, nodes_of, opened, sent

from sglang_evicpress.core import Form, Tier

pytestmark = pytest.mark.sglang

__all__ = ["opened"]  # the fixture


def lossy_below(walk: TierWalk, tier: Tier) -> list[int]:
    """A context of 100 tokens of which only a tier has half."""
    walk.stamp(DEAR)
    tokens, node = cached(walk, 100)
    walk.cache.compress(node.id, Form("random", 0.5))
    sent(walk, node, tier)
    return tokens


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
@pytest.mark.parametrize("num_shared", [1, 7, 30])
def test_the_larger_part_of_a_lossy_context_outlives_a_split(
    opened: Callable[..., TierWalk], tier: Tier, num_shared: int
) -> None:
    """In some heads it holds positions above the split: behind their exact KV they would be attended to twice."""
    walk = opened()
    tokens = lossy_below(walk, tier)
    walk.stamp(CHEAP)  # nothing is worth loading
    other = [*tokens[:num_shared], 49 - tokens[num_shared], *walk_tokens(walk, 60)]
    assert walk.serve(other) == 0
    walk.check()
    walk.check_rows()
    assert sum(len(node.key) for node in nodes_of(walk)) >= 160 and not walk.cache.recomputed.describe_drops().get(
        "lost"
    )
    walk.stamp(DEAR)
    walk.serve([*tokens, 59])
    walk.serve([*other, 58])
    walk.check()
    walk.check_rows()


def walk_tokens(walk: TierWalk, number: int) -> list[int]:
    return [walk.rng.randrange(50) for _ in range(number)]
