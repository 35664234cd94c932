from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.core import EXACT, Form, NodeStats, Option
from sglang_evicpress.policy.lru import LruPolicy

OPTIONS = (Option(Form("keydiff", 0.5), 1), Option(None, 0))


def _node(node_id: int, parent_id: int | None, *, slots: int = 10, last_use: int, children: int = 0) -> NodeStats:
    return NodeStats(node_id, parent_id, slots, slots, 0, EXACT, 1.0, last_use, children, OPTIONS)


def test_a_parent_follows_its_last_child() -> None:
    nodes = [
        _node(1, None, last_use=1, children=2),
        _node(2, 1, last_use=3),
        _node(3, 1, last_use=2),
        _node(4, None, last_use=4),
    ]
    plan = LruPolicy().plan(nodes, 40)
    assert [decision.node_id for decision in plan] == [3, 2, 1, 4]
    assert {decision.option for decision in plan} == {Option(None, 0)}
    assert plan[0].reason == "drop: last used at 2"


def test_equal_ticks_go_by_id() -> None:
    plan = LruPolicy().plan([_node(node_id, None, last_use=7) for node_id in (5, 3, 9)], 11)
    assert [decision.node_id for decision in plan] == [3, 5]


@st.composite
def _trees(draw: st.DrawFn) -> list[NodeStats]:
    size = draw(st.integers(0, 12))
    parents = [None, *(draw(st.none() | st.integers(0, i - 1)) for i in range(1, size))][:size]
    return [
        _node(
            node_id,
            parent_id,
            slots=draw(st.integers(0, 30)),
            last_use=draw(st.integers(0, 5)),
            children=parents.count(node_id) + draw(st.sampled_from([0, 0, 0, 1])),
        )
        for node_id, parent_id in enumerate(parents)
    ]


@given(_trees(), st.integers(-5, 200))
def test_the_plan_is_that_of_looking_for_the_oldest_leaf_again_and_again(nodes: list[NodeStats], demand: int) -> None:
    left = {node.id: node for node in nodes}
    children = {node.id: node.num_children for node in nodes}
    expected: list[int] = []
    freed = 0
    while freed < demand:
        leaves = [node for node in left.values() if children[node.id] == 0]
        if not leaves:
            break
        oldest = min(leaves, key=lambda node: (node.last_use, node.id))
        del left[oldest.id]
        expected.append(oldest.id)
        freed += oldest.num_slots
        if oldest.parent_id is not None:
            children[oldest.parent_id] -= 1
    plan = LruPolicy().plan(nodes, demand)
    assert [decision.node_id for decision in plan] == expected
    assert sum(decision.freed_slots for decision in plan) == freed
