"""Budgets in random walks over EvicPressCache: what running requests drop is theirs, whole pages, and nobody else's.

The oracle of test_radix_cache_model.py reads every KV entry back; here it also knows what each slot of a row must hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.contract.test_radix_cache_model import CONTEXT, HEADS, LAYERS, ROWS, Request, Walk, path_hashes

from sglang_evicpress.decode import rhythm
from sglang_evicpress.decode.settings import METHODS, DecodeSettings
from sglang_evicpress.decode.tally import RequestTally
from sglang_evicpress.patches import decode_budgets, rows
from sglang_evicpress.patches.decode_state import DecodeState, num_logical, num_physical, positions_of
from sglang_evicpress.patches.decode_trace import DecodeTrace
from sglang_evicpress.patches.node import is_lossy, slots_of, tokens_to
from sglang_evicpress.patches.paged_allocator import free_whole_pages
from sglang_evicpress.patches.rows import HoleTable

pytestmark = pytest.mark.sglang

SCORES = ("value_key_ratio", "knorm", "keydiff", "streaming", "r_kv")
SINKS = 4
STEPS_OF_A_PASS = (
    *("row_of", "score", "survivors", "hole_moves", "repack_positions", "holefill_positions", "holefill_copies"),
    *("page_means", "worst_pages", "positions_of"),
)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[HoleTable]:
    made = HoleTable(ROWS + 1, "cpu")
    monkeypatch.setattr(rows, "_table", made)
    yield made


@dataclass
class Budgeted(Request):
    """A request as the cache touches it, with a budget or none."""

    kv_budget: DecodeState | None = None
    kv_committed_len: int = 0
    retraction_count: int = 0

    @property
    def inflight_middle_chunks(self) -> int:
        return int(self.filled < self.prompt_len)

    @property
    def logical(self) -> int:
        return self.kv_allocated_len + (self.kv_budget.num_dropped if self.kv_budget else 0)


class BudgetWalk(Walk):
    """Requests of all methods and scores, a third of them without a budget; some wait, some are sent back."""

    def __init__(self, seed: int, page_size: int, *, score: str | None = None, **settings: Any) -> None:
        self.score = score
        super().__init__(seed, page_size, **settings)
        self.kinds: dict[str, int] = {}
        self.puts_off = False

    def scheduler(self) -> SimpleNamespace:
        batch = SimpleNamespace(reqs=self.running, batch_is_full=False)
        batches = {"last_batch": batch, "running_batch": batch, "cur_batch": None}
        return SimpleNamespace(**batches, chunked_req=None, waiting_queue=[])

    def arrive(self) -> None:
        before = self.count
        super().arrive()
        if self.count == before:
            return
        given = self.waiting.pop()
        self.cache.claims.keep_only(self.waiting)
        request = Budgeted(given.rid, given.tokens, given.prompt_len, given.extra_key)
        if self.rng.random() < 0.67:
            method = self.rng.choice(METHODS)
            least = 3 * self.page if method == "paged" else self.page + SINKS
            settings = DecodeSettings(
                self.rng.randrange(least, least + 60),
                method,
                self.score or self.rng.choice(SCORES),
                every=self.rng.choice([1, 8, 20]),
                protect=self.rng.choice([(), ("first",), ("newest",), ("first", "newest")]),
            )
            if settings.tokens >= rhythm.least_tokens(settings, self.page, SINKS):
                request.kv_budget = DecodeState(settings, RequestTally(), trace=DecodeTrace())
                self.cache.has_budgets = True
        self.waiting.append(request)
        self.cache.expect(request)

    def extend(self, request: Any, upto: int) -> bool:
        """As a scheduler does: only the last chunk is the end of the prefill."""
        begin = len(request.prefix_indices)
        upto = max(upto, begin + 1)
        slots = self.alloc(request, begin, upto)
        if slots is None:
            return False
        view = self.cache.adopt(request)
        if request.req_pool_idx is None:
            request.req_pool_idx = self.rows.free_slots.pop()
            self.running.append(request)
        row = self.rows.req_to_token[request.req_pool_idx]
        row[: len(view.slots)] = view.slots
        row[len(view.slots) : len(view.slots) + len(slots)] = slots
        rows.table().note(torch.tensor([request.req_pool_idx]), [view.holes])
        self.compute(request, begin, upto, slots)
        request.kv_allocated_len = request.kv_committed_len = request.filled = upto
        request.frozen_view = self.view_of(request)
        is_chunk = upto < len(request.tokens)
        if is_chunk or self.rng.random() < 0.5:  # else its first pass comes before its result
            self.cache.cache_unfinished_req(request, chunked=is_chunk)
        self.verify(request)
        return True

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
            self.cache.relieve(self.page)
        fresh = self.allocator.alloc(self.page)
        return None if fresh is None else fresh[:1]

    def visit(self) -> None:
        budgeted = [each for each in self.running if each.kv_budget is not None]
        passes = {id(each): each.kv_budget.tally.counts.num_passes for each in budgeted}
        free = self.allocator.available_size()
        self.cache.visit_budgets(self.cache.scheduler)
        records = []
        for each in budgeted:
            state = each.kv_budget
            num_new = state.tally.counts.num_passes - passes[id(each)]
            records += list(state.tally.passes)[len(state.tally.passes) - num_new :]
            if num_new:
                each.frozen_view = self.view_of(each)
        for record in records:
            self.kinds[record.kind] = self.kinds.get(record.kind, 0) + 1
        has_copied = any(record.kind == "copy_out" or (record.kind == "page" and record.copies) for record in records)
        if records and not has_copied and not self.puts_off:
            freed = self.allocator.available_size() - free
            assert freed == sum(record.pages_freed for record in records) * self.page
        if self.puts_off:
            return  # what was put off would be due
        free = self.allocator.available_size()
        self.cache.visit_budgets(self.cache.scheduler)
        if not any(self.is_stuck(each) for each in budgeted):
            assert self.allocator.available_size() == free, "a second visit without a step in between drops nothing"

    def is_stuck(self, request: Any) -> bool:
        """It waits for room to copy what it shares."""
        return not request.kv_budget.has_left_tree

    def send_back(self) -> None:
        """SGLang's retraction: it waits again, and is computed anew with what it has generated."""
        ready = [each for each in self.running if each.filled >= each.prompt_len]
        if not ready:
            return
        request = self.rng.choice(ready)
        self.cache.cache_finished_req(request, is_insert=False)
        self.running.remove(request)
        self.rows.free_slots.append(request.req_pool_idx)
        request.req_pool_idx, request.kv_committed_freed, request.filled = None, False, 0
        request.kv_allocated_len = request.kv_committed_len = request.cache_protected_len = 0
        request.prefix_indices, request.last_node, request.frozen_view = torch.empty(0, dtype=torch.int64), None, []
        request.prompt_len = len(request.tokens)
        self.waiting.append(request)
        self.cache.expect(request)

    def moves(self) -> dict[Callable[[], None], float]:
        return super().moves() | {self.decode: 25, self.send_back: 0.7, self.leave: 0.3, self.finish: 1.5}

    # ---- the oracle

    def verify(self, request: Any) -> None:
        state = request.kv_budget
        if state is None or not state.has_left_tree:
            super().verify(request)
            if state is not None:
                assert state.num_dropped == 0
            return
        assert state.num_dropped % self.page == 0, "own holes are whole pages"
        assert int(rows.table().host[request.req_pool_idx]) == state.num_dropped
        assert request.evicpress.holes == request.cache_protected_len == 0
        num_slots = num_physical(request)
        assert num_logical(request) == len(request.tokens)
        assert self.puts_off or num_slots <= rhythm.peak(state.settings, self.page)
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
                if state.settings.method != "paged":
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


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
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
    walk.puts_off = True
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
        monkeypatch.setattr(decode_budgets, name, scarce(getattr(decode_budgets, name)))
    for name in ("copy", "copy_survivors"):
        monkeypatch.setattr(walk.cache.compressor, name, scarce(getattr(walk.cache.compressor, name)))
    walk.run(250)
    assert walk.cache.budget_totals.num_put_off > 10 and len(walk.kinds) > 1
    monkeypatch.undo()
    walk.visit()
    for request in walk.running:  # those that can copy what they share are within their budgets again
        state = request.kv_budget
        assert (
            state is None or not state.has_left_tree or num_physical(request) <= rhythm.peak(state.settings, page_size)
        )


def test_a_pass_without_memory_stays_an_error_where_other_ranks_make_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    walk = BudgetWalk(0, 1, num_slots=1024)
    monkeypatch.setattr(decode_budgets, "score", none_left)
    monkeypatch.setattr(type(walk.cache.compressor), "is_alone", False)
    with pytest.raises(torch.OutOfMemoryError):
        walk.run(250)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_too_full_to_copy_in_stays_whole(page_size: int) -> None:
    walk = BudgetWalk(11, page_size, num_slots=320)
    walk.run(120)
    assert walk.kinds


@pytest.mark.parametrize("page_size", [1, 16])
def test_freeing_whole_pages_is_what_the_allocator_does(page_size: int) -> None:
    one, other = Walk(0, page_size).allocator, Walk(0, page_size).allocator
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
