"""Background requests and users of one server: the real cache and its hooks, and a scheduler that makes batches as
SGLang's does."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from tests.contract.cache.test_radix_cache_model import Request
from tests.contract.profiling.test_shadows import ShadowWalk
from tests.contract.releases import end_request, lock, matched_slots, unlock

from sglang_evicpress.patches.scheduler import hooks
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.policy.cost_model import PrefillCost

pytestmark = pytest.mark.sglang


class Batch:
    """Touched part of SGLang's batch."""

    def __init__(self, server: Server, reqs: list[Request], forward_mode: ForwardMode) -> None:
        self.server, self.reqs, self.forward_mode = server, reqs, forward_mode
        self.extend_lens: list[int] = []
        self.batch_is_full = False

    def is_empty(self) -> bool:
        return not self.reqs

    def filter_batch(self, *, keep_indices: list[int] | None = None) -> None:
        if keep_indices is None:
            keep_indices = [index for index, req in enumerate(self.reqs) if not req.finished()]
        self.reqs = [self.reqs[index] for index in keep_indices]

    def release_req(self, index: int, num_left: int, server_args: object) -> None:
        """A retracted request begins anew, with what it has generated."""
        req = self.reqs[index]
        end_request(self.server.cache, req, is_insert=False)
        self.server.running.remove(req)
        self.server.rows.free_slots.append(req.req_pool_idx)
        req.req_pool_idx, req.kv_committed_freed, req.filled = None, False, 0
        req.prefix_indices, req.last_node, req.frozen_view = torch.empty(0, dtype=torch.int64), None, []


class Server(ShadowWalk):
    """``num_touched`` of ``num_user_steps`` steps in which users decode had background requests in them, or waited for
    theirs."""

    def __init__(self, *, max_running: int = 8, num_slots: int = 2048, seed: int = 0) -> None:
        self.max_running = max_running
        super().__init__(seed, 1, num_slots=num_slots)
        self.num_user_steps = self.num_touched = self.num_background_tokens = 0
        self.left: dict[str, int] = {}  # tokens that a request is still to generate
        self.done: list[str] = []

    @property
    def waiting(self) -> list[Request]:
        return self.stub.waiting_queue if hasattr(self, "stub") else self._waiting

    @waiting.setter
    def waiting(self, requests: list[Request]) -> None:
        self._waiting = requests

    def scheduler(self) -> object:
        stub = super().scheduler()
        del self.cache.background._retract  # here background requests do make way
        stub.running_batch = Batch(self, [], ForwardMode.DECODE)
        stub.max_running_requests, stub.server_args = self.max_running, None
        stub._add_request_to_queue = self.put_back
        return stub

    def put_back(self, req: Request, is_retracted: bool) -> None:
        assert is_retracted
        self.waiting.append(req)
        hooks._after_add_request_to_queue(None, self.stub, req, is_retracted)

    def request(self, name: str | None, tokens: list[int], num_new: int = 1) -> Request:
        self.count += 1
        request = Request(f"{'background' if name else 'user'}-{self.count}", list(tokens), len(tokens), name)
        self.left[request.rid] = num_new
        self.waiting.append(request)
        hooks._after_add_request_to_queue(None, self.stub, request)
        return request

    def user(self, num_tokens: int = 20, num_new: int = 1) -> Request:
        return self.request(None, self.random_tokens(num_tokens), num_new)

    def open_whole(self, num_tokens: int = 64) -> str:
        return self.whole(self.random_tokens(num_tokens)).exact

    def background(self, name: str, num_new: int = 1, *, num_tokens: int = 5) -> Request:
        """A question in a shadow."""
        spaces = {each: shadow for shadow in self.open.values() for each in (shadow.exact, *shadow.forms.values())}
        asked = [self.rng.randrange(50, 60) for _ in range(num_tokens)]
        return self.request(name, [*spaces[name].tokens, *asked], num_new)

    def until(self, *requests: Request, at_most: int) -> int:
        """Rounds until these requests run or have run."""
        for num_rounds in range(at_most + 1):
            if all(req.req_pool_idx is not None for req in requests):
                return num_rounds
            self.round()
        raise AssertionError(f"{[req.rid for req in requests]} wait for more than {at_most} rounds")

    # ---- one round, as Scheduler.event_loop_normal has it

    def round(self) -> Batch | None:
        stub = self.stub
        users_waited = [req for req in stub.waiting_queue if not is_shadow_name(req.extra_key)]
        hooks.begin_round(stub)
        last = stub.last_batch
        if last is not None and last.forward_mode.is_extend():
            stub.running_batch.reqs += [req for req in last.reqs if not req.finished()]
        batch = self.prefill_batch()
        if batch is None:
            before = len(stub.running_batch.reqs)
            stub.running_batch.filter_batch()
            if len(stub.running_batch.reqs) < before:
                stub.running_batch.batch_is_full = False
            batch = None if stub.running_batch.is_empty() else stub.running_batch
        hooks.end_round(stub, batch)
        stub.cur_batch = stub.cur_batch_for_debug = batch
        if batch is not None:
            self.index(batch, users_waited)
            self.run_batch(batch)
        stub.last_batch = batch
        self.check()
        return batch

    def prefill_batch(self) -> Batch | None:
        stub, running = self.stub, self.stub.running_batch
        if running.batch_is_full or not stub.waiting_queue:
            return None
        if len(running.reqs) >= self.max_running:
            running.batch_is_full = True
            return None
        adder = SimpleNamespace(can_run_list=[])
        taken: list[Request] = adder.can_run_list
        self.promised = sum(self.left[req.rid] for req in running.reqs)
        for req in stub.waiting_queue:
            if len(running.reqs) + len(taken) >= self.max_running:
                running.batch_is_full = True
                break
            key = RadixKey(array("q", req.tokens), req.extra_key, limit=len(req.tokens) - 1)
            match = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
            req.prefix_indices, req.last_node = matched_slots(self.cache, match), match.last_device_node
            req.cache_protected_len = req.num_cached = req.prefix_len
            result = hooks._around_add_one_req(self.add_one_req, adder, req)
            if result is not AddReqResult.CONTINUE:
                running.batch_is_full = running.batch_is_full or result is AddReqResult.NO_TOKEN
                break
        stub.waiting_queue = [req for req in stub.waiting_queue if not any(req is other for other in taken)]
        if not taken:
            return None
        batch = Batch(self, taken, ForwardMode.EXTEND)
        batch.extend_lens = [len(req.tokens) - len(req.prefix_indices) for req in taken]
        return batch

    def add_one_req(self, adder: SimpleNamespace, req: Request) -> AddReqResult:
        needed = len(req.tokens) - len(req.prefix_indices) + self.left[req.rid] + 1
        lock(self.cache, req)
        if needed + self.promised >= self.allocator.available_size() + self.cache.evictable_size():
            unlock(self.cache, req)
            return AddReqResult.NO_TOKEN
        self.promised += needed
        adder.can_run_list.append(req)
        return AddReqResult.CONTINUE

    def run_batch(self, batch: Batch) -> None:
        for req in list(batch.reqs):
            if batch.forward_mode.is_extend():
                assert self.extend(req, len(req.tokens)), "room that was promised is not there"
            else:
                req.tokens.append(self.rng.randrange(50))
                begin = req.kv_allocated_len
                slots = self.alloc(req, begin, begin + 1)
                self.rows.req_to_token[req.req_pool_idx, begin - req.evicpress.holes] = slots[0]
                self.compute(req, begin, begin + 1, slots)
                req.kv_allocated_len = req.filled = begin + 1
            self.left[req.rid] -= 1
            if self.left[req.rid] <= 0 or req.to_finish is not None:
                self.end(req)
                self.done.append(req.rid)

    # ---- what is counted beside

    def users_running(self) -> list[Request]:
        return [req for req in self.running if not is_shadow_name(req.extra_key)]

    def index(self, batch: Batch, users_waited: list[Request]) -> None:
        background_requests = [req for req in batch.reqs if is_shadow_name(req.extra_key)]
        if batch.forward_mode.is_extend():
            assert not background_requests or not users_waited, "a background request begins while a user waits"
            lengths = [
                num for req, num in zip(batch.reqs, batch.extend_lens, strict=True) if req in background_requests
            ]
            assert sum(lengths[:-1]) < self.cache.background.throttle.max_step_tokens
            self.num_background_tokens += sum(lengths)
            self.num_touched += bool(background_requests and self.users_running())
            return
        self.num_background_tokens += len(background_requests)
        if len(background_requests) < len(batch.reqs):
            self.num_user_steps += 1
            self.num_touched += bool(background_requests)

    def bound(self) -> float:
        throttle = self.cache.background.throttle
        return throttle.per_step * self.num_user_steps + throttle.max_debt + 1


def set_cost(server: Server, cost: PrefillCost) -> None:
    server.cache.terms.costs = replace(server.cache.terms.costs, prefill=cost)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Makes servers, one at a time, on which a batch costs the same whatever is in it."""

    def start(**settings: int) -> Server:
        server = Server(**settings)
        set_cost(server, PrefillCost(1.0, 1e-6, 0.0))
        return server

    monkeypatch.setattr(hooks, "_cache", None)
    yield start


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()


def test_with_no_user_guests_run_at_once(server: Server) -> None:
    name = server.open_whole()
    asked = [server.background(name, 3) for _ in range(4)]
    for _ in range(4):
        server.round()
    assert sorted(server.done) == sorted(req.rid for req in asked)
    assert (server.num_touched, server.cache.background.counts["user_steps_touched"]) == (0, 0)
    server.round()
    assert server.cache.background.background_requests == []


def test_guests_do_not_begin_while_a_user_waits(server: Server) -> None:
    name = server.open_whole()
    background, users = server.background(name), [server.user(), server.user()]  # the background request was first
    batch = server.round()
    assert batch is not None and batch.reqs == users and background in server.waiting
    server.until(background, at_most=200)


def test_guests_wait_for_credit_while_users_decode(server: Server) -> None:
    name = server.open_whole()
    user = server.user(num_new=400)
    server.round()
    background = server.background(name)
    assert (
        server.until(background, at_most=200) >= 1 / server.cache.background.throttle.per_step
        and user.req_pool_idx is not None
    )
    for _ in range(5):  # else it would go on with what has begun
        server.round()
    second = server.background(name)
    assert server.until(second, at_most=200) >= 1 / server.cache.background.throttle.per_step - 7
    assert server.num_touched == 2 == server.cache.background.counts["user_steps_touched"]


def test_a_user_that_was_just_prefilled_is_not_overlooked(server: Server) -> None:
    """SGLang counts it among those that run only after the next batch is made."""
    name = server.open_whole()
    user = server.user(num_new=100)
    server.round()
    background = server.background(name)
    assert server.stub.running_batch.reqs == []
    batch = server.round()
    assert batch is not None and batch.reqs == [user] and background in server.waiting


@pytest.mark.parametrize(
    ("cost", "most"),
    [(PrefillCost(1.0, 1e-6, 0.0), 3), (PrefillCost(0.015, 1e-4, 0.0), 2), (PrefillCost(0.0, 1e-4, 0.0), 1)],
)
def test_what_guests_compute_in_one_batch_is_bounded(server: Server, cost: PrefillCost, most: int) -> None:
    """By tokens, and by what they add to the time of a batch: a user who comes meanwhile waits for it."""
    set_cost(server, cost)
    name = server.open_whole()
    for _ in range(6):
        server.background(name, num_tokens=100)
    batch = server.round()
    assert batch is not None and len(batch.reqs) == most


def test_a_user_waits_for_no_guest_that_has_the_last_place(server: Server) -> None:
    name = server.open_whole()
    server.until(*(server.background(name, 100) for _ in range(server.max_running)), at_most=20)
    user = server.user(num_new=5)
    assert server.until(user, at_most=4) >= 1
    for _ in range(10):
        server.round()
    assert user.rid in server.done


def test_a_user_waits_for_no_guest_that_has_the_last_room(serve: Callable[..., Server]) -> None:
    server = serve(num_slots=512)
    name = server.open_whole(128)
    server.until(*(server.background(name, 20, num_tokens=100) for _ in range(3)), at_most=10)
    user = server.user(num_tokens=300, num_new=5)
    assert server.until(user, at_most=6) >= 1


def test_a_guest_without_room_keeps_no_user_out(serve: Callable[..., Server]) -> None:
    server = serve(num_slots=512)
    name = server.open_whole(64)
    first = server.user(num_tokens=300, num_new=60)
    server.round()
    background = server.background(name, 200, num_tokens=60)
    for _ in range(50):
        server.round()
    assert background in server.waiting and first.req_pool_idx is not None
    small = server.user(num_tokens=10, num_new=2)
    assert server.until(small, at_most=1) == 1


def test_only_the_stray_itself_is_aborted(server: Server) -> None:
    """SGLang's own abort takes every request whose id begins like the one given."""
    name = server.open_whole()
    stray = server.request("evicpress/shadow/nobody's/exact", server.random_tokens(80))
    stray.rid = ""
    user, background = server.user(), server.background(name)
    server.round()
    assert server.aborted == [""] and stray not in server.waiting
    server.until(user, background, at_most=200)
    assert server.cache.background.counts["aborted"] == 1


def test_guests_of_a_shadow_that_is_closed_are_aborted_and_those_that_run_end(server: Server) -> None:
    name = server.open_whole()
    running = server.background(name, 5)
    server.round()
    (shadow,) = server.open.values()
    waiting = server.background(name)
    server.put_away(shadow)
    for _ in range(6):
        server.round()
    assert server.aborted == [waiting.rid] and server.done == [running.rid]
    assert (
        server.cache.policy.census.num_shadow_slots == 0 and server.allocator.available_size() == server.allocator.size
    )


def test_a_guest_that_is_retracted_is_counted_once(server: Server) -> None:
    name = server.open_whole()
    background = server.background(name, 10)
    server.until(background, at_most=5)
    server.round()
    before = server.cache.background.counts["requests"]
    running = server.stub.running_batch
    running.release_req(running.reqs.index(background), 0, None)
    running.filter_batch(keep_indices=[index for index, req in enumerate(running.reqs) if req is not background])
    server.put_back(background, True)
    server.until(background, at_most=20)
    assert server.cache.background.counts["requests"] == before
    assert sum(req is background for req in server.cache.background.background_requests) == 1


def test_guests_that_owe_too_much_make_way_and_come_back(server: Server) -> None:
    server.cache.background.throttle.max_debt = 3
    name = server.open_whole()
    background, user = server.background(name, 40), server.user(num_new=200)
    for _ in range(170):
        server.round()
    assert background.rid not in server.done and 0 < server.num_touched <= server.bound()
    for _ in range(200):
        server.round()
    assert {background.rid, user.rid} <= {*server.done}
    assert server.left[background.rid] == 0, "it was cut short"


def test_guests_that_run_when_a_user_comes_make_way_at_once(server: Server) -> None:
    name = server.open_whole()
    background = server.background(name, 40)
    for _ in range(10):
        server.round()
    user = server.user(num_new=50)
    while user.rid not in server.done:
        server.round()
    assert (server.num_touched, background.rid in server.done) == (0, False)
    for _ in range(40):
        server.round()
    assert background.rid in server.done and server.left[background.rid] == 0, "it was cut short"


def test_claims_are_those_of_users(server: Server) -> None:
    name = server.open_whole()
    user = server.user(num_new=50)
    server.round()
    for _ in range(3):
        server.background(name)
    gone = server.user()
    assert len(server.cache.queued_hits) == 1
    server.waiting.remove(gone)  # its client has left
    server.round()
    assert len(server.cache.queued_hits) == 0 and user.req_pool_idx is not None


@pytest.mark.parametrize("seed", range(6))
def test_users_feel_no_more_than_was_promised(serve: Callable[..., Server], seed: int) -> None:
    """In n steps in which users decode, background requests touch at most per_step * n + max_debt + 1, whatever both
    do."""
    server = serve(seed=seed, num_slots=1024)
    rng, throttle = server.rng, server.cache.background.throttle
    throttle.max_debt = rng.choice([0, 3, 20])
    set_cost(server, rng.choice([PrefillCost(1.0, 1e-6, 0.0), PrefillCost(0.01, 1e-4, 0.0)]))
    busy = rng.choice([0.02, 0.1, 0.3])
    for _ in range(250):
        if rng.random() < busy and len(server.waiting) < 10:
            server.user(rng.randrange(5, 120), rng.randrange(1, 40))
        shadow = server.some()
        if shadow is None and rng.random() < 0.5:
            server.open_one()
        elif shadow is not None and len(server.waiting) < 12:
            kind = rng.random()
            if kind < 0.1:
                server.request(shadow.exact, shadow.tokens)
            elif kind < 0.4:
                server.make_form()
            elif kind < 0.7:
                name = rng.choice([shadow.exact, *shadow.forms.values()])
                server.background(name, rng.choice([1, 1, 30]), num_tokens=rng.randrange(1, 40))
            elif kind < 0.72:
                server.put_away(shadow)
        server.round()
        assert server.num_touched <= server.bound()
    counts = server.cache.background.counts
    assert (counts["user_steps"], counts["user_steps_touched"]) == (server.num_user_steps, server.num_touched)
    assert counts["tokens"] == server.num_background_tokens > 0
    for _ in range(300):
        if server.running or server.waiting:
            server.round()
    assert server.running == [] == server.waiting, "somebody waits for ever"
