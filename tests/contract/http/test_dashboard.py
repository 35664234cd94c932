"""The page at ``/evicpress/``, the events that it shows, and answers that several callers share."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import AuthLevel, _get_auth_level_from_app_and_scope, add_api_key_middleware
from tests.contract.http.test_control import FakeScheduler, FakeTokenizerManager, reason_of, registry
from tests.unit.introspect.fake_cache import FakeCache

from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.introspect.operations import Json, encode
from sglang_evicpress.patches.http import events
from sglang_evicpress.patches.http.access import AccessRules
from sglang_evicpress.patches.http.events import (
    MOST_DECISIONS,
    MOST_LISTENERS,
    MOST_QUEUED,
    MOST_REQUESTS,
    EventHub,
    is_stopping,
)
from sglang_evicpress.patches.http.listings import SharedAnswers
from sglang_evicpress.patches.http.routes import add_routes
from sglang_evicpress.patches.scheduler.messages import EvicPressReqOutput

pytestmark = pytest.mark.sglang

__all__ = ["registry"]  # a fixture: every test here has messages of ours


def client_of(cache: object, **keys: str | None) -> TestClient:
    app = FastAPI()
    add_routes(
        app, FakeTokenizerManager(FakeScheduler(cache)), rules=AccessRules(keys.get("admin_api_key") is not None)
    )
    if keys:
        add_api_key_middleware(app, api_key=keys.get("api_key"), admin_api_key=keys.get("admin_api_key"))
    return TestClient(app)


# ---- the page


def test_the_page_is_served_and_asks_nobody_but_its_own_server() -> None:
    response = client_of(FakeCache()).get("/evicpress/")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[name])
    assert response.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", response.text)
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=|\bstyle=|\son\w+=\"", response.text)


def test_the_path_without_a_slash_leads_to_the_page_by_a_relative_path() -> None:
    response = client_of(FakeCache()).get("/evicpress", follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (307, "evicpress/")


@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")  # SGLang's own refusal
def test_the_page_has_no_figures_and_needs_no_admin_key_and_its_events_do() -> None:
    client = client_of(FakeCache(), admin_api_key="root")
    assert client.get("/evicpress/").status_code == 200
    assert client.get("/evicpress/events").status_code == client.get("/evicpress/outline").status_code == 401
    for path, level in (("/evicpress/", AuthLevel.NORMAL), ("/evicpress/events", AuthLevel.ADMIN_OPTIONAL)):
        scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": []}
        assert _get_auth_level_from_app_and_scope(client.app, scope) is level
    assert client_of(FakeCache(), api_key="user").get("/evicpress/").status_code == 401


def test_a_wrong_path_is_told_of_the_page() -> None:
    reason = reason_of(client_of(FakeCache()).get("/evicpress/forest"))
    assert "GET /evicpress/, GET /evicpress/v1/events, GET /evicpress/v1/tree" in reason


# ---- events


class Told:
    """A scheduler with ``num_decisions`` so far; ``asked`` is what it was asked for."""

    def __init__(self, num_decisions: int = 0) -> None:
        self.num_decisions = num_decisions
        self.asked: list[Json] = []

    async def call(self, op: str, arguments: Json) -> EvicPressReqOutput:
        assert op == "news"
        self.asked.append(arguments)
        since, limit = int(str(arguments["since"])), int(str(arguments["limit"]))
        numbers = range(since + 1, min(self.num_decisions, since + limit) + 1)
        last = numbers[-1] if numbers else self.num_decisions
        entries = [{"number": number} for number in numbers]
        news: Json = {"decisions": {"num_decisions": self.num_decisions, "entries": entries, "last": last}}
        if arguments.get("figures"):
            news |= {"stats": {"a": 1}, "tiers": {"b": 2}}
        if "requests" in arguments:
            news["requests"] = {"totals": {"requests": 90}}
        return EvicPressReqOutput(rid="", status=200, payload=encode(news))


def read(chunk: bytes) -> list[tuple[str, Any]]:
    """Names and bodies of the events of a chunk."""
    found = re.findall(rb"event: (\w+)\ndata: (.*)\n\n", chunk)
    return [(name.decode(), json.loads(data)) for name, data in found]


def hub_of(server: Told) -> EventHub:
    """Whose reader tells its first tick by itself, and no other."""
    return EventHub(server.call, lambda: False, tick_s=3600.0)


async def take(hub: EventHub, listener: events.Listener, number: int) -> list[tuple[str, Any]]:
    """Events of the next so many ticks, or of those until the listener is left."""
    taken, ticks = list[tuple[str, Any]](), 0
    async with asyncio.timeout(10.0):
        async for chunk in listener.events(hub.is_over):
            taken += read(chunk)
            ticks += 1
            if ticks == number:
                break
    return taken


def numbers_in(told: list[tuple[str, Any]]) -> list[int]:
    return [entry["number"] for name, body in told if name == "decisions" for entry in body["entries"]]


def test_one_reader_asks_for_all_who_listen() -> None:
    async def scenario() -> None:
        server = Told(num_decisions=30)
        hub = hub_of(server)
        listeners = [hub.join() for _ in range(10)]
        seen = [await take(hub, listener, 1) for listener in listeners]
        assert all(one == seen[0] for one in seen)
        assert [name for name, _ in seen[0]] == ["decisions", "stats", "tiers", "requests"]
        assert numbers_in(seen[0]) == list(range(11, 31))  # the last 20 to begin with
        assert server.asked[1:] == [{"since": 10, "limit": MOST_DECISIONS, "figures": True, "requests": 0}]
        for tick in (1, 2, 4):
            await hub.tell(tick)
        assert server.asked[2:] == [
            {"since": 30, "limit": MOST_DECISIONS, "figures": False},
            {"since": 30, "limit": MOST_DECISIONS, "figures": True},
            {"since": 30, "limit": MOST_DECISIONS, "figures": True, "requests": 90 - MOST_REQUESTS},
        ]
        assert [name for name, _ in await take(hub, listeners[0], 2)] == 2 * ["stats", "tiers"] + ["requests"]

    asyncio.run(scenario())


def test_nobody_is_asked_once_nobody_listens() -> None:
    async def scenario() -> None:
        server = Told()
        hub = EventHub(server.call, lambda: False, tick_s=0.0)
        listener = hub.join()
        await take(hub, listener, 1)
        hub.leave(listener)
        for _ in range(20):
            await asyncio.sleep(0)
        num_asked = len(server.asked)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(server.asked) == num_asked and hub.num_listeners == 0

    asyncio.run(scenario())


def test_decisions_come_once_and_of_too_many_the_newest() -> None:
    async def scenario() -> None:
        server = Told()
        hub = hub_of(server)
        listener = hub.join()
        await take(hub, listener, 1)
        for num_decisions in (5, 5, 1_000, 1_000, 1_000):
            server.num_decisions = num_decisions
            await hub.tell(1)
        numbers = numbers_in(await take(hub, listener, 3))
        assert numbers == [*range(1, 6), *range(6, 6 + MOST_DECISIONS), *range(1_001 - MOST_DECISIONS, 1_001)]

    asyncio.run(scenario())


def test_a_slow_listener_is_left_and_the_others_go_on() -> None:
    async def scenario() -> None:
        hub = hub_of(Told())
        slow, quick = hub.join(), hub.join()
        for _ in range(MOST_QUEUED):
            await hub.tell(2)
            await take(hub, quick, 1)
        assert hub.num_listeners == 1 and slow.is_left and not quick.is_left
        assert await take(hub, slow, 1) == []

    asyncio.run(scenario())


def test_more_listeners_than_are_taken_are_told_to_come_back() -> None:
    async def scenario() -> None:
        hub = hub_of(Told())
        for _ in range(MOST_LISTENERS):
            hub.join()
        with pytest.raises(IntrospectionError, match=f"{MOST_LISTENERS} listen already: ask again in 1 s") as caught:
            hub.join()
        assert caught.value.status == 503

    asyncio.run(scenario())


def test_a_late_listener_begins_with_the_latest_figures() -> None:
    async def scenario() -> None:
        hub = hub_of(Told(num_decisions=1))
        await take(hub, hub.join(), 1)
        names = {name for name, _ in await take(hub, hub.join(), 1)}
        assert names == {"decisions", "stats", "tiers", "requests"}

    asyncio.run(scenario())


def test_a_scheduler_that_does_not_answer_is_told_of_and_asked_again() -> None:
    class Mute(Told):
        async def call(self, op: str, arguments: Json) -> EvicPressReqOutput:
            if not self.asked:
                self.asked.append(arguments)
                raise IntrospectionError(504, "the scheduler did not answer")
            return await super().call(op, arguments)

    async def scenario() -> None:
        hub = hub_of(Mute())
        listener = hub.join()
        assert await take(hub, listener, 1) == [("trouble", {"error": {"reason": "the scheduler did not answer"}})]
        await hub.tell(2)
        assert (await take(hub, listener, 1))[0][0] == "stats"

    asyncio.run(scenario())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nobody_waits_for_a_reader_that_has_failed() -> None:
    class Broken(Told):
        async def call(self, op: str, arguments: Json) -> EvicPressReqOutput:
            raise TypeError("not foreseen")

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        hub = hub_of(Broken())
        assert await take(hub, hub.join(), 1) == [] and hub.num_listeners == 0
        assert await take(hub, hub.join(), 1) == [], "another reader was begun, and failed as well"

    asyncio.run(scenario())


def test_streams_end_when_the_server_is_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvicorn waits for the last answer to end: an endless one would keep it for ever."""

    class Uvicorn:
        should_exit = False

        def handle_exit(self) -> None: ...

    server = Uvicorn()
    monkeypatch.setattr(events.signal, "getsignal", lambda number: server.handle_exit)
    app = FastAPI()
    add_routes(app, FakeTokenizerManager(FakeScheduler(FakeCache())))
    server.should_exit = True
    assert is_stopping()
    with TestClient(app) as client:
        assert client.get("/evicpress/events").text == "retry: 2000\n\n"
    assert app.state.evicpress_events.num_listeners == 0
    monkeypatch.setattr(events.signal, "getsignal", lambda number: None)
    assert not is_stopping()


# ---- shared answers


@pytest.fixture
def clock() -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(now_s=100.0)


def test_callers_at_about_the_same_time_share_one_answer(clock: SimpleNamespace) -> None:
    made: list[float] = []

    async def make() -> tuple[int, bytes]:
        made.append(clock.now_s)
        clock.now_s += 1.0  # it takes a second: 20 may pass until the next
        return 200, str(len(made)).encode()

    async def scenario() -> None:
        shared = SharedAnswers(lambda: clock.now_s)
        assert [await shared.get("all", make) for _ in range(10)] == [(200, b"1")] * 10
        clock.now_s = 120.0
        assert await shared.get("all", make) == (200, b"1")
        clock.now_s = 121.5
        assert await shared.get("all", make) == (200, b"2")
        assert await shared.get("others", make) == (200, b"3")
        for name in range(40):
            await shared.get(str(name), make)
        assert len(shared._answers) == SharedAnswers.MOST

    asyncio.run(scenario())


def test_an_error_is_shared_with_nobody(clock: SimpleNamespace) -> None:
    statuses = iter((504, 200))

    async def make() -> tuple[int, bytes]:
        return next(statuses), b"{}"

    async def scenario() -> None:
        shared = SharedAnswers(lambda: clock.now_s)
        assert [(await shared.get("all", make))[0] for _ in range(3)] == [504, 200, 200]

    asyncio.run(scenario())


def test_the_outline_is_read_once_for_all_who_ask() -> None:
    manager = FakeTokenizerManager(FakeScheduler(FakeCache()))
    app = FastAPI()
    add_routes(app, manager)
    client = TestClient(app)
    first = client.get("/evicpress/outline").json()
    assert first == client.get("/evicpress/outline").json()
    assert first["nodes"] == [[1, "exact"], [2, "exact"], [3, "exact"]]
    assert [question.op for question in manager.sent] == ["outline"]
    assert client.get("/evicpress/outline?limit=2").json()["next"] == 2
