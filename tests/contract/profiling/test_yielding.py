"""Guests give way: what becomes of the queue and of the running batch while users run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_evicpress.patches.profiling.background_requests import BackgroundRequests
from sglang_evicpress.patches.tiers.prefetch import Stage
from sglang_evicpress.patches.tree.namespaces import SHADOW_PREFIX
from sglang_evicpress.policy.cost_model import Costs, PrefillLaw

pytestmark = pytest.mark.sglang

GUEST = SHADOW_PREFIX + "secret/exact"
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
    """A tree with one whole shadow, as much of a scheduler as it meets, and the guests of both."""

    def __init__(self, law: PrefillLaw) -> None:
        self.costs = Costs(law, {}, {})
        self.shadow = SimpleNamespace(tokens=range(NUM_CONTEXT), used_s=0.0)
        self.now_s = 0.0
        self.stages: dict[int, Any] = {}
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
        self.background = BackgroundRequests(self, self, [])

    def queue(self, req: Any, is_retracted: bool = False) -> None:
        self.scheduler.waiting_queue.append(req)
        if req.extra_key == GUEST:
            self.background.receive_guest(req)

    def space_of(self, name: str | None) -> Any:
        return self.shadow if name == GUEST else None

    def release_retired(self) -> None:
        """Nothing was closed."""

    def key_of_waiting(self, req: Any) -> Any:
        return req

    def _steps(self, req: Any) -> list[tuple[None, int]]:
        self.num_lookups += 1
        return [(None, NUM_CONTEXT)]

    def round(self, batch: Batch | None) -> list[Any]:
        """One round in which SGLang makes ``batch``; returns whom it found waiting."""
        self.background.begin_round(self.scheduler)
        self.background.hide_guests(self.scheduler)
        found = list(self.scheduler.waiting_queue)
        self.background.show_guests(self.scheduler)
        self.background.end_round(batch)
        return found


def request(extra_key: str | None = None, *, num_new: int = 20, is_running: bool = False) -> Any:
    return SimpleNamespace(
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
    return Cache(PrefillLaw(fixed_s=0.01, per_token_s=0.0004, per_pair_s=0.0))


def test_a_guest_that_may_not_begin_is_not_looked_at_and_keeps_waiting(cache: Cache) -> None:
    user, guest = request(is_running=True), request(GUEST)
    cache.scheduler.running_batch = Batch([user])
    cache.queue(guest)
    assert cache.round(Batch([user])) == []
    assert cache.scheduler.waiting_queue == [guest]
    cache.scheduler.running_batch = Batch([])
    assert cache.round(None) == [guest], "with no user it may begin"
    assert cache.num_lookups == 1, "whether its shadow is whole was looked up again"


def test_a_user_who_waits_is_looked_at(cache: Cache) -> None:
    user, guest = request(), request(GUEST)
    cache.queue(user)
    cache.queue(guest)
    assert cache.round(Batch([user], is_decode=False)) == [user]
    assert cache.scheduler.waiting_queue == [user, guest]


def test_guests_join_a_batch_while_they_add_no_more_than_it_costs_anyhow(cache: Cache) -> None:
    guests = [request(GUEST, num_new=20) for _ in range(4)]
    for guest in guests:
        cache.queue(guest)
    cache.background.begin_round(cache.scheduler)
    assert [cache.background.holds_back(guest) for guest in guests] == [False, False, True, True]
    cache.background.begin_round(cache.scheduler)
    assert not cache.background.holds_back(request(GUEST, num_new=500)), "one always may, however long it is"
    assert cache.background.holds_back(guests[0])


def run_beside(cache: Cache, user: Any, guest: Any) -> Batch:
    cache.queue(guest)
    cache.scheduler.waiting_queue.clear()
    guest.req_pool_idx = 1
    cache.scheduler.running_batch = Batch([user, guest])
    return cache.scheduler.running_batch


def test_a_guest_that_runs_when_a_user_comes_waits_again(cache: Cache) -> None:
    user, guest = request(is_running=True), request(GUEST)
    batch = run_beside(cache, user, guest)
    cache.round(batch)
    assert batch.reqs == [user] and batch.released == [guest] and not batch.batch_is_full
    assert cache.scheduler.waiting_queue == [guest] and cache.background.guests == [guest]
    counts = cache.background.counts
    assert (counts["requests"], counts["sent_back"], counts["aborted"]) == (1, 1, 0)
    assert (counts["user_steps"], counts["user_steps_touched"]) == (1, 0)


def test_a_guest_that_began_on_credit_decodes_along_until_too_much_is_owed(cache: Cache) -> None:
    user, guest = request(is_running=True), request(GUEST)
    for _ in range(128):
        cache.round(Batch([user]))
    batch, num_touched = run_beside(cache, user, guest), 0
    while guest in batch.reqs:
        cache.round(batch)
        num_touched += guest in batch.reqs
        assert num_touched < 1000
    assert cache.background.counts["user_steps_touched"] == num_touched
    assert cache.background.pacer.max_debt <= num_touched <= cache.background.pacer.max_debt * 1.1 + 2


def test_a_guest_that_is_about_to_end_is_left_to_end(cache: Cache) -> None:
    user, guest = request(is_running=True), request(GUEST, is_running=True)
    guest.to_finish = "given up"
    cache.background.guests.append(guest)
    cache.background.pacer.credit = -1000.0
    batch = cache.scheduler.running_batch = Batch([user, guest])
    cache.round(batch)
    assert batch.reqs == [user, guest] and not batch.released


def test_steps_of_users_are_counted_with_and_without_guests(cache: Cache) -> None:
    user = request(is_running=True)
    for _ in range(3):
        cache.round(Batch([user]))
    cache.round(Batch([user], is_decode=False))
    assert (cache.background.counts["user_steps"], cache.background.counts["user_steps_touched"]) == (3, 0)


def test_a_step_of_guests_while_a_user_could_have_begun_is_counted(cache: Cache) -> None:
    guest = request(GUEST)
    cache.queue(guest)
    cache.scheduler.waiting_queue.clear()
    guest.req_pool_idx = 1
    cache.round(Batch([guest]))
    assert cache.background.counts["users_held_up"] == 0
    cache.queue(request())
    cache.round(Batch([guest]))
    assert (cache.background.counts["users_held_up"], guest.to_finish is None) == (1, False)


@pytest.mark.parametrize(
    ("short_of", "is_late", "gives_up"), [("turn", False, False), (None, False, True), ("turn", True, True)]
)
def test_guests_go_on_while_what_a_user_waits_for_is_on_its_way(
    cache: Cache, short_of: str | None, is_late: bool, gives_up: bool
) -> None:
    guest, user = request(GUEST), request()
    cache.queue(guest)
    cache.scheduler.waiting_queue.clear()
    guest.req_pool_idx = 1
    cache.queue(user)
    stage = cache.stages[id(user)] = Stage(user)
    stage.short_of, stage.is_late = short_of, is_late
    cache.round(Batch([guest]))
    assert (guest.to_finish is not None) == gives_up
