"""Parts of one run of a replay, and their assembly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from sglang_evicpress.core import Form
from sglang_evicpress.policy import make_planner, policy_info
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.layer_counts import NO_BUDGETS, LayerGroups
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.policy.quality_target import QualityTarget
from sglang_evicpress.simulator.future import Future
from sglang_evicpress.simulator.replay import MIN_COMPRESS_TOKENS, Machine, Replay
from sglang_evicpress.simulator.sensitivity import Sensitivities
from sglang_evicpress.traces import Trace

Recompute = Literal["evicpress", "all", "none"]

NUM_OFFLINE_CONTEXTS = 1000
"""Contexts, none of them of the trace, whose mean curve adaptcache is given."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All that the runs over one trace have in common.

    ``machine`` has the tiers there are, the GPU always; if its costs are noisy, policies learn them. ``curves`` None
    draws a curve for each context from ``seed``. ``recompute`` says which policies may prefill again what would take
    longer to load; engines today always load. Nodes of less than ``min_compress_tokens`` tokens are never compressed.
    ``curve_error`` is by how much more quality the policy's curves promise than there is. ``groups``: those of layers
    that the layer budgets of ``forms`` make.
    """

    machine: Machine
    slot_bytes: int
    forms: tuple[Form, ...]
    seed: int = 0
    curves: Curves | None = None
    recompute: Recompute = "evicpress"
    min_compress_tokens: int = MIN_COMPRESS_TOKENS
    curve_error: float = 0.0
    groups: LayerGroups = NO_BUDGETS


@dataclass(frozen=True, slots=True)
class Run:
    """One policy at one alpha, or at a quality ``target`` for which alpha is tuned; both None where the policy does not
    weigh quality."""

    policy: str
    alpha: float | None = None
    target: float | None = None


def all_runs(policies: tuple[str, ...], alphas: tuple[float, ...], targets: tuple[float, ...] = ()) -> tuple[Run, ...]:
    """Each policy once, those that have an alpha once for each, and one whose alpha can be tuned for each target."""
    runs = []
    for policy in policies:
        info = policy_info(policy)
        runs += [Run(policy, alpha) for alpha in alphas] if info.weighs_quality else [Run(policy)]
        runs += [Run(policy, None, target) for target in targets] if info.has_target else []
    return tuple(runs)


class GivenCurves(Sensitivities):
    """The same curve for every context."""

    def __init__(self, forms: tuple[Form, ...], curves: Curves) -> None:
        super().__init__(forms)
        self._curve = tuple(curves.quality(form) for form in forms)

    def curve(self, key: int) -> tuple[float, ...]:
        return self._curve


def make_replay(trace: Trace, run: Run, settings: Settings, future: Future | None = None) -> Replay:
    """A replay that has not begun. ``future``, made of the trace, is needed by belady; one serves one run at a time.

    A run's menu holds the forms of the setting and those its own policy asks for. ValueError as ``make_planner``.
    """
    machine = settings.machine
    forms = tuple(form for form in settings.forms if form.is_exact or run.target != 1.0)
    forms = (*forms, *policy_info(run.policy).forms)
    menu = Menu(forms, tuple(machine.capacity), settings.slot_bytes, groups=settings.groups)
    curves = (
        Sensitivities(menu.forms, settings.seed)
        if settings.curves is None
        else GivenCurves(menu.forms, settings.curves)
    )
    policy = make_planner(
        run.policy,
        menu,
        alpha=1.0 if run.alpha is None else run.alpha,
        costs=machine.costs,
        mean_curve=offline_curve(curves) if policy_info(run.policy).has_mean_curve else None,
        next_use=future,
    )
    target = None if run.target is None else QualityTarget(run.target)
    may_recompute = settings.recompute == "all" or settings.recompute == run.policy
    replay = Replay(
        *(trace, policy, menu, machine, curves),
        may_recompute,
        learns=machine.noise > 0.0,
        seed=settings.seed,
        target=target,
        curve_error=settings.curve_error,
        min_compress_tokens=settings.min_compress_tokens,
    )
    if future is not None:
        future.follow(replay.tree)
    return replay


def offline_curve(curves: Sensitivities) -> tuple[float, ...]:
    """Mean quality per form over contexts of the same kind; keys below 0 are in no trace."""
    drawn = [curves.curve(-1 - index) for index in range(NUM_OFFLINE_CONTEXTS)]
    return tuple(fmean(column) for column in zip(*drawn, strict=True))


def servers_at_load(trace: Trace, costs: CostSnapshot, load: float) -> float:
    """Number of servers that the prefill of every whole prompt would keep busy the share ``load`` of the time.

    With a cache they are less busy. ValueError if the requests span no time.
    """
    span_s = trace.requests[-1].arrival_s - trace.requests[0].arrival_s if trace.requests else 0.0
    if not span_s > 0.0:
        raise ValueError("all requests arrive at once: expected a number of servers, not a load")
    busy_s = sum(costs.prefill.seconds(max(request.num_tokens, 1), 0) for request in trace.requests)
    if not math.isfinite(number := busy_s / span_s / load):
        raise ValueError(f"a load of {load:g} takes endless servers: expected a larger share of the time")
    return number
