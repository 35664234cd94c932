"""The next use of every node of a replay, against a search through the trace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.core import Tier
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost
from sglang_evicpress.simulator.future import Future, all_stairs
from sglang_evicpress.simulator.replay import Machine
from sglang_evicpress.simulator.runs import Run, Settings, make_replay
from sglang_evicpress.simulator.tree import Node
from sglang_evicpress.traces import Request, Trace

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), min_size=1, max_size=25)
COSTS = CostSnapshot(PrefillCost(0.0, 1.0, 0.0), {}, {})


def trace_of(prompts: list[tuple[int, ...]]) -> Trace:
    return Trace("drawn", 2, [Request(float(t), blocks, 2 * len(blocks)) for t, blocks in enumerate(prompts)])


def prefix(node: Node) -> tuple[int, ...]:
    """Blocks from the root to the first one of the node."""
    blocks = node.blocks[:1]
    while (parent := node.parent) is not None:
        blocks = parent.blocks + blocks
        node = parent
    return blocks


@given(PROMPTS, st.integers(2, 30))
def test_next_use_of_every_node_at_every_time(prompts: list[tuple[int, ...]], capacity: int) -> None:
    trace = trace_of(prompts)
    future = Future(trace)
    replay = make_replay(trace, Run("belady"), Settings(Machine({Tier.GPU: capacity}, COSTS), 1, ()), future)
    for index, request in enumerate(trace.requests):
        replay.serve(request)
        for node in replay.tree.nodes.values():
            wanted = prefix(node)
            uses = (j for j in range(index + 1, len(prompts)) if prompts[j][: len(wanted)] == wanted)
            assert future.get(node.id) == next(uses, None)
        assert len(future) == len(list(future)) <= len(replay.tree.nodes)


def test_stairs_by_hand() -> None:
    """(1, 2, 3) is used next up to its first block by request 1, up to its second by request 2, never as a whole."""
    stairs = all_stairs(trace_of([(1, 2, 3), (1, 9), (1, 2), ()]).requests)
    assert [(step.ends, step.nexts) for step in stairs] == [((1, 2), (1, 2)), ((1,), (2,)), ((), ()), ((), ())]
