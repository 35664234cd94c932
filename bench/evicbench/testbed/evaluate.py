"""Full-cache answers of the testbed model: Hugging Face greedy decoding, one table row per family.

Run as `PYTHONPATH=bench python -m evicbench.testbed.evaluate --tokens 512 1024` from the repository root.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from evicbench.testbed.tasks import FAMILIES, make_context
from evicbench.testbed.vocabulary import EOS, MODEL_DIR, PAD, load_vocabulary
from sglang_evicpress.profiler.scorers.reference import exact_match, token_f1
from sglang_evicpress.tables import markdown

_MAX_NEW_TOKENS = 14  # the longest answer has 12 words, then <eos>


@torch.inference_mode()
def answer(model: LlamaForCausalLM, prompts: Sequence[str]) -> list[str]:
    """Greedy answers."""
    vocabulary = load_vocabulary()
    words = {token_id: word for word, token_id in vocabulary.ids.items()}
    answers = []
    for prompt in prompts:
        inputs = torch.tensor([vocabulary.encode(prompt)])
        mask = torch.ones_like(inputs)
        output = model.generate(inputs, attention_mask=mask, do_sample=False, max_new_tokens=_MAX_NEW_TOKENS)
        spoken = [words[token_id] for token_id in output[0, inputs.shape[1] :].tolist()]
        answers.append(" ".join(word for word in spoken if word not in (EOS, PAD)))
    return answers


def measure(
    model: LlamaForCausalLM, family: str, num_tokens: int, *, num_contexts: int, num_questions: int, seed: int
) -> tuple[int, float, float]:
    """Number of questions on fresh contexts of a family, mean exact match and mean token F1 of the answers."""
    rng = random.Random(f"evaluate-{family}-{num_tokens}-{seed}")
    contexts = [make_context(family, num_tokens, rng) for _ in range(num_contexts)]
    asked = [(context, each) for context in contexts for each in context.questions[:num_questions]]
    answers = answer(model, [context.prompt(question.text) for context, question in asked])
    pairs = [(text, question.answer) for text, (_, question) in zip(answers, asked, strict=True)]
    exact, f1 = (sum(score(*pair) for pair in pairs) / len(pairs) for score in (exact_match, token_f1))
    return len(pairs), exact, f1


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
            num_questions, exact, f1 = measure(
                *(model, family, num_tokens),
                num_contexts=args.contexts,
                num_questions=args.questions,
                seed=args.seed,
            )
            cells.append(f"{100 * exact:.0f} / {100 * f1:.0f} ({num_questions})")
        rows.append([family, *cells])
    print("\n".join(markdown(["family", *(f"{num_tokens} tokens" for num_tokens in args.tokens)], rows)))


if __name__ == "__main__":
    main()
