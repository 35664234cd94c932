"""Policies: frozen statistics in, decisions out; chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sglang_evicpress.policy.base import Policy
from sglang_evicpress.policy.evicpress import EvicPressPolicy
from sglang_evicpress.policy.lru import LruPolicy
from sglang_evicpress.profile import Curves
from sglang_evicpress.utility import PrefillCost

POLICIES: Mapping[str, Callable[[float, Curves, PrefillCost], Policy]] = {
    EvicPressPolicy.name: EvicPressPolicy,
    LruPolicy.name: lambda alpha, curves, prefill: LruPolicy(),
}
"""Name of a policy -> what makes it of (alpha, curves, prefill); one that needs none of them ignores them."""


def make_policy(name: str, *, alpha: float, curves: Curves, prefill: PrefillCost) -> Policy:
    """The policy called ``name``. ValueError for a name not in ``POLICIES``, listing those that are."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not known: expected one of {', '.join(POLICIES)}")
    return POLICIES[name](alpha, curves, prefill)
