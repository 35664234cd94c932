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
MOST_QUEUED = 32  # events of one listener, some ten seconds of them
MOST_DECISIONS = 50  # in a second; those before them are left out, as their numbers show
FIRST_DECISIONS = 20  # that a listener begins with
MOST_REQUESTS = 40

FIGURES = {"stats": 2, "tiers": 2, "requests": 4}
"""Operations whose answers are events, each every so many ticks."""


def is_stopping() -> bool:
    """True once the web server was told to end: uvicorn notes it where it handles SIGINT, and then waits until the last
    answer has ended."""
    server = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return bool(getattr(server, "should_exit", False))


class Listener:
    """One who listens. ``is_left``: too slow, or the server stops."""

    def __init__(self) -> None:
        self.is_left = False
        self._events: asyncio.Queue[bytes] = asyncio.Queue(MOST_QUEUED)

    def put(self, event: bytes) -> None:
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            self.is_left = True

    async def events(self, is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Events as they are sent, until the listener is left or it is over."""
        while not (self.is_left or is_over()):
            try:
                yield await asyncio.wait_for(self._events.get(), TICK_S)
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
        for event in self._latest.values():
            listener.put(event)
        return listener

    def leave(self, listener: Listener) -> None:
        """It listens no more."""
        self._listeners.discard(listener)

    async def _read(self) -> None:
        tick, self._decisions = 0, -1
        while self._listeners and not self.is_over():
            await self.tell(tick)
            tick += 1
            await asyncio.sleep(self._tick_s)

    async def tell(self, tick: int) -> None:
        """Read what is due at a tick, and send it. What cannot be read is told as ``trouble``."""
        try:
            await self._tell_decisions()
            for name, every in FIGURES.items():
                if tick % every == 0:
                    await self._tell_figures(name)
        except IntrospectionError as error:
            self._send("trouble", encode(error.body))
        except OSError as error:  # the socket to the scheduler
            logger.info("evicpress: no event could be read: %s", error)

    async def _tell_decisions(self) -> None:
        if self._decisions < 0:
            newest = await self._ask("journal", {"since": 10**17, "limit": 1})
            self._decisions = max(0, _integer(newest, "num_decisions") - FIRST_DECISIONS)
        response = await self._call("journal", {"since": self._decisions, "limit": MOST_DECISIONS})
        answer = read_object(response.payload)
        if response.status != 200 or not answer.get("entries"):
            return
        self._decisions = max(_integer(answer, "last"), _integer(answer, "num_decisions") - MOST_DECISIONS)
        self._send("decisions", response.payload)

    async def _tell_figures(self, name: str) -> None:
        arguments: Json = {}
        if name == "requests":
            arguments = {"after": max(0, self._num_requests - MOST_REQUESTS), "limit": MOST_REQUESTS}
        response = await self._call(name, arguments)
        if response.status != 200:
            return
        if name == "requests":
            totals = read_object(response.payload).get("totals")
            self._num_requests = int(totals["requests"]) if isinstance(totals, dict) else 0
        self._send(name, response.payload)

    async def _ask(self, op: str, arguments: Json) -> Json:
        return read_object((await self._call(op, arguments)).payload)

    def _send(self, name: str, payload: bytes) -> None:
        """``payload`` is JSON on one line."""
        event = b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"
        self._latest[name] = event
        for listener in tuple(self._listeners):
            listener.put(event)
            if listener.is_left:
                self._listeners.discard(listener)


def _integer(answer: Json, name: str) -> int:
    value = answer.get(name)
    return value if isinstance(value, int) else 0
