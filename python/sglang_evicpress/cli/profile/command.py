"""``evicpress profile``: from the words of the command line to profiles at a server, and what is shown of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from sglang_evicpress.cli.output import print_json
from sglang_evicpress.cli.parser import INTERRUPTED, Parser, naming, say, whole
from sglang_evicpress.cli.profile.chat import ChatEndpoint
from sglang_evicpress.cli.profile.connection import ADMIN_KEY_VARIABLE, KEY_VARIABLE, connect
from sglang_evicpress.cli.profile.offline import Run, read_server
from sglang_evicpress.cli.profile.question_cache import kept_questions, make_folder
from sglang_evicpress.cli.profile.questions import PART_CHARS, ask_questions, extract_questions, question_prompt
from sglang_evicpress.cli.profile.report import record, records, table
from sglang_evicpress.core import Form
from sglang_evicpress.files import check_output, write_whole
from sglang_evicpress.profiler.contexts import GivenQuestion, read_contexts
from sglang_evicpress.profiler.engine import EngineError
from sglang_evicpress.profiler.prompts import PromptKind, Prompts, Template, served_tokens
from sglang_evicpress.profiler.scorers import SCORERS, get_scorer
from sglang_evicpress.profiler.transport import Unreachable
from sglang_evicpress.progress import Progress
from sglang_evicpress.search.form_budgets import name_budgets

DEFAULT_FORMS = ",".join(
    (
        *(
            f"{press}@{kept}"
            for press in ("keydiff", "snapkv", "knorm", "value_key_ratio", "streaming")
            for kept in (0.8, 0.5, 0.2)
        ),
        *("exact+int8", "exact+int4", "keydiff@0.8+int4", "keydiff@0.5+int4"),
    )
)
QUESTIONS_KEY_VARIABLE = "EVICPRESS_QUESTIONS_API_KEY"

NUM_RETRIES = 6  # for room: two minutes in all
MAX_QUESTIONS = 1000
MAX_NEW_TOKENS = 100_000

_EPILOG = f"""FILE has one JSON object a line; all but the context may be left out:
  {{"context": TEXT, "questions": [TEXT or {{"question": TEXT, "answer": TEXT}}, ...], "extra_key": TEXT, "id": TEXT}}
Questions that are missing are made by the endpoint of --questions-from, whose key is read from the environment
variable {QUESTIONS_KEY_VARIABLE}; without an endpoint they are cut out of the context. What the endpoint
made is kept in the folder FILE.questions, by the text, URL, model and number of questions; --resume asks for no more.

Presses that look at queries (snapkv) can only be measured where --kv-forms of the server names them.

The server keeps every context as soon as it is measured. After an interruption the same command with --resume does
the rest, and where only forms are missing, those; a form that cannot be made of a context does not make it count as
unmeasured. What was measured of other questions, with another scorer, --max-new-tokens or, where the scorer compares
with them, other answers in FILE is measured anew. It asks for room several times before a context fails.

Exit status: 0 all measured, 1 some contexts failed, 2 bad input or no server, 130 Ctrl-C.

  evicpress profile show --help    list profiles, or plot one

example:
  evicpress profile --url http://127.0.0.1:30000 --contexts documents.jsonl --resume
"""


def profile(argv: Sequence[str]) -> int:
    """Run what stands behind ``evicpress profile`` and give its exit status. Raises ValueError for bad input, and when
    there is no server or store to work with."""
    args = make_parser().parse_values(argv)
    try:
        run = _prepare(args)
    except EngineError as error:
        raise ValueError(str(error)) from None
    is_shown = sys.stderr.isatty() and not args.no_progress
    why = ""
    with Progress(len(run.contexts) * len(run.forms), "forms", is_shown=is_shown) as progress:
        try:
            run.run(progress)
        except KeyboardInterrupt:
            why = "interrupted"
        except Unreachable as error:
            why = str(error)
    if args.json:
        print_json([record(outcome) for outcome in run.outcomes])
    elif run.outcomes:
        print(table(run.outcomes, run.forms), flush=True)
    num_done, num_all = sum(outcome.profile is not None for outcome in run.outcomes), len(run.contexts)
    if why:
        say(
            f"{why}; the server keeps the profiles of {num_done} of {num_all} contexts: the same command "
            f"with --resume goes on{f', and {args.jsonl} was not written' if args.jsonl else ''}"
        )
        return INTERRUPTED if why == "interrupted" else 1
    if args.jsonl:
        write_whole(args.jsonl, records(run.outcomes))
    has_failed = any(outcome.error and not outcome.is_skipped for outcome in run.outcomes)
    return 1 if has_failed or not num_done else 0


def make_parser() -> Parser:
    parser = Parser.of(
        "profile", "Measure how good the answers about contexts stay in each form, at a running server.", _EPILOG
    )
    add, add_value = parser.add_argument, parser.add_value
    add("--url", required=True, metavar="URL", help="of the server, such as http://127.0.0.1:30000")
    add("--contexts", required=True, metavar="FILE", help="what to profile, see below")
    add("--questions-from", metavar="URL", help="OpenAI-compatible endpoint that makes questions where there are none")
    add("--questions-model", default="default", metavar="NAME", help="the model there; default %(default)s")
    add_value("--num-questions", whole(1, MAX_QUESTIONS), "N", "made for a context; default %(default)s", "30")
    add_value("--forms", _forms, "FORMS", "to measure, separated by commas; default %(default)s", DEFAULT_FORMS)
    add_value("--scorer", get_scorer, "NAME", f"one of {', '.join(SCORERS)}; default %(default)s", "logprob")
    kinds = "chat, the default: a user's message; text: a bare prompt"
    add("--prompt", choices=get_args(PromptKind), metavar="KIND", default="chat", help=kinds)
    sent = r"what users send; \n is a line break; default %(default)s"
    add_value("--template", Template.parse, "TEXT", sent, r"{context}\n\n{question}")
    add_value("--max-new-tokens", whole(1, MAX_NEW_TOKENS), "N", "of an answer; default %(default)s", "64")
    add("--resume", action="store_true", help="leave out what the server has in just such profiles")
    add("--jsonl", metavar="FILE", help="write one object for each context")
    add("--api-key", metavar="KEY", help=f"of the server; default: the environment variable {KEY_VARIABLE}")
    add("--admin-api-key", metavar="KEY", help=f"where it has one too; default: the variable {ADMIN_KEY_VARIABLE}")
    add("--no-progress", action="store_true", help="no progress bar; there is none either where stderr is no terminal")
    parser.add_json()
    return parser


def _prepare(args: argparse.Namespace) -> Run:
    """Read and check everything, the server last. Raises ValueError and EngineError."""
    transport = connect(args.url, args.api_key, args.admin_api_key, num_retries=NUM_RETRIES)
    style = "natural" if args.prompt == "chat" else "continue"
    make_questions: Callable[[str], list[GivenQuestion]] = (
        partial(extract_questions, num_questions=args.num_questions, style=style)
        if args.questions_from is None
        else _endpoint(args)
    )
    with naming("--contexts"):
        contexts = read_contexts(Path(args.contexts))
    if args.jsonl is not None:
        with naming("--jsonl"):
            check_output(args.jsonl, {"--contexts": args.contexts})
    is_made = args.questions_from is not None and not all(context.questions for context in contexts)
    if is_made and Path(args.contexts).is_file():
        settings = (args.questions_from, args.questions_model, args.num_questions, question_prompt(), PART_CHARS)
        folder = Path(f"{args.contexts}.questions")
        with naming("--questions-from"):
            make_folder(folder)
        make_questions = partial(kept_questions, folder, settings, make_questions, is_read=args.resume)
    server = read_server(transport, args.forms)
    prompts = Prompts(partial(served_tokens, transport, args.prompt), args.template, server.page_size)
    asked = (contexts, args.forms, args.scorer, args.max_new_tokens, args.resume, make_questions)
    return Run(*asked, transport, prompts, server.identity, server.makeable)


def _endpoint(args: argparse.Namespace) -> Callable[[str], list[GivenQuestion]]:
    """Asks the endpoint; it gets the server's key only where it is the server itself."""
    url, key = args.questions_from, os.environ.get(QUESTIONS_KEY_VARIABLE)
    if not key and urlsplit(url)[:2] == urlsplit(args.url)[:2]:
        key = args.api_key or os.environ.get(KEY_VARIABLE)
    with naming("--questions-from"):
        endpoint = ChatEndpoint(url, args.questions_model, key or None)
    return lambda text: ask_questions(endpoint, text, args.num_questions)


def _forms(text: str) -> tuple[Form, ...]:
    forms = tuple(dict.fromkeys(map(Form.parse_stored, name_budgets(text.split(","), None)[0])))
    if any(form.is_exact for form in forms):
        raise ValueError(f"{text!r} has exact, whose quality is 1 by definition: expected forms such as keydiff@0.5")
    return forms
