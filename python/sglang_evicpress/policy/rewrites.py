"""Shrinking nodes where they lie: forms that are worth more, or take less room, than what a slow tier holds of them."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_evicpress.core import Decision, NodeStats, Option, Tier
from sglang_evicpress.policy.base import Candidate
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy

LEAST_SAVED = 1 / 8
"""Of the bytes of a node: for less it is not read and written anew."""


def plan_rewrites(policy: EvicPressPolicy, nodes: Iterable[NodeStats], price: float = 0.0) -> list[Decision]:
    """Decisions to bring nodes, each on its tier, to the smaller form by which most is gained; those that gain most per
    byte to be read first.

    What came to a slow tier in a hurry lies there as it was: it is read for longer than what it loses in another form
    is worth (EvicPress section 4.2, the delay of an option). ``price`` is the utility of a byte of the tier to others,
    weighted. Locked nodes stay as they are.
    """
    found: list[tuple[float, Decision]] = []
    for node in nodes:
        candidate = Candidate(node)
        now = policy.alpha * candidate.quality - policy.delay_s(candidate)
        best, most = None, 0.0
        for point in () if candidate.is_locked else policy.points(candidate):
            saved = candidate.num_bytes - point[0]
            gain = candidate.weight * (point[1] - now) + price * saved
            if gain > most and saved >= LEAST_SAVED * candidate.num_bytes:
                best, most = point, gain
        if best is not None:
            loss = candidate.weight * (now - best[1])
            found.append((-most / candidate.num_bytes, _decision(policy, candidate, best, loss)))
    found.sort(key=lambda item: (item[0], item[1].node_id))
    return [decision for _, decision in found]


def _decision(policy: EvicPressPolicy, candidate: Candidate, point: tuple[int, float, int], loss: float) -> Decision:
    num_bytes, utility, index = point
    quality, tier = candidate.curve[index], Tier(candidate.tier)
    return Decision(
        candidate.id,
        Option(candidate.form, tier, candidate.num_bytes),
        Option(policy.menu.forms[index], tier, num_bytes),
        candidate.num_bytes - num_bytes,
        candidate.weight,
        candidate.quality,
        quality,
        policy.delay_s(candidate),
        policy.alpha * quality - utility,
        loss,
    )
