"""Sends chat requests to a server at their times and measures, as a user does, when the answers come."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any

import orjson

from sglang_evicpress.benchmark.workload import Planned

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

TIMEOUT_S = 600.0
"""What one request may take before it counts as failed."""

_PATH = "/v1/chat/completions"
_NO_ROOM = 503
_PAUSE_S = 0.1
"""Of a client that keeps asking, behind a request that failed."""


@dataclass(slots=True)
class Outcome:
    """Result of one request. ``arrival_s``, ``sent_s`` and ``end_s`` are seconds from the start of the rate.

    ``ttft_s`` is the time from ``arrival_s`` to the first text of the answer; for an answer without text, to its end;
    None when nothing came. ``itl_s`` are the times between the pieces of text. ``cached_by_tier`` is where SGLang says
    the cached tokens were. With an ``error``, the rest is what was known by then. ``is_refused``: the error is status
    503. ``is_cut``: it was cancelled at the end of its rate, which is no error; ``end_s`` is when.
    """

    arrival_s: float
    sent_s: float
    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    cached_by_tier: dict[str, int] | None = None
    output_tokens: int | None = None
    answer: str = ""
    error: str | None = None
    is_refused: bool = False
    is_cut: bool = False


class EventLines:
    """Cuts a stream of server-sent events, which comes in pieces of any size, into the data of the events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of every event that ends in this piece; comments and other fields are skipped."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            stripped = line.removesuffix(b"\r")
            if stripped.startswith(b"data:"):
                self._data.append(stripped[5:].removeprefix(b" "))
            elif not stripped and self._data:
                data, self._data = b"\n".join(self._data), []
                yield data


class _Failed(Exception):
    """The answer says, or is, an error."""


class _Refused(_Failed):
    """The server has no room for the request now."""


class _Answer:
    """Reads the events of one answer into its ``Outcome``."""

    def __init__(self, outcome: Outcome) -> None:
        self.is_complete = False
        self._outcome = outcome
        self._last_s: float | None = None

    def read(self, data: bytes, now_s: float) -> None:
        """Raises _Failed for an event that is an error or no event of a chat."""
        if data.strip() == b"[DONE]":
            if self._last_s is None:
                raise _Failed("the answer ended before it began")
            self.is_complete = True
            self._outcome.end_s = now_s
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise _Failed(f"an event is no JSON: {data[:200]!r}") from None
        if isinstance(event, dict) and ("error" in event or event.get("object") == "error"):
            raise _Failed(_said(event))
        try:
            self._read_usage(event)
            for choice in event.get("choices") or ():
                self._read_choice(choice, now_s)
        except (AttributeError, TypeError):
            raise _Failed(f"an event is none of a chat: {data[:200]!r}") from None

    def _read_choice(self, choice: Mapping[str, Any], now_s: float) -> None:
        delta = choice.get("delta") or {}
        self._outcome.answer += delta.get("content") or ""
        if delta.get("content") or delta.get("reasoning_content"):
            self._mark(now_s)
        reason = choice.get("finish_reason")
        if reason == "abort":
            raise _Failed("the server aborted the request")
        if reason and self._last_s is None:
            self._mark(now_s)

    def _mark(self, now_s: float) -> None:
        outcome = self._outcome
        if self._last_s is None:
            outcome.ttft_s = now_s - outcome.arrival_s
        else:
            outcome.itl_s.append(now_s - self._last_s)
        self._last_s = now_s

    def _read_usage(self, event: Mapping[str, Any]) -> None:
        usage, more, outcome = event.get("usage"), event.get("sglext"), self._outcome
        if isinstance(usage, dict):
            outcome.prompt_tokens = usage.get("prompt_tokens")
            outcome.output_tokens = usage.get("completion_tokens")
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get(
                "cached_tokens"
            ) or 0  # none: left out
        if isinstance(more, dict) and (tiers := more.get("cached_tokens_details")):
            outcome.cached_by_tier = {name: count for name, count in tiers.items() if isinstance(count, int)}


async def drive(
    url: str,
    model: str,
    planned: Sequence[Planned],
    *,
    max_new_tokens: int,
    is_closed: bool = False,
    timeout_s: float = TIMEOUT_S,
    until_s: float | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """The outcomes in the order of ``planned``; nothing is sent twice.

    In an open loop every request is sent at its time, whatever became of those before it, and what has no answer
    ``until_s`` seconds after the start is cancelled. ``is_closed``: one client, whose next request follows the last
    answer; ``arrival_s`` is then when it was sent. What ``on_outcome`` raises ends all requests and is raised.
    """
    bodies = [_body(model, entry, max_new_tokens) for entry in planned]
    async with _session() as session:
        begin = time.perf_counter()

        async def ask(arrival_s: float | None, body: bytes) -> Outcome:
            # A timer may ring a little early, and a request sent before it arrived would have a negative wait.
            while arrival_s is not None and (left := arrival_s - (time.perf_counter() - begin)) > 0:
                await asyncio.sleep(left)
            outcome = await _ask(session, url + _PATH, body, begin, arrival_s, timeout_s, until_s)
            if on_outcome is not None:
                on_outcome(outcome)
            return outcome

        if is_closed:
            return [await ask(None, body) for body in bodies]
        tasks: list[asyncio.Task[Outcome]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for entry, body in zip(planned, bodies, strict=True):
                    tasks.append(group.create_task(ask(entry.arrival_s, body)))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return [task.result() for task in tasks]


async def keep_asking(
    url: str,
    model: str,
    planned: Sequence[Planned],
    *,
    max_new_tokens: int,
    num_clients: int,
    seconds: float,
    timeout_s: float = TIMEOUT_S,
) -> list[Outcome]:
    """So many clients, each of which asks the next of ``planned`` as soon as it has its answer, for so long.

    Behind the last of ``planned`` comes its first again. What has no answer at the end is cancelled.
    """
    entries, outcomes = cycle(planned), list[Outcome]()
    async with _session() as session:
        begin = time.perf_counter()

        async def ask() -> None:
            while time.perf_counter() - begin < seconds:
                body = _body(model, next(entries), max_new_tokens)
                outcomes.append(await _ask(session, url + _PATH, body, begin, None, timeout_s, seconds))
                if outcomes[-1].is_cut:  # its timer may have fired before its time
                    return
                if outcomes[-1].error is not None:
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(ask() for _ in range(num_clients)))
    return outcomes


def lift_file_limit() -> None:
    """Let this process open as many files as it may at most: every request that waits has a connection of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _session() -> ClientSession:
    """With a connection for each request: a server may close an idle one just when a request is put on it."""
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    lift_file_limit()
    return ClientSession(connector=TCPConnector(limit=0, force_close=True), timeout=ClientTimeout(total=None))


def _body(model: str, entry: Planned, max_new_tokens: int) -> bytes:
    return orjson.dumps(
        {
            "model": model,
            "messages": entry.item.messages,
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_cached_tokens_details": True,
        }
    )


async def _ask(
    session: ClientSession,
    url: str,
    body: bytes,
    begin: float,
    arrival_s: float | None,
    timeout_s: float,
    until_s: float | None,
) -> Outcome:
    from aiohttp import ClientError

    sent_s = time.perf_counter() - begin
    left_s = timeout_s if until_s is None else until_s - sent_s
    outcome = Outcome(sent_s if arrival_s is None else arrival_s, sent_s)
    answer = _Answer(outcome)
    try:
        async with (
            asyncio.timeout(min(timeout_s, left_s)),
            session.post(url, data=body, headers={"Content-Type": "application/json"}) as response,
        ):
            await _read(response, answer, begin)
    except TimeoutError:
        if left_s < timeout_s:
            outcome.is_cut = True
        else:
            outcome.error = f"no complete answer within {timeout_s:g} s"
    except (_Failed, ClientError, OSError) as error:
        outcome.error, outcome.is_refused = str(error) or type(error).__name__, isinstance(error, _Refused)
    if not answer.is_complete:
        outcome.end_s = time.perf_counter() - begin
    return outcome


async def _read(response: ClientResponse, answer: _Answer, begin: float) -> None:
    """Raises _Failed, and what aiohttp raises when the connection breaks."""
    if response.status != 200:
        results = await response.read()
        try:
            why = _said(orjson.loads(results))
        except orjson.JSONDecodeError:
            why = results[:300].decode("utf-8", "replace")
        raise (_Refused if response.status == _NO_ROOM else _Failed)(f"status {response.status}: {why}")
    lines = EventLines()
    async for piece in response.content.iter_any():
        now_s = time.perf_counter() - begin
        for data in lines.feed(piece):
            answer.read(data, now_s)
            if answer.is_complete:
                return
    raise _Failed("the connection ended before the answer did")


def _said(event: object) -> str:
    """The reason in what a server answers instead of a piece of text."""
    said = event
    for name in ("error", "message"):
        if isinstance(said, dict) and name in said:
            said = said[name]
    return said if isinstance(said, str) else f"{said!r:.300}"
