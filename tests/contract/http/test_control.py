from __future__ import annotations

import asyncio
import collections
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server as sglang_http_server
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import SignalHandler, TokenizerManager
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils.auth import AuthLevel, _get_auth_level_from_app_and_scope, add_api_key_middleware
from sglang.utils import TypeBasedDispatcher
from tests.unit.introspect.fake_cache import FakeCache

from sglang_evicpress.core import Form
from sglang_evicpress.introspect.call_times import CallTimes
from sglang_evicpress.introspect.operation import MAX_BODY_BYTES, Operation, stable_path
from sglang_evicpress.introspect.operations import OPERATIONS, IntrospectionError, Json
from sglang_evicpress.patches.http import routes
from sglang_evicpress.patches.http import start as http_start
from sglang_evicpress.patches.http.access import AccessRules
from sglang_evicpress.patches.http.profile_writer import ProfileFile
from sglang_evicpress.patches.http.replies import json_response
from sglang_evicpress.patches.http.routes import MAX_QUEUED_CALLS, SchedulerCalls, add_routes
from sglang_evicpress.patches.kv_flags import DEPENDENT_FLAGS
from sglang_evicpress.patches.scheduler import queries, queue_limit, shutdown
from sglang_evicpress.patches.scheduler.messages import EvicPressReqInput, EvicPressReqOutput
from sglang_evicpress.patches.scheduler.queue_limit import RetryAfter
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.running_stats import RunningStats
from sglang_evicpress.quality.store import ProfileStore
from sglang_evicpress.threads import WatchedThread

pytestmark = pytest.mark.sglang

KEYDIFF = {"form": "keydiff@0.5"}
TREE = FakeCache().describe_tree()
OPEN = ("stats", "tiers")  # totals only
ADMIN_RULES = AccessRules(has_admin_key=True)


class FakeScheduler:
    def __init__(self, cache: object) -> None:
        self.tree_cache = cache
        self._request_dispatcher = TypeBasedDispatcher([])
        queries._after_init_request_dispatcher(None, self)


class FakeTokenizerManager:
    """Passes messages to a scheduler and back through SGLang's own encoder and decoder, in one process."""

    def __init__(self, scheduler: FakeScheduler | None) -> None:
        self.context_len = 4096
        self._result_dispatcher = TypeBasedDispatcher([])
        self._scheduler = scheduler
        self.sent: list[EvicPressReqInput] = []

    def auto_create_handle_loop(self) -> None:
        pass

    def _dispatch_to_scheduler(self, obj: object) -> None:
        question = io_struct.msgpack_decode(io_struct.msgpack_encode(obj))
        self.sent.append(question)
        if self._scheduler is not None:
            given = self._scheduler._request_dispatcher(question)
            self.deliver(given)

    def deliver(self, given: object) -> None:
        self._result_dispatcher(io_struct.msgpack_decode(io_struct.msgpack_encode(given)))


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> type[HookRegistry]:
    """A clean registry and decoder for one test; SGLang's own come back afterwards."""
    monkeypatch.setattr(HookRegistry, "_hooks", collections.defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(io_struct, "_all_types", io_struct._all_types)
    monkeypatch.setattr(io_struct, "_msgpack_decoder", io_struct._msgpack_decoder)
    io_struct.hook_custom_types(EvicPressReqInput, EvicPressReqOutput)
    return HookRegistry


@pytest.fixture
def manager() -> FakeTokenizerManager:
    return FakeTokenizerManager(FakeScheduler(FakeCache()))


def client_of(cache: object, *given: Any, headers: Any = None, **options: Any) -> TestClient:
    """A client of a server of its own, to whose routes the rest is given."""
    app = FastAPI()
    add_routes(app, FakeTokenizerManager(FakeScheduler(cache)), *given, **options)
    return TestClient(app, headers=headers)


@pytest.fixture
def client(manager: FakeTokenizerManager) -> TestClient:
    app = FastAPI()
    add_routes(app, manager, rules=ADMIN_RULES)
    return TestClient(app)


def reason_of(response: Any) -> str:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["reason"]
    return str(body["error"]["reason"])


# ---- messages


def test_messages_survive_sglangs_encoder_and_decoder() -> None:
    question = EvicPressReqInput(rid="evicpress-3", op="node", payload=b'{"node_id":"1"}')
    given = EvicPressReqOutput(rid="evicpress-3", status=409, payload=b"{}")
    assert io_struct.msgpack_decode(io_struct.msgpack_encode(question)) == question
    assert io_struct.msgpack_decode(io_struct.msgpack_encode(given)) == given


def test_sglangs_own_messages_still_decode() -> None:
    message = io_struct.FlushCacheReqInput()
    assert io_struct.msgpack_decode(io_struct.msgpack_encode(message)) == message


def test_fake_tokenizer_manager_has_the_names_of_the_real_one() -> None:
    for name in ("auto_create_handle_loop", "_dispatch_to_scheduler"):
        assert callable(getattr(TokenizerManager, name))
    assert "_result_dispatcher" in TokenizerManager.init_request_dispatcher.__code__.co_names


# ---- routes


def test_answers_come_back_as_json(client: TestClient) -> None:
    assert client.get("/evicpress/tree").json() == TREE
    assert client.get("/evicpress/nodes/2?tokens=true").json() == {"id": 2, "form": "exact", "tokens": [7, 8, 9]}
    assert client.get("/evicpress/explain/2").json() == {"id": 2, "options": []}
    assert client.get("/evicpress/journal?since=3&limit=5").json() == {"since": 3, "limit": 5}
    made = client.post("/evicpress/nodes/1/compress", json=KEYDIFF).json()
    assert made == {"id": 1, "form": "keydiff@0.5", "freed_slots": 5, "hold_s": 60.0}
    assert client.post("/evicpress/evict", json={"num_slots": 4}).json() == {"freed_slots": 4}
    assert client.get("/evicpress/tiers").json() == {"tiers": ["gpu", "host"]}
    shown = client.get("/evicpress/requests?rid=a&positions=true").json()
    assert shown == {"rid": "a", "positions": True, "offset": 0, "after": 0, "limit": 100}
    assert client.post("/evicpress/flush?tier=host").json() == {"tier": "host"}
    demoted = client.post("/evicpress/nodes/1/demote", json={"tier": "ssd"}).json()
    assert demoted == {"id": 1, "tier": "ssd", "hold_s": 60.0}
    assert client.post("/evicpress/tiers/ssd", json={"dir": "/kv", "gb": 2}).json() == {"dir": "/kv"}
    assert client.post("/evicpress/flush", json={"tier": "ssd"}).json() == {"tier": "ssd"}
    assert client.post("/evicpress/check").json() == {"ok": True, "violations": []}


class ProfiledCache(FakeCache):
    """Has one shadow, 7, and room for no other."""

    def open_shadow(self, tokens: Any, namespace: str | None, may_evict: bool) -> Json:
        if namespace is not None:
            raise ValueError(f"no room for a shadow of {len(tokens)} slots")
        return {"tokens": list(tokens), "may_evict": may_evict}

    def make_shadow_form(self, space_id: int, form: Form) -> Json:
        if space_id != 7:
            raise IntrospectionError(409, f"the shadow is gone: {space_id} was closed")
        return {"shadow": space_id, "form": str(form)}

    drop_shadow_form = make_shadow_form

    def close_shadow(self, space_id: int, adopt: bool) -> Json:
        return {"shadow": space_id, "adopt": adopt}

    def list_profiles(self, after: bytes = b"", limit: int = 200) -> Json:
        return {"profiles": []}

    def show_profile(self, key: bytes) -> Json:
        raise IntrospectionError(404, f"context {key.hex()} has no profile")

    def put_profile(self, profile: Profile, is_fresh: bool) -> Json:
        return {"identity": bytes(16).hex(), "profile": profile.to_json(), "is_fresh": is_fresh}

    def next_profiling_job(self) -> Json:
        return {}

    def note_observed(self, key: bytes, pairs: Any) -> Json:
        return {}

    def note_failed(self, key: bytes) -> Json:
        return {}


PROFILE = Profile(bytes(16), 64, {Form("knorm", 0.5): RunningStats(2.0, 0.5, 0.1)}, "logprob", "0" * 16, 2, 1e9)


def profiled_client(path: Path) -> TestClient:
    return client_of(ProfiledCache(), ProfileFile(str(path)))


def test_shadows_and_profiles_are_reached_by_their_paths(tmp_path: Path) -> None:
    client = profiled_client(tmp_path / "profiles")
    opened = client.post("/evicpress/shadows", json={"token_ids": [1, 2], "extra_key": None, "may_evict": True})
    assert opened.json() == {"tokens": [1, 2], "may_evict": True}
    for what in ("forms", "drop"):
        made = client.post(f"/evicpress/shadows/7/{what}", json={"form": "knorm@0.5"})
        assert made.json() == {"shadow": 7, "form": "knorm@0.5"}
    assert client.post("/evicpress/shadows/7/close", json={"adopt": True}).json() == {"shadow": 7, "adopt": True}
    assert client.get("/evicpress/profiles").json() == {"profiles": []}
    for response, status, words in (
        (client.post("/evicpress/shadows", json={"token_ids": [1], "extra_key": "a"}), 409, "no room for a shadow"),
        (client.post("/evicpress/shadows/8/forms", json={"form": "knorm@0.5"}), 409, "the shadow is gone: 8"),
        (client.post("/evicpress/shadows/x/close"), 400, "shadow_id is 'x'"),
        (client.post("/evicpress/shadows/7/forms", json={"shadow_id": 8, "form": "knorm@0.5"}), 400, "'shadow_id'"),
        (client.post("/evicpress/shadows/7/open"), 404, "is not served"),
        (client.get("/evicpress/profiles/" + "0" * 32), 404, "has no profile"),
        (client.get("/evicpress/profiles/0"), 400, "32 hex digits"),
        (client.post("/evicpress/shadows/7/close", content=b" " * (MAX_BODY_BYTES + 1)), 413, str(MAX_BODY_BYTES)),
    ):
        assert (response.status_code, words in reason_of(response)) == (status, True), reason_of(response)


def test_a_context_may_be_longer_than_other_bodies(tmp_path: Path) -> None:
    tokens = [100_000] * 20_000
    assert len(json.dumps(tokens)) > 2 * MAX_BODY_BYTES
    response = profiled_client(tmp_path / "profiles").post("/evicpress/shadows", json={"token_ids": tokens})
    assert response.json()["tokens"] == tokens


def test_an_operation_with_a_path_is_served_by_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Operation("fake", lambda arguments: lambda cache: {"seen": arguments}, "GET", "/evicpress/fake/{number}")
    monkeypatch.setitem(OPERATIONS, "fake", fake)
    client = client_of(FakeCache(), rules=ADMIN_RULES)
    assert client.get("/evicpress/fake/7").json() == {"seen": {"number": "7"}}
    assert "GET /evicpress/v1/fake/{number}" in reason_of(client.get("/evicpress/no"))


@pytest.mark.parametrize("op", ["profiling_job", "note_observed", "note_failed"])
def test_what_users_asked_is_served_on_no_route(op: str) -> None:
    assert op not in {route.name for route in routes.routes()}


def test_a_profile_is_on_the_disk_before_it_is_answered(tmp_path: Path) -> None:
    client = profiled_client(tmp_path / "profiles")
    response = client.post("/evicpress/profiles", json={"profile": PROFILE.to_json(), "is_fresh": True})
    assert response.status_code == 200 and response.json()["is_fresh"] is True
    store = ProfileStore(tmp_path / "profiles", bytes(16))
    assert store.load() == [PROFILE]


def test_a_profile_that_cannot_be_saved_is_507(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    response = profiled_client(tmp_path / "profiles").post("/evicpress/profiles", json={"profile": PROFILE.to_json()})
    assert response.status_code == 507
    assert reason_of(response).startswith("the profile is used, but was not saved: ")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/evicpress/tree?depth=1", b"", 400, ("'depth'", "accepted are after, limit")),
        ("GET", "/evicpress/nodes/one", b"", 400, ("'one'", "integer")),
        ("GET", "/evicpress/nodes/1?node_id=2", b"", 400, ("'node_id'", "path")),
        ("GET", "/evicpress/nodes/99", b"", 404, ("node 99", "/evicpress/tree")),
        ("GET", "/evicpress/stats", b"", 500, ("RuntimeError", "the pool is on fire")),
        ("POST", "/evicpress/nodes/1/compress", b"{form", 400, ("not JSON",)),
        ("POST", "/evicpress/check", b"[" * 1000 + b"]" * 1000, 400, ("expected a JSON object",)),
        ("POST", "/evicpress/evict", b'{"num_slots": ' + b"[" * 1000 + b"]" * 1000 + b"}", 400, ("num_slots is [[",)),
        ("POST", "/evicpress/nodes/1/compress", b'{"node_id": 2, "form": "knorm@0.5"}', 400, ("'node_id'",)),
        ("POST", "/evicpress/nodes/1/compress?form=knorm@0.5", b"", 400, ("'form'", "JSON body")),
        ("POST", "/evicpress/nodes/2/compress", b'{"form": "knorm@0.5"}', 409, ("node 2", "locked")),
        ("POST", "/evicpress/check", b" " * (MAX_BODY_BYTES + 1), 413, (str(MAX_BODY_BYTES),)),
        ("POST", "/evicpress/flush", b"", 400, ("tier is missing", "gpu, host, ssd")),
        ("POST", "/evicpress/flush?tier=gpu", b'{"tier": "ssd"}', 400, ("'tier'", "JSON body")),
        ("POST", "/evicpress/flush?tier=gpu&when=now", b"", 400, ("'when'",)),
        ("POST", "/evicpress/flush?node_id=1&tier=gpu", b"", 400, ("'node_id'",)),
        ("POST", "/evicpress/nodes/1/demote?tier=host", b"", 400, ("'tier'", "JSON body")),
        ("POST", "/evicpress/nodes/2/demote", b'{"tier": "host"}', 409, ("node 2", "demoted", "locked")),
        ("POST", "/evicpress/tiers/ssd/detach", b"", 409, ("no SSD tier",)),
        ("GET", "/evicpress/tiers/ssd", b"", 404, ("POST /evicpress/v1/tiers/ssd",)),
        ("GET", "/evicpress/forest", b"", 404, ("/evicpress/forest", "GET /evicpress/v1/tree")),
        ("POST", "/evicpress", b"", 404, ("GET /evicpress/v1/tree",)),
        ("GET", "/evicpress/check", b"", 404, ("GET /evicpress/check", "POST /evicpress/v1/check")),
        ("DELETE", "/evicpress/nodes/1", b"", 404, ("DELETE /evicpress/nodes/1",)),
    ],
)
def test_errors_are_json_with_a_reason(
    client: TestClient, method: str, path: str, body: bytes, status: int, words: tuple[str, ...]
) -> None:
    response = client.request(method, path, content=body)
    reason = reason_of(response)
    assert response.status_code == status
    assert [word for word in words if word not in reason] == []


def test_bad_input_never_reaches_the_scheduler(client: TestClient, manager: FakeTokenizerManager) -> None:
    client.get("/evicpress/nodes/one")
    client.post("/evicpress/nodes/1/compress", json={"form": "zip@0.5"})
    assert manager.sent == []


def test_scheduler_with_another_cache_answers_501() -> None:
    response = client_of(SimpleNamespace()).get("/evicpress/tree")
    assert response.status_code == 501
    assert "SimpleNamespace" in reason_of(response)


def test_failing_transport_is_500_with_a_reason() -> None:
    class Unplugged(FakeTokenizerManager):
        def _dispatch_to_scheduler(self, obj: object) -> None:
            raise OSError("socket closed")

    app = FastAPI()
    add_routes(app, Unplugged(None))
    response = TestClient(app).get("/evicpress/tree")
    assert (response.status_code, reason_of(response)) == (500, "tree failed with OSError: socket closed")


def test_adding_routes_again_connects_them_to_the_new_manager(manager: FakeTokenizerManager) -> None:
    app = FastAPI()
    add_routes(app, FakeTokenizerManager(None))
    num_routes = len(app.routes)
    add_routes(app, manager)
    assert len(app.routes) == num_routes
    assert TestClient(app).get("/evicpress/tree").status_code == 200


# ---- deadline and order


def test_silent_scheduler_is_504_with_a_reason() -> None:
    app = FastAPI()
    add_routes(app, FakeTokenizerManager(None), deadline_s=0.01)
    response = TestClient(app).post("/evicpress/check")
    assert response.status_code == 504
    assert reason_of(response).startswith("the scheduler did not answer check within 0.01 s")


def test_late_answer_reaches_nobody_and_the_next_question_its_own_answer() -> None:
    async def scenario() -> None:
        manager = FakeTokenizerManager(None)
        calls = SchedulerCalls(manager, deadline_s=0.01)
        with pytest.raises(IntrospectionError, match="it may still do it"):
            await calls.call("tree", {})
        calls._deadline_s = 30.0
        following = asyncio.create_task(calls.call("stats", {}))
        while len(manager.sent) < 2:
            await asyncio.sleep(0)
        late, current = manager.sent
        manager.deliver(EvicPressReqOutput(rid=late.rid, status=200, payload=b'{"late":1}'))
        manager.deliver(EvicPressReqOutput(rid=current.rid, status=200, payload=b'{"current":1}'))
        assert (await following).payload == b'{"current":1}'

    asyncio.run(scenario())


def test_question_that_never_got_its_turn_is_not_sent() -> None:
    async def scenario() -> None:
        manager = FakeTokenizerManager(None)
        calls = SchedulerCalls(manager, deadline_s=30.0)
        first = asyncio.create_task(calls.call("tree", {}))
        while not manager.sent:
            await asyncio.sleep(0)
        calls._deadline_s = 0.01
        with pytest.raises(IntrospectionError, match="other questions were before") as caught:
            await calls.call("compress", {"node_id": 1, **KEYDIFF})
        assert caught.value.status == 504
        manager.deliver(EvicPressReqOutput(rid=manager.sent[0].rid, status=200, payload=b"{}"))
        assert (await first).status == 200
        assert [question.op for question in manager.sent] == ["tree"]

    asyncio.run(scenario())


def test_abandoned_question_frees_the_turn() -> None:
    async def scenario() -> None:
        manager = FakeTokenizerManager(None)
        calls = SchedulerCalls(manager, deadline_s=30.0)
        first = asyncio.create_task(calls.call("tree", {}))
        while not manager.sent:
            await asyncio.sleep(0)
        first.cancel()
        second = asyncio.create_task(calls.call("stats", {}))
        while len(manager.sent) < 2:
            await asyncio.sleep(0)
        manager.deliver(EvicPressReqOutput(rid=manager.sent[1].rid, status=200, payload=b"{}"))
        assert (await second).status == 200
        assert calls._waiting == {}

    asyncio.run(scenario())


# ---- keys


@pytest.mark.parametrize("route", routes.routes(), ids=lambda route: f"{route.method} {route.path}")
def test_sglang_sees_the_auth_level_of_every_route(client: TestClient, route: Any) -> None:
    for path in (route.path, stable_path(route.path)):
        path = re.sub(r"{\w+}", "1", path)
        scope = {"type": "http", "method": route.method, "path": path, "root_path": "", "headers": []}
        expected = AuthLevel.NORMAL if route.name in OPEN else AuthLevel.ADMIN_OPTIONAL
        assert _get_auth_level_from_app_and_scope(client.app, scope) is expected


@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")  # SGLang's own refusal
@pytest.mark.parametrize(
    ("api_key", "admin_key", "given", "read", "write"),
    [
        (None, "root", None, 401, 401),
        (None, "root", "root", 200, 200),
        ("user", None, None, 401, 401),
        ("user", None, "user", 200, 200),
        ("user", "root", "user", 401, 401),
        ("user", "root", "root", 200, 200),
    ],
)
def test_reads_and_writes_take_the_admin_key_where_there_is_one_and_else_the_api_key(
    manager: FakeTokenizerManager, api_key: str | None, admin_key: str | None, given: str | None, read: int, write: int
) -> None:
    app = FastAPI()
    add_routes(app, manager, rules=AccessRules(has_admin_key=admin_key is not None))
    add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_key)
    headers = {} if given is None else {"Authorization": f"Bearer {given}"}
    client = TestClient(app, headers=headers)
    assert client.get("/evicpress/tree").status_code == read
    assert client.get("/evicpress/explain/1").status_code == read
    assert client.get("/evicpress/journal").status_code == read
    is_user = api_key is None or given == api_key
    assert client.get("/evicpress/tiers").status_code == (200 if is_user else 401)
    assert client.get("/evicpress/nodes/1").status_code == read
    shows_prompts = write if admin_key is not None or write == 401 else 403
    assert client.get("/evicpress/nodes/1?tokens=true").status_code == shows_prompts
    assert client.post("/evicpress/nodes/1/compress", json=KEYDIFF).status_code == write
    assert client.post("/evicpress/check").status_code == write
    assert client.post("/evicpress/evict", json={"num_slots": 1}).status_code == write
    assert client.post("/evicpress/flush?tier=gpu").status_code == write
    assert client.post("/evicpress/nodes/1/demote", json={"tier": "ssd"}).status_code == write
    assert client.post("/evicpress/tiers/ssd", json={"dir": "/kv", "gb": 1}).status_code == shows_prompts
    assert client.post("/evicpress/tiers/ssd/detach").status_code == (
        409 if write == 200 and shows_prompts == 403 else write
    )


@pytest.mark.parametrize(
    ("rules", "peer", "headers", "is_operator"),
    [
        (AccessRules(), "127.0.0.1", {}, True),
        (AccessRules(), "::1", {}, True),
        (AccessRules(host="::1"), "::ffff:127.0.0.9", {}, True),
        (AccessRules(host="localhost"), "127.0.0.1", {}, True),
        (AccessRules(), "10.0.0.7", {}, False),
        (AccessRules(), "127.0.0.1", {"X-Forwarded-For": "10.0.0.7"}, False),
        (AccessRules(), "127.0.0.1", {"Via": "1.1 proxy"}, False),
        (AccessRules(), "127.0.0.1", {"Origin": "https://a-page.example"}, False),
        (AccessRules(host="worker3"), "127.0.0.1", {}, False),
        (AccessRules(host="0.0.0.0"), "127.0.0.1", {}, False),
        (AccessRules(host="::"), "::1", {}, False),
        (AccessRules(host="10.0.0.1"), "127.0.0.1", {}, False),
        (AccessRules(has_admin_key=True, host="0.0.0.0"), "10.0.0.7", {}, True),  # the middleware has asked for the key
    ],
)
def test_without_an_admin_key_operators_are_users_of_this_machine(
    manager: FakeTokenizerManager, rules: AccessRules, peer: str, headers: dict[str, str], is_operator: bool
) -> None:
    app = FastAPI()
    add_routes(app, manager, rules=rules)
    client = TestClient(app, client=(peer, 50_000), headers=headers)
    response = client.post("/evicpress/nodes/1/compress", json=KEYDIFF)
    assert response.status_code == (200 if is_operator else 403)
    if not is_operator:
        assert "--admin-api-key" in reason_of(response)
    assert client.get("/evicpress/tree").status_code == client.get("/evicpress/stats").status_code - 300 == 200
    shown = client.get("/evicpress/nodes/1?tokens=true")
    assert shown.status_code == (200 if rules.has_admin_key else 403)
    if not rules.has_admin_key:
        assert "--admin-api-key" in reason_of(shown)


def test_a_prompt_is_asked_for_whatever_the_flag_is_written_as(manager: FakeTokenizerManager) -> None:
    app = FastAPI()
    add_routes(app, manager)
    client = TestClient(app)
    for written in ("true", "1"):
        assert client.get(f"/evicpress/nodes/1?tokens={written}").status_code == 403
    assert client.get("/evicpress/nodes/1?tokens=false").status_code == 200
    assert [question.op for question in manager.sent] == ["node"]


# ---- long answers


class LongCache(FakeCache):
    """500 nodes in a row, 1000 decisions and 450 profiles, described a page at a time."""

    def describe_tree(self, after: int = 0, limit: int = 100) -> Json:
        ids = [node_id for node_id in range(1, 501) if node_id > after][: min(limit, 100)]
        nodes = sorted(({"id": node_id, "start": 500 - node_id} for node_id in ids), key=lambda node: node["start"])
        return {"num_nodes": 500, "nodes": nodes, "next": ids[-1] if ids and ids[-1] < 500 else None}

    def read_journal(self, since: int, limit: int) -> Json:
        numbers = range(since + 1, min(1000, since + min(limit, 200)) + 1)
        last = numbers[-1] if numbers else 1000
        entries = [{"number": number} for number in numbers]
        return {"entries": entries, "last": last, "next": None if last == 1000 else last}


def test_a_long_tree_is_read_page_by_page_and_parents_come_first() -> None:
    manager = FakeTokenizerManager(FakeScheduler(LongCache()))
    app = FastAPI()
    add_routes(app, manager)
    client = TestClient(app)
    tree = client.get("/evicpress/tree").json()
    assert [node["id"] for node in tree["nodes"]] == list(range(500, 0, -1))
    assert tree["next"] is None and len(manager.sent) == 5
    some = client.get("/evicpress/tree?limit=150").json()
    assert {node["id"] for node in some["nodes"]} == set(range(1, 151)) and some["next"] == 150
    rest = client.get(f"/evicpress/tree?after={some['next']}").json()
    assert {node["id"] for node in rest["nodes"]} == set(range(151, 501)) and rest["next"] is None


def test_a_long_journal_is_read_up_to_the_limit() -> None:
    client = client_of(LongCache())
    assert len(client.get("/evicpress/journal").json()["entries"]) == 100
    found = client.get("/evicpress/journal?limit=450").json()
    assert [entry["number"] for entry in found["entries"]] == list(range(1, 451)) and found["last"] == 450
    found = client.get("/evicpress/journal?since=900&limit=450").json()
    assert (len(found["entries"]), found["last"]) == (100, 1000)


def test_the_positions_of_a_request_are_put_together_from_pages() -> None:
    class DroppingCache(FakeCache):
        """A row [2, 3] and a traced pass that left [4], given four values at a time."""

        def describe_requests(self, rid: str | None, *, positions: bool = False, offset: int = 0, **_: Any) -> Json:
            end = min(offset + 4, 10)
            shown = {
                "rid": rid, "positions_shape": [2, 3], "num_values": 10,
                "trace": [{"positions_shape": [4]}] if offset == 0 else None,
                "values": list(range(offset, end)), "next_offset": end if end < 10 else None,
            }  # fmt: skip
            return {"requests": [shown], "totals": {}}

    client = client_of(DroppingCache())
    (shown,) = client.get("/evicpress/requests?rid=a&positions=true").json()["requests"]
    assert shown["positions"] == [[0, 1, 2], [3, 4, 5]] and shown["trace"] == [{"positions": [6, 7, 8, 9]}]
    (page,) = client.get("/evicpress/requests?rid=a&positions=true&offset=4").json()["requests"]
    assert page["values"] == [4, 5, 6, 7] and page["next_offset"] == 8


def test_few_long_answers_are_put_together_at_a_time() -> None:
    async def scenario() -> None:
        calls = SchedulerCalls(FakeTokenizerManager(None), deadline_s=30.0)
        inside, may_end = 0, asyncio.Event()

        async def hold() -> None:
            nonlocal inside
            async with calls.long_answer():
                inside += 1
                await may_end.wait()

        held = [asyncio.create_task(hold()) for _ in range(MAX_QUEUED_CALLS)]
        await asyncio.sleep(0.01)
        assert inside == routes.MAX_LONG_ANSWERS
        with pytest.raises(IntrospectionError, match="long answers are wanted already"):
            async with calls.long_answer():
                pytest.fail("there is no room")
        may_end.set()
        await asyncio.gather(*held)
        assert inside == MAX_QUEUED_CALLS

    asyncio.run(scenario())


def test_too_many_callers_are_told_when_to_come_back() -> None:
    async def scenario() -> None:
        calls = SchedulerCalls(FakeTokenizerManager(None), deadline_s=30.0)
        waiting = [asyncio.create_task(calls.call("stats", {})) for _ in range(MAX_QUEUED_CALLS)]
        await asyncio.sleep(0)
        with pytest.raises(IntrospectionError, match="ask again in 1 s") as caught:
            await calls.call("stats", {})
        assert caught.value.status == 503
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(TimeoutError):  # there is room again
            await asyncio.wait_for(calls.call("stats", {}), 0.01)

    asyncio.run(scenario())
    response = json_response(503, b"{}")
    assert response.headers["retry-after"] == "1"


def test_a_body_that_trickles_in_is_given_up(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "BODY_DEADLINE_S", 0.05)

    async def scenario() -> None:
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.sleep(0.02)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/evicpress/check", "raw_path": b"/evicpress/check",
            "query_string": b"", "headers": [], "client": ("127.0.0.1", 1), "server": ("s", 1), "scheme": "http",
            "root_path": "", "http_version": "1.1",
        }  # fmt: skip
        await client.app(scope, receive, send)
        assert sent[0]["status"] == 408

    asyncio.run(scenario())


def test_a_context_longer_than_the_model_takes_is_413() -> None:
    client = client_of(ProfiledCache(), max_context_bytes=1000)
    response = client.post("/evicpress/shadows", json={"token_ids": [100_000] * 200})
    assert (response.status_code, "1000 bytes" in reason_of(response)) == (413, True)


# ---- threads and times


def test_stats_show_the_threads_of_both_processes_and_what_calls_cost() -> None:
    class CountingCache(FakeCache):
        def describe_stats(self) -> Json:
            return {"threads": [{"name": "evicpress-copy-0"}]}

    client = client_of(CountingCache())
    routes.watch_threads(client.app, (WatchedThread("evicpress-profiler", lambda: None),))
    client.get("/evicpress/nodes/1")
    client.get("/evicpress/nodes/99")
    stats = client.get("/evicpress/stats").json()
    assert [thread["name"] for thread in stats["threads"]] == ["evicpress-copy-0", "evicpress-profiler"]
    assert stats["threads"][1]["state"] == "new"
    spent = stats["calls"]["node"]
    assert spent["count"] == 2 and 0.0 < spent["max_cpu_ms"] <= spent["cpu_ms"]
    assert client.get("/evicpress/stats").json()["calls"]["stats"]["count"] == 1  # but for itself


# ---- hooks


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whose schedulers were asked to stop, instead of asking them; tiers where the server arguments say so."""
    stopped: list[Any] = []
    monkeypatch.setattr(shutdown, "stop_schedulers", stopped.append)
    monkeypatch.setattr(shutdown, "has_tiers", lambda server_args: server_args.has_tiers)
    monkeypatch.setattr(shutdown, "exit_on_sigterm", lambda: stopped.append("on SIGTERM too"))
    return stopped


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, stops: list[Any]) -> Iterator[list[Any]]:
    """SGLang's real app, whose server start is replaced by a note of its arguments; as it was afterwards."""
    starts: list[Any] = []
    monkeypatch.setattr(Engine, "shutdown", lambda self: starts.append((self, "engine ended")))
    monkeypatch.setattr(
        SignalHandler, "running_phase_sigquit_handler", lambda self, *_: starts.append((self, "killed"))
    )
    monkeypatch.setattr(TokenizerManager, "_handle_abort_finish_reason", TokenizerManager._handle_abort_finish_reason)

    def start(server_args: Any, tokenizer_manager: Any, *_: Any, **__: Any) -> None:
        starts.append((server_args, tokenizer_manager))

    monkeypatch.setattr(sglang_http_server, "_setup_and_run_http_server", start)
    app = sglang_http_server.app
    routes = list(app.router.routes)
    yield starts
    app.router.routes[:] = routes
    if hasattr(app.state, "evicpress"):
        del app.state.evicpress


def evicpress_paths() -> set[str]:
    paths = {getattr(route, "path", "") for route in sglang_http_server.app.routes}
    return {path for path in paths if path.startswith("/evicpress")}


def launch(
    kv_policy: str | None,
    manager: FakeTokenizerManager,
    *,
    has_tiers: bool = False,
    online_profiling: bool = False,
    max_queue_s: float | None = None,
) -> None:
    given = {"kv_disable_online_profiling": None if online_profiling else True, "kv_max_queue_seconds": max_queue_s}
    flags = {**dict.fromkeys(DEPENDENT_FLAGS), **given}
    arguments = SimpleNamespace(kv_policy=kv_policy, has_tiers=has_tiers, admin_api_key=None, host="127.0.0.1", **flags)
    sglang_http_server._setup_and_run_http_server(arguments, manager)


def test_real_app_has_no_routes_without_the_flag(started: list[Any], manager: FakeTokenizerManager) -> None:
    launch(None, manager)
    assert evicpress_paths() == set()
    assert len(started) == 1


def test_real_app_serves_the_routes_with_the_flag(
    started: list[Any], manager: FakeTokenizerManager, registry: type[HookRegistry]
) -> None:
    http_start.install_frontend(registry, HookType)
    http_start.install_frontend(registry, HookType)
    assert evicpress_paths() == set()
    launch("evicpress", manager)
    assert evicpress_paths() >= {route.path for route in routes.routes()}
    assert [given for _, given in started] == [manager]
    scope = {"type": "http", "method": "POST", "path": "/evicpress/check", "root_path": "", "headers": []}
    assert _get_auth_level_from_app_and_scope(sglang_http_server.app, scope) is AuthLevel.ADMIN_OPTIONAL
    client = TestClient(sglang_http_server.app)  # no lifespan: nothing of SGLang starts
    assert client.get("/evicpress/tree").json() == TREE
    assert reason_of(client.get("/evicpress/forest")).startswith("GET /evicpress/forest is not served")


def test_server_without_a_policy_stays_stock_after_one_with_it_was_configured(
    started: list[Any], manager: FakeTokenizerManager, registry: type[HookRegistry]
) -> None:
    http_start.install_frontend(registry, HookType)
    launch(None, manager)
    assert evicpress_paths() == set()
    assert len(started) == 1


def test_frontend_hook_is_applied_beside_another_plugins(
    started: list[Any], manager: FakeTokenizerManager, registry: type[HookRegistry]
) -> None:
    seen: list[str] = []
    target = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
    registry.register(target, lambda *_, **__: seen.append("other"), HookType.BEFORE)
    registry.apply_hooks()
    http_start.install_frontend(registry, HookType)
    registry.apply_hooks()
    launch("evicpress", manager)
    assert seen == ["other"]
    assert len(started) == 1
    assert "/evicpress/tree" in evicpress_paths()


def test_the_profiler_runs_beside_a_server_that_records(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], manager: FakeTokenizerManager, registry: type[HookRegistry]
) -> None:
    class Profiler:
        def __init__(self, tokenizer_manager: object, calls: object, file: object) -> None:
            assert (tokenizer_manager, type(calls), type(file)) == (manager, SchedulerCalls, ProfileFile)

        thread = WatchedThread("evicpress-profiler", lambda: None)

        def start(self) -> None:
            started.append("profiler started")

        def stop(self) -> None:
            started.append("profiler stopped")

    monkeypatch.setattr(http_start, "OnlineProfiler", Profiler)
    http_start.install_frontend(registry, HookType)
    launch("evicpress", manager)
    assert [given for _, given in started] == [manager]
    started.clear()
    launch("evicpress", manager, online_profiling=True)
    assert (started[0], started[2], len(started)) == ("profiler started", "profiler stopped", 3)
    started.clear()
    launch("lru", manager, online_profiling=True)
    assert [given for _, given in started] == [manager]


@pytest.mark.parametrize(("max_queue_s", "num_added"), [(None, 0), (2.0, 1)])
def test_answers_are_watched_for_refusals_where_the_queue_is_limited(
    started: list[Any],
    manager: FakeTokenizerManager,
    registry: type[HookRegistry],
    monkeypatch: pytest.MonkeyPatch,
    max_queue_s: float | None,
    num_added: int,
) -> None:
    app = sglang_http_server.app
    monkeypatch.setattr(app, "user_middleware", list(app.user_middleware))
    monkeypatch.setattr(app, "middleware_stack", None)  # as before the first request
    http_start.install_frontend(registry, HookType)
    launch("evicpress", manager, max_queue_s=max_queue_s)
    assert [each.cls for each in app.user_middleware].count(RetryAfter) == num_added
    assert queue_limit.ABORTED in registry._patched


def test_schedulers_are_asked_to_stop_when_the_server_is_done(
    started: list[Any], stops: list[Any], manager: FakeTokenizerManager, registry: type[HookRegistry]
) -> None:
    http_start.install_frontend(registry, HookType)
    launch(None, manager)
    assert stops == []
    launch("evicpress", manager)
    assert stops == [manager]
    launch("evicpress", manager, has_tiers=True)
    assert stops == [manager, "on SIGTERM too", manager]
    assert len(started) == 3


def test_schedulers_are_asked_to_stop_when_the_server_fails(
    monkeypatch: pytest.MonkeyPatch,
    started: list[Any],
    stops: list[Any],
    manager: FakeTokenizerManager,
    registry: type[HookRegistry],
) -> None:
    def interrupted(*_: Any) -> None:
        assert stops == []
        raise KeyboardInterrupt

    monkeypatch.setattr(sglang_http_server, "_setup_and_run_http_server", interrupted)
    http_start.install_frontend(registry, HookType)
    with pytest.raises(KeyboardInterrupt):
        launch("evicpress", manager)
    assert stops == [manager]


def test_schedulers_are_asked_to_stop_before_sglang_kills_them(
    started: list[Any], stops: list[Any], registry: type[HookRegistry]
) -> None:
    """Ctrl-C ends the detokenizer, which looks like a crash to the main process."""
    http_start.install_frontend(registry, HookType)
    signals = SignalHandler("its tokenizer manager")
    signals.running_phase_sigquit_handler()
    assert (stops, started) == (["its tokenizer manager"], [(signals, "killed")])
    engine = Engine.__new__(Engine)
    engine.tokenizer_manager = "the engine's"
    engine.shutdown()
    assert (stops[1:], started[1:]) == (["the engine's"], [(engine, "engine ended")])


@pytest.fixture
def own_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is hooked of SGLang's scheduler is as it was after the test."""
    for name in ("init_request_dispatcher", "__init__", "run_event_loop"):
        monkeypatch.setattr(Scheduler, name, getattr(Scheduler, name))


def test_scheduler_answers_after_its_dispatcher_is_built(own_scheduler: None, registry: type[HookRegistry]) -> None:
    queries.install(registry, HookType)
    queries.install(registry, HookType)
    registry.apply_hooks()
    scheduler = MagicMock()
    scheduler.tree_cache = FakeCache()
    Scheduler.init_request_dispatcher(scheduler)
    given = scheduler._request_dispatcher(EvicPressReqInput(rid="evicpress-0", op="node", payload=b'{"node_id":1}'))
    assert (given.rid, given.status) == ("evicpress-0", 200)
    assert json.loads(given.payload) == {"id": 1, "form": "exact"}
    own = scheduler._request_dispatcher._mapping
    assert io_struct.FlushCacheReqInput in own
    assert list(own).count(EvicPressReqInput) == 1


@pytest.mark.parametrize("is_ours", [True, False])
def test_only_our_cache_is_shown_its_scheduler(
    own_scheduler: None, monkeypatch: pytest.MonkeyPatch, registry: type[HookRegistry], is_ours: bool
) -> None:
    shown: list[object] = []

    def build(scheduler: Any, server_args: object, *, gpu_id: int) -> None:
        scheduler.tree_cache = SimpleNamespace(attach_scheduler=shown.append) if is_ours else SimpleNamespace()

    monkeypatch.setattr(Scheduler, "__init__", build)
    queries.install(registry, HookType)
    registry.apply_hooks()
    scheduler = Scheduler.__new__(Scheduler)
    Scheduler.__init__(scheduler, object(), gpu_id=0)
    assert shown == [scheduler] * is_ours


def test_the_cache_is_closed_when_its_scheduler_ends(
    own_scheduler: None, monkeypatch: pytest.MonkeyPatch, registry: type[HookRegistry]
) -> None:
    done: list[str] = []
    monkeypatch.setattr(Scheduler, "run_event_loop", lambda scheduler: done.append("loop"))
    queries.install(registry, HookType)
    registry.apply_hooks()
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.tree_cache = SimpleNamespace(close=lambda: done.append("close"))
    scheduler.run_event_loop()
    assert done == ["loop", "close"]


def test_unexpected_exception_leaves_the_scheduler_alive() -> None:
    scheduler = FakeScheduler(FakeCache())
    given = scheduler._request_dispatcher(EvicPressReqInput(rid="evicpress-1", op="stats"))
    assert given.status == 500
    assert queries.reply(scheduler, EvicPressReqInput(rid="evicpress-2", op="tree"), CallTimes()).status == 200
