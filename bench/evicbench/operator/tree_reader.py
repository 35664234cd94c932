"""Tree of a quiet server, with tokens and predicted qualities: what a prompt will be served from it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evicbench.testbed.server import Server

QUIET_S = 0.05
MOST_LOOKS = 40
_STATE = ("id", "parent_id", "num_tokens", "num_slots", "form", "tier", "lineage")

Node = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Walked:
    """The first tokens of a prompt as a tree holds them. ``quality``: their predicted mean, 1 where there are none."""

    exact_tokens: int
    lossy_tokens: int
    tiers: Mapping[str, int]
    quality: float

    @property
    def num_tokens(self) -> int:
        return self.exact_tokens + self.lossy_tokens

    def as_usage(self) -> dict[str, object]:
        """Counts as ``usage.kv_cache`` says them."""
        return {"exact_tokens": self.exact_tokens, "lossy_tokens": self.lossy_tokens, "tiers": dict(self.tiers)}


class Tree:
    """Nodes of one moment. ``tokens`` of nodes by id."""

    def __init__(self, server: Server, nodes: Sequence[Node], tokens: Mapping[int, Sequence[int]]) -> None:
        self._server = server
        self._tokens = tokens
        self._qualities: dict[int, float] = {}
        self._children = defaultdict[int | None, list[Node]](list)
        for node in nodes:
            self._children[node["parent_id"]].append(node)

    def path(self, prompt: Sequence[int], num_tokens: int) -> Iterator[tuple[Node, int]]:
        """Nodes that spell the first tokens of a prompt, with as many as are theirs."""
        parent, done = None, 0
        while done < num_tokens:
            found = [(node, _num_equal(self._tokens[node["id"]], prompt[done:])) for node in self._children[parent]]
            node, matched = max(found, key=lambda pair: pair[1], default=({}, 0))
            if not matched:
                return
            yield node, min(matched, num_tokens - done)
            parent, done = node["id"], done + matched

    def note_qualities(self, prompt: Sequence[int]) -> None:
        """Ask what the nodes of a prompt are worth now: a request may compress them once it has ended."""
        for node, _ in self.path(prompt, len(prompt)):
            if node["form"] != "exact":
                options = self._server.get(f"/evicpress/explain/{node['id']}")["options"]
                self._qualities[node["id"]] = next(float(each["q"]) for each in options if each["role"] == "held")

    def walk(self, prompt: Sequence[int], num_tokens: int) -> Walked:
        """Kinds of the first tokens of a prompt, whose qualities were noted. What was computed upon a lossy
        prefix is no better than that."""
        exact, lossy, lost, tiers = 0, 0, 0.0, Counter[str]()
        for node, matched in self.path(prompt, num_tokens):
            quality = 1.0 if node["form"] == "exact" else self._qualities[node["id"]]
            if node["computed_on"] == "lossy" and exact + lossy:
                quality = min(quality, 1.0 - lost / (exact + lossy))
            lost += matched * (1.0 - quality)
            tiers[node["tier"]] += matched
            exact, lossy = (exact, lossy + matched) if node["lineage"] == "lossy" else (exact + matched, lossy)
        return Walked(exact, lossy, tiers, 1.0 - lost / max(1, exact + lossy))


class TreeReader:
    """Reads the tree, and the tokens of each node once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tokens: dict[tuple[int, int], list[int]] = {}

    def read_when_quiet(self) -> Tree:
        """The tree once it stays as it is while it is read. Raises RuntimeError where it never does."""
        for _ in range(MOST_LOOKS):
            nodes = self._nodes()
            tokens = {node["id"]: self._tokens_of(node) for node in nodes}
            time.sleep(QUIET_S)
            if all(tokens.values()) and _state_of(nodes) == _state_of(self._nodes()):
                return Tree(self._server, nodes, tokens)
        raise RuntimeError(f"the tree changed in each of {MOST_LOOKS} looks, {QUIET_S:g} s apart")

    def _nodes(self) -> list[Node]:
        nodes, after = list[Node](), 0
        while after is not None:
            page = self._server.get(f"/evicpress/tree?after={after}")
            nodes += [node for node in page["nodes"] if not node["is_shadow"]]
            after = page["next"]
        return nodes

    def _tokens_of(self, node: Node) -> list[int]:
        """Nothing where the node has gone, or is another, since."""
        key = node["id"], node["num_tokens"]  # a split keeps the id of one part
        if key not in self._tokens:
            status, answer = self._server.request("GET", f"/evicpress/nodes/{key[0]}?tokens=true")
            if status != 200 or answer["num_tokens"] != key[1]:
                return []
            self._tokens[key] = answer["token_ids"]
        return self._tokens[key]


def _state_of(nodes: Sequence[Node]) -> list[tuple[object, ...]]:
    return [tuple(node[name] for name in _STATE) for node in nodes]


def _num_equal(tokens: Sequence[int], prompt: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(tokens, prompt, strict=False)):
        if one != other:
            return index
    return min(len(tokens), len(prompt))
