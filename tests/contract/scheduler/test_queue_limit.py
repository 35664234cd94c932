"""``--kv-max-queue-seconds``: who is refused, and that every such answer is a 503 with ``Retry-After``."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler import DisaggregationMode, Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
from tests.contract.cache.test_radix_cache_model import Walk, waiting

from sglang_evicpress.patches.scheduler import queue_limit
from sglang_evicpress.patches.scheduler.queue_limit import RETRY_AFTER, RetryAfter

pytestmark = pytest.mark.sglang


class FakeReq:
    def __init__(self, rid: str, *, is_retracted: bool = False, to_finish: object = None) -> None:
        self.rid, self.is_retracted, self.to_finish = rid, is_retracted, to_finish
        self.output_ids: list[int] = []
        self.is_over = False
        self.traced: list[object] = []
        abort = SimpleNamespace(abort=lambda abort_info: self.traced.append(abort_info))
        self.time_stats = SimpleNamespace(trace_ctx=abort, set_wait_queue_entry_time=lambda: None)

    def finished(self) -> bool:
        return self.is_over


class FakeCache:
    def __init__(self, max_queue_s: float | None) -> None:
        self.queue = queue_limit.QueueTimes(max_queue_s)
        self.terms = SimpleNamespace(now_s=0.0)
        self.background = self
        self.parts = SimpleNamespace(admission=SimpleNamespace(hidden=[]))

    def is_background(self, req: FakeReq) -> bool:
        return req.rid.startswith("background")

    def without_background(self, waiting: list[FakeReq]) -> list[FakeReq]:
        return [req for req in waiting if not self.is_background(req)]


def test_background_requests_do_not_count_on_sglangs_own_limit() -> None:
    scheduler, seen = FakeScheduler(None), list[list[str]]()
    scheduler.waiting_queue = [FakeReq(rid) for rid in ("background 1", "user 1", "background 2")]
    scheduler._abort_on_queued_limit = lambda req: bool(seen.append([each.rid for each in scheduler.waiting_queue]))
    assert scheduler.add(FakeReq("user 2"))
    assert seen == [["user 1"]] and len(scheduler.waiting_queue) == 4
    assert scheduler.add(FakeReq("background 3"))
    assert len(seen[1]) == 4


class FakeScheduler:
    """SGLang's own way into the queue; a round admits ``num_slots`` and takes 0.2 s."""

    def __init__(self, max_queue_s: float | None, num_waiting: int = 0, num_slots: int = 1) -> None:
        self.tree_cache = FakeCache(max_queue_s)
        self.waiting_queue = [FakeReq(f"first {index}") for index in range(num_waiting)]
        self.num_slots = num_slots
        self.begun: list[FakeReq] = []
        self.told: list[AbortReq] = []
        sender = SimpleNamespace(send_output=lambda message, req: self.told.append(message))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=sender)
        self.disaggregation_mode = DisaggregationMode.NULL
        self.processed_tokens_counter = 0
        self._set_or_validate_priority = self._prefetch_kvcache = lambda req: True
        self._abort_on_queued_limit = lambda req: False

    def add(self, req: FakeReq, **given: bool) -> bool:
        """Add a request; True if it is in the queue."""
        hooked = _wrap_fn(Scheduler._add_request_to_queue, queue_limit._around_add_request_to_queue, HookType.AROUND)
        hooked(self, req, **given)
        return bool(self.waiting_queue) and self.waiting_queue[-1] is req

    def round(self, make_batch: Callable[[Any], Any] | None = None) -> Any:
        def admit(scheduler: FakeScheduler) -> Any:
            admitted, self.waiting_queue = (self.waiting_queue[: self.num_slots], self.waiting_queue[self.num_slots :])
            return SimpleNamespace(reqs=admitted)

        self.tree_cache.terms.now_s += 0.2
        for req in self.begun:  # with overlap: the result comes after the next batch is launched
            req.output_ids = [1]
        queued = queue_limit.begin_round(self)
        batch = (make_batch or admit)(self)
        self.begun = [] if batch is None else list(batch.reqs)
        queue_limit.end_round(self, queued, batch)
        return batch


def busy(max_queue_s: float | None, num_waiting: int) -> FakeScheduler:
    """A server that has admitted 5/s for a while, and of which ``num_waiting`` wait."""
    scheduler = FakeScheduler(max_queue_s, num_waiting=num_waiting + 30)
    for _ in range(30):
        scheduler.round()
    assert len(scheduler.waiting_queue) == num_waiting
    return scheduler


# ---- the scheduler


def test_who_would_wait_too_long_is_refused_and_told_when_to_come_back() -> None:
    scheduler = busy(4.0, 50)
    late = FakeReq("late")
    assert not scheduler.add(late)
    (message,) = scheduler.told
    reason = message.finished_reason
    assert reason is not None and message.rid == "late"
    assert (reason["type"], reason["status_code"]) == ("abort", HTTPStatus.SERVICE_UNAVAILABLE)
    text = str(reason["message"])
    assert "--kv-max-queue-seconds is 4," in text and "wait 10.0 s" in text and "in 6 s" in text and "\n" not in text
    assert reason[RETRY_AFTER] == 6
    assert late.traced and scheduler.tree_cache.queue.num_refused == 1


def test_the_limit_is_what_a_request_that_comes_would_wait() -> None:
    scheduler = busy(4.01, 18)
    assert [scheduler.add(FakeReq(f"more {index}")) for index in range(5)] == [True, True, True, False, False]
    assert scheduler.told[0].finished_reason is not None
    assert scheduler.told[0].finished_reason[RETRY_AFTER] == 1, "at least a second"


def test_of_those_admitted_few_are_late() -> None:
    """Twice as many come as are served, by batches whose size nobody can foretell."""
    scheduler, rng = FakeScheduler(6.0), random.Random(16)
    queued_s: dict[str, float] = {}
    waits: list[float] = []
    for number in range(4000):
        for index in range(rng.randrange(3)):
            req = FakeReq(f"{number}.{index}")
            if scheduler.add(req):
                queued_s[req.rid] = scheduler.tree_cache.terms.now_s
        scheduler.num_slots = rng.choice([0, 0, 0, 2])
        batch = scheduler.round()
        waits += [scheduler.tree_cache.terms.now_s + 0.2 - queued_s.pop(req.rid) for req in batch.reqs]
    late = sum(wait_s > 6.0 for wait_s in waits[200:]) / len(waits[200:])
    assert 0.02 < late < 0.08 and len(waits) > 0.9 * 2000


def test_a_prompt_in_chunks_has_its_first_token_after_the_last() -> None:
    queue = queue_limit.QueueTimes(10.0)
    watched, req = queue.first_tokens, FakeReq("long")
    assert watched is not None
    seen: list[float] = []
    watched.margin.observe = seen.append
    watched.enter(req, 1.0)
    watched.begin([req], 2.0)
    for now_s in (3.0, 4.0):
        watched.arrive(now_s)
    assert seen == []
    req.output_ids = [5]
    watched.arrive(5.0)
    watched.arrive(6.0)
    assert seen == [4.0]
    gone = FakeReq("aborted before it had any")
    watched.enter(gone, 6.0)
    watched.begin([gone], 6.5)
    gone.is_over = True
    watched.arrive(7.0)
    forgotten = FakeReq("aborted while it waited to run again")
    watched.enter(forgotten, 7.0)
    watched.begin([forgotten], 7.5)
    del forgotten
    gc.collect()
    assert seen == [4.0] and not len(watched._begun)


def test_who_comes_while_a_batch_is_made_waits_behind_those_that_are_hidden() -> None:
    scheduler = busy(5.0, 0)
    scheduler.tree_cache.parts.admission.hidden = [FakeReq(f"hidden {index}") for index in range(100)]
    assert not scheduler.add(FakeReq("with a grammar"))
    scheduler.tree_cache.parts.admission.hidden = [FakeReq(f"background {index}") for index in range(100)]
    assert scheduler.add(FakeReq("another"))


def test_an_empty_queue_takes_anybody() -> None:
    scheduler = busy(0.001, 0)
    assert scheduler.add(FakeReq("one"))
    assert not scheduler.add(FakeReq("two"))


def test_without_the_flag_nobody_is_refused() -> None:
    scheduler = busy(None, 5000)
    assert scheduler.add(FakeReq("late")) and scheduler.told == []


def test_before_anything_is_known_nobody_is_refused() -> None:
    assert FakeScheduler(0.1, num_waiting=1000).add(FakeReq("late"))


@pytest.mark.parametrize(
    ("req", "given"),
    [
        (FakeReq("background"), {}),
        (FakeReq("bad", to_finish="an error of its own"), {}),
        (FakeReq("running", is_retracted=True), {"is_retracted": True}),
        (FakeReq("preempted", is_retracted=True), {}),
    ],
    ids=lambda value: getattr(value, "rid", ""),
)
def test_who_ran_before_or_is_not_a_users_request_is_not_refused(req: FakeReq, given: dict[str, bool]) -> None:
    scheduler = busy(1.0, 100)
    assert scheduler.add(req, **given) and scheduler.tree_cache.queue.num_refused == 0


def test_guests_that_wait_are_nobody_ahead() -> None:
    scheduler = busy(1.0, 2)
    scheduler.waiting_queue += [FakeReq(f"background request {index}") for index in range(1000)]
    assert scheduler.add(FakeReq("user"))


def test_only_who_waited_and_runs_was_admitted() -> None:
    """Not who decodes, not a background request, not who was aborted, and not the rest of a long prompt."""
    scheduler = FakeScheduler(None, num_waiting=100)
    seen: list[tuple[int, int]] = []
    scheduler.tree_cache.queue.turns.observe = lambda now_s, *counts: seen.append(counts)  # type: ignore[method-assign]
    scheduler.waiting_queue.insert(0, FakeReq("background"))

    def make(_: object) -> Any:
        queue = scheduler.waiting_queue
        scheduler.waiting_queue = queue[5:]  # a background request, three users and one that had waited too long
        return SimpleNamespace(reqs=[FakeReq("chunked"), *queue[:4], FakeReq("decodes")])

    scheduler.round(make)
    scheduler.round(lambda _: None)
    scheduler.round(lambda _: SimpleNamespace(reqs=[FakeReq("decodes")]))
    assert seen == [(96, 3), (96, 0), (96, 0)]


def test_stats_show_the_queue_as_the_next_request_meets_it() -> None:
    cache = (walk := Walk(0, 1)).cache
    walk.is_sound = False
    assert cache.inspector.describe_stats()["queue"] == {
        "expected_wait_s": 0.0,
        "margin_s": 0.0,
        "admitted_per_s": None,
        "refused": 0,
    }
    for number in range(40):
        cache.queue.turns.observe(number * 0.5, 9, 1)
    for start in range(3):
        waiting(walk, [start, 1, 2])
    cache.queue.num_refused += 2
    shown = cache.inspector.describe_stats()["queue"]
    assert shown == {
        "expected_wait_s": pytest.approx(1.5),
        "margin_s": 0.0,
        "admitted_per_s": pytest.approx(2.0),
        "refused": 2,
    }


# ---- the HTTP server


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """SGLang's reading of a finish reason, hooked; and the reason that requests end with, through its messages."""
    hooked = _wrap_fn(TokenizerManager._handle_abort_finish_reason, queue_limit.before_abort_is_told, HookType.BEFORE)
    monkeypatch.setattr(TokenizerManager, "_handle_abort_finish_reason", hooked)
    scheduler = busy(4.0, 50)
    scheduler.add(FakeReq("late"))
    message = io_struct.msgpack_decode(io_struct.msgpack_encode(scheduler.told[0]))
    yield message.finished_reason


class FakeManager:
    """Part of SGLang's that its own methods need to tell of an abort."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, object] = {}
        self.server_args = SimpleNamespace(enable_lora=False)
        self.enable_lora = False
        self.lora_registry = None

    def __getattr__(self, name: str) -> Any:
        """SGLang's own method, where there is nothing of ours."""
        return MethodType(getattr(TokenizerManager, name), self)


def serving(reason: dict[str, Any], *, has_limit: bool = True) -> TestClient:
    """The three ways in which SGLang answers: by exception, by a stream, by a stream whose first part it has read."""
    app = FastAPI()
    manager = FakeManager()

    async def finish(*, is_stream: bool) -> object:
        out = {"text": "", "meta_info": {"finish_reason": reason}}
        state = SimpleNamespace(obj=SimpleNamespace(rid="late"), lora_released=False)
        return await manager._handle_abort_finish_reason(out, state, is_stream)

    async def stream() -> AsyncIterator[str]:
        for part in range(3):
            aborted = await finish(is_stream=True)
            yield f"data: {part} {aborted}\n\n"

    @app.exception_handler(HTTPException)
    async def tell(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"object": "error", "message": error.detail}, status_code=error.status_code)

    @app.post("/whole")
    async def whole() -> object:
        return {"answer": await finish(is_stream=False)}

    @app.post("/batch")
    async def batch() -> object:
        return await asyncio.gather(*(asyncio.create_task(finish(is_stream=False)) for _ in range(3)))

    @app.post("/stream")
    async def streamed() -> StreamingResponse:
        return StreamingResponse(stream(), media_type="text/event-stream", headers={"x-kept": "yes"})

    @app.post("/chat")
    async def chat() -> StreamingResponse:
        parts = stream()
        first = await anext(parts)

        async def all_parts() -> AsyncIterator[str]:
            yield first
            async for part in parts:
                yield part

        return StreamingResponse(all_parts(), media_type="text/event-stream")

    @app.post("/nothing")
    async def nothing() -> None:
        raise HTTPException(503, "another reason")

    if has_limit:
        queue_limit.add_middleware(app)
        queue_limit.add_middleware(app)
    return TestClient(app)


@pytest.mark.parametrize("path", ["/whole", "/batch", "/stream", "/chat"])
def test_a_refusal_is_a_503_with_retry_after_whatever_was_asked(told: dict[str, Any], path: str) -> None:
    response = serving(told).post(path)
    assert (response.status_code, response.headers["retry-after"]) == (503, "6")
    assert response.headers.get_list("content-type") == ["application/json"]
    body = response.json()
    assert body["object"] == "error" and "--kv-max-queue-seconds is 4," in body["message"]
    if path == "/stream":
        assert body["code"] == 503 and response.headers["x-kept"] == "yes"


def test_what_sglang_makes_of_a_refusal_alone(told: dict[str, Any]) -> None:
    """Reason for the middleware: should this fail, it may go."""
    client = serving(told, has_limit=False)
    assert client.post("/stream").status_code == 200 == client.post("/chat").status_code
    assert "retry-after" not in client.post("/whole").headers


@pytest.mark.parametrize("path", ["/whole", "/stream", "/chat"])
def test_other_answers_go_through_as_they_are(told: dict[str, Any], path: str) -> None:
    reason = {"type": "stop", "matched": 2}
    plain, limited = serving(reason, has_limit=False).post(path), serving(reason).post(path)
    assert (limited.status_code, limited.content) == (200, plain.content)
    assert limited.headers == plain.headers


def test_another_503_has_no_retry_after_of_ours(told: dict[str, Any]) -> None:
    queue_full = {**told, "message": "The request queue is full."}
    del queue_full[RETRY_AFTER]
    for response in (serving(queue_full).post("/whole"), serving(told).post("/nothing")):
        assert response.status_code == 503 and "retry-after" not in response.headers


def test_what_slowed_an_idle_server_down_is_forgotten() -> None:
    """Bursts of four, all of which one batch takes, long after a time in which eight seconds passed between two."""
    queue = queue_limit.QueueTimes(10.0)
    for index in range(30):
        queue.end_round(index * 8.0, 20, [object()])
    queue.end_round(240.0, 0, [])
    enter = lambda now_s: [queue.enter(object_, ahead, now_s) for ahead, object_ in enumerate(requests)]  # noqa: E731
    requests = [FakeReq(str(index)) for index in range(4)]
    assert [wait_s is None for wait_s in enter(241.0)] == [True, True, False, False]
    queue.end_round(241.0, 0, requests[:2])
    assert [wait_s is None for wait_s in enter(300.0)] == [True] * 4


def test_requests_do_not_hear_of_each_others_refusals(told: dict[str, Any]) -> None:
    client = serving(told)
    assert client.post("/stream").status_code == 503
    assert "retry-after" not in client.post("/nothing").headers


def test_the_middleware_is_added_once() -> None:
    app = FastAPI()
    queue_limit.add_middleware(app)
    queue_limit.add_middleware(app)
    assert [each.cls for each in app.user_middleware] == [RetryAfter]


def test_an_answer_without_a_body_keeps_its_head_and_other_scopes_go_by() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    for kind in ("http", "lifespan"):
        asyncio.run(RetryAfter(app)({"type": kind}, None, send))
    assert [message["status"] for message in sent] == [204, 204]


def test_without_a_server_a_refusal_is_only_sglangs_error(told: dict[str, Any]) -> None:
    """Through ``sglang.Engine``, without a server."""
    queue_limit.before_abort_is_told(None, {"meta_info": {"finish_reason": told}}, None, is_stream=False)
