"""AdaptCache: one quality curve for all nodes, and the least utility lost per byte saved."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_evicpress.core import Form, LowerCopy, Tier
from sglang_evicpress.policy.base import DROPPED, Candidate, Step, lower_bytes, smaller_forms
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.lru import CascadePolicy


class AdaptCachePolicy(CascadePolicy):
    """AdaptCache (Feng et al., 2025) section 2.

    ``Utility(i) = Freq(i) * (alpha * Quality(i, M_i, R_i)) - size(i, M_i, R_i) / Bandwidth``, as printed: the loading
    time is not multiplied by the frequency. Freq is the plain count of hits; Bandwidth is that of loading from the
    tier, so nothing is paid on the GPU, which the paper does not manage. Quality is ``curve``, one offline curve for
    every node, by form of the menu. The marginal utility drop is the utility lost per byte saved by compressing
    further or evicting; the choice with the smallest is made first. To evict is to go to the next tier as it is;
    from the last one the node is dropped with utility 0: recomputing is not weighed.

    The steps carry the quality of the node's own curve, so that all policies are measured alike. Raises ValueError
    if alpha is negative or not finite, or unless the curve gives a quality in [0, 1] for every form.
    """

    name: str = "adaptcache"
    weighs_quality: bool = True

    def __init__(self, menu: Menu, alpha: float, costs: CostSnapshot, curve: Sequence[float]) -> None:
        super().__init__(menu)
        self.compresses = len(menu.forms) > 1
        if not (math.isfinite(alpha) and alpha >= 0.0):
            raise ValueError(f"alpha is {alpha!r}: expected a finite number, 0 or more")
        self.alpha = alpha
        self.read_curve(curve)
        self.read_costs(costs)

    def read_curve(self, curve: Sequence[float]) -> None:
        """Take another curve; the index must be rebuilt after it. ValueError unless it has a quality in [0, 1] for
        every form."""
        forms = self.menu.forms
        if len(curve) != len(forms) or not all(0.0 <= quality <= 1.0 for quality in curve):
            raise ValueError(f"curve is {list(curve)}: expected {len(forms)} qualities in [0, 1]")
        self._quality: dict[Form, float] = dict(zip(forms, curve, strict=True))

    def read_costs(self, costs: CostSnapshot) -> None:
        """Take other costs; the index must be rebuilt after it."""
        self._seconds_per_byte = [0.0] * DROPPED
        for tier in self.menu.tiers:
            if tier != Tier.GPU:
                self._seconds_per_byte[tier] = 1.0 / costs.load[tier].bytes_per_s

    def utility(self, candidate: Candidate, form: Form, tier: int, num_bytes: int) -> float:
        """The printed utility of holding ``form`` in ``num_bytes`` on a tier; 0 where nothing is held."""
        if tier == DROPPED:
            return 0.0
        quality = self._quality.get(form, candidate.quality)
        return candidate.num_hits * self.alpha * quality - num_bytes * self._seconds_per_byte[tier]

    def lost(self, candidate: Candidate, form: Form, tier: int, num_bytes: int) -> float:
        """The utility given up by going there. Qualities and delays are taken off apart: the difference of two
        utilities is rounded, so that a hit could make it smaller, and the index counts on that it does not."""
        if tier == DROPPED:
            return self.utility(candidate, candidate.form, candidate.tier, candidate.num_bytes)
        given_up = self._quality.get(candidate.form, candidate.quality) - self._quality.get(form, candidate.quality)
        delay_s = num_bytes * self._seconds_per_byte[tier]
        return candidate.num_hits * self.alpha * given_up + (delay_s - self.delay_s(candidate))

    def delay_s(self, candidate: Candidate) -> float:
        return candidate.num_bytes * self._seconds_per_byte[candidate.tier]

    def step(
        self, candidate: Candidate, excluded_tiers: int = 0, lower_copies: Sequence[LowerCopy] | None = None
    ) -> Step | None:
        tier, size_now = candidate.tier, candidate.num_bytes
        evicted = self.next_tier(candidate, excluded_tiers)
        if size_now == 0:
            if evicted is None or evicted == DROPPED or lower_copies is None:
                return None if evicted is None else Step(math.inf, evicted, None, 0, candidate.quality)
            return Step(math.inf, *next(lower_copy for lower_copy in lower_copies if lower_copy.tier == evicted))
        best: Step | None = None
        if not isinstance(candidate.memo, list):
            candidate.memo = smaller_forms(self.menu, candidate)
        for index, num_bytes in candidate.memo:
            form = self.menu.forms[index]
            lost = self.lost(candidate, form, tier, num_bytes)
            if best is None or lost / (size_now - num_bytes) < best.key:
                delay_s = num_bytes * self._seconds_per_byte[tier]
                key = lost / (size_now - num_bytes)
                best = Step(
                    key, tier, form, num_bytes, candidate.curve[index], delay_s, self._per_weight(candidate, lost)
                )
        if evicted is not None:
            left = LowerCopy(evicted, candidate.form, lower_bytes(self.menu, candidate), candidate.quality)
            if lower_copies is not None and evicted < DROPPED:
                left = next(lower_copy for lower_copy in lower_copies if lower_copy.tier == evicted)
            lost = self.lost(candidate, left.form, evicted, left.num_bytes)
            key, per_weight = lost / size_now, self._per_weight(candidate, lost)
            if best is not None and key >= best.key:
                return best
            if evicted == DROPPED:
                return Step(key, DROPPED, None, 0, 1.0, 0.0, per_weight)
            delay_s = left.num_bytes * self._seconds_per_byte[evicted]
            kept_form = None if lower_copies is None else left.form
            best = Step(key, evicted, kept_form, left.num_bytes, left.quality, delay_s, per_weight)
        return best

    @staticmethod
    def _per_weight(candidate: Candidate, lost: float) -> float:
        """A step's loss is weighted by the plan; this utility has its own frequency in it. 0 for a node whose weight
        has faded so far that the quotient is no number."""
        per_weight = lost / candidate.weight if candidate.weight else 0.0
        return per_weight if math.isfinite(per_weight) else 0.0
