"""``kv_quality: "exact"`` on the real server: answers as without compression, and usage that agrees with the tree."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from evicbench.policy.exact_requests import EXACT, Answer, Ids, answer_all, make_prompts, play, server_arguments
from evicbench.testbed.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]

NUM_ANSWERS = 100
PROMPTS = make_prompts()
DOCUMENT = list(range(6, 206))
PROMPT_OF = {
    "/v1/completions": {"prompt": [*DOCUMENT, 5]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "k1 k2 f7 " * 50}]},
}


@pytest.fixture(scope="module")
def stock() -> dict[Ids, Answer]:
    return answer_all(PROMPTS)


SALT, SMALL_SALT = "s-1", "s-2"
LIMIT_BYTES = 120 * 3072  # of slots of the small model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.json"
    small = {"cache_salt": SMALL_SALT, "gpu_gb": LIMIT_BYTES / 1e9}
    tenants.write_text(json.dumps({"acme": {"cache_salt": SALT, "kv_quality": 0.95}, "small": small}))
    with Server(*server_arguments(), "--enable-cache-report", "--kv-tenants", str(tenants)) as running:
        yield running


@pytest.fixture
def lossy(server: Server) -> Mapping[str, Any]:
    """The node of a document that was cached, then compressed."""
    server.flush()
    server.generate(DOCUMENT, 1)
    return compress_largest(server)


def largest_node(server: Server) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = server.get("/evicpress/tree")["nodes"]
    return max(nodes, key=lambda node: node["num_tokens"])


def compress_largest(server: Server) -> dict[str, Any]:
    node = largest_node(server)
    server.post(f"/evicpress/nodes/{node['id']}/compress", {"form": "keydiff@0.5"})
    return node


def usage(server: Server, body: Mapping[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    answer: dict[str, Any] = server.post(path, {"model": "default", "temperature": 0, "max_tokens": 2, **body})
    return answer["usage"]


def test_answers_under_pressure_equal_those_of_a_server_without_compression(
    server: Server, stock: dict[Ids, Answer]
) -> None:
    found = play(server, PROMPTS, stock, NUM_ANSWERS)
    assert found.problems == []
    assert found.num_exact == NUM_ANSWERS
    assert found.num_met >= 10 and found.num_reused >= 10  # else it shows nothing
    assert found.num_changed >= 10  # lossy KV would have been seen


def test_stock_answers_say_nothing(stock: dict[Ids, Answer]) -> None:
    assert {tuple(answer.served) for answer in stock.values()} == {()}


def test_usage_agrees_with_the_tree_before_and_after_exact_kv_replaces_the_lossy(
    server: Server, lossy: Mapping[str, Any]
) -> None:
    num_tokens = len(DOCUMENT)
    assert lossy["num_tokens"] in (num_tokens, num_tokens + 1)  # with the answer, where SGLang computed its KV
    with_question = {"prompt": [*DOCUMENT, 5]}
    answer = usage(server, with_question)
    quality = answer["kv_cache"].pop("min_quality")
    assert 0.8 < quality < 1.0
    counts = {"exact_tokens": 0, "lossy_tokens": num_tokens, "tiers": {"gpu": num_tokens}}
    assert answer["kv_cache"] == counts and answer["prompt_tokens_details"]["cached_tokens"] == num_tokens
    assert usage(server, {**with_question, **EXACT})["kv_cache"] == {
        "exact_tokens": 0,
        "lossy_tokens": 0,
        "min_quality": 1.0,
        "tiers": {},
    }
    assert largest_node(server)["lineage"] == "exact"
    counts = {"exact_tokens": num_tokens, "lossy_tokens": 0, "min_quality": 1.0, "tiers": {"gpu": num_tokens}}
    assert usage(server, {**with_question, **EXACT})["kv_cache"] == counts
    sampling = {"custom_params": EXACT, "max_new_tokens": 60, "ignore_eos": True}
    info = server.generate([*DOCUMENT, 5], 60, sampling_params=sampling)["meta_info"]
    assert info["kv_cache"] == counts and info["cached_tokens"] == num_tokens


@pytest.mark.parametrize("body", [EXACT, {"custom_params": EXACT}, {**EXACT, "n": 2}, {**EXACT, "stream": True}])
@pytest.mark.parametrize("path", PROMPT_OF)
def test_every_way_of_asking_reaches_the_scheduler(server: Server, path: str, body: dict[str, Any]) -> None:
    server.flush()
    usage(server, PROMPT_OF[path], path)
    compress_largest(server)
    before = asked_exact(server)
    ask = stream_usage if body.get("stream") else usage
    assert ask(server, {**PROMPT_OF[path], **body}, path)["kv_cache"]["lossy_tokens"] == 0
    assert asked_exact(server) > before


def asked_exact(server: Server) -> int:
    computed: dict[str, int] = server.get("/evicpress/stats")["admission"]["computed_tokens"]
    return computed.get("asked_exact", 0)


def stream_usage(server: Server, body: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Usage in the last event of a streamed answer."""
    asked = {"model": "default", "max_tokens": 4, "stream_options": {"include_usage": True}, **body}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60.0)
    connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
    events = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    found: dict[str, Any] = json.loads(events[-3].removeprefix("data: "))["usage"]
    return found


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_quality_that_is_not_known_is_refused(server: Server, path: str) -> None:
    status, answer = server.request("POST", path, {"model": "default", "kv_quality": 1.5, "stream": True})
    assert status == 400 and "kv_quality is 1.5: expected 'exact', or a number above 0" in json.dumps(answer)


def test_a_request_is_served_no_less_than_it_asks_for(server: Server, lossy: Mapping[str, Any]) -> None:
    prompt = {"prompt": [*DOCUMENT, 5]}
    quality = usage(server, prompt)["kv_cache"]["min_quality"]
    assert usage(server, {**prompt, "kv_quality": quality - 0.01})["kv_cache"]["lossy_tokens"] == len(DOCUMENT)
    assert usage(server, {**prompt, "kv_quality": quality + 0.01})["kv_cache"]["lossy_tokens"] == 0
    again = usage(server, {**prompt, "kv_quality": quality + 0.01})["kv_cache"]
    assert again["exact_tokens"] == len(DOCUMENT) and again["min_quality"] == 1.0


def test_a_tenant_is_served_no_less_than_its_floor(server: Server) -> None:
    server.flush()
    salted = {"prompt": [*DOCUMENT, 5], "cache_salt": SALT}
    usage(server, salted)
    compress_largest(server)
    assert usage(server, salted)["kv_cache"]["lossy_tokens"] == 0
    assert usage(server, salted)["kv_cache"]["exact_tokens"] == len(DOCUMENT)


def test_a_tenant_that_holds_too_much_is_compressed_and_nobody_else(server: Server) -> None:
    server.flush()
    before = server.get("/evicpress/stats")["decisions"]["by_reason"]
    for salt in (SMALL_SALT, "of nobody"):
        usage(server, {"prompt": [*DOCUMENT, 5], "cache_salt": salt})
    deadline = time.monotonic() + 30.0
    while (held := server.get("/evicpress/stats")["tenants"]["small"])["held_bytes"]["gpu"] > LIMIT_BYTES:
        assert time.monotonic() < deadline, held
        time.sleep(0.1)
    assert held["limit_bytes"] == {"gpu": LIMIT_BYTES} and held["held_bytes"]["gpu"] > 0
    decided = server.get("/evicpress/stats")["decisions"]["by_reason"]
    assert decided.pop("compress")["over_limit"] == 1 and "over_limit" not in before.get("compress", {})
    assert not any("over_limit" in reasons for reasons in decided.values())
    small, others = (
        usage(server, {"prompt": [*DOCUMENT, 6], "cache_salt": salt}) for salt in (SMALL_SALT, "of nobody")
    )
    assert small["kv_cache"]["lossy_tokens"] == len(DOCUMENT) == others["kv_cache"]["exact_tokens"]


def test_the_cache_is_whole_after_all_that(server: Server) -> None:
    assert server.post("/evicpress/check")["violations"] == []
