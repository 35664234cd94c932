"""``kv_quality`` on its way into requests, and what was served on its way into answers."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from sglang_evicpress.asked_quality import served_kv
from sglang_evicpress.patches.http import answers

pytestmark = pytest.mark.sglang

Told = list[Any]
"""What SGLang yields: answers, or lists of them."""


def answer(index: int, *values: object, rid: str = "a") -> dict[str, Any]:
    return {"index": index, "meta_info": {"id": rid, "kv_cache": list(values)}}


async def told(told: Told) -> AsyncGenerator[object, None]:
    for each in copy.deepcopy(told):
        yield each


def collected(told_answers: Told, num_samples: int = 1) -> Told:
    async def collect() -> Told:
        asked = SimpleNamespace(parallel_sample_num=num_samples)
        around = answers.around_generate_request(lambda *_: told(told_answers), None, asked, None)
        return [each async for each in around]

    return asyncio.run(collect())


class App:
    """SGLang's routes as far as they matter: ``bodies`` come in, ``told`` goes out with usage in it."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.told: Told = [answer(0, served_kv(3, 4))]
        self.num_samples = 1
        app = self.app = FastAPI()
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/other"):
            app.post(path)(self.serve)
        answers.add_middleware(app)
        answers.add_middleware(app)
        assert len(app.user_middleware) == 1
        self.client = TestClient(app)

    async def serve(self, request: Request) -> object:
        body = json.loads(await request.body())
        self.bodies.append(body)
        assert int(request.headers["content-length"]) == len(await request.body())
        asked = SimpleNamespace(parallel_sample_num=self.num_samples)
        generator = answers.around_generate_request(lambda *_: told(self.told), None, asked, request)
        if not isinstance(body, dict) or not body.get("stream"):
            async for _ in generator:
                pass
            return JSONResponse({"text": '"usage":{', "usage": {"prompt_tokens": 9}})

        async def events() -> AsyncGenerator[bytes, None]:
            async for _ in generator:
                yield b'data: {"text":"\\"usage\\":{","usage":null}\n\n'
            yield b'data: {"usage":{"prompt_tokens":9}}\n\n'

        return StreamingResponse(events(), media_type="text/event-stream")


@pytest.fixture
def app() -> Iterator[App]:
    yield App()


def test_the_hook_goes_around_sglangs_generator() -> None:
    wrapped = _wrap_fn(TokenizerManager.generate_request, answers.around_generate_request, HookType.AROUND)
    made = wrapped(SimpleNamespace(), SimpleNamespace(), None)
    assert hasattr(made, "__anext__") and hasattr(made, "aclose")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_field_moves_to_the_custom_params(app: App, path: str) -> None:
    for params, expected in ((None, {}), ({"kv_decode_budget": 64}, {"kv_decode_budget": 64})):
        body = {"prompt": "x", "custom_params": params, "kv_quality": "exact"}
        assert app.client.post(path, json=body).status_code == 200
        assert app.bodies.pop() == {"prompt": "x", "custom_params": {**expected, "kv_quality": "exact"}}


def test_both_fields_move(app: App) -> None:
    asked = {"kv_quality": 0.9, "kv_retention_seconds": 60}
    assert app.client.post("/v1/completions", json={"prompt": "x", **asked}).status_code == 200
    assert app.bodies.pop() == {"prompt": "x", "custom_params": asked}


def test_a_server_behind_a_path_of_its_own_knows_its_routes(app: App) -> None:
    client = TestClient(app.app, root_path="/llm")
    asked = {"kv_quality": "exact"}
    assert client.post("/llm/v1/completions", json={"prompt": "x", **asked}).status_code == 200
    assert app.bodies.pop() == {"prompt": "x", "custom_params": asked}


def test_a_retention_that_is_not_known_is_refused(app: App) -> None:
    response = app.client.post("/v1/completions", json={"prompt": "x", "kv_retention_seconds": -1})
    assert response.status_code == 400
    sentence = "kv_retention_seconds is -1: expected seconds above 0, at most 86400"
    assert response.json()["message"] == sentence


def test_for_generate_it_moves_into_every_sampling_params(app: App) -> None:
    params = {"custom_params": {"kv_quality": "exact"}}
    for given, expected in ((None, params), ({}, params), ([{"n": 1}, {}], [{"n": 1, **params}, params])):
        app.client.post("/generate", json={"sampling_params": given, "kv_quality": "exact"})
        assert app.bodies.pop() == {"sampling_params": expected}


@pytest.mark.parametrize(
    "body",
    [b'{"prompt":  "kv_quality"}', b'{"kv_quality":  null, "a": 1.0}', b'["kv_quality" ]', b'{"custom_params": 5}'],
)
def test_other_bodies_pass_as_they_are(app: App, body: bytes) -> None:
    assert answers.with_fields(body, "/v1/completions") is body
    assert app.client.post("/v1/completions", content=body).status_code == 200


def test_what_is_no_json_is_for_sglang_to_refuse() -> None:
    for body in (b'{"kv_quality": ', b'{"kv_quality": ' + b"[" * 100_000):
        assert answers.with_fields(body, "/v1/completions") is body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"kv_quality": "best"}),
        ("/v1/chat/completions", {"custom_params": {"kv_quality": "best"}}),
        ("/generate", {"kv_quality": "best"}),
        ("/generate", {"sampling_params": {"custom_params": {"kv_quality": "best"}}}),
        ("/generate", {"sampling_params": [{}, {"custom_params": {"kv_quality": "best"}}]}),
    ],
)
def test_a_value_that_is_not_known_is_status_400_before_anything_is_streamed(
    app: App, path: str, fields: dict[str, Any], stream: bool
) -> None:
    response = app.client.post(path, json={**fields, "stream": stream})
    assert response.status_code == 400 and app.bodies == []
    said = response.json()
    sentence = (said["error"] if path == "/generate" else said)["message"]
    assert sentence == "kv_quality is 'best': expected 'exact', or a number above 0, at most 1"


def test_no_place_for_the_quality_is_status_400(app: App) -> None:
    response = app.client.post("/v1/completions", json={"custom_params": [5], "kv_quality": "exact"})
    assert response.status_code == 400 and app.bodies == []
    assert response.json()["message"] == "custom_params is [5] beside kv_quality: expected an object, or none"


def test_bodies_are_looked_at_behind_other_middleware(app: App) -> None:
    """As one that decompresses them is."""
    app.app.add_middleware(GZipMiddleware)
    assert app.app.user_middleware[-1].cls is answers.RequestQuality


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_says_what_was_served(app: App, path: str) -> None:
    kv_cache = {"exact_tokens": 3, "lossy_tokens": 4, "min_quality": 1.0, "tiers": {"gpu": 7}}
    response = app.client.post(path, json={})
    assert response.json() == {"text": '"usage":{', "usage": {"kv_cache": kv_cache, "prompt_tokens": 9}}
    assert int(response.headers["content-length"]) == len(response.content)
    *events, _ = app.client.post(path, json={"stream": True}).text.split("\n\n")
    assert [json.loads(event.removeprefix("data: ")) for event in events] == [
        {"text": '"usage":{', "usage": None},
        {"usage": {"kv_cache": kv_cache, "prompt_tokens": 9}},
    ]


def test_other_routes_and_answers_of_which_nothing_is_known_are_left_alone(app: App) -> None:
    for path in ("/other", "/generate"):
        assert app.client.post(path, json={}).json()["usage"] == {"prompt_tokens": 9}
    app.told = [answer(0), answer(0, None)]
    assert app.client.post("/v1/completions", json={}).json()["usage"] == {"prompt_tokens": 9}


def test_each_prompt_counts_once_however_many_answers_it_gets(app: App) -> None:
    app.num_samples = 2
    app.told = [
        [answer(0, served_kv(1, 2)), answer(0, served_kv(9, 9), rid="b"), answer(0, served_kv(10, 20, 0.75), rid="c")]
    ]
    for each in app.told[0]:
        del each["index"]
    usage = app.client.post("/v1/completions", json={}).json()["usage"]
    assert usage["kv_cache"] == {"exact_tokens": 11, "lossy_tokens": 22, "min_quality": 0.75, "tiers": {"gpu": 33}}


def test_every_part_of_an_answer_says_it_also_where_only_the_first_has_it() -> None:
    first, second, other = collected([answer(0, served_kv(1, 2)), answer(0), answer(1, None, rid="b")])
    assert first["meta_info"]["kv_cache"] == second["meta_info"]["kv_cache"] == served_kv(1, 2)
    assert "kv_cache" not in other["meta_info"]


def test_a_client_that_leaves_ends_sglangs_generator() -> None:
    ended = []

    async def endless() -> AsyncGenerator[object, None]:
        try:
            while True:
                yield answer(0, served_kv(1, 2))
        finally:
            ended.append(True)

    async def leave() -> None:
        around = answers.around_generate_request(lambda *_: endless(), None, SimpleNamespace(), None)
        await anext(around)
        await around.aclose()

    asyncio.run(leave())
    assert ended == [True]
