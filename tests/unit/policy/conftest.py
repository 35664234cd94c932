"""Nodes, menus and the carrying out of plans, for the tests of every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from sglang_evicpress.core import EXACT, Decision, Form, NodeStats, Tier
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Policy

MakeNode = Callable[..., NodeStats]
CarryOut = Callable[[Policy, Iterable[Decision]], None]


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
def carry_out() -> CarryOut:
    """Tell the policy that decisions were carried out as planned."""

    def carry(policy: Policy, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            option, record = decision.option, policy.book.records[decision.node_id]
            if option.form is None or option.tier is None:
                policy.forget(decision.node_id)
                continue
            policy.put(
                NodeStats(
                    record.id,
                    record.parent_id,
                    option.tier,
                    option.form,
                    record.num_tokens,
                    option.num_bytes,
                    record.depth_tokens,
                    decision.quality,
                    record.curve,
                    record.reachable & policy.rule.menu.smaller(option.form),
                    record.weight,
                    record.num_hits,
                    record.last_use,
                    record.sinks,
                    record.is_locked,
                )
            )

    return carry
