"""The testbed's trainer: what counts in the loss, where positions jump, and that it learns and resumes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from evicbench.testbed import train
from evicbench.testbed.evaluate import answer, measure
from evicbench.testbed.rows import TRAIN_MIX, WARM_UP_MIX, make_row
from evicbench.testbed.tasks import FAMILIES, make_context
from evicbench.testbed.train import Optimizers, Stage, Step, batch_loss, build_model, draw_batch, schedule
from evicbench.testbed.vocabulary import MODEL_DIR, load_vocabulary
from transformers import LlamaForCausalLM

TINY = (
    Stage(length=64, batch=2, steps=2, lr=1e-2, lr_end=1e-2),
    Stage(length=64, batch=4, steps=2, lr=1e-2, lr_end=1e-3),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def words_of(token_ids: tuple[int, ...]) -> list[str]:
    words = {token_id: word for word, token_id in load_vocabulary().ids.items()}
    return [words[token_id] for token_id in token_ids]


@pytest.mark.parametrize("family", [*FAMILIES, "copy"])
@pytest.mark.parametrize("length", [64, 128, 512])
def test_a_row_has_its_length_and_rising_positions_below_the_longest_trained_one(family: str, length: int) -> None:
    rng = random.Random(0)
    for _ in range(10):
        row = make_row(length, rng, {family: 1.0})
        assert len(row.token_ids) == len(row.is_target) == len(row.positions) == length
        assert row.positions[0] == 0
        assert all(a < b for a, b in pairwise(row.positions))
        assert row.positions[-1] < 2176
        assert any(row.is_target)


def test_about_half_of_the_rows_have_position_gaps_and_only_where_sentences_start() -> None:
    rng = random.Random(0)
    num_gapped = 0
    for _ in range(200):
        row = make_row(256, rng, {"mixed": 1.0})
        words = words_of(row.token_ids)
        jumps = [i for i in range(1, 256) if row.positions[i] != row.positions[i - 1] + 1]
        assert all(words[i] in {"code", "boss", "log", "->", "the", "title", "note", "<q>"} for i in jumps)
        num_gapped += bool(jumps)
    assert 70 < num_gapped < 130


def test_targets_are_answers_with_their_end_and_the_values_of_repeated_facts() -> None:
    rng = random.Random(1)
    for _ in range(20):
        row = make_row(256, rng, {"redundant": 1.0})
        words = words_of(row.token_ids)
        targets = {i for i, is_target in enumerate(row.is_target) if is_target}
        expected, seen = set(), set()
        for i, word in enumerate(words):
            if word == "<q>":
                expected |= set(range(i + 3, words.index("<eos>", i) + 1))
            if word == "code" and words[i - 1] != "<q>":
                if words[i + 1] in seen:
                    expected |= set(range(i + 2, i + 6))
                seen.add(words[i + 1])
        assert targets == expected


def test_the_first_word_of_the_first_copy_cannot_be_known_and_is_no_target() -> None:
    row = make_row(64, random.Random(0), {"copy": 1.0})
    first = row.is_target.index(True)
    period = first - 2
    assert row.token_ids[1] == row.token_ids[1 + period]
    assert row.token_ids[first] == row.token_ids[first - period]
    assert all(row.is_target[first:])


def test_training_on_one_batch_lowers_its_loss() -> None:
    step = Step(0, Stage(length=64, batch=8, steps=1, lr=1e-2, lr_end=1e-2, warm_up_share=1.0), 1e-2)
    batch = draw_batch(step, seed=0)
    model = build_model(seed=0)
    optimizers = Optimizers(model)
    before = batch_loss(model, batch).item()
    for _ in range(8):
        optimizers.step(batch_loss(model, batch), step.lr)
    assert batch_loss(model, batch).item() < before - 0.5


def test_the_committed_weights_know_the_rows_that_the_trainer_makes() -> None:
    model = LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    batch = draw_batch(Step(0, Stage(length=256, batch=8, steps=1, lr=0.0, lr_end=0.0), 0.0), seed=0)
    with torch.no_grad():
        assert batch_loss(model, batch).item() < 0.3
        assert batch_loss(build_model(seed=0), batch).item() > 5


def test_position_gaps_do_not_split_a_row_into_documents() -> None:
    """transformers reads gaps as borders between packed documents unless it is given a mask."""
    model = LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    context = make_context("needle", 128, random.Random(0))
    question, expected = context.questions[0]
    ids = load_vocabulary().encode(f"{context.prompt(question)} {expected} <eos>")
    num_asked = 1 + len(question.split())
    is_target = [False] * (128 + num_asked) + [True] * (len(ids) - 128 - num_asked)
    positions = [i + 500 * (i >= 128) for i in range(len(ids))]
    batch = train.Batch(torch.tensor([ids]), torch.tensor([is_target]), torch.tensor([positions]))
    with torch.no_grad():
        assert batch_loss(model, batch).item() < 0.3


def test_the_rate_warms_up_and_falls() -> None:
    steps = list(schedule(train.RECIPE))
    assert [step.number for step in steps] == list(range(len(steps)))
    assert steps[0].lr < steps[25].lr < steps[60].lr == 2e-2
    assert steps[-1].lr < 3e-4


def test_an_export_loads_and_answers_and_names_its_rope_base_twice(tmp_path: Path) -> None:
    train.export(LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (MODEL_DIR / name).read_bytes()
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    context = make_context("needle", 256, random.Random(2))
    assert answer(model, [context.prompt(question) for question, _ in context.questions]) == [
        expected for _, expected in context.questions
    ]


def test_a_run_ends_with_a_model_that_loads(tmp_path: Path) -> None:
    assert len(train.train(TINY, tmp_path, seed=5)) == 4
    assert LlamaForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_committed_model_answers_every_family_with_the_full_cache(family: str) -> None:
    model = LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    num_questions, _, f1 = measure(model, family, 512, num_contexts=3, num_questions=4, seed=1)
    assert num_questions == (3 if family in ("title", "note") else 12)
    assert f1 >= 0.85


def test_the_shares_of_each_mix_sum_to_one() -> None:
    assert sum(WARM_UP_MIX.values()) == pytest.approx(1.0)
    assert sum(TRAIN_MIX.values()) == pytest.approx(1.0)
