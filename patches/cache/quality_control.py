"""Quality target of a server: what requests may be served of the tree, and the alpha that the policy weighs by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from sglang_evicpress.config import DEFAULT_QUALITY
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node import is_lossy
from sglang_evicpress.patches.tree.types import LogicalTime, Node, QueuedRequest, ServedRequest
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.quality_correction import QualityCorrection
from sglang_evicpress.policy.quality_target import NOTHING, QualityTarget, Share, num_above

Steps = Sequence[tuple[Node, int]]

WORTH_TELLING = 0.1
"""Change of the logarithm of the correction by which nodes of tenants with a floor may become something else."""


class LearnedTerms(LogicalTime, Protocol):
    """Time, the costs that the policy goes by, and how often it counts a second of computing anew."""

    policy_costs: CostSnapshot
    recompute_weight: float


class AlphaPolicy(Protocol):
    """The policy in use. ``alpha`` is the one that it weighs by."""

    alpha: float

    def set_alpha(self, alpha: float) -> None: ...
    def expect_anew(self, *, forms_changed: bool, of_profiled: bool = ...) -> None: ...


class Floors(Protocol):
    """The least quality that requests may be served."""

    has_fractions: bool

    def of_request(self, req: QueuedRequest) -> float: ...
    def of_namespace(self, extra_key: str | None) -> float: ...


@dataclass(eq=False, repr=False)
class QualityControl:
    """Keeps ``target``, None where alpha is fixed; then nothing is tuned, and refused only what is below a floor.
    ``shares_of``: tokens and lost tokens of the steps of a path. Everything that enters is equal on every rank: hits in
    the order of admission, profiles and judged answers as rank 0 hands them on, stamped time and costs."""

    quality: float | None
    nodes: Sized
    terms: LearnedTerms
    policy: AlphaPolicy
    shares_of: Callable[[Steps], list[Share]]
    floors: Floors

    def __post_init__(self) -> None:
        self.target = None if self.quality is None else QualityTarget(self.quality)
        self.correction = QualityCorrection(1.0 - DEFAULT_QUALITY)  # for floors; the target has one of its own
        self.refused_tokens = self.floored_tokens = 0
        self._floor_ratio = 1.0  # by which nodes were told what they may become

    def num_affordable(self, req: QueuedRequest | None, steps: Steps) -> int:
        """Number of ``steps`` (node, matched tokens), the known prefix of a waiting request, that the target and its
        floor let be served to it. Shadows are for measuring: nothing of them is refused."""
        above = self._num_above_floor(req, steps)
        return self._num_in_target(req, steps[:above])

    def note_match(self, req: QueuedRequest | None, steps: Steps) -> int:
        """The same, for a request that is about to run: what it is refused is noted on it, and counted once it runs.
        Alpha does not follow a floor, which is that of one request, or of one tenant."""
        above = self._num_above_floor(req, steps)
        affordable = self._num_in_target(req, steps[:above])
        if req is not None:
            is_refused = affordable < len(steps)
            shares = self.shares_of(steps) if is_refused else []
            req.evicpress_refused = _sum(shares[affordable:above]) if is_refused else NOTHING
            req.evicpress_floored = sum(share.num_tokens for share in shares[above:])
        return affordable

    def least_predicted(self, extra_key: str | None) -> float:
        """Predicted quality below which nothing in a namespace would be served; 0: everything is, 1: only exact KV."""
        floor = self.floors.of_namespace(extra_key)
        return floor if floor in (0.0, 1.0) else max(0.0, 1.0 - (1.0 - floor) / self._floor_ratio)

    def _num_in_target(self, req: QueuedRequest | None, steps: Steps) -> int:
        if self.target is None or req is None or is_shadow_name(req.extra_key):
            return len(steps)
        if self.target.quality == 1.0:
            return _num_exact(steps)
        if req.retracted_stain:  # what it found and computed is paid for
            return len(steps)
        return self.target.num_affordable(self.shares_of(steps))

    def _num_above_floor(self, req: QueuedRequest | None, steps: Steps) -> int:
        floor = 0.0 if req is None or is_shadow_name(req.extra_key) else self.floors.of_request(req)
        if not floor:
            return len(steps)
        if floor == 1.0:
            return _num_exact(steps)
        return num_above(self.shares_of(steps), floor, self._ratio)

    @property
    def _ratio(self) -> float:
        """Loss observed over loss predicted."""
        return self.correction.ratio(self.terms.now_s) if self.target is None else self.target.correction

    def gains(self, req: ServedRequest, path: Sequence[Node], is_lossy: bool) -> list[float]:
        """By how much the predicted quality of what a request computed exceeds that of each node of ``path``, where it
        computed upon a lossy prefix; 0 for each where it did not."""
        if not is_lossy:
            return [0.0] * len(path)
        own_loss = 1.0 - getattr(req, "evicpress_prefix_quality", 1.0)
        shares = self.shares_of([(node, len(node.key)) for node in path])
        return [share.lost / share.num_tokens - own_loss for share in shares]

    def note_admitted(self, req: ServedRequest, path: Sequence[Node], _num_tokens: int) -> None:
        """A user's request runs upon ``path``; what it computes is worth no more than that. One that was retracted and
        runs again finds what it computed itself: that is no hit."""
        shares = self.shares_of([(node, len(node.key)) for node in path])
        served = _sum(shares)
        req.evicpress_least_quality = min((1.0 - share.lost / share.num_tokens for share in shares), default=1.0)
        req.evicpress_prefix_quality = 1.0 - served.lost / served.num_tokens if served.num_tokens else 1.0
        if self.target is not None and not req.retracted_stain:
            refused = getattr(req, "evicpress_refused", NOTHING)
            self.refused_tokens += refused.num_tokens
            self.target.note_prompt(len(req.origin_input_ids))
            self.target.note_hit(served, refused)
        if not req.retracted_stain:
            self.floored_tokens += getattr(req, "evicpress_floored", 0)

    def note_judged(self, pairs: Sequence[tuple[float, float]]) -> None:
        """Answers upon lossy prefixes were judged: (predicted, observed) qualities."""
        for predicted, observed in pairs:
            self.correction.note_judged(predicted, observed, self.terms.now_s)
            if self.target is not None:
                self.target.note_judged(predicted, observed)

    def follow_clock(self) -> None:
        """Called in rounds that have time, and for which no first token waits."""
        if self.floors.has_fractions and abs(math.log(self._ratio / self._floor_ratio)) > WORTH_TELLING:
            self._floor_ratio = self._ratio
            self.policy.expect_anew(forms_changed=True, of_profiled=True)
        if self.target is not None and self.target.quality < 1.0:
            terms = self.terms
            prefill, weight = terms.policy_costs.prefill, terms.recompute_weight
            alpha = self.target.next_alpha(terms.now_s, prefill, len(self.nodes), weight)
            if alpha is not None:
                self.policy.set_alpha(alpha)

    def describe(self) -> dict[str, object]:
        """Figures for ``/evicpress/stats``; those of a fixed alpha are None."""
        target = self.target
        return {
            "target": self.quality,
            "predicted": None if target is None else target.predicted,
            "measured": None if target is None else target.measured,
            "correction": None if target is None else target.correction,
            "credit_tokens": None if target is None else target.credit,
            "refused_tokens": self.refused_tokens,
            "below_floor_tokens": self.floored_tokens,
        }


def _num_exact(steps: Steps) -> int:
    return sum(1 for _ in takewhile(lambda step: not is_lossy(step[0]), steps))


def _sum(parts: Sequence[Share]) -> Share:
    return Share(sum(part.num_tokens for part in parts), math.fsum(part.lost for part in parts))
