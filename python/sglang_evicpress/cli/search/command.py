"""``evicpress search``: from the arguments to a file of layer budgets."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import get_args

from sglang_evicpress.cli.output import print_json
from sglang_evicpress.cli.parser import INTERRUPTED, Parser, naming, say, whole
from sglang_evicpress.cli.pictures import check_picture
from sglang_evicpress.cli.profile.connection import ADMIN_KEY_VARIABLE, KEY_VARIABLE
from sglang_evicpress.cli.search.plot import draw
from sglang_evicpress.cli.search.report import FOUND, MAX_TARGET, Compared, Report
from sglang_evicpress.cli.search.sources import Scored, Source, source_of
from sglang_evicpress.core import PRESSES
from sglang_evicpress.files import check_output
from sglang_evicpress.profiler.contexts import GivenContext, read_contexts
from sglang_evicpress.profiler.engine import EngineError
from sglang_evicpress.profiler.local.objective import OBJECTIVES, TaskScore, get_objective
from sglang_evicpress.profiler.prompts import PromptKind, Template
from sglang_evicpress.profiler.scorers import Scorer
from sglang_evicpress.progress import Progress
from sglang_evicpress.search.budget_file import BudgetFile, write_budget_file
from sglang_evicpress.search.evolution import (
    MAX_SEED,
    SearchSettings,
    Step,
    check_journal,
    check_optimizer,
    found,
    num_steps,
    search,
)
from sglang_evicpress.search.layer_budgets import Budgets, pyramid, round_counts, uniform

MAX_NEW_TOKENS = 100_000
MAX_BATCH = 1024

_EPILOG = """FILE has one JSON object a line, as of evicpress profile; every context needs questions, and for the
objectives task-... every question its answer:
  {"context": TEXT, "questions": [{"question": TEXT, "answer": TEXT}, ...], "id": TEXT}

Budgets are searched by EvolKV: CMA-ES over groups of neighbouring layers, the lowest first, for the best
f * (1 + lambda * CacheScore); f is the mean score of all questions about contexts that a press has compressed to these
budgets without seeing the questions. The result is completed to the target and written as shares of the mean, which a
server expands to any number of tokens; evicpress search expand shows that. Every score goes to a journal at once: the
same command goes on where it was stopped, and other seeds or more iterations use what is there.

With --url, budgets are scored by the server's own answers about shadows of the contexts: no other model is loaded. It
needs a server whose layers may each keep another number of tokens (--kv-forms snapkv@0.3:pyramid and
--kv-max-layer-counts for as many numbers as there are layers) and whose --kv-forms name the press, if it reads queries.

Exit status: 0 written, 1 the server refused, 2 bad input, 130 Ctrl-C.

example:
  evicpress search --model DIR --contexts questions.jsonl --held-out others.jsonl --target 128 --out budgets.json
  evicpress search --url http://127.0.0.1:30000 --contexts questions.jsonl --target 128 --out budgets.json
"""


def search_budgets(argv: Sequence[str]) -> int:
    """Run what stands behind ``evicpress search`` and give its exit status. Raises ValueError for bad input."""
    args = make_parser().parse_values(argv)
    check_optimizer()
    contexts, held_out = _read(args)
    source = source_of(args)
    settings = _settings(args, source)
    try:
        split, others = source.split(contexts), source.split(held_out)
    except EngineError as error:
        raise ValueError(f"--url: {error}") from None
    is_shown = sys.stderr.isatty() and not args.no_progress
    journal, task = Path(args.journal or f"{args.out}.journal"), _identity(args, source)
    with naming("--journal"):
        check_journal(journal, source.num_layers, task)
    steps, best = list[Step](), None
    try:
        objective = source.objective(split, is_shown=is_shown)
        with Progress(num_steps(source.num_layers, settings), "candidates", is_shown=is_shown) as progress:
            for step in search(objective, source.num_layers, settings, journal, task):
                steps.append(step)
                progress.step()
                best = step if best is None or step.is_best else best
                progress.name(f"group {step.group + 1}, best {best.score:.4f}")
        budgets = found(steps, settings.target)
        rivals = {
            "uniform": uniform(source.num_layers, settings.target),
            "pyramid": pyramid(source.num_layers, settings.target),
            FOUND: budgets,
        }
        if (rounded := round_counts(budgets, args.max_layer_counts)) != budgets:
            rivals[f"{FOUND}, {args.max_layer_counts} counts"] = rounded
        reports = [_report(args, "questions of the search", rivals, objective)]
        if others:
            held = source.objective(others, is_shown=is_shown)
            reports.append(_report(args, "held-out questions", rivals, held))
    except (KeyboardInterrupt, EngineError) as error:
        why = str(error) if isinstance(error, EngineError) else "interrupted"
        say(f"{why}; the same command goes on: {journal} has what was scored, {args.out} was not written")
        return 1 if isinstance(error, EngineError) else INTERRUPTED
    note = {
        "model": source.name,
        "press": args.press,
        "objective": args.objective.name,
        "score": round(reports[0].compared[FOUND].mean, 6),
        "questions": sum(len(context.questions) for context in contexts),
        "candidates": len(steps),
        "group_size": settings.group_size,
        "seed": settings.seed,
    }
    write_budget_file(args.out, BudgetFile.of(budgets, settings.target, note))
    if args.json:
        print_json({"file": args.out, "note": note, "reports": [report.record() for report in reports]})
    if args.plot:
        title = f"{source.name}, {args.press}, {settings.target} tokens a layer on average"
        draw(rivals, steps, args.plot, title, args.objective.name)
    return 0


def make_parser() -> Parser:
    what = "Search how many tokens each layer should keep, with a local model or at a running server."
    parser = Parser.of("search", what, _EPILOG)
    add, add_value = parser.add_argument, parser.add_value
    add("--model", metavar="DIR", help="folder of a model of transformers")
    add("--url", metavar="URL", help="of a running server instead, such as http://127.0.0.1:30000")
    add("--contexts", required=True, metavar="FILE", help="contexts with questions to search on, see below")
    add("--held-out", metavar="FILE", help="others, on which the result is compared with uniform budgets and a pyramid")
    add_value("--target", whole(1, MAX_TARGET), "N", "tokens that a layer keeps on average", required=True)
    add("--out", required=True, metavar="FILE", help="the file of budgets to write")
    add("--journal", metavar="FILE", help="scores so far; default: the file of --out with .journal behind it")
    add("--plot", metavar="FILE", help="write a picture of the budgets and the search, PNG or SVG")
    add("--press", choices=PRESSES, metavar="NAME", default="snapkv", help="default %(default)s")
    add_value(
        "--objective", get_objective, "NAME", f"f, one of {', '.join(OBJECTIVES)}; default %(default)s", "task-f1"
    )
    add_value("--group-size", whole(2, 1024), "N", "layers searched together; default %(default)s", "8")
    add_value("--iterations", whole(1, 10_000), "N", "generations of each group; default %(default)s", "10")
    add_value("--seed", whole(0, MAX_SEED), "N", "default %(default)s", "0")
    add_value("--efficiency-weight", _positive, "X", "lambda, of CacheScore; default %(default)s", "0.3")
    add_value("--smoothing", _positive, "X", "gamma, at most 1; default %(default)s", "0.2")
    add_value("--sigma", _positive, "X", "first step of CMA-ES, in shares of the target; default %(default)s", "0.3")
    counts = "show the result rounded to so many different numbers too, as a server keeps it; default %(default)s"
    add_value("--max-layer-counts", whole(1, 1024), "N", counts, "4")
    kinds = "chat, the default: a user's message; text: a bare prompt"
    add("--prompt", choices=get_args(PromptKind), metavar="KIND", default="chat", help=kinds)
    sent = r"what users send; \n is a line break; default %(default)s"
    add_value("--template", Template.parse, "TEXT", sent, r"{context}\n\n{question}")
    add_value("--max-new-tokens", whole(1, MAX_NEW_TOKENS), "N", "of an answer; default %(default)s", "64")
    add_value("--batch", whole(1, MAX_BATCH), "N", "contexts in one pass; default %(default)s", "1")
    add("--api-key", metavar="KEY", help=f"of the server; default: the environment variable {KEY_VARIABLE}")
    add("--admin-api-key", metavar="KEY", help=f"where it has one too; default: the variable {ADMIN_KEY_VARIABLE}")
    add("--device", metavar="NAME", default="cpu", help="of torch, such as cuda; default %(default)s")
    add("--no-progress", action="store_true", help="no progress bar; there is none either where stderr is no terminal")
    parser.add_json()
    return parser


def _settings(args: argparse.Namespace, source: Source) -> SearchSettings:
    return SearchSettings(
        target=args.target,
        group_size=args.group_size,
        efficiency_weight=args.efficiency_weight,
        smoothing=args.smoothing,
        sigma=args.sigma,
        iterations=args.iterations,
        seed=args.seed,
        least=max(1, source.sinks),
    )


def _read(args: argparse.Namespace) -> tuple[list[GivenContext], list[GivenContext]]:
    """Contexts to search on and held-out ones, once it is known that the outputs can be written. Raises ValueError."""
    inputs = {"--contexts": args.contexts} | ({"--held-out": args.held_out} if args.held_out else {})
    read = {flag: _with_questions(flag, path, args.objective) for flag, path in inputs.items()}
    for name in ("out", "plot"):
        if (path := getattr(args, name)) is not None:
            with naming(f"--{name}"):
                if name == "plot":
                    check_picture(path)
                check_output(path, inputs)
            inputs[f"--{name}"] = path
    journal = args.journal or f"{args.out}.journal"
    for flag, path in inputs.items():
        if Path(journal).resolve() == Path(path).resolve():
            raise ValueError(f"--journal: {journal!r} is also {flag}: expected a file of its own")
    return read["--contexts"], read.get("--held-out", [])


def _with_questions(flag: str, path: str, scorer: Scorer) -> list[GivenContext]:
    with naming(flag):
        contexts = read_contexts(Path(path))
        for context in contexts:
            if not context.questions:
                raise ValueError(f"{context.id!r:.60} has no questions: expected at least one")
            if isinstance(scorer, TaskScore) and any(question.answer is None for question in context.questions):
                raise ValueError(
                    f"{context.id!r:.60} has a question without an answer: {scorer.name} expects one of each"
                )
    return contexts


def _identity(args: argparse.Namespace, source: Source) -> dict[str, object]:
    """All that a score of budgets depends on."""
    template = args.template.fill("{context}", "{question}")
    return {
        "model": source.identity,
        "contexts": sha256(Path(args.contexts).read_bytes()).hexdigest()[:16],
        "press": args.press,
        "objective": args.objective.name,
        "prompt": args.prompt,
        "template": template,
        "max_new_tokens": args.max_new_tokens,
    }


def _report(args: argparse.Namespace, which: str, rivals: Mapping[str, Budgets], objective: Scored) -> Report:
    compared = {name: Compared(budgets, objective.by_question(budgets)) for name, budgets in rivals.items()}
    num_questions = sum(map(len, compared[FOUND].scores))
    if not num_questions:
        raise EngineError(f"{which}: every answer on exact KV is empty: expected at least one token of one of them")
    report = Report(f"{args.objective.name}, {which}", num_questions, compared, objective.exact)
    if not args.json:
        print("\n".join(report.lines()), flush=True)
    return report


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise ValueError(f"{text!r}: expected a number above 0")
    return value
