"""Nodes, menus and the carrying out of plans, for the tests of every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from sglang_evicpress.core import EXACT, Decision, Form, NodeStats, Tier
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner

MakeNode = Callable[..., NodeStats]
Execute = Callable[[Planner, Iterable[Decision]], None]


@pytest.fixture(scope="session")
def make_node() -> MakeNode:
    """A node of a menu that stores one byte per slot: ``num_tokens`` bytes if it is exact."""

    def make(
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

    return make


@pytest.fixture(scope="session")
def execute() -> Execute:
    """Tell the policy that decisions were carried out as planned."""

    def carry(planner: Planner, decisions: Iterable[Decision]) -> None:
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

    return carry
