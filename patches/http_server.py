"""The ``/evicpress`` routes on SGLang's HTTP server, and the calls they make to the scheduler."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from sglang.srt.utils.auth import AuthLevel, auth_level
from sglang.utils import TypeBasedDispatcher

from sglang_evicpress.arguments import IntrospectionError, Json
from sglang_evicpress.introspect import encode, read_object, read_question
from sglang_evicpress.patches.control import EvicPressReqInput, EvicPressReqOutput
from sglang_evicpress.patches.profile_file import ProfileFile

logger = logging.getLogger(__name__)

DEADLINE_S = 30.0
MAX_BODY_BYTES = 65_536
MAX_CONTEXT_BYTES = 64 << 20  # of token ids, as JSON


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    op: str
    level: AuthLevel = AuthLevel.NORMAL
    takes_query: bool = False  # a POST may give its arguments in the URL instead of a JSON body
    max_body_bytes: int = MAX_BODY_BYTES


ROUTES = (
    Route("GET", "/evicpress/tree", "tree"),
    Route("GET", "/evicpress/nodes/{node_id}", "node", AuthLevel.ADMIN_OPTIONAL),  # shows prompts
    Route("GET", "/evicpress/stats", "stats"),
    Route("GET", "/evicpress/explain/{node_id}", "explain"),
    Route("GET", "/evicpress/journal", "journal"),
    Route("POST", "/evicpress/nodes/{node_id}/compress", "compress", AuthLevel.ADMIN_OPTIONAL),
    Route("POST", "/evicpress/check", "check", AuthLevel.ADMIN_OPTIONAL),
    Route("POST", "/evicpress/evict", "evict", AuthLevel.ADMIN_OPTIONAL),
    Route("GET", "/evicpress/tiers", "tiers"),
    Route("POST", "/evicpress/flush", "flush", AuthLevel.ADMIN_OPTIONAL, takes_query=True),
    Route("POST", "/evicpress/nodes/{node_id}/demote", "demote", AuthLevel.ADMIN_OPTIONAL),
    Route("POST", "/evicpress/tiers/ssd", "attach_ssd", AuthLevel.ADMIN_OPTIONAL),
    Route("POST", "/evicpress/tiers/ssd/detach", "detach_ssd", AuthLevel.ADMIN_OPTIONAL),
    Route("GET", "/evicpress/requests", "requests"),
    Route("GET", "/evicpress/profiles", "profiles"),
    Route("GET", "/evicpress/profiles/{key}", "profile"),
    Route("POST", "/evicpress/profiles", "put_profile", AuthLevel.ADMIN_OPTIONAL, max_body_bytes=MAX_CONTEXT_BYTES),
    Route("POST", "/evicpress/shadows", "open_shadow", AuthLevel.ADMIN_OPTIONAL, max_body_bytes=MAX_CONTEXT_BYTES),
    Route("POST", "/evicpress/shadows/{shadow_id}/forms", "make_shadow_form", AuthLevel.ADMIN_OPTIONAL),
    Route("POST", "/evicpress/shadows/{shadow_id}/drop", "drop_shadow_form", AuthLevel.ADMIN_OPTIONAL),
    Route("POST", "/evicpress/shadows/{shadow_id}/close", "close_shadow", AuthLevel.ADMIN_OPTIONAL),
)


class SchedulerCalls:
    """Questions to the scheduler, one at a time, each with a deadline.

    Answers are matched by ``rid``. SGLang's own FanOutCommunicator matches them by order: once a caller gives
    up, the next ones wait for ever.
    """

    def __init__(self, tokenizer_manager: Any, *, deadline_s: float) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._deadline_s = deadline_s
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[EvicPressReqOutput]] = {}
        self._turn = asyncio.Lock()  # one question per scheduler step at most: decoding goes on in between
        tokenizer_manager._result_dispatcher += TypeBasedDispatcher([(EvicPressReqOutput, self.receive)])

    async def call(self, op: str, arguments: Json) -> EvicPressReqOutput:
        """The scheduler's answer.

        Raises IntrospectionError 504 at the deadline; a question that still waits for its turn is never sent.
        """
        rid = f"evicpress-{next(self._numbers)}"
        question = EvicPressReqInput(rid=rid, op=op, payload=encode(arguments))
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
            self._waiting.pop(rid, None)

    def receive(self, given: EvicPressReqOutput) -> None:
        """Called by the tokenizer manager's receive loop; an answer nobody waits for any more is dropped."""
        waiting = self._waiting.get(given.rid or "")
        if waiting is None or waiting.done():
            logger.warning("dropped a late answer to %s", given.rid)
        else:
            waiting.set_result(given)


def find_route(method: str, path: str) -> tuple[Route, Json]:
    """The route that serves a path, and what the path gives. Raises KeyError for one that none serves."""
    for route in ROUTES:
        names = re.findall(r"{(\w+)}", route.path)
        found = re.fullmatch(re.sub(r"{\w+}", "([^/]+)", route.path), path)
        if route.method == method and found is not None:
            return route, dict(zip(names, found.groups(), strict=True))
    raise KeyError(f"{method} {path}")


def add_routes(
    app: FastAPI, tokenizer_manager: Any, profile_file: ProfileFile | None = None, *, deadline_s: float = DEADLINE_S
) -> SchedulerCalls:
    """Serve ``ROUTES`` on ``app``; a second call only connects them to the new tokenizer manager. Profiles that are
    put go into ``profile_file``, None for nowhere.

    By ``add_api_route``: behind ``include_router`` of recent FastAPI, SGLang no longer sees ``auth_level``,
    and its metrics middleware answers 500.
    """
    is_new = not hasattr(app.state, "evicpress")
    calls = app.state.evicpress = SchedulerCalls(tokenizer_manager, deadline_s=deadline_s)
    app.state.evicpress_profiles = ProfileFile(None) if profile_file is None else profile_file
    if not is_new:
        return calls
    for route in ROUTES:
        app.add_api_route(route.path, auth_level(route.level)(_endpoint(route)), methods=[route.method])
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    for path in ("/evicpress", "/evicpress/{rest:path}"):  # last: a wrong path or method gets a reason too
        app.add_api_route(path, _unknown_path, methods=methods, include_in_schema=False)
    return calls


def _endpoint(route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await _ask(request, route)
        except IntrospectionError as error:
            return _response(error.status, encode(error.body))
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.url.path)
            reason = f"{route.op} failed with {type(error).__name__}: {error}"
            return _response(500, encode(IntrospectionError(500, reason).body))

    endpoint.__name__ = f"evicpress_{route.op}"
    return endpoint


async def _ask(request: Request, route: Route) -> Response:
    calls: SchedulerCalls = request.app.state.evicpress
    arguments: Json = dict(request.query_params)
    if route.method == "POST":
        in_body = read_object(await _body(request, route.max_body_bytes))
        if arguments and (in_body or not route.takes_query):
            reason = f"query parameter {min(arguments)!r} is not known here: arguments go into the JSON body"
            raise IntrospectionError(400, reason)
        arguments |= in_body
    for name in request.path_params:
        if name in arguments:
            raise IntrospectionError(400, f"argument {name!r} is not known here: the path gives it")
    arguments |= request.path_params
    read_question(route.op, arguments)  # what is wrong in itself never costs the scheduler a thought
    given = await calls.call(route.op, arguments)
    if route.op == "put_profile" and given.status == 200:
        await request.app.state.evicpress_profiles.keep(read_object(given.payload))
    return _response(given.status, given.payload)


async def _body(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise IntrospectionError(413, f"the request body is over the accepted {max_bytes} bytes")
    return bytes(body)


async def _unknown_path(request: Request) -> Response:
    path = request.url.path
    served = ", ".join(f"{route.method} {route.path}" for route in ROUTES)
    error = IntrospectionError(404, f"{request.method} {path} is not served: expected one of {served}")
    return _response(error.status, encode(error.body))


def _response(status: int, body: bytes) -> Response:
    return Response(body, status_code=status, media_type="application/json")
