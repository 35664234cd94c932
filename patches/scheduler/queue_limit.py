"""Turns of waiting requests, and ``--kv-max-queue-seconds``: who would wait longer is told when to come back.

The scheduler refuses as SGLang does at ``--max-queued-requests``, by an ``AbortReq`` instead of a place in the queue.
Of that alone SGLang makes a 503 where nothing is streamed, a 200 where something is, and no ``Retry-After``. So the
abort also carries the seconds; ``TokenizerManager._handle_abort_finish_reason`` meets it in the context of the HTTP
request, and ``RetryAfter`` around the app, which holds the head of an answer until its first bytes, answers 503.

A request waits for its first token: for its turn, and for the batch that computes it. ``FirstTokens`` measures both,
and the margin that it learns keeps the late among those admitted few.

What is expected, and so who is refused, is equal on all ranks: the queue is, and the time is the stamped one. A stamp
comes with received messages only. A request is judged by the rounds until the stamp before its own, with the queue as
it is now; a queue that empties while nothing is received teaches nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from typing import Final, Protocol, TypedDict
from weakref import WeakKeyDictionary

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_evicpress.patches.scheduler.hooks import HookedGuests
from sglang_evicpress.patches.tree.types import Batch, Channels, LogicalTime, Request
from sglang_evicpress.policy.turns import Turns, WaitMargin

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
ABORTED = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason"
RETRY_AFTER: Final = "retry_after_s"  # of a finish reason of ours


class Unsupported(TypedDict):
    """Finish reason of ours."""

    type: str
    status_code: HTTPStatus
    message: str
    retry_after_s: int


_refusals: ContextVar[list[Unsupported] | None] = ContextVar("evicpress_refusals", default=None)
"""Finish reasons of ours that the HTTP request of this context has met."""


# ---- the scheduler


class StartedRequest(Protocol):
    """A request, as far as it tells whether it has a token."""

    @property
    def output_ids(self) -> Sequence[int]: ...
    def finished(self) -> bool: ...


class FirstTokens:
    """Times from the queue to the first token, in stamped seconds, of requests that ``limit_s`` let in."""

    def __init__(self, limit_s: float) -> None:
        self.margin = WaitMargin(limit_s)
        self._queued_s: WeakKeyDictionary[StartedRequest, float] = WeakKeyDictionary()
        self._begun: WeakKeyDictionary[StartedRequest, tuple[float, float]] = WeakKeyDictionary()
        """When they came to the queue, and when they began. SGLang may forget one without ending it."""

    def enter(self, req: StartedRequest, now_s: float) -> None:
        """The request is in the queue."""
        self._queued_s[req] = now_s

    def begin(self, admitted: Sequence[StartedRequest], now_s: float) -> None:
        """The requests are in the batch of this round."""
        for req in admitted:
            if req in self._queued_s:
                self._begun[req] = self._queued_s.pop(req), now_s

    def arrive(self, now_s: float) -> None:
        """A round begins: whoever has a first token by now is seen. With overlap that is a round later than the batch,
        of a prompt in chunks after the last. A clock that stood still meanwhile says nothing."""
        for req, (queued_s, begun_s) in list(self._begun.items()):
            if req.output_ids and now_s > begun_s:
                self.margin.observe(now_s - queued_s)
            if req.output_ids or req.finished():
                del self._begun[req]


class AbortTrace(Protocol):
    """SGLang's trace of a request."""

    def abort(self, *, abort_info: Mapping[str, object]) -> None: ...


class TracedTimes(Protocol):
    """SGLang's times of a request."""

    trace_ctx: AbortTrace


class LimitedRequest(Request, Protocol):
    """A request that comes to the queue."""

    is_retracted: bool
    time_stats: TracedTimes


class QueueTimes:
    """Turns and first tokens of users' requests; ``num_refused`` of them would have waited longer than ``limit_s``."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.num_refused = 0
        self.turns = Turns()
        self.first_tokens = None if limit_s is None else FirstTokens(limit_s)

    def begin_round(self, now_s: float) -> None:
        """A round begins: first tokens may have come."""
        if self.first_tokens is not None:
            self.first_tokens.arrive(now_s)

    def end_round(self, now_s: float, num_waiting: int, admitted: Sequence[StartedRequest]) -> None:
        """So many users' requests wait still, and these are in the batch of this round."""
        self.turns.observe(now_s, num_waiting, len(admitted))
        if self.first_tokens is not None:
            self.first_tokens.begin(admitted, now_s)

    def enter(self, req: StartedRequest, num_ahead: int, now_s: float) -> float | None:
        """A user's request comes: None where it may wait, else the seconds that it would, and it is refused."""
        if self.limit_s is None or self.first_tokens is None:
            return None
        self.turns.forget_idle(now_s)
        wait_s = self.turns.wait_s(num_ahead) + (self.first_tokens.margin.seconds if num_ahead else 0.0)
        if wait_s > self.limit_s:
            self.num_refused += 1
            return wait_s
        self.first_tokens.enter(req, now_s)
        return None


class HiddenRequests(Protocol):
    """Choice of who is passed over."""

    @property
    def hidden(self) -> list[Request]: ...


class LimitedParts(Protocol):
    """Parts of the cache."""

    admission: HiddenRequests


class LimitedCache(Protocol):
    """The cache, as far as it counts on the queue."""

    terms: LogicalTime
    queue: QueueTimes
    background: HookedGuests
    parts: LimitedParts


class LimitedScheduler(Protocol):
    """The scheduler, as far as its queue has a limit."""

    tree_cache: LimitedCache
    waiting_queue: list[Request]
    ipc_channels: Channels


def begin_round(scheduler: LimitedScheduler) -> Sequence[Request]:
    """Before the next batch is made; the users' requests that wait for it."""
    cache = scheduler.tree_cache
    cache.queue.begin_round(cache.terms.now_s)
    queue = scheduler.waiting_queue
    return list(cache.background.without_background(queue)) if queue else ()


def end_round(scheduler: LimitedScheduler, queued: Sequence[Request], batch: Batch | None) -> None:
    """The next batch is made: who was ``queued`` before and is in it was admitted."""
    cache = scheduler.tree_cache
    waited = {id(req) for req in queued}
    admitted = [req for req in batch.reqs if id(req) in waited] if batch is not None and waited else []
    queue = scheduler.waiting_queue
    num_waiting = len(cache.background.without_background(queue)) if queue else 0
    cache.queue.end_round(cache.terms.now_s, num_waiting, admitted)


def _around_add_request_to_queue(
    original: Callable[..., None], scheduler: LimitedScheduler, req: LimitedRequest, *args: object, **kwargs: object
) -> None:
    """AROUND ``_add_request_to_queue``, which also takes back who ran before, and who will only be told of an error."""
    cache = scheduler.tree_cache
    limit_s = cache.queue.limit_s
    is_new_user = not (req.is_retracted or req.to_finish is not None or cache.background.is_background(req))
    if limit_s is not None and is_new_user:
        # One with a grammar comes while a batch is made, and goes behind those that are hidden meanwhile.
        waiting = [*scheduler.waiting_queue, *cache.parts.admission.hidden]
        num_ahead = len(cache.background.without_background(waiting))
        wait_s = cache.queue.enter(req, num_ahead, cache.terms.now_s)
        if wait_s is not None:
            _refuse(scheduler, req, wait_s, limit_s)
            return
    users = cache.background.without_background(scheduler.waiting_queue) if is_new_user else scheduler.waiting_queue
    if len(users) == len(scheduler.waiting_queue):
        original(scheduler, req, *args, **kwargs)
        return
    # ``--max-queued-requests`` counts who waits: profiling refuses no user.
    background = [each for each in scheduler.waiting_queue if cache.background.is_background(each)]
    scheduler.waiting_queue = users
    try:
        original(scheduler, req, *args, **kwargs)
    finally:
        scheduler.waiting_queue[:0] = background


def _refuse(scheduler: LimitedScheduler, req: LimitedRequest, wait_s: float, limit_s: float) -> None:
    retry_after_s = max(1, math.ceil(round(wait_s - limit_s, 1)))  # as the sentence has them
    message = (
        f"--kv-max-queue-seconds is {limit_s:g}, and a request that comes now may wait {wait_s:.1f} s for its "
        f"first token: come back in {retry_after_s} s"
    )
    reason: Unsupported = {
        "type": "abort",
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
        "message": message,
        RETRY_AFTER: retry_after_s,
    }
    scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(finished_reason=reason, rid=req.rid), req)
    req.time_stats.trace_ctx.abort(abort_info={"reason": message})


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    """After ``hooks``: they are applied in order, and this one hides what it refuses from those."""
    registry.register(SCHEDULER + "_add_request_to_queue", _around_add_request_to_queue, hook_type.AROUND)


# ---- the HTTP server


def before_abort_is_told(_: object, out: Mapping[str, Mapping[str, Unsupported]], *__: object, **___: object) -> None:
    """BEFORE ``TokenizerManager._handle_abort_finish_reason``, which meets every finish reason."""
    refusals, reason = _refusals.get(), out["meta_info"]["finish_reason"]
    if refusals is not None and RETRY_AFTER in reason:
        refusals.append(reason)


class RetryAfter:
    """ASGI middleware: an answer to a request that was refused for the queue is a 503 with ``Retry-After``.

    The head of every answer waits for its first bytes. A request for several answers (``n``, or a batch) of which only
    some were refused is refused as a whole, where none of its bytes were sent yet.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusals: list[Unsupported] = []
        _refusals.set(refusals)
        start_message: Message | None = None
        is_answered = False

        async def send_on(message: Message) -> None:
            nonlocal start_message, is_answered
            if message["type"] == "http.response.start":
                start_message = message
                return
            if is_answered:
                return
            head, start_message = start_message, None
            if head is not None and refusals:
                is_answered = head["status"] != HTTPStatus.SERVICE_UNAVAILABLE
                await _refuse_http(head, message, refusals, send)
                return
            if head is not None:
                await send(head)
            await send(message)

        await self._app(scope, receive, send_on)
        if start_message is not None:
            await send(start_message)


async def _refuse_http(head: Message, message: Message, refusals: list[Unsupported], send: Send) -> None:
    """The 503 of SGLang as it is, or in the same words one instead of an answer of another status."""
    retry_after = (b"retry-after", str(max(reason[RETRY_AFTER] for reason in refusals)).encode())
    if head["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
        await send({**head, "headers": [*head.get("headers", ()), retry_after]})
        await send(message)
        return
    status = int(HTTPStatus.SERVICE_UNAVAILABLE)
    error = {"object": "error", "message": refusals[0]["message"], "type": str(status), "param": None, "code": status}
    body = json.dumps(error).encode()
    kept = [header for header in head.get("headers", ()) if not header[0].lower().startswith(b"content-")]
    headers = [*kept, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), retry_after]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def add_middleware(app: Starlette) -> None:
    """Once for an app, before it serves."""
    known: list[object] = [each.cls for each in app.user_middleware]
    if RetryAfter not in known:
        app.add_middleware(RetryAfter)
