"""Questions about texts: cut out of them, and asked of an endpoint that answers well, badly or not at all."""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.cli.profile.chat import MAX_TRIES, ChatEndpoint, EndpointError
from sglang_evicpress.cli.profile.questions import MAX_PIECE_WORDS, ask_questions, extract_questions
from sglang_evicpress.profiler.contexts import GivenQuestion

ROOT = Path(__file__).parents[4]

PROSE = """The lighthouse at Skerry Point was built in 1874 from granite that was cut on the island itself. Its lamp
burned colza oil until the keepers changed to paraffin in 1901. Nobody lives there now, and the light turns on by a
timer.

Below the tower lies a small harbour! Fishermen from Aldness land crab and lobster on Tuesdays. Do they sell it there?
The catch goes to a hotel in Brandsea, whose cook pays in cash.

In winter the road is closed for weeks. The lighthouse at Skerry Point keeps its own weather record, which a teacher
reads out at the school every Friday morning.
"""

CHAT = """USER: Which pump failed last night?
ASSISTANT: Pump 7 in the east basement stopped at 02:14 because a seal was torn.
USER: ok
ASSISTANT: I have ordered a seal from Norden, it comes on Thursday.
USER: ok
ASSISTANT: Until then pump 9 takes over its share of the cooling water.
"""


def one_line(text: str) -> str:
    return " ".join(text.split())


def bare(text: str) -> str:
    """The words between spaces, in lower case and without punctuation."""
    words = (re.sub(r"[\W_]+", "", word) for word in text.casefold().split())
    return f" {' '.join(word for word in words if word)} "


def assert_usable(text: str, questions: list[GivenQuestion]) -> None:
    """Every cue occurs once, its answer comes right behind it, and both come in the order of the text."""
    whole, places = bare(text), []
    for question in questions:
        cue = bare(question.text)
        assert question.answer and one_line(f"{question.text} {question.answer}") in one_line(text)
        assert whole.count(cue) == 1
        assert 2 <= len(cue.split()) <= 8
        assert len(bare(question.answer).split()) >= 3
        assert len(cue.split()) + len(bare(question.answer).split()) <= MAX_PIECE_WORDS
        places.append(whole.index(cue))
    assert places == sorted(set(places))


def test_cues_begin_sentences_and_answers_end_them() -> None:
    questions = extract_questions(PROSE, 20, style="continue")
    assert_usable(PROSE, questions)
    assert GivenQuestion("Its lamp", "burned colza oil until the keepers changed to paraffin in 1901.") in questions
    assert GivenQuestion("Below the", "tower lies a small harbour!") in questions
    # Two sentences begin with the same five words: it takes the sixth.
    cues = [question.text for question in questions if question.text.startswith("The lighthouse")]
    assert cues == ["The lighthouse at Skerry Point was", "The lighthouse at Skerry Point keeps"]


def test_few_questions_are_spread_over_the_text_and_the_same_every_time() -> None:
    paragraphs = [f"Room {n} holds the {n * 37 % 101} files of case {n * 91 % 997}." for n in range(90)]
    text = "\n\n".join(paragraphs)
    questions = extract_questions(text, 6, style="continue")
    assert questions == extract_questions(text, 6, style="continue")
    assert [int(question.text.split()[1]) // 15 for question in questions] == [0, 1, 2, 3, 4, 5]


def test_of_a_part_of_the_text_the_rarest_sentence_is_asked_about() -> None:
    common = "The {0} of the house was in the house and the {0} of the house was old."
    rare = "Cook {0} sold eleven copper kettles to a blind sailor from Gdansk on {0} May."
    sentences = [common.format("roof"), rare.format(1), common.format("door"), common.format("wall"), rare.format(2)]
    questions = extract_questions(" ".join(sentences), 2, style="continue")
    assert [question.text for question in questions] == ["Cook 1", "Cook 2"]


def test_where_a_part_has_no_question_the_others_give_more() -> None:
    text = "one two three four\n" * 60 + "\n".join(f"Box {n} is full of item {n * 7}." for n in range(30))
    questions = extract_questions(text, 8, style="continue")
    assert_usable(text, questions)
    assert len(questions) == 8
    boxes = [int(question.text.split()[1]) for question in questions]
    assert max(b - a for a, b in zip(boxes, boxes[1:], strict=False)) <= 8


def test_a_chat_is_asked_about_what_was_said_not_who_said_it() -> None:
    questions = extract_questions(CHAT, 10, style="continue")
    assert_usable(CHAT, questions)
    assert [question.text for question in questions] == ["Which pump", "Pump 7", "I have", "Until then"]
    assert questions[1].answer == "in the east basement stopped at 02:14 because a seal was torn."


def test_a_label_is_the_cue_where_only_it_tells_lines_apart() -> None:
    text = "\n".join(f"line {name}: CONTENT is <{n}>" for n, name in enumerate(("kid", "bull", "hash", "scarf")))
    assert extract_questions(text, 4, style="continue")[1] == GivenQuestion("line bull:", "CONTENT is <1>")


def test_lines_broken_to_fit_a_page_are_one_sentence() -> None:
    (question,) = extract_questions("The bridge over the river was closed for a year because of\nrust.", 3)
    assert question.answer == "over the river was closed for a year because of rust."


def test_text_without_punctuation_is_cut_into_pieces() -> None:
    text = " ".join(f"word{n}" for n in range(1000))
    questions = extract_questions(text, 10, style="continue")
    assert len(questions) == 10
    assert_usable(text, questions)


def test_unspaced_scripts_are_asked_about_by_characters() -> None:
    capital = "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002"
    text = capital + "\u5927\u962a\u306f\u897f\u306b\u3042\u308a\u307e\u3059\u3002"
    questions = extract_questions(text, 5, style="continue")
    assert questions == [
        GivenQuestion("\u6771\u4eac", "\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059"),
        GivenQuestion("\u5927\u962a", "\u306f\u897f\u306b\u3042\u308a\u307e\u3059"),
    ]


def test_the_natural_style_asks_an_english_question_with_the_cue_in_it() -> None:
    natural, bare_cue = (extract_questions(PROSE, 1, style=style)[0] for style in ("natural", "continue"))
    assert natural.answer == bare_cue.answer
    assert f'the words "{bare_cue.text}" in the text above?' in natural.text


@pytest.mark.parametrize(
    "text", ["", " \n\t", "word", "two words", "... !!! ---", "!" * 10**6, "no no no no " * 50, "ab, cd.\nef gh."]
)
def test_text_that_offers_no_question_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a text of \d+ words has no sentence whose first 2 to 8 words occur once"):
        extract_questions(text, 3)


def test_a_wrong_number_or_style_is_refused() -> None:
    with pytest.raises(ValueError, match="num_questions is 0: expected at least 1"):
        extract_questions(PROSE, 0)
    with pytest.raises(ValueError, match="style 'odd' is unknown: expected one of natural, continue"):
        extract_questions(PROSE, 1, style="odd")


WORDS = st.sampled_from(("a", "b", "Ann", "and", "\u00c9t\u00e9", "7", "x-y", "won't", "said:", *"cdefghijklmnopqrst"))
MARKS = st.sampled_from(
    (" ", " ", " ", ". ", " . ", "! ", ", ", " -- ", ": ", "\u3002", "\n", ".\n\n", "\r\n", "\t", ' "')
)


@given(st.lists(st.tuples(WORDS, MARKS), min_size=10, max_size=150), st.integers(1, 8))
def test_any_text_gives_usable_questions_or_is_refused(pieces: list[tuple[str, str]], num_questions: int) -> None:
    text = "".join(word + mark for word, mark in pieces)
    try:
        questions = extract_questions(text, num_questions, style="continue")
    except ValueError as refusal:
        assert "occur once" in str(refusal)
    else:
        assert 1 <= len(questions) <= num_questions
        assert_usable(text, questions)


# An endpoint

Reply = Callable[["Endpoint", dict[str, object]], tuple[int, bytes, dict[str, str]]]


class Endpoint:
    """An OpenAI-compatible server on this machine that says what the test wants; keeps what it was asked."""

    def __init__(self, reply: Reply) -> None:
        self.asked: list[dict[str, object]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        endpoint = self

        class Conversation(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.asked.append(body)
                endpoint.paths.append(self.path)
                endpoint.keys.append(self.headers["Authorization"])
                status, data, headers = reply(endpoint, body)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                endpoint.paths.append(self.path)
                self.send_error(405)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Conversation)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.asked]  # type: ignore[index]


Serve = Callable[[Reply], Endpoint]


def asked_of(endpoint: Endpoint, num_questions: int) -> list[GivenQuestion]:
    return ask_questions(ChatEndpoint(endpoint.url, "m"), "Some text.", num_questions)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-endpoint")
    started: list[Endpoint] = []

    def start(reply: Reply) -> Endpoint:
        started.append(Endpoint(reply))
        return started[-1]

    yield start
    for endpoint in started:
        endpoint.stop()


def completion(content: object) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode(), {}


def lines(*names: object) -> str:
    return "\n".join(json.dumps({"question": f"What is {name}?", "answer": f"{name}"}) for name in names)


def asked_for(prompt: str) -> int:
    (number,) = re.findall(r"^Write (\d+) questions", prompt, re.MULTILINE)
    return int(number)


def test_the_prompt_shows_the_text_and_asks_for_so_many_lines(serve: Serve) -> None:
    endpoint = serve(lambda _, body: completion(lines("a", "b", "c")))
    text = "Costs are $text, {braces} and $5.\nUnd \u00fcber."
    questions = ask_questions(ChatEndpoint(endpoint.url, "some-model", "secret"), text, 3)
    assert questions == [GivenQuestion(f"What is {name}?", name) for name in "abc"]
    (prompt,) = endpoint.prompts
    assert text in prompt and asked_for(prompt) == 3
    assert endpoint.asked[0]["model"] == "some-model" and endpoint.asked[0]["temperature"] == 0.0
    assert endpoint.keys == ["Bearer secret"]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_the_address_may_be_given_with_or_without_its_path(serve: Serve, suffix: str) -> None:
    endpoint = serve(lambda _, body: completion("Hello"))
    assert ChatEndpoint(endpoint.url + suffix, "m").complete("Hi") == "Hello"
    assert endpoint.paths == ["/v1/chat/completions"]
    assert endpoint.keys == [None]


@pytest.mark.parametrize(
    "content",
    [
        "```json\n" + lines("a", "b") + "\n```",
        "Sure! Here are 2 questions:\n\n1. " + lines("a") + "\n2) " + lines("b") + "\nAnything else?",
        "- " + lines("a") + ",\n- " + lines("b"),
        json.dumps([{"question": " What is a?\n", "answer": "a"}, {"question": "What is b?", "answer": "b"}], indent=2),
        json.dumps(
            {"questions": [{"question": "What is a?", "answer": "a"}, {"answer": "b", "question": "What is b?"}]}
        ),
        "<think>" + lines("draft") + "</think>" + lines("a", "b"),
        lines("a", "A", "a", "b"),
        '{"question": "What is x?"}\n{"question": "", "answer": "x"}\n{"question": true, "answer": "x"}\n'
        + lines("a", "b"),
        '{"question": "What is '
        + "x" * 2001
        + '?", "answer": "x"}'
        + lines("a", "b")
        + '{"question": "What is c?", "ans',
    ],
    ids=["fence", "numbers", "dashes", "array", "object", "thoughts", "repeats", "incomplete", "long and cut"],
)
def test_whatever_is_around_the_lines_they_are_found(serve: Serve, content: str) -> None:
    endpoint = serve(lambda _, body: completion(content))
    questions = asked_of(endpoint, 2)
    assert questions == [GivenQuestion("What is a?", "a"), GivenQuestion("What is b?", "b")]
    assert len(endpoint.asked) == 1


def test_a_number_is_an_answer(serve: Serve) -> None:
    endpoint = serve(lambda _, body: completion('{"question": "How many?", "answer": 12}'))
    assert asked_of(endpoint, 1) == [GivenQuestion("How many?", "12")]


def test_what_is_missing_is_asked_for_again_and_what_is_too_much_is_left(serve: Serve) -> None:
    replies = iter([lines("a", "b"), lines("b", "c"), lines("d", "e", "f", "g")])
    endpoint = serve(lambda _, body: completion(next(replies)))
    questions = asked_of(endpoint, 5)
    assert [question.answer for question in questions] == ["a", "b", "c", "d", "e"]
    assert [asked_for(prompt) for prompt in endpoint.prompts] == [5, 3, 2]
    assert [body["temperature"] for body in endpoint.asked] == [0.0, 0.7, 0.7]


def test_fewer_than_wanted_are_returned_after_the_last_try(serve: Serve) -> None:
    endpoint = serve(lambda _, body: completion(lines("a")))
    assert len(asked_of(endpoint, 4)) == 1
    assert len(endpoint.asked) == 3


@pytest.mark.parametrize(
    "garbage", ["", "I cannot do that.", "Q1: What is a?\nA1: a", "{" * 3000, '{"a":' * 5000, "[]", '{"question": {}}']
)
def test_replies_without_a_question_are_an_error_that_names_the_address(serve: Serve, garbage: str) -> None:
    endpoint = serve(lambda _, body: completion(garbage))
    with pytest.raises(EndpointError) as refused:
        asked_of(endpoint, 2)
    assert str(refused.value).startswith(f"{endpoint.url}/v1/chat/completions gave no question in 3 replies, at last ")
    assert len(endpoint.asked) == 3


@pytest.mark.parametrize(
    "data", [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}']
)
def test_what_is_no_chat_completion_is_an_error(serve: Serve, data: bytes) -> None:
    endpoint = serve(lambda _, body: (200, data, {}))
    with pytest.raises(EndpointError, match=f"^{endpoint.url}/v1/chat/completions replied .*: expected a"):
        asked_of(endpoint, 2)
    assert len(endpoint.asked) == 1


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client would have slept between its tries."""
    waits: list[float] = []
    monkeypatch.setattr("openai._base_client.time.sleep", waits.append)
    return waits


def test_a_busy_server_is_asked_again_when_it_says(serve: Serve, waits: list[float]) -> None:
    busy = iter([(429, {}), (503, {"Retry-After": "7"}), (502, {"Retry-After": "soon"})])

    def reply(_: Endpoint, body: object) -> tuple[int, bytes, dict[str, str]]:
        status, headers = next(busy, (200, {}))
        return completion(lines("a")) if status == 200 else (status, b"busy", headers)

    endpoint = serve(reply)
    assert len(asked_of(endpoint, 1)) == 1
    assert len(waits) == 3 and waits[1] == 7.0


def test_a_server_that_stays_busy_is_given_up(serve: Serve, waits: list[float]) -> None:
    endpoint = serve(lambda _, body: (503, b"loading\nthe model", {}))
    with pytest.raises(EndpointError, match=r"did not answer in 5 tries, at last: status 503, loading the model$"):
        asked_of(endpoint, 1)
    assert len(endpoint.asked) == MAX_TRIES == len(waits) + 1


@pytest.mark.parametrize("status", [400, 401, 404, 302, 307])
def test_a_refusal_is_final_names_the_address_and_hides_the_key(serve: Serve, status: int) -> None:
    other = serve(lambda _, body: completion(lines("a")))
    endpoint = serve(lambda _, body: (status, b"bad key sk-123", {"Location": other.url}))
    with pytest.raises(EndpointError) as refused:
        ask_questions(ChatEndpoint(endpoint.url + "/v1?version=2", "m", "sk-123"), "Some text.", 1)
    assert str(refused.value) == f"{endpoint.url}/v1/chat/completions refused: status {status}, bad key ***"
    assert len(endpoint.asked) == 1 and endpoint.paths == ["/v1/chat/completions?version=2"]
    assert other.paths == []
    assert "sk-123" not in repr(ChatEndpoint(endpoint.url, "m", "sk-123"))


def test_a_server_that_is_away_is_an_error_that_names_the_address(serve: Serve, waits: list[float]) -> None:
    endpoint = serve(lambda _, body: completion(""))
    endpoint.stop()
    with pytest.raises(
        EndpointError, match=f"^{endpoint.url}/v1/chat/completions did not answer in 5 tries, at last: "
    ):
        asked_of(endpoint, 1)


def test_a_long_text_is_shown_in_parts_that_share_the_questions(serve: Serve) -> None:
    paragraphs = [f"Paragraph {n} says {'so ' * 30}much." for n in range(50)]
    endpoint = serve(lambda end, body: completion(lines(*(f"{len(end.asked)}-{n}" for n in range(9)))))
    questions = ask_questions(ChatEndpoint(endpoint.url, "m"), "\n".join(paragraphs), 7, part_chars=2000)
    assert len(questions) == 7
    shown = ["\n".join(re.findall("^Paragraph.*$", prompt, re.MULTILINE)) for prompt in endpoint.prompts]
    assert [paragraph for part in shown for paragraph in part.split("\n")] == paragraphs
    assert max(map(len, shown)) <= 2000 * 9 / 8
    assert [asked_for(prompt) for prompt in endpoint.prompts] == [2, 2, 3]


def test_of_more_parts_than_questions_some_are_shown_over_the_whole_text(serve: Serve) -> None:
    text = "\n".join(f"Paragraph {n}." for n in range(1000))
    endpoint = serve(lambda end, body: completion(lines(len(end.asked))))
    assert len(ask_questions(ChatEndpoint(endpoint.url, "m"), text, 4, part_chars=100)) == 4
    first = [int(re.findall(r"Paragraph (\d+)\.", prompt)[0]) for prompt in endpoint.prompts]
    assert all(abs(place - wanted) < 20 for place, wanted in zip(first, (240, 490, 740, 990), strict=True))


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("file:///etc/passwd", None, "'file:///etc/passwd' cannot be asked: expected http:// or https://"),
        ("localhost:30000", None, "cannot be asked"),
        ("http://", None, "cannot be asked"),
        ("http://host:99999", None, "cannot be asked"),
        ("http://host/a b\n", None, "cannot be asked"),
        ("https://me:word@host", None, "'host' cannot be asked: .* without a user name"),
        ("http://host", "two\nlines", "the API key has characters that no header can carry"),
        ("http://host", "\u20ac", "the API key has characters"),
    ],
)
def test_an_address_or_key_that_cannot_be_used_is_refused_before_anything_is_sent(
    url: str, key: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        ask_questions(ChatEndpoint(url, "m", key), "Some text.", 1)
    assert "me:word" not in str(refused.value) and "two" not in str(refused.value)


def test_an_empty_text_or_number_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="the text is empty"):
        ask_questions(ChatEndpoint("http://127.0.0.1:1", "m"), " \n", 1)
    with pytest.raises(ValueError, match="num_questions is 0"):
        ask_questions(ChatEndpoint("http://127.0.0.1:1", "m"), "Some text.", 0)


def test_what_the_package_reads_beside_its_modules_is_package_data() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    declared = setuptools["package-data"]["sglang_evicpress"]
    package = ROOT / "python" / "sglang_evicpress"
    beside = [path for path in (package / "cli").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert beside and {path.relative_to(package).as_posix() for path in beside} <= set(declared)
