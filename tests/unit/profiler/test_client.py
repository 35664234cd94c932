"""The engine over HTTP: what it sends, what it reads from SGLang's answers, and what each refusal means."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.profiler.fake_server import FakeServer, Refused, logprob_of, no, serving

from sglang_evicpress.core import Form
from sglang_evicpress.profiler.client import ServerEngine
from sglang_evicpress.profiler.engine import EngineError, ShadowLost, ShadowRefused
from sglang_evicpress.profiler.transport import BadRequest, Conflict, HttpTransport, NotThere, refusal

CONTEXT = [ord("x") + i % 5 for i in range(640)]
KEYDIFF = Form("keydiff", 0.5)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as server:
        yield server


def engine_of(server: FakeServer, **options: Any) -> ServerEngine:
    return ServerEngine(HttpTransport(server.url, timeout_s=5.0), **options)


def test_a_shadow_is_filled_by_growing_prefixes_of_whole_blocks(server: FakeServer) -> None:
    server.num_present = 100
    shadow = engine_of(server, may_evict=True).open_shadow(CONTEXT, "tenant")
    assert (shadow.num_tokens, shadow.namespace) == (640, server.shadows[shadow.id]["extra_key"])
    assert server.posted("/shadows") == [{"token_ids": CONTEXT, "extra_key": "tenant", "may_evict": True}]
    fills = server.posted("/generate")
    assert [len(fill["input_ids"][0]) for fill in fills] == [320, 576, 640]
    assert all(fill["input_ids"][0] == CONTEXT[: len(fill["input_ids"][0])] for fill in fills)
    assert {fill["extra_key"] for fill in fills} == {shadow.namespace}
    assert server.cached[shadow.namespace] == CONTEXT


def test_a_whole_copy_is_not_filled(server: FakeServer) -> None:
    engine_of(server).open_shadow(CONTEXT, None)
    assert server.posted("/generate") == []


def test_larger_parts_fill_in_fewer_requests(server: FakeServer) -> None:
    server.num_present = 0
    engine_of(server, fill_tokens=2048).open_shadow(CONTEXT, None)
    assert [len(fill["input_ids"][0]) for fill in server.posted("/generate")] == [640]


def test_a_shadow_lost_while_it_is_filled_is_closed(server: FakeServer) -> None:
    server.num_present = 0

    def forget(method: str, path: str, body: Any) -> None:
        if path == "/generate" and len(body["input_ids"][0]) > 256:
            server.cached.clear()

    server.before = forget
    with pytest.raises(ShadowLost, match="found 0 of the 192 tokens"):
        engine_of(server).open_shadow(CONTEXT, None)
    assert server.shadows == {}


def test_answers_have_their_tokens_logprobs_and_text(server: FakeServer) -> None:
    engine = engine_of(server)
    shadow = engine.open_shadow(CONTEXT, None)
    first, second = engine.generate(shadow.namespace, [[*CONTEXT, 97], [*CONTEXT, 98, 99]], 3)
    assert first.token_ids == (97 + 97 % 26, 97 + 98 % 26, 97 + 99 % 26)
    assert first.logprobs == (-0.1, -0.1, -0.1)
    assert first.text == "".join(map(chr, first.token_ids))
    assert second.token_ids[0] == 97 + 99 % 26
    (body,) = server.posted("/generate")
    assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 3}
    assert "logprob_start_len" not in body


def test_a_given_answer_is_scored_behind_its_prompt_in_one_request(server: FakeServer) -> None:
    engine = engine_of(server)
    shadow = engine.open_shadow(CONTEXT, None)
    lossy = engine.make_form(shadow, KEYDIFF)
    prompts, answers = [[*CONTEXT, 97], [*CONTEXT, 98, 99]], [[1, 2, 3], [4]]
    scored = engine.score(lossy, prompts, answers)
    assert [seen.logprobs for seen in scored] == [(logprob_of(KEYDIFF),) * 3, (logprob_of(KEYDIFF),)]
    assert all(seen.best == () for seen in scored)
    (body,) = server.posted("/generate")
    assert body["input_ids"] == [[*CONTEXT, 97, 1, 2, 3], [*CONTEXT, 98, 99, 4]]
    assert body["logprob_start_len"] == [640, 641]
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert "top_logprobs_num" not in body


def test_the_likeliest_tokens_give_the_best(server: FakeServer) -> None:
    engine = engine_of(server)
    shadow = engine.open_shadow(CONTEXT, None)
    (scored,) = engine.score(shadow.namespace, [[*CONTEXT, 97]], [[5, 6]], top=2)
    assert scored.best == (-0.1, -0.1)
    assert server.posted("/generate")[0]["top_logprobs_num"] == 2


def test_a_server_that_must_generate_is_asked_for_one_token_from_then_on(server: FakeServer) -> None:
    server.least_new_tokens = 1
    engine = engine_of(server)
    shadow = engine.open_shadow(CONTEXT, None)
    for _ in range(2):
        (scored,) = engine.score(shadow.namespace, [[*CONTEXT, 97]], [[5, 6]])
        assert scored.logprobs == (-0.1, -0.1)
    assert [body["sampling_params"]["max_new_tokens"] for body in server.posted("/generate")] == [0, 1, 1]


def test_tokens_at_the_end_of_the_vocabulary_may_be_shown_as_0(server: FakeServer) -> None:
    engine = engine_of(server)
    shadow = engine.open_shadow(CONTEXT, None)
    transport = _Altered(server, lambda meta: meta["input_token_logprobs"][2].__setitem__(1, 0))
    engine._transport = transport
    assert len(engine.score(shadow.namespace, [[*CONTEXT, 97]], [[5, 6]])[0].logprobs) == 2


class _Altered(HttpTransport):
    """Changes what the server answers to ``/generate``."""

    def __init__(self, server: FakeServer, change: Any) -> None:
        super().__init__(server.url)
        self.change = change

    def generate(self, body: Any) -> list[dict[str, Any]]:
        results = super().generate(body)
        for result in results:
            self.change(result["meta_info"])
        return results


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda meta: meta["input_token_logprobs"].pop(), r"scored the tokens \[5\]: expected the answer's, \[5, 6\]"),
        (lambda meta: meta["input_token_logprobs"][1].__setitem__(1, 9), r"scored the tokens \[9, 6\]"),
        (lambda meta: meta["input_token_logprobs"][1].__setitem__(0, None), "finite log-probability"),
        (lambda meta: meta["input_token_logprobs"].__setitem__(1, None), "finite log-probability"),
        (lambda meta: meta.pop("input_token_logprobs"), "as input_token_logprobs: expected a list"),
        (lambda meta: meta["input_top_logprobs"].__setitem__(1, None), "likeliest tokens at 2 of 2"),
        (lambda meta: meta["input_top_logprobs"].pop(), "likeliest tokens at 1 of 2"),
        (lambda meta: meta.update(finish_reason={"type": "abort", "message": "too long"}), "gave up.*: too long"),
    ],
)
def test_an_answer_that_is_not_of_the_asked_tokens_is_refused(server: FakeServer, change: Any, words: str) -> None:
    engine = ServerEngine(_Altered(server, change))
    shadow = engine.open_shadow(CONTEXT, None)
    with pytest.raises(EngineError, match=words) as raised:
        engine.score(shadow.namespace, [[*CONTEXT, 97]], [[5, 6]], top=2)
    assert not isinstance(raised.value, ShadowLost | ShadowRefused)


def test_an_answer_that_did_not_use_the_shadow_says_it_is_lost(server: FakeServer) -> None:
    engine = engine_of(server)
    shadow = engine.open_shadow(CONTEXT, None)
    lossy = engine.make_form(shadow, KEYDIFF)
    server.cached[lossy] = CONTEXT[:512]
    for ask in (
        lambda: engine.score(lossy, [[*CONTEXT, 97]], [[5]]),
        lambda: engine.generate(lossy, [[*CONTEXT, 97]], 1),
    ):
        with pytest.raises(ShadowLost, match="found 512 of the 640 tokens"):
            ask()
    assert engine.score(shadow.namespace, [[*CONTEXT, 97]], [[5]])  # the exact copy is still there


def test_only_namespaces_of_open_shadows_are_asked(server: FakeServer) -> None:
    engine = engine_of(server)
    shadow = engine.open_shadow(CONTEXT, None)
    lossy = engine.make_form(shadow, KEYDIFF)
    engine.drop_form(shadow, KEYDIFF)
    assert server.posted("/drop") == [{"form": "keydiff@0.5"}]
    for namespace in ("users", lossy):
        with pytest.raises(EngineError, match="not of an open shadow"):
            engine.generate(namespace, [[*CONTEXT, 97]], 1)
    engine.close_shadow(shadow, adopt=True)
    assert server.posted("/close") == [{"adopt": True}]
    with pytest.raises(EngineError, match="not of an open shadow"):
        engine.generate(shadow.namespace, [[*CONTEXT, 97]], 1)


def test_a_shadow_the_server_forgot_is_lost_but_can_be_closed(server: FakeServer) -> None:
    engine = engine_of(server)
    shadow = engine.open_shadow(CONTEXT, None)
    engine.make_form(shadow, KEYDIFF)
    server.shadows.clear()
    with pytest.raises(ShadowLost, match="is not open"):
        engine.make_form(shadow, Form("knorm", 0.5))
    engine.drop_form(shadow, KEYDIFF)
    engine.close_shadow(shadow)


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (409, "no room: 40 slots are free", ShadowRefused),
        (409, "the shadow is gone: users needed its room", ShadowLost),
        (409, "this cache makes no shadows", Conflict),
        (400, "form: expected ...", BadRequest),
        (404, "shadow 3 is not open", NotThere),
        (500, "no room", EngineError),
    ],
)
def test_a_refusal_is_told_by_its_status_and_first_words(status: int, reason: str, kind: type[EngineError]) -> None:
    error = refusal(status, reason, "POST http://here")
    assert type(error) is kind
    assert str(error) == f"POST http://here: status {status}: {reason}"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (409, {"error": {"reason": "not now"}}, "status 409: not now"),
        (400, {"error": {"message": "too\nlong"}}, "status 400: too long"),
        (400, {"object": "error", "message": "no tokenizer"}, "status 400: no tokenizer"),
        (404, {"detail": "Not Found"}, "status 404: Not Found"),
        (401, {"error": "Unauthorized"}, "status 401: Unauthorized"),
        (502, b"<html>", "status 502: Bad Gateway"),
        (422, {"detail": [{"loc": "body"}]}, "status 422: .*loc"),
        (307, {}, "status 307"),
        (200, b"", "expected JSON"),
        (200, [1], r"answered \[1\]: expected an object"),
    ],
)
def test_what_a_server_says_against_a_request_is_passed_on(
    server: FakeServer, status: int, body: object, said: str
) -> None:
    server.refuse(Refused(status, body))
    with pytest.raises(EngineError, match=said) as raised:
        HttpTransport(server.url).ask("GET", "/evicpress/profiles")
    assert f"GET {server.url}/evicpress/profiles" in str(raised.value)
    assert len(server.log) == 1


def test_a_batch_is_answered_by_a_list(server: FakeServer) -> None:
    server.refuse(Refused(200, {"text": ""}))
    with pytest.raises(EngineError, match="expected a list of objects"):
        HttpTransport(server.url).generate({})


def test_no_server_a_slow_one_and_one_that_hangs_up_are_one_sentence(server: FakeServer) -> None:
    server.refuse(ConnectionAbortedError())
    with pytest.raises(EngineError, match="the connection broke"):
        HttpTransport(server.url).ask("GET", "/")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineError, match=r"no answer within 0\.05 s"):
            HttpTransport(url, timeout_s=0.05).ask("GET", "/")
    with pytest.raises(EngineError, match="cannot be reached"):
        HttpTransport(url).ask("GET", "/")


def test_a_refused_shadow_is_asked_for_again_for_a_while(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            server.before = lambda method, path, body: None

    monkeypatch.setattr("sglang_evicpress.profiler.transport.time.sleep", wait)
    server.refuse(no(409, "no room: users need it"))
    ServerEngine(HttpTransport(server.url, num_retries=2, wait_s=1.5)).open_shadow(CONTEXT, None)
    assert waits == [1.5, 3.0]
    server.refuse(no(409, "no room: users need it"))
    with pytest.raises(ShadowRefused, match="users need it"):
        HttpTransport(server.url).ask("POST", "/evicpress/shadows", {})
    assert waits == [1.5, 3.0]


def test_the_key_goes_along_and_is_never_shown(server: FakeServer) -> None:
    server.refuse(Refused(401, {"error": "Unauthorized"}))
    with pytest.raises(EngineError) as raised:
        HttpTransport(server.url, api_key="secret-1").ask("GET", "/evicpress/profiles")
    assert server.keys == ["Bearer secret-1"]
    assert "secret-1" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["", "localhost:30000", "file:///etc/passwd", "http://", "http://a:b", "http://a:99999", "http://a/?q=1"]
)
def test_a_url_that_is_none_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected one of a server"):
        HttpTransport(url)


def test_a_key_that_no_header_can_carry_is_refused_unshown() -> None:
    with pytest.raises(ValueError, match="printable ASCII") as raised:
        HttpTransport("http://a", api_key="se\ncret")
    assert "cret" not in str(raised.value)


def test_half_a_surrogate_pair_is_an_error_of_the_request(server: FakeServer) -> None:
    with pytest.raises(EngineError, match="cannot be written as JSON"):
        HttpTransport(server.url).ask("POST", "/tokenize", {"prompt": "\ud800"})


@pytest.mark.parametrize("answer", [{}, {"shadow": 1, "key": "zz", "num_tokens": 640, "num_present": 0}])
def test_an_odd_answer_to_a_shadow_is_an_error(server: FakeServer, answer: dict[str, object]) -> None:
    server.refuse(Refused(200, answer))
    with pytest.raises(EngineError, match="/evicpress/shadows answered"):
        engine_of(server).open_shadow(CONTEXT, None)
