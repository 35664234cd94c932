"""Server-sent events: decisions as they happen, and the figures of the server every other second.

One reader asks the scheduler for all who listen, once a second and only while anybody does. Each listener has a queue
of a few events: who reads more slowly than they come is left, and so is who takes no bytes for some seconds.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable

from sglang_evicpress.introspect.arguments import IntrospectionError, Json
from sglang_evicpress.introspect.operations import encode, read_object
from sglang_evicpress.patches.http.listings import Call
from sglang_evicpress.patches.http.replies import COME_BACK

logger = logging.getLogger(__name__)

TICK_S = 1.0
MOST_LISTENERS = 32
MOST_QUEUED = 10  # ticks that one listener may be behind
MOST_DECISIONS = 50  # in a second; those before them are left out, as their numbers show
FIRST_DECISIONS = 20  # that a listener begins with
MOST_REQUESTS = 40

FIGURES_EVERY, REQUESTS_EVERY = 2, 4  # ticks


def is_stopping() -> bool:
    """True once the web server was told to end: uvicorn notes it where it handles SIGINT, and then waits until the last
    answer has ended."""
    server = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return bool(getattr(server, "should_exit", False))


class Listener:
    """One who listens. ``is_left``: too slow, or the server stops."""

    def __init__(self) -> None:
        self.is_left = False
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(MOST_QUEUED)

    def put(self, events: bytes) -> None:
        """Some events that are to be sent."""
        try:
            self._queue.put_nowait(events)
        except asyncio.QueueFull:
            self.is_left = True

    async def events(self, is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Events as they are sent, until the listener is left or it is over."""
        while not (self.is_left or is_over()):
            try:
                yield await asyncio.wait_for(self._queue.get(), TICK_S)
            except TimeoutError:
                continue


class EventHub:
    """Reads for all listeners by ``call``; ``is_over`` ends all streams."""

    def __init__(self, call: Call, is_over: Callable[[], bool] = is_stopping, tick_s: float = TICK_S) -> None:
        self.is_over = is_over
        self._call, self._tick_s = call, tick_s
        self._listeners: set[Listener] = set()
        self._latest: dict[str, bytes] = {}
        self._decisions = 0  # number of the last one that was sent
        self._num_requests = 0  # with a budget, so far
        self._reader: asyncio.Task[None] | None = None

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def join(self) -> Listener:
        """A new listener, who gets the latest figures first. Raises IntrospectionError 503 where there are too many."""
        if len(self._listeners) >= MOST_LISTENERS:
            raise IntrospectionError(503, f"{len(self._listeners)} listen already: {COME_BACK}")
        listener = Listener()
        self._listeners.add(listener)
        if self._reader is None or self._reader.done():
            self._latest.clear()
            self._reader = asyncio.get_running_loop().create_task(self._read())
        if self._latest:
            listener.put(b"".join(self._latest.values()))
        return listener

    def leave(self, listener: Listener) -> None:
        """It listens no more."""
        self._listeners.discard(listener)

    async def _read(self) -> None:
        tick, self._decisions = 0, -1
        try:
            while self._listeners and not self.is_over():
                await self.tell(tick)
                tick += 1
                await asyncio.sleep(self._tick_s)
        finally:  # nobody waits for events that never come: who comes back begins a reader
            for listener in self._listeners:
                listener.is_left = True
            self._listeners.clear()

    async def tell(self, tick: int) -> None:
        """Ask what is due at a tick, in one question, and send it. What cannot be read is told as ``trouble``."""
        try:
            if self._decisions < 0:
                newest = _object(await self._ask({"since": 10**17, "limit": 1}), "decisions")
                self._decisions = max(0, _integer(newest, "num_decisions") - FIRST_DECISIONS)
            arguments: Json = {"since": self._decisions, "limit": MOST_DECISIONS, "figures": tick % FIGURES_EVERY == 0}
            if tick % REQUESTS_EVERY == 0:
                arguments["requests"] = max(0, self._num_requests - MOST_REQUESTS)
            self._send(self._events_of(await self._ask(arguments)))
        except IntrospectionError as error:
            self._send({"trouble": error.body})
        except OSError as error:  # the socket to the scheduler
            logger.info("evicpress: no event could be read: %s", error)

    async def _ask(self, arguments: Json) -> Json:
        """Raises IntrospectionError for an answer that is none."""
        response = await self._call("news", arguments)
        if response.status != 200:
            raise IntrospectionError(response.status, f"the scheduler answered {response.status}: see its log")
        return read_object(response.payload)

    def _events_of(self, news: Json) -> dict[str, Json]:
        """Bodies by the names of their events."""
        decisions = _object(news, "decisions")
        if decisions.get("entries"):
            newest = _integer(decisions, "num_decisions")
            self._decisions = max(_integer(decisions, "last"), newest - MOST_DECISIONS)
        else:
            del news["decisions"]
        if "requests" in news:
            self._num_requests = _integer(_object(_object(news, "requests"), "totals"), "requests")
        return {name: _object(news, name) for name in news}

    def _send(self, bodies: dict[str, Json]) -> None:
        """All events of a tick, in one piece."""
        events = {name: b"event: %b\ndata: %b\n\n" % (name.encode(), encode(body)) for name, body in bodies.items()}
        self._latest |= {name: event for name, event in events.items() if name != "trouble"}
        chunk = b"".join(events.values())
        for listener in tuple(self._listeners) if chunk else ():
            listener.put(chunk)
            if listener.is_left:
                self._listeners.discard(listener)


def _object(answer: Json, name: str) -> Json:
    value = answer.get(name)
    return value if isinstance(value, dict) else {}


def _integer(answer: Json, name: str) -> int:
    value = answer.get(name)
    return value if isinstance(value, int) else 0
