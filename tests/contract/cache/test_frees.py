"""Slots of nodes are freed without ``torch.unique``, which on a GPU makes the host wait for all that is queued."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.contract.cache.test_radix_cache_model import Request
from tests.contract.releases import checkpoint
from tests.contract.tiers.test_tiers_model import Opened, TierWalk, cached, nodes_of, some_tokens

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.patches.tree.node import num_slots

pytestmark = [pytest.mark.sglang, pytest.mark.parametrize("page_size", [1, 16])]


@pytest.fixture
def strict(opened: Opened, monkeypatch: pytest.MonkeyPatch, page_size: int) -> Iterator[TierWalk]:
    """A walk in which it may not be called; all slots must be free or somebody's at the end."""
    walk = opened(0, page_size)

    def unique(*_: object, **__: object) -> None:
        raise AssertionError("torch.unique waits for the device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "unique", unique)
        yield walk
    walk.end_all()
    walk.settle()
    walk.check()
    walk.check_rows()
    walk.cache.parts.eviction.free_slots(walk.allocator.size)
    assert walk.allocator.available_size() == walk.allocator.size


def started(walk: TierWalk, tokens: list[int]) -> Request:
    request = walk.ready(tokens)
    walk.admit(request)
    return request


@pytest.mark.parametrize("kept", [0.1, 0.3, 0.5, 0.77])
def test_a_node_that_is_compressed(strict: TierWalk, kept: float) -> None:
    _, node = cached(strict, 128)
    free = strict.allocator.available_size()
    freed = strict.cache.parts.moves.compress(node.id, Form("random", kept))
    assert freed > 0 and strict.allocator.available_size() == free + freed


def test_a_compressed_node_that_is_split_and_goes_in_parts(strict: TierWalk) -> None:
    tokens, node = cached(strict, 128)
    strict.cache.parts.moves.compress(node.id, Form("random", 0.5))
    strict.match([*tokens[:80], *[59] * 48])
    assert len(nodes_of(strict)) == 2 and len(node.key) == 48
    held, free = num_slots(node), strict.allocator.available_size()
    assert 0 < held < 48 and strict.tiers.removal.drop(node.id) == held
    assert strict.allocator.available_size() == free + held


def test_a_node_that_is_dropped(strict: TierWalk) -> None:
    _, node = cached(strict, 128)
    assert strict.tiers.removal.drop(node.id) == 128
    assert strict.allocator.available_size() == strict.allocator.size


def test_a_node_that_goes_to_the_host(strict: TierWalk) -> None:
    _, node = cached(strict, 128, Tier.HOST)
    assert strict.allocator.available_size() == strict.allocator.size


def test_a_node_that_is_upgraded_and_one_below_it_that_is_trimmed(strict: TierWalk) -> None:
    object.__setattr__(strict.cache.config, "min_match_kept", 1.0)
    tokens, node = cached(strict, 128)
    strict.cache.parts.moves.compress(node.id, Form("random", 0.5))
    before = num_slots(node)
    strict.serve([*tokens[:48], *[58] * 8])  # too few slots are left of these: they are computed anew
    upper = node.parent
    assert upper is not strict.cache.root_node and num_slots(upper) == len(upper.key) == 48
    assert num_slots(node) < before


def test_a_lossy_node_that_is_given_exact_kv(strict: TierWalk) -> None:
    _, node = cached(strict, 128)
    strict.cache.parts.moves.compress(node.id, Form("random", 0.5))
    strict.tiers.fill_replace.replace(node, strict.allocator.alloc(128), is_lossy_prefix=False)
    assert num_slots(node) == 128 and strict.allocator.available_size() == strict.allocator.size - 128
    assert strict.tiers.removal.drop(node.id) == 128


def test_what_two_requests_compute_at_once(strict: TierWalk) -> None:
    tokens = some_tokens(strict, 100)
    first, second = strict.wait([*tokens, 58]), strict.wait([*tokens, 59])
    for request in (first, second):
        strict.until_ready(request)
    strict.cache.keep_running, given = lambda req, token_ids, *, is_chunk: None, strict.cache.keep_running
    strict.admit(first)
    strict.admit(second)
    strict.cache.keep_running = given
    checkpoint(strict.cache, first)
    checkpoint(strict.cache, second)


@pytest.mark.parametrize("is_insert", [True, False])
def test_a_request_that_ends(strict: TierWalk, is_insert: bool) -> None:
    request = started(strict, some_tokens(strict, 101))  # its last page is not full
    strict.end(request, is_insert=is_insert)
