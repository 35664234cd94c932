"""Policies: frozen statistics in, decisions out; chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sglang_evicpress.core import CODECS, EXACT, PRESSES, Form
from sglang_evicpress.policy.base import Policy
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner
from sglang_evicpress.policy.rules.adaptcache import AdaptCachePolicy
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy
from sglang_evicpress.policy.rules.fixed import FixedFormPolicy, ImpressPolicy, impress_form
from sglang_evicpress.policy.rules.gdsf import GdsfPolicy
from sglang_evicpress.policy.rules.lru import BeladyPolicy, HptPolicy, LfuPolicy, LruPolicy, SlruPolicy
from sglang_evicpress.policy.rules.s3fifo import S3FifoPolicy
from sglang_evicpress.policy.rules.sieve import SievePolicy
from sglang_evicpress.policy.rules.tlru import TlruPolicy


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that a policy may be made of."""

    menu: Menu
    alpha: float
    costs: CostSnapshot
    mean_curve: Sequence[float] | None
    next_use: Mapping[int, float] | None


def _adaptcache(inputs: Inputs) -> Policy:
    if inputs.mean_curve is None:
        raise ValueError(
            "policy 'adaptcache' has no mean_curve: expected the offline quality of every form of the menu"
        )
    return AdaptCachePolicy(inputs.menu, inputs.alpha, inputs.costs, inputs.mean_curve)


def _belady(inputs: Inputs) -> Policy:
    if inputs.next_use is None:
        raise ValueError("policy 'belady' has no next_use: expected to run in a simulator, which knows the future")
    return BeladyPolicy(inputs.menu, inputs.next_use)


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """A policy as registered. ``forms``: those it needs on the menu besides the configured ones. ``weighs_quality``: by
    alpha and quality curves. ``has_target``: a quality target may tune alpha. ``has_mean_curve``: it goes by one curve
    for all nodes. ``sees_future``: for a simulator only."""

    make: Callable[[Inputs], Policy]
    forms: tuple[Form, ...] = ()
    weighs_quality: bool = False
    has_target: bool = False
    has_mean_curve: bool = False
    sees_future: bool = False


POLICIES: dict[str, PolicyInfo] = {
    "evicpress": PolicyInfo(
        lambda inputs: EvicPressPolicy(inputs.menu, inputs.alpha, inputs.costs),
        weighs_quality=True,
        has_target=True,
    ),
    "lru": PolicyInfo(lambda inputs: LruPolicy(inputs.menu)),
    "lfu": PolicyInfo(lambda inputs: LfuPolicy(inputs.menu)),
    "slru": PolicyInfo(lambda inputs: SlruPolicy(inputs.menu)),
    "tlru": PolicyInfo(lambda inputs: TlruPolicy(inputs.menu)),
    "hpt": PolicyInfo(lambda inputs: HptPolicy(inputs.menu)),
    "gdsf": PolicyInfo(lambda inputs: GdsfPolicy(inputs.menu, inputs.costs)),
    "s3fifo": PolicyInfo(lambda inputs: S3FifoPolicy(inputs.menu)),
    "sieve": PolicyInfo(lambda inputs: SievePolicy(inputs.menu)),
    "adaptcache": PolicyInfo(_adaptcache, weighs_quality=True, has_mean_curve=True),
    "belady": PolicyInfo(_belady, sees_future=True),
}

_PATTERNS = ("PRESS@KEPT+lru", "FORM+CODEC+lru", "impress@X")  # keydiff@0.5+lru, exact+int4+lru, impress@0.1
SERVER_POLICY_NAMES = (*(name for name, policy in POLICIES.items() if not policy.sees_future), *_PATTERNS)
"""Names and patterns that a server accepts, as help texts show them."""

POLICY_NAMES = (*SERVER_POLICY_NAMES, *(name for name, policy in POLICIES.items() if policy.sees_future))
"""Names and patterns that the simulator accepts."""


def make_planner(
    name: str,
    menu: Menu,
    *,
    alpha: float,
    costs: CostSnapshot,
    mean_curve: Sequence[float] | None = None,
    next_use: Mapping[int, float] | None = None,
) -> Planner:
    """The policy called ``name``; the menu must hold the ``forms`` of its ``policy_info``.

    ``mean_curve``, the offline quality of every form of the menu, is needed by adaptcache, ``next_use`` by belady.
    Raises ValueError for a name that is not known, listing those that are, and for an input that is missing or wrong.
    """
    return Planner(policy_info(name).make(Inputs(menu, alpha, costs, mean_curve, next_use)))


def policy_info(name: str) -> PolicyInfo:
    """The policy of that name, or of one that follows a pattern. Raises ValueError for an unknown name."""
    if name in POLICIES:
        return POLICIES[name]
    press, at, number = name.partition("@")
    try:
        if name.endswith("+lru"):
            form = Form.parse_stored(name.removesuffix("+lru"))
            if form != EXACT:
                forms = tuple(dict.fromkeys((form.pressed, form)))
                return PolicyInfo(lambda inputs: FixedFormPolicy(inputs.menu, form), forms)
        elif press == "impress" and at:
            important = float(number)
            return PolicyInfo(lambda inputs: ImpressPolicy(inputs.menu, important), (impress_form(important),))
    except ValueError:
        pass  # said below, with everything else that is accepted
    codecs = ", ".join(codec for codec in CODECS if codec != "raw")
    raise ValueError(
        f"policy {name!r} is not known: expected one of {', '.join(POLICY_NAMES)}, with PRESS one of "
        f"{', '.join(PRESSES)}, FORM exact or PRESS@KEPT, CODEC one of {codecs}, 0 < KEPT < 1, 0 < X < 1, "
        "such as keydiff@0.5+lru, exact+int4+lru or impress@0.1"
    )
