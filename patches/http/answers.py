"""Quality that HTTP requests ask for, and what their answers say of the KV that was served.

SGLang's routes drop fields that they do not know. ``RequestQuality`` around the app moves ``FIELDS`` from the top
level of a body to ``custom_params``, which reach the scheduler, and refuses values that are not known. What the
scheduler says with the first token of an answer (``cache/served_kv.py``) is met where SGLang's routes take their
answers, ``TokenizerManager.generate_request``, and put into ``meta_info`` there; the middleware adds it to ``usage``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_evicpress.asked_quality import KV_CACHE, KV_QUALITY, ServedKV, check_quality, served_kv
from sglang_evicpress.asked_retention import KV_RETENTION, check_retention
from sglang_evicpress.patches.http import salts

GENERATE_REQUEST = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
GENERATE_PATH = "/generate"
FIELDS = (KV_QUALITY, KV_RETENTION)
"""Of the top level of a body."""
OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions")
_USAGE = b'"usage":{'
"""Begin of the usage in an answer as SGLang writes it; within a string of JSON a backslash is before each quote."""


class Asked(Protocol):
    """SGLang's GenerateReqInput; the number of samples of each prompt is there once it is normalised."""

    parallel_sample_num: int
    extra_key: str | list[str] | None
    cache_salt: str | list[str] | None


@dataclass(slots=True)
class ServedPrompts:
    """KV that one HTTP request was served from, by number of the answer; ``num_samples`` answers each are to one
    prompt."""

    num_samples: int = 1
    by_answer: dict[int, ServedKV] = field(default_factory=dict)

    def usage(self) -> bytes | None:
        """An entry of a JSON object, of all prompts, each counted once as SGLang counts them; None before any is
        known."""
        prompts = [kv for index, kv in self.by_answer.items() if index % self.num_samples == 0]
        if not prompts:
            return None
        exact, lossy = sum(kv["exact_tokens"] for kv in prompts), sum(kv["lossy_tokens"] for kv in prompts)
        tiers = sum((Counter(kv["tiers"]) for kv in prompts), Counter[str]())
        served = served_kv(exact, lossy, min(kv["min_quality"] for kv in prompts), tiers)
        return f'"{KV_CACHE}":{json.dumps(served, separators=(",", ":"))}'.encode()


_served: ContextVar[ServedPrompts | None] = ContextVar("evicpress_served", default=None)
"""What the HTTP request of this context was served from."""


async def around_generate_request(
    original: Callable[..., AsyncGenerator[object, None]],
    manager: object,
    asked: Asked,
    *args: object,
    **kwargs: object,
) -> AsyncGenerator[object, None]:
    """AROUND ``TokenizerManager.generate_request``, an iterator of answers, or of lists of them: ``kv_cache`` comes as
    a list with one value for the first token, and only with that where answers are sent in pieces."""
    prompts, known = _served.get(), dict[object, ServedKV]()
    salts.keep_apart(asked)
    async with aclosing(original(manager, asked, *args, **kwargs)) as answers:
        async for answer in answers:
            for index, part in enumerate(answer if isinstance(answer, list) else (answer,)):
                info = part.get("meta_info", {})
                values = info.pop(KV_CACHE, None)
                if values and values[0] is not None:
                    known[info["id"]] = values[0]
                if info.get("id") in known:
                    info[KV_CACHE] = known[info["id"]]
                    if prompts is not None:
                        prompts.num_samples = getattr(asked, "parallel_sample_num", 1)
                        prompts.by_answer[part.get("index", index)] = info[KV_CACHE]
            yield answer


def with_fields(body: bytes, path: str) -> bytes:
    """A request's JSON body with our ``FIELDS``, where it has any, in the ``custom_params`` that SGLang hands on.

    Raises ValueError, one sentence, for a value that is not known; what is wrong besides is SGLang's to say.
    """
    if not any(f'"{name}"'.encode() in body for name in FIELDS):
        return body
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(fields, dict):
        return body
    asked = {name: value for name in FIELDS if (value := fields.pop(name, None)) is not None}
    _check(asked)
    for holder in _holders(fields, path):
        params = holder.get("custom_params")
        _check(params)
        if asked:
            if params is not None and not isinstance(params, dict):
                raise ValueError(f"custom_params is {params!r:.100} beside {min(asked)}: expected an object, or none")
            holder["custom_params"] = {**(params or {}), **asked}
    return json.dumps(fields).encode() if asked else body


def _check(params: object) -> None:
    check_quality(params)
    check_retention(params)


def _holders(fields: dict[str, object], path: str) -> Iterator[dict[str, object]]:
    """The objects of a body that hold ``custom_params``."""
    if path != GENERATE_PATH:
        yield fields
        return
    if fields.get("sampling_params") is None:
        fields["sampling_params"] = {}
    given = fields["sampling_params"]
    yield from (each for each in (given if isinstance(given, list) else [given]) if isinstance(each, dict))


class RequestQuality:
    """ASGI middleware for requests for answers: their quality goes in, and comes out in the usage."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path not in (GENERATE_PATH, *OPENAI_PATHS):
            await self._app(scope, receive, send)
            return
        messages = await _whole_body(receive)
        if messages[-1]["type"] == "http.request":
            body = b"".join(message.get("body", b"") for message in messages)
            try:
                changed = with_fields(body, path)
            except ValueError as error:
                await _refuse(str(error), path, send)
                return
            messages = [{"type": "http.request", "body": changed, "more_body": False}]
            if changed is not body:
                scope["headers"] = _with_length(scope["headers"], len(changed))

        async def receive_again() -> Message:
            return messages.pop(0) if messages else await receive()

        prompts = ServedPrompts()
        _served.set(prompts)
        await self._app(scope, receive_again, send if path == GENERATE_PATH else _adding_usage(prompts, send))


async def _whole_body(receive: Receive) -> list[Message]:
    """All messages of a body, or those until the client left."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _adding_usage(prompts: ServedPrompts, send: Send) -> Send:
    """Sends on, with what the prompts were served from in every usage. The head of an answer with a length waits for
    its body, which is then sent in one piece."""
    head: Message | None = None

    async def send_on(message: Message) -> None:
        nonlocal head
        if message["type"] == "http.response.start":
            if any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                head = message
                return
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            is_whole = head is None or not message.get("more_body", False)
            usage = prompts.usage() if is_whole and _USAGE in body else None
            if usage is not None:
                body = body.replace(_USAGE, _USAGE + usage + b",", 1)
                message = {**message, "body": body}
                if head is not None:
                    head = {**head, "headers": _with_length(head["headers"], len(body))}
            if head is not None:
                begin, head = head, None
                await send(begin)
        await send(message)

    return send_on


def _with_length(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]


async def _refuse(message: str, path: str, send: Send) -> None:
    """A 400 in the words of the route."""
    status = HTTPStatus.BAD_REQUEST
    error = {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": int(status)}
    body = json.dumps({"error": {"message": message}} if path == GENERATE_PATH else error).encode()
    headers = _with_length([(b"content-type", b"application/json")], len(body))
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body})


def add_middleware(app: Starlette) -> None:
    """Once for an app, before it serves."""
    known: list[object] = [each.cls for each in app.user_middleware]
    if RequestQuality not in known:
        app.user_middleware.append(Middleware(RequestQuality))  # innermost: bodies are decompressed there
