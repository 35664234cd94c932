"""Policies: frozen statistics in, decisions out; chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sglang_evicpress.costs import Costs
from sglang_evicpress.policy.base import Policy
from sglang_evicpress.policy.book import Rule
from sglang_evicpress.policy.evicpress import EvicPressRule
from sglang_evicpress.policy.lru import LfuRule, LruRule, SlruRule
from sglang_evicpress.policy.menu import Menu

POLICIES: Mapping[str, Callable[[Menu, float, Costs], Rule]] = {
    "evicpress": EvicPressRule,
    "lru": lambda menu, alpha, costs: LruRule(menu),
    "lfu": lambda menu, alpha, costs: LfuRule(menu),
    "slru": lambda menu, alpha, costs: SlruRule(menu),
}
"""Name of a policy -> what makes its rule of (menu, alpha, costs); one that needs only the menu ignores the rest."""


def make_policy(name: str, menu: Menu, *, alpha: float, costs: Costs) -> Policy:
    """The policy called ``name``. ValueError for a name not in ``POLICIES``, listing those that are."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not known: expected one of {', '.join(POLICIES)}")
    return Policy(POLICIES[name](menu, alpha, costs))
