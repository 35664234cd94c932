"""Hooks of the scheduler beyond SGLang's cache interface: the time, the queue, and the duration of batches.

Ranks must decide alike, so they share one clock and one cost model of prefill times: rank 0 puts a ``Stamp`` before
whatever it has received, SGLang sends it on to the other ranks with that, and every rank takes it in between the same
two steps. Nothing is added when nothing was received, unless threads work for the tiers of several ranks, and never a
collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.schedule_policy import AddReqResult, CacheAgnosticPolicy
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.utils import TypeBasedDispatcher

from sglang_evicpress.patches.compat.release import RELEASE, REQUEST_KV
from sglang_evicpress.patches.scheduler.held_messages import GiveWay
from sglang_evicpress.patches.tiers.agreement import Agreement, News
from sglang_evicpress.patches.tree.types import Batch, QueuedRequest, Request, Scheduler
from sglang_evicpress.policy.cost_model import CostSnapshot

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder."
PREFETCH_POLL_S = 0.002
IDLE_POLL_S = 0.02
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver."


@dataclass(frozen=True, slots=True)
class Stamp:
    """Rank 0's monotonic clock when it received something, and what it had seen until then: costs, and how many
    requests a second of computing delays, and one of reading. ``news``: what the threads of its tiers have done, None
    where no other rank has to know."""

    now_s: float
    costs: CostSnapshot
    congestion: float
    read_congestion: float
    news: News | None = None


class QueueOrder(Protocol):
    """SGLang's SchedulePolicy."""

    policy: object


class HookedScheduler(Scheduler, Protocol):
    """The scheduler, with its device, the order of its queue and what it does with the messages that come."""

    device: str
    policy: QueueOrder
    enable_priority_scheduling: bool
    _request_dispatcher: TypeBasedDispatcher


class HookedAdder(Protocol):
    """SGLang's PrefillAdder: what is left for the batch that is made."""

    can_run_list: list[Request]
    rem_chunk_tokens: int | None

    @property
    def rem_total_tokens(self) -> int: ...


class Value(Protocol):
    """A figure that is learned."""

    value: float


class LearnedCosts(Protocol):
    """Batches that are timed, and what they show."""

    @property
    def costs(self) -> CostSnapshot: ...
    @property
    def run(self) -> Callable[..., object]: ...
    @property
    def finish(self) -> Callable[..., None]: ...
    def learn(self, *, is_idle: bool) -> None: ...


class WaitingHits(Protocol):
    """Hits that waiting requests are expected to be."""

    def keep_only(self, waiting: Collection[Request]) -> None: ...


class HookedRounds(Protocol):
    """Work on tiers between two batches."""

    @property
    def has_tiers(self) -> bool: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def has_jobs(self) -> bool: ...
    def tick(self, *, is_idle: bool, delays_token: bool) -> None: ...
    def wait(self, seconds: float) -> None: ...


class HookedPrefetches(Protocol):
    """Prefetches of the requests that wait."""

    @property
    def congestion(self) -> Value: ...
    @property
    def read_congestion(self) -> Value: ...
    @property
    def num_waiting(self) -> int: ...
    def keep_only(self, waiting: Collection[Request]) -> None: ...
    def release_from_tail(self, until: Request | None = None) -> Iterator[None]: ...


class HookedLoads(Protocol):
    """Loads that are not over."""

    def __len__(self) -> int: ...
    def start(self, batch: Batch | None) -> None: ...
    def launching(self, batch: Batch) -> AbstractContextManager[None]: ...
    def stalled_s(self) -> float: ...


class HookedAdmission(Protocol):
    """Choice of who is passed over."""

    def on_queued(self, req: QueuedRequest) -> None: ...
    def hide_waiting(self, scheduler: HookedScheduler) -> None: ...
    def show_waiting(self, scheduler: HookedScheduler) -> None: ...
    def is_passed_by(self, adder: HookedAdder, req: QueuedRequest) -> bool: ...
    def note_admitted(self, req: QueuedRequest) -> None: ...


class HookedWeights(Protocol):
    """Users of the weights."""

    def forget_weights(self) -> None: ...
    def weights_changed(self) -> None: ...
    def end_copies(self) -> None: ...


class HookedBudgets(Protocol):
    """Decode-time budgets."""

    @property
    def visit_budgets(self) -> Callable[..., None]: ...


class HookedFirstTokens(Protocol):
    """Times of first tokens."""

    @property
    def enter(self) -> Callable[..., None]: ...
    @property
    def note(self) -> Callable[..., None]: ...


class HookedMetrics(Protocol):
    """Series that others read."""

    def publish_when_due(self) -> None: ...


class BeginRound(Protocol):
    """What is done before a batch is made; ``delays_token``: somebody would wait for it for a first token; ``is_full``:
    other work took time. True where there is time to learn."""

    def __call__(self, *, delays_token: bool, is_full: bool) -> bool: ...


class HookedGuests(Protocol):
    """Requests that give way to users'."""

    def begin_round(self, scheduler: Scheduler) -> None: ...
    def end_round(self, batch: Batch | None) -> None: ...
    def without_background(self, waiting: list[Request]) -> list[Request]: ...
    def is_background(self, req: Request) -> bool: ...
    def sift(self, received: list[object], now_s: float) -> None: ...
    def give_way(self) -> None: ...


class HookedCheckpoints(Protocol):
    """Checkpoints of running requests that wait until tokens are sent."""

    def deferring(self) -> AbstractContextManager[None]: ...
    def settle(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HookedCache:
    """The parts of the cache that the scheduler tells something. ``advance`` takes a stamp: its time, its costs and how
    many requests a second of computing delays. ``begin_round`` does some of what is to be done at many nodes, where the
    round has time and no token is delayed. ``metrics`` None: nobody reads any; ``agreement`` None: there is no other
    rank, or there are no tiers."""

    advance: Callable[[float, CostSnapshot, float, float], None]
    begin_round: BeginRound
    prefill_times: LearnedCosts
    queued_hits: WaitingHits
    rounds: HookedRounds
    prefetches: HookedPrefetches
    loads: HookedLoads
    admission: HookedAdmission
    weights: HookedWeights
    know_adapters: Callable[[], None]
    decode_budgets: HookedBudgets
    background: HookedGuests
    checkpoints: HookedCheckpoints
    first_tokens: HookedFirstTokens
    metrics: HookedMetrics | None
    agreement: Agreement | None = None

    def has_news(self) -> bool:
        """True if other ranks wait for what this one tells them, though it has received nothing."""
        if self.agreement is None:
            return False
        return self.rounds.has_jobs or self.prefetches.num_waiting > 0 or self.agreement.is_due


class MemoryReq(Protocol):
    """A request to release or resume memory."""

    tags: list[str] | None


class CheckReq(Protocol):
    """A request to check the weights."""

    action: str


_cache: HookedCache | None = None


def attach(cache: HookedCache) -> None:
    """Make ``cache`` the one that is stamped for (a scheduler process has one)."""
    global _cache
    _cache = cache


def _after_pull_raw_reqs(received: list[object] | None, receiver: object) -> None:
    """AFTER ``_pull_raw_reqs``, on every rank: a list only on the one that receives."""
    cache = _cache
    if cache is not None:
        cache.checkpoints.settle()  # those who were received look for them
    if received is None or cache is None:
        return
    now_s = time.monotonic()
    cache.background.sift(received, now_s)
    if not (received or cache.has_news()):
        return
    agreement = cache.agreement
    news = None if agreement is None else agreement.news()
    weights = cache.prefetches.congestion.value, cache.prefetches.read_congestion.value
    received.insert(0, Stamp(now_s, cache.prefill_times.costs, *weights, news))


def _after_init_request_dispatcher(_: None, scheduler: HookedScheduler) -> None:
    scheduler._request_dispatcher += TypeBasedDispatcher([(Stamp, _take_stamp), (GiveWay, _give_way)])


def _take_stamp(stamp: Stamp) -> None:
    if _cache is not None:
        if _cache.agreement is not None and stamp.news is not None:
            _cache.agreement.take(stamp.news)
        _cache.advance(stamp.now_s, stamp.costs, stamp.congestion, stamp.read_congestion)


def _give_way(_: GiveWay) -> None:
    if _cache is not None:
        _cache.background.give_way()


def _after_add_request_to_queue(_: None, scheduler: Scheduler, req: QueuedRequest, *__: object, **___: object) -> None:
    """AFTER ``_add_request_to_queue``, which may also refuse the request."""
    if getattr(req, "positional_embed_overrides", None) is not None:
        req.skip_radix_cache_insert = True  # as later releases do: its KV is not of its tokens alone
    queue = scheduler.waiting_queue
    if _cache is not None and queue and queue[-1] is req:
        if not _cache.background.is_background(req):
            _cache.first_tokens.enter(req)
        _cache.admission.on_queued(req)


def begin_round(scheduler: HookedScheduler, *, is_full: bool = False) -> None:
    """Before the next batch is made; ``is_full``: other work took time."""
    if _cache is None:
        return
    _cache.checkpoints.settle()  # where nothing was received in between
    last, is_running = scheduler.last_batch, not scheduler.running_batch.is_empty()
    is_idle = last is None and not is_running and not scheduler.waiting_queue
    # What was just prefilled joins those that run later, and its token is sent after the next batch is launched.
    delays_token = last.forward_mode.is_extend() if last is not None else not is_running
    has_time = _cache.begin_round(delays_token=delays_token and not is_idle, is_full=is_full and not is_idle)
    if has_time and (is_idle or not delays_token):
        _cache.prefill_times.learn(is_idle=is_idle)
    _cache.decode_budgets.visit_budgets(scheduler)
    _cache.rounds.tick(is_idle=is_idle, delays_token=delays_token)
    _cache.background.begin_round(scheduler)
    if _cache.metrics is not None:
        _cache.metrics.publish_when_due()
    if _cache.rounds.has_tiers and scheduler.running_batch.is_empty():
        # SGLang takes a pool without room for one more request as full until one ends. Nodes that are being loaded
        # are locked with no request running, and they are done without one.
        scheduler.running_batch.batch_is_full = False
    abort = getattr(scheduler, "_abort_on_waiting_timeout", None)
    if abort is not None:  # before 0.5.22 SGLang looks for requests that waited too long once some are hidden
        abort()
    _cache.admission.hide_waiting(scheduler)


def is_first_come_first_served(scheduler: HookedScheduler) -> bool:
    """True if SGLang looks at the queue in its own order; it sorts by other rules after some of it was hidden."""
    return scheduler.policy.policy == CacheAgnosticPolicy.FCFS and not scheduler.enable_priority_scheduling


def end_round(scheduler: HookedScheduler, batch: Batch | None) -> None:
    """The next batch is made, None where there is none: whoever left the queue since without running was aborted."""
    if _cache is None:
        return
    _cache.admission.show_waiting(scheduler)
    waiting = _cache.background.without_background(scheduler.waiting_queue)
    _cache.queued_hits.keep_only(waiting)
    _cache.prefetches.keep_only(waiting)
    _cache.background.end_round(batch)
    _cache.loads.start(batch)
    if batch is None and _cache.prefetches.num_waiting:
        _cache.rounds.wait(PREFETCH_POLL_S)  # a busy loop would hold up the threads that it waits for


def _around_add_one_req(
    original: Callable[..., object], adder: HookedAdder, req: QueuedRequest, *args: object, **kwargs: object
) -> object:
    """AROUND ``PrefillAdder.add_one_req``: a request whose prefix is on its way, or is computed by another, waits for
    another round, and one in a shadow for users' requests. What those behind it in the queue hold makes way for it."""
    if _cache is None:
        return original(adder, req, *args, **kwargs)
    if _cache.admission.is_passed_by(adder, req):
        return AddReqResult.CONTINUE
    result = original(adder, req, *args, **kwargs)
    is_admitted = _is_last(adder, req)
    if result is AddReqResult.NO_TOKEN and not is_admitted:
        if _cache.background.is_background(req):
            return AddReqResult.CONTINUE  # SGLang would admit nobody any more until some request ends
        for _ in _cache.prefetches.release_from_tail(until=req):
            result = original(adder, req, *args, **kwargs)
            is_admitted = _is_last(adder, req)
            if is_admitted or result is not AddReqResult.NO_TOKEN:
                break
    if is_admitted:
        _cache.admission.note_admitted(req)
    return result


def _around_add_chunked_req(original: Callable[..., object], adder: HookedAdder, req: Request) -> object:
    """AROUND ``PrefillAdder.add_chunked_req``: it needs the room more than those who wait. A chunk that is short for
    want of room leaves some of the batch's share, and room may be found while others are looked at: the next request
    would be cut into chunks too, and SGLang knows of one such request only."""
    if _cache is not None and adder.rem_chunk_tokens is not None:
        num_new = len(req.full_untruncated_fill_ids) - REQUEST_KV.prefix_len(req)
        wanted = min(adder.rem_chunk_tokens, num_new)
        if adder.rem_total_tokens < wanted:
            for _ in _cache.prefetches.release_from_tail():
                if adder.rem_total_tokens >= wanted:
                    break
    result = original(adder, req)
    # `shortest-prefill-first` of 0.5.23 cuts a chunk to leave some of the share to shorter requests, and to no chunk.
    if result is not None and getattr(adder, "chunked_req_limit", None) is None:
        adder.rem_chunk_tokens = 0
    return result


def _is_last(adder: HookedAdder, req: Request) -> bool:
    """True if the request was put into the batch; SGLang may say in the same breath that there is no room for more."""
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def _around_on_idle(original: Callable[..., object], scheduler: Scheduler, *args: object, **kwargs: object) -> object:
    """AROUND ``on_idle``, which may sleep for a second: not while threads still work for the cache."""
    if _cache is not None and _cache.rounds.has_work:
        # Nobody tells when a device has ended a load, which a request may need the room of.
        _cache.rounds.wait(PREFETCH_POLL_S if _cache.loads else IDLE_POLL_S)
        return None
    return original(scheduler, *args, **kwargs)


def _around_run_batch(
    original: Callable[..., object], scheduler: HookedScheduler, batch: Batch, *args: object, **kwargs: object
) -> object:
    """AROUND ``run_batch``."""

    cache = _cache
    if cache is None:
        return original(scheduler, batch, *args, **kwargs)

    is_synchronous = scheduler.device == "cpu"
    if not cache.loads:
        return cache.prefill_times.run(batch, partial(original, scheduler, batch, *args, **kwargs), is_synchronous)

    def launch() -> object:
        with cache.loads.launching(batch):
            return original(scheduler, batch, *args, **kwargs)

    return cache.prefill_times.run(batch, launch, is_synchronous, cache.loads.stalled_s)


def _around_process_batch_result(
    original: Callable[..., object], scheduler: object, batch: object, result: object
) -> object:
    """AROUND ``process_batch_result``, which sends tokens when it has handed their KV to the tree."""
    if _cache is None:
        return original(scheduler, batch, result)
    _cache.prefill_times.finish(result)
    _cache.first_tokens.note(batch)
    with _cache.checkpoints.deferring():
        return original(scheduler, batch, result)


def _before_weights_change(updater: object, *_: object, **__: object) -> None:
    """BEFORE any update of the weights, which may fail halfway, and flushes the cache only where it is asked to. A
    session is one too: others may write the weights until it ends, and they are packed then."""
    if _cache is not None:
        _cache.weights.forget_weights()


def _after_weights_change(_: object, updater: object, *__: object, **___: object) -> None:
    """AFTER it: nothing more is to be done where the cache was flushed."""
    if _cache is not None:
        _cache.weights.weights_changed()


def _before_release_memory(updater: object, recv_req: MemoryReq) -> None:
    """BEFORE ``release_memory_occupation``, which gives the pool's memory back before it flushes the cache."""
    if _cache is None:
        return
    tags = recv_req.tags or GPU_MEMORY_ALL_TYPES
    if GPU_MEMORY_TYPE_KV_CACHE in tags:
        _cache.weights.end_copies()
    if GPU_MEMORY_TYPE_WEIGHTS in tags:
        _cache.weights.forget_weights()  # what will be there again is not known


def _after_resume_memory(_: object, updater: object, recv_req: MemoryReq) -> None:
    """AFTER ``resume_memory_occupation``."""
    if _cache is not None and GPU_MEMORY_TYPE_WEIGHTS in (recv_req.tags or GPU_MEMORY_ALL_TYPES):
        _cache.weights.weights_changed()


def _before_check_weights(updater: object, recv_req: CheckReq) -> None:
    """BEFORE ``check_weights``, which can also overwrite them."""
    if _cache is not None and recv_req.action == "reset_tensors":
        _cache.weights.forget_weights()


def _after_check_weights(_: object, updater: object, recv_req: CheckReq) -> None:
    """AFTER ``check_weights``."""
    if _cache is not None and recv_req.action == "reset_tensors":
        _cache.weights.weights_changed()


def _after_load_adapter(_: object, scheduler: object, *__: object) -> None:
    """AFTER a LoRA adapter was loaded, or could not be."""
    if _cache is not None:
        _cache.know_adapters()


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    registry.register(RECEIVER + "_pull_raw_reqs", _after_pull_raw_reqs, hook_type.AFTER)
    registry.register(SCHEDULER + "init_request_dispatcher", _after_init_request_dispatcher, hook_type.AFTER)
    registry.register(SCHEDULER + "_add_request_to_queue", _after_add_request_to_queue, hook_type.AFTER)
    registry.register(SCHEDULER + "on_idle", _around_on_idle, hook_type.AROUND)
    registry.register(ADDER + "add_one_req", _around_add_one_req, hook_type.AROUND)
    registry.register(ADDER + "add_chunked_req", _around_add_chunked_req, hook_type.AROUND)
    registry.register(SCHEDULER + "run_batch", _around_run_batch, hook_type.AROUND)
    registry.register(SCHEDULER + "process_batch_result", _around_process_batch_result, hook_type.AROUND)
    for source in ("disk", "distributed", "tensor", "ipc"):
        registry.register(f"{UPDATER}update_weights_from_{source}", _before_weights_change, hook_type.BEFORE)
        registry.register(f"{UPDATER}update_weights_from_{source}", _after_weights_change, hook_type.AFTER)
    if RELEASE.UPDATE_SESSIONS:
        registry.register(UPDATER + "begin_weight_update", _before_weights_change, hook_type.BEFORE)
        registry.register(UPDATER + "end_weight_update", _before_weights_change, hook_type.BEFORE)
        registry.register(UPDATER + "end_weight_update", _after_weights_change, hook_type.AFTER)
    registry.register(UPDATER + "release_memory_occupation", _before_release_memory, hook_type.BEFORE)
    registry.register(UPDATER + "resume_memory_occupation", _after_resume_memory, hook_type.AFTER)
    registry.register(UPDATER + "check_weights", _before_check_weights, hook_type.BEFORE)
    registry.register(UPDATER + "check_weights", _after_check_weights, hook_type.AFTER)
    for name in ("load_lora_adapter", "load_lora_adapter_from_tensors"):
        registry.register(SCHEDULER + name, _after_load_adapter, hook_type.AFTER)
