"""Requests in shadows give way: they run when no user waits, and touch few of the steps that users' requests run in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_evicpress.patches.compat.release import RELEASE, REQUEST_KV
from sglang_evicpress.patches.profiling.shadows import Space
from sglang_evicpress.patches.scheduler.held_messages import HeldMessages
from sglang_evicpress.patches.tiers.prefetches import Prefetch
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.types import Batch, CostTerms, Request, Scheduler, WaitingTree
from sglang_evicpress.quality.throttle import Throttle

logger = logging.getLogger(__name__)

BACKGROUND_COUNTS = (
    *("requests", "aborted", "retracted", "batches", "tokens"),
    # the last: steps of background requests while users could have begun
    *("user_steps", "user_steps_touched", "users_held_up"),
)


class OpenShadows(Protocol):
    """All shadows."""

    def space_of(self, name: str | None) -> Space | None: ...
    def release_retired(self) -> None: ...


@dataclass(eq=False, repr=False)
class BackgroundRequests:
    """Requests in shadows, called background requests, and how they are held back. Everything here runs on the
    scheduler thread.

    ``background requests`` is kept to those that wait or run; ``prefetches`` are by ``id()`` of the request."""

    tree: WaitingTree
    terms: CostTerms
    shadows: OpenShadows
    prefetches: Mapping[int, Prefetch]
    background_requests: list[Request]

    def __post_init__(self) -> None:
        self.throttle = Throttle()
        self.counts = dict.fromkeys(BACKGROUND_COUNTS, 0)
        self._allowance = 0
        self._budget_s = 0.0
        self._num_users_running = 0
        self._hidden: list[Request] = []
        # of the background requests, by id(): those whose namespace has held all of its context
        self._whole: set[int] = set()
        self._held = HeldMessages()

    def receive_background(self, req: Request) -> None:
        """A request in a shadow has entered the queue."""
        if all(req is not background for background in self.background_requests):  # else it was retracted
            self.background_requests.append(req)
            if (space := self.shadows.space_of(req.extra_key)) is not None:
                space.used_s = self.terms.now_s
            self.counts["requests"] += 1

    def begin_round(self, scheduler: Scheduler) -> None:
        """Before the next batch is made: how much background requests may compute in it."""
        if not self.background_requests:
            return
        for req in [req for req in scheduler.waiting_queue if self._is_stray(req)]:
            self._give_up(scheduler, req, "the shadow is gone: it was closed, or had to make room")
        queue = scheduler.waiting_queue
        waiting = {id(req) for req in queue}
        self.background_requests[:] = [
            req
            for req in self.background_requests
            if id(req) in waiting or (REQUEST_KV.row_of(req) is not None and not req.finished())
        ]
        self._whole &= {id(req) for req in self.background_requests}
        self.shadows.release_retired()
        if not self.background_requests:
            return
        self._num_users_running = num_users_running(scheduler)
        num_waiting = len(self.without_background(queue))
        if scheduler.chunked_req is not None and not is_shadow_name(scheduler.chunked_req.extra_key):
            num_waiting += 1
        self._allowance = self.throttle.allowance(self._num_users_running, num_waiting, scheduler.max_running_requests)
        self._budget_s = self.terms.costs.prefill.fixed_s
        if self._num_users_running > 0 and not self.throttle.may_go_on:
            self._retract(scheduler)

    # ---- messages that need an idle server

    def sift(self, received: list[object], now_s: float) -> None:
        """See ``HeldMessages``."""
        self._held.sift(received, self, now_s)

    @property
    def has_background(self) -> bool:
        return bool(self.background_requests)

    @property
    def has_users(self) -> bool:
        scheduler = self.tree.scheduler
        if scheduler is None:
            return False
        return num_users_running(scheduler) > 0 or bool(self.without_background(scheduler.waiting_queue))

    @property
    def is_paused(self) -> bool:
        return bool(getattr(self.tree.scheduler, "_engine_paused", False))

    @property
    def awaits_idle(self) -> bool:
        return getattr(getattr(self.tree.scheduler, "flush_wrapper", None), "_pending", None) is not None

    @property
    def is_idle(self) -> bool:
        scheduler = self.tree.scheduler
        return scheduler is None or scheduler.is_fully_idle()

    def give_way(self) -> None:
        """Give every background request up: the server is to be idle."""
        scheduler = self.tree.scheduler
        if scheduler is None:
            return
        for req in list(self.background_requests):
            if req.to_finish is None and not req.finished():
                self._give_up(scheduler, req, "the server is to be idle")

    # ---- rounds

    def hide_background(self, scheduler: Scheduler) -> None:
        """Take those that may not begin now out of the queue until ``show_background``: SGLang looks every request that
        waits up in the tree, step by step."""
        if self.background_requests and self._allowance <= 0:
            self._hidden = [req for req in scheduler.waiting_queue if is_shadow_name(req.extra_key)]
            scheduler.waiting_queue = self.without_background(scheduler.waiting_queue)

    def show_background(self, scheduler: Scheduler) -> None:
        scheduler.waiting_queue.extend(self._hidden)
        self._hidden = []

    def without_background(self, waiting: list[Request]) -> list[Request]:
        """Users' requests of the queue."""
        return [req for req in waiting if not is_shadow_name(req.extra_key)] if self.background_requests else waiting

    def is_background(self, req: Request) -> bool:
        return is_shadow_name(req.extra_key)

    def should_defer(self, req: Request) -> bool:
        """True if a waiting request is to be passed over in this round; one that is not takes of the allowance.

        A user who comes waits for the batch: background requests join it while they add no more than a decode step
        takes, which is about what any batch costs.
        """
        if not is_shadow_name(req.extra_key):
            return False
        if self._allowance <= 0:
            return True
        depth = REQUEST_KV.prefix_len(req)
        num_new = len(req.full_untruncated_fill_ids) - depth
        self._allowance -= num_new
        self._budget_s -= self.terms.costs.prefill.marginal_seconds(num_new, depth)
        if self._budget_s <= 0.0:
            self._allowance = 0
        return False

    def end_round(self, batch: Batch | None) -> None:
        """The batch that runs next is made."""
        scheduler, holds_users_up = self.tree.scheduler, False
        if self.background_requests and scheduler is not None:
            holds_users_up = self._holds_users_up(scheduler, batch)
            if holds_users_up:
                self._give_up_running(scheduler, "users wait for the room")
        if batch is None:
            return
        is_decode = batch.forward_mode.is_decode()
        num_background = sum(is_shadow_name(req.extra_key) for req in batch.reqs) if self.background_requests else 0
        if is_decode and num_background < len(batch.reqs):
            self.throttle.user_step()
            self.counts["user_steps"] += 1
        if num_background == 0:
            return
        self.counts["batches"] += 1
        self.counts["users_held_up"] += holds_users_up
        if is_decode:
            self.counts["tokens"] += num_background
            has_users = num_background < len(batch.reqs)
        else:
            lengths = zip(batch.reqs, batch.extend_lens, strict=True)
            self.counts["tokens"] += sum(num for req, num in lengths if is_shadow_name(req.extra_key))
            has_users = self._num_users_running > 0
        if has_users:
            self.throttle.took_part(in_own_batch=not is_decode)
            self.counts["user_steps_touched"] += 1

    def _give_up(self, scheduler: Scheduler, req: Request, why: str) -> None:
        """Abort this request alone: ``abort_request`` takes all whose ids begin with its id, users' too."""
        self.counts["aborted"] += 1
        if req in scheduler.waiting_queue:
            scheduler.waiting_queue.remove(req)
            scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid, abort_message=why), req)
        elif req is scheduler.chunked_req:
            scheduler._pending_chunked_abort_req = req
        else:
            req.to_finish = FINISH_ABORT(why)

    def _give_up_running(self, scheduler: Scheduler, why: str) -> None:
        for req in self.background_requests:
            if REQUEST_KV.row_of(req) is not None and req.to_finish is None and not req.finished():
                self._give_up(scheduler, req, why)

    def _retract(self, scheduler: Scheduler) -> None:
        """Background requests that decode wait again, and go on with what they have generated; as SGLang does when room
        ends."""
        batch, keep, retracted = scheduler.running_batch, [], []
        for index, req in enumerate(batch.reqs):
            if is_shadow_name(req.extra_key) and req.to_finish is None and not req.finished():
                RELEASE.send_back(scheduler, index)
                retracted.append(req)
            else:
                keep.append(index)
        if not retracted:
            return
        batch.filter_batch(keep_indices=keep)
        batch.batch_is_full = False
        self.counts["retracted"] += len(retracted)
        for req in retracted:
            scheduler._add_request_to_queue(req, is_retracted=True)

    def _holds_users_up(self, scheduler: Scheduler, batch: Batch | None) -> bool:
        """True if users' requests wait of which the batch has none: background requests may have the room that they
        need."""
        if batch is not None and not batch.forward_mode.is_decode():
            return False
        waiting = self.without_background(scheduler.waiting_queue)
        prefetches = (self.prefetches.get(id(req)) for req in waiting)
        return any(prefetch is None or prefetch.is_late or not prefetch.is_waiting for prefetch in prefetches)

    def _is_stray(self, req: Request) -> bool:
        """True if a request is in a shadow that is not there, or not any more: it would compute the whole context.

        A namespace that was whole once stays so until its space is closed.
        """
        if not is_shadow_name(req.extra_key):
            return False
        space = self.shadows.space_of(req.extra_key)
        if space is not None and id(req) not in self._whole:
            is_whole = len(req.origin_input_ids) <= len(space.tokens) + 1 or self._is_whole(space, req)
            if is_whole:
                self._whole.add(id(req))
            return not is_whole
        return space is None

    def _is_whole(self, space: Space, req: Request) -> bool:
        """True if the namespace that a question is asked in holds all of the context."""
        num_tokens = sum(matched for _, matched in self.tree.known_of(req))
        return num_tokens >= len(space.tokens)


def num_users_running(scheduler: Scheduler) -> int:
    """Users' requests that run, also those that SGLang has prefilled last and counts among them only later."""
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    by_id = {id(req): req for batch in batches for req in batch.reqs}
    return sum(not is_shadow_name(req.extra_key) and not req.finished() for req in by_id.values())
