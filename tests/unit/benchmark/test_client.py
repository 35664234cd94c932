"""The client's reading of a server's stream, byte by byte."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.benchmark.client import EventLines, Outcome, drive, keep_asking, lift_file_limit

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
END = b"data: [DONE]\n\n"

Answer = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Item:
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


@dataclass(frozen=True)
class Planned:
    arrival_s: float
    item: Item


def event(**values: object) -> bytes:
    return b"data: " + json.dumps({"object": "chat.completion.chunk", **values}).encode() + b"\n\n"


def delta(finish_reason: str | None = None, **values: object) -> bytes:
    return event(choices=[{"index": 0, "delta": values, "finish_reason": finish_reason}])


ROLE = delta(role="assistant", content="")
USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": None})
CACHED = event(
    choices=[],
    usage={"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}},
)
TIERS = event(choices=[], sglext={"cached_tokens_details": {"device": 6, "host": 2, "storage_backend": "file"}})
WHOLE = (
    HEAD + ROLE + delta(content="Grüße ") + delta(content="an ") + delta(content="alle") + delta("stop") + CACHED + END
)


def ask(
    answer: Answer, planned: Sequence[Planned] | None = None, how: Callable[..., Any] = drive, **options: object
) -> list[Outcome]:
    """The outcomes of requests to a server on which ``answer`` writes everything, the head included."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            await answer(json.loads(await reader.readexactly(length)), writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def run() -> list[Outcome]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        settings = {"max_new_tokens": 5, "timeout_s": 20.0, **options}
        try:
            return await how(f"http://127.0.0.1:{port}", "m", planned or [Planned(0.0, Item("hello"))], **settings)
        finally:
            server.close()

    return asyncio.run(run())


def sending(data: bytes) -> Answer:
    async def answer(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return answer


def failure(data: bytes) -> str:
    (outcome,) = ask(sending(data))
    assert outcome.error is not None
    return outcome.error


# ---- one answer


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_an_answer_is_the_same_in_pieces_of_any_size(size: int) -> None:
    async def answer(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        for begin in range(0, len(WHOLE), size):
            writer.write(WHOLE[begin : begin + size])
            await writer.drain()
            await asyncio.sleep(0)

    (outcome,) = ask(answer)
    assert outcome.error is None
    assert outcome.answer == "Grüße an alle"
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (9, 8, 3)
    assert len(outcome.itl_s) == 2
    assert outcome.ttft_s is not None and 0 < outcome.ttft_s <= outcome.end_s
    assert outcome.ttft_s + sum(outcome.itl_s) <= outcome.end_s


@given(st.lists(st.binary(max_size=12).filter(lambda data: not {10, 13} & set(data)), min_size=1), st.data())
def test_events_are_the_same_however_they_are_cut(datas: list[bytes], draw: st.DataObject) -> None:
    end = draw.draw(st.sampled_from([b"\n", b"\r\n"]))
    stream = b"".join(b": a comment" + end + b"event: x" + end + b"data: " + data + end + end for data in datas)
    cuts = sorted(draw.draw(st.sets(st.integers(0, len(stream)))))
    pieces = [stream[begin:stop] for begin, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    lines = EventLines()
    assert [data for piece in pieces for data in lines.feed(piece)] == datas


def test_data_of_several_lines_is_one_event() -> None:
    assert list(EventLines().feed(b"data: a\ndata:b\n\ndata: c\n")) == [b"a\nb"]


def test_the_request_asks_for_a_stream_with_usage_and_is_greedy() -> None:
    bodies = []

    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        bodies.append(body)
        writer.write(WHOLE)

    ask(answer)
    assert bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert bodies[0]["stream"] is True and bodies[0]["stream_options"] == {"include_usage": True}
    assert (bodies[0]["temperature"], bodies[0]["max_tokens"], bodies[0]["model"]) == (0, 5, "m")


def test_the_chunk_with_the_role_is_not_the_first_token() -> None:
    async def answer(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + ROLE)
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.write(delta(content="x") + END)

    (outcome,) = ask(answer)
    assert outcome.error is None
    assert outcome.ttft_s is not None and outcome.ttft_s >= 0.19


def test_an_empty_answer_has_its_first_token_at_its_end() -> None:
    (outcome,) = ask(sending(HEAD + ROLE + delta("stop") + USAGE + END))
    assert (outcome.error, outcome.answer, outcome.itl_s, outcome.cached_tokens) == (None, "", [], 0)
    assert outcome.ttft_s is not None


def test_reasoning_counts_as_text_but_is_no_answer() -> None:
    (outcome,) = ask(sending(HEAD + delta(reasoning_content="hm") + delta(content="yes") + END))
    assert (outcome.answer, len(outcome.itl_s)) == ("yes", 1)


def test_where_cached_tokens_were_is_noted() -> None:
    (outcome,) = ask(sending(HEAD + delta(content="x") + TIERS + CACHED + END))
    assert outcome.cached_by_tier == {"device": 6, "host": 2}


# ---- failures


def test_an_error_in_the_stream_fails_the_request_and_keeps_what_came() -> None:
    (outcome,) = ask(sending(HEAD + delta(content="par") + event(error={"message": "out of memory"}) + END))
    assert (outcome.error, outcome.answer) == ("out of memory", "par")
    assert outcome.end_s >= outcome.sent_s > 0


@pytest.mark.parametrize("body", [b'{"object": "error", "message": "too long"}', b"too long"])
def test_a_status_fails_the_request_with_what_the_server_says(body: bytes) -> None:
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert failure(head + body) == "status 400: too long"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (HEAD + delta(content="x"), "the connection ended before the answer did"),
        (HEAD + delta(content="x") + b"data: [DONE]", "the connection ended before the answer did"),
        (HEAD + END, "the answer ended before it began"),
        (HEAD + delta("abort", content="x") + END, "the server aborted the request"),
        (HEAD + b"data: {oops\n\n", "an event is no JSON: b'{oops'"),
        (HEAD + b"data: [1]\n\n", "an event is none of a chat: b'[1]'"),
        (HEAD + b'data: {"choices": [3]}\n\n', "an event is none of a chat"),
        (HEAD + b'data: {"choices": [{"delta": {"content": 3}}]}\n\n' + END, "an event is none of a chat"),
        (HEAD.replace(b"Connection: close", b"Transfer-Encoding: chunked") + b"5\r\ndata", "payload is not completed"),
        (b"", "Server disconnected"),
        (b"what?\r\n\r\n", "Bad status line"),
    ],
)
def test_an_answer_that_is_none_fails_the_request(data: bytes, reason: str) -> None:
    assert reason in failure(data)


def test_a_server_that_is_silent_fails_the_request_after_the_timeout() -> None:
    async def answer(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + delta(content="x"))
        await writer.drain()
        await asyncio.sleep(3600)

    (outcome,) = ask(answer, timeout_s=0.2)
    assert outcome.error == "no complete answer within 0.2 s"
    assert outcome.answer == "x"


def test_a_server_that_is_gone_fails_every_request() -> None:
    planned = [Planned(0.0, Item("a")), Planned(0.01, Item("b"))]
    outcomes = asyncio.run(drive("http://127.0.0.1:1", "m", planned, max_new_tokens=1))
    assert len(outcomes) == 2
    assert all(outcome.error is not None and "Cannot connect" in outcome.error for outcome in outcomes)


# ---- many requests


def test_an_open_loop_does_not_wait_for_answers() -> None:
    number, waiting = 20, asyncio.Event()
    came: list[str] = []

    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        came.append(str(body["messages"]))
        if len(came) == number:
            waiting.set()
        await waiting.wait()  # nobody is answered until all have asked
        writer.write(WHOLE)

    outcomes = ask(answer, [Planned(index / 1000, Item(str(index))) for index in range(number)])
    assert [outcome.error for outcome in outcomes] == [None] * number
    assert [outcome.arrival_s for outcome in outcomes] == [index / 1000 for index in range(number)]
    assert all(outcome.sent_s >= outcome.arrival_s for outcome in outcomes)


def test_in_an_open_loop_the_first_token_is_timed_from_the_planned_arrival() -> None:
    (outcome,) = ask(sending(WHOLE), [Planned(-30.0, Item("late"))])
    assert outcome.ttft_s is not None and outcome.ttft_s > 30
    assert outcome.sent_s >= 0


def test_one_client_sends_when_the_last_was_answered() -> None:
    running, most, order = 0, 0, []

    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        order.append(body["messages"][0]["content"])  # type: ignore[index]
        await asyncio.sleep(0.01)
        running -= 1
        writer.write(WHOLE)

    outcomes = ask(answer, [Planned(0.0, Item(str(index))) for index in range(5)], is_closed=True)
    assert (most, order) == (1, ["0", "1", "2", "3", "4"])
    assert all(outcome.arrival_s == outcome.sent_s for outcome in outcomes)
    assert outcomes[1].sent_s >= outcomes[0].end_s


def test_a_failure_of_one_leaves_the_others() -> None:
    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE if "1" not in str(body["messages"]) else HEAD + event(error="no"))

    outcomes = ask(answer, [Planned(0.0, Item(str(index))) for index in range(3)])
    assert [outcome.error for outcome in outcomes] == [None, "no", None]


@pytest.mark.parametrize("is_closed", [True, False])
def test_whoever_is_told_of_outcomes_can_end_it_all(is_closed: bool) -> None:
    def stop(_: Outcome) -> None:
        raise RuntimeError("enough")

    planned = [Planned(0.0, Item("a")), Planned(3600.0, Item("b"))]
    with pytest.raises(RuntimeError, match="enough"):
        ask(sending(WHOLE), planned, is_closed=is_closed, on_outcome=stop)


def test_what_has_no_answer_at_the_end_of_an_open_loop_is_cut_and_keeps_what_came() -> None:
    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        text = body["messages"][0]["content"]  # type: ignore[index]
        if text == "whole":
            writer.write(WHOLE)
        else:
            writer.write(HEAD + ROLE + (delta(content="begun ") if text == "begun" else b""))
            await writer.drain()
            await asyncio.sleep(20)

    planned = [Planned(0.0, Item("whole")), Planned(0.0, Item("begun")), Planned(0.1, Item("waits"))]
    whole, begun, waits = ask(answer, planned, until_s=0.5)
    assert (whole.is_cut, whole.error, whole.answer) == (False, None, "Grüße an alle")
    assert [each.is_cut for each in (begun, waits)] == [True] * 2
    assert [each.error for each in (begun, waits)] == [None] * 2
    assert begun.answer == "begun " and begun.ttft_s is not None
    assert waits.ttft_s is None and waits.end_s >= 0.49


def test_a_server_without_room_refuses() -> None:
    head = b"HTTP/1.1 %d No\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{}"
    (refused,) = ask(sending(head % 503))
    assert refused.is_refused and refused.error is not None and refused.error.startswith("status 503")
    (failed,) = ask(sending(head % 500))
    assert not failed.is_refused and failed.error is not None


def test_clients_that_keep_asking_share_the_questions_and_begin_again_behind_the_last() -> None:
    asked = []

    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        asked.append(body["messages"][0]["content"])  # type: ignore[index]
        if len(asked) > 7:
            await asyncio.sleep(20)
        writer.write(WHOLE)

    planned = [Planned(0.0, Item(name)) for name in "abc"]
    outcomes = ask(answer, planned, keep_asking, num_clients=2, seconds=2.0)
    assert sorted(asked) == list("aaabbbccc")  # two that are sent at once may arrive in either order
    assert sorted(outcome.is_cut for outcome in outcomes) == [False] * 7 + [True] * 2
    assert all(outcome.error is None for outcome in outcomes)


def test_a_queue_of_thousands_is_not_ended_by_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        lift_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
