"""``evicpress calibrate geometry``: the file that it writes, and bad input in one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from evicbench.testbed.vocabulary import MODEL_DIR

from sglang_evicpress.cli.main import main
from sglang_evicpress.geometry import file
from sglang_evicpress.geometry.checkpoint import digest_of


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(["code baba b1 b2 ."] * 60), encoding="utf-8")
    return path


def arguments(text: Path, *more: str) -> list[str]:
    given = {"--model-path": str(MODEL_DIR), "--text": str(text), "--out": str(text.parent / "geometry")}
    given |= dict(zip(more[::2], more[1::2], strict=True))
    return ["calibrate", "geometry", *(word for pair in given.items() for word in pair)]


def test_the_file_of_a_model_is_written(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(text, "--tokens", "200", "--sequence-tokens", "64", "--max-offset", "100")) == 0
    geometry = file.read(str(text.parent / "geometry"))
    facts = geometry.model
    assert (facts.name, facts.num_layers, facts.num_heads, facts.num_kv_heads) == ("LlamaForCausalLM", 3, 4, 2)
    assert facts.checkpoint == digest_of(MODEL_DIR)
    assert geometry.num_tokens == 200 + 4  # and a first token for each sequence
    assert geometry.offsets.tolist() == [1, 2, 4, 8, 16, 32, 64]
    assert bool((geometry.rope.lengths(geometry.centres) <= geometry.lengths + 1e-5).all())
    assert "3 layers of 4 query and 2 KV heads, 204 tokens, queries up to 100 tokens ahead" in capsys.readouterr().out


def test_the_same_text_gives_the_same_file(text: Path) -> None:
    digests = set()
    for _ in range(2):
        assert main(arguments(text, "--tokens", "100")) == 0
        digests.add(file.read(str(text.parent / "geometry")).digest)
    assert len(digests) == 1


def test_a_text_that_is_shorter_is_used_as_it_is(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(text)) == 0
    assert "has 301 tokens, and 4096 were asked for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--text", "/nowhere/text"), "--text: '/nowhere/text' does not exist: expected a text in UTF-8"),
        (("--out", "/nowhere/geometry"), "--out: '/nowhere/geometry': the folder '/nowhere' does not exist"),
        (("--model-path", "nobody/nothing"), "--model-path: model 'nobody/nothing' has no folder here"),
        (("--tokens", "0"), "--tokens: '0': expected a whole number of at least 1"),
        (("--sequence-tokens", "5"), "--sequence-tokens: '5': expected a whole number of at least 16"),
        (("--max-offset", "-1"), "--max-offset"),
        (("--device", "abacus"), "--device: device 'abacus' is not there: expected cpu"),
    ],
)
def test_bad_input_is_one_sentence(
    text: Path, more: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(text, *more)) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("evicpress: error: ") and said.count("\n") == 1
    assert not (text.parent / "geometry").exists()


def test_an_empty_text_is_refused(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text.write_text("", encoding="utf-8")
    assert main(arguments(text)) == 2
    assert capsys.readouterr().err.endswith("has no token: expected a text in UTF-8\n")


def test_a_file_among_the_weights_is_refused_as_it_would_be_taken_for_some(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_DIR, folder)
    before = digest_of(folder)
    out = folder / "geometry.safetensors"
    assert main(arguments(text, "--model-path", str(folder), "--out", str(out))) == 2
    assert "geometry.safetensors' is in the model's folder" in capsys.readouterr().err
    assert digest_of(folder) == before and not out.exists()


def test_the_text_is_not_written_over(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(text, "--out", str(text))) == 2
    assert "is also --text: expected a file of its own" in capsys.readouterr().err
    assert text.read_text(encoding="utf-8").startswith("code")
