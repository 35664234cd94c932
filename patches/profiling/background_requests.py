"""Requests in shadows give way: they run when no user waits, and touch few of the steps that users' requests run in."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.quality.throttle import Pacer

logger = logging.getLogger(__name__)

GUEST_COUNTS = (
    *("requests", "aborted", "sent_back", "batches", "tokens"),
    *("user_steps", "user_steps_touched", "users_held_up"),  # the last: steps of guests while users could have begun
)


class Yielding:
    """The part of EvicPressCache that holds such requests, called guests, back. On the scheduler thread."""

    def open_yielding(self: Any) -> None:
        self.pacer = Pacer()
        self.guests: list[Any] = []  # that wait or run
        self.guest_counts = dict.fromkeys(GUEST_COUNTS, 0)
        self._allowance = 0
        self._budget_s = 0.0
        self._num_users_running = 0
        self._hidden: list[Any] = []

    def receive_guest(self: Any, req: Any) -> None:
        """A request in a shadow has entered the queue."""
        if all(req is not guest for guest in self.guests):  # else it was retracted
            self.guests.append(req)
            if (space := self.space_of.get(req.extra_key)) is not None:
                space.used_s = self.now_s
            self.guest_counts["requests"] += 1

    def begin_round(self: Any, scheduler: Any) -> None:
        """Before the next batch is made: how much guests may compute in it."""
        if not self.guests:
            return
        for req in [req for req in scheduler.waiting_queue if self._is_stray(req)]:
            self._give_up(scheduler, req, "the shadow is gone: it was closed, or had to make room")
        queue = scheduler.waiting_queue
        waiting = {id(req) for req in queue}
        self.guests = [
            req for req in self.guests if id(req) in waiting or (req.req_pool_idx is not None and not req.finished())
        ]
        self.release_retired()
        if not self.guests:
            return
        self._num_users_running = num_users_running(scheduler)
        num_waiting = len(self.without_guests(queue))
        if scheduler.chunked_req is not None and not is_shadow_name(scheduler.chunked_req.extra_key):
            num_waiting += 1
        self._allowance = self.pacer.allowance(self._num_users_running, num_waiting, scheduler.max_running_requests)
        self._budget_s = self.costs.prefill.fixed_s
        if self._num_users_running > 0 and not self.pacer.may_go_on:
            self._send_back(scheduler)

    def hide_guests(self: Any, scheduler: Any) -> None:
        """Take those that may not begin now out of the queue until ``show_guests``: SGLang looks every request that
        waits up in the tree, step by step."""
        if self.guests and self._allowance <= 0:
            self._hidden = [req for req in scheduler.waiting_queue if is_shadow_name(req.extra_key)]
            scheduler.waiting_queue = self.without_guests(scheduler.waiting_queue)

    def show_guests(self: Any, scheduler: Any) -> None:
        scheduler.waiting_queue.extend(self._hidden)
        self._hidden = []

    def without_guests(self: Any, waiting: list[Any]) -> list[Any]:
        """Users' requests of the queue."""
        return [req for req in waiting if not is_shadow_name(req.extra_key)] if self.guests else waiting

    def is_guest(self: Any, req: Any) -> bool:
        return is_shadow_name(req.extra_key)

    def holds_back(self: Any, req: Any) -> bool:
        """True if a waiting request is to be passed over in this round; one that is not takes of the allowance.

        A user who comes waits for the batch: guests join it while they add no more than a decode step takes, which is
        about what any batch costs.
        """
        if not is_shadow_name(req.extra_key):
            return False
        if self._allowance <= 0:
            return True
        depth = len(req.prefix_indices)
        num_new = len(req.full_untruncated_fill_ids) - depth
        self._allowance -= num_new
        self._budget_s -= self.costs.prefill.marginal_seconds(num_new, depth)
        if self._budget_s <= 0.0:
            self._allowance = 0
        return False

    def end_round(self: Any, batch: Any) -> None:
        """The batch that runs next is made."""
        holds_users_up = bool(self.guests) and self._holds_users_up(batch)
        if holds_users_up:
            self._give_up_running(self.scheduler, "users wait for the room")
        if batch is None:
            return
        is_decode = batch.forward_mode.is_decode()
        num_guests = sum(is_shadow_name(req.extra_key) for req in batch.reqs) if self.guests else 0
        if is_decode and num_guests < len(batch.reqs):
            self.pacer.user_step()
            self.guest_counts["user_steps"] += 1
        if num_guests == 0:
            return
        self.guest_counts["batches"] += 1
        self.guest_counts["users_held_up"] += holds_users_up
        if is_decode:
            self.guest_counts["tokens"] += num_guests
            has_users = num_guests < len(batch.reqs)
        else:
            lengths = zip(batch.reqs, batch.extend_lens, strict=True)
            self.guest_counts["tokens"] += sum(num for req, num in lengths if is_shadow_name(req.extra_key))
            has_users = self._num_users_running > 0
        if has_users:
            self.pacer.took_part(in_own_batch=not is_decode)
            self.guest_counts["user_steps_touched"] += 1

    def _give_up(self: Any, scheduler: Any, req: Any, why: str) -> None:
        """Abort this request alone: ``abort_request`` takes all whose ids begin with its id, users' too."""
        self.guest_counts["aborted"] += 1
        if req in scheduler.waiting_queue:
            scheduler.waiting_queue.remove(req)
            scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid, abort_message=why), req)
        elif req is scheduler.chunked_req:
            scheduler._pending_chunked_abort_req = req
        else:
            req.to_finish = FINISH_ABORT(why)

    def _give_up_running(self: Any, scheduler: Any, why: str) -> None:
        for req in self.guests:
            if req.req_pool_idx is not None and req.to_finish is None and not req.finished():
                self._give_up(scheduler, req, why)

    def _send_back(self: Any, scheduler: Any) -> None:
        """Guests that decode wait again, and go on with what they have generated; as SGLang does when room ends."""
        batch, keep, gone = scheduler.running_batch, [], []
        for index, req in enumerate(batch.reqs):
            if is_shadow_name(req.extra_key) and req.to_finish is None and not req.finished():
                batch.release_req(index, 0, scheduler.server_args)
                gone.append(req)
            else:
                keep.append(index)
        if not gone:
            return
        batch.filter_batch(keep_indices=keep)
        batch.batch_is_full = False
        self.guest_counts["sent_back"] += len(gone)
        for req in gone:
            scheduler._add_request_to_queue(req, is_retracted=True)

    def _holds_users_up(self: Any, batch: Any) -> bool:
        """True if users' requests wait of which the batch has none: guests may have the room that they need."""
        if batch is not None and not batch.forward_mode.is_decode():
            return False
        stages = (self.stages.get(id(req)) for req in self.without_guests(self.scheduler.waiting_queue))
        return any(stage is None or stage.is_late or not stage.is_waiting for stage in stages)

    def _is_stray(self: Any, req: Any) -> bool:
        """True if a request is in a shadow that is not there, or not any more: it would compute the whole context.

        A namespace that was whole once stays so until its space is closed.
        """
        if not is_shadow_name(req.extra_key):
            return False
        space = self.space_of.get(req.extra_key)
        if space is not None and not getattr(req, "evicpress_is_whole", False):
            req.evicpress_is_whole = len(req.origin_input_ids) <= len(space.tokens) + 1 or self._is_whole(space, req)
            return not req.evicpress_is_whole
        return space is None

    def _is_whole(self: Any, space: Any, req: Any) -> bool:
        """True if the namespace that a question is asked in holds all of the context."""
        num_tokens = sum(matched for _, matched in self._steps(self.key_of_waiting(req)))
        return num_tokens >= len(space.tokens)


def num_users_running(scheduler: Any) -> int:
    """Users' requests that run, also those that SGLang has prefilled last and counts among them only later."""
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    found = {id(req): req for batch in batches for req in batch.reqs}
    return sum(not is_shadow_name(req.extra_key) and not req.finished() for req in found.values())
