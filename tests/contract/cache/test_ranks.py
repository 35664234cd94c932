"""Two ranks of one server, each with its own cache, of which one has no memory left or reads another file.

The ranks are threads that meet in their collectives; those of processes over gloo are in unit/test_rank_agreement.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from tests.contract.cache.test_radix_cache_model import finished, nodes_of
from tests.contract.profiling.test_profiling import GOOD, IDENTITY, ProfiledWalk
from tests.contract.profiling.test_shadows import HALF, ShadowWalk

from sglang_evicpress.core import Form
from sglang_evicpress.flag_groups import ProfileFlags
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.tree import compressor
from sglang_evicpress.quality.store import ProfileStore

pytestmark = pytest.mark.sglang

Walk = TypeVar("Walk", bound=ShadowWalk)


class Ranks:
    """Meeting of two threads. A rank that does not come breaks the meeting, and fails both."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=5.0)
        self._given: dict[int, object] = {}
        self.rank_of: dict[int, int] = {}
        self.num_meetings = 0

    def run(self, *tasks: Callable[[], object]) -> list[object]:
        """Result of each rank's task, or the exception that it raises."""

        def one(rank: int) -> object:
            self.rank_of[threading.get_ident()] = rank
            try:
                return tasks[rank]()
            except (RuntimeError, ValueError, AssertionError) as error:
                return error

        self._barrier.reset()
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(one, range(2)))

    @property
    def rank(self) -> int:
        return self.rank_of[threading.get_ident()]

    def meet(self, given: object) -> list[object]:
        self.num_meetings += self.rank == 0
        self._given[self.rank] = given
        self._barrier.wait()
        found = [self._given[rank] for rank in range(2)]
        self._barrier.wait()
        return found

    def all_reduce(self, values: torch.Tensor, op: object, group: object) -> None:
        assert group is self and op == torch.distributed.ReduceOp.MAX
        left, right = self.meet(values.clone())
        assert left.shape == right.shape, "the ranks are in different collectives"
        values.copy_(torch.maximum(left, right))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    ranks = Ranks()
    monkeypatch.setattr(compressor.dist, "all_reduce", ranks.all_reduce)
    monkeypatch.setattr(compressor.dist, "get_rank", lambda group: ranks.rank)
    monkeypatch.setattr(compressor, "agreed", lambda value, group: ranks.meet(value)[0], raising=False)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield ranks
    torch.set_num_threads(num_threads)


def of_ranks(ranks: Ranks, make: Callable[[], Walk]) -> list[Walk]:
    walks = [make() for _ in range(2)]
    for walk in walks:
        walk.cache.compressor._group = ranks
    return walks


def fail_at(monkeypatch: pytest.MonkeyPatch, ranks: Ranks, name: str) -> None:
    """Rank 1 has no memory left where it comes to this part of the compressor, its first time."""
    part, has_failed = getattr(compressor, name), []

    def run(*given: object, **more: object) -> object:
        if ranks.rank == 1 and not has_failed:
            has_failed.append(name)
            raise torch.OutOfMemoryError("none left")
        return part(*given, **more)

    monkeypatch.setattr(compressor, name, run)


def state_of(walk: ShadowWalk) -> tuple[object, ...]:
    """State that must not differ between ranks."""
    walk.check()
    nodes = [(str(node.kv.form), list(node.key.raw_token_ids()), node.lock_ref) for node in nodes_of(walk)]
    return (
        nodes,
        RELEASE.free_pages(walk.allocator).tolist(),
        walk.cache.evictable_size_,
        sorted(walk.cache.shadows.spaces),
        dict(walk.cache.shadows.counts),
    )


@pytest.mark.parametrize("part", ["select", "compact", "HostCopy"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_one_rank_without_memory_makes_all_drop_the_node(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, part: str, page_size: int
) -> None:
    walks = of_ranks(ranks, lambda: ShadowWalk(0, page_size))
    for walk in walks:
        finished(walk, list(range(128)))
        finished(walk, [*range(1, 50), *range(79)])
    fail_at(monkeypatch, ranks, part)

    def press(walk: ShadowWalk) -> Callable[[], int]:
        first, second = nodes_of(walk)
        return lambda: (
            walk.cache.parts.moves.compress(first.id, HALF) + 1000 * walk.cache.parts.moves.compress(second.id, HALF)
        )

    freed = ranks.run(*map(press, walks))
    assert freed == [128 + 64_000] * 2
    assert state_of(walks[0]) == state_of(walks[1])
    assert len(nodes_of(walks[0])) == 1


@pytest.mark.parametrize("is_short", [False, True])
def test_a_plan_takes_one_collective_and_leaves_ranks_alike(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    """Also where one rank has no memory for one of its compressions: that node goes, and the others are made."""
    walks = of_ranks(ranks, lambda: ShadowWalk(0, 1, "knorm@0.5+lru"))
    for walk in walks:
        for first in (0, 1, 2):
            finished(walk, [first, *range(1, 64)])
    if is_short:
        fail_at(monkeypatch, ranks, "select")
    freed = ranks.run(*(lambda walk=walk: walk.cache.parts.eviction.free_slots(96) for walk in walks))
    assert freed == [64 + 2 * 32 if is_short else 3 * 32] * 2
    assert ranks.num_meetings == 1
    assert state_of(walks[0]) == state_of(walks[1])
    assert [str(node.kv.form) for node in nodes_of(walks[0])] == ["knorm@0.5"] * (2 if is_short else 3)


def test_what_else_fails_on_one_rank_ends_all(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank cannot know whether the others went on: it must not."""
    walks = of_ranks(ranks, lambda: ShadowWalk(0, 1, "knorm@0.5+lru"))
    for walk in walks:
        walk.is_sound = False
        finished(walk, list(range(128)))
    select = compressor.select
    broken = RuntimeError("a kernel is broken")

    def fail(*given: object) -> object:
        if ranks.rank == 1:
            raise broken
        return select(*given)

    monkeypatch.setattr(compressor, "select", fail)
    raised = ranks.run(*(lambda walk=walk: walk.cache.parts.eviction.free_slots(64) for walk in walks))
    assert all(isinstance(error, RuntimeError) and "a rank failed" in str(error) for error in raised), raised
    assert raised[1].__cause__ is broken


def test_one_rank_without_memory_to_trim_makes_all_drop_the_node(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    walks = of_ranks(ranks, lambda: ShadowWalk(0, 1))

    def replace(walk: ShadowWalk, rank: int) -> Callable[[], None]:
        def run() -> None:
            (node,) = nodes_of(walk)
            walk.cache.parts.moves.compress(node.id, Form("random", 0.2))
            upper = walk.cache._split_node(node.key, node, 100)
            if rank == 1:
                monkeypatch.setattr(compressor, "select_survivors", fail)
            slots = walk.allocator.alloc(100)
            walk.compute(request, 0, 100, slots)
            walk.tiers.fill_replace.replace(upper, slots, False)

        request = walk.begin_user(list(range(128)))
        walk.end(request)
        return run

    def fail(*given: object) -> object:
        if ranks.rank == 1:
            raise torch.OutOfMemoryError("none left")
        return chosen(*given)

    chosen = compressor.select_survivors
    assert ranks.run(*(replace(walk, rank) for rank, walk in enumerate(walks))) == [None, None]
    assert state_of(walks[0]) == state_of(walks[1])
    assert len(nodes_of(walks[0])) == 1, "the lower part had survivors from above the split"


@pytest.mark.parametrize("is_form", [False, True])
def test_a_shadow_that_one_rank_cannot_fill_is_opened_by_none(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, is_form: bool
) -> None:
    walks = of_ranks(ranks, lambda: ShadowWalk(0, 1))
    tokens = list(range(128))
    for walk in walks:
        finished(walk, tokens)
    if is_form:
        ranks.run(*(lambda walk=walk: walk.copy(tokens) for walk in walks))
        fail_at(monkeypatch, ranks, "select")
    else:
        cat = torch.cat

        def fail(parts: list[torch.Tensor], *more: object) -> torch.Tensor:
            if ranks.rank == 1 and len(parts) == 1:
                raise torch.OutOfMemoryError("none left")
            return cat(parts, *more)

        monkeypatch.setattr(torch, "cat", fail)
    raised = ranks.run(*((lambda walk=walk: walk.cache.shadows.make_shadow_form(1, HALF)) if is_form
                         else (lambda walk=walk: walk.copy(tokens)) for walk in walks))  # fmt: skip
    monkeypatch.undo()
    assert [type(error) for error in raised] == [torch.OutOfMemoryError] * 2, raised
    assert state_of(walks[0]) == state_of(walks[1])
    assert len(walks[0].cache.shadows.spaces) == is_form


def test_profiles_are_those_that_rank_0_reads(ranks: Ranks, tmp_path: Path) -> None:
    tokens = list(range(128))
    maker = ProfiledWalk()
    store = ProfileStore(tmp_path / "rank-0.jsonl", IDENTITY)
    store.put(maker.profile(tokens, GOOD))
    for rank_0, expected in (("rank-0.jsonl", 1), ("none/at/all.jsonl", 0)):
        walks = of_ranks(ranks, ProfiledWalk)
        for walk, name in zip(walks, (rank_0, "rank-1.jsonl"), strict=True):
            object.__setattr__(walk.cache.config, "profiles", ProfileFlags(str(tmp_path / name)))
            walk.cache.quality.profile_identity = bytes(16)
        assert ranks.run(*(walk.cache.quality.identify_profiles for walk in walks)) == [True, True]
        catalogs = [[profile.to_json() for profile in walk.cache.quality.catalog] for walk in walks]
        assert catalogs[0] == catalogs[1] and len(catalogs[0]) == expected
    assert not (tmp_path / "rank-1.jsonl").exists()
