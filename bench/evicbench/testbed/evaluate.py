"""Full-cache answers of the testbed model: Hugging Face greedy decoding, one table row per family.

Run as `PYTHONPATH=bench python -m evicbench.testbed.evaluate --tokens 512 1024` from the repository root.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from evicbench.testbed.tasks import FAMILIES, make_context
from evicbench.testbed.vocabulary import EOS, MODEL_DIR, PAD, load_vocabulary
from sglang_evicpress.profiler.scorers.reference import exact_match, token_f1
from sglang_evicpress.tables import markdown

_BATCH_TOKENS = 16 * 1024
_MAX_NEW_TOKENS = 14  # the longest answer has 12 words, then <eos>


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Means over the questions of one family at one context length, both in [0, 1]."""

    num_questions: int
    exact: float
    f1: float


@torch.inference_mode()
def answer(model: LlamaForCausalLM, prompts: Sequence[str]) -> list[str]:
    """Greedy answers in the order of the prompts; only prompts of equal length share a batch, unpadded."""
    vocabulary = load_vocabulary()
    words = {token_id: word for word, token_id in vocabulary.ids.items()}
    by_length: dict[int, list[int]] = defaultdict(list)
    encoded = [vocabulary.encode(prompt) for prompt in prompts]
    for index, ids in enumerate(encoded):
        by_length[len(ids)].append(index)
    answers = [""] * len(prompts)
    for length, indices in by_length.items():
        size = max(1, _BATCH_TOKENS // length)
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            inputs = torch.tensor([encoded[i] for i in batch])
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=_MAX_NEW_TOKENS,
            )
            for i, row in zip(batch, output[:, length:].tolist(), strict=True):
                spoken = [words[token_id] for token_id in row]
                answers[i] = " ".join(word for word in spoken if word not in (EOS, PAD))
    return answers


def measure(
    model: LlamaForCausalLM, family: str, num_tokens: int, *, num_contexts: int, num_questions: int, seed: int
) -> Accuracy:
    """Ask up to `num_questions` about each of `num_contexts` fresh contexts."""
    rng = random.Random(f"evaluate-{family}-{num_tokens}-{seed}")
    prompts, references = [], []
    for _ in range(num_contexts):
        context = make_context(family, num_tokens, rng)
        for question in context.questions[:num_questions]:
            prompts.append(context.prompt(question.text))
            references.append(question.answer)
    pairs = list(zip(answer(model, prompts), references, strict=True))
    return Accuracy(
        num_questions=len(pairs),
        exact=sum(exact_match(*pair) for pair in pairs) / len(pairs),
        f1=sum(token_f1(*pair) for pair in pairs) / len(pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--contexts", type=int, default=24, help="contexts per family and length")
    parser.add_argument("--questions", type=int, default=4, help="questions per context")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    print("exact match / token F1 in percent (number of questions)\n")
    rows = []
    for family in args.families:
        cells = []
        for num_tokens in args.tokens:
            cell = measure(
                model,
                family,
                num_tokens,
                num_contexts=args.contexts,
                num_questions=args.questions,
                seed=args.seed,
            )
            cells.append(f"{100 * cell.exact:.0f} / {100 * cell.f1:.0f} ({cell.num_questions})")
        rows.append([family, *cells])
    print("\n".join(markdown(["family", *(f"{num_tokens} tokens" for num_tokens in args.tokens)], rows)))


if __name__ == "__main__":
    main()
