"""A real server shows an operator its series, its page and its events, and ends while somebody listens."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import jsonschema
import psutil
import pytest
from evicbench.testbed.server import ADMIN_KEY, GUESSED, Server

from sglang_evicpress.introspect.series import PREFIX

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--kv-policy", "evicpress", *GUESSED, "--enable-metrics", "--max-total-tokens", "2000") as running:
        rng = random.Random(1)
        for _ in range(8):
            running.generate([rng.randrange(6, 400) for _ in range(400)], 2)
        yield running


@contextmanager
def listening(server: Server) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    with closing(connection):
        connection.request("GET", "/evicpress/events", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        with closing(connection.getresponse()) as response:
            yield response


def next_event(response: http.client.HTTPResponse) -> tuple[str, Any]:
    name = ""
    while True:
        line = response.readline().decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            return name, json.loads(line.removeprefix("data: "))


def test_series_and_stats_tell_the_same(server: Server) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:  # the last requests are published within some seconds
        _, text = server.request("GET", "/metrics")
        published = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if PREFIX in line[:20]}
        if published.get(f"{PREFIX}prompt_tokens_total", 0.0) >= 8 * 400:  # a request of SGLang's own is among them
            break
        assert time.monotonic() < deadline_s, published
        time.sleep(0.2)
    stats = server.get("/evicpress/stats")
    assert published[f"{PREFIX}requests_total"] == stats["admission"]["requests"] >= 8
    assert published[f"{PREFIX}nodes"] == stats["num_nodes"] > 0
    assert published[f"{PREFIX}freed_slots_total"] == stats["decisions"]["freed_slots"] > 0
    assert "sglang:num_running_reqs" in text


def test_the_page_and_its_events_are_served(server: Server) -> None:
    status, page = server.request("GET", "/evicpress/")
    assert status == 200 and page.startswith("<!doctype html>")
    with listening(server) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        told = dict(next_event(response) for _ in range(4))
    assert set(told) == {"decisions", "stats", "tiers", "requests"}
    assert told["decisions"]["entries"][-1]["number"] == told["decisions"]["num_decisions"]
    assert told["stats"]["first_tokens"]["num_seen"] >= 8
    outline = server.get("/evicpress/outline")
    ids = [node["id"] for node in server.get("/evicpress/tree")["nodes"]]
    assert sorted(row[0] for row in outline["nodes"]) == sorted(ids)


def test_answers_are_as_the_server_publishes_them(server: Server) -> None:
    paths = {path: found for path, found in server.get("/openapi.json")["paths"].items() if "/evicpress/v1/" in path}
    assert len(paths) > 15 and all(each["summary"] for found in paths.values() for each in found.values())
    node_id = server.get("/evicpress/v1/tree?limit=1")["nodes"][0]["id"]
    num_seen = 0
    for path, found in paths.items():
        content = found.get("get", {"responses": {"200": {"content": {}}}})["responses"]["200"]["content"]
        if "application/json" in content and "{key}" not in path:
            answer = server.get(path.replace("{node_id}", str(node_id)))
            jsonschema.validate(answer, content["application/json"]["schema"])
            num_seen += 1
    assert num_seen == 9


def test_a_server_ends_while_somebody_listens(server: Server) -> None:
    process = psutil.Process(server.pid)
    with listening(server) as response:
        assert next_event(response)[0]
        os.kill(server.pid, signal.SIGINT)
        process.wait(DEADLINE_S)  # an endless answer would keep it for ever
