"""What every policy owes its caller, whatever it prefers: the rules of ``Policy.plan``."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_evicpress.core import EXACT, Decision, Form, NodeStats, Option
from sglang_evicpress.policy import POLICIES, make_policy
from sglang_evicpress.policy.base import Policy
from sglang_evicpress.profile import Curves
from sglang_evicpress.utility import PrefillCost

FORMS = tuple(Form(press, kept) for press in ("keydiff", "snapkv") for kept in (0.75, 0.5, 0.25))
DROP = Option(None, 0)

each_policy = pytest.mark.parametrize("name", POLICIES)


def _policy(name: str) -> Policy:
    return make_policy(name, alpha=1.0, curves=Curves.prior(), prefill=PrefillCost(0.01, 1e-3, 1e-6))


@st.composite
def _resident(draw: st.DrawFn) -> list[NodeStats]:
    """A tree with lossy, locked and hollow nodes; some that are resident are not shown to the policy."""
    size = draw(st.integers(0, 10))
    parents = [None, *(draw(st.none() | st.integers(0, i - 1)) for i in range(1, size))][:size]
    nodes = []
    for node_id, parent_id in enumerate(parents):
        tokens = draw(st.integers(1, 64))
        form = draw(st.sampled_from((EXACT, EXACT, *FORMS)))
        slots = tokens if form.is_exact else draw(st.integers(0, tokens))
        options = [
            Option(option_form, draw(st.integers(0, slots)))
            for option_form in draw(st.lists(st.sampled_from(FORMS), unique=True, max_size=3))
        ]
        options += [DROP] * draw(st.sampled_from((1, 1, 1, 0)))
        nodes.append(
            NodeStats(
                id=node_id,
                parent_id=parent_id,
                num_tokens=tokens,
                num_slots=slots,
                depth_tokens=draw(st.integers(0, 500)),
                form=form,
                weight=draw(st.sampled_from((0.0, 0.5, 1.0)) | st.floats(0.0, 10.0)),
                last_use=draw(st.integers(0, 4)),
                num_children=parents.count(node_id),
                options=() if draw(st.integers(0, 7)) == 0 else tuple(options),
            )
        )
    return [node for node in nodes if draw(st.integers(0, 7)) != 0]


def _freeable(nodes: list[NodeStats], *, by_compressing: bool) -> int:
    """All that any sequence of legal moves frees, children first (ids grow downwards)."""
    children = {node.id: node.num_children for node in nodes}
    freeable = 0
    for node in reversed(nodes):
        if children[node.id] == 0 and DROP in node.options:
            freeable += node.num_slots
            if node.parent_id in children:
                children[node.parent_id] -= 1
        elif by_compressing:
            sizes = [option.num_slots for option in node.options if option.form is not None]
            freeable += node.num_slots - min([*sizes, node.num_slots])
    return freeable


@each_policy
@settings(max_examples=150, deadline=None)
@given(nodes=_resident(), demand=st.integers(1, 300))
def test_a_plan_keeps_the_rules(name: str, nodes: list[NodeStats], demand: int) -> None:
    plan = _policy(name).plan(nodes, demand)
    by_id = {node.id: node for node in nodes}
    assert len({decision.node_id for decision in plan}) == len(plan)
    children = {node.id: node.num_children for node in nodes}
    for decision in plan:
        node = by_id[decision.node_id]
        assert decision.option in node.options
        assert decision.freed_slots == node.num_slots - decision.option.num_slots
        assert decision.reason
        if decision.option.form is None:
            assert children[node.id] == 0
            if node.parent_id in children:
                children[node.parent_id] -= 1

    freed = sum(decision.freed_slots for decision in plan)
    freeable = _freeable(nodes, by_compressing=name != "lru")
    assert freed >= min(demand, freeable)
    if freed >= demand:
        assert freed - plan[-1].freed_slots < demand


@each_policy
@given(nodes=_resident(), demand=st.integers(-5, 0))
def test_no_demand_needs_no_plan(name: str, nodes: list[NodeStats], demand: int) -> None:
    assert _policy(name).plan(nodes, demand) == []


@each_policy
@given(nodes=_resident(), demand=st.integers(1, 300), seed=st.integers(0, 2**16))
def test_the_order_of_the_nodes_does_not_matter(name: str, nodes: list[NodeStats], demand: int, seed: int) -> None:
    shuffled = list(nodes)
    random.Random(seed).shuffle(shuffled)
    assert _policy(name).plan(shuffled, demand) == _policy(name).plan(nodes, demand)


def _many_ties() -> list[NodeStats]:
    """A forest in which most nodes look alike, so that only the tie rule tells them apart."""
    generator = random.Random(0)
    parents = [None if i < 8 else generator.choice((None, generator.randrange(i))) for i in range(200)]
    options = (*(Option(form, int(64 * form.kept_fraction)) for form in FORMS), DROP)
    return [
        NodeStats(i, parent, 64, 64, 0, EXACT, generator.choice((0.0, 1.0)), i % 3, parents.count(i), options)
        for i, parent in enumerate(parents)
    ]


@each_policy
def test_other_processes_make_the_same_plan(name: str) -> None:
    def plan_elsewhere(hash_seed: str) -> str:
        command = [sys.executable, __file__, name]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    assert plan_elsewhere("1") == plan_elsewhere("2") == repr(_plan_of_many_ties(name))


def _plan_of_many_ties(name: str) -> list[Decision]:
    return _policy(name).plan(_many_ties(), 6_000)


@each_policy
def test_a_policy_carries_the_name_it_is_made_by(name: str) -> None:
    assert _policy(name).name == name


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="'lfu' is not known: expected one of evicpress, lru"):
        _policy("lfu")


if __name__ == "__main__":
    sys.stdout.write(repr(_plan_of_many_ties(sys.argv[1])))
