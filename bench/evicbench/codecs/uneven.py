"""Exactness where layers keep different numbers of tokens: answers are those of transformers with a mask per layer over
the same survivors, on the GPU's side, and through lower tiers, codecs and a restart."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from evicbench.always_load import always_loading
from evicbench.codecs.path import (
    CodedCase,
    Setting,
    Tally,
    after_restart,
    answers_line,
    before_restart,
    make_model,
    play,
    pressed_node,
    server_arguments,
)
from evicbench.correctness.exactness import (
    CHUNK_TOKENS,
    Jobs,
    chunked_prefill,
    early_leave_falls_back,
    follow_up,
    mixed_batch,
    one_compressed_node,
    partial_matches,
    run_jobs,
    split_after_compression,
    two_compressed_nodes,
)
from evicbench.correctness.findings import Finding, sensitivity, summary
from evicbench.correctness.reference import Reference
from evicbench.report import Line
from evicbench.tiers.inputs import scratch
from evicbench.tiers.restart import Stoppable
from sglang_evicpress.search.budget_file import BudgetFile, write_budget_file
from sglang_evicpress.search.form_budgets import budget_name

FOUND = BudgetFile.of([6, 14, 14, 6], 10)
"""Of the four layers of the peaky model: the two in the middle keep most."""

PYRAMID = "snapkv@0.2:pyramid"
CODED = "keydiff@0.2:pyramid"
CODECS = ("int4", "int8")


def found_form(press: str, kept: float) -> str:
    """The form by the budget file, as the server names it."""
    return f"{press}@{kept}:{budget_name('found.json', FOUND)}"


def arguments(folder: Path, page_size: int) -> tuple[str, ...]:
    """Arguments of a server with all forms of the cases and both lower tiers, in ``folder``."""
    path = folder / "found.json"
    write_budget_file(str(path), FOUND)
    forms = [PYRAMID, "snapkv@0.4:pyramid", "random@0.4:pyramid", "random@0.2:pyramid", "keydiff@0.4", "knorm@0.2"]
    forms += [f"snapkv@0.5:{path}", f"random@0.2:{path}", *(f"{CODED}{codec}" for codec in ("", "+int4", "+int8"))]
    common = list(server_arguments(folder / "ssd", page_size))
    at = common.index("--kv-forms") + 1
    room = ("--chunked-prefill-size", str(CHUNK_TOKENS), "--max-total-tokens", "131072")  # for the queries of all
    return (*common[:at], ",".join((common[at], *forms)), *common[at + 1 :], *room)


def in_place() -> Jobs:
    """Whole nodes, splits, turns, chunks, partial matches and a mixed batch."""
    middle = found_form("snapkv", 0.5)
    for form in (PYRAMID, "snapkv@0.4:pyramid", "random@0.4:pyramid", middle):
        yield f"node {form}", partial(one_compressed_node, form=form)
    yield "split snapkv", partial(split_after_compression, form="snapkv@0.4:pyramid", smaller=PYRAMID)
    yield "split random", partial(split_after_compression, form="random@0.4:pyramid", smaller="random@0.2:pyramid")
    yield "two nodes", partial(two_compressed_nodes, first=PYRAMID, second="knorm@0.2")
    yield "two budgets", partial(two_compressed_nodes, first=found_form("random", 0.2), second=PYRAMID)
    yield "follow-up", partial(follow_up, form=PYRAMID, later="random@0.2:pyramid")
    yield "chunks", partial(chunked_prefill, form=PYRAMID)
    yield "partial", partial(partial_matches, form="random@0.4:pyramid", num_points=12)
    yield "partial, by a file", partial(partial_matches, form=middle, num_points=12)
    yield "falls back", partial(early_leave_falls_back, form=PYRAMID)
    yield "batch", partial(mixed_batch, forms=(PYRAMID, "keydiff@0.4", middle))


def split_below(case: CodedCase, page_size: int, form: str = CODED) -> None:
    """Split where it lies on the SSD; its halves come back from one entry, then each from its own, on either tier."""
    text = case.context(200, 300)
    (node,) = case.path(text.token_ids)
    end = len(node.token_ids)
    case.compress(text, node, form)
    text = case.down(text)
    case.leave(text, end // 2 // page_size * page_size)
    case.ask(text, cached=end)
    case.forget_copies()
    text = case.down(text)
    case.ask_from("ssd", text, cached=end, with_controls=True)
    case.push(text, "host")
    case.ask_from("host", text, cached=end)


def below(page_size: int) -> dict[str, Callable[[CodedCase], None]]:
    """Plays for a server whose nodes go down and come up."""
    return {"node": partial(pressed_node, form=CODED), "split": partial(split_below, page_size=page_size)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Findings of all cases of a server and of the next one on its SSD; ``violations`` and ``errors`` that they told,
    and what was compared of entries."""

    in_place: list[Finding]
    below: list[Finding]
    restarted: list[Finding]
    violations: list[str]
    errors: dict[str, int]
    tally: Tally


def run(folder: Path, model: Path, page_size: int) -> Outcome:
    """All cases on one server, and what the next one on its folder finds."""
    given = arguments(folder, page_size)
    with always_loading() as env, Stoppable(*given, model=model, env=env) as server:
        setting = Setting(server, Reference(model), folder / "ssd", page_size)
        beside = run_jobs(server, setting.reference, page_size, in_place())
        lower = [finding for codec in CODECS for finding in play(setting, below(page_size), codec)]
        violations = list(server.post("/evicpress/check")["violations"])
        errors = dict(server.get("/evicpress/tiers")["errors"])
        played = [before_restart(CodedCase(f"restart, {codec}", setting, codec), CODED) for codec in CODECS]
        server.end(signal.SIGTERM)
    with always_loading() as env, Stoppable(*given, model=model, env=env) as server:
        restarted = [finding for each in played for finding in after_restart(each, server)]
        violations += server.post("/evicpress/check")["violations"]
    return Outcome(beside, lower, restarted, violations, errors, setting.tally)


def measure() -> Iterator[Line]:
    for page_size in (1, 16):
        where = f"(page size {page_size})"
        with scratch(1 << 29) as folder, tempfile.TemporaryDirectory() as models:
            outcome = run(folder, make_model(Path(models)), page_size)
        yield summary(f"uneven layers: nodes, splits, turns, partial matches, a batch {where}", outcome.in_place)
        yield sensitivity(f"uneven layers: controls of these answers {where}", outcome.in_place)
        yield answers_line(f"uneven layers: through {', '.join(CODECS)}, host RAM and SSD {where}", outcome.below)
        yield answers_line(f"uneven layers: restart on the SSD {where}", outcome.restarted)
        faults = [*outcome.violations, *outcome.errors]
        yield Line(f"uneven layers: integrity {where}", "no violation, no error", f"{faults or 'none'}", not faults)
