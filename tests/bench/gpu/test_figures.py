"""Results of measurements: verdicts, what was not measured, the table, and what may not be written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from evicbench.correctness.findings import Finding
from evicbench.gpu import machine
from evicbench.gpu.checks import relative_error
from evicbench.gpu.figures import CUT_OFF, Figure, Part, Sample, missing, run_parts, status_of, write_results
from evicbench.gpu.greedy import Config, configs, parts, verdicts
from evicbench.gpu.pools import BYTES, LLAMA_32K, Shape, random_pool

MACHINE = {"gpu": "H100", "driver": "1", "commit": "abc"}


def test_a_sample_is_its_median_and_quartiles() -> None:
    sample = Sample((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (sample.median, sample.quartiles) == (3.0, (2.0, 4.0))
    assert Sample((7.0,)).quartiles == (7.0, 7.0)


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Figure("a", 1.0, ok=True), "ok"),
        (Figure("a", 1.0, ok=False), "MISSED"),
        (Figure("a", 1.0), ""),
        (missing("a", "why"), "not measured"),
    ],
)
def test_verdicts(figure: Figure, verdict: str) -> None:
    assert figure.verdict == verdict


def test_a_figure_of_no_answers_is_shown_as_such() -> None:
    assert [Figure("a", value, "s").measured for value in (math.nan, math.inf, 2, 0.25)] == [
        "nan s",
        "inf s",
        "2 s",
        "0.25 s",
    ]


def test_what_fails_or_is_left_out_is_listed_and_never_measured() -> None:
    def good() -> Iterator[Figure]:
        yield Figure("first line of more", 1.0, ok=True)

    def bad() -> Iterator[Figure]:
        yield Figure("third", 3.0)
        raise RuntimeError("no memory\nmore")

    parts = [Part("good", ("first", "second"), good), Part("bad", ("third", "fourth"), bad)]
    figures, is_whole = run_parts(parts, say=lambda figure: None)
    assert not is_whole and status_of(figures, is_whole) == 1
    assert [(figure.what, figure.value, figure.detail) for figure in figures] == [
        ("first line of more", 1.0, ""),
        ("second", None, "the part ended without it"),
        ("third", 3.0, ""),
        ("fourth", None, "the part failed: RuntimeError: no memory"),
    ]
    only, is_whole = run_parts(parts, only="good", say=lambda figure: None)
    assert is_whole and [figure.value for figure in only] == [1.0, None, None, None]
    late, _ = run_parts(parts, limit_s=0.0, say=lambda figure: None)
    assert all(figure.value is None and "no time left" in figure.detail for figure in late)


@pytest.mark.parametrize(
    ("figures", "status"),
    [
        ([Figure("a", 1.0, ok=True), missing("b", "why")], 0),
        ([Figure("a", 1.0, ok=True), Figure("b", 1.0, ok=False)], 1),
        ([missing("b", "why")], 1),
    ],
)
def test_a_phase_is_good_when_something_was_measured_and_nothing_missed(figures: list[Figure], status: int) -> None:
    assert status_of(figures, True) == status


def test_results_of_one_commit_and_machine_are_put_together(tmp_path: Path) -> None:
    write_results(tmp_path, "speed", MACHINE, [Figure("a", 1.0, "ms", "<= 2", True), missing("b", "no time left")])
    table = write_results(tmp_path, "speed", MACHINE, [missing("a", "not asked for"), Figure("b", 4.0, "ms")])
    head, *lines = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert head["machine"] == MACHINE
    assert [(line["what"], line["value"]) for line in lines] == [("a", 1.0), ("b", 4.0)]
    assert "| a | <= 2 | 1 ms | ok |" in table.read_text() and "Not measured" not in table.read_text()
    write_results(tmp_path, "speed", {**MACHINE, "commit": "def"}, [missing("a", "not asked for")])
    text = table.read_text()
    assert "| a |" not in text and "- a: not asked for" in text


def test_every_part_is_kept_when_it_ends(tmp_path: Path) -> None:
    def written() -> dict[str, tuple[float | None, str]]:
        _, *lines = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
        return {line["what"]: (line["value"], line["detail"]) for line in lines}

    seen: list[dict[str, tuple[float | None, str]]] = []

    def one() -> Iterator[Figure]:
        yield Figure("first", 1.0)

    def two() -> Iterator[Figure]:
        seen.append(written())
        yield Figure("second", 2.0)
        raise KeyboardInterrupt

    parts = [Part("one", ("first",), one), Part("two", ("second",), two), Part("three", ("third",), one)]
    with pytest.raises(KeyboardInterrupt):
        run_parts(
            parts,
            say=lambda figure: None,
            keep=lambda figures: write_results(tmp_path, "speed", MACHINE, figures) and None,
        )
    cut_off = {"first": (1.0, ""), "second": (None, CUT_OFF), "third": (None, CUT_OFF)}
    assert seen == [cut_off] and written() == cut_off
    assert {file.name for file in tmp_path.iterdir()} == {"speed.jsonl", "speed.md"}
    run_parts(
        parts[2:],
        say=lambda figure: None,
        keep=lambda figures: write_results(tmp_path, "speed", MACHINE, figures) and None,
    )
    assert written()["first"] == (1.0, "") and written()["third"][0] is None


def test_a_phase_writes_after_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "describe", lambda device: {**MACHINE, "when": "now"})
    chosen = machine.Settings("cuda", False, "", 60.0, 1, tmp_path)
    there: list[bool] = []

    def one() -> Iterator[Figure]:
        there.append((tmp_path / "speed.md").exists())
        yield Figure("a", 1.0)

    assert machine.run_phase("speed", chosen, lambda: [Part(str(index), (), one) for index in range(2)]) == 0
    assert there == [False, True]


def test_a_trial_is_never_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    for arguments in (["--device", "cpu"], ["--tiny"]):
        assert not machine.settings("doc", arguments).is_published
    chosen = machine.settings("doc", ["--device", "cpu", "--seed", "7"])
    status = machine.run_phase("speed", chosen, lambda: [Part("a", (), lambda: iter([Figure("x", 1.0)]))])
    assert status == 0 and not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_phase_says_so_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.run_phase("speed", machine.settings("doc", []), lambda: []) == machine.NO_GPU
    assert capsys.readouterr().err.splitlines() == [
        "speed: torch finds no CUDA device: expected an NVIDIA GPU and its driver"
    ]


def test_a_replaced_cuda_runtime_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/lib/libcudart.so.13")
    with pytest.raises(machine.CannotMeasure, match="LD_PRELOAD"):
        machine.describe("cuda")


def test_bytes_are_those_of_the_formulas() -> None:
    half = LLAMA_32K.n // 2
    assert LLAMA_32K.kv_bytes == 32 * 2 * 8 * 128 * 2 * 32768
    keys, scores = LLAMA_32K.kv_bytes // 2, 4 * 32 * 8 * 32768
    assert BYTES["key_norm"](LLAMA_32K, 0) == keys + scores
    assert BYTES["value_key_ratio"](LLAMA_32K, 0) == BYTES["key_difference"](LLAMA_32K, 0) == 2 * keys + scores
    assert BYTES["compact"](LLAMA_32K, half) == LLAMA_32K.kv_bytes  # half of it read, half written
    assert BYTES["gather"](LLAMA_32K, LLAMA_32K.n) == BYTES["scatter"](LLAMA_32K, LLAMA_32K.n) == 2 * LLAMA_32K.kv_bytes
    ratio = (BYTES["encode"](LLAMA_32K, 4) - LLAMA_32K.kv_bytes) / LLAMA_32K.kv_bytes
    assert 0.31 < ratio < 0.32 and BYTES["decode"](LLAMA_32K, 4) == BYTES["encode"](LLAMA_32K, 4)
    assert BYTES["select_survivors"](LLAMA_32K, half) == 5 * scores + scores // 2
    assert BYTES["page_mean"](LLAMA_32K, 16) == scores + scores // 16
    assert BYTES["window_attention"](LLAMA_32K, 32) == 2 * keys + 2 * scores + 4 * 32 * 32 * 32768


def test_a_pool_has_its_node_in_scattered_slots_and_nan_elsewhere() -> None:
    shape = Shape(20, 2, 3, 64, torch.bfloat16, 47)
    pool = random_pool(shape, torch.Generator().manual_seed(1))
    assert len(set(pool.slots.tolist())) == 20 and 0 not in pool.slots
    for layer in (*pool.k, *pool.v):
        assert layer[pool.slots].isfinite().all()
        assert int(layer.isnan().any(-1).any(-1).sum()) == shape.num_slots - shape.n


def test_an_error_is_relative_and_an_unwritten_output_is_infinitely_wrong() -> None:
    there = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), there) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, math.nan]), there) == math.inf
    assert relative_error(there, torch.tensor([3.0, math.inf])) == math.inf
    assert relative_error(torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf])) == 0.0
    assert relative_error(torch.tensor([1.0, -math.inf]), torch.tensor([1.0, math.inf])) == math.inf


def test_a_greedy_answer_is_judged_by_the_precision_of_its_server() -> None:
    def answer(difference: float, wrong: int = 0, control: float = 1.0) -> Finding:
        return Finding("case", (), difference, 32, wrong, 0, (control, control, control))

    exact, half = Config("peaky", "triton", True, 16), Config("peaky", "flashinfer", True, 16)
    assert [figure.ok for figure in verdicts(exact, [answer(1e-4)], [])] == [True, True, True]
    assert [figure.ok for figure in verdicts(exact, [answer(1e-3)], [])] == [False, True, True]
    assert [figure.ok for figure in verdicts(half, [answer(1e-2)], [])] == [True, True, True]
    assert [figure.ok for figure in verdicts(half, [answer(0.5)], [])] == [False, False, True]
    assert [figure.ok for figure in verdicts(half, [answer(1e-2, control=0.02)], [])] == [True, False, True]
    assert [figure.ok for figure in verdicts(half, [answer(1e-3, wrong=1)], ["x"])] == [False, True, False]
    assert not next(verdicts(half, [], [])).ok


@pytest.mark.parametrize(("graphs", "page_size"), [(True, 1), (True, 16), (False, 1), (False, 16)])
def test_controls_are_judged_in_every_pair_where_tolerances_are_wide(
    graphs: bool, page_size: int, tmp_path: Path
) -> None:
    peaky, testbed = (Config(model, "flashinfer", graphs, page_size) for model in ("peaky", "testbed"))
    assert {peaky, testbed} <= set(configs("cuda"))
    blind = Finding("case", (), 0.01, 32, 0, 0, (1.0, 0.02, 1.0))
    assert [figure.ok for figure in verdicts(peaky, [blind], [])] == [True, False, True]
    assert [figure.ok for figure in verdicts(testbed, [blind], [])] == [True, None, True]
    uncompared = Finding("case", (), 0.01, 32)
    assert [figure.ok for figure in verdicts(peaky, [uncompared], [])] == [True, False, True]
    assert [figure.ok for figure in verdicts(testbed, [uncompared], [])] == [True, True]
    (targets,) = [
        part.targets
        for part in parts(machine.Settings("cuda", False, "", 60.0, 1, tmp_path))
        if part.name == f"greedy {peaky}"
    ]
    assert targets == (f"greedy: {peaky}", f"greedy controls: {peaky}")


def test_greedy_serves_every_configuration_once() -> None:
    every = configs("cuda")
    assert len(set(every)) == len(every)
    assert [each for each in every if (each.model, each.backend) == ("peaky", "triton")] == [
        Config("peaky", "triton", True, 16),
        Config("peaky", "triton", True, 16, is_loaded=True),
    ]
    of_testbed = [each for each in every if each.model == "testbed" and each.backend == "triton"]
    assert [each.is_loaded for each in of_testbed] == [False] * 4 + [True]
