"""When each node will be used next: what only a simulator can know, for the policy belady."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_evicpress.simulator.tree import Tree
from sglang_evicpress.traces import Request, Trace


@dataclass(frozen=True, slots=True)
class Stairs:
    """The next uses of one prompt's blocks: those before ``ends[k]``, and not before ``ends[k - 1]``, are used next by
    request ``nexts[k]``; those at and after the last end never are. Both rise."""

    ends: tuple[int, ...]
    nexts: tuple[int, ...]


class Future(Mapping[int, float]):
    """Node id -> index of the request that uses the node's first block next; a node without one is not in it.

    ``follow`` names the tree the ids are of, one whose nodes hold in ``last_use`` the index of the request that last
    used them, counted from 1, as ``Replay`` keeps it: the future of a node is then that of this request. So nothing is
    updated while the trace is replayed, and one ``Future`` serves many replays, one after the other.
    """

    def __init__(self, trace: Trace) -> None:
        self._stairs = all_stairs(trace.requests)
        self._block_tokens = trace.block_tokens
        self._tree = Tree(trace.block_tokens)

    def follow(self, tree: Tree) -> None:
        self._tree = tree

    def __getitem__(self, node_id: int) -> float:
        node = self._tree.nodes[node_id]
        stairs = self._stairs[node.last_use - 1]
        step = bisect_right(stairs.ends, node.depth_tokens // self._block_tokens)
        if step == len(stairs.ends):
            raise KeyError(node_id)
        return float(stairs.nexts[step])

    def __iter__(self) -> Iterator[int]:
        return (node_id for node_id in self._tree.nodes if node_id in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def all_stairs(requests: Sequence[Request]) -> list[Stairs]:
    """For each request the next uses of its blocks, by one pass from the last request to the first.

    A tree of the requests seen so far holds in ``last_use`` the earliest of them that uses a node.
    """
    tree = Tree(1)
    stairs = []
    for index in range(len(requests) - 1, -1, -1):
        request = requests[index]
        path, matched = tree.match(request)
        if path and matched < len(path[-1].blocks):
            lower = path.pop()
            if matched:
                path.append(tree.split(lower, matched))
        steps: dict[int, int] = {}
        end = 0
        for node in path:
            end += len(node.blocks)
            steps[node.last_use] = end
            node.last_use = index
        if end < len(request.blocks):
            tree.add(path[-1] if path else tree.root, request.blocks[end:]).last_use = index
        stairs.append(Stairs(tuple(steps.values()), tuple(steps)))
    return stairs[::-1]
