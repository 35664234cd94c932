"""``evicpress search`` on the small trained model: found, written, interrupted, gone on with, refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from evicbench.testbed.contexts import line
from evicbench.testbed.tasks import make_context
from evicbench.testbed.vocabulary import MODEL_DIR

from sglang_evicpress.cli.main import main
from sglang_evicpress.search.budget_file import read_budget_file


@pytest.fixture
def contexts(tmp_path: Path) -> Path:
    rng = random.Random("search")
    path = tmp_path / "contexts.jsonl"
    lines = [line(make_context("needle", 192, rng), 2) for _ in range(6)]
    kept = ("context", "questions")
    path.write_text("".join(json.dumps({k: json.loads(each)[k] for k in kept}) + "\n" for each in lines))
    return path


def run(contexts: Path, *more: str) -> int:
    out = contexts.with_name("budgets.json")
    words = ["search", "--model", str(MODEL_DIR), "--contexts", str(contexts), "--target", "40", "--out", str(out)]
    shorter = ["--iterations", "2", "--batch", "6", "--max-new-tokens", "6", "--template", "{context} <q> {question}"]
    return main([*words, *shorter, *more])


def test_budgets_are_found_and_written(contexts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = contexts.with_name("budgets.svg")
    assert run(contexts, "--held-out", str(contexts), "--plot", str(picture), "--max-layer-counts", "1") == 0
    file = read_budget_file(str(contexts.with_name("budgets.json")))
    assert (file.num_layers, file.target) == (3, 40)
    assert file.note["objective"] == "task-f1" and file.note["questions"] == 12 and file.note["candidates"] == 14
    shown = capsys.readouterr().out
    assert "task-f1, questions of the search: 12 about 6 contexts" in shown
    assert "task-f1, held-out questions: 12 about 6 contexts" in shown
    assert shown.count("found - ") == 2 and "exact KV" in shown and "found, 1 counts" in shown
    assert b"<svg" in picture.read_bytes()


def test_a_stopped_search_goes_on_and_comes_to_the_same(contexts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, journal = contexts.with_name("budgets.json"), contexts.with_name("budgets.json.journal")
    assert run(contexts) == 0
    whole, lines = out.read_bytes(), journal.read_bytes().splitlines(keepends=True)
    out.unlink()
    journal.write_bytes(b"".join(lines[:6]))
    assert run(contexts) == 0
    assert out.read_bytes() == whole and journal.read_bytes().splitlines(keepends=True) == lines
    assert run(contexts, "--seed", "1") == 0
    assert out.read_bytes() != whole and len(journal.read_bytes().splitlines()) > len(lines), "another seed adds to it"
    capsys.readouterr()
    assert run(contexts, "--max-new-tokens", "5") == 2
    assert "is the journal of another search (max_new_tokens 6, not 5)" in capsys.readouterr().err


def test_scores_of_a_model_that_is_spoken_to_otherwise_are_another_search(
    contexts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_DIR, folder)
    assert run(contexts, "--model", str(folder), "--iterations", "1") == 0
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    capsys.readouterr()
    assert run(contexts, "--model", str(folder), "--iterations", "1") == 2
    assert "is the journal of another search (model" in capsys.readouterr().err


def test_a_journal_that_cannot_be_written_is_one_line(contexts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(contexts, "--journal", str(contexts.parent)) == 2
    shown = capsys.readouterr().err
    assert "--journal: " in shown and "cannot be read (Is a directory)" in shown and shown.count("\n") == 1


def test_expand_shows_tokens_by_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "budgets.json"
    content = {"format": "evicpress-layer-budgets", "version": 1, "num_layers": 4, "shares": [2.0, 0.8, 0.8, 0.4]}
    path.write_text(json.dumps(content | {"target": 64, "note": {}}))
    assert main(["search", "expand", str(path), "--target", "100"]) == 0
    assert capsys.readouterr().out == "200 80x2 40\n"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--target", "3"], "target is 3: expected at least 4"),
        (["--objective", "bleu"], "objective 'bleu' is unknown"),
        (["--smoothing", "2"], "smoothing is 2.0: expected above 0 and at most 1"),
        (["--plot", "budgets.txt"], "expected a path that ends in .png or .svg"),
        (["--held-out", "nothing.jsonl"], "--held-out: nothing.jsonl cannot be read"),
        (["--model", "nothing"], "--model: nothing has no config.json: expected the folder of a model"),
        (["--sigma", "-1"], "--sigma"),
        (["--seed", "4294967"], "--seed: '4294967': expected a whole number from 0 to 4294966"),
        (["--device", "abacus"], "--device: device 'abacus' is not there: expected cpu"),
        (["--press", "geometry"], "--press: 'geometry' needs what was calibrated of the model's queries"),
        (["--journal", "/nowhere/journal"], "/nowhere"),
    ],
)
def test_bad_input_is_one_line(contexts: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str) -> None:
    assert run(contexts, *more) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not contexts.with_name("budgets.json").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"context": "code gola"}, "'line 1' has no questions: expected at least one"),
        (
            {"context": "code lema", "questions": [{"question": "code lema", "answer": "b5"}]},
            "context 'line 1': its prompts share",
        ),
        (
            {"context": "code gola", "questions": ["code gola"]},
            "has a question without an answer: task-f1 expects one of each",
        ),
    ],
)
def test_contexts_without_questions_or_answers_are_refused(
    contexts: Path, capsys: pytest.CaptureFixture[str], content: dict[str, object], words: str
) -> None:
    contexts.write_text(json.dumps(content))
    assert run(contexts) == 2
    assert words in capsys.readouterr().err
