"""Budgets in random walks over EvicPressCache: what running requests drop is theirs, whole pages, and nobody else's.

The oracle of test_radix_cache_model.py reads every KV entry back; here it also knows what each slot of a row must hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.cache.test_radix_cache_model import CONTEXT, DIM, HEADS, LAYERS, ROWS, Request, Walk, path_hashes
from tests.contract.releases import NO_BATCH, end_request, lock
from tests.unit.geometry.made import make_geometry, make_rope

from sglang_evicpress.decode_budget import schedule
from sglang_evicpress.decode_budget.scores import score_rows
from sglang_evicpress.decode_budget.settings import METHODS, DecodeSettings
from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.patches.attention import req_to_token
from sglang_evicpress.patches.attention.request_holes import RequestHoles
from sglang_evicpress.patches.decode_budget import inspection, passes
from sglang_evicpress.patches.decode_budget.state import DecodeState, num_logical, num_physical, positions_of
from sglang_evicpress.patches.scheduler.paged_allocator import free_whole_pages
from sglang_evicpress.patches.tree.node import is_lossy, slots_of, tokens_to
from sglang_evicpress.patches.tree.node_kv import PrefixView

pytestmark = pytest.mark.sglang

SCORES = ("value_key_ratio", "knorm", "keydiff", "streaming", "geometry", "r_kv")
SINKS = 4
STEPS_OF_A_PASS = (
    *("rows_on_device", "rows_of", "score_rows", "survivors", "hole_moves", "repack_positions", "holefill_positions"),
    *("holefill_copies", "page_means", "worst_pages", "without_pages", "pages_of", "positions_of_rows"),
)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestHoles]:
    made = RequestHoles(ROWS + 1, "cpu")
    monkeypatch.setattr(req_to_token, "_table", made)
    yield made


@dataclass
class Budgeted(Request):
    """A request as the cache touches it, with a budget or none."""

    kv_budget: DecodeState | None = None
    retraction_count: int = 0

    @property
    def inflight_middle_chunks(self) -> int:
        return int(self.filled < self.prompt_len)

    @property
    def logical(self) -> int:
        return self.kv_allocated_len + (self.kv_budget.num_dropped if self.kv_budget else 0)


class BudgetWalk(Walk):
    """Requests of all methods and scores, a third of them without a budget; some wait, some are retracted."""

    is_sound = False  # not when its test ends: the table of holes is gone by then

    def __init__(self, seed: int, page_size: int, *, score: str | None = None, **settings: Any) -> None:
        self.score = score
        super().__init__(seed, page_size, **settings)
        self.cache.compressor.presses.geometry = make_geometry(LAYERS, 2 * HEADS, HEADS, make_rope(DIM))
        self.kinds: dict[str, int] = {}
        self.defers = False

    def scheduler(self) -> SimpleNamespace:
        batch = SimpleNamespace(reqs=self.running, batch_is_full=False)
        batches = {"last_batch": batch, "running_batch": batch, **NO_BATCH}
        return SimpleNamespace(
            **batches,
            chunked_req=None,
            waiting_queue=[],
            tokenizer=None,
            metrics_reporter=None,
            metrics_collector=None,
            ipc_channels=SimpleNamespace(recv_from_tokenizer=None, recv_from_rpc=None),
        )

    def arrive(self) -> None:
        before = self.count
        super().arrive()
        if self.count == before:
            return
        given = self.waiting.pop()
        self.cache.queued_hits.keep_only(self.waiting)
        request = Budgeted(given.rid, given.tokens, given.prompt_len, given.extra_key)
        if self.rng.random() < 0.67:
            method = self.rng.choice(METHODS)
            least = 3 * schedule.block_size(self.page) if method == "paged" else self.page + SINKS
            settings = DecodeSettings(
                self.rng.randrange(least, least + 60),
                method,
                self.score or self.rng.choice(SCORES),
                interval=self.rng.choice([1, 8, 20]),
                protected_pages=self.rng.choice([(), ("first",), ("newest",), ("first", "newest")]),
            )
            if settings.tokens >= schedule.least_tokens(settings, self.page, SINKS):
                self.cache.decode_budgets.begin(request, settings, wants_trace=True)
        self.waiting.append(request)
        self.cache.parts.admission.on_queued(request)

    def note_row(self, where: torch.Tensor, view: PrefixView) -> None:
        req_to_token.table().note(where, [view.holes])

    def is_result_due(self, request: Any) -> bool:
        return self.rng.random() < 0.5  # else its first pass comes before its result

    def decode(self) -> None:
        """One step of all that can: the passes, then a token each."""
        self.visit()
        for request in [each for each in self.running if each.filled >= each.prompt_len]:
            physical = num_physical(request)
            slots = None
            if len(request.tokens) < CONTEXT:
                slots = self.alloc_next(request, physical)
            if slots is None:
                continue
            request.tokens.append(self.rng.randrange(60))
            self.rows.req_to_token[request.req_pool_idx, physical] = slots[0]
            at = request.logical
            self.compute(request, at, at + 1, slots)
            request.kv_allocated_len += 1
            request.kv_committed_len += 1
            request.filled += 1

    def alloc_next(self, request: Any, physical: int) -> torch.Tensor | None:
        """SGLang's paged allocation goes by the physical length, its need of memory by ``kv_committed_len``."""
        assert physical % self.page == request.kv_allocated_len % self.page == request.logical % self.page
        if physical % self.page:
            last = int(self.rows.req_to_token[request.req_pool_idx, physical - 1])
            return torch.tensor([last + 1])
        if self.allocator.available_size() < self.page:
            self.cache.parts.eviction.free_slots(self.page)
        fresh = self.allocator.alloc(self.page)
        return None if fresh is None else fresh[:1]

    def visit(self) -> None:
        budgeted = [each for each in self.running if each.kv_budget is not None]
        passes = {id(each): each.kv_budget.stats.counts.num_passes for each in budgeted}
        free = self.allocator.available_size()
        self.cache.decode_budgets.visit_budgets(self.cache.scheduler)
        records = []
        for each in budgeted:
            state = each.kv_budget
            num_new = state.stats.counts.num_passes - passes[id(each)]
            records += list(state.stats.passes)[len(state.stats.passes) - num_new :]
            if num_new:
                each.frozen_view = self.view_of(each)
        for record in records:
            self.kinds[record.kind] = self.kinds.get(record.kind, 0) + 1
        has_copied = any(record.kind == "copy_out" or (record.kind == "page" and record.copies) for record in records)
        if records and not has_copied and not self.defers:
            freed = self.allocator.available_size() - free
            assert freed == sum(record.pages_freed for record in records) * self.page
        if self.defers:
            return  # what was deferred would be due
        stuck = [each for each in budgeted if self.is_stuck(each)]  # these may find the room just made
        settled = [each for each in budgeted if not self.is_stuck(each)]
        free, dropped = self.allocator.available_size(), [each.kv_budget.num_dropped for each in settled]
        self.cache.decode_budgets.visit_budgets(self.cache.scheduler)
        again = "a second visit without a step in between drops nothing"
        assert dropped == [each.kv_budget.num_dropped for each in settled], again
        assert stuck or self.allocator.available_size() == free, again
        for each in stuck:
            if not self.is_stuck(each):
                each.frozen_view = self.view_of(each)

    def is_stuck(self, request: Any) -> bool:
        """It waits for room to copy what it shares."""
        return not request.kv_budget.has_left_tree

    def retract(self) -> None:
        """SGLang's retraction: it waits again, and is computed anew with what it has generated."""
        ready = [each for each in self.running if each.filled >= each.prompt_len]
        if not ready:
            return
        request = self.rng.choice(ready)
        end_request(self.cache, request, is_insert=False)
        self.running.remove(request)
        self.rows.free_slots.append(request.req_pool_idx)
        request.req_pool_idx, request.kv_committed_freed, request.filled = None, False, 0
        request.kv_allocated_len = request.kv_committed_len = request.cache_protected_len = 0
        request.prefix_indices, request.last_node, request.frozen_view = torch.empty(0, dtype=torch.int64), None, []
        request.prompt_len = len(request.tokens)
        self.waiting.append(request)
        self.cache.parts.admission.on_queued(request)

    def moves(self) -> dict[Callable[[], None], float]:
        return super().moves() | {self.decode: 25, self.retract: 0.7, self.leave: 0.3, self.finish: 1.5}

    # ---- the oracle

    def verify(self, request: Any) -> None:
        state = request.kv_budget
        if state is None or not state.has_left_tree:
            super().verify(request)
            if state is not None:
                assert state.num_dropped == 0
            return
        assert state.num_dropped % self.page == 0, "own holes are whole pages"
        assert int(req_to_token.table().host[request.req_pool_idx]) == state.num_dropped
        assert request.evicpress.holes == request.cache_protected_len == 0
        num_slots = num_physical(request)
        assert num_logical(request) == len(request.tokens)
        assert self.defers or num_slots <= schedule.peak(state.settings, self.page)
        held = positions_of(state.positions, num_logical(request), num_slots, "cpu").expand(LAYERS, HEADS, -1)
        hashes = torch.tensor(path_hashes(request.tokens, self.adapter_of(request.extra_key)))
        row = self.rows.req_to_token[request.req_pool_idx, :num_slots].long()
        for layer in range(LAYERS):
            for head in range(HEADS):
                positions = held[layer, head].long()
                assert len(set(positions.tolist())) == num_slots, "a token twice"
                for buffer in (self.pool.k_buffer, self.pool.v_buffer):
                    entries = buffer[layer][row, head]
                    assert torch.equal(entries[:, 1].long(), positions), "a slot holds another token than the map says"
                    assert torch.equal(entries[:, 0].long(), hashes[positions]), "KV of another token path"
                if state.settings.method != "paged" or "first" in state.settings.protected_pages:
                    assert set(range(SINKS)) <= set(positions.tolist()), "a sink was dropped"
        for before, now in zip(request.frozen_view, self.view_of(request), strict=True):
            assert before <= now, "something was dropped without a pass"

    def check(self) -> None:
        super().check()
        for node in self.cache.nodes.values():
            if node.value is None or is_lossy(node):
                continue
            tokens = list(tokens_to(node))
            hashes = path_hashes(tokens, self.adapter_of(node.key.extra_key))[len(tokens) - len(node.key) :]
            for layer in range(LAYERS):
                kept = self.pool.k_buffer[layer][slots_of(node)]
                assert (kept[:, :, 0] == torch.tensor(hashes)[:, None]).all(), "a prefix in the tree was changed"


@pytest.mark.parametrize("page_size", [1, 2, 8, 16])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_random_walk_with_budgets_keeps_every_invariant(seed: int, page_size: int) -> None:
    walk = BudgetWalk(seed, page_size, num_slots=1024)
    walk.run(250)
    assert walk.kinds.get("copy_out", 0) > 0 and len(walk.kinds) > 1


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(3))
def test_a_pass_for_which_the_device_has_no_memory_changes_nothing_and_is_made_up_for(
    monkeypatch: pytest.MonkeyPatch, seed: int, page_size: int
) -> None:
    walk = BudgetWalk(seed, page_size, num_slots=1024)
    walk.defers = True
    chance = random.Random(seed)

    def scarce(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if chance.random() < 0.1:
                raise torch.OutOfMemoryError("none left")
            result = function(*arguments, **named)
            if chance.random() < 0.1:
                raise torch.OutOfMemoryError("none left")
            return result

        return call

    for name in STEPS_OF_A_PASS:
        monkeypatch.setattr(passes, name, scarce(getattr(passes, name)))
    for name in ("copy", "copy_survivors"):
        monkeypatch.setattr(walk.cache.compressor, name, scarce(getattr(walk.cache.compressor, name)))
    walk.run(250)
    assert walk.cache.decode_budgets.totals.num_deferred > 10 and len(walk.kinds) > 1
    monkeypatch.undo()
    walk.visit()
    for request in walk.running:  # those that can copy what they share are within their budgets again
        state = request.kv_budget
        assert (
            state is None
            or not state.has_left_tree
            or num_physical(request) <= schedule.peak(state.settings, page_size)
        )


def test_a_pass_without_memory_stays_an_error_where_other_ranks_make_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    walk = BudgetWalk(0, 1, num_slots=1024)
    monkeypatch.setattr(passes, "score_rows", none_left)
    monkeypatch.setattr(type(walk.cache.compressor), "is_alone", False)
    with pytest.raises(torch.OutOfMemoryError):
        walk.run(250)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_too_full_to_copy_in_stays_whole(page_size: int) -> None:
    walk = BudgetWalk(11, page_size, num_slots=320)
    walk.run(120)
    assert walk.kinds


def alike(page_size: int, method: str, score: str, num_requests: int) -> BudgetWalk:
    """Requests of one length that are due in the same steps; two share a prefix, and one has a budget of its own."""
    walk = BudgetWalk(7, page_size, num_slots=8192)
    for number in range(num_requests):
        tokens = [*walk.documents[number % 3][:100], *(walk.rng.randrange(50, 60) for _ in range(20))]
        request = Budgeted(f"r{number}", tokens, len(tokens), None)
        settings = DecodeSettings(64 if number else 80, method, score, interval=16)
        walk.cache.decode_budgets.begin(request, settings, wants_trace=True)
        walk.waiting.append(request)
        walk.cache.parts.admission.on_queued(request)
        walk.look_up(request)
        lock(walk.cache, request)
        walk.waiting.remove(request)
        assert walk.extend(request, len(tokens))
    for _ in range(70):
        walk.decode()
    walk.check()
    return walk


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("score", ["knorm", "keydiff", "r_kv"])
def test_the_passes_of_a_step_give_in_one_batch_what_they_give_row_by_row(
    monkeypatch: pytest.MonkeyPatch, page_size: int, method: str, score: str
) -> None:
    num_scored = 0

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal num_scored
        num_scored += 1
        return score_rows(*arguments)

    monkeypatch.setattr(passes, "score_rows", counted)
    together = alike(page_size, method, score, 5)
    launches, num_scored = num_scored, 0
    monkeypatch.setattr(req_to_token, "_table", RequestHoles(ROWS + 1, "cpu"))
    monkeypatch.setattr(passes, "MAX_BATCH_SCORES", 0)
    alone = alike(page_size, method, score, 5)
    num_passes = alone.cache.decode_budgets.totals.counts.num_passes
    assert num_scored == num_passes >= 10 and launches <= num_passes * 3 // 5
    assert together.allocator.available_size() == alone.allocator.available_size()
    for one, other in zip(together.running, alone.running, strict=True):
        assert one.rid == other.rid and num_physical(one) == num_physical(other)
        for mine, its in zip(one.kv_budget.trace.passes, other.kv_budget.trace.passes, strict=True):
            assert torch.equal(mine[1].read(), its[1].read())
            assert (mine[0].kind, mine[0].after, mine[0].pages_freed) == (its[0].kind, its[0].after, its[0].pages_freed)
        held = [
            [buffer[walk.rows.req_to_token[each.req_pool_idx, : num_physical(each)].long()] for buffer in
             (*walk.pool.k_buffer, *walk.pool.v_buffer)]
            for walk, each in ((together, one), (alone, other))
        ]  # fmt: skip
        assert all(torch.equal(mine, its) for mine, its in zip(*held, strict=True))


def test_small_pages_keep_the_tokens_that_pages_of_16_keep() -> None:
    """At most one pass per 16 tokens, and every sink stays."""
    walks = []
    for page_size in (16, 1, 2, 4, 8):
        walks.append(alike(page_size, "paged", "knorm", 3))
        req_to_token.attach(RequestHoles(ROWS + 1, "cpu"))
    for walk in walks[1:]:
        for one, other in zip(walks[0].running, walk.running, strict=True):
            assert other.kv_budget.stats.counts.num_passes <= 1 + -(-70 // 16)
            held = [positions_of(each.kv_budget.positions, num_logical(each), num_physical(each), "cpu").expand(
                LAYERS, HEADS, -1) for each in (one, other)]  # fmt: skip
            assert torch.equal(*held) and (held[1][..., :SINKS] == torch.arange(SINKS)).all()


# ---- what is told of requests


def test_positions_are_told_a_page_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MAX_VALUES", 300)
    walk = alike(1, "repack", "knorm", 2)
    req = walk.running[1]
    state = req.kv_budget
    told = walk.cache.inspector.describe_requests("r1", positions=True)["requests"][0]
    wanted = [positions_of(state.positions, num_logical(req), num_physical(req), "cpu")]
    wanted += [held.read() for _, held in state.trace.passes]
    values, shapes = [told["values"]], [told["positions_shape"], *(each["positions_shape"] for each in told["trace"])]
    while told["next_offset"] is not None:
        assert len(values[-1]) == 300
        told = walk.cache.inspector.describe_requests("r1", positions=True, offset=told["next_offset"])["requests"][0]
        assert told["trace"] is None
        values.append(told["values"])
    assert len(values) > 2 and shapes == [list(each.shape) for each in wanted]
    every = torch.cat([each.flatten() for each in wanted])
    assert torch.equal(torch.from_numpy(np.concatenate(values)), every) and len(every) == told["num_values"]
    assert isinstance(values[0], np.ndarray), "no Python integers"
    beyond = walk.cache.inspector.describe_requests("r1", positions=True, offset=10**15)["requests"][0]
    assert len(beyond["values"]) == 0 and beyond["next_offset"] is None
    for each in walk.running:
        each.to_finish = "done"
    walk.end_all()
    ended = walk.cache.inspector.describe_requests("r1", positions=True)["requests"][0]
    assert ended["positions_shape"] == shapes[0] and np.array_equal(ended["values"], values[0])


def test_requests_are_told_a_hundred_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MAX_REQUESTS", 3)
    walk = alike(1, "paged", "knorm", 5)
    for each in walk.running:
        each.to_finish = "done"
    walk.finish()
    first = walk.cache.inspector.describe_requests(None, positions=False)
    assert [each["number"] for each in first["requests"]] == [1, 2, 3] and first["next_after"] == 3
    rest = walk.cache.inspector.describe_requests(None, positions=False, after=3)
    assert [each["number"] for each in rest["requests"]] == [4, 5] and rest["next_after"] is None
    two = walk.cache.inspector.describe_requests(None, positions=False, after=1, limit=2)
    assert [each["number"] for each in two["requests"]] == [2, 3] and two["next_after"] == 3
    with pytest.raises(IntrospectionError, match="'r9' has no budget here"):
        walk.cache.inspector.describe_requests("r9", positions=True)


@pytest.mark.parametrize("page_size", [1, 16])
def test_freeing_whole_pages_is_what_the_allocator_does(page_size: int) -> None:
    one, other = BudgetWalk(0, page_size).allocator, BudgetWalk(0, page_size).allocator
    for allocator, free in (
        (one, lambda slots: one.free(slots)),
        (other, lambda slots: free_whole_pages(other, slots)),
    ):
        slots = allocator.alloc(8 * page_size)
        free(slots[2 * page_size : 6 * page_size])
        free(slots[6 * page_size : 7 * page_size + 1])  # one that is partial in use is a whole page of the pool
        free(slots[:0])
    assert one.available_size() == other.available_size()
    assert sorted(one.free_pages.tolist()) == sorted(other.free_pages.tolist())


def test_freeing_whole_pages_in_a_group_waits_for_its_end() -> None:
    allocator = Walk(0, 16).allocator
    slots = allocator.alloc(64)
    free = allocator.available_size()
    allocator.free_group_begin()
    free_whole_pages(allocator, slots)
    assert allocator.available_size() == free
    allocator.free_group_end()
    assert allocator.available_size() == free + 64
