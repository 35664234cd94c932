"""``evicpress profile`` against a server: what it keeps there, what it says, how it goes on, and its exit status."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.unit.profiler.fake_server import HEAD, IDENTITY, LOSS, FakeServer, no, serving

from sglang_evicpress.cli.main import main
from sglang_evicpress.cli.profile import command, connection
from sglang_evicpress.cli.profile.chat import ChatEndpoint
from sglang_evicpress.core import PRESSES, Form
from sglang_evicpress.press import get_press
from sglang_evicpress.profiler.contexts import GivenQuestion
from sglang_evicpress.profiler.prompts import Template
from sglang_evicpress.profiler.transport import HttpTransport
from sglang_evicpress.progress import Progress
from sglang_evicpress.quality.profile import Profile, context_keys
from sglang_evicpress.quality.running_stats import RunningStats
from sglang_evicpress.quality.store import ProfileStore

FIRST = "the first context, " * 12
SECOND = "quite another one; " * 15
FORMS = "keydiff@0.5,knorm@0.5,keydiff@0.2,knorm@0.2"


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (connection.KEY_VARIABLE, connection.ADMIN_KEY_VARIABLE, command.QUESTIONS_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sglang_evicpress.profiler.transport.time.sleep", lambda seconds: None)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as server:
        yield server


@pytest.fixture
def contexts(tmp_path: Path) -> Path:
    path = tmp_path / "contexts.jsonl"
    write(path, {"context": FIRST, "questions": ["What?", {"question": "Where?", "answer": "here"}], "id": "one"},
          {"context": SECOND, "questions": ["When?"], "id": "two", "extra_key": "tenant"})  # fmt: skip
    return path


def write(path: Path, *records: object) -> None:
    path.write_bytes(b"\n".join(map(orjson.dumps, records)))


def run(server: FakeServer, contexts: Path, *words: str) -> int:
    return main(["profile", "--url", server.url, "--contexts", str(contexts), "--forms", FORMS, *words])


def profile_of(server: FakeServer, text: str, namespace: str | None = None) -> Profile:
    """Profile that the server keeps of a chat with ``text``: its tokens are the characters."""
    tokens = [HEAD, *map(ord, f"{text}\n\n")]
    key = context_keys(IDENTITY, namespace, tokens)[-1].hex()
    return Profile.from_json(server.profiles[key])


def quality(form: str) -> float:
    parsed = Form.parse_stored(form)
    return math.exp(-LOSS[parsed.press or ""] * (1.0 - parsed.kept_fraction) ** 2)


def test_every_context_is_measured_and_kept_at_the_server(
    server: FakeServer, contexts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, contexts) == 0
    first, second = profile_of(server, FIRST), profile_of(server, SECOND, "tenant")
    assert (first.num_queries, second.num_queries) == (2, 1)
    assert first.num_tokens == (len(FIRST) + 3) // 64 * 64
    assert {str(form): seen.mean for form, seen in first.forms.items()} == pytest.approx(
        {form: quality(form) for form in FORMS.split(",")}
    )
    assert server.posted("/evicpress/profiles")[0]["is_fresh"] is True
    assert [shadow["extra_key"] for shadow in server.posted("/shadows")] == [None, "tenant"]
    assert all(shadow["may_evict"] for shadow in server.posted("/shadows"))
    assert server.shadows == {}
    output = capsys.readouterr()
    assert output.err == ""
    rows = [line.split() for line in output.out.splitlines()]
    assert rows[1:] == [
        ["one", "192", "2", "keydiff", f"{quality('keydiff@0.5'):.3f}", "keydiff", f"{quality('keydiff@0.2'):.3f}"],
        ["two", "256", "1", "keydiff", f"{quality('keydiff@0.5'):.3f}", "keydiff", f"{quality('keydiff@0.2'):.3f}"],
    ]


def test_a_context_is_kept_before_the_next_one_begins(server: FakeServer, contexts: Path) -> None:
    run(server, contexts)
    steps = [path for method, path, _ in server.log if method == "POST" and path.endswith(("/shadows", "/profiles"))]
    assert steps == ["/evicpress/shadows", "/evicpress/profiles"] * 2


def test_a_prompt_is_what_a_user_sends(server: FakeServer, contexts: Path) -> None:
    run(server, contexts)
    (message,) = server.posted("/tokenize")[0]["messages"]
    assert message == {"role": "user", "content": f"{FIRST}\n\nWhat?"}
    answered = server.posted("/generate")[0]
    assert [len(prompt) for prompt in answered["input_ids"]] == [len(FIRST) + 9, len(FIRST) + 10]
    assert answered["sampling_params"]["max_new_tokens"] == 64


def test_a_text_prompt_fills_the_template(server: FakeServer, contexts: Path) -> None:
    assert run(server, contexts, "--prompt", "text", "--template", r"<{context}>\n{question}!") == 0
    assert server.posted("/tokenize")[0] == {"prompt": f"<{FIRST}>\nWhat?!"}
    first = Profile.from_json(next(iter(server.profiles.values())))
    tokens = list(map(ord, f"<{FIRST}>\n"))
    assert first.key == context_keys(IDENTITY, None, tokens)[-1]


def test_what_questions_have_in_common_is_no_part_of_the_context(server: FakeServer, tmp_path: Path) -> None:
    same = "Of all that was said above, and it was a lot, and of what was not said but meant: "
    write(tmp_path / "c", {"context": FIRST, "questions": [f"{same}what?", f"{same}who?"]})
    assert run(server, tmp_path / "c") == 0
    assert profile_of(server, FIRST).num_tokens == (len(FIRST) + 3) // 64 * 64


def test_resume_leaves_out_just_such_profiles(
    server: FakeServer, contexts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured_again(*words: str) -> int:
        server.log.clear()
        assert run(server, contexts, *words) == 0
        return len(server.posted("/shadows"))

    assert measured_again("--resume") == 2
    capsys.readouterr()
    assert measured_again("--resume") == 0
    assert "2 of 2 contexts were measured before" in capsys.readouterr().out
    assert measured_again() == 2
    assert measured_again("--resume", "--forms", "keydiff@0.5") == 0  # a later --forms wins
    assert measured_again("--resume", "--forms", "keydiff@0.9") == 2
    assert measured_again("--resume", "--forms", "keydiff@0.9", "--scorer", "f1") == 2
    write(contexts, {"context": FIRST, "questions": ["Why?"]})
    assert measured_again("--resume", "--forms", "keydiff@0.9", "--scorer", "f1") == 1


def test_resume_tells_apart_what_was_measured_with_other_settings(server: FakeServer, contexts: Path) -> None:
    def measured_again(*words: str) -> int:
        server.log.clear()
        assert run(server, contexts, "--resume", *words) == 0
        return len(server.posted("/shadows"))

    def answered(answer: str | None) -> None:
        questions = [{"question": "What?", "answer": answer}, {"question": "Where?"}]
        write(contexts, {"context": FIRST, "questions": questions})

    answered("this")
    assert measured_again("--max-new-tokens", "8") == 1
    assert measured_again("--max-new-tokens", "1") == 1
    assert measured_again("--max-new-tokens", "1") == 0
    answered("that")
    assert measured_again("--max-new-tokens", "1") == 0  # the scorer logprob does not look at it
    assert measured_again("--scorer", "f1") == 1
    assert measured_again("--scorer", "f1") == 0
    answered("these")
    assert measured_again("--scorer", "f1") == 1
    answered(None)
    assert measured_again("--scorer", "f1") == 1
    write(contexts, {"context": FIRST, "questions": ["Where?", "What?"]})
    assert measured_again("--scorer", "f1") == 0  # the order is all the same


def test_resume_does_not_wait_for_presses_that_the_server_has_no_queries_for(
    server: FakeServer, contexts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.menu = ["keydiff@0.5"]
    every = ("--forms", command.DEFAULT_FORMS)
    assert run(server, contexts, *every) == 0
    assert "'one' could not be measured in snapkv@0.8, snapkv@0.5, snapkv@0.2" in capsys.readouterr().out
    assert not any(body["form"].startswith("snapkv") for body in server.posted("/forms"))
    server.log.clear()
    assert run(server, contexts, *every, "--resume") == 0
    assert server.posted("/shadows") == []
    assert "2 of 2 contexts were measured before" in capsys.readouterr().out
    assert run(server, contexts, "--forms", "snapkv@0.5,snapkv@0.2", "--resume") == 2
    assert "none of snapkv@0.5, snapkv@0.2 can be made: --kv-forms of the server" in capsys.readouterr().err
    server.menu.append("snapkv@0.5")  # the server was started anew with more forms
    server.log.clear()
    assert run(server, contexts, *every, "--resume") == 0
    assert {body["form"].partition("@")[0] for body in server.posted("/forms")} == {"snapkv"}
    assert len(profile_of(server, FIRST).forms) == 19


def test_presses_that_need_queries_are_known() -> None:
    assert all(get_press(name).needs_queries == press.needs_queries for name, press in PRESSES.items())


def test_resume_measures_the_forms_that_are_missing(
    server: FakeServer, contexts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, contexts, "--forms", "keydiff@0.5") == 0
    server.log.clear()
    assert run(server, contexts, "--forms", "keydiff@0.5,keydiff@0.2", "--resume", "--jsonl", str(tmp_path / "o")) == 0
    assert [body["form"] for body in server.posted("/forms")] == ["keydiff@0.2"] * 2
    first = Profile.from_json(orjson.loads((tmp_path / "o").read_bytes().splitlines()[0])["profile"])
    assert first == profile_of(server, FIRST)
    assert set(map(str, first.forms)) == {"keydiff@0.5", "keydiff@0.2"}


def test_resume_keeps_what_is_known_where_no_other_form_can_be_made(
    server: FakeServer, contexts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuse(no(409, "it cannot be made"), "/forms", lambda body: body["form"].startswith("knorm"))
    assert run(server, contexts) == 0
    before = dict(server.profiles)
    capsys.readouterr()
    assert run(server, contexts, "--resume") == 0
    assert server.profiles == before
    assert server.shadows == {}
    output = capsys.readouterr().out
    assert "2 of 2 contexts were measured before" in output
    assert "'one' could not be measured in knorm@0.5, knorm@0.2" in output


def interrupt_generate(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C arrives while the ``number``-th batch is waited for."""
    plain, calls = HttpTransport.generate, iter(range(1, 10**6))

    def generate(self: HttpTransport, body: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return plain(self, body)

    monkeypatch.setattr(HttpTransport, "generate", generate)


def test_ctrl_c_keeps_what_is_measured_and_resume_does_the_rest(
    server: FakeServer,
    contexts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt_generate(monkeypatch, 8)  # five batches are the first context
    out = tmp_path / "out.jsonl"
    assert run(server, contexts, "--jsonl", str(out)) == 130
    assert len(server.profiles) == 1
    assert server.shadows == {}
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.out.splitlines()] == ["context", "one"]
    assert "interrupted; the server keeps the profiles of 1 of 2 contexts" in output.err
    assert "--resume" in output.err
    assert output.err.count("\n") == 1
    assert not out.exists()
    server.log.clear()
    assert run(server, contexts, "--resume", "--jsonl", str(out)) == 0
    assert [shadow["extra_key"] for shadow in server.posted("/shadows")] == ["tenant"]
    records = [orjson.loads(line) for line in out.read_bytes().splitlines()]
    assert [(record["id"], record["was_there"]) for record in records] == [("one", True), ("two", False)]
    assert Profile.from_json(records[1]["profile"]) == profile_of(server, SECOND, "tenant")


def test_ctrl_c_before_anything_is_measured_prints_no_table(
    server: FakeServer, contexts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_generate(monkeypatch, 1)
    assert run(server, contexts) == 130
    assert capsys.readouterr().out == ""


def test_a_context_that_fails_is_listed_and_the_others_are_measured(
    server: FakeServer, contexts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuse(no(409, "no room for a shadow of 192 slots"), "/shadows", lambda body: body["extra_key"] is None)
    assert run(server, contexts, "--jsonl", str(tmp_path / "out")) == 1
    assert len(server.posted("/shadows")) == command.NUM_RETRIES + 2
    output = capsys.readouterr()
    assert re.search(r"'one' failed: POST .*/evicpress/shadows: status 409: no room", output.out)
    assert re.fullmatch(r"evicpress: 'one' failed: .*\n", output.err)
    assert list(server.profiles) == [profile_of(server, SECOND, "tenant").key.hex()]
    failed, done = [orjson.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    assert (failed["id"], failed["is_skipped"]) == ("one", False)
    assert "no room" in failed["error"]
    assert done["id"] == "two"


def test_a_context_the_server_will_not_keep_has_failed(server: FakeServer, contexts: Path) -> None:
    server.refuse(no(400, "profile has no key"), "/profiles", bool)  # a body: it is to be kept
    assert run(server, contexts) == 1
    assert server.profiles == {}


def test_a_context_measured_in_part_is_no_success(
    server: FakeServer, contexts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users come while the second form is made of it; what was measured is kept, and a script does not go on."""
    made: list[str] = []
    server.refuse(
        no(409, "the shadow is gone: it had to make room"),
        "/forms",
        lambda body: made.append(body["form"]) or len(made) > 1,  # type: ignore[func-returns-value]
    )
    assert run(server, contexts) == 1
    output = capsys.readouterr().out
    assert "'one' is measured in part: users needed the room, 3 of 4 forms are left: --resume goes on" in output
    assert len(profile_of(server, FIRST).forms) == 1


def test_forms_that_cannot_be_made_are_named(
    server: FakeServer, contexts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "its press needs queries of the prompt"
    server.refuse(no(409, reason), "/forms", lambda body: body["form"].startswith("knorm"))
    assert run(server, contexts) == 0
    assert "'one' could not be measured in knorm@0.5, knorm@0.2" in capsys.readouterr().out
    assert {form.press for form in profile_of(server, FIRST).forms} == {"keydiff"}


def test_a_short_context_is_left_out(
    server: FakeServer, contexts: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    short = {"context": "short", "questions": ["What?"], "id": "tiny"}
    write(contexts, short, {"context": FIRST, "questions": ["What?"]})
    assert run(server, contexts) == 0
    output = capsys.readouterr()
    assert "'tiny' left out: its prompts share 8 tokens: expected at least 64" in output.out
    assert "'tiny' is left out" in output.err
    write(contexts, short)
    assert run(server, contexts) == 1  # nothing is measured at all


def test_a_server_that_goes_away_ends_the_run(
    server: FakeServer, contexts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(contexts, *({"context": f"{number}{FIRST}", "questions": ["What?"]} for number in range(5)))

    server.refuse(ConnectionAbortedError(), of=lambda body: len(server.profiles) == 2)
    assert run(server, contexts) == 1
    output = capsys.readouterr()
    assert "the server keeps the profiles of 2 of 5 contexts" in output.err
    assert "'line 3' failed: POST" in output.out
    assert "line 4" not in output.out


def test_questions_are_cut_out_of_a_context_that_has_none(server: FakeServer, tmp_path: Path) -> None:
    text = " ".join(f"Station {number} of the line lies {number * 37} metres above the sea." for number in range(20))
    write(tmp_path / "c", {"context": text})
    assert run(server, tmp_path / "c", "--num-questions", "3") == 0
    assert profile_of(server, text).num_queries == 3
    write(tmp_path / "c", {"context": "word " * 100})
    assert run(server, tmp_path / "c") == 1


@pytest.mark.parametrize(
    ("address", "environment", "key"),
    [
        ("http://elsewhere/v1", {}, None),
        ("http://elsewhere/v1", {"EVICPRESS_QUESTIONS_API_KEY": "theirs"}, "theirs"),
        ("SERVER/v1", {}, "ours"),
        ("SERVER/v1", {"EVICPRESS_QUESTIONS_API_KEY": "theirs"}, "theirs"),
    ],
)
def test_an_endpoint_makes_questions_and_gets_its_own_key(
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    environment: dict[str, str],
    key: str | None,
) -> None:
    calls: list[tuple[object, ...]] = []

    def ask(*given: object) -> list[GivenQuestion]:
        calls.append(given)
        return [GivenQuestion("What?", "that")]

    monkeypatch.setattr(command, "ask_questions", ask)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    url = address.replace("SERVER", server.url)
    write(tmp_path / "c", {"context": FIRST}, {"context": SECOND, "questions": ["Given?"]})
    words = ["--questions-from", url, "--questions-model", "m", "--num-questions", "7", "--api-key", "ours"]
    assert run(server, tmp_path / "c", *words) == 0
    assert calls == [(ChatEndpoint(url, "m", key), FIRST, 7)]


def test_resume_asks_the_endpoint_for_no_questions_twice(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    interruptions = [KeyboardInterrupt()]

    def ask(endpoint: ChatEndpoint, text: str, num_questions: int) -> list[GivenQuestion]:
        calls.append(text)
        if text == SECOND and interruptions:
            raise interruptions.pop()
        return [GivenQuestion(f"What {len(calls)}?", "that")]  # never the same twice

    monkeypatch.setattr(command, "ask_questions", ask)
    contexts = tmp_path / "c"
    write(contexts, {"context": FIRST}, {"context": SECOND})

    def asked(*words: str, status: int = 0) -> list[str]:
        calls.clear()
        assert run(server, contexts, "--questions-from", "http://endpoint/v1", *words) == status
        return calls

    assert asked(status=130) == [FIRST, SECOND]
    server.log.clear()
    assert asked("--resume") == [SECOND]
    assert len(server.posted("/shadows")) == 1
    assert asked("--resume") == []
    assert "2 of 2 contexts were measured before" in capsys.readouterr().out
    assert asked("--resume", "--forms", "keydiff@0.9", "--scorer", "f1") == []  # of the questions there are
    (kept,) = [path for path in (tmp_path / "c.questions").iterdir() if b"What 1?" in path.read_bytes()][:1]
    kept.write_bytes(b"[{")
    assert len(asked("--resume")) == 1
    assert asked("--resume", "--questions-model", "other") == [FIRST, SECOND]
    assert asked("--resume", "--num-questions", "3") == [FIRST, SECOND]
    assert asked() == [FIRST, SECOND]


def test_questions_that_cannot_be_kept_are_not_made(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "c", {"context": FIRST})
    (tmp_path / "c.questions").touch()
    assert run(server, tmp_path / "c", "--questions-from", "http://endpoint/v1") == 2
    error = capsys.readouterr().err
    assert "--questions-from: the questions made cannot be kept in" in error
    assert error.count("\n") == 1
    assert server.log == []
    write(tmp_path / "given", {"context": FIRST, "questions": ["What?"]})
    assert run(server, tmp_path / "given", "--questions-from", "http://endpoint/v1") == 0
    assert not (tmp_path / "given.questions").exists()


def test_keys_come_from_the_environment(
    server: FakeServer, contexts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(connection.KEY_VARIABLE, "ours")
    assert run(server, contexts) == 0
    assert set(server.keys) == {"Bearer ours"}
    server.keys.clear()
    server.log.clear()
    monkeypatch.setenv(connection.ADMIN_KEY_VARIABLE, "chief")
    assert run(server, contexts, "--api-key", "given") == 0
    is_admins = [path.startswith("/evicpress/") for _, path, _ in server.log]
    assert set(is_admins) == {True, False}
    assert server.keys == ["Bearer chief" if is_admin else "Bearer given" for is_admin in is_admins]
    assert "ours" not in "".join(capsys.readouterr())


BAD: list[tuple[list[str], str]] = [
    (["--forms", "keydiff"], "--forms: form 'keydiff' is not known"),
    (["--forms", "exact"], "--forms: 'exact' has exact"),
    (["--scorer", "taste"], "--scorer: scorer 'taste' is unknown"),
    (["--prompt", "email"], "--prompt: invalid choice: 'email'"),
    (["--template", "{context}"], "--template: '{context}': expected"),
    (["--template", "{question} {context}"], "--template: '{question} {context}': expected"),
    (["--num-questions", "0"], "--num-questions: '0': expected a whole number from 1 to 1000"),
    (["--max-new-tokens", "many"], "--max-new-tokens: 'many': expected"),
    (["--url", "localhost"], "--url: URL 'localhost': expected"),
    (["--contexts", "/none"], "--contexts: /none cannot be read"),
    (["--jsonl", "/none/out"], "--jsonl: '/none/out': the folder '/none' does not exist"),
    (["--questions-from", "nowhere"], "--questions-from: endpoint 'nowhere' cannot be asked"),
    (["--what"], "unrecognized arguments: --what"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_line_and_status_2(
    server: FakeServer, contexts: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert run(server, contexts, *words) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"evicpress: error: {said}")
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert server.log == []


def test_the_contexts_are_not_written_over(server: FakeServer, contexts: Path) -> None:
    assert run(server, contexts, "--jsonl", str(contexts)) == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (no(404, "Not Found"), "expected a server with EvicPress that keeps profiles"),
        (no(501, "the cache is a RadixCache"), "status 501: the cache is a RadixCache"),
        (ConnectionAbortedError(), "the connection broke"),
    ],
)
def test_no_such_server_is_status_2(
    server: FakeServer, contexts: Path, capsys: pytest.CaptureFixture[str], answer: Exception, said: str
) -> None:
    server.refuse(answer)
    assert run(server, contexts) == 2
    assert said in capsys.readouterr().err


def test_help_lists_the_command_and_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--help"], "profile"),
        (["profile", "--help"], "--resume"),
        (["profile", "show", "--help"], "--admin-api-key"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 0
        assert said in capsys.readouterr().out


def test_the_default_forms_are_nineteen() -> None:
    assert len({Form.parse_stored(text) for text in command.DEFAULT_FORMS.split(",")}) == 19


@pytest.mark.parametrize("text", ["{context}{question}", "a {context} b {question} c", r"{context}\n{question}"])
def test_a_template_is_filled_whatever_the_texts_are(text: str) -> None:
    filled = Template.parse(text).fill("C{question}{context}", "Q{context}")
    assert filled == text.replace(r"\n", "\n").replace("{question}", "Q{context}").replace(
        "{context}", "C{question}{context}", 1
    )


def test_the_bar_counts_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, "forms", is_shown=True) as progress:
        progress.name("one")
        progress.step(4)
        progress.leave_out(2)
        progress.say("hello")
        assert (progress._bar.n, progress._bar.total) == (4, 8)
    assert "evicpress: hello\n" in capsys.readouterr().err


def stored(path: Path, *profiles: Profile, identity: bytes = IDENTITY) -> None:
    store = ProfileStore(path, identity)
    for profile in profiles:
        store.put(profile)


def some_profile(number: int, form: str = "keydiff@0.5", *qualities: float) -> Profile:
    evidence = RunningStats.of(qualities or (0.9, 0.8))
    return Profile(bytes([number] * 16), 640, {Form.parse(form): evidence}, "logprob", "0" * 16, 2, 1.7e9)
