"""Search at a running server: budgets are scored by its answers about shadows with tokens given by layer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.profiler.fake_server import FakeServer, no, serving

from sglang_evicpress.cli.main import main
from sglang_evicpress.search.budget_file import read_budget_file
from sglang_evicpress.search.layer_budgets import pyramid

CONTEXT = "context " * 40


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as server:
        server.layer_groups = [0, 1, 2]
        yield server


def run(server: FakeServer, folder: Path, *more: str) -> int:
    contexts = folder / "contexts.jsonl"
    lines = [{"context": f"{number} {CONTEXT}", "questions": ["why?", "who?"]} for number in range(2)]
    contexts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["search", "--url", server.url, "--contexts", str(contexts), "--target", "40", "--objective", "logprob"]
    return main([*words, "--iterations", "1", "--out", str(folder / "budgets.json"), *more])


def test_candidates_are_scored_by_shadows_of_the_server(server: FakeServer, tmp_path: Path) -> None:
    assert run(server, tmp_path) == 0
    file = read_budget_file(str(tmp_path / "budgets.json"))
    assert (file.num_layers, file.note["model"], file.note["questions"]) == (3, server.url, 4)
    made = server.posted("/forms")
    assert all(body["form"].startswith("snapkv@") and len(body["layer_tokens"]) == 3 for body in made)
    scored = [json.loads(line) for line in (tmp_path / "budgets.json.journal").read_text().splitlines()[1:]]
    assert {tuple(line["budgets"]) for line in scored} <= {tuple(body["layer_tokens"]) for body in made}
    assert server.shadows == {}, "every shadow is closed"


def test_candidates_keep_the_sinks_of_the_server(server: FakeServer, tmp_path: Path) -> None:
    server.sinks = 30
    assert run(server, tmp_path) == 0
    scored = [json.loads(line)["budgets"] for line in (tmp_path / "budgets.json.journal").read_text().splitlines()[1:]]
    assert min(min(budgets) for budgets in scored if tuple(budgets) != pyramid(3, 40)) >= 30


def test_a_search_that_a_server_ends_goes_on(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(method: str, path: str, body: Any) -> None:
        if len(server.posted("/forms")) > 6:
            raise no(409, "layers 1 and 2 keep equally many tokens")

    server.before = refuse
    assert run(server, tmp_path) == 1
    shown = capsys.readouterr().err
    assert "layers 1 and 2 keep equally many tokens; the same command goes on" in shown and shown.count("\n") == 1
    num_scored = len((tmp_path / "budgets.json.journal").read_text().splitlines()) - 1
    assert num_scored >= 1
    server.before = lambda method, path, body: None
    server.log.clear()
    assert run(server, tmp_path) == 0
    first = server.posted("/forms")[0]["layer_tokens"]
    known = [json.loads(line)["budgets"] for line in (tmp_path / "budgets.json.journal").read_text().splitlines()[1:]]
    assert known.index(first) == num_scored, "what the journal has is not asked for again"


def test_a_lost_shadow_is_opened_again(server: FakeServer, tmp_path: Path) -> None:
    def lose(method: str, path: str, body: Any) -> None:
        if path.endswith("/forms") and len(server.posted("/forms")) in (2, 5):
            raise no(409, "the shadow is gone: users needed its room")

    server.before = lose
    assert run(server, tmp_path) == 0


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([], "expected a server whose --kv-forms have layer budgets, such as snapkv@0.3:pyramid"),
        ([0, 0, 1], "keeps 2 different numbers of tokens in its 3 layers: .* --kv-max-layer-counts 3"),
    ],
)
def test_a_server_that_cannot_is_one_sentence(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], groups: list[int], words: str
) -> None:
    server.layer_groups = groups
    assert run(server, tmp_path) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert re.search(words, shown)


def test_a_server_of_whole_pages_is_refused_as_it_keeps_other_budgets(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.page_size = 16
    assert run(server, tmp_path) == 2
    assert "keep whole pages of 16 slots, other budgets than are searched" in capsys.readouterr().err
    assert not server.posted("/shadows")


def test_a_press_that_the_server_has_no_geometry_for_is_refused_before_anything_is_asked(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, tmp_path, "--press", "band_lengths") == 2
    assert "none of band_lengths@0.5 can be made: the server was started without" in capsys.readouterr().err
    assert not server.posted("/shadows")
    server.has_geometry = True
    assert run(server, tmp_path, "--press", "band_lengths") == 0


def test_a_journal_that_cannot_be_written_is_refused_before_anything_is_asked(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.journal"
    other.write_text('{"search": "another"}\n')
    for path, words in ((other, "is the journal of another search"), (tmp_path / "no" / "journal", "no")):
        assert run(server, tmp_path, "--journal", str(path)) == 2
        shown = capsys.readouterr().err
        assert words in shown and shown.count("\n") == 1
    assert not server.posted("/shadows")


def test_a_model_or_a_server_is_needed_but_not_both(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, tmp_path, "--model", "somewhere") == 2
    assert "both --model and --url are given: expected one of them" in capsys.readouterr().err
