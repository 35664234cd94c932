"""Accuracy against budget on testbed tasks: every method and score at five budgets, pages of 16 and 32, real servers.

An answer has 4 to 12 tokens, so what is dropped from the prompt decides nearly all and the methods come out alike. They
part in what is generated after the answer, which goes on about the context: it is compared with the full cache's.
repack and holefill keep the same tokens in other slots, so that their figures must be equal, but for ties that rounding
in another order decides.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from evicbench.decode_budget.requests import FAMILIES, PLAIN_SCORES, Request, server_flags
from evicbench.paths import out_file
from evicbench.report import Line
from evicbench.testbed.server import Server
from evicbench.testbed.tasks import make_context
from evicbench.testbed.vocabulary import EOS, load_vocabulary
from sglang_evicpress.decode_budget.scores import SCORES
from sglang_evicpress.profiler.scorers.reference import token_f1
from sglang_evicpress.tables import markdown

METHODS = ("paged", "repack", "holefill")
BUDGETS = (96, 128, 192, 256, 384)
PAGES = (16, 32)
CONTEXT, WHOLE = 512, 640
CONTEXTS_PER_FAMILY, QUESTIONS = 2, 3
EVERY, MAX_NEW = 4, 14
LONG_EVERY, LONG_NEW = 32, 128
NUM_CLIENTS = 8
LEAST_EQUAL = 0.95

Cell = tuple[int, str, str, int]
"""Page size, method, score and budget."""


@dataclass(frozen=True, slots=True)
class Question:
    prompt: tuple[int, ...]
    answer: str


def draw_questions() -> list[Question]:
    """The same ones for every cell."""
    draw, vocabulary, questions = random.Random("accuracy"), load_vocabulary(), []
    for family in FAMILIES:
        for _ in range(CONTEXTS_PER_FAMILY):
            context = make_context(family, CONTEXT, draw)
            for question in context.questions[:QUESTIONS]:
                questions.append(Question(tuple(vocabulary.encode(context.prompt(question.text))), question.answer))
    return questions


def arguments(page_size: int, score: str) -> tuple[str, ...]:
    return server_flags(page_size, 32768, NUM_CLIENTS, "--kv-decode-score", score, "--kv-decode-interval", str(EVERY))


def answers(
    server: Server,
    questions: Sequence[Question],
    request: Request | None,
    max_new: int = MAX_NEW,
    *,
    goes_on: bool = False,
) -> list[str]:
    """Answers in words; with what comes behind too if it ``goes_on``. tova and h2o go by queries of the request's own,
    so its prompt is not found cached."""
    words = {token: word for word, token in load_vocabulary().ids.items()}
    params = {"custom_params": request.params} if request is not None else {}

    def say(numbered: tuple[int, Question]) -> str:
        number, question = numbered
        sampling = {"temperature": 0, "max_new_tokens": max_new, "ignore_eos": goes_on, **params}
        fields = (
            {"extra_key": f"{request} {number}"} if request is not None and SCORES[request.score].needs_queries else {}
        )
        body = {"input_ids": list(question.prompt), "sampling_params": sampling, **fields}
        spoken = [words[token] for token in server.post("/generate", body)["output_ids"]]
        return " ".join(word for word in spoken if word != EOS)

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        return list(clients.map(say, enumerate(questions)))


def mean_f1(given: Sequence[str], wanted: Sequence[str]) -> float:
    return sum(token_f1(text, each) for text, each in zip(given, wanted, strict=True)) / len(wanted)


def table(cells: Mapping[Cell, float]) -> str:
    """Token F1 in percent."""
    rows = [
        [str(page), method, score, *(f"{100 * cells[page, method, score, budget]:.0f}" for budget in BUDGETS)]
        for page, method, score in itertools.product(PAGES, METHODS, PLAIN_SCORES)
    ]
    return "\n".join([*markdown(["page", "method", "score", *map(str, BUDGETS)], rows, num_text=3), ""])


def tables(full: Mapping[int, float], cells: Mapping[Cell, float], long: Mapping[Cell, float]) -> str:
    contexts = f"contexts of {CONTEXT} tokens of the families {', '.join(FAMILIES)}"
    whole = ", ".join(f"{100 * full[page]:.0f} with pages of {page}" for page in PAGES)
    num_contexts = len(FAMILIES) * CONTEXTS_PER_FAMILY
    return "\n".join(
        [
            f"Answers: token F1 in percent with the right ones, {num_contexts * QUESTIONS} questions on {contexts}, "
            f"--kv-decode-interval {EVERY}; full cache: {whole}.",
            "",
            table(cells),
            f"Long generations: token F1 in percent with the full cache's, {LONG_NEW} tokens after each of "
            f"{num_contexts} questions on these contexts, <eos> ignored, --kv-decode-interval {LONG_EVERY}.",
            "",
            table(long),
        ]
    )


def mean_of(cells: Mapping[Cell, float], place: int, value: object) -> float:
    """The mean of the cells that have ``value`` in one place of their key."""
    figures = [figure for cell, figure in cells.items() if cell[place] == value]
    return sum(figures) / max(1, len(figures))


def line(
    full: Mapping[int, float],
    cells: Mapping[Cell, float],
    long: Mapping[Cell, float],
    num_same: int,
    num_questions: int,
) -> Line:
    wanted = len(PAGES) * len(METHODS) * len(PLAIN_SCORES) * len(BUDGETS)
    small, large = BUDGETS[0], BUDGETS[-1]
    pairs = [
        (each[cell], each.get((cell[0], "holefill", *cell[2:])))
        for each in (cells, long)
        for cell in each
        if cell[1] == "repack"
    ]
    num_equal = sum(one == other for one, other in pairs)
    best = {page: max((figure, cell) for cell, figure in cells.items() if cell[0] == page) for page in PAGES}
    return Line(
        f"accuracy: {num_questions} testbed questions and long generations behind a third of them, {len(METHODS)} "
        f"methods x {len(PLAIN_SCORES)} scores x {len(BUDGETS)} budgets x pages of {', '.join(map(str, PAGES))}, real "
        "servers; tables in bench/out/decode/accuracy.md",
        f"{wanted} cells; the full cache's answers at a budget of {WHOLE}, which is all; a budget costs something; "
        f"repack and holefill alike in {LEAST_EQUAL:.0%} of the cells",
        f"{len(cells)} cells, {num_same} of {num_questions * len(PAGES)} answers the same; mean token F1 "
        + ", ".join(f"{budget}: {mean_of(cells, 3, budget):.2f}" for budget in BUDGETS)
        + f", full {full[PAGES[0]]:.2f}; best "
        + ", ".join(
            f"{figure:.2f} ({cell[1]} {cell[2]} {cell[3]}, pages of {page})" for page, (figure, cell) in best.items()
        )
        + "; long generations "
        + ", ".join(f"{method}: {mean_of(long, 1, method):.3f}" for method in METHODS)
        + f"; repack as holefill in {num_equal} of {len(pairs)} cells",
        len(cells) == wanted
        and len(long) == wanted
        and num_equal >= LEAST_EQUAL * len(pairs)
        and num_same == num_questions * len(PAGES)
        and all(mean_of(each, 3, small) < mean_of(each, 3, large) for each in (cells, long))
        and mean_of(cells, 3, small) < min(full.values()),
    )


def measure() -> Iterator[Line]:
    questions = draw_questions()
    wanted, firsts = [question.answer for question in questions], questions[::QUESTIONS]
    full: dict[int, float] = {}
    cells: dict[Cell, float] = {}
    long: dict[Cell, float] = {}
    num_same = 0
    for page in PAGES:
        with Server(*arguments(page, "tova")) as server:
            exact = answers(server, questions, None)
            full[page] = mean_f1(exact, wanted)
            whole = answers(server, questions, Request((), MAX_NEW, WHOLE, "paged", interval=None))
            num_same += sum(one == other for one, other in zip(exact, whole, strict=True))
            exact_long = answers(server, firsts, None, LONG_NEW, goes_on=True)
            for method, score, budget in itertools.product(METHODS, PLAIN_SCORES, BUDGETS):
                cell = page, method, score, budget
                given = answers(server, questions, Request((), MAX_NEW, budget, method, score, None))
                cells[cell] = mean_f1(given, wanted)
                request = Request((), LONG_NEW, budget, method, score, LONG_EVERY)
                long[cell] = mean_f1(answers(server, firsts, request, LONG_NEW, goes_on=True), exact_long)
    out_file("decode", "accuracy.md").write_text(tables(full, cells, long), encoding="utf-8")
    print(tables(full, cells, long), flush=True)
    yield line(full, cells, long, num_same, len(questions))
