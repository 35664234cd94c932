"""Why a node is where it is and what would be done with it next, as a table anybody can check."""

from __future__ import annotations

import math

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.policy.base import DROPPED, Candidate, Policy
from sglang_evicpress.policy.hull import Point, upper_hull
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy
from sglang_evicpress.policy.utility import utility

Row = dict[str, object]


def explain(policy: Policy, candidate: Candidate, value_of_hit: float = 1.0) -> Row:
    """The options of a node with quality q, delay d (seconds), bytes, utility U and utility drop per byte freed, what
    becomes of each on the hull, and the step the policy would take next (EvicPress sections 4.2 and 4.4). Where that
    frees much more than is missing, a plan compares it with changes that lose less in all (``Plan._best_last``).

    ``U`` is weighted; drops are against what the node holds and per byte freed on its tier. ``value_of_hit`` is the
    unit of all weights: what a hit adds to one now. A policy that weighs nothing has no table of options, only its key.
    """
    candidate = candidate.copy()
    candidate.weight /= value_of_hit
    step = None if candidate.is_locked else policy.step(candidate)
    explanation: Row = {
        "node_id": candidate.id,
        "policy": policy.name,
        "weight": candidate.weight,
        "num_tokens": candidate.num_tokens,
        "depth_tokens": candidate.depth_tokens,
        "holds": _option(candidate.form, candidate.tier),
        "num_bytes": candidate.num_bytes,
        "next": None,
        "why": _why_nothing(candidate),
        "options": [],
    }
    if step is not None:
        form = None if step.tier == DROPPED else step.form or candidate.form
        explanation["next"] = _option(form, step.tier)
        explanation["key"] = step.key
        explanation["why"] = f"smallest key first; that of this node is {step.key:.6g}"
    if isinstance(policy, EvicPressPolicy):
        explanation["alpha"] = policy.alpha
        if step is not None:
            explanation["why"] = (
                f"loses {step.key:.6g} weighted seconds per byte freed, the least of this node's options"
                if math.isfinite(step.key)
                else f"comes last: {_why_last(candidate)}"
            )
        explanation["options"] = _table(policy, candidate, explanation["next"])
    return explanation


def _table(policy: EvicPressPolicy, candidate: Candidate, chosen: object) -> list[Row]:
    now = policy.alpha * candidate.quality - policy.delay_s(candidate)
    current: Point = (candidate.num_bytes, now, -1)
    exits = policy.exits(candidate)
    allowed = [exit_ for exit_ in exits if exit_[0] <= candidate.lowest_tier]
    best_exit = max(allowed, key=lambda exit_: exit_[4], default=None)
    points = policy.points(candidate)
    leaving: list[Point] = [] if best_exit is None else [(0, best_exit[4], -2)]
    kept = policy.worth_keeping(candidate)
    hull = upper_hull([current, *kept, *leaving])
    utility_now = utility(candidate.weight, policy.alpha, candidate.quality, policy.delay_s(candidate))

    def row(form: Form | None, tier: int, num_bytes: int, quality: float, per_use: float, role: str) -> Row:
        freed = candidate.num_bytes - (num_bytes if tier == candidate.tier else 0)
        delay_s = policy.alpha * quality - per_use
        worth = utility(candidate.weight, policy.alpha, quality, delay_s)
        return {
            "option": _option(form, tier),
            "num_bytes": num_bytes,
            "q": quality,
            "d": delay_s,
            "U": worth,
            "freed_bytes": freed,
            "drop_per_byte": (utility_now - worth) / freed if freed > 0 else None,
            "role": role,
        }

    rows = [row(candidate.form, candidate.tier, candidate.num_bytes, candidate.quality, now, "held")]
    for point in points:
        form, quality = policy.menu.forms[point[2]], candidate.curve[point[2]]
        others = (other for other in (current, *points, *leaving) if other != point)
        is_dominated = any(other[0] <= point[0] and other[1] >= point[1] for other in others)
        role = "hull" if point in hull else "dominated" if is_dominated else "LP-dominated"
        role = role if point in kept else "worth less than a drop"
        rows.append(row(form, candidate.tier, point[0], quality, point[1], role))
    for exit_ in exits:
        if exit_[0] > candidate.lowest_tier:
            role = "a child is above"
        elif exit_ is not best_exit:
            role = "dominated by a better way out"
        else:
            role = "hull" if leaving[0] in hull else "dominated"
        tier, left_as, num_bytes, quality, per_use = exit_
        rows.append(row(left_as, tier, num_bytes, quality, per_use, role))
    rows = _once(rows)
    for each in rows:
        if each["option"] == chosen and each["role"] in ("hull", "worth less than a drop"):
            each["role"] = "next"
    return rows


def _once(rows: list[Row]) -> list[Row]:
    """Each option once: one that a lower tier has already may be made anew, too."""
    first: dict[tuple[object, ...], Row] = {}
    for each in rows:
        first.setdefault((each["option"], each["num_bytes"], each["q"], each["d"]), each)
    return list(first.values())


def _why_nothing(candidate: Candidate) -> str:
    if candidate.is_locked:
        return "locked by a running request"
    if candidate.lowest_tier <= candidate.tier:
        return "cannot get smaller here, and may leave only once its children have"
    return "nothing of it can be made smaller"


def _why_last(candidate: Candidate) -> str:
    if not candidate.num_bytes:
        return "it holds nothing here"
    return "it may leave only once its children have, and a smaller form of it is worth less than a drop"


def _option(form: Form | None, tier: int) -> str:
    return "drop" if tier == DROPPED else f"{form}/{Tier(tier).label}"
