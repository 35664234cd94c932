"""Exactness of a server's answers over compressed prefixes: those of transformers over the same survivors.

Every answer is checked token by token: the reference reads the survivors' positions from ``/evicpress/nodes`` before
the request, gathers its own keys and values there, and runs the rest of the prompt and the server's answer. Each case
has a namespace of its own (``extra_key``), so cases run side by side on one server.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeAlias

import torch

from evicbench.correctness.case import Case
from evicbench.correctness.findings import Finding, sensitivity, summary
from evicbench.correctness.reference import Reference, Text, make_peaky_model
from evicbench.report import Line
from evicbench.testbed.server import MODEL, Server, ServerError

PRESSES = ("keydiff", "knorm", "snapkv", "value_key_ratio", "streaming", "random")
KEPT_FRACTIONS = (0.8, 0.5, 0.2)
FORMS = tuple(f"{press}@{kept}" for press, kept in product(PRESSES, KEPT_FRACTIONS))
NUM_WORKERS = 6
CHUNK_TOKENS = 1024


def server_arguments(page_size: int) -> tuple[str, ...]:
    """Arguments of the server: all forms (snapkv's queries are kept only when it is named), and room."""
    return (
        *("--kv-policy", "evicpress", "--kv-alpha", "1", "--kv-disable-online-profiling"),
        *("--kv-forms", ",".join(FORMS)),
        *("--max-total-tokens", "131072", "--chunked-prefill-size", str(CHUNK_TOKENS), "--skip-tokenizer-init"),
        *("--page-size", str(page_size)),
    )


Jobs: TypeAlias = Iterator[tuple[str, Callable[[Case], None]]]

# ---- the cases


def one_compressed_node(case: Case, form: str) -> None:
    text = case.context()
    (node,) = case.path(text.token_ids)
    case.compress(text, node, form)
    case.ask(text, cached=len(node.token_ids), with_controls=True)


def two_compressed_nodes(case: Case, first: str, second: str) -> None:
    """The second node's KV was computed on the exact first one; both are compressed afterwards."""
    start = case.context(100, 300)
    text = case.continued(start, 150)
    upper, lower = case.path(text.token_ids)
    case.compress(text, lower, second)
    case.compress(start, upper, first)
    case.ask(text, cached=lower.start + len(lower.token_ids))


def second_node_on_a_compressed_one(case: Case, first: str, second: str) -> None:
    start = case.context(100, 300)
    (upper,) = case.path(start.token_ids)
    case.compress(start, upper, first)
    text = case.continued(start, 150)
    _, lower = case.path(text.token_ids)
    case.expect("lineage of the second node", lower.lineage, "lossy")
    case.ask(text)
    case.compress(text, lower, second)
    case.ask(text)


def split_after_compression(case: Case, form: str, smaller: str) -> None:
    """A split loses nothing on the original path; its halves can then be compressed further, each by itself."""
    text = case.context()
    (node,) = case.path(text.token_ids)
    whole = case.compress(text, node, form)
    case.leave(text, len(text.token_ids) * 3 // 5)
    halves = case.path(text.token_ids)
    case.expect("nodes after a split", len(halves), 2)
    joined = torch.cat([half.positions for half in halves if half.positions is not None], -1)
    case.expect("same survivors after a split", whole.positions is not None and joined.equal(whole.positions), True)
    case.ask(text, cached=len(node.token_ids))
    case.compress(text, halves[1], smaller)
    case.ask(text)
    case.compress(text, halves[0], smaller)
    case.ask(text)


def split_before_compression(case: Case, first: str, second: str) -> None:
    text = case.context()
    case.leave(text, len(text.token_ids) // 2)
    upper, lower = case.path(text.token_ids)
    case.compress(text, upper, first)
    case.ask(text)
    case.compress(text, lower, second)
    case.ask(text)


def partial_matches(case: Case, form: str, num_points: int) -> None:
    """Prompts that leave a compressed node at ``num_points`` points, the last so early that nothing is left of it."""
    start = case.context(80, 120)
    text = case.continued(start, 300)
    upper, lower = case.path(text.token_ids)
    case.compress(text, lower, form)
    for point in case.points(lower.start + 1, lower.start + len(lower.token_ids) - 1, num_points):
        case.leave(text, point)
    case.ask(text)


def early_leave_falls_back(case: Case, form: str) -> None:
    """So short a match that no slot is left: the cache must give the exact parent, and the answer be the exact one."""
    start = case.context(80, 120)
    text = case.continued(start, 300)
    upper, lower = case.path(text.token_ids)
    lower = case.compress(text, lower, form)
    if lower.logical is None:
        return
    point = lower.start + max(1, int(lower.logical[0]))  # the first slot is shown just behind it
    case.leave(text, point, cached=lower.start)


def follow_up(case: Case, form: str, later: str) -> None:
    """Turns after a compressed context: their KV was computed on it, so it is lossy; then it is compressed as well."""
    text = case.context()
    (node,) = case.path(text.token_ids)
    case.compress(text, node, form)
    first = case.ask(text, suffix=case.words(50))
    turn = case.path(first.token_ids)[1:]
    case.expect("lineage of the turn", {node.lineage for node in turn}, {"lossy"})
    second = case.ask(first, cached=turn[-1].start + len(turn[-1].token_ids))
    for node in turn:
        if len(node.token_ids) >= 2 * case.page_size and (node.has_queries or not later.startswith("snapkv")):
            case.compress(first, node, later)
    case.ask(first)
    case.ask(second)


def compressed_again(case: Case, press: str) -> None:
    """Smaller and smaller; a turn computed on an earlier form still finds its own KV."""
    text = case.context()
    (node,) = case.path(text.token_ids)
    turn = None
    for kept in KEPT_FRACTIONS:
        node = case.compress(text, node, f"{press}@{kept}")
        asked = case.ask(text, with_controls=kept == KEPT_FRACTIONS[-1])
        if turn is not None:
            case.ask(turn)
        turn = asked


def chunked_prefill(case: Case, form: str) -> None:
    """A context that was computed in chunks, each a node, and a question so long that it is computed in chunks too."""
    text = case.context_in_chunks(CHUNK_TOKENS + 150)
    path = case.path(text.token_ids)
    for node in path:
        end = node.start + len(node.token_ids)
        case.compress(text, node, form, text.prompt_end if node is path[-1] else end)
    case.ask(text, suffix=case.words(CHUNK_TOKENS + 100))


def mixed_batch(case: Case, forms: Sequence[str] = FORMS[1::4]) -> None:
    """One batch of compressed, exact, partly matching and unknown prefixes, and a second one with the next turns."""
    members: list[tuple[Case, Text]] = []
    for index, form in enumerate((*forms, None, None, "", "")):
        member = case.member(str(index))
        if form == "":
            text = member.unknown()
        else:
            text = member.context()
            if form is not None:
                member.compress(text, member.path(text.token_ids)[0], form)
                text = text.first(len(text.token_ids) - 40 * (index % 2))
        members.append((member, text))
    for _ in range(2):
        members = case.ask_together(members)


# ---- all of them


def grid(contexts_per_cell: int) -> Jobs:
    for form, index in product(FORMS, range(contexts_per_cell)):
        yield f"{form} #{index}", partial(one_compressed_node, form=form)


def shapes() -> Jobs:
    """Two compressed nodes on a path, splits, turns, further compression and batches, over all presses."""
    for index, press in enumerate(PRESSES):
        other = PRESSES[(index + 1) % len(PRESSES)]
        yield f"two nodes {press}", partial(two_compressed_nodes, first=f"{press}@0.5", second=f"{other}@0.2")
        yield (
            f"second on compressed {press}",
            partial(second_node_on_a_compressed_one, first=f"{other}@0.2", second=f"{press}@0.5"),
        )
        yield f"split before {press}", partial(split_before_compression, first=f"{press}@0.5", second=f"{other}@0.5")
        if press != "streaming":  # keeps the end only, so that nothing is left of its first part
            yield f"split after {press}", partial(split_after_compression, form=f"{press}@0.5", smaller=f"{press}@0.2")
        yield f"follow-up {press}", partial(follow_up, form=f"{press}@0.2", later=f"{other}@0.5")
        yield f"again {press}", partial(compressed_again, press=press)
    for form in ("keydiff@0.5", "snapkv@0.5"):
        yield f"chunks {form}", partial(chunked_prefill, form=form)
    yield "batch", mixed_batch


def matches(num_points: int) -> Jobs:
    for index, press in enumerate(PRESSES):
        form = f"{press}@{KEPT_FRACTIONS[index % len(KEPT_FRACTIONS)]}"
        yield f"partial {form}", partial(partial_matches, form=form, num_points=num_points)
        yield f"falls back {press}", partial(early_leave_falls_back, form=f"{press}@0.2")


def run_jobs(
    server: Server, reference: Reference, page_size: int, jobs: Jobs, kind: type[Case] = Case
) -> list[Finding]:
    """Run cases side by side, each in its own namespace; what one raises is a finding too."""

    def run(job: tuple[str, Callable[[Case], None]]) -> list[Finding]:
        name, play = job
        case = kind(name, server, reference, page_size)
        try:
            play(case)
        except (ServerError, OSError, ValueError, RuntimeError, IndexError) as error:
            case.findings.append(Finding(name, (f"{type(error).__name__}: {error}",)))
        return case.findings

    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        return [finding for findings in pool.map(run, jobs) for finding in findings]


def measure(
    server: Server, model: Path, page_size: int, *, name: str, contexts_per_cell: int, num_points: int = 20
) -> Iterator[Line]:
    """All cases on a running server, started with ``server_arguments(page_size)``, that serves ``model``."""
    reference = Reference(model)
    where = f"({name}, page size {page_size})"
    for what, jobs in (
        (f"{len(PRESSES)} presses x kept {', '.join(map(str, KEPT_FRACTIONS))}", grid(contexts_per_cell)),
        ("two nodes, splits, turns, compressed again, chunks, batches", shapes()),
        (f"{num_points} partial matches per press, falling back", matches(num_points)),
    ):
        findings = run_jobs(server, reference, page_size, jobs)
        yield summary(f"exactness: {what} {where}", findings)
        if any(finding.controls for finding in findings):
            yield sensitivity(f"exactness: controls of these answers {where}", findings)
    violations = server.post("/evicpress/check")["violations"]
    yield Line(f"exactness: integrity afterwards {where}", "no violation", f"{violations or 'none'}", not violations)


def measure_all(contexts_per_cell: int) -> Iterator[Line]:
    """Start a server per model and page size, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        models = {"peaky": make_peaky_model(Path(folder)), "testbed": MODEL}
        for (name, model), page_size in product(models.items(), (1, 16)):
            with Server(*server_arguments(page_size), model=model) as server:
                yield from measure(server, model, page_size, name=name, contexts_per_cell=contexts_per_cell)
