"""Write kvpress_selections.json: the tokens that kvpress keeps on fixed prompts, for our tests to compare.

kvpress wants a transformers older than ours, hence an environment of its own:

    uv venv --python 3.11 .venv-kvpress
    uv pip install --python .venv-kvpress/bin/python kvpress==0.5.5
    .venv-kvpress/bin/python tests/golden/make_kvpress_golden.py --model bench/evicbench/testbed/model

Only token ids and survivors are stored, with the versions that made them and the checksum of the weights; the
tests compute keys, values and queries themselves. Run it again whenever the testbed model changes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from kvpress import KeyDiffPress, KnormPress, ScorerPress, SnapKVPress
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

KEPT_FRACTIONS = (0.8, 0.5, 0.2)
SNAPKV = {"window_size": 32, "kernel_size": 5}
PRESSES: dict[str, Callable[[float], ScorerPress]] = {
    "keydiff": lambda removed: KeyDiffPress(removed),
    "knorm": lambda removed: KnormPress(removed),
    "snapkv": lambda removed: SnapKVPress(removed, **SNAPKV),
}
BOS, FIRST_WORD, LAST_WORD = 1, 6, 484  # the testbed's tokenizer: special tokens below, unused ones above


@dataclass
class Recorder:
    """Runs a kvpress press on a model and records what it keeps, per layer, by its own choice.

    The press gathers keys and values alike, so it is handed indices for values and gives back those it keeps.
    """

    press: ScorerPress
    kept: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compress, self.press.compress = self.press.compress, self._record

    def _record(self, module, hidden_states, keys, values, attentions, kwargs):  # type: ignore[no-untyped-def]
        indices = torch.arange(keys.shape[2], dtype=keys.dtype).view(1, 1, -1, 1).expand_as(keys)
        _, kept = self.compress(module, hidden_states, keys, indices, attentions, kwargs)
        self.kept.append(kept[0, :, :, 0].long().sort(dim=-1).values)
        return keys, values


def prompts() -> dict[str, list[int]]:
    """200 distinct tokens, and 512 made of sentences that come back (equal tokens, hence near ties)."""
    rng = random.Random(20)
    words = range(FIRST_WORD, LAST_WORD + 1)
    distinct = [BOS, *rng.sample(words, 199)]
    sentences = [rng.sample(words, 7) for _ in range(40)]
    repeating = [BOS, *(token for _ in range(73) for token in rng.choice(sentences))]
    return {"distinct": distinct, "repeating": repeating}


def survivors(model: PreTrainedModel, token_ids: list[int], press: ScorerPress) -> list[list[list[int]]]:
    """[L][H][kept] ascending token indices."""
    recorder = Recorder(press)
    with torch.no_grad(), press(model):
        model(torch.tensor([token_ids]), past_key_values=DynamicCache())
    return torch.stack(recorder.kept).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the testbed model's folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("kvpress_selections.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    golden = {
        "made_by": {name: version(name) for name in ("kvpress", "transformers", "torch")}
        | {"python": platform.python_version()},
        "weights_sha256": hashlib.sha256((args.model / "model.safetensors").read_bytes()).hexdigest(),
        "snapkv": SNAPKV,
        "prompts": prompts(),
        "selections": [
            {
                "prompt": name,
                "press": press,
                "kept_fraction": kept_fraction,
                "survivors": survivors(model, token_ids, make(1.0 - kept_fraction)),
            }
            for name, token_ids in prompts().items()
            for press, make in PRESSES.items()
            for kept_fraction in KEPT_FRACTIONS
        ],
    }
    args.out.write_text(json.dumps(golden, separators=(",", ":")).replace('{"prompt":', '\n{"prompt":') + "\n")


if __name__ == "__main__":
    main()
