"""The ``/evicpress`` routes on SGLang's HTTP server, and the calls they make to the scheduler."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from fastapi import FastAPI, Request, Response
from sglang.srt.utils.auth import auth_level
from sglang.utils import TypeBasedDispatcher

from sglang_evicpress.error_text import code_path
from sglang_evicpress.introspect.arguments import IntrospectionError, Json
from sglang_evicpress.introspect.openapi import described
from sglang_evicpress.introspect.operation import MAX_CONTEXT_BYTES, PREFIX, Access, Operation, stable_path
from sglang_evicpress.introspect.operations import OPERATIONS, encode, read_object, read_question, shows_prompt
from sglang_evicpress.patches.http.access import AccessRules, level_of
from sglang_evicpress.patches.http.dashboard import PATHS, add_dashboard
from sglang_evicpress.patches.http.events import EventHub
from sglang_evicpress.patches.http.listings import (
    LISTINGS,
    SharedAnswers,
    read_listing,
    read_positions,
    wants_positions,
)
from sglang_evicpress.patches.http.profile_writer import ProfileFile
from sglang_evicpress.patches.http.replies import COME_BACK, json_response
from sglang_evicpress.patches.scheduler.messages import EvicPressReqInput, EvicPressReqOutput
from sglang_evicpress.threads import WatchedThread

logger = logging.getLogger(__name__)

DEADLINE_S = 30.0
BODY_DEADLINE_S = 10.0  # for the whole body: slower clients only keep a connection
MAX_LONG_ANSWERS = 2  # put together at the same time
MAX_QUEUED_CALLS = 64  # callers that may wait for the scheduler; more are told to come back
TOKEN_BYTES = 8  # of one token id as JSON, with its comma


def routes() -> list[Operation]:
    """The operations that are served over HTTP."""
    return [operation for operation in OPERATIONS.values() if operation.path]


class Frontend(Protocol):
    """SGLang's TokenizerManager, as far as it carries messages."""

    _result_dispatcher: TypeBasedDispatcher

    def auto_create_handle_loop(self) -> None: ...
    def _dispatch_to_scheduler(self, message: object) -> None: ...


class SchedulerCalls:
    """Questions to the scheduler, one at a time, each with a deadline.

    Answers are matched by ``rid``. SGLang's own FanOutCommunicator matches them by order: once a caller gives
    up, the next ones wait for ever.
    """

    def __init__(self, tokenizer_manager: Frontend, *, deadline_s: float) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._deadline_s = deadline_s
        self._numbers = itertools.count()
        self._num_queued = self._num_long = 0
        self._long_turns = asyncio.Semaphore(MAX_LONG_ANSWERS)
        self._waiting: dict[str, asyncio.Future[EvicPressReqOutput]] = {}
        self._turn = asyncio.Lock()  # one question per scheduler step at most: decoding goes on in between
        tokenizer_manager._result_dispatcher += TypeBasedDispatcher([(EvicPressReqOutput, self.receive)])

    async def call(self, op: str, arguments: Json) -> EvicPressReqOutput:
        """The scheduler's answer.

        Raises IntrospectionError 504 at the deadline; a question that still waits for its turn is never sent. 503
        where too many wait already.
        """
        if self._num_queued >= MAX_QUEUED_CALLS:
            raise IntrospectionError(503, f"{self._num_queued} calls wait for the scheduler already: {COME_BACK}")
        rid = f"evicpress-{next(self._numbers)}"
        question = EvicPressReqInput(rid=rid, op=op, payload=encode(arguments))
        self._num_queued += 1
        try:
            async with asyncio.timeout(self._deadline_s), self._turn:
                self._waiting[rid] = asyncio.get_running_loop().create_future()
                self._tokenizer_manager.auto_create_handle_loop()
                self._tokenizer_manager._dispatch_to_scheduler(question)
                return await self._waiting[rid]
        except TimeoutError:
            fate = "it may still do it" if rid in self._waiting else "other questions were before this one"
            reason = f"the scheduler did not answer {op} within {self._deadline_s:g} s; {fate}"
            raise IntrospectionError(504, reason) from None
        finally:
            self._num_queued -= 1
            self._waiting.pop(rid, None)

    @asynccontextmanager
    async def long_answer(self) -> AsyncIterator[None]:
        """One that is put together from pages: few at a time are kept in memory. Raises IntrospectionError 503."""
        if self._num_long >= MAX_QUEUED_CALLS:
            raise IntrospectionError(503, f"{self._num_long} long answers are wanted already: {COME_BACK}")
        self._num_long += 1
        try:
            async with self._long_turns:
                yield
        finally:
            self._num_long -= 1

    def receive(self, response: EvicPressReqOutput) -> None:
        """Called by the tokenizer manager's receive loop; an answer nobody waits for any more is dropped."""
        waiting = self._waiting.get(response.rid or "")
        if waiting is None or waiting.done():
            logger.warning("dropped a late answer to %s", response.rid)
        else:
            waiting.set_result(response)


def find_route(method: str, path: str) -> tuple[Operation, Json]:
    """The route that serves a path, and what the path gives. Raises KeyError for one that none serves."""
    for route in routes():
        names = re.findall(r"{(\w+)}", route.path)
        patterns = (re.sub(r"{\w+}", "([^/]+)", each) for each in (route.path, stable_path(route.path)))
        match = next(filter(None, (re.fullmatch(pattern, path) for pattern in patterns)), None)
        if route.method == method and match is not None:
            return route, dict(zip(names, match.groups(), strict=True))
    raise KeyError(f"{method} {path}")


def add_routes(
    app: FastAPI,
    tokenizer_manager: Frontend,
    profile_file: ProfileFile | None = None,
    *,
    deadline_s: float = DEADLINE_S,
    rules: AccessRules | None = None,
    max_context_bytes: int = MAX_CONTEXT_BYTES,
) -> SchedulerCalls:
    """Serve ``routes()`` on ``app``; a second call only connects them to the new tokenizer manager. Profiles that are
    put go into ``profile_file``, None for nowhere. ``rules`` None are those of a server without keys on loopback.
    ``max_context_bytes``: accepted JSON of one context's token ids.

    By ``add_api_route``: behind ``include_router`` of recent FastAPI, SGLang no longer sees ``auth_level``,
    and its metrics middleware answers 500.
    """
    is_new = not hasattr(app.state, "evicpress")
    calls = app.state.evicpress = SchedulerCalls(tokenizer_manager, deadline_s=deadline_s)
    app.state.evicpress_profiles = ProfileFile(None) if profile_file is None else profile_file
    app.state.evicpress_rules = AccessRules() if rules is None else rules
    app.state.evicpress_context_bytes = max_context_bytes
    app.state.evicpress_threads = ()
    app.state.evicpress_shared = SharedAnswers()
    app.state.evicpress_events = EventHub(calls.call)
    if not is_new:
        return calls
    for route in routes():
        for path in (stable_path(route.path), route.path):
            endpoint = auth_level(level_of(route.access))(_endpoint(route))
            published = described(route)
            app.add_api_route(path, endpoint, methods=[route.method], response_class=Response, openapi_extra=published)
    add_dashboard(app)
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    for path in (PREFIX, PREFIX + "/{rest:path}"):  # last: a wrong path or method gets a reason too
        app.add_api_route(path, _unknown_path, methods=methods, include_in_schema=False)
    return calls


def _endpoint(route: Operation) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await _ask(request, route)
        except IntrospectionError as error:
            return json_response(error.status, encode(error.body))
        except Exception as error:  # noqa: BLE001 - logged without its words, which may be a prompt
            logger.error("%s failed: %s", route.name, code_path(error))
            reason = f"{route.name} failed with {type(error).__name__}: {error}"
            return json_response(500, encode(IntrospectionError(500, reason).body))

    endpoint.__name__ = f"evicpress_{route.name}"
    return endpoint


async def _ask(request: Request, route: Operation) -> Response:
    calls: SchedulerCalls = request.app.state.evicpress
    rules: AccessRules = request.app.state.evicpress_rules
    rules.check(route.access, request)
    arguments: Json = dict(request.query_params)
    if route.method == "POST":
        in_body = read_object(await _body(request, _max_body_bytes(request, route)))
        if arguments and (in_body or not route.takes_query):
            reason = f"query parameter {min(arguments)!r} is not known here: arguments go into the JSON body"
            raise IntrospectionError(400, reason)
        arguments |= in_body
    for name in request.path_params:
        if name in arguments:
            raise IntrospectionError(400, f"argument {name!r} is not known here: the path gives it")
    arguments |= request.path_params
    read_question(route.name, arguments)  # what is wrong in itself never costs the scheduler a thought
    if shows_prompt(route.name, arguments):
        rules.check(Access.PROMPT, request)
    if wants_positions(route.name, arguments):
        async with calls.long_answer():
            return json_response(*await read_positions(calls.call, arguments))
    if route.name in LISTINGS:
        async with calls.long_answer():
            return json_response(*await _read_listing(request, calls, route.name, arguments))
    response = await calls.call(route.name, arguments)
    payload = response.payload
    if response.status == 200 and route.name == "put_profile":
        await request.app.state.evicpress_profiles.keep(read_object(payload))
    if response.status == 200 and route.name == "stats":
        payload = _with_threads(payload, request.app.state.evicpress_threads)
    return json_response(response.status, payload)


async def _read_listing(request: Request, calls: SchedulerCalls, op: str, arguments: Json) -> tuple[int, bytes]:
    def make() -> Awaitable[tuple[int, bytes]]:
        return read_listing(calls.call, op, arguments)

    if not LISTINGS[op].is_shared:
        return await make()
    shared: SharedAnswers = request.app.state.evicpress_shared
    return await shared.get(f"{op} {sorted(arguments.items())}", make)


def watch_threads(app: FastAPI, threads: tuple[WatchedThread, ...]) -> None:
    """Show threads of this process in ``/evicpress/stats``, beside those of the scheduler's."""
    app.state.evicpress_threads = threads


def _with_threads(payload: bytes, threads: tuple[WatchedThread, ...]) -> bytes:
    stats = read_object(payload)
    known = stats.get("threads")
    stats["threads"] = [*(known if isinstance(known, list) else ()), *(thread.describe() for thread in threads)]
    return encode(stats)


def _max_body_bytes(request: Request, route: Operation) -> int:
    limit: int = request.app.state.evicpress_context_bytes
    return min(route.max_body_bytes, limit) if route.name == "open_shadow" else route.max_body_bytes


async def _body(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise IntrospectionError(413, f"the request body is over the accepted {max_bytes} bytes")
    except TimeoutError:
        raise IntrospectionError(408, f"the request body did not arrive within {BODY_DEADLINE_S:g} s") from None
    return bytes(body)


async def _unknown_path(request: Request) -> Response:
    path = request.url.path
    paths = (
        *(f"GET {path}" for path in PATHS),
        *(f"{route.method} {stable_path(route.path)}" for route in routes()),
    )
    served = ", ".join(paths)
    error = IntrospectionError(404, f"{request.method} {path} is not served: expected one of {served}")
    return json_response(error.status, encode(error.body))
