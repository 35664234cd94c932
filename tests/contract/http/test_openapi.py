"""Published descriptions of the routes, and real answers beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from fastapi import FastAPI
from tests.contract.decode_budget.test_decode_budgets import alike, table
from tests.contract.http.test_control import FakeTokenizerManager, client_of, reason_of, registry
from tests.contract.tiers.test_tiers_model import TierWalk
from tests.unit.introspect.fake_cache import FakeCache

from sglang_evicpress.introspect.openapi import VERSION_HEADER
from sglang_evicpress.introspect.operation import VERSION, stable_path
from sglang_evicpress.patches.http import routes
from sglang_evicpress.patches.http.access import AccessRules
from sglang_evicpress.quality.profile import Profile

pytestmark = pytest.mark.sglang

__all__ = ["registry", "table"]  # fixtures: every test here has messages of ours, and rows with holes

ERRORS = {"400", "401", "500", "503", "504"}


@pytest.fixture(scope="module")
def published() -> dict[str, dict[str, Any]]:
    """Operation Objects by method and path."""
    app = FastAPI()
    routes.add_routes(app, FakeTokenizerManager(None))
    paths = app.openapi()["paths"]
    return {f"{method.upper()} {path}": found for path, methods in paths.items() for method, found in methods.items()}


def validate(published: dict[str, Any], route: str, answer: object) -> None:
    shape = published[route]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator.check_schema(shape)
    found = jsonschema.Draft202012Validator(shape).iter_errors(answer)
    assert [f"{route} at {'.'.join(map(str, one.absolute_path))}: {one.message:.200}" for one in found] == []


def test_every_route_is_published_with_all_that_it_takes(published: dict[str, Any]) -> None:
    others = {"GET /evicpress/", "GET /evicpress/events", "GET /evicpress/v1/events"}
    served = {f"{route.method} {path}" for route in routes.routes() for path in (route.path, stable_path(route.path))}
    assert set(published) == served | others
    for route in routes.routes():
        found = published[f"{route.method} {stable_path(route.path)}"]
        assert found["summary"] == route.text and len(route.text) > 10, route.name
        assert set(found["responses"]) >= {"200", *ERRORS}, route.name
        assert found["responses"]["200"]["description"] == route.text
        names = {one["name"] for one in found["parameters"]}
        if "requestBody" in found:
            names |= set(found["requestBody"]["content"]["application/json"]["schema"]["properties"])
        assert names == {name for argument in route.arguments for name in argument.names}, route.name
        alias = published[f"{route.method} {route.path}"]
        assert {**alias, "operationId": ""} == {**found, "operationId": ""}


def test_answers_of_a_real_cache_are_as_published(
    published: dict[str, Any], opened: Callable[..., TierWalk], monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = opened()
    walk.step(120)
    walk.settle()
    scheduler = walk.cache.scheduler
    monkeypatch.setattr(scheduler, "waiting_queue", [], raising=False)
    monkeypatch.setattr(scheduler, "running_batch", scheduler.last_batch)
    client = client_of(walk.cache, rules=AccessRules(has_admin_key=True))

    def ask(method: str, path: str, route: str = "", body: object = None) -> Any:
        response = client.request(method, f"/evicpress/v1/{path}", json=body)
        assert response.status_code == 200, (path, response.text)
        assert response.headers[VERSION_HEADER] == VERSION
        validate(published, f"{method} /evicpress/v1/{route or path}", response.json())
        return response.json()

    for _ in range(20):  # threads and the walk's clock decide what is where by now
        nodes = ask("GET", "tree")["nodes"]
        leaves = [node for node in nodes if not node["children"] and node["tier"] == "gpu" and not node["lock_ref"]]
        if leaves and len(nodes) > 5 and {node["lineage"] for node in nodes} == {"exact", "lossy"}:
            break
        walk.step(20)
        walk.settle()
    else:
        pytest.fail("no tree with KV of both lineages and a free leaf on the GPU in 520 steps")
    for node in nodes:
        ask("GET", f"nodes/{node['id']}", "nodes/{node_id}")
        ask("GET", f"explain/{node['id']}", "explain/{node_id}")
    asked = {"tree", "node", "explain"}
    identity = ask("GET", "profiles")["identity"]
    assert len(identity) == 32
    profile = Profile.from_json(
        {
            **{"key": "0" * 32, "num_tokens": 64, "forms": {"keydiff@0.5": [2.0, 0.9, 0.1]}, "scorer": "logprob"},
            **{"query_set": "0" * 16, "num_queries": 2, "measured_s": 1.0},
        }
    )
    ask("POST", "profiles", body={"profile": profile.to_json(), "is_fresh": True})
    assert ask("GET", "profiles")["profiles"][0]["key"] == "0" * 32
    ask("GET", "profiles/" + "0" * 32, "profiles/{key}")
    for name in ("outline", "stats", "journal", "tiers", "requests"):
        ask("GET", name)
        asked.add(name)
    asked |= {"profiles", "profile"}
    assert asked == {route.name for route in routes.routes() if route.method == "GET"}, "every GET"
    leaf = leaves[0]
    route = "nodes/{node_id}/demote"
    ask("POST", f"nodes/{leaf['id']}/demote", route, {"tier": "host", "hold_seconds": 1})
    ask("POST", "evict", body={"num_slots": 1})
    ask("POST", "flush", body={"tier": "host"})
    ask("POST", "check", body={})


def test_requests_with_a_budget_are_as_published(published: dict[str, Any]) -> None:
    walk = alike(1, "paged", "knorm", 3)
    for each in walk.running:
        each.to_finish = "done"
    walk.finish()
    client = client_of(walk.cache)
    for query in ("", "?limit=2", "?cursor=1", "?rid=r1"):
        found = client.get(f"/evicpress/v1/requests{query}").json()
        assert found["requests"], query
        validate(published, "GET /evicpress/v1/requests", found)


def test_errors_are_as_published(published: dict[str, Any]) -> None:
    client = client_of(FakeCache())
    for path, route in (("nodes/99", "nodes/{node_id}"), ("tree?limit=0", "tree"), ("stats", "stats")):
        response = client.get(f"/evicpress/v1/{path}")
        found = published[f"GET /evicpress/v1/{route}"]["responses"][str(response.status_code)]
        jsonschema.validate(response.json(), found["content"]["application/json"]["schema"])
        assert response.headers[VERSION_HEADER] == VERSION


@pytest.mark.parametrize("path", ["tree", "outline", "nodes/1", "explain/1", "journal", "tiers", "requests"])
def test_a_path_without_a_version_is_the_same_route(path: str) -> None:
    client = client_of(FakeCache())
    for query in ("", "?cursor=1&after=1", "?limit=0"):
        answers = [client.get(f"/evicpress/{version}{path}{query}") for version in ("", "v1/")]
        assert answers[0].content == answers[1].content and answers[0].status_code == answers[1].status_code
    assert reason_of(client.get(f"/evicpress/v2/{path}")).startswith(f"GET /evicpress/v2/{path} is not served")


def test_a_listing_is_read_by_its_cursor_whatever_it_is_called() -> None:
    class Long(FakeCache):
        def read_journal(self, since: int, limit: int) -> dict[str, object]:
            numbers = range(since + 1, min(7, since + limit) + 1)
            return {"entries": list(numbers), "next": numbers[-1] if numbers and numbers[-1] < 7 else None}

    client = client_of(Long())
    for name in ("cursor", "since"):
        read, following = [], 0
        while following is not None:
            page = client.get(f"/evicpress/v1/journal?{name}={following}&limit=3").json()
            read += page["entries"]
            following = page["next"]
        assert read == [1, 2, 3, 4, 5, 6, 7]
    reason = reason_of(client.get("/evicpress/v1/journal?cursor=1&since=1"))
    assert reason == "since and cursor are two names of one argument: expected one of them"


def test_what_a_listing_loses_between_its_pages_is_counted() -> None:
    """The scheduler gives pages of three; each time two entries were overwritten meanwhile."""

    class Turning(FakeCache):
        def read_journal(self, since: int, limit: int) -> dict[str, object]:
            first = since + 1 + (2 if since else 0)
            numbers = list(range(first, first + min(3, limit)))
            return {"entries": numbers, "next": numbers[-1], "num_lost": first - since - 1}

    page = client_of(Turning()).get("/evicpress/v1/journal?limit=9").json()
    assert page["entries"] == [1, 2, 3, 6, 7, 8, 11, 12, 13] and page["num_lost"] == 4
