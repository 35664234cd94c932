"""Hashes of paths are those of their tokens, however the path was cut, and each node is hashed once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sglang_evicpress.patches.tiers import path_hashes
from sglang_evicpress.patches.tiers.path_hashes import PathHashes
from sglang_evicpress.patches.tree.adapters import SsdScope
from sglang_evicpress.tiers.entry.identity import PathHash

pytestmark = pytest.mark.sglang

SCOPE = SsdScope(bytes(16), "tenant")


class Tokens:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.num_read = tokens, 0

    def raw_token_ids(self) -> list[int]:
        self.num_read += 1
        return self.tokens


@dataclass
class Node:
    id: int
    key: Tokens
    parent: Node | None


def chain(num_nodes: int) -> list[Node]:
    nodes = [Node(0, Tokens([]), None)]
    for index in range(1, num_nodes + 1):
        nodes.append(Node(index, Tokens([10 * index, 10 * index + 1]), nodes[-1]))
    return nodes


def expected(tokens: list[int], scope: SsdScope = SCOPE) -> bytes:
    hashed = PathHash(*scope)
    hashed.update(tokens)
    return hashed.key


def test_a_path_is_hashed_once_and_from_the_nearest_that_is_known() -> None:
    hashes, nodes = PathHashes(), chain(6)
    for node in (nodes[4], nodes[6], nodes[2], nodes[0], nodes[6]):
        assert hashes.of(node, SCOPE).key == expected(
            [token for one in nodes[1 : node.id + 1] for token in one.key.tokens]
        )
    assert [node.key.num_read for node in nodes] == [0] + [1] * 6


def test_a_split_changes_no_hash_and_another_scope_does() -> None:
    hashes, nodes = PathHashes(), chain(2)
    before = hashes.of(nodes[2], SCOPE).key
    upper = Node(7, Tokens(nodes[2].key.tokens[:1]), nodes[1])
    nodes[2].parent, nodes[2].key = upper, Tokens(nodes[2].key.tokens[1:])
    assert hashes.of(nodes[2], SCOPE).key == before
    assert hashes.of(upper, SCOPE).key == expected([10, 11, 20])
    other = SsdScope(bytes(15) + bytes([1]), "tenant")
    assert hashes.of(nodes[2], other).key == expected([10, 11, 20, 21], other) != before


def test_as_many_are_remembered_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_hashes, "MOST_REMEMBERED", 3)
    hashes, nodes = PathHashes(), chain(6)
    assert hashes.of(nodes[6], SCOPE).key == expected([token for one in nodes for token in one.key.tokens])
    assert sorted(hashes._known) == [4, 5, 6]
    hashes.clear()
    assert hashes.of(nodes[1], SCOPE).key == expected([10, 11])
