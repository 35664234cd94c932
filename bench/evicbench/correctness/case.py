"""One conversation with a server whose every answer is checked, token by token, against transformers.

The reference reads the survivors' positions from ``/evicpress/nodes`` before a request, gathers its own keys and values
there, and runs the rest of the prompt and the server's answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from evicbench.correctness.findings import Finding
from evicbench.correctness.reference import (
    KV,
    SCORE_TOLERANCE,
    Extension,
    Node,
    Reference,
    Text,
    common_length,
    expected_match,
    largest_difference,
    selection_problems,
    survivors,
)
from evicbench.testbed.server import ADMIN_KEY, Server
from sglang_evicpress.introspect.keyed_hash import key_of, keyed_hash

TIE = 1e-4  # two candidates closer than this are one to fp32
NUM_ANSWER_TOKENS = 32
NUM_TOP = 5
MAX_TRIES = 20


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
        given, node_end = (text, node, after, self.page_size), node.start + len(node.token_ids)
        problems = list(selection_problems(*given, query_end or text.prompt_end, tolerance=self.score_tolerance))
        if problems and query_end is None and 0 < text.prompt_end - node_end < self.page_size:
            # Beside others, the tokens behind the last whole page may be a chunk of their own: the node has no queries
            # of them then.
            problems = list(selection_problems(*given, node_end, tolerance=self.score_tolerance))
        for problem in problems:
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
        return self.check(text, path, prompt, self.generate(prompt), cached=cached, with_controls=with_controls)

    def generate(self, prompt: Sequence[int]) -> Any:
        """The server's answer in this case's namespace, with what ``check`` needs."""
        fields = {"extra_key": self.name, "return_logprob": True, "top_logprobs_num": NUM_TOP}
        return self._server.generate(list(prompt), NUM_ANSWER_TOKENS, **fields)

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
        meta, output = answer["meta_info"], tuple(answer["output_ids"])
        wanted = expected_match(path, prompt, self.page_size) if cached is None else cached
        self.expect("cached tokens", meta["cached_tokens"], wanted)
        cached = int(meta["cached_tokens"])
        held = survivors(path, text.kv, cached)
        if held.numel():
            self.expect("a position beyond the match", int(held.max()) >= cached, False)
        new = prompt[cached:] + output
        extension = self._reference.extend(text.kv.gather(held), cached, new)
        logprobs, top = extension.logprobs[-len(output) - 1 : -1], meta["output_top_logprobs"]
        best = logprobs.topk(2).values
        differs = logprobs.argmax(-1) != torch.tensor(output)
        is_tie = differs & (best[:, 0] - logprobs[torch.arange(len(output)), list(output)] < self.tie)
        self.findings.append(
            Finding(
                self.name,
                () if len(output) == NUM_ANSWER_TOKENS else (f"{len(output)} tokens came back",),
                largest_difference(logprobs, top),
                len(output),
                int((differs & ~is_tie).sum()),
                int(is_tie.sum()),
                self._controls(text.kv, held, cached, new, top) if with_controls else None,
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
        fields = {"return_logprob": True, "top_logprobs_num": NUM_TOP, "extra_key": [each.name for each, _ in members]}
        answers = self._server.generate([list(prompt) for prompt in prompts], NUM_ANSWER_TOKENS, **fields)
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
        """Distance of the answer over the full cache, with one survivor per head replaced by a neighbour that
        was dropped, and with positions counted in slots."""

        def off_by(past: KV, start: int) -> float:
            return largest_difference(self._reference.extend(past, start, new).logprobs[-len(top) - 1 : -1], top)

        shifted = held.clone()
        for layer, head in product(*map(range, held.shape[:2])):
            dropped = sorted(set(range(cached)) - set(held[layer, head].tolist()))
            if dropped:
                at = self._rng.choice(dropped)
                distance = (held[layer, head] - at).abs()
                nearest = distance.masked_fill(held[layer, head] < 0, cached).argmin()
                shifted[layer, head, nearest] = at
        return (
            off_by(kv.first(cached), cached),
            off_by(kv.gather(shifted), cached),
            off_by(kv.gather(held), held.shape[-1]),
        )

    def expect(self, what: str, got: object, wanted: object) -> None:
        if got != wanted:
            self.findings.append(Finding(self.name, (f"{what}: {got}, expected {wanted}",)))


def read_path(server: Server, namespace: str, token_ids: Sequence[int]) -> list[Node]:
    """The nodes of a namespace that spell the longest known prefix of ``token_ids``, the last one perhaps in part."""
    shown = keyed_hash(namespace.encode(), key_of(ADMIN_KEY), 8)
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
