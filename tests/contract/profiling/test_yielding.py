"""Background requests give way: what becomes of the queue and of the running batch while users run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.contract.releases import FakeRequest

from sglang_evicpress.patches.profiling.background_requests import BackgroundRequests
from sglang_evicpress.patches.tiers.prefetches import Prefetch
from sglang_evicpress.patches.tree.namespaces import SHADOW_PREFIX
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost

pytestmark = pytest.mark.sglang

BACKGROUND = SHADOW_PREFIX + "secret/exact"
NUM_CONTEXT = 128


class Batch:
    def __init__(self, reqs: list[Any], *, is_decode: bool = True, num_new: int = 1) -> None:
        self.reqs, self.batch_is_full, self.released = reqs, True, []
        self.extend_lens = [num_new] * len(reqs)
        self.forward_mode = SimpleNamespace(is_decode=lambda: is_decode)

    def release_req(self, idx: int, remaing_req_count: int, server_args: Any) -> None:
        self.released.append(self.reqs[idx])
        self.reqs[idx].req_pool_idx = None

    def filter_batch(self, *, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[index] for index in keep_indices]


class Cache:
    """A tree with one whole shadow, as much of a scheduler as it meets, and the background requests of both."""

    def __init__(self, cost: PrefillCost) -> None:
        self.costs = CostSnapshot(cost, {}, {})
        self.shadow = SimpleNamespace(tokens=range(NUM_CONTEXT), used_s=0.0)
        self.now_s = 0.0
        self.prefetches: dict[int, Any] = {}
        self.scheduler = SimpleNamespace(
            waiting_queue=[],
            running_batch=Batch([]),
            last_batch=None,
            chunked_req=None,
            max_running_requests=8,
            server_args=None,
            _add_request_to_queue=self.queue,
        )
        self.num_lookups = 0
        self.background = BackgroundRequests(self, self, self, self.prefetches, [])

    def queue(self, req: Any, is_retracted: bool = False) -> None:
        self.scheduler.waiting_queue.append(req)
        if req.extra_key == BACKGROUND:
            self.background.receive_background(req)

    def space_of(self, name: str | None) -> Any:
        return self.shadow if name == BACKGROUND else None

    def release_retired(self) -> None:
        """Nothing was closed."""

    def known_of(self, req: Any) -> list[tuple[None, int]]:
        self.num_lookups += 1
        return [(None, NUM_CONTEXT)]

    def round(self, batch: Batch | None) -> list[Any]:
        """One round in which SGLang makes ``batch``; returns whom it found waiting."""
        self.background.begin_round(self.scheduler)
        self.background.hide_background(self.scheduler)
        found = list(self.scheduler.waiting_queue)
        self.background.show_background(self.scheduler)
        self.background.end_round(batch)
        return found


def request(extra_key: str | None = None, *, num_new: int = 20, is_running: bool = False) -> Any:
    return FakeRequest(
        extra_key=extra_key,
        origin_input_ids=range(NUM_CONTEXT + num_new),
        full_untruncated_fill_ids=range(NUM_CONTEXT + num_new),
        prefix_indices=range(NUM_CONTEXT),
        req_pool_idx=0 if is_running else None,
        to_finish=None,
        finished=lambda: False,
    )


@pytest.fixture
def cache() -> Cache:
    return Cache(PrefillCost(fixed_s=0.01, per_token_s=0.0004, per_pair_s=0.0))


def test_a_guest_that_may_not_begin_is_not_looked_at_and_keeps_waiting(cache: Cache) -> None:
    user, background = request(is_running=True), request(BACKGROUND)
    cache.scheduler.running_batch = Batch([user])
    cache.queue(background)
    assert cache.round(Batch([user])) == []
    assert cache.scheduler.waiting_queue == [background]
    cache.scheduler.running_batch = Batch([])
    assert cache.round(None) == [background], "with no user it may begin"
    assert cache.num_lookups == 1, "whether its shadow is whole was looked up again"


def test_a_user_who_waits_is_looked_at(cache: Cache) -> None:
    user, background = request(), request(BACKGROUND)
    cache.queue(user)
    cache.queue(background)
    assert cache.round(Batch([user], is_decode=False)) == [user]
    assert cache.scheduler.waiting_queue == [user, background]


def test_guests_join_a_batch_while_they_add_no_more_than_it_costs_anyhow(cache: Cache) -> None:
    background_requests = [request(BACKGROUND, num_new=20) for _ in range(4)]
    for background in background_requests:
        cache.queue(background)
    cache.background.begin_round(cache.scheduler)
    assert [cache.background.should_defer(background) for background in background_requests] == [
        False,
        False,
        True,
        True,
    ]
    cache.background.begin_round(cache.scheduler)
    assert not cache.background.should_defer(request(BACKGROUND, num_new=500)), "one always may, however long it is"
    assert cache.background.should_defer(background_requests[0])


def run_beside(cache: Cache, user: Any, background: Any) -> Batch:
    cache.queue(background)
    cache.scheduler.waiting_queue.clear()
    background.req_pool_idx = 1
    cache.scheduler.running_batch = Batch([user, background])
    return cache.scheduler.running_batch


def test_a_guest_that_runs_when_a_user_comes_waits_again(cache: Cache) -> None:
    user, background = request(is_running=True), request(BACKGROUND)
    batch = run_beside(cache, user, background)
    cache.round(batch)
    assert batch.reqs == [user] and batch.released == [background] and not batch.batch_is_full
    assert cache.scheduler.waiting_queue == [background] and cache.background.background_requests == [background]
    counts = cache.background.counts
    assert (counts["requests"], counts["retracted"], counts["aborted"]) == (1, 1, 0)
    assert (counts["user_steps"], counts["user_steps_touched"]) == (1, 0)


def test_a_guest_that_began_on_credit_decodes_along_until_too_much_is_owed(cache: Cache) -> None:
    user, background = request(is_running=True), request(BACKGROUND)
    for _ in range(128):
        cache.round(Batch([user]))
    batch, num_touched = run_beside(cache, user, background), 0
    while background in batch.reqs:
        cache.round(batch)
        num_touched += background in batch.reqs
        assert num_touched < 1000
    assert cache.background.counts["user_steps_touched"] == num_touched
    assert cache.background.throttle.max_debt <= num_touched <= cache.background.throttle.max_debt * 1.1 + 2


def test_a_guest_that_is_about_to_end_is_left_to_end(cache: Cache) -> None:
    user, background = request(is_running=True), request(BACKGROUND, is_running=True)
    background.to_finish = "given up"
    cache.background.background_requests.append(background)
    cache.background.throttle.credit = -1000.0
    batch = cache.scheduler.running_batch = Batch([user, background])
    cache.round(batch)
    assert batch.reqs == [user, background] and not batch.released


def test_steps_of_users_are_counted_with_and_without_guests(cache: Cache) -> None:
    user = request(is_running=True)
    for _ in range(3):
        cache.round(Batch([user]))
    cache.round(Batch([user], is_decode=False))
    assert (cache.background.counts["user_steps"], cache.background.counts["user_steps_touched"]) == (3, 0)


def test_a_step_of_guests_while_a_user_could_have_begun_is_counted(cache: Cache) -> None:
    background = request(BACKGROUND)
    cache.queue(background)
    cache.scheduler.waiting_queue.clear()
    background.req_pool_idx = 1
    cache.round(Batch([background]))
    assert cache.background.counts["users_held_up"] == 0
    cache.queue(request())
    cache.round(Batch([background]))
    assert (cache.background.counts["users_held_up"], background.to_finish is None) == (1, False)


@pytest.mark.parametrize(
    ("short_of", "is_late", "gives_up"), [("turn", False, False), (None, False, True), ("turn", True, True)]
)
def test_guests_go_on_while_what_a_user_waits_for_is_on_its_way(
    cache: Cache, short_of: str | None, is_late: bool, gives_up: bool
) -> None:
    background, user = request(BACKGROUND), request()
    cache.queue(background)
    cache.scheduler.waiting_queue.clear()
    background.req_pool_idx = 1
    cache.queue(user)
    prefetch = cache.prefetches[id(user)] = Prefetch(user)
    prefetch.short_of, prefetch.is_late = short_of, is_late
    cache.round(Batch([background]))
    assert (background.to_finish is not None) == gives_up
