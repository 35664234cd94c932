"""Sensitivity of a context to compression, drawn from the ranges the EvicPress paper prints.

Section 3.1 and figure 3: sensitivity is the relative quality drop under keydiff when 10 % of the tokens are kept;
medians per dataset 0.340 (NarrativeQA), 0.392 (TriviaQA), 0.676 (SamSum), 0.681 (2WikimQA), 0.738 (MultiNews), 0.759
(Qasper), coefficients of variation 0.078 to 0.394. Section 4.2 gives 2WikimQA's quality at other fractions: 0.92 at 0.8
kept, 0.82 at 0.6, 0.65 at 0.4; its losses over that at 0.1 make the common shape. Section 3.2 and figure 4: which press
is best differs between contexts (40.3, 40.0 and 19.7 % for kvzip, knorm and snapkv), no press dominates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sglang_evicpress.core import Form

MEDIANS = (0.340, 0.392, 0.676, 0.681, 0.738, 0.759)
VARIATIONS = (0.078, 0.394)
SHAPE = ((0.1, 1.0), (0.4, 0.35 / 0.681), (0.6, 0.18 / 0.681), (0.8, 0.08 / 0.681), (1.0, 0.0))
"""(kept fraction, loss over the loss at 0.1); 2WikimQA, section 4.2."""

CODEC_LOSS = {"int8": (0.0, 0.002), "int4": (0.0, 0.02), "int2": (0.02, 0.3)}
"""Range of what a codec loses, whatever is kept: ours. KIVI (arXiv 2402.02750, section 4) loses less on long contexts,
with its newest tokens raw."""

OTHER_PRESS = (0.75, 1.6)
"""Range of a press's sensitivity, or that of one with layer budgets, over that of keydiff on the same context: ours, so
that none dominates."""


class Sensitivities:
    """A seeded source of quality curves. The same key always gives the same curve, in any process, and a press the same
    sensitivity whatever other forms there are: policies with menus of their own are compared on the same contexts."""

    def __init__(self, forms: Sequence[Form], seed: int = 0) -> None:
        self.forms = forms
        self.seed = seed

    def curve(self, key: int) -> tuple[float, ...]:
        """Quality per form of the context ``key``."""
        draw = random.Random(f"{self.seed}/{key}")
        keydiff = draw.choice(MEDIANS) * max(0.0, draw.gauss(1.0, draw.uniform(*VARIATIONS)))
        by_method: dict[str | None, float] = {None: 0.0, "keydiff": min(keydiff, 1.0)}
        for form in self.forms:
            if form.method not in by_method:
                factor = random.Random(f"{self.seed}/{key}/{form.method}").uniform(*OTHER_PRESS)
                by_method[form.method] = min(keydiff * factor, 1.0)
        by_codec = {
            codec: random.Random(f"{self.seed}/{key}/{codec}").uniform(*CODEC_LOSS.get(codec, (0.0, 0.0)))
            for codec in {form.codec for form in self.forms}
        }
        return tuple(
            max(0.0, 1.0 - by_method[form.method] * loss_share(form.kept_fraction) - by_codec[form.codec])
            for form in self.forms
        )


def loss_share(kept_fraction: float) -> float:
    """The loss at a kept fraction over that at 0.1: linear between the printed points; below 0.1 it grows by half."""
    points = ((0.0, 1.5), *SHAPE)
    for (left, above), (right, below) in zip(points, points[1:], strict=False):
        if kept_fraction <= right:
            return above + (below - above) * (kept_fraction - left) / (right - left)
    return 0.0
