"""Nodes, forests of them and the carrying out of plans, for the tests of every policy."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from sglang_evicpress.core import EXACT, Decision, Form, NodeStats, Tier
from sglang_evicpress.policy import POLICY_NAMES
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner

EXAMPLES = {"PRESS@KEPT+lru": "keydiff@0.5+lru", "FORM+CODEC+lru": "knorm@0.5+int4+lru", "impress@X": "impress@0.1"}
NAMES = [EXAMPLES.get(name, name) for name in POLICY_NAMES]
each_policy = pytest.mark.parametrize("name", NAMES)


def make_node(
    node_id: int,
    parent_id: int | None = None,
    *,
    menu: Menu,
    tokens: int = 100,
    depth: int = 0,
    tier: Tier = Tier.GPU,
    form: Form = EXACT,
    curve: Sequence[float] | None = None,
    weight: float = 1.0,
    hits: int = 1,
    last_use: int = 0,
    is_locked: bool = False,
) -> NodeStats:
    """A node of a menu that stores one byte per slot: ``tokens`` bytes if it is exact."""
    qualities = [other.kept_fraction for other in menu.forms] if curve is None else curve
    return NodeStats(
        node_id,
        parent_id,
        tier,
        form,
        tokens,
        menu.num_bytes(form, tokens),
        depth,
        qualities[menu.forms.index(form)],
        qualities,
        menu.smaller(form),
        weight,
        hits,
        last_use,
        is_locked=is_locked,
    )


def random_forest(
    draw: random.Random,
    menu: Menu,
    size: int,
    *,
    tiers: Sequence[int] = (0, 0, 1, 2),
    tokens: tuple[int, int] = (1, 80),
    empty: float = 0.0,
    locked: float = 0.0,
) -> list[NodeStats]:
    """Parents first, no node on a faster tier than its parent. ``empty`` and ``locked`` are shares of the nodes that
    hold no bytes, and that are locked on the GPU with all above them."""
    nodes: list[NodeStats] = []
    for node_id in range(size):
        parent = draw.choice(nodes) if nodes and draw.random() < 0.7 else None
        node = make_node(
            node_id,
            None if parent is None else parent.id,
            menu=menu,
            tokens=draw.randint(*tokens),
            depth=0 if parent is None else parent.depth_tokens + parent.num_tokens,
            tier=Tier(max(draw.choice(tiers), 0 if parent is None else parent.tier)),
            form=draw.choice((EXACT, *menu.forms)),
            curve=[1.0, *(draw.choice((0.0, 0.5, 1.0, draw.random(), draw.random())) for _ in menu.forms[1:])],
            weight=draw.choice((0.0, 1.0, draw.random() * 5)),
            hits=draw.randint(1, 4),
            last_use=draw.randrange(4),
        )
        nodes.append(replace(node, num_bytes=0, allowed_forms=0) if draw.random() < empty else node)
    held: set[int | None] = set()
    for node in reversed(nodes):
        if node.id in held or (node.tier == Tier.GPU and draw.random() < locked):
            held |= {node.id, node.parent_id}
    return [replace(node, is_locked=node.id in held) for node in nodes]


def assert_closed(planner: Planner) -> None:
    """No node is on a faster tier than its parent, and none is without it."""
    candidates = planner.index.candidates
    for candidate in candidates.values():
        if candidate.parent_id is not None:
            assert candidates[candidate.parent_id].tier <= candidate.tier <= Tier.SSD


def execute(planner: Planner, decisions: Iterable[Decision]) -> None:
    """Tell the policy that decisions were carried out as planned."""
    for decision in decisions:
        option, candidate = decision.option, planner.index.candidates[decision.node_id]
        if option.form is None or option.tier is None:
            planner.remove(decision.node_id)
            continue
        planner.add(
            NodeStats(
                candidate.id,
                candidate.parent_id,
                option.tier,
                option.form,
                candidate.num_tokens,
                option.num_bytes,
                candidate.depth_tokens,
                decision.quality,
                candidate.curve,
                candidate.allowed_forms & planner.policy.menu.smaller(option.form),
                candidate.weight,
                candidate.num_hits,
                candidate.last_use,
                candidate.sinks,
                candidate.is_locked,
            )
        )
