"""The thread that profiles beside a running server, with SGLang's own request type and everything else made up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput
from tests.unit.profiler.fake_server import FakeServer, Refused

from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.introspect.operations import encode, read_object, read_question
from sglang_evicpress.patches.http import online_profiler
from sglang_evicpress.patches.http.online_profiler import InProcess, OnlineProfiler
from sglang_evicpress.patches.http.profile_writer import ProfileFile
from sglang_evicpress.profiler.engine import EngineError, ShadowLost, ShadowRefused
from sglang_evicpress.quality.profile import Profile, context_keys
from sglang_evicpress.quality.store import ProfileStore

pytestmark = pytest.mark.sglang

IDENTITY = bytes(range(16))
TOKENS = list(range(100, 356))
KEY = context_keys(IDENTITY, None, TOKENS)[-1].hex()
OTHER = context_keys(IDENTITY, None, TOKENS[:128])[-1].hex()
QUERIES = [{"token_ids": [1, 2, number], "answer": [97, 98], "predicted": 0.9} for number in (3, 4)]
FORMS = ["knorm@0.5", "knorm@0.2"]
PATHS = {"open_shadow": "shadows", "make_shadow_form": "forms", "drop_shadow_form": "drop", "close_shadow": "close"}


def job(kind: str, why: str, key: str = KEY) -> dict[str, object]:
    queries = QUERIES if kind == "observe" else [{**query, "predicted": None} for query in QUERIES]
    tokens = TOKENS if key == KEY else TOKENS[:128]
    return {"kind": kind, "why": why, "key": key, "token_ids": tokens, "extra_key": None, "queries": queries,
            "forms": FORMS, "num_lossy_hits": 3}  # fmt: skip


class Calls:
    """The scheduler: ``jobs`` are handed out in this order, and ``observed`` says whether an observation shows drift.
    Operations in ``refused`` answer with a status and a reason."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.jobs: list[dict[str, object]] = []
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.refused: dict[str, tuple[int, str]] = {}
        self.is_drifted = False
        self.on_idle: Callable[[], None] = lambda: None

    async def call(self, op: str, arguments: dict[str, object]) -> SimpleNamespace:
        arguments = read_object(encode(arguments))  # as they arrive in another process
        read_question(op, arguments)
        self.log.append((op, arguments))
        if op in self.refused:
            status, reason = self.refused[op]
            return SimpleNamespace(status=status, payload=encode(IntrospectionError(status, reason).body))
        try:
            return SimpleNamespace(status=200, payload=encode(self.answer(op, arguments)))
        except Refused as refused:
            return SimpleNamespace(status=refused.status, payload=encode(refused.body))

    def answer(self, op: str, arguments: dict[str, Any]) -> Any:
        if op == "profiling_job":
            if not self.jobs:
                self.on_idle()
            return self.jobs.pop(0) if self.jobs else {}
        if op == "note_observed":
            return {"is_drifted": self.is_drifted}
        if op == "put_profile":
            return {"identity": IDENTITY.hex(), "profile": arguments["profile"], "num_nodes": 1}
        if op == "note_failed":
            return {}
        path = "/evicpress/shadows"
        if op != "open_shadow":
            path += f"/{arguments.pop('shadow_id')}/{PATHS[op]}"
        return self.server.answer("POST", path, arguments)

    def named(self, op: str) -> list[dict[str, Any]]:
        return [arguments for name, arguments in self.log if name == op]


class TokenizerManager:
    """Answers through SGLang's own checks of a request."""

    def __init__(self, server: FakeServer) -> None:
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.server = server
        self.refusal: Exception | None = None

    async def generate_request(self, obj: GenerateReqInput, request: None) -> AsyncIterator[list[dict[str, Any]]]:
        obj.normalize_batch_and_arguments()
        assert len(set(obj.rid)) == len(obj.input_ids) == len(obj.extra_key)
        if self.refusal is not None:
            raise self.refusal
        body = {
            "input_ids": obj.input_ids,
            "extra_key": obj.extra_key[0],
            "sampling_params": obj.sampling_params[0],
            "return_logprob": obj.return_logprob[0],
            "logprob_start_len": None if obj.logprob_start_len[0] == -1 else obj.logprob_start_len,
            "top_logprobs_num": obj.top_logprobs_num[0],
        }
        yield self.server.answer("POST", "/generate", body)


class Running:
    def __init__(self, tmp_path: Path) -> None:
        self.server = FakeServer()
        self.calls = Calls(self.server)
        self.manager = TokenizerManager(self.server)
        self.path = tmp_path / "profiles"
        self.profiler = OnlineProfiler(self.manager, self.calls, ProfileFile(str(self.path)))
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def work(self, *jobs: dict[str, object]) -> None:
        """Until the profiler looks for a job and finds none."""
        self.calls.jobs = list(jobs)
        idle = threading.Event()
        self.calls.on_idle = lambda: (idle.set(), self.profiler.stop())
        self.manager.event_loop = self.loop
        self.profiler.start()
        assert idle.wait(30.0), "the profiler does not look for jobs any more"
        self.profiler.thread.join(30.0)

    def end(self) -> None:
        self.profiler.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Running]:
    monkeypatch.setattr(online_profiler, "PAUSE_S", 0.01)
    found = Running(tmp_path)
    yield found
    found.end()


def test_a_context_that_nothing_is_known_of_is_profiled_and_its_profile_kept(running: Running) -> None:
    running.server.num_present = 64  # the rest is computed by requests of at most 256 tokens
    running.work(job("profile", "unprofiled"))
    (put,) = running.calls.named("put_profile")
    profile = Profile.from_json(put["profile"])
    assert (profile.key.hex(), profile.num_tokens, profile.scorer, profile.num_queries) == (KEY, 256, "logprob", 2)
    assert put["is_fresh"] is True and [str(form) for form in profile.forms] == FORMS
    assert all(stats.count == 2 for stats in profile.forms.values())
    assert profile.forms[next(iter(profile.forms))].mean > list(profile.forms.values())[1].mean
    assert [drop["form"] for drop in running.calls.named("drop_shadow_form")] == FORMS
    assert running.calls.named("close_shadow") == [{"adopt": False}] and running.server.shadows == {}
    assert running.calls.named("note_failed") == []
    store = ProfileStore(running.path, IDENTITY)
    assert store.load() == [profile]


def test_served_answers_are_judged_under_exact_kv(running: Running) -> None:
    running.work(job("observe", "observe"))
    (noted,) = running.calls.named("note_observed")
    assert noted["key"] == KEY and [predicted for predicted, _ in noted["pairs"]] == [0.9, 0.9]
    assert all(0.0 <= observed <= 1.0 for _, observed in noted["pairs"])
    assert running.calls.named("put_profile") == [] == running.calls.named("make_shadow_form")
    assert running.calls.named("close_shadow") == [{"adopt": False}]


def test_a_context_that_has_drifted_is_profiled_in_the_same_shadow_and_its_exact_kv_adopted(running: Running) -> None:
    running.calls.is_drifted = True
    running.work(job("observe", "observe"), job("profile", "drift"))
    assert len(running.calls.named("open_shadow")) == 1
    assert [put["profile"]["key"] for put in running.calls.named("put_profile")] == [KEY]
    assert running.calls.named("close_shadow") == [{"adopt": True}]


def test_a_drift_that_is_left_from_before_is_profiled_and_adopted(running: Running) -> None:
    running.work(job("profile", "drift"))
    assert len(running.calls.named("put_profile")) == 1
    assert running.calls.named("close_shadow") == [{"adopt": True}]


def test_a_drift_that_cannot_be_looked_into_now_is_left(running: Running) -> None:
    """Users have come meanwhile, or they asked nothing else than at the last profile."""
    running.calls.is_drifted = True
    nothing: dict[str, object] = {}
    running.work(job("observe", "observe"), nothing, job("observe", "observe"), nothing)
    assert len(running.calls.named("note_observed")) == 2
    assert running.calls.named("put_profile") == [] == running.calls.named("note_failed")
    assert running.calls.named("close_shadow") == [{"adopt": False}] * 2


def test_another_contexts_job_is_not_done_in_this_ones_shadow(running: Running) -> None:
    running.calls.is_drifted = True
    running.work(job("observe", "observe"), job("profile", "unprofiled", OTHER))
    assert [shadow["token_ids"] for shadow in running.calls.named("open_shadow")] == [TOKENS]
    asked = [body for method, path, body in running.server.log if path == "/generate"]
    assert all(tokens[:256] == TOKENS for body in asked for tokens in body["input_ids"])
    assert running.calls.named("put_profile") == []  # it is offered again


@pytest.mark.parametrize(
    ("op", "refusal"),
    [
        ("open_shadow", (409, "no room for a shadow of 256 slots")),
        ("make_shadow_form", (409, "the shadow is gone: 1 was closed, or had to make room")),
        ("make_shadow_form", (409, "shadow 1 cannot be brought to knorm@0.5: its press needs queries")),
        ("put_profile", (500, "put_profile failed with KeyError")),
        ("note_observed", (504, "the scheduler did not answer within 30 s")),
    ],
)
def test_what_cannot_be_done_is_noted_and_the_next_job_taken(
    running: Running, op: str, refusal: tuple[int, str]
) -> None:
    running.calls.refused[op] = refusal
    kind = "observe" if op == "note_observed" else "profile"
    running.work(job(kind, "unprofiled"), job(kind, "unprofiled", OTHER))
    assert [noted["key"] for noted in running.calls.named("note_failed")] == [KEY, OTHER]
    assert running.server.shadows == {}
    assert not running.path.exists()


def test_what_was_measured_before_the_room_ended_is_kept(running: Running) -> None:
    made: list[str] = []

    def lose_the_second(method: str, path: str, body: Any) -> None:
        if path.endswith("/forms"):
            made.append(body["form"])
            if len(made) == 2:
                raise Refused(409, {"error": {"reason": "the shadow is gone: it had to make room"}})

    running.server.before = lose_the_second
    running.work(job("profile", "unprofiled"))
    (put,) = running.calls.named("put_profile")
    assert list(put["profile"]["forms"]) == FORMS[:1] and not put["is_fresh"]  # beside what was known before
    assert [noted["key"] for noted in running.calls.named("note_failed")] == [KEY]  # the others are still to come


@pytest.mark.parametrize(
    "refusal",
    [
        ValueError("The input is longer than the model's context length"),
        HTTPException(503, "The request queue is full"),  # what SGLang raises for an aborted request
        KeyError("rid"),
    ],
)
def test_a_request_that_sglang_refuses_is_a_profile_less(running: Running, refusal: Exception) -> None:
    running.manager.refusal = refusal
    running.work(job("profile", "unprofiled"), job("observe", "observe"))
    assert [noted["key"] for noted in running.calls.named("note_failed")] == [KEY, KEY]
    assert running.server.shadows == {}


def test_a_profiler_that_fails_for_any_other_reason_begins_anew(running: Running) -> None:
    answer, failures = running.calls.answer, [AssertionError("never thought of"), KeyError("key")]

    def fail_first(op: str, arguments: dict[str, Any]) -> Any:
        if failures:
            raise failures.pop()
        return answer(op, arguments)

    running.calls.answer = fail_first  # type: ignore[method-assign]
    running.profiler.thread._pause_s = 0.01
    running.work(job("profile", "unprofiled"))
    assert len(running.calls.named("put_profile")) == 1
    assert running.profiler.thread.describe()["num_failures"] == 2


def test_an_answer_that_was_never_given_is_no_reason_to_stop(running: Running) -> None:
    """A job that makes no sense."""
    spoilt = job("observe", "observe")
    spoilt["queries"] = [{**QUERIES[0], "answer": []}]
    running.work(spoilt, job("profile", "unprofiled"))
    assert len(running.calls.named("note_failed")) == 1 == len(running.calls.named("put_profile"))


def test_a_profile_that_cannot_be_saved_is_used_all_the_same(running: Running) -> None:
    running.path.mkdir()
    running.work(job("profile", "unprofiled"))
    assert len(running.calls.named("put_profile")) == 1 and running.calls.named("note_failed") == []


def test_the_profiler_waits_for_the_servers_event_loop_and_stops_without_one(running: Running) -> None:
    running.profiler.start()
    time.sleep(0.05)
    assert running.calls.log == []
    running.profiler.stop()
    running.profiler.thread.join(30.0)
    assert not running.profiler.thread.is_alive()


def test_a_scheduler_that_does_not_answer_once_is_asked_again(running: Running) -> None:
    class Unplugged(Calls):
        num_calls = 0

        async def call(self, op: str, arguments: dict[str, object]) -> SimpleNamespace:
            self.num_calls += 1
            if self.num_calls == 1:
                raise OSError("socket closed")
            if self.num_calls == 2:
                raise IntrospectionError(504, "the scheduler did not answer")
            return await super().call(op, arguments)

    running.calls = running.profiler._calls = Unplugged(running.server)
    running.work(job("profile", "unprofiled"))
    assert len(running.calls.named("put_profile")) == 1


# ---- the transport


def test_routes_lead_to_operations_and_refusals_have_their_kinds(running: Running) -> None:
    transport = InProcess(running.loop, running.manager, running.calls)
    opened = transport.ask("POST", "/evicpress/shadows", {"token_ids": TOKENS, "extra_key": None, "may_evict": False})
    assert running.calls.log[-1] == ("open_shadow", {"token_ids": TOKENS, "extra_key": None, "may_evict": False})
    transport.ask("POST", f"/evicpress/shadows/{opened['shadow']}/forms", {"form": "knorm@0.5"})
    assert running.calls.log[-1][0] == "make_shadow_form"
    for status, reason, kind in (
        (409, "no room for a shadow", ShadowRefused),
        (409, "the shadow is gone", ShadowLost),
        (400, "form is missing", EngineError),
        (500, "it failed", EngineError),
    ):
        running.calls.refused["close_shadow"] = (status, reason)
        with pytest.raises(kind, match=reason):
            transport.ask("POST", "/evicpress/shadows/1/close", {"adopt": False})
    with pytest.raises(KeyError):
        transport.ask("POST", "/evicpress/shadow", {})


def test_a_server_that_stops_or_hangs_is_given_up(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Calls):
        async def call(self, op: str, arguments: dict[str, object]) -> SimpleNamespace:
            await asyncio.sleep(3600)
            raise AssertionError("it was not cancelled")

    transport = InProcess(running.loop, running.manager, Hanging(running.server))
    monkeypatch.setattr(online_profiler, "REQUEST_S", 0.05)
    with pytest.raises(EngineError, match=r"no answer within 0\.05 s"):
        transport.call("profiling_job", {})
    monkeypatch.setattr(online_profiler, "REQUEST_S", 30.0)

    def cancel_all() -> None:
        for task in asyncio.all_tasks(running.loop):
            task.cancel()

    running.loop.call_soon_threadsafe(running.loop.call_later, 0.05, cancel_all)
    with pytest.raises(EngineError, match="the server stops"):
        transport.call("profiling_job", {})
