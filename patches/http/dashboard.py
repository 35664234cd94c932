"""The dashboard at ``/evicpress/`` and the events that it shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from sglang.srt.utils.auth import auth_level
from starlette.types import Message, Receive, Scope, Send

from sglang_evicpress.dashboard.page import read_page
from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.introspect.openapi import EVENTS, PAGE, responses
from sglang_evicpress.introspect.operation import PREFIX, Access, stable_path
from sglang_evicpress.introspect.operations import encode
from sglang_evicpress.introspect.schemas import TEXT
from sglang_evicpress.patches.http.access import AccessRules, level_of
from sglang_evicpress.patches.http.events import EventHub, Listener
from sglang_evicpress.patches.http.replies import VERSION_HEADERS, json_response

EVENTS_PATH = f"{PREFIX}/events"
PATHS = (f"{PREFIX}/", stable_path(EVENTS_PATH))

SEND_S = 10.0
"""A listener who takes no bytes for so long is left."""

_EVENT_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **VERSION_HEADERS}


class EventStream(StreamingResponse):
    """The events of one listener, who leaves the hub when the answer has ended, however it does."""

    def __init__(self, hub: EventHub, listener: Listener) -> None:
        super().__init__(self._events(), media_type="text/event-stream", headers=_EVENT_HEADERS)
        self._hub, self._listener = hub, listener

    async def _events(self) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        async for event in self._listener.events(self._hub.is_over):
            yield event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        try:
            with suppress(TimeoutError):
                await super().__call__(scope, receive, send_in_time)
        finally:
            self._hub.leave(self._listener)


def add_dashboard(app: FastAPI) -> None:
    """The page has no figures in it, and is for everybody; the events are as the other descriptions of the cache."""
    app.add_api_route(PREFIX, _to_page, methods=["GET"], include_in_schema=False)
    page = {"summary": PAGE, "tags": ["evicpress"], "responses": responses(PAGE, "text/html", TEXT, (401,))}
    app.add_api_route(f"{PREFIX}/", _page, methods=["GET"], response_class=Response, openapi_extra=page)
    answers = responses(EVENTS, "text/event-stream", TEXT, (401, 503))
    events = {"summary": EVENTS, "tags": ["evicpress"], "responses": answers}
    for path in (stable_path(EVENTS_PATH), EVENTS_PATH):
        endpoint = auth_level(level_of(Access.READ))(_events)
        app.add_api_route(path, endpoint, methods=["GET"], response_class=Response, openapi_extra=events)


async def _to_page() -> Response:
    return RedirectResponse("evicpress/")  # the page asks by relative paths


async def _page() -> Response:
    page = read_page()
    headers = {**page.headers, **VERSION_HEADERS}
    return Response(page.body, media_type="text/html; charset=utf-8", headers=headers)


async def _events(request: Request) -> Response:
    rules: AccessRules = request.app.state.evicpress_rules
    hub: EventHub = request.app.state.evicpress_events
    try:
        rules.check(Access.READ, request)
        return EventStream(hub, hub.join())
    except IntrospectionError as error:
        return json_response(error.status, encode(error.body))
