"""A move that fails is skipped and counted: the tree is whole behind it, and the next plan makes room of others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tests.contract.cache.test_radix_cache_model import Request, Walk, finished, nodes_of
from tests.contract.tiers.test_tiers_model import Opened, cached

from sglang_evicpress.core import EXACT, Tier
from sglang_evicpress.patches.tiers import backup
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tree.node import num_slots

pytestmark = pytest.mark.sglang

Part = Callable[[Walk], tuple[object, str]]


OF_A_DROP: list[Part] = [
    lambda walk: (walk.cache.policy.planner, "remove"),
    lambda walk: (walk.cache.placement, "remove_copies"),
    lambda walk: (walk.cache.ledger, "free"),
    lambda walk: (walk.tiers.removal, "drop"),
]
OF_A_COMPRESSION: list[Part] = [
    lambda walk: (walk.tiers.gpu_ops, "kept_in"),
    lambda walk: (walk.cache.compressor, "compress"),
    lambda walk: (walk.cache.ledger, "free"),
    lambda walk: (walk.tiers.gpu_ops, "compress"),
]
OF_A_DEMOTION: list[Part] = [
    lambda walk: (walk.tiers.host_room, "host_room"),
    lambda walk: (backup.BackupJob, "__init__"),
    lambda walk: (walk.tree.storage.workers["copy"], "submit"),
    lambda walk: (walk.cache.placement, "header_of"),
    lambda walk: (walk.tiers.demotion, "demote"),
]
OF_A_RELEASE: list[Part] = [
    lambda walk: (walk.cache.ledger, "free"),
    lambda walk: (walk.tiers.removal, "leave_gpu"),
    lambda walk: (walk.cache.placement, "remove_copy"),
    lambda walk: (walk.cache.changes, "left_gpu"),
]


def failing(
    monkeypatch: pytest.MonkeyPatch, walk: Walk, part: Part, error: type[Exception] = RuntimeError
) -> list[str]:
    """Let this part fail the first time; returns where it did."""
    (owner, name), failed = part(walk), []
    works = getattr(owner, name)

    def run(*given: object, **more: object) -> object:
        if not failed:
            failed.append(name)
            raise error("an assumption does not hold")
        return works(*given, **more)

    monkeypatch.setattr(owner, name, run)
    return failed


def full(walk: Walk, num_tokens: int = 100) -> None:
    for _ in range(4):
        finished(walk, [walk.rng.randrange(50) for _ in range(num_tokens)])


def test_what_can_never_be_compressed_is_dropped_before_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(0, 1)
    full(walk)

    def fail(*_: object) -> None:
        raise RuntimeError("an assumption does not hold")

    monkeypatch.setattr(walk.tiers.gpu_ops, "compress", fail)
    assert walk.cache.parts.eviction.evict(10) >= 10
    walk.check()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("policy", "part"), [("lru", part) for part in OF_A_DROP] + [("knorm@0.5+lru", part) for part in OF_A_COMPRESSION]
)
def test_room_is_made_of_others(monkeypatch: pytest.MonkeyPatch, policy: str, part: Part, page_size: int) -> None:
    walk = Walk(0, page_size, policy)
    full(walk)
    failed = failing(monkeypatch, walk, part)
    wanted = walk.allocator.available_size() + 200
    walk.cache.evict(EvictParams(num_tokens=wanted))
    walk.check()
    assert failed and walk.allocator.available_size() >= wanted
    (count,) = walk.cache.inspector.describe_stats()["decisions"]["failed"].items()
    assert count[0].endswith(" RuntimeError") and count[1] == 1
    monkeypatch.undo()
    for seconds in (1.0, 30.0):
        walk.cache.terms.advance(1000.0 + seconds, walk.cache.terms.costs)
    assert not walk.tree.aside and not walk.cache.ledger.has_unfreed
    walk.check()
    walk.cache.parts.eviction.free_slots(walk.allocator.size)
    walk.check()
    assert walk.allocator.available_size() == walk.allocator.size


@pytest.mark.parametrize("part", OF_A_DEMOTION)
def test_a_demotion_that_cannot_begin_leaves_the_node_where_it_is(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, part: Part
) -> None:
    walk = opened(is_exact=True)
    _, node = cached(walk, 100)
    failed = failing(monkeypatch, walk, part)
    (decision, *_) = walk.cache.policy.planner.plan(
        Tier.GPU, walk.cache.policy.menu.slot_bytes, walk.tiers.host_room.room()
    )
    assert decision.option.tier == Tier.HOST
    assert walk.cache.parts.controller.execute([decision]) == 0
    assert failed and walk.cache.parts.controller.num_failed == {"demote RuntimeError": 1}
    assert node.value is not None and node.kv.job is None and not node.kv.is_leaving
    walk.check()
    walk.settle()
    walk.check_nothing_leaks()
    monkeypatch.undo()
    assert walk.cache.parts.controller.execute([decision]) == 0
    walk.settle()
    assert tier_of(node) == Tier.HOST


@pytest.mark.parametrize("part", OF_A_RELEASE)
def test_a_release_that_fails_leaves_a_whole_tree(opened: Opened, monkeypatch: pytest.MonkeyPatch, part: Part) -> None:
    walk = opened(is_exact=True)
    _, node = cached(walk, 100)
    walk.copy_to(node, Tier.SSD)
    assert set(node.kv.copies) == {Tier.HOST, Tier.SSD}
    failed = failing(monkeypatch, walk, part)
    with pytest.raises(RuntimeError, match="an assumption"):
        walk.cache.parts.moves.demote(node.id, Tier.SSD, EXACT)
    assert failed
    walk.check()
    walk.check_rows()
    monkeypatch.undo()
    walk.cache.parts.moves.demote(node.id, Tier.SSD, EXACT)
    walk.settle()
    assert tier_of(node) == Tier.SSD
    walk.check()
    walk.check_nothing_leaks()


def test_the_log_is_not_flooded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    walk = Walk(0, 1, "lru")
    for _ in range(8):
        finished(walk, [walk.rng.randrange(50) for _ in range(40)])

    def fail(node_id: int, *why: object) -> int:
        raise ValueError("never")

    monkeypatch.setattr(walk.tiers.removal, "drop", fail)
    walk.cache.evict(EvictParams(num_tokens=walk.allocator.size))
    walk.check()
    assert (
        walk.cache.parts.controller.num_failed == {"drop ValueError": 2 * len(nodes_of(walk))}
        and len(caplog.records) == 1
    )


def test_with_other_ranks_it_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have made the move: to go on would be to go on with other trees."""
    walk = Walk(0, 1, "lru")
    full(walk)
    monkeypatch.setattr(type(walk.cache.compressor), "is_alone", property(lambda self: False))
    failing(monkeypatch, walk, lambda walk: (walk.tiers.removal, "drop"))
    with pytest.raises(RuntimeError, match="an assumption"):
        walk.cache.parts.eviction.free_slots(100)


def test_a_weight_that_is_no_number_ends_nothing() -> None:
    walk = Walk(0, 1)
    full(walk)
    node = nodes_of(walk)[0]
    node.kv.weight = math.nan
    walk.cache.changes.changed(node)
    assert walk.cache.parts.controller.num_failed == {"note weight": 1} and node.kv.weight == 0.0


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_request_whose_view_is_not_that_of_its_prefix_is_served_the_prefix(page_size: int) -> None:
    walk = Walk(0, page_size)
    tokens = [walk.rng.randrange(50) for _ in range(128)]
    finished(walk, tokens)
    (node,) = nodes_of(walk)
    walk.cache.parts.moves.compress(node.id, walk.cache.policy.menu.forms[2])
    request = Request("odd", [*tokens, 51, 52], 130, None)
    walk.waiting.append(request)
    walk.cache.parts.admission.on_queued(request)
    matched, adopt = walk.cache.match_prefix, walk.cache.views.adopt

    def spoil(req: Request) -> object:
        if len(req.prefix_indices):
            req.evicpress.slots = req.evicpress.slots[:-1]
        return adopt(req)

    walk.cache.views.adopt = spoil
    walk.start()
    assert walk.cache.parts.controller.num_failed == {"adopt view": 1} and matched
    assert request.evicpress.holes == 128 - num_slots(node) and isinstance(request.evicpress.slots, torch.Tensor)
    walk.check()
    walk.end_all()


def test_what_was_set_aside_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node fails once: SGLang counts all of them as room that can be made."""
    walk = Walk(0, 1, "lru")
    full(walk)
    drop, seen = walk.tiers.removal.drop, set[int]()

    def fail_first(node_id: int, *why: object) -> int:
        if node_id not in seen:
            seen.add(node_id)
            raise ValueError("once")
        return int(drop(node_id, *why))

    monkeypatch.setattr(walk.tiers.removal, "drop", fail_first)
    evictable = walk.cache.evictable_size()
    assert walk.cache.evict(EvictParams(num_tokens=evictable)).num_tokens_evicted == evictable
    assert not walk.tree.aside


@pytest.mark.parametrize("is_flushed", [False, True])
def test_slots_that_cannot_be_freed_are_nobodys_until_they_can(
    monkeypatch: pytest.MonkeyPatch, is_flushed: bool
) -> None:
    walk = Walk(0, 1, "knorm@0.5+lru")
    full(walk)

    def fail(slots: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(walk.cache.ledger, "free", fail)
    walk.cache.parts.eviction.free_slots(20)
    walk.check()
    walk.cache.terms.advance(1.0, walk.cache.terms.costs)
    walk.check()
    assert walk.cache.ledger.has_unfreed and walk.cache.ledger.reserved > 0
    assert walk.cache.parts.controller.num_failed["free OutOfMemoryError"] == 1
    monkeypatch.undo()
    if is_flushed:
        walk.cache.reset()
        walk.allocator.clear()
    else:
        walk.cache.terms.advance(30.0, walk.cache.terms.costs)
    assert not walk.cache.ledger.has_unfreed and walk.cache.ledger.reserved == 0
