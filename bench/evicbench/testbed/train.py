"""Train the testbed model from scratch on a CPU, in stages of growing length, and export it for serving.

Run as `PYTHONPATH=bench python -m evicbench.testbed.train --out DIR` from the repository root; add `--smoke` for a few
seconds that only show that it works.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from evicbench.testbed.rows import TRAIN_MIX, WARM_UP_MIX, Row, make_row
from evicbench.testbed.vocabulary import MODEL_DIR

_EMBEDDING_LR_SHARE = 0.15
_WARM_UP_STEPS = 50
_REPORT_EVERY = 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Stage:
    """`steps` batches of `batch` rows of `length` tokens; the rate goes linearly from `lr` to `lr_end`."""

    length: int
    batch: int
    steps: int
    lr: float
    lr_end: float
    warm_up_share: float = 0.0  # of rows drawn from the easy mix


RECIPE = (
    Stage(length=64, batch=32, steps=500, lr=2e-2, lr_end=2e-2, warm_up_share=0.8),
    Stage(length=128, batch=20, steps=600, lr=2e-2, lr_end=2e-2, warm_up_share=0.3),
    Stage(length=256, batch=14, steps=500, lr=2e-2, lr_end=2e-2),
    Stage(length=512, batch=8, steps=400, lr=2e-2, lr_end=1.5e-2),
    Stage(length=1024, batch=4, steps=500, lr=1.5e-2, lr_end=8e-3),
    Stage(length=2048, batch=2, steps=350, lr=8e-3, lr_end=2e-4),
)
SMOKE = (Stage(length=64, batch=16, steps=60, lr=2e-2, lr_end=1e-2, warm_up_share=1.0),)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the schedule: its number over all stages and everything its batch depends on."""

    number: int
    stage: Stage
    lr: float


def schedule(stages: Sequence[Stage]) -> Iterator[Step]:
    """All steps; the rate rises linearly over the first 50 of them."""
    number = 0
    for stage in stages:
        for i in range(stage.steps):
            lr = stage.lr + (stage.lr_end - stage.lr) * i / stage.steps
            yield Step(number, stage, lr * min(1.0, (number + 1) / _WARM_UP_STEPS))
            number += 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids, loss mask and positions, each [rows, length]."""

    token_ids: Tensor
    is_target: Tensor
    positions: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Batch:
        return cls(
            torch.tensor([row.token_ids for row in rows]),
            torch.tensor([row.is_target for row in rows]),
            torch.tensor([row.positions for row in rows]),
        )


def draw_batch(step: Step, seed: int) -> Batch:
    """The same batch for the same step and seed.

    A third of the steps use rows of half or a quarter of the length and as many tokens.
    """
    rng = random.Random(f"train-{seed}-{step.number}")
    shorter = 1
    if step.stage.length > 128 and rng.random() < 1 / 3:
        shorter = rng.choice((2, 4)) if step.stage.length > 256 else 2
    length, size = step.stage.length // shorter, step.stage.batch * shorter
    mixes = [WARM_UP_MIX if rng.random() < step.stage.warm_up_share else TRAIN_MIX for _ in range(size)]
    return Batch.of([make_row(length, rng, mix) for mix in mixes])


def build_model(seed: int) -> LlamaForCausalLM:
    """A freshly initialised model of the committed architecture."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig.from_pretrained(MODEL_DIR))


def batch_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Mean cross entropy over the target tokens (bfloat16 autocast, float32 softmax)."""
    inputs = batch.token_ids[:, :-1]
    is_target = batch.is_target[:, 1:]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Without an explicit mask transformers would read position gaps as borders between packed documents.
        hidden = model.model(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            position_ids=batch.positions[:, :-1],
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden[is_target])
    return functional.cross_entropy(logits.float(), batch.token_ids[:, 1:][is_target])


class Optimizers:
    """Muon for the matrices inside the layers, AdamW for the tied embedding and the norms, under one rate."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in model.named_parameters():
            (matrices if parameter.ndim == 2 and ".layers." in name else others).append(parameter)
        self._parameters = [*matrices, *others]
        self._muon = torch.optim.Muon(matrices, weight_decay=0.05, momentum=0.95)
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, loss: Tensor, lr: float) -> None:
        """Back-propagate, clip the gradient to norm 1 and update the weights."""
        self._muon.zero_grad()
        self._adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        rates: dict[torch.optim.Optimizer, float] = {self._muon: lr, self._adam: lr * _EMBEDDING_LR_SHARE}
        for optimizer, rate in rates.items():
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()


def export(model: LlamaForCausalLM, out: Path) -> None:
    """Write a directory that transformers and SGLang load: fp32 weights, config, tokenizer, chat template."""
    model.save_pretrained(out)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(MODEL_DIR / name, out / name)
    config_path = out / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # for readers that predate rope_parameters
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def train(stages: Sequence[Stage], out: Path, seed: int) -> list[float]:
    """Run the schedule, then export to ``out``; returns the loss of every step."""
    model = build_model(seed).train()
    optimizers = Optimizers(model)
    losses: list[float] = []
    started = time.monotonic()
    for step in schedule(stages):
        loss = batch_loss(model, draw_batch(step, seed))
        optimizers.step(loss, step.lr)
        losses.append(loss.item())
        if len(losses) % _REPORT_EVERY == 0:
            mean, elapsed = sum(losses[-_REPORT_EVERY:]) / _REPORT_EVERY, time.monotonic() - started
            print(f"step {len(losses)} length {step.stage.length} loss {mean:.3f} {elapsed:.0f} s", flush=True)
    export(model.eval(), out)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="60 short, easy steps, not the recipe")
    args = parser.parse_args()
    torch.set_num_threads(1)
    losses = train(SMOKE if args.smoke else RECIPE, args.out, args.seed)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")


if __name__ == "__main__":
    main()
