"""Choice between loading and recomputing for a path, and the deadline of a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sglang_evicpress.core import Tier
from sglang_evicpress.policy.cost_model import CostSnapshot

WAIT_FACTOR = 1.5
"""How many times its predicted duration a load may take."""

LITTLE = 0.1
"""The share of recomputing that may be lost by waiting in vain, whatever the prediction."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a path that is stored below the GPU: ``num_tokens`` behind ``depth_tokens``, in ``num_bytes`` on
    ``tier``, stored by ``codec``."""

    num_tokens: int
    depth_tokens: int
    tier: Tier
    num_bytes: int
    codec: str = "raw"


def num_worth_loading(
    pieces: Sequence[Piece],
    costs: CostSnapshot,
    *,
    overlap: float = 0.0,
    waits: Mapping[Tier, float] | None = None,
    slack_s: float = 0.0,
    congestion: float = 1.0,
) -> int:
    """Number of the first ``pieces`` to load, so that this and recomputing the others are done soonest.

    ``pieces`` follow each other on one path, all behind what is on the GPU. Those from the host come in one load, whose
    fixed cost is paid once; each from below is read by itself, and pays its own. Recomputing adds to a prefill that is
    needed anyhow and pays none. ``overlap`` is the share of the shorter of the two, loading and recomputing, that is
    hidden behind the longer: 0 when one begins after the other, 1 when layers are computed as fast as they arrive.
    ``waits`` are the seconds before a tier has done what it was asked for already. Of equals the fewest; 0 when
    recomputing all is soonest, so that what is chosen is never predicted to be slower than that. Raises ValueError for
    an overlap outside [0, 1], a negative slack, a congestion below 1, or a tier without a cost.

    A request that waits for its turn has ``slack_s`` seconds before anything of it could run: what comes up from below
    the host in that time costs nothing. What then goes from the host to the GPU does. A second of recomputing holds up
    whoever waits as well, a second of loading does not: recomputing counts ``congestion`` times.

    One after the other, pieces alike on one tier are loaded all or not at all. Loading costs the same per token
    everywhere on the path and recomputing more the deeper the token is, so the total is concave in the number loaded:
    least at an end. What makes it pay to load only the first part are tiers: a beginning on the host before a rest on
    the SSD; short pieces, whose fixed costs weigh more; and overlap, as half of either then takes half as long.
    """
    if not 0.0 <= overlap <= 1.0:
        raise ValueError(f"overlap is {overlap!r}: expected a share between 0 and 1")
    if not slack_s >= 0.0:
        raise ValueError(f"slack_s is {slack_s!r}: expected seconds, 0 or more")
    if not congestion >= 1.0:
        raise ValueError(f"congestion is {congestion!r}: expected 1 or more")
    prefills = (costs.prefill.marginal_seconds(piece.num_tokens, piece.depth_tokens) for piece in reversed(pieces))
    rest_s = [0.0, *accumulate(prefills)]  # of the last pieces, by their number
    best, best_s = 0, congestion * rest_s.pop()
    staged_s = device_s = 0.0  # up to the host, and from there
    left, part = dict(waits or {}), costs.of_a_part()
    fixed_s = costs.load[Tier.HOST].fixed_s if Tier.HOST in costs.load else 0.0
    for number, piece in enumerate(pieces, start=1):
        load_s = part.load_seconds(piece.tier, piece.num_bytes, piece.codec) + left.pop(piece.tier, 0.0)
        if piece.tier == Tier.HOST:
            device_s += load_s + fixed_s
            fixed_s = 0.0
        else:
            has_host = Tier.HOST in costs.load
            last_s = min(load_s, part.load_seconds(Tier.HOST, piece.num_bytes, piece.codec)) if has_host else 0.0
            staged_s += load_s - last_s
            device_s += last_s
        recompute_s = congestion * rest_s.pop()
        load_s = max(0.0, staged_s - slack_s) + device_s
        total_s = load_s + recompute_s - overlap * min(load_s, recompute_s)
        if total_s < best_s:
            best, best_s = number, total_s
    return best


def deadline_s(load_s: float, recompute_s: float) -> float:
    """Seconds to wait for a load that is predicted to take ``load_s`` before recomputing, ``recompute_s``, after all:
    from the moment the request could have run.

    One and a half times the prediction, and where that is less a tenth of recomputing, but never longer than
    recomputing takes. A load that never ends then costs ``recompute_s`` and this: 1.1 times recomputing while the
    prediction is at most a fifteenth of it (which gives such a load at least 1.5 times its prediction, and one
    predicted at a thirtieth three times), 1 + 1.5 ``load_s / recompute_s`` times above that, and never more than twice.
    Raises ValueError unless both are numbers of 0 or more.
    """
    for name, seconds in (("load_s", load_s), ("recompute_s", recompute_s)):
        if not seconds >= 0.0:
            raise ValueError(f"{name} is {seconds!r}: expected seconds, 0 or more")
    return min(recompute_s, max(WAIT_FACTOR * load_s, LITTLE * recompute_s))
