"""Quality target of a server: what requests may be served of the tree, and the alpha that the policy weighs by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node import is_lossy
from sglang_evicpress.patches.tree.types import LogicalTime, Node, QueuedRequest, ServedRequest
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.quality_target import NOTHING, QualityTarget, Share

Steps = Sequence[tuple[Node, int]]


class WeighedTerms(LogicalTime, Protocol):
    """Time, and the costs as the policy has them."""

    weighed: CostSnapshot


class AlphaPolicy(Protocol):
    """The policy in use. ``alpha`` is the one that it weighs by."""

    alpha: float

    def set_alpha(self, alpha: float) -> None: ...


@dataclass(eq=False, repr=False)
class QualityControl:
    """Keeps ``target``, None where alpha is fixed; then nothing is refused and nothing tuned. ``shares_of``: tokens and
    lost tokens of the steps of a path. Everything that enters is equal on every rank: hits in the order of admission,
    profiles and judged answers as rank 0 hands them on, stamped time and costs."""

    quality: float | None
    nodes: Sized
    terms: WeighedTerms
    policy: AlphaPolicy
    shares_of: Callable[[Steps], list[Share]]

    def __post_init__(self) -> None:
        self.target = None if self.quality is None else QualityTarget(self.quality)
        self.refused_tokens = 0

    def num_affordable(self, req: QueuedRequest | None, steps: Steps) -> int:
        """Number of ``steps`` (node, matched tokens), the known prefix of a waiting request, that the target lets be
        served to it. Shadows are for measuring: nothing of them is refused."""
        if self.target is None or req is None or is_shadow_name(req.extra_key):
            return len(steps)
        if self.target.quality == 1.0:
            return sum(1 for _ in takewhile(lambda step: not is_lossy(step[0]), steps))
        return self.target.num_affordable(self.shares_of(steps))

    def note_match(self, req: QueuedRequest | None, steps: Steps) -> int:
        """The same, for a request that is about to run: what it is refused is noted on it, and counted once it runs."""
        affordable = self.num_affordable(req, steps)
        if req is not None:
            is_refused = affordable < len(steps)
            req.evicpress_refused = _sum(self.shares_of(steps)[affordable:]) if is_refused else NOTHING
        return affordable

    def note_admitted(self, req: ServedRequest, path: Sequence[Node], _num_tokens: int) -> None:
        """A user's request runs upon ``path``; what it computes is worth no more than that. One that was retracted and
        runs again finds what it computed itself: that is no hit."""
        served = _sum(self.shares_of([(node, len(node.key)) for node in path]))
        req.evicpress_prefix_quality = 1.0 - served.lost / served.num_tokens if served.num_tokens else 1.0
        if self.target is not None and not req.retracted_stain:
            refused = getattr(req, "evicpress_refused", NOTHING)
            self.refused_tokens += refused.num_tokens
            self.target.note_hit(served, refused)

    def note_judged(self, pairs: Sequence[tuple[float, float]]) -> None:
        """Answers upon lossy prefixes were judged: (predicted, observed) qualities."""
        if self.target is not None:
            for predicted, observed in pairs:
                self.target.note_judged(predicted, observed)

    def follow_clock(self) -> None:
        """Called as the clock goes on."""
        if self.target is not None and self.target.quality < 1.0:
            alpha = self.target.next_alpha(self.terms.now_s, self.terms.weighed.prefill, len(self.nodes))
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
        }


def _sum(parts: Sequence[Share]) -> Share:
    return Share(sum(part.num_tokens for part in parts), math.fsum(part.lost for part in parts))
