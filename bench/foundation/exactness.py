"""Whether a server's answers over compressed prefixes are exactly those of transformers over the same survivors.

Every answer is checked token by token: the reference reads the survivors' positions from ``/evicpress/nodes`` before
the request, gathers its own keys and values there, and runs the rest of the prompt and the server's answer. Each case
has a namespace of its own (``extra_key``), so cases run side by side on one server.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
from foundation.reference import (
    KV,
    SCORE_TOLERANCE,
    Extension,
    Node,
    Reference,
    Text,
    common_length,
    expected_match,
    largest_difference,
    make_peaky_model,
    selection_problems,
    survivors,
)
from foundation.report import Finding, Line, sensitivity, summary
from testbed.server import MODEL, Server, ServerError
from torch import Tensor

PRESSES = ("keydiff", "knorm", "snapkv", "value_key_ratio", "streaming", "random")
KEPT_FRACTIONS = (0.8, 0.5, 0.2)
FORMS = tuple(f"{press}@{kept}" for press, kept in product(PRESSES, KEPT_FRACTIONS))
TIE = 1e-4  # two candidates closer than this are one to fp32
NUM_ANSWER_TOKENS = 32
NUM_TOP = 5
NUM_WORKERS = 6
MAX_TRIES = 20
CHUNK_TOKENS = 1024


def server_arguments(page_size: int) -> tuple[str, ...]:
    """What the server must be started with: all forms (snapkv's queries are kept only when it is named), and room."""
    return (
        *(
            "--kv-policy",
            "evicpress",
            "--kv-no-recording",
            "--kv-forms",
            ",".join(FORMS),
            "--page-size",
            str(page_size),
        ),
        *("--max-total-tokens", "131072", "--chunked-prefill-size", str(CHUNK_TOKENS), "--skip-tokenizer-init"),
    )


class Case:
    """One conversation in a namespace of its own: says things to the server and checks what it answers."""

    tie = TIE
    score_tolerance = SCORE_TOLERANCE

    def __init__(self, name: str, server: Server, reference: Reference, page_size: int) -> None:
        self.name = name
        self.page_size = page_size
        self.findings: list[Finding] = []
        self._server = server
        self._reference = reference
        self._rng = random.Random(name)
        self._openings = self._rng.sample(range(3, reference.vocabulary_size), reference.vocabulary_size - 3)

    # ---- parts of a conversation

    def words(self, count: int, *, but: int | None = None) -> tuple[int, ...]:
        """Random tokens. The first is never ``but`` nor used before, so texts part exactly where they should."""
        first = self._openings.pop()
        if first == but:
            first = self._openings.pop()
        return (first, *(self._rng.randrange(3, self._reference.vocabulary_size) for _ in range(count - 1)))

    def context(self, low: int = 200, high: int = 600) -> Text:
        """A new text, cached by the server as one exact node."""
        for _ in range(MAX_TRIES):  # beside others, a prefill may be cut into chunks and then into nodes
            text = self._prefilled(None, self.words(self._rng.randint(low, high)))
            if len(self.path(text.token_ids)) == 1:
                return text
        raise ValueError(f"no context of one node in {MAX_TRIES} tries")

    def context_in_chunks(self, count: int) -> Text:
        """A text of several exact nodes, longer than one prefill."""
        text = self._prefilled(None, self.words(count))
        self.expect("cached in several nodes", len(self.path(text.token_ids)) > 1, True)
        return text

    def continued(self, text: Text, count: int) -> Text:
        """``text`` and more, which the server computed on what it holds of the path and cached as one more node."""
        held = len(self.path(text.token_ids))
        for _ in range(MAX_TRIES):
            longer = self._prefilled(text, self.words(count))
            if len(self.path(longer.token_ids)) == held + 1:
                return longer
        raise ValueError(f"no further node in {MAX_TRIES} tries")

    def path(self, token_ids: Sequence[int]) -> list[Node]:
        return read_path(self._server, self.name, token_ids)

    def compress(self, text: Text, node: Node, form: str, query_end: int | None = None) -> Node:
        """Bring a node to ``form`` and check which tokens survived against the reference's own scores.

        ``query_end``: where snapkv's window ends, by default at the end of the prompt of ``text``.
        """
        self._server.post(f"/evicpress/nodes/{node.id}/compress", {"form": form})
        after = Node.shown(self._server.get(f"/evicpress/nodes/{node.id}?positions=true&tokens=true"))
        given = text, node, after, self.page_size, query_end or text.prompt_end
        for problem in selection_problems(*given, tolerance=self.score_tolerance):
            self.findings.append(Finding(self.name, (f"{form}: {problem}",)))
        return after

    def ask(
        self, text: Text, *, cached: int | None = None, suffix: Sequence[int] | None = None, with_controls: bool = False
    ) -> Text:
        """Ask something after ``text`` and check the answer; returns the whole text with the KV the server now has.

        ``cached``: how many tokens must come from the cache; by default what the tree, as it is shown, allows.
        """
        prompt = text.token_ids + tuple(suffix or self.words(self._rng.randint(12, 40)))
        path = self.path(prompt)
        answer = self._server.generate(
            list(prompt), NUM_ANSWER_TOKENS, extra_key=self.name, return_logprob=True, top_logprobs_num=NUM_TOP
        )
        return self.check(text, path, prompt, answer, cached=cached, with_controls=with_controls)

    def check(
        self,
        text: Text,
        path: list[Node],
        prompt: tuple[int, ...],
        answer: Any,
        *,
        cached: int | None = None,
        with_controls: bool = False,
    ) -> Text:
        meta = answer["meta_info"]
        self.expect(
            "cached tokens",
            meta["cached_tokens"],
            expected_match(path, prompt, self.page_size) if cached is None else cached,
        )
        cached = int(meta["cached_tokens"])
        output = tuple(answer["output_ids"])
        held = survivors(path, text.kv, cached)
        if held.numel() and int(held.max()) >= cached:
            self.findings.append(Finding(self.name, (f"position {int(held.max())} in a match of {cached} tokens",)))
        new = prompt[cached:] + output
        extension = self._reference.extend(text.kv.gather(held), cached, new)
        logprobs = extension.logprobs[-len(output) - 1 : -1]
        difference = largest_difference(logprobs, meta["output_top_logprobs"])
        best = logprobs.topk(2).values
        differs = logprobs.argmax(-1) != torch.tensor(output)
        is_tie = differs & (best[:, 0] - logprobs[torch.arange(len(output)), list(output)] < self.tie)
        controls = self._controls(text.kv, held, cached, new, meta["output_top_logprobs"]) if with_controls else None
        self.findings.append(
            Finding(
                self.name,
                () if len(output) == NUM_ANSWER_TOKENS else (f"{len(output)} tokens came back",),
                difference,
                len(output),
                int((differs & ~is_tie).sum()),
                int(is_tie.sum()),
                controls,
            )
        )
        return self._joined(text, cached, prompt + output, extension, len(prompt))

    def leave(self, text: Text, point: int, *, cached: int | None = None) -> Text:
        """Ask with a prompt that shares exactly the first ``point`` tokens of ``text``."""
        suffix = self.words(self._rng.randint(12, 24), but=text.token_ids[point])
        return self.ask(text.first(point), cached=cached, suffix=suffix)

    def points(self, low: int, high: int, count: int) -> list[int]:
        """Points to leave a text at, falling: the lowest ones close together, the others anywhere."""
        near = set(range(low, low + 12, 4))
        return sorted(near | set(self._rng.sample(range(low + 12, high + 1), count - len(near))), reverse=True)

    def unknown(self) -> Text:
        """A text the server has not seen."""
        token_ids = self.words(self._rng.randint(50, 200))
        computed = self._reference.prefill(token_ids)
        return Text(token_ids, computed.kv, computed.queries, len(token_ids))

    def member(self, name: str) -> Case:
        """A case of a batch; its findings are this case's."""
        member = type(self)(f"{self.name}/{name}", self._server, self._reference, self.page_size)
        member.findings = self.findings
        return member

    def ask_together(self, members: list[tuple[Case, Text]]) -> list[tuple[Case, Text]]:
        """One request of many prompts, which the scheduler runs as one batch."""
        prompts = [text.token_ids + member.words(self._rng.randint(5, 60)) for member, text in members]
        paths = [member.path(prompt) for (member, _), prompt in zip(members, prompts, strict=True)]
        answers = self._server.post(
            "/generate",
            {
                "input_ids": [list(prompt) for prompt in prompts],
                "extra_key": [member.name for member, _ in members],
                "sampling_params": {"temperature": 0, "max_new_tokens": NUM_ANSWER_TOKENS, "ignore_eos": True},
                "return_logprob": True,
                "top_logprobs_num": NUM_TOP,
            },
        )
        given = zip(members, paths, prompts, answers, strict=True)
        return [(member, member.check(text, path, prompt, answer)) for (member, text), path, prompt, answer in given]

    # ---- how

    def _prefilled(self, text: Text | None, more: tuple[int, ...]) -> Text:
        prompt = more if text is None else text.token_ids + more
        path = self.path(prompt)
        cached = expected_match(path, prompt, self.page_size)
        answer = self._server.generate(list(prompt), 1, extra_key=self.name)
        self.expect("cached tokens", answer["meta_info"]["cached_tokens"], cached)
        token_ids = prompt + tuple(answer["output_ids"])
        if text is None:
            computed = self._reference.prefill(token_ids)
            return self._held(Text(token_ids, computed.kv, computed.queries, len(prompt)))
        past = text.kv.gather(survivors(path, text.kv, cached))
        return self._joined(
            text, cached, token_ids, self._reference.extend(past, cached, token_ids[cached:]), len(prompt)
        )

    def _joined(self, text: Text, cached: int, token_ids: tuple[int, ...], more: Extension, prompt_end: int) -> Text:
        kv = text.kv.first(cached).then(more.kv)
        queries = torch.cat([text.queries[:, :, :cached], more.queries], 2)
        return self._held(Text(token_ids, kv, queries, prompt_end))

    def _held(self, text: Text) -> Text:
        """Without the answer's last token where it would end a page and the server did not compute it: whoever asks
        next would leave it in the tree, computed on what the prefix is by then."""
        path = self.path(text.token_ids)
        end = path[-1].start + len(path[-1].token_ids)
        return text if len(text.token_ids) - end < self.page_size else text.first(len(text.token_ids) - 1)

    def _controls(self, kv: KV, held: Tensor, cached: int, new: Sequence[int], top: Any) -> tuple[float, float, float]:
        """How far off the answer would be over the full cache, with one survivor per head replaced by a neighbour that
        was dropped, and with positions counted in slots."""

        def off_by(past: KV, start: int) -> float:
            return largest_difference(self._reference.extend(past, start, new).logprobs[-len(top) - 1 : -1], top)

        shifted = held.clone()
        for layer, head in product(*map(range, held.shape[:2])):
            dropped = sorted(set(range(cached)) - set(held[layer, head].tolist()))
            if dropped:
                at = self._rng.choice(dropped)
                nearest = (held[layer, head] - at).abs().argmin()
                shifted[layer, head, nearest] = at
        return (
            off_by(kv.first(cached), cached),
            off_by(kv.gather(shifted), cached),
            off_by(kv.gather(held), held.shape[-1]),
        )

    def expect(self, what: str, got: object, wanted: object) -> None:
        if got != wanted:
            self.findings.append(Finding(self.name, (f"{what}: {got}, expected {wanted}",)))


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


def mixed_batch(case: Case) -> None:
    """One batch of compressed, exact, partly matching and unknown prefixes, and a second one with the next turns."""
    members: list[tuple[Case, Text]] = []
    for index, form in enumerate((*FORMS[1::4], None, None, "", "")):
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


def read_path(server: Server, namespace: str, token_ids: Sequence[int]) -> list[Node]:
    """The nodes of a namespace that spell the longest known prefix of ``token_ids``, the last one perhaps in part."""
    shown = hashlib.sha256(namespace.encode()).hexdigest()[:16]
    tree = [node for node in server.get("/evicpress/tree")["nodes"] if node["namespace"] == shown]
    path: list[Node] = []
    parent, end = None, 0
    while end < len(token_ids):
        children = [
            Node.shown(server.get(f"/evicpress/nodes/{node['id']}?positions=true&tokens=true"))
            for node in tree
            if node["parent_id"] == parent
        ]
        common = {child.id: common_length(child.token_ids, token_ids[end:]) for child in children}
        best = max(children, key=lambda child: common[child.id], default=None)
        if best is None or common[best.id] == 0:
            break
        path.append(best)
        if common[best.id] < len(best.token_ids):
            break
        parent, end = best.id, end + len(best.token_ids)
    return path


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
    server: Server, model: Path, page_size: int, *, name: str, contexts_per_cell: int = 3, num_points: int = 20
) -> Iterator[Line]:
    """All cases on a running server, started with ``server_arguments(page_size)``, that serves ``model``."""
    reference = Reference(model)
    where = f"({name}, page size {page_size})"
    parts = (
        (f"{len(PRESSES)} presses x kept {', '.join(map(str, KEPT_FRACTIONS))}", grid(contexts_per_cell)),
        ("two nodes, splits, turns, compressed again, chunks, batches", shapes()),
        (f"{num_points} partial matches per press, falling back", matches(num_points)),
    )
    for what, jobs in parts:
        findings = run_jobs(server, reference, page_size, jobs)
        yield summary(f"exactness: {what} {where}", findings)
        if any(finding.controls for finding in findings):
            yield sensitivity(f"exactness: controls of these answers {where}", findings)
    violations = server.post("/evicpress/check")["violations"]
    yield Line(f"exactness: integrity afterwards {where}", "no violation", f"{violations or 'none'}", not violations)


def measure_all(folder: Path, contexts_per_cell: int = 3) -> Iterator[Line]:
    """Start a server per model and page size, one after the other. ``folder`` gets the peaky model."""
    for (name, model), page_size in product((("peaky", make_peaky_model(folder)), ("testbed", MODEL)), (1, 16)):
        with Server(*server_arguments(page_size), model=model) as server:
            yield from measure(server, model, page_size, name=name, contexts_per_cell=contexts_per_cell)
