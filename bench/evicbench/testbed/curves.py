"""Quality curves of the testbed model, measured on the real server: how answers stay on a compressed context.

Run as `PYTHONPATH=bench python -m evicbench.testbed.curves` from the repository root; writes `curves.json` beside it.

Every context is prefilled alone, compressed as one node (so that no press sees a question) and then asked
about. Quality is the token F1 of an answer against the answer of the same question on the exact context.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from evicbench.testbed.server import Server, ServerError
from evicbench.testbed.tasks import FAMILIES, Context, make_context
from evicbench.testbed.vocabulary import load_vocabulary
from sglang_evicpress.profiler.scorers.reference import token_f1

CURVES = Path(__file__).with_name("curves.json")
_MAX_NEW_TOKENS = 14  # the longest answer has 12 words, then <eos>


@dataclass(frozen=True, slots=True)
class Sample:
    """Questions about each context."""

    num_contexts: int
    num_questions: int
    num_tokens: int
    seed: int

    def contexts(self) -> list[Context]:
        rng = random.Random(f"curves-{self.seed}")
        return [make_context(family, self.num_tokens, rng) for _ in range(self.num_contexts) for family in FAMILIES]


def ask(server: Server, prompt: str, max_new_tokens: int = _MAX_NEW_TOKENS) -> str:
    """The greedy answer, words separated by blanks."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
    body = {"input_ids": load_vocabulary().encode(prompt), "sampling_params": sampling}
    return str(server.post("/generate", body)["text"]).strip()


def compress_whole(server: Server, context: Context, form: str) -> None:
    """Make `context` the only node of the cache, in `form`. Raises ServerError when it cannot be."""
    server.flush()
    ask(server, " ".join(context.tokens), max_new_tokens=1)
    nodes = server.get("/evicpress/tree")["nodes"]
    if len(nodes) != 1 or nodes[0]["num_tokens"] < len(context.tokens) - 1:
        raise ServerError(f"expected one node with the whole context, found {nodes}")
    server.post(f"/evicpress/nodes/{nodes[0]['id']}/compress", {"form": form})


def measure(server: Server, sample: Sample, forms: list[str]) -> dict[str, dict[str, list[float]]]:
    """Form -> family -> the quality of every answer."""
    qualities: dict[str, dict[str, list[float]]] = {form: defaultdict(list) for form in forms}
    contexts = sample.contexts()
    for number, context in enumerate(contexts, start=1):
        prompts = [context.prompt(question.text) for question in context.questions[: sample.num_questions]]
        server.flush()
        exact = [ask(server, prompt) for prompt in prompts]
        for form in forms:
            compress_whole(server, context, form)
            answers = [ask(server, prompt) for prompt in prompts]
            qualities[form][context.family] += [token_f1(*pair) for pair in zip(answers, exact, strict=True)]
        print(f"{number}/{len(contexts)} contexts", file=sys.stderr, flush=True)
    return qualities


def commit() -> str:
    """The checked-out commit, marked when files differ from it; `unknown` outside a git checkout."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor() -> str:
    """The CPU's name as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--presses",
        nargs="+",
        default=["keydiff", "snapkv", "knorm", "value_key_ratio", "streaming", "random"],
    )
    parser.add_argument("--kept", type=float, nargs="+", default=[0.8, 0.6, 0.4, 0.2])
    parser.add_argument("--contexts", type=int, default=3, help="contexts per family")
    parser.add_argument("--questions", type=int, default=4, help="questions per context")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=CURVES)
    args = parser.parse_args()
    sample = Sample(args.contexts, args.questions, args.tokens, args.seed)
    forms = [f"{press}@{kept:g}" for press in args.presses for kept in args.kept]
    begin, begin_commit = time.monotonic(), commit()
    with Server(
        "--kv-policy",
        "evicpress",
        "--kv-disable-online-profiling",
        "--kv-forms",
        ",".join(forms),
        "--max-total-tokens",
        "20000",
    ) as server:
        qualities = measure(server, sample, forms)
    curves: dict[str, dict[str, float]] = defaultdict(dict)
    by_family: dict[str, dict[str, float]] = {}
    for form, families in qualities.items():
        press, _, kept = form.partition("@")
        every = [value for values in families.values() for value in values]
        curves[press][kept] = round(statistics.fmean(every), 4)
        by_family[form] = {family: round(statistics.fmean(values), 3) for family, values in families.items()}
    result = {
        "what": "mean token F1 of answers on a compressed context against the answers on the exact one",
        "command": " ".join(["PYTHONPATH=bench python -m evicbench.testbed.curves", *sys.argv[1:]]),
        "commit": begin_commit,
        "versions": {name: importlib.metadata.version(name) for name in ("sglang", "torch", "sglang-evicpress")},
        "machine": processor(),
        "seconds": round(time.monotonic() - begin),
        "num_contexts": len(sample.contexts()),
        "num_questions": sum(len(values) for values in next(iter(qualities.values())).values()),
        "num_tokens": sample.num_tokens,
        "seed": sample.seed,
        "curves": curves,
        "by_family": by_family,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(curves, indent=1))


if __name__ == "__main__":
    main()
