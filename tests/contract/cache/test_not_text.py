"""Requests with more than text, and token ids of no vocabulary, are neither recorded, replayed nor put on the SSD."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.contract.profiling.test_profiling import GOOD, ProfiledWalk
from tests.contract.profiling.test_shadows import ShadowWalk
from tests.contract.tiers.test_tiers_model import Opened, cached, nodes_of

from sglang_evicpress.core import EXACT, Tier
from sglang_evicpress.patches.tree.node import num_slots

pytestmark = pytest.mark.sglang

VOCABULARY = 60
ODD = [VOCABULARY, -1, 2**32 + 5, 10**6]


def recorded(walk: ProfiledWalk, tokens: list[int], question: list[int], **given: object) -> int:
    """Number of answers recorded once a request with such fields has its answer."""
    request = walk.enqueue(None, [*tokens, *question])
    for name, value in given.items():
        setattr(request, name, value)
    walk.prefill(request)
    walk.generate(request, 7)
    walk.end(request)
    return int(walk.cache.quality.counts["recorded"])


@pytest.mark.parametrize("field", ["multimodal_inputs", "input_embeds"])
def test_a_request_that_is_more_than_its_tokens_is_not_recorded(field: str) -> None:
    walk = ProfiledWalk()
    tokens = walk.random_tokens(256)
    walk.answer(tokens)
    assert recorded(walk, tokens, [51], **{field: SimpleNamespace()}) == 0
    assert recorded(walk, tokens, [52]) == 1


@pytest.mark.parametrize("odd", ODD)
def test_a_token_outside_the_vocabulary_is_not_recorded(odd: int) -> None:
    walk = ProfiledWalk()
    walk.cache.vocab_size = VOCABULARY
    tokens = walk.random_tokens(256)
    walk.answer(tokens)
    assert recorded(walk, tokens, [odd]) == 0
    other = [*tokens[:100], odd, *tokens[101:]]
    walk.answer(other)
    assert recorded(walk, other, [51]) == 0
    assert recorded(walk, tokens, [52]) == 1


@pytest.mark.parametrize("odd", ODD)
def test_a_node_of_tokens_outside_the_vocabulary_has_no_profile(odd: int) -> None:
    walk = ProfiledWalk()
    walk.cache.vocab_size = VOCABULARY
    tokens = walk.random_tokens(128)
    walk.put(tokens, GOOD)
    walk.answer([*tokens[:100], odd, *tokens[101:]])
    assert not any(node.kv.profiles for node in nodes_of(walk))
    walk.put(walk.random_tokens(64), GOOD)  # looks at every node for the context


@pytest.mark.parametrize("odd", ODD)
def test_a_shadow_of_tokens_outside_the_vocabulary_is_refused(odd: int) -> None:
    walk = ShadowWalk(0, 1)
    walk.cache.vocab_size = VOCABULARY
    with pytest.raises(ValueError, match=rf"token {odd} at 3: expected 0 to {VOCABULARY - 1}"):
        walk.cache.shadows.open_shadow([1, 2, 3, odd, *range(60)][:64], None, True)
    assert not walk.cache.shadows.spaces


@pytest.mark.parametrize("odd", ODD)
def test_what_a_vocabulary_does_not_have_stays_off_the_lower_tiers(opened: Opened, odd: int) -> None:
    walk = opened(is_exact=True)
    walk.cache.vocab_size = VOCABULARY
    tokens, node = cached(walk, 100, Tier.SSD)
    assert walk.serve([*tokens, 59]) == 100
    number = walk.cache.ssd.store.num_entries
    walk.serve([*tokens[:50], odd, *tokens[51:]])  # splits it
    leaf = next(each for each in nodes_of(walk) if odd in each.key.raw_token_ids())
    walk.cache.parts.moves.demote(leaf.id, Tier.SSD, EXACT)
    walk.settle()
    assert not leaf.kv.copies and leaf.kv.job is None and not leaf.kv.is_leaving
    assert walk.cache.ssd.store.num_entries <= number
    walk.serve([*tokens[:50], odd, *tokens[51:], 3])  # and so is what continues it
    (below,) = leaf.children.values()
    assert not walk.tiers.backup.start_copy(below, Tier.HOST) and not below.kv.copies
    walk.check()
    assert walk.cache.parts.eviction.free_slots(num_slots(leaf)) > 0
    walk.cache.close()
    walk.is_closed = True


@pytest.mark.parametrize("odd", ODD)
def test_a_split_gives_the_part_in_the_vocabulary_its_way_down_back(opened: Opened, odd: int) -> None:
    walk = opened(is_exact=True)
    walk.cache.vocab_size = VOCABULARY
    tokens = [walk.rng.randrange(50) for _ in range(100)]
    walk.serve([*tokens, odd, 1, 2])
    walk.serve([*tokens, 3])
    upper = next(each for each in nodes_of(walk) if len(each.key) == 100)
    walk.copy_to(upper, Tier.SSD)
    assert Tier.SSD in upper.kv.copies
    for below in upper.children.values():
        assert walk.tiers.backup.start_copy(below, Tier.HOST) == (odd not in below.key.raw_token_ids())
    walk.settle()
