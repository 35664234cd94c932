"""Hooks of the scheduler: the stamped time, the queue, and the duration of batches, as the cache gets them."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
from sglang.utils import TypeBasedDispatcher
from tests.contract.releases import FakeRequest, updates_weights

from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.scheduler import garbage, hooks, next_batch, queue_limit
from sglang_evicpress.patches.scheduler.hooks import Stamp
from sglang_evicpress.patches.scheduler.prefill_times import (
    LEAST_TOKENS,
    MOST_LEARNED,
    MOST_PATIENT,
    MOST_PENDING,
    NUM_TRUSTED,
    NUM_WARM_UP,
    PrefillTimes,
    note_not_loaded,
)
from sglang_evicpress.patches.tiers.agreement import News
from sglang_evicpress.policy.cost_model import CostModel, CostSnapshot, PrefillCost

pytestmark = pytest.mark.sglang

START = PrefillCost(0.0, 1.0, 0.0)
SEEN = CostSnapshot(START, {}, {})


class Loads(SimpleNamespace):
    """``count`` of them."""

    def __len__(self) -> int:
        return int(self.count)


class FakeCache:
    def __init__(self) -> None:
        self.stamps: list[tuple[float, CostSnapshot, float, float]] = []
        self.congestion, self.read_congestion = SimpleNamespace(value=2.5), SimpleNamespace(value=1.5)
        self.expected: list[str] = []
        self.learned_after: list[tuple[int, bool]] = []  # so many rounds, an idle one or not
        self.prefill_times = SimpleNamespace(costs=SEEN, learn=self.learn)
        self.queued_hits = SimpleNamespace(keep_only=lambda waiting: self.expected.append(f"keep {waiting}"))
        self.has_tiers = False
        self.started: list[object] = []
        self.loads = Loads(count=0, start=self.started.append)
        self.num_waiting = 0
        self.has_work = False
        self.ticks: list[tuple[bool, bool]] = []
        self.has_time = True
        self.rounds_that_delay: list[bool] = []
        self.full_rounds: list[bool] = []
        self.waits: list[float] = []
        self.passed_by: set[str] = set()
        self.holders: list[str] = []
        self.visited: list[object] = []
        self.decode_budgets = SimpleNamespace(visit_budgets=self.visited.append)
        self.told: list[str] = []
        self.entered: list[str] = []
        self.results: list[object] = []
        self.num_settled = 0
        self.checkpoints = SimpleNamespace(deferring=self.around_results, settle=self.settle)
        self.first_tokens = SimpleNamespace(enter=self.entered.append, note=self.results.append)
        self.metrics: Any = None
        self.background = self.rounds = self.prefetches = self.admission = self.weights = self

    def learn(self, *, is_idle: bool) -> None:
        self.learned_after.append((len(self.rounds_that_delay), is_idle))

    def settle(self) -> None:
        self.num_settled += 1

    @contextmanager
    def around_results(self) -> Iterator[None]:
        yield
        self.results.append("checkpoints are made")

    def advance(self, stamp_s: float, costs: CostSnapshot, congestion: float, read_congestion: float) -> None:
        self.stamps.append((stamp_s, costs, congestion, read_congestion))

    def forget_weights(self) -> None:
        self.told.append("forget")

    def weights_changed(self) -> None:
        self.told.append("changed")

    def end_copies(self) -> None:
        self.told.append("copies end")

    def know_adapters(self) -> None:
        self.told.append("adapters")

    def keep_only(self, waiting: list[str]) -> None:
        self.expected.append(f"keep stages {waiting}")

    agreement: Any = None
    is_news = False

    def has_news(self) -> bool:
        return self.is_news

    def tick(self, *, is_idle: bool, delays_token: bool) -> None:
        self.ticks.append((is_idle, delays_token))

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def begin_round(self, scheduler: Any = None, *, delays_token: bool = False, is_full: bool = False) -> bool:
        """Of the cache, or, with a scheduler, of the requests in its background."""
        if scheduler is not None:
            self.expected.append("a round begins")
        else:
            self.rounds_that_delay.append(delays_token)
            self.full_rounds.append(is_full)
        return self.has_time

    def hide_waiting(self, scheduler: Any) -> None:
        self.expected.append("background requests are hidden in the round")

    def show_waiting(self, scheduler: Any) -> None:
        scheduler.waiting_queue.append("background")

    def end_round(self, batch: Any) -> None:
        self.expected.append(f"a round ends with {batch}")

    def is_passed_by(self, adder: Any, req: str) -> bool:
        return req in self.passed_by

    def release_from_tail(self, until: str) -> Iterator[None]:
        while self.holders and self.holders[-1] != until:
            self.holders.pop()
            yield

    def note_admitted(self, req: str) -> None:
        self.expected.append(f"{req} runs")

    def sift(self, received: list[object], now_s: float) -> None:
        """Nothing has to wait."""

    def give_way(self) -> None:
        self.told.append("background requests give way")

    def is_background(self, req: str) -> bool:
        return req.startswith("background")

    def without_background(self, waiting: list[str]) -> list[str]:
        return [req for req in waiting if not self.is_background(req)]

    def on_queued(self, req: str) -> None:
        self.expected.append(req)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCache]:
    monkeypatch.setattr(hooks, "_cache", None)
    fake = FakeCache()
    hooks.attach(fake)
    yield fake


# ---- time


def test_what_the_receiving_rank_got_is_stamped_and_every_rank_takes_the_stamp(cache: FakeCache) -> None:
    received: list[Any] = ["a request"]
    hooks._after_pull_raw_reqs(received, None)
    stamp, request = pickle.loads(pickle.dumps(received))  # as SGLang sends it to the other ranks
    assert (type(stamp), stamp.costs, request) == (Stamp, SEEN, "a request")
    scheduler = SimpleNamespace(_request_dispatcher=TypeBasedDispatcher([]))
    hooks._after_init_request_dispatcher(None, scheduler)
    assert scheduler._request_dispatcher(stamp) is None  # nothing is retracted
    assert cache.stamps == [(stamp.now_s, SEEN, 2.5, 1.5)]


def test_what_threads_have_ended_is_told_to_other_ranks_though_nothing_was_received(cache: FakeCache) -> None:
    news, taken = News(5.0, (("copy", 7),), asks_health=False), list[News]()
    cache.agreement, cache.is_news = SimpleNamespace(news=lambda: news, take=taken.append), True
    received: list[Any] = []
    hooks._after_pull_raw_reqs(received, None)
    (stamp,) = pickle.loads(pickle.dumps(received))
    hooks._take_stamp(stamp)
    assert taken == [news] and len(cache.stamps) == 1


@pytest.mark.parametrize("received", [None, []])
def test_nothing_received_is_not_stamped(cache: FakeCache, received: list[Any] | None) -> None:
    hooks._after_pull_raw_reqs(received, None)
    assert cache.num_settled == 1, "on every rank the tree has what those who come next may look for"
    assert not received


def test_the_receiver_pulls_before_it_sends_on() -> None:
    names = SchedulerRequestReceiver.recv_requests.__wrapped__.__code__.co_names  # SGLang decorates it
    assert names.index("_pull_raw_reqs") < names.index("_broadcast_reqs_across_ranks")


# ---- the weights


class Hooks:
    """Registered hooks, by target."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[Any, HookType]]] = {}
        hooks.install(self, HookType)

    def register(self, target: str, hook: Any, kind: HookType) -> None:
        self.of.setdefault(target, []).append((hook, kind))

    def wrapped(self, name: str) -> Any:
        """A method of SGLang's weight updater with our hooks, as SGLang applies them."""
        method = getattr(SchedulerWeightUpdaterManager, name)
        for hook, kind in self.of[hooks.UPDATER + name]:
            method = _wrap_fn(method, hook, kind)
        return method


class Updater(SimpleNamespace):
    """Part of SGLang's that its own methods need on an idle server; it writes into ``told``."""

    def __init__(self, told: list[str], **values: Any) -> None:
        given = {"scheduler": None, **values}
        super().__init__(offload_tags=set(), draft_worker=None, metrics_collector=None, **given)
        self.tp_cpu_group = None
        self.told = told
        self.is_fully_idle = lambda **_: True
        self.memory_saver_adapter = SimpleNamespace(pause=lambda tag: told.append(f"pause {tag}"))
        self.flush_cache = lambda **_: told.append("flush") or True

    def __getattr__(self, name: str) -> Any:
        """SGLang's own method, where there is nothing of ours."""
        return MethodType(getattr(SchedulerWeightUpdaterManager, name), self)


class WeightsRequest(SimpleNamespace):
    """A request to update the weights, of which SGLang hands on what is None here."""

    torch_empty_cache = False
    disable_draft_model = True
    selector = "all"

    def __getattr__(self, name: str) -> None:
        """It was not given."""


UPDATES = [name for name in dir(SchedulerWeightUpdaterManager) if name.startswith("update_weights")]


@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("name", UPDATES)
def test_the_cache_is_told_of_every_update_even_of_one_that_failed(
    cache: FakeCache, monkeypatch: pytest.MonkeyPatch, name: str, flush: bool, success: bool
) -> None:
    assert len(UPDATES) == 4
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    updater = Updater(cache.told, **updates_weights(lambda: cache.told.append("update") or (success, "message")))
    Hooks().wrapped(name)(updater, WeightsRequest(flush_cache=flush))
    assert cache.told == ["forget", "update", *(["flush"] if flush and success else []), "changed"]


@pytest.mark.skipif(not RELEASE.UPDATE_SESSIONS, reason="this SGLang has no sessions of updates")
def test_a_session_of_updates_is_an_update_whoever_wrote_the_weights(
    cache: FakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be written past SGLang's updates meanwhile, and they are packed at its end."""
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    values = updates_weights(lambda: cache.told.append("written"))
    updater, hooked = Updater(cache.told, **{**values, "_session": None}), Hooks()
    assert hooked.wrapped("begin_weight_update")(updater, WeightsRequest()).success
    assert cache.told == ["forget", "written"]
    assert hooked.wrapped("end_weight_update")(updater, WeightsRequest()).success
    assert cache.told == ["forget", "written", "forget", "written", "changed"]


def test_copies_end_before_the_memory_of_the_pool_goes(cache: FakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda: SimpleNamespace(synchronize=lambda: None))
    updater = Updater(cache.told)
    Hooks().wrapped("release_memory_occupation")(updater, SimpleNamespace(tags=["kv_cache"]))
    assert cache.told == ["copies end", "pause kv_cache", "flush"]


def test_weights_that_come_back_are_read_anew(cache: FakeCache) -> None:
    hooks._before_release_memory(None, SimpleNamespace(tags=None))
    hooks._after_resume_memory(None, None, SimpleNamespace(tags=["kv_cache"]))
    assert cache.told == ["copies end", "forget"]
    hooks._after_resume_memory(None, None, SimpleNamespace(tags=["weights"]))
    assert cache.told == ["copies end", "forget", "changed"]


@pytest.mark.parametrize(("action", "told"), [("checksum", []), ("reset_tensors", ["forget", "changed"])])
def test_a_check_of_the_weights_that_overwrites_them_is_an_update(
    cache: FakeCache, action: str, told: list[str]
) -> None:
    updater, request = Updater(cache.told), SimpleNamespace(action=action, allow_quant_error=False)
    updater.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(check_weights=lambda **_: None))
    hooks._before_check_weights(updater, request)
    hooks._after_check_weights(None, updater, request)
    assert cache.told == told


# ---- the queue


def test_a_request_counts_once_it_is_in_the_queue_and_not_when_it_was_refused(cache: FakeCache) -> None:
    hooks._after_add_request_to_queue(None, SimpleNamespace(waiting_queue=["a", "b"]), "b")
    hooks._after_add_request_to_queue(None, SimpleNamespace(waiting_queue=["a", "b"]), "refused", True)
    hooks._after_add_request_to_queue(None, SimpleNamespace(waiting_queue=[]), "refused")
    assert cache.expected == cache.entered == ["b"]
    hooks._after_add_request_to_queue(None, SimpleNamespace(waiting_queue=["background 1"]), "background 1")
    assert cache.entered == ["b"], "only users wait for first tokens"


def test_series_are_published_in_a_round_where_there_are_any(cache: FakeCache) -> None:
    scheduler, published = SimpleNamespace(waiting_queue=[], running_batch=Batch(is_empty=True), last_batch=None), []
    hooks.begin_round(scheduler)
    cache.metrics = SimpleNamespace(publish_when_due=lambda: published.append("round"))
    hooks.begin_round(scheduler)
    assert published == ["round"]


def test_kv_that_is_not_of_its_tokens_alone_stays_out_of_the_tree(cache: FakeCache) -> None:
    plain, other = (SimpleNamespace(positional_embed_overrides=given) for given in (None, object()))
    for req in (plain, other):
        hooks._after_add_request_to_queue(None, SimpleNamespace(waiting_queue=[]), req)
    assert other.skip_radix_cache_insert and not hasattr(plain, "skip_radix_cache_insert")


def test_who_waited_too_long_is_told_before_any_of_the_queue_is_hidden(cache: FakeCache) -> None:
    """SGLang before 0.5.22 looks for them while the batch is made."""
    idle = {"waiting_queue": [], "running_batch": Batch(is_empty=True), "last_batch": None}
    told: list[list[str]] = []
    hooks.begin_round(SimpleNamespace(**idle, _abort_on_waiting_timeout=lambda: told.append(list(cache.expected))))
    (before,) = told
    assert "background requests are hidden in the round" not in before
    assert "background requests are hidden in the round" in cache.expected


def test_every_step_looks_who_has_left_the_queue(cache: FakeCache) -> None:
    scheduler = SimpleNamespace(waiting_queue=["a"])
    hooks.end_round(scheduler, None)
    assert scheduler.waiting_queue == ["a", "background"], "a background request that was hidden is there again"
    assert cache.expected == ["keep ['a']", "keep stages ['a']", "a round ends with None"]


def test_what_guests_may_do_is_worked_out_before_a_batch_is_made_and_booked_after(cache: FakeCache) -> None:
    scheduler = SimpleNamespace(waiting_queue=[], running_batch=Batch(is_empty=False), last_batch=None)
    hooks.begin_round(scheduler)
    hooks.end_round(scheduler, "a batch")
    assert cache.visited == [scheduler]
    assert [text for text in cache.expected if "round" in text] == [
        "a round begins",
        "background requests are hidden in the round",
        "a round ends with a batch",
    ]


class Batch:
    def __init__(self, *, is_empty: bool) -> None:
        self._is_empty = is_empty
        self.batch_is_full = True

    def is_empty(self) -> bool:
        return self._is_empty


def test_a_pool_is_not_taken_as_full_for_ever_while_nothing_runs(cache: FakeCache) -> None:
    scheduler = SimpleNamespace(waiting_queue=[], running_batch=Batch(is_empty=True), last_batch=None)
    hooks.begin_round(scheduler)
    assert scheduler.running_batch.batch_is_full, "without tiers SGLang's own accounting stands"
    cache.has_tiers = True
    hooks.begin_round(scheduler)
    assert not scheduler.running_batch.batch_is_full
    scheduler.running_batch = Batch(is_empty=False)
    hooks.begin_round(scheduler)
    assert scheduler.running_batch.batch_is_full
    assert cache.ticks == [(True, True), (True, True), (False, False)]
    assert cache.rounds_that_delay == [False, False, False], "nobody waits for an idle round"
    assert cache.learned_after == [(1, True), (2, True), (3, False)]
    cache.has_time = False
    hooks.begin_round(scheduler)
    assert len(cache.rounds_that_delay) == 4 and len(cache.learned_after) == 3


def test_a_round_that_looked_at_young_objects_says_so(cache: FakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [True, False, True]
    monkeypatch.setattr(garbage, "_collections", SimpleNamespace(begin_round=lambda *, is_idle: looks.pop(0)))
    monkeypatch.setattr(queue_limit, "begin_round", lambda _: ())
    for module in (hooks, queue_limit):
        monkeypatch.setattr(module, "end_round", lambda *_: None)
    scheduler = SimpleNamespace(waiting_queue=[], running_batch=Batch(is_empty=False), last_batch=None)
    for _ in range(2):
        next_batch._around_get_next_batch_to_run(lambda _: SimpleNamespace(batch_to_run=None), scheduler)
    scheduler.running_batch = Batch(is_empty=True)
    next_batch._around_get_next_batch_to_run(lambda _: SimpleNamespace(batch_to_run=None), scheduler)
    assert cache.full_rounds == [True, False, False], "nobody waits for an idle round"


def test_a_server_is_not_idle_between_a_prefill_and_its_token(cache: FakeCache) -> None:
    prefill, decode = (SimpleNamespace(forward_mode=mode) for mode in (ForwardMode.EXTEND, ForwardMode.DECODE))
    scheduler = SimpleNamespace(waiting_queue=[], running_batch=Batch(is_empty=True), last_batch=prefill)
    hooks.begin_round(scheduler)  # what was prefilled has not joined those that run
    scheduler.last_batch, scheduler.running_batch = decode, Batch(is_empty=False)
    hooks.begin_round(scheduler)
    scheduler.last_batch, scheduler.running_batch, scheduler.waiting_queue = None, Batch(is_empty=True), ["waits"]
    hooks.begin_round(scheduler)
    assert cache.ticks == [(False, True), (False, False), (False, True)], "(is idle, plans would delay a first token)"
    assert cache.rounds_that_delay == [True, False, True]
    assert cache.learned_after == [(2, False)], "no first token waits until the last batches were learned from"
    assert cache.num_settled == 3


def adder(*admitted: str) -> Any:
    return SimpleNamespace(can_run_list=list(admitted))


def test_who_is_passed_over_and_who_is_not(cache: FakeCache) -> None:
    cache.passed_by = {"a", "c"}
    batch, added = adder(), []

    def add(adder: Any, req: str, *rest: object) -> str:
        added.append(req)
        adder.can_run_list.append(req)
        return "added"

    for req in "ac":
        assert hooks._around_add_one_req(add, batch, req) is AddReqResult.CONTINUE
    assert hooks._around_add_one_req(add, batch, "b", False, None) == "added"
    assert added == ["b"] and cache.expected == ["b runs"]


@pytest.mark.parametrize(
    ("req", "found", "told"),
    [
        ("background", AddReqResult.NO_TOKEN, AddReqResult.CONTINUE),
        ("a", AddReqResult.NO_TOKEN, AddReqResult.NO_TOKEN),
        ("background", AddReqResult.OTHER, AddReqResult.OTHER),
    ],
)
def test_a_guest_that_does_not_fit_does_not_close_the_door(
    cache: FakeCache, req: str, found: AddReqResult, told: AddReqResult
) -> None:
    """After NO_TOKEN SGLang admits nobody before a running request has ended."""
    assert hooks._around_add_one_req(lambda *_: found, adder(), req) is told
    assert not cache.expected


def test_what_those_behind_it_hold_makes_way_for_a_request(cache: FakeCache) -> None:
    """It is asked for again until the request fits, and not from who is before it."""
    cache.holders = ["first", "a", "second", "third", "fourth"]
    batch = adder()

    def add(adder: Any, req: str) -> AddReqResult:
        if len(cache.holders) > 3:
            return AddReqResult.NO_TOKEN
        adder.can_run_list.append(req)
        return AddReqResult.NO_TOKEN  # there is no room for another

    assert hooks._around_add_one_req(add, batch, "a") is AddReqResult.NO_TOKEN
    assert batch.can_run_list == ["a"] and cache.holders == ["first", "a", "second"]
    cache.holders = ["first", "b", "second"]
    assert hooks._around_add_one_req(lambda *_: AddReqResult.NO_TOKEN, batch, "b") is AddReqResult.NO_TOKEN
    assert cache.holders == ["first", "b"] and cache.expected == ["a runs"]


class Pool:
    """Free and evictable slots; whoever waits holds ``held`` of them until it lets go."""

    page_size = 1

    def __init__(self, free: int, held: list[int]) -> None:
        self.free, self.held = free, held

    def available_size(self) -> int:
        return self.free

    def evictable_size(self) -> int:
        return 0

    def supports_mamba(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        """What SGLang does with any pool, where there is nothing of ours."""
        return MethodType(getattr(BaseTokenToKVPoolAllocator, name), self)

    def release_from_tail(self, until: object = None) -> Iterator[None]:
        while self.held:
            self.free += self.held.pop()
            yield


class Chunked(FakeRequest):
    """A request without a prefix, of which part is put into a batch: SGLang sets the range, later only its end."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(
            full_untruncated_fill_ids=[0] * num_tokens,
            prefix_indices=[],
            output_ids=[],
            req_pool_idx=1,
            sampling_params=SimpleNamespace(max_new_tokens=1),
            retracted_stain=False,
        )

    def set_extend_range(self, begin: int, end: int) -> None:
        assert begin == 0
        self.extend_end = end

    @property
    def extend_len(self) -> int:
        return self.extend_end

    @property
    def extend_range(self) -> SimpleNamespace:
        return SimpleNamespace(length=self.extend_end)


@pytest.mark.parametrize(
    ("free", "length", "num_holders"),
    [
        (100, 220, 0),  # all make way, and it is still short
        (440, 512, 1),  # no more is let go than it needs
        (900, 512, 3),
    ],
)
def test_a_chunk_that_is_short_for_want_of_room_leaves_none_for_a_second_request_in_chunks(
    cache: FakeCache, monkeypatch: pytest.MonkeyPatch, free: int, length: int, num_holders: int
) -> None:
    pool = Pool(free, held=[30, 40, 50])
    monkeypatch.setattr(cache, "release_from_tail", pool.release_from_tail)
    for flag in ("is_dsa_prefill_cp_in_seq_split", "is_prefill_context_parallel_enabled"):  # of older releases
        monkeypatch.setattr(schedule_policy, flag, lambda: False, raising=False)
    adder = PrefillAdder(1, pool, pool, None, 1.0, 4096, 512)  # type: ignore[arg-type]
    req = Chunked(1000)
    assert hooks._around_add_chunked_req(PrefillAdder.add_chunked_req, adder, req) is req
    assert (req.extend_len, adder.rem_chunk_tokens, len(pool.held)) == (length, 0, num_holders)
    last = Chunked(100)
    adder = PrefillAdder(1, pool, pool, None, 1.0, 4096, 512)  # type: ignore[arg-type]
    pool.free = 900
    assert hooks._around_add_chunked_req(PrefillAdder.add_chunked_req, adder, last) is None
    assert adder.rem_chunk_tokens == 412, "its last chunk leaves the rest to others"


def test_a_chunk_that_sglang_cut_for_shorter_requests_leaves_them_their_share(cache: FakeCache) -> None:
    """``shortest-prefill-first`` of 0.5.23."""
    adder: Any = SimpleNamespace(rem_chunk_tokens=512, rem_total_tokens=9000, chunked_req_limit=48)
    assert hooks._around_add_chunked_req(lambda adder, req: req, adder, req := Chunked(1000)) is req
    assert adder.rem_chunk_tokens == 512
    adder.chunked_req_limit = None
    hooks._around_add_chunked_req(lambda adder, req: req, adder, req)
    assert adder.rem_chunk_tokens == 0


def test_an_idle_scheduler_does_not_sleep_while_threads_work_for_the_cache(cache: FakeCache) -> None:
    slept: list[object] = []
    hooks._around_on_idle(slept.append, "scheduler")
    cache.loads, cache.has_work = [], True
    hooks._around_on_idle(slept.append, "scheduler")
    cache.has_work = False
    hooks._around_on_idle(slept.append, "scheduler")
    assert slept == ["scheduler", "scheduler"] and cache.waits == [hooks.IDLE_POLL_S]


def test_loads_begin_with_the_batch_of_their_round_and_are_waited_for_while_it_is_launched(cache: FakeCache) -> None:
    scheduler = SimpleNamespace(waiting_queue=[], device="cpu")
    cache.loads.count = 1
    hooks.end_round(scheduler, "batch")
    assert cache.started == ["batch"]
    launched: list[object] = []

    @contextmanager
    def launching(batch: object) -> Iterator[None]:
        launched.append(f"launching {batch}")
        yield
        launched.append("launched")

    def run(batch: object, launch: Any, is_synchronous: bool, stalled: Any = lambda: 0.0) -> Any:
        return launch(), is_synchronous, stalled()

    cache.loads.launching, cache.loads.stalled_s = launching, lambda: 0.25
    cache.prefill_times = SimpleNamespace(run=run)
    found = hooks._around_run_batch(lambda _, batch: launched.append(batch), scheduler, "batch")
    assert (launched, found) == (["launching batch", "batch", "launched"], (None, True, 0.25))
    cache.loads.count = 0
    found = hooks._around_run_batch(lambda _, batch: launched.append(batch), scheduler, "next")
    assert (launched[3:], found) == (["next"], (None, True, 0.0)), "there is none to wait for"


def test_every_way_into_the_queue_goes_by_the_hook() -> None:
    """SGLang appends elsewhere only for disaggregation and pipelines, which are refused."""
    import inspect

    source = inspect.getsource(Scheduler)
    assert source.count("waiting_queue.append(") == 1
    assert "waiting_queue.append(" in inspect.getsource(Scheduler._add_request_to_queue)
    assert "waiting_queue.extend(" not in source and "waiting_queue.insert(" not in source


def test_tokens_are_sent_before_their_kv_goes_to_the_tree(cache: FakeCache) -> None:
    finished: list[object] = []
    cache.prefill_times.finish = finished.append
    send = lambda scheduler, batch, result: cache.results.append(f"{result} is sent") or "done"  # noqa: E731
    assert hooks._around_process_batch_result(send, object(), "batch", "result") == "done"
    assert (finished, cache.results) == (["result"], ["batch", "result is sent", "checkpoints are made"])


# ---- prefill times


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Model(CostModel):
    def __init__(self) -> None:
        super().__init__(CostSnapshot(START, {}, {}))
        self.seen: list[tuple[list[tuple[int, int]], float]] = []

    def observe_prefill(self, chunks: Any, seconds: float) -> None:
        self.seen.append((list(chunks), round(seconds, 6)))
        super().observe_prefill(chunks, seconds)


def batch(new: int = 100, prefix: int = 0, holes: int = 0, mode: ForwardMode = ForwardMode.EXTEND) -> SimpleNamespace:
    req = SimpleNamespace(evicpress=SimpleNamespace(holes=holes))
    return SimpleNamespace(forward_mode=mode, reqs=[req], extend_lens=[new], prefix_lens=[prefix], decoding_reqs=None)


class Run:
    """A device that works off batches one after the other, and a scheduler that looks at results when it does."""

    def __init__(self) -> None:
        self.clock, self.model = Clock(), Model()
        self.times = PrefillTimes(self.model, self.clock)
        self.free_at = 0.0
        for _ in range(NUM_WARM_UP):
            self.wait(self.launch(batch(), 50.0))
        assert self.model.seen == []

    def launch(self, given: Any, seconds: float, is_synchronous: bool = False, stalled_s: float = 0.0) -> Any:
        """The host goes on at once; the device ends ``seconds`` after it could begin."""

        def begin() -> GenerationBatchResult:
            self.free_at = max(self.free_at, self.clock.now) + seconds
            if is_synchronous:
                self.clock.now = self.free_at
            done = self.free_at

            def synchronize() -> None:
                self.clock.now = max(self.clock.now, done)

            return GenerationBatchResult(copy_done=SimpleNamespace(synchronize=synchronize))

        return self.times.run(given, begin, is_synchronous, lambda: stalled_s)

    def wait(self, result: Any) -> None:
        self.times.finish(result)
        self.times.learn(is_idle=True)


def test_without_overlap_a_batch_takes_from_launch_to_result() -> None:
    run = Run()
    for seconds in (2.0, 3.0):
        run.clock.now += 7.0  # idle
        run.wait(run.launch(batch(new=200, prefix=500, holes=300), seconds))
    assert run.model.seen == [([(200, 200)], 2.0), ([(200, 200)], 3.0)]


def test_with_overlap_the_time_spent_behind_the_batch_before_does_not_count() -> None:
    run = Run()
    first = run.launch(batch(new=200), 2.0)
    run.clock.now += 0.5
    decode = run.launch(batch(mode=ForwardMode.DECODE), 1.0)
    run.wait(first)
    third = run.launch(batch(new=400), 3.0)
    run.wait(decode)
    run.wait(third)
    assert run.model.seen == [([(200, 0)], 2.0), ([(400, 0)], 3.0)]


def test_on_the_cpu_a_result_that_is_looked_at_later_was_there_before() -> None:
    run = Run()
    first = run.launch(batch(new=200), 2.0, is_synchronous=True)
    second = run.launch(batch(new=400), 3.0, is_synchronous=True)
    run.clock.now += 9.0
    run.wait(first)
    run.wait(second)
    assert run.model.seen == [([(200, 0)], 2.0), ([(400, 0)], 3.0)]


def test_in_a_mixed_batch_who_decodes_prefills_one_token() -> None:
    run = Run()
    mixed = batch(new=400, mode=ForwardMode.MIXED)
    mixed.decoding_reqs = [SimpleNamespace(evicpress=SimpleNamespace(holes=30))]
    mixed.reqs, mixed.extend_lens, mixed.prefix_lens = [*mixed.reqs, *mixed.decoding_reqs], [400, 1], [0, 90]
    run.wait(run.launch(mixed, 2.0))
    assert run.model.seen == [([(400, 0), (1, 60)], 2.0)]


@pytest.mark.parametrize("is_synchronous", [False, True])
def test_what_computing_took_that_could_have_been_loaded_is_its_share_of_the_batches(is_synchronous: bool) -> None:
    run = Run()
    first, second = batch(new=300), batch(new=200)
    second.reqs = first.reqs  # in two chunks
    note_not_loaded(first.reqs[0], 400)
    run.wait(run.launch(first, 3.0, is_synchronous))
    assert run.times.not_loaded_s == 3.0
    run.wait(run.launch(second, 4.0, is_synchronous))
    run.wait(run.launch(batch(new=200), 8.0, is_synchronous))
    assert run.times.not_loaded_s == 5.0


def test_batches_that_do_not_prefill_are_not_observed() -> None:
    run = Run()
    for mode in (ForwardMode.DECODE, ForwardMode.IDLE):
        run.wait(run.launch(batch(mode=mode), 1.0))
    assert run.model.seen == []
    run.wait(SimpleNamespace())  # the result of a batch that was not launched by us


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_what_waited_for_a_load_is_not_taken_for_prefilling(is_synchronous: bool) -> None:
    run = Run()
    for stalled_s in (math.inf, 1.0, 0.03):  # on a device nobody can tell how long
        run.wait(run.launch(batch(new=200), 2.0, is_synchronous, stalled_s))
    assert run.model.seen == []
    first = run.launch(batch(new=200), 4.0, is_synchronous, math.inf)
    second = run.launch(batch(new=400), 2.0, is_synchronous, 0.01)
    run.wait(first)
    run.wait(second)
    assert run.model.seen == [([(400, 0)], 2.0)]  # the one behind it has begun when it was over


def test_a_few_tokens_behind_a_cached_prefix_say_nothing_of_whole_prompts() -> None:
    run = Run()
    for _ in range(2 * NUM_TRUSTED):
        run.wait(run.launch(batch(new=LEAST_TOKENS - 1, prefix=4000), 5.0))
    assert run.model.seen == [] and run.times.cost is START
    run.wait(run.launch(batch(new=LEAST_TOKENS, prefix=4000), 5.0))
    assert run.model.seen == [([(LEAST_TOKENS, 4000)], 5.0)]


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_batches_are_learned_from_later_but_no_more_than_a_few_wait_for_it(is_synchronous: bool) -> None:
    run = Run()
    for number in range(1, MOST_PENDING + 3):
        run.times.finish(run.launch(batch(new=100 * number), 1.0, is_synchronous))
        assert len(run.model.seen) == run.times.num_observed == max(0, number - MOST_PENDING + 1)
    for num_waiting in range(MOST_PENDING - 2, -1, -1):
        run.times.learn(is_idle=False)
        assert run.times.num_observed == MOST_PENDING + 2 - max(num_waiting, MOST_PATIENT)
    run.times.learn(is_idle=True)
    assert run.times.num_observed == MOST_PENDING + 2 - MOST_PATIENT + MOST_LEARNED
    run.times.learn(is_idle=True)
    assert run.model.seen == [([(100 * number, 0)], 1.0) for number in range(1, MOST_PENDING + 3)]


def test_the_law_is_trusted_after_a_few_observations() -> None:
    run = Run()
    for index in range(NUM_TRUSTED):
        assert run.times.cost is START
        run.wait(run.launch(batch(new=100 * (index + 1)), 0.1 * (index + 1)))
    assert run.times.cost.per_token_s == pytest.approx(0.001, rel=0.2)
    assert run.times.num_observed == NUM_TRUSTED
