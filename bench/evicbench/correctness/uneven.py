"""Exactness where layers keep different numbers of tokens: answers are those of transformers with a mask per layer over
the same survivors, on the GPU's side, and through lower tiers, codecs and a restart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from evicbench.codecs.path import CodedCase, pressed_node, server_arguments
from evicbench.correctness.exactness import (
    CHUNK_TOKENS,
    Jobs,
    chunked_prefill,
    early_leave_falls_back,
    follow_up,
    mixed_batch,
    one_compressed_node,
    partial_matches,
    split_after_compression,
    two_compressed_nodes,
)
from sglang_evicpress.search.budget_file import BudgetFile, write_budget_file
from sglang_evicpress.search.form_budgets import budget_name

FOUND = BudgetFile.of([6, 14, 14, 6], 10)
"""Of the four layers of the peaky model: the two in the middle keep most."""

PYRAMID = "snapkv@0.2:pyramid"
CODED = "keydiff@0.2:pyramid"


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
