"""The demo without a server: its figures, its table, its picture, its client and how it fails."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import httpx
import openai
import pytest
from demo import load, report
from demo.load import Answer
from testbed.server import Server, ServerError
from testbed.workload import Turn

ROOT = Path(__file__).parents[2]


def turn(context_id: int, answer: str = "a b") -> Turn:
    return Turn(context_id, "needle", "some context", "code x", answer)


def answer(text: str = "a b", ttft_s: float = 0.1, prompt: int = 100, cached: int = 0) -> Answer:
    return Answer(text, ttft_s, 2 * ttft_s, prompt, cached)


@pytest.fixture
def script() -> Iterator[ModuleType]:
    """bench/demo.py itself; the package of the same name holds its parts."""
    spec = importlib.util.spec_from_file_location("demo_script", ROOT / "bench" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_script"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["demo_script"]


def client(reply: Callable[[httpx.Request], httpx.Response]) -> openai.OpenAI:
    transport = httpx.Client(transport=httpx.MockTransport(reply))
    return openai.OpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=transport)


def stream(words: list[str], prompt: int, cached: int | None) -> httpx.Response:
    """Stream as SGLang sends it: a chunk with the role, one per word, and the usage last."""
    base = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "testbed"}
    deltas: list[dict[str, str]] = [
        {"role": "assistant", "content": ""},
        *({"content": word} for word in words),
    ]
    chunks = [{**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if cached is not None:
        details = {"cached_tokens": cached}
        usage = {"prompt_tokens": prompt, "completion_tokens": 1, "total_tokens": prompt + 1}
        chunks.append({**base, "choices": [], "usage": {**usage, "prompt_tokens_details": details}})
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return httpx.Response(
        200, text="".join([*lines, "data: [DONE]\n\n"]), headers={"content-type": "text/event-stream"}
    )


def test_percentile_is_the_nearest_rank() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [report.percentile(values, share) for share in (0.01, 0.5, 0.75, 0.95, 1.0)] == [
        1.0,
        2.0,
        3.0,
        4.0,
        4.0,
    ]


def test_only_contexts_asked_about_before_count_as_recomputed() -> None:
    turns = [turn(0), turn(0), turn(1), turn(0), turn(1)]
    cached = [0, 98, 5, 30, 0]
    answers = [answer(cached=count) for count in cached]
    assert report.recomputed_tokens(turns, answers, context_tokens=98) == (98 - 30) + 98


def test_figures_compare_with_the_reference_and_with_the_truth() -> None:
    turns = [turn(0, "a b"), turn(0, "a c")]
    exact = [answer("a b"), answer("a b")]
    given = [answer("a b", 0.1, 100, 0), answer("a c", 0.3, 100, 50)]
    got = report.figures(turns, given, exact, context_tokens=90, total_s=1.5)
    assert got.similarity == pytest.approx(0.75)
    assert got.truth_f1 == 1.0
    assert (got.hit_share, got.computed_tokens, got.recomputed_tokens) == (0.25, 150, 40)
    assert (got.ttft_mean_s, got.ttft_p50_s, got.ttft_p95_s) == (pytest.approx(0.2), 0.1, 0.3)


def test_the_table_shows_a_loss_as_it_is() -> None:
    better = report.Figures(0.1, 0.1, 0.2, 10.0, 0.5, 1000, 800, 1.0, 0.9)
    worse = report.Figures(0.2, 0.1, 0.4, 12.0, 0.4, 1500, 1200, 0.7, 0.6)
    stats = {
        "decisions": {"compressed": {}, "dropped": 7, "dropped_tokens": 900},
        "cached_tokens": 10,
        "cached_slots": 10,
    }
    ours = {
        "decisions": {"compressed": {"keydiff@0.5": 3}, "dropped": 2, "dropped_tokens": 100},
        "cached_tokens": 20,
        "cached_slots": 10,
    }
    text = report.table(better, worse, stats, ours)
    rows = {cells[0]: cells[1:] for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines())}
    assert rows["TTFT mean, ms"] == ["100", "200", "2.00"]
    assert rows["prefix-hit share, %"] == ["50.0", "40.0", "0.80"]
    assert rows["tokens recomputed"] == ["800", "1200", "1.50"]
    assert rows["nodes brought to keydiff@0.5"] == ["0", "3", ""]
    assert rows["nodes dropped"] == ["7", "2", ""]
    assert rows["tokens dropped"] == ["900", "100", "0.11"]
    assert rows["tokens resident at the end"] == ["10 in 10 slots", "20 in 10 slots", ""]
    assert rows["answers like uncompressed, F1"] == ["1 (reference)", "0.700", ""]
    assert rows["answers like the truth, F1"] == ["0.900", "0.600", "0.67"]
    assert len({len(line) for line in text.splitlines()}) == 1


def test_forms_are_listed_from_the_mildest_on() -> None:
    compressed = {"snapkv@0.4": 1, "keydiff@0.2": 1, "keydiff@0.8": 1}
    stats = {"decisions": {"compressed": compressed, "dropped": 0, "dropped_tokens": 0}}
    assert report.forms_chosen(stats) == ["keydiff@0.8", "keydiff@0.2", "snapkv@0.4", "drop"]


def node(number: int, num_tokens: int, num_slots: int, weight: float, form: str = "exact") -> dict[str, object]:
    sizes = {"num_tokens": num_tokens, "num_slots": num_slots}
    return {"id": number, "form": form, "weight": weight, "children": [], **sizes}


def test_the_picture_shows_the_most_used_contexts_and_their_slots() -> None:
    nodes = [node(1, 100, 100, 1.0), node(2, 100, 25, 9.0, "keydiff@0.25"), node(3, 8, 8, 99.0)]
    lines = report.tree_picture({"nodes": nodes}, context_tokens=100).splitlines()
    assert lines[0] == "root: 2 contexts resident, 1 nodes of questions and answers"
    assert lines[1].startswith("|- node 2") and "[######..................]" in lines[1]
    assert lines[2].startswith("`- node 1") and "[########################]" in lines[2]
    assert report.tree_picture({"nodes": nodes}, 100, num_shown=1).splitlines()[-1] == "`- and 1 more"


def test_an_answer_has_its_words_its_times_and_its_cached_tokens() -> None:
    with client(lambda request: stream(["k1", " k2"], 100, 60)) as given:
        got = load.ask(given, turn(0).messages)
    assert (got.text, got.prompt_tokens, got.cached_tokens, got.computed_tokens) == ("k1 k2", 100, 60, 40)
    assert 0 < got.ttft_s <= got.total_s


def test_a_stream_cut_short_is_a_failure() -> None:
    with (
        client(lambda request: stream(["k1"], 100, None)) as given,
        pytest.raises(openai.OpenAIError, match="last chunk"),
    ):
        load.ask(given, turn(0).messages)


def test_answers_come_back_in_the_order_of_the_turns() -> None:
    turns = [Turn(i, "needle", f"w{i}", "code x", "a") for i in range(20)]
    seen: list[int] = []

    def reply(request: httpx.Request) -> httpx.Response:
        content = json.loads(request.content)["messages"][0]["content"]
        return stream([content.split()[0]], 100, 0)

    with client(reply) as given:
        answers = load.ask_all(given, turns, 3, lambda arrived: seen.append(len(arrived)))
    assert [item.text for item in answers] == [f"w{i}" for i in range(20)]
    assert seen == list(range(1, 21))


def test_the_first_failure_ends_the_load() -> None:
    asked: list[int] = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(1)
        return httpx.Response(500, json={"error": {"message": "gone"}})

    with client(reply) as given, pytest.raises(openai.OpenAIError):
        load.ask_all(given, [turn(i) for i in range(500)], 2, lambda arrived: None)
    assert len(asked) < 500


def test_progress_is_plain_and_sparse_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = load.Progress("lru", 3)
    answers = [answer(cached=50) for _ in range(3)]
    for count in (1, 2, 3):
        progress(answers[:count])
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "\r" not in out
    assert "3/3" in out and "mean TTFT  100 ms" in out and "prefix hits  50%" in out


def test_the_setting_is_a_workload_larger_than_its_pool(script: ModuleType) -> None:
    setting = script.Setting(6, 3, 200, 400, 2, 1.0, 1.0, 7)
    turns = setting.turns()
    assert len(turns) == 18 and len({item.context_id for item in turns}) == 6
    assert setting.working_set_tokens == 1200
    assert {item.context for item in setting.warm_up()}.isdisjoint(item.context for item in turns)
    assert "3.0 times the pool" in script.explain(setting, turns)


def test_the_config_holds_the_measured_curves(script: ModuleType, tmp_path: Path) -> None:
    from sglang_evicpress.config import EvicPressConfig

    path = tmp_path / "config.json"
    script.write_config(path, script.Setting(6, 3, 200, 400, 2, 1.0, 0.5, 7), 2e-4)
    config = EvicPressConfig.from_flags("evicpress", str(path))
    assert (config.alpha, config.prefill_per_token_s) == (0.5, 2e-4)
    assert config.curves == json.loads(script.CURVES.read_text())["curves"]
    assert [str(form) for form in config.forms] == list(script.FORMS)


def test_a_dead_server_ends_the_demo_with_an_error(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(setting: object) -> None:
        raise ServerError("the server died: no more")

    monkeypatch.setattr(script, "demo", die)
    monkeypatch.setattr(script.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert "the server died: no more" in str(ended.value.code)


def test_a_server_is_stopped_when_its_start_is_interrupted(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[Server] = []

    def start(self: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "start", start)
    monkeypatch.setattr(Server, "stop", lambda self: stopped.append(self))
    with pytest.raises(KeyboardInterrupt), script.serving("--kv-policy", "lru"):
        pytest.fail("the start did not go through")
    assert len(stopped) == 1
    assert not stopped[0].log.parent.exists()


def test_a_failed_request_tells_what_the_server_last_said(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(Server, "start", lambda self: self.log.write_text("out of luck\n"))
    with pytest.raises(ServerError, match="out of luck") as failed, script.serving("--kv-policy", "lru"):
        raise openai.OpenAIError("connection refused")
    assert "connection refused" in str(failed.value) and "is gone" in str(failed.value)
    assert (tmp_path / "server.log").exists()
