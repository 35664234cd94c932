"""``evicpress profile``: from the words of the command line to profiles at a server, and what is shown of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from sglang_evicpress.cli.profile.chat import ChatEndpoint
from sglang_evicpress.cli.profile.connection import ADMIN_KEY_VARIABLE, KEY_VARIABLE, connect, read_flag
from sglang_evicpress.cli.profile.offline import Plan, Run, read_server
from sglang_evicpress.cli.profile.question_cache import QuestionCache
from sglang_evicpress.cli.profile.questions import PART_CHARS, ask_questions, extract_questions, question_prompt
from sglang_evicpress.cli.profile.report import records, table
from sglang_evicpress.cli.profile.show import show
from sglang_evicpress.core import Form
from sglang_evicpress.files import check_output, write_whole
from sglang_evicpress.profiler.contexts import GivenQuestion, read_contexts
from sglang_evicpress.profiler.engine import EngineError
from sglang_evicpress.profiler.prompts import PromptKind, Prompts, Template
from sglang_evicpress.profiler.scorers import SCORERS, get_scorer
from sglang_evicpress.profiler.transport import Unreachable
from sglang_evicpress.progress import Progress

DEFAULT_FORMS = ",".join(
    f"{press}@{kept}"
    for press in ("keydiff", "snapkv", "knorm", "value_key_ratio", "streaming")
    for kept in (0.8, 0.5, 0.2)
)
INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell reports a process that SIGINT ended."""

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

Parser = Callable[..., argparse.ArgumentParser]


def profile(argv: Sequence[str], make_parser: Parser) -> int:
    """Run what stands behind ``evicpress profile`` and give its exit status. ``make_parser`` is a class of parsers that
    raise ValueError. Raises ValueError for bad input, and when there is no server or store to work with.
    """
    if argv[:1] == ["show"]:
        return show(argv[1:], make_parser)
    args = _parser(make_parser).parse_args(argv)
    try:
        run = _prepare(args)
    except EngineError as error:
        raise ValueError(str(error)) from None
    is_shown = sys.stderr.isatty() and not args.no_progress
    why = ""
    with Progress(len(run.plan.contexts) * len(run.plan.forms), "forms", is_shown=is_shown) as progress:
        try:
            run.run(progress)
        except KeyboardInterrupt:
            why = "interrupted"
        except Unreachable as error:
            why = str(error)
    if run.outcomes:
        print(table(run.outcomes, run.plan.forms), flush=True)
    num_done, num_all = sum(outcome.profile is not None for outcome in run.outcomes), len(run.plan.contexts)
    if why:
        print(
            f"evicpress: {why}; the server keeps the profiles of {num_done} of {num_all} contexts: the same command "
            f"with --resume goes on{f', and {args.jsonl} was not written' if args.jsonl else ''}",
            file=sys.stderr,
        )
        return INTERRUPTED if why == "interrupted" else 1
    if args.jsonl:
        write_whole(args.jsonl, records(run.outcomes))
    has_failed = any(outcome.error and not outcome.is_skipped for outcome in run.outcomes)
    return 1 if has_failed or not num_done else 0


def _parser(make_parser: Parser) -> argparse.ArgumentParser:
    parser = make_parser(
        prog="evicpress profile",
        description="Measure how good the answers about contexts stay in each form, at a running server.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="of the server, such as http://127.0.0.1:30000")
    add("--contexts", required=True, metavar="FILE", help="what to profile, see below")
    add("--questions-from", metavar="URL", help="OpenAI-compatible endpoint that makes questions where there are none")
    add("--questions-model", default="default", metavar="NAME", help="the model there; default %(default)s")
    add("--num-questions", default="30", metavar="N", help="made for a context; default %(default)s")
    add("--forms", default=DEFAULT_FORMS, metavar="FORMS", help="to measure, separated by commas; default %(default)s")
    add("--scorer", default="logprob", metavar="NAME", help=f"one of {', '.join(SCORERS)}; default %(default)s")
    add("--prompt", default="chat", metavar="KIND", help="chat, the default: a user's message; text: a bare prompt")
    add(
        "--template",
        default=r"{context}\n\n{question}",
        metavar="TEXT",
        help=r"what users send; \n is a line break; default %(default)s",
    )
    add("--max-new-tokens", default="64", metavar="N", help="of an answer; default %(default)s")
    add("--resume", action="store_true", help="leave out what the server has in just such profiles")
    add("--jsonl", metavar="FILE", help="write one object for each context")
    add("--api-key", metavar="KEY", help=f"of the server; default: the environment variable {KEY_VARIABLE}")
    add("--admin-api-key", metavar="KEY", help=f"where it has one too; default: the variable {ADMIN_KEY_VARIABLE}")
    add("--no-progress", action="store_true", help="no progress bar; there is none either where stderr is no terminal")
    return parser


def _prepare(args: argparse.Namespace) -> Run:
    """Read and check everything, the server last. Raises ValueError and EngineError."""
    forms = read_flag("--forms", _forms, args.forms)
    template = read_flag("--template", Template.parse, args.template)
    kind = read_flag("--prompt", _kind, args.prompt)
    num_questions = read_flag("--num-questions", partial(_whole, most=MAX_QUESTIONS), args.num_questions)
    max_new_tokens = read_flag("--max-new-tokens", partial(_whole, most=MAX_NEW_TOKENS), args.max_new_tokens)
    transport = connect(args.url, args.api_key, args.admin_api_key, num_retries=NUM_RETRIES)
    style = "natural" if kind == "chat" else "continue"
    make_questions: Callable[[str], list[GivenQuestion]] = (
        partial(extract_questions, num_questions=num_questions, style=style)
        if args.questions_from is None
        else _endpoint(args, num_questions)
    )
    contexts = read_flag("--contexts", lambda path: read_contexts(Path(path)), args.contexts)
    if args.jsonl is not None:
        read_flag("--jsonl", partial(check_output, inputs=[args.contexts]), args.jsonl)
    scorer = read_flag("--scorer", get_scorer, args.scorer)
    is_made = args.questions_from is not None and not all(context.questions for context in contexts)
    if is_made and Path(args.contexts).is_file():
        make_questions = _kept(args, num_questions, make_questions)
    plan = Plan(contexts, forms, scorer, max_new_tokens, args.resume, make_questions)
    identity, makeable = read_server(transport, forms)
    return Run(plan, transport, Prompts(transport, kind, template), identity, makeable, [])


def _endpoint(args: argparse.Namespace, num_questions: int) -> Callable[[str], list[GivenQuestion]]:
    """Asks the endpoint; it gets the server's key only where it is the server itself."""
    url, key = args.questions_from, os.environ.get(QUESTIONS_KEY_VARIABLE)
    if not key and urlsplit(url)[:2] == urlsplit(args.url)[:2]:
        key = args.api_key or os.environ.get(KEY_VARIABLE)
    read_flag("--questions-from", lambda text: ChatEndpoint(text, args.questions_model, key or None), url)
    return lambda text: ask_questions(url, args.questions_model, text, num_questions, key or None)


def _kept(
    args: argparse.Namespace, num_questions: int, make: Callable[[str], list[GivenQuestion]]
) -> Callable[[str], list[GivenQuestion]]:
    """``make``, which asks the endpoint; with --resume only for what it did not make before."""
    settings = (args.questions_from, args.questions_model, num_questions, question_prompt(), PART_CHARS)
    folder = f"{args.contexts}.questions"
    return read_flag(
        "--questions-from", lambda path: QuestionCache(Path(path), settings, make, is_read=args.resume), folder
    ).of


def _forms(text: str) -> tuple[Form, ...]:
    forms = tuple(dict.fromkeys(Form.parse(part) for part in text.split(",")))
    if any(form.is_exact for form in forms):
        raise ValueError(f"{text!r} has exact, whose quality is 1 by definition: expected forms such as keydiff@0.5")
    return forms


def _kind(text: str) -> PromptKind:
    known: dict[str, PromptKind] = {"chat": "chat", "text": "text"}
    if text not in known:
        raise ValueError(f"{text!r}: expected chat or text")
    return known[text]


def _whole(text: str, *, most: int) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or not 1 <= int(text) <= most:
        raise ValueError(f"{text!r}: expected a whole number from 1 to {most}")
    return int(text)
