"""Why a node is where it is and what would be done with it next, as a table anybody can check."""

from __future__ import annotations

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.policy.base import DROPPED, Record, Rule
from sglang_evicpress.policy.hull import Point, upper_hull
from sglang_evicpress.policy.rules.evicpress import EvicPressRule
from sglang_evicpress.policy.utility import utility

Row = dict[str, object]


def explain(rule: Rule, record: Record, value_of_hit: float = 1.0) -> Row:
    """The options of a node with quality q, delay d (seconds), bytes, utility U and utility drop per byte freed, what
    becomes of each on the hull, and the step the policy would take next (EvicPress sections 4.2 and 4.4). Where that
    frees much more than is missing, a plan compares it with changes that lose less in all (``Plan._best_last``).

    ``U`` is weighted; drops are against what the node holds and per byte freed on its tier. ``value_of_hit`` is the
    unit of all weights: what a hit adds to one now. A policy that weighs nothing has no table of options, only its key.
    """
    record = record.copy()
    record.weight /= value_of_hit
    step = None if record.is_locked else rule.step(record)
    told: Row = {
        "node_id": record.id,
        "policy": rule.name,
        "weight": record.weight,
        "num_tokens": record.num_tokens,
        "depth_tokens": record.depth_tokens,
        "holds": _option(record.form, record.rank),
        "num_bytes": record.num_bytes,
        "next": None,
        "why": _why_nothing(record),
        "options": [],
    }
    if step is not None:
        form = None if step.rank == DROPPED else step.form or record.form
        told["next"] = _option(form, step.rank)
        told["key"] = step.key
        told["why"] = f"smallest key first; that of this node is {step.key:.6g}"
    if isinstance(rule, EvicPressRule):
        told["alpha"] = rule.alpha
        if step is not None:
            told["why"] = f"loses {step.key:.6g} weighted seconds per byte freed, the least of this node's options"
        told["options"] = _table(rule, record, told["next"])
    return told


def _table(rule: EvicPressRule, record: Record, chosen: object) -> list[Row]:
    now = rule.alpha * record.quality - rule.delay_s(record)
    held: Point = (record.num_bytes, now, -1)
    ways_out = rule.ways_out(record)
    allowed = [way for way in ways_out if way[0] <= record.floor]
    best_out = max(allowed, key=lambda way: way[4], default=None)
    points = rule.points(record)
    leaving: list[Point] = [] if best_out is None else [(0, best_out[4], -2)]
    hull = upper_hull([held, *points, *leaving])
    rows = [_row(rule, record, record.form, record.rank, record.num_bytes, record.quality, now, "held")]
    for point in points:
        form, quality = rule.menu.forms[point[2]], record.curve[point[2]]
        role = "hull" if point in hull else _why_left_out(point, [held, *points, *leaving])
        rows.append(_row(rule, record, form, record.rank, point[0], quality, point[1], role))
    for way in ways_out:
        rank, left_as, num_bytes, quality, per_use = way
        if rank > record.floor:
            role = "a child is above"
        elif way is not best_out:
            role = "dominated by a better way out"
        else:
            role = "hull" if leaving[0] in hull else "dominated"
        rows.append(_row(rule, record, left_as, rank, num_bytes, quality, per_use, role))
    for row in rows:
        if row["option"] == chosen and row["role"] == "hull":
            row["role"] = "next"
    return rows


def _row(
    rule: EvicPressRule,
    record: Record,
    form: Form | None,
    rank: int,
    num_bytes: int,
    quality: float,
    per_use: float,
    role: str,
) -> Row:
    freed = record.num_bytes - (num_bytes if rank == record.rank else 0)
    delay_s = rule.alpha * quality - per_use
    worth = utility(record.weight, rule.alpha, quality, delay_s)
    lost = utility(record.weight, rule.alpha, record.quality, rule.delay_s(record)) - worth
    return {
        "option": _option(form, rank),
        "num_bytes": num_bytes,
        "q": quality,
        "d": delay_s,
        "U": worth,
        "freed_bytes": freed,
        "drop_per_byte": lost / freed if freed > 0 else None,
        "role": role,
    }


def _why_left_out(point: Point, points: list[Point]) -> str:
    if any(other != point and other[0] <= point[0] and other[1] >= point[1] for other in points):
        return "dominated"
    return "LP-dominated"


def _why_nothing(record: Record) -> str:
    if record.is_locked:
        return "locked by a running request"
    if record.floor <= record.rank:
        return "cannot get smaller here, and may leave only once its children have"
    return "nothing of it can be made smaller"


def _option(form: Form | None, rank: int) -> str:
    return "drop" if rank == DROPPED else f"{form}/{Tier(rank).label}"
