"""Requests as SGLang 0.5.23 ends and continues them: by its own functions, and with KV that it keeps from the tree."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache import common
from tests.contract.cache import test_radix_cache_model as model
from tests.contract.cache.test_radix_cache_model import Request, Walk, nodes_of
from tests.contract.releases import lock

from sglang_evicpress.core import Form
from sglang_evicpress.patches.cache import scheduler_hooks
from sglang_evicpress.patches.compat import sglang_0_5_23
from sglang_evicpress.patches.compat.release import RELEASE

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(RELEASE is not sglang_0_5_23, reason="this SGLang has none of it"),
]


@dataclass
class Ending(Request):
    """What SGLang asks of a request, and of its ``kv``, when it ends; ``num_beyond`` tokens are no part of it."""

    prefix_len: int = 0
    extend_end: int = 0
    num_beyond: int = 0
    skip_radix_cache_insert: bool = False
    finished_len: int | None = None

    @property
    def kv_committed_len(self) -> int:
        return self.kv_allocated_len

    @kv_committed_len.setter
    def kv_committed_len(self, num_tokens: int) -> None:
        """All that it has room for is computed."""

    @property
    def holds_kv(self) -> bool:
        return self.req_pool_idx is not None

    @property
    def is_kv_released(self) -> bool:
        return self.kv_allocated_len == 0

    def owned_kv_len(self) -> int:
        return self.kv_allocated_len - self.num_beyond

    def refresh_fill_ids(self) -> None:
        """They are what it has."""

    def mark_kv_released(self) -> None:
        self.kv_allocated_len = 0


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang knows of its arguments, where it ends a request."""
    monkeypatch.setattr(common, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
    monkeypatch.setattr(common, "get_serving", lambda: SimpleNamespace(strip_thinking_cache=False))
    monkeypatch.setattr(model, "checkpoint", checkpointed)


def checkpointed(cache: object, request: Ending, *, is_chunk: bool = False) -> None:
    request.extend_end = request.filled
    common.checkpoint_kv_cache(request, cache)


def on_half(page_size: int) -> tuple[Walk, list[int]]:
    """A context of which the GPU keeps half."""
    walk = Walk(0, page_size)
    tokens = [walk.rng.randrange(50) for _ in range(128)]
    request = begun(walk, tokens)
    assert walk.extend(request, 128)
    ended(walk, request, is_kept=True)
    (node,) = nodes_of(walk)
    walk.cache.parts.moves.compress(node.id, Form("streaming", 0.5))
    return walk, tokens


def begun(walk: Walk, tokens: list[int]) -> Ending:
    request = Ending(f"r{len(tokens)}", list(tokens), len(tokens), None)
    walk.look_up(request)
    request.prefix_len = request.cache_protected_len = len(request.prefix_indices)
    lock(walk.cache, request)
    return request


def ended(walk: Walk, request: Ending, *, is_kept: bool) -> None:
    walk.running.remove(request)
    request.finished_len = request.owned_kv_len() - request.prompt_len
    common.release_kv_cache(request, walk.cache, checkpoint=is_kept)
    assert request.req_pool_idx is None and request.lock is None
    walk.check()


def emptied(walk: Walk) -> None:
    """All slots are free or somebody's, and none twice."""
    walk.check()
    walk.check_rows()
    walk.cache.parts.eviction.free_slots(walk.allocator.size)
    walk.check()
    assert walk.allocator.available_size() == walk.allocator.size


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("num_beyond", [0, 1, 5, 20])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_row_is_given_back_once_with_what_was_computed_beyond_its_end(
    page_size: int, num_beyond: int, is_kept: bool
) -> None:
    walk, tokens = on_half(page_size)
    request = begun(walk, [*tokens, *([51] * 5)])
    assert request.prefix_len == 128 and walk.extend(request, 133)
    for _ in range(30):
        walk.decode()
    assert request.evicpress.holes == 64 and request.kv_allocated_len == 163
    request.num_beyond = num_beyond
    ended(walk, request, is_kept=is_kept)
    num_kept = 163 - num_beyond if is_kept else 133
    assert sum(len(node.key) for node in nodes_of(walk)) == num_kept // page_size * page_size
    emptied(walk)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_request_that_is_sent_back_gives_all_its_slots_once(page_size: int) -> None:
    """Also one of whose prompt a chunk is computed."""
    walk, tokens = on_half(page_size)
    whole, chunk = (begun(walk, [*tokens, *([token] * 40)]) for token in (51, 52))
    assert walk.extend(whole, 168) and walk.extend(chunk, 150)
    for request in (chunk, whole):
        ended(walk, request, is_kept=False)
    emptied(walk)


@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_that_may_not_be_in_the_tree_stay_in_the_row(page_size: int) -> None:
    walk, tokens = on_half(page_size)
    request = begun(walk, [*tokens, *(walk.rng.randrange(50) for _ in range(90))])
    request.skip_radix_cache_insert = True
    for upto in (150, 165, 218):
        assert len(walk.cache.prefix_device_indices(request)) == request.prefix_len == max(128, request.filled)
        assert walk.extend(request, upto)
    assert not walk.cache.parts.controller.num_failed and request.cache_protected_len == 128
    ended(walk, request, is_kept=True)
    assert sum(len(node.key) for node in nodes_of(walk)) == 128
    emptied(walk)


def test_no_node_is_split_for_who_waits() -> None:
    """Of a compressed one a part may have too few slots to serve anybody."""
    walk, tokens = on_half(1)
    (node,) = nodes_of(walk)
    waiting = Ending("w", [*tokens[:70], 55, 56], 72, None)
    common.touch_waiting_prefix(waiting, walk.cache)
    assert nodes_of(walk) == [node] and len(node.key) == 128


def test_a_beam_search_is_refused_where_there_is_a_policy() -> None:
    def original(*_: object) -> None:
        return None

    for cache, said in ((Walk(0, 1).cache, scheduler_hooks.NO_BEAMS), (object(), None)):
        coordinator = SimpleNamespace(tree_cache=cache)
        assert scheduler_hooks._around_beams(original, coordinator, None, None) == said
