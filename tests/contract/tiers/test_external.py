"""Caches that share an external store: one hits what the other has published, and nothing wrong."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.contract.cache.test_radix_cache_model import Request
from tests.contract.tiers.test_tiers_model import (
    DEAR,
    HALF,
    IDENTITY,
    Opened,
    TierWalk,
    cached,
    sent,
    some_tokens,
)
from tests.unit.tiers.external.test_entries import Engine

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers import external_reads
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.storage import EXTERNAL_THREADS
from sglang_evicpress.policy.cost_model import PrefillCost
from sglang_evicpress.tiers.external import circuit as circuits
from sglang_evicpress.tiers.external import entries
from sglang_evicpress.tiers.external.entries import SharedEntries
from sglang_evicpress.tiers.external.store import ExternalStore
from sglang_evicpress.tiers.jobs import Workers

pytestmark = pytest.mark.sglang

PAGE = 4
Sharing = Callable[..., TierWalk]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def sharing(opened: Opened, engine: Engine) -> Iterator[Sharing]:
    """Makes walks on the store of ``engine``."""

    def make(seed: int = 0, page_size: int = PAGE, **options: object) -> TierWalk:
        walk = opened(seed, page_size, **{"has_ssd": False, **options})
        storage = walk.tree.storage
        storage.external = ExternalStore(engine)
        for name, number in EXTERNAL_THREADS.items():
            storage.workers[name] = Workers(name, number, storage.arrival)
        return walk

    yield make


def published(walk: TierWalk) -> int:
    """Let the walk publish what it has; returns how many entries it has published so far."""
    walk.until(lambda: not walk.tree.storage.num_pending_jobs and not walk.tiers.external_writes.is_busy)
    return walk.tree.storage.counts["external_published"]


def counts(walk: TierWalk, *names: str) -> list[int]:
    return [walk.tree.storage.counts[f"external_{name}"] for name in names]


def test_another_server_loads_what_one_has_computed(sharing: Sharing) -> None:
    first = sharing(0)
    tokens, node = cached(first, 100)
    assert published(first) == 1 and node.kv.external.form.is_exact
    second = sharing(1)
    assert second.serve([*tokens, 59]) == 100
    assert counts(second, "read", "found") == [1, 1]
    second.check()
    second.check_rows()
    second.settle()
    second.check_nothing_leaks()


def test_a_path_of_several_nodes_is_found_piece_by_piece(sharing: Sharing) -> None:
    first, rng = sharing(0), random.Random(5)
    prefix = some_tokens(first, 60)
    tails = [[50 + index, *(rng.randrange(50) for _ in range(39))] for index in range(2)]
    for tail in tails:
        first.serve([*prefix, *tail])
    assert published(first) >= 2
    second = sharing(1)
    for tail in tails:
        assert second.serve([*prefix, *tail, 59]) >= 40
    second.check_rows()
    assert sum(len(node.key) for node in second.cache.nodes.values()) >= 140
    assert counts(second, "found")[0] in (2, 3)  # where it was published before it was split it has a tail as well


def test_what_was_dropped_is_found_again(sharing: Sharing) -> None:
    walk = sharing()
    tokens, node = cached(walk, 100)
    published(walk)
    walk.cache.parts.eviction.free_slots(walk.allocator.size)
    walk.tiers.removal.drop_tree(node) if node.id in walk.cache.nodes else None
    assert not walk.cache.nodes
    assert walk.serve([*tokens, 59]) == 100
    walk.check_rows()


@pytest.mark.parametrize("extra", [("salt-a", None), (None, "salt-a"), ("salt-a", "salt-b"), ("ab", "a")])
def test_other_salts_never_share(sharing: Sharing, extra: tuple[str | None, str | None]) -> None:
    first = sharing(0)
    tokens = some_tokens(first, 100)
    first.serve(tokens, extra[0])
    assert published(first) == 1
    second = sharing(1)
    assert second.serve([*tokens, 59], extra[1]) == 0 and counts(second, "found") == [0]
    assert second.serve([*tokens, 58], extra[0]) == 100


def test_a_server_of_another_model_finds_nothing(sharing: Sharing) -> None:
    first = sharing(0)
    tokens, _ = cached(first, 100)
    published(first)
    second = sharing(1, identity=bytes(reversed(IDENTITY)))
    assert second.serve([*tokens, 59]) == 0 and counts(second, "read") == [0]


def published_compressed(sharing: Sharing) -> list[int]:
    """A context that a server has published once it was compressed, not before."""
    first = sharing(0)
    writes = first.tiers.external_writes
    is_held_back = [True]
    is_wanted = writes._is_wanted
    writes._is_wanted = lambda node: not is_held_back and is_wanted(node)
    tokens, node = cached(first, 100)
    first.cache.parts.moves.compress(node.id, HALF)
    sent(first, node, Tier.HOST)
    is_held_back.clear()
    writes.note(node)
    assert published(first) == 1 and node.kv.external.form == HALF
    return tokens


def test_what_is_compressed_is_shared_compressed(sharing: Sharing) -> None:
    tokens = published_compressed(sharing)
    second = sharing(1)
    assert second.serve([*tokens, 59]) == 100
    (found,) = [other for other in second.cache.nodes.values() if list(other.key.raw_token_ids())[:100] == tokens]
    assert found.kv.form == HALF and len(found.kv.slots) < 100
    second.check_rows()


def test_the_upper_part_of_a_split_keeps_what_the_store_has(sharing: Sharing) -> None:
    walk = sharing()
    tokens, node = cached(walk, 100)
    published(walk)
    walk.serve([*tokens[:60], 59, 58, 57, 56])
    upper, lower = node.parent, node
    assert len(upper.key) == 60 and upper.kv.external is not None
    assert lower.kv.external is None  # nobody who has the upper part finds it there
    published(walk)
    other = sharing(1)
    assert other.serve([*tokens, 59]) == 100 and counts(other, "found") == [1]


def test_a_store_that_is_down_costs_nothing_but_the_hit(sharing: Sharing, engine: Engine) -> None:
    first = sharing(0)
    tokens, _ = cached(first, 100)
    published(first)
    second = sharing(1)
    engine.is_down = True
    assert second.serve([*tokens, 59]) == 0
    assert second.tree.storage.errors == {"external_io": 1} and not second.tree.storage.external.may_read
    assert second.tree.storage.external.gain.hit_share == 0.5  # nor do lookups count as worth less
    assert second.serve([*some_tokens(second, 50), 59]) == 0
    assert second.tree.storage.errors == {"external_io": 1}  # it was left alone
    engine.is_down = False
    second.tree.storage.external.circuit._retry_at["read"] = 0.0
    assert second.serve([*some_tokens(second, 40), 59]) == 0
    assert second.tree.storage.external.may_read


def test_what_the_store_could_not_take_is_published_later(sharing: Sharing, engine: Engine) -> None:
    walk = sharing()
    engine.room = 0
    tokens, _ = cached(walk, 100)
    circuit = walk.tree.storage.external.circuit
    assert published(walk) == 0 and not circuit.may_write
    walk.serve([*tokens, *some_tokens(walk, 80)])
    engine.room = 1 << 30
    circuit._retry_at["write"] = 0.0
    assert published(walk) >= 2
    assert sharing(1).serve([*tokens, 59]) == 100


def test_what_the_store_has_lost_is_published_again(sharing: Sharing, engine: Engine) -> None:
    walk = sharing()
    tokens, node = cached(walk, 100)
    published(walk)
    engine.values.clear()
    checks = walk.tiers.external_checks
    checks._was_away = True
    walk.until(lambda: walk.tree.storage.counts["external_gone"] == 1)
    assert published(walk) == 2 and node.kv.external.form.is_exact
    assert sharing(1).serve([*tokens, 59]) == 100
    checks._was_away = True  # what is there stays
    walk.until(lambda: not checks._was_away and not checks._is_under_way)
    assert published(walk) == 2 and counts(walk, "gone") == [1] and node.kv.external is not None
    walk.reset()
    assert not checks._seen_s, "nodes that are gone keep nobody waiting"


def test_a_dead_long_name_does_not_hide_a_short_one(
    sharing: Sharing, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "BEGINS", (0, 16, 64))
    first = sharing(0)
    tokens, _ = cached(first, 100)
    published(first)
    for name in [name for name in engine.values if name.endswith("-header")]:
        del engine.values[name]
    second = sharing(1)
    assert second.serve(tokens[:40]) == 0
    assert published(second) == 1
    assert sharing(2).serve([*tokens, 59]) == 40


def test_a_store_that_hangs_is_not_waited_for(
    sharing: Sharing, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sharing(0)
    tokens, _ = cached(first, 100)
    published(first)
    second, may_answer = sharing(1), threading.Event()
    answer = engine.get
    monkeypatch.setattr(engine, "get", lambda key, target: may_answer.wait(60.0) and answer(key, target))
    second.stamp(PrefillCost(0.01, 1e-3, 0.0))  # 0.1 s of computing: a deadline that a test can wait for
    request = second.ready([*tokens, 59])
    assert not may_answer.is_set() and second.tree.storage.counts["prefetches_late"] == 1
    assert second.admit(request) == 0
    may_answer.set()
    second.settle()
    second.end(request)
    second.check()
    second.check_rows()
    second.settle()
    second.check_nothing_leaks()


@pytest.fixture
def may_read(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once payloads may be read from stores."""
    event, read = threading.Event(), SharedEntries.read
    monkeypatch.setattr(SharedEntries, "read", lambda *asked: event.wait(60.0) and read(*asked))
    return event


def test_an_entry_is_read_once_however_many_wait_for_it(sharing: Sharing, may_read: threading.Event) -> None:
    first = sharing(0)
    tokens, _ = cached(first, 100)
    published(first)
    second = sharing(1)
    reads, requests = second.tiers.external_reads, list[Request]()
    for tail in (57, 58, 59):
        requests.append(second.wait([*tokens, tail]))
        second.until(lambda: reads._reading and not reads._lookups)
        assert len(reads._reading) == 1
    may_read.set()
    for request in requests:
        second.until_ready(request)
    assert second.admit(requests[0]) == 100 and counts(second, "read", "found") == [1, 1]
    second.check_rows()


def test_what_finds_the_store_busy_is_asked_for_again(
    sharing: Sharing, may_read: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_reads, "MOST_READS", 1)
    first = sharing(0)
    contexts = [cached(first, 60 + 20 * index)[0] for index in range(3)]
    published(first)
    second = sharing(1)
    reads = second.tiers.external_reads
    requests = [second.wait([*tokens, 59]) for tokens in contexts]
    second.until(lambda: reads._reading and not reads._lookups)
    assert len(reads._reading) == 1
    may_read.set()
    second.until(lambda: counts(second, "read") == [3])
    assert [second.admit(request) for request in requests[:2]] == [60, 80]
    second.check_rows()


def test_the_policy_weighs_a_drop_by_what_the_store_has(sharing: Sharing) -> None:
    walk = sharing()
    tokens, node = cached(walk, 100)
    policy, view = walk.cache.policy.planner.policy, walk.cache.parts.view
    assert view.stats_of(node).external is None
    candidate = walk.cache.policy.planner.index.candidates[node.id]
    assert policy.dropped(candidate)[1] > 100.0
    published(walk)
    candidate = walk.cache.policy.planner.index.candidates[node.id]
    assert candidate.external.tier == Tier.EXTERNAL and policy.dropped(candidate)[1] < 0.1
    assert tier_of(node) == Tier.GPU


@pytest.mark.parametrize("seed", range(2))
def test_random_walks_on_one_store_that_loses_and_changes_values_keep_every_row(
    sharing: Sharing, engine: Engine, seed: int
) -> None:
    rng = random.Random(seed)
    walks = [sharing(10 * seed + index, [1, 4][seed], has_ssd=index == 0) for index in range(2)]
    for walk in walks:
        walk.cost = None
        walk.documents = walks[0].documents
    for _ in range(12):
        for walk in walks:
            walk.step(25)
            walk.check_rows()
        for name in rng.sample(sorted(engine.values), min(3, len(engine.values))):
            if rng.random() < 0.5:
                del engine.values[name]
            else:
                value = bytearray(engine.values[name])
                value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
                engine.values[name] = bytes(value)
    for walk in walks:
        walk.end_all()
        published(walk)
        walk.check()
        walk.check_rows()
        walk.check_nothing_leaks()
    assert sum(counts(walk, "published")[0] for walk in walks) > 3
    for walk in walks:
        walk.reset()
        walk.settle()
        walk.stamp(DEAR)
    found, patient_until_s = list[int](), time.monotonic() + 60.0
    while max(found, default=0) < 100 and time.monotonic() < patient_until_s:
        # The first need not wait for a store that lost so much, or is left alone for a while.
        tokens = [seed, *some_tokens(walks[0], 119)]
        walks[0].serve(tokens)
        published(walks[0])
        found.append(walks[1].serve([*tokens, 59]))
        walks[1].settle()  # a lookup that nobody waited for may have found something: then the next one is waited for
    assert found[-1] >= 100, (found, [dict(walk.tree.storage.counts) for walk in walks])


def test_a_server_that_makes_nothing_lossy_takes_nothing_lossy(sharing: Sharing) -> None:
    tokens = published_compressed(sharing)
    exact = sharing(1, is_exact=True)
    assert exact.serve([*tokens, 59]) == 0 and counts(exact, "read") == [0]


def test_what_is_read_while_the_model_changes_is_not_put_into_the_new_ones_tree(
    sharing: Sharing, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sharing(0)
    tokens, _ = cached(first, 100)
    published(first)
    for suffix in ("-exact-0", "-0"):  # while it is looked for, and while it is read
        second, may_answer = sharing(1), threading.Event()
        answer = engine.get

        def late(key: str, target: memoryview, suffix=suffix, answer=answer, may_answer=may_answer) -> bool:
            if key.endswith(suffix) and ("exact" in suffix) == ("exact" in key):
                may_answer.wait(60.0)
            return answer(key, target)

        monkeypatch.setattr(engine, "get", late)
        second.stamp(PrefillCost(0.01, 1e-3, 0.0))
        request = second.ready([*tokens, 59])
        second.waiting.remove(request)
        second.tiers.prefetches.keep_only([])
        second.cache.queued_hits.keep_only([])
        second.reset()
        second.tree.adapters.use_identity(bytes(reversed(IDENTITY)))
        may_answer.set()
        second.settle()
        assert counts(second, "found") == [0] and not second.cache.nodes
        monkeypatch.setattr(engine, "get", answer)


def test_an_entry_that_would_take_most_of_host_memory_is_not_read(
    sharing: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sharing(0)
    tokens, _ = cached(first, 100)
    published(first)
    monkeypatch.setattr(external_reads, "LARGEST_SHARE", 1e-3)
    second = sharing(1)
    assert second.serve([*tokens, 59]) == 0 and counts(second, "read", "without_room") == [0, 0]


def test_a_damaged_copy_is_not_published_and_goes(sharing: Sharing, engine: Engine) -> None:
    walk = sharing(0)
    writes = walk.tiers.external_writes
    is_wanted, writes._is_wanted = writes._is_wanted, lambda node: False
    tokens, node = cached(walk, 100)
    walk.copy_to(node, Tier.HOST)
    walk.damage(node.kv.copies[Tier.HOST].entry)
    writes._is_wanted = is_wanted
    writes.note(node)
    assert published(walk) in (0, 1)  # by another copy, made of what the GPU has
    assert walk.tree.storage.errors["external_checksum"] == 1
    second = sharing(1)
    second.serve([*tokens, 59])
    second.check_rows()


def test_exact_kv_is_published_beside_what_was_lossy_before(sharing: Sharing) -> None:
    tokens = published_compressed(sharing)
    second = sharing(1, is_exact=True)
    second.serve(tokens)
    assert published(second) == 1
    third = sharing(2)
    assert third.serve([*tokens, 59]) == 100
    assert all(node.kv.form.is_exact for node in third.cache.nodes.values())


def test_what_a_store_has_that_is_away_counts_for_nothing(sharing: Sharing) -> None:
    walk = sharing()
    tokens, node = cached(walk, 100)
    published(walk)
    policy = walk.cache.policy.planner
    before = policy.policy.dropped(policy.index.candidates[node.id])[1]
    walk.tree.storage.external.is_paused = True
    walk.stamp(PrefillCost(0.01, 1.0, 0.0))
    after = policy.policy.dropped(policy.index.candidates[node.id])[1]
    assert before < 0.1 and after > 100.0


def test_what_hangs_in_the_store_keeps_nobody_from_resting_or_waiting(
    sharing: Sharing, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuits, "HANG_S", 0.2)
    walk, may_answer = sharing(), threading.Event()
    engine.has = engine.get = lambda *asked: may_answer.wait(60.0) and False
    cached(walk, 100)  # by then the store has been seen to hang
    assert not may_answer.is_set()
    circuit = walk.tree.storage.external.circuit
    walk.until(lambda: circuit.hangs)
    assert walk.tree.storage.num_pending_jobs == 0 and not walk.tiers.external_writes.is_busy
    assert sum(workers.num_pending for workers in walk.tree.storage.workers.values()) > 0
    may_answer.set()
    walk.until(lambda: not circuit.hangs)
