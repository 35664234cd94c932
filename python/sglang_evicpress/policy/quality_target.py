"""Alpha that holds a target: the mean quality of what is served from the cache, weighted by tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sglang_evicpress.policy.cost_model import PrefillCost
from sglang_evicpress.policy.quality_correction import QualityCorrection

START_FACTOR = 30.0
"""Alpha to start with, over the seconds in which a usual prefix is prefilled: a loss of 0.033 then costs as much as
prefilling it again, so that only what loses little is compressed at first."""

_LEAST_FACTOR, _MOST_FACTOR = 1e-3, 1e4
GAIN = 0.002
"""Of log alpha, for a usual hit that lost its whole allowance too much. What is compressed now is hit hundreds of hits
later: a larger gain makes alpha swing, and what was stored where it was low is refused."""

EARLY_GAIN, EARLY_HITS = 0.05, 50.0  # the gain at first, and the usual hits after which it is half of that
MOST_RISE = 0.3  # of log alpha, by one hit: without a bound a single long one decides
MAX_CREDIT, MAX_CREDIT_SHARE = 500, 0.0175
"""Unspent allowance that is kept: that of so many usual hits, and no more than such a share of all tokens served."""

CREDIT_AFTER = 100.0  # usual hits: what the first ones do not spend, while alpha is on its way down, is not kept

MAX_DEBT, MAX_DEBT_SHARE, MAX_DEBT_OF_ALLOWANCE = 100, 0.002, 0.2
"""How far a hit may overdraw the account, likewise, and by no more than a fifth of what all tokens served earned."""

ALPHA_CREDIT, PRICE_CREDIT = 300.0, 20.0
"""Usual hits whose unspent allowance divides alpha by e, and the price by which prefixes are refused once more."""

MEMORY = 500  # hits over which the figures shown are averaged
_ROUNDING = 1e-9  # of a mean quality
_SIZE_MEMORY = 500  # hits, for the tokens of a usual one: alpha follows what comes, not each session
_SIZE_TOKENS = 4096.0  # of a usual prompt before any was seen
_SIZE_PRIOR = 64.0  # tokens that were seen in such a one, to start with
_PROMPT_HITS = 4  # prompts that count for the size of a usual hit, until as many tokens were hit

PAUSE_S = 2.0
PAUSE_S_PER_NODE = 1e-3
WORTH_A_MOVE = 0.1
"""Alpha moves no sooner after the last time, and by no less of its logarithm: each move looks at every node anew."""


class Share(NamedTuple):
    """A part of a prefix: its tokens, and how many of them are lost, each token counting 1 - quality."""

    num_tokens: int = 0
    lost: float = 0.0


NOTHING = Share()


def num_above(parts: Sequence[Share], quality: float, correction: float) -> int:
    """Number of the first ``parts`` of a prefix, which follow each other, that may be served where the mean quality
    must not fall below ``quality``. Nor does it after fewer of them, so what cannot be loaded may be left out. A
    predicted loss counts ``correction`` times."""
    num_tokens, lost = 0, 0.0
    for number, part in enumerate(parts):
        num_tokens += part.num_tokens
        lost += correction * part.lost
        if lost > (1.0 - quality + _ROUNDING) * num_tokens:
            return number
    return len(parts)


class QualityTarget:
    """An account of quality, and the alpha that balances it.

    Each token served from the cache earns ``1 - quality``, each one served spends 1 minus its predicted quality, times
    ``correction``, which is learned from judged answers. A node's loss counts by its tokens, so that a prefix is worth
    the mean over its tokens, and so is the sum of all prefixes. What the account cannot pay for is not served
    (``num_affordable``) but computed anew, which makes it exact: that holds the target at once, whatever lies in the
    cache. Nor is what costs more than it saves: lost tokens have a price, alpha over the tokens of a usual hit, which
    rises as the credit falls, so that the few seconds of a short prefix are paid before the minutes of a long one.

    Alpha follows with integral control of its logarithm: it rises where more would have been spent than is earned,
    falls where less is, and so moves the work from recomputing to not compressing. Credit lowers it and debt raises it
    besides, which spends what was saved and keeps it from swinging. It is a factor times the seconds in which a usual
    prefix is prefilled, so that it follows other contexts and other machines at once; before there are hits the prompts
    say what a usual one is. The first hits move it more: it starts near exact, and what comes in the first minutes
    would else be kept so.

    Pure: all inputs are values that are equal on every rank, and so is every answer. With a quality of 1 nothing lossy
    is ever affordable, and alpha stays. Raises ValueError for a quality outside (0, 1].
    """

    def __init__(self, quality: float) -> None:
        if not 0.0 < quality <= 1.0:
            raise ValueError(f"quality is {quality!r}: expected a number above 0, at most 1")
        self.quality = quality
        self.alpha: float | None = None
        self.credit = 0.0
        """Tokens that may be lost beyond what the next hits earn; below 0 where too many were."""
        self._prefill: PrefillCost | None = None
        self._recompute_weight = 1.0
        self._log_factor = math.log(START_FACTOR)
        self._moved_s = -math.inf
        self._hit_tokens = self._hit_sum = 0.0
        self._num_prompts, self._prompt_tokens = _SIZE_PRIOR / _SIZE_TOKENS, _SIZE_PRIOR
        self._prior_tokens, self._known_tokens = math.inf, 0
        self._price_s = 0.0
        self._served_tokens = self._settled_tokens = 0.0
        self._recent_tokens = self._recent_lost = 0.0
        self._usual_hits = 0.0
        self._correction = QualityCorrection(1.0 - quality)
        self._now_s = 0.0

    # ---- what may be served

    def num_affordable(self, parts: Sequence[Share]) -> int:
        """Number of the first ``parts`` of a prefix, which follow each other, that are served now: as many as the
        account can pay for and as are worth their price, at the cost of prefilling that the last alpha was made by.
        What loading them takes is left out: whether to load is asked apart."""
        if all(part.lost <= 0.0 for part in parts):
            return len(parts)
        earned, correction = 1.0 - self.quality, self.correction
        price_s = self._price_s * math.exp(-self._spare_hits / PRICE_CREDIT)
        credit = self.credit + self._max_debt if earned else 0.0
        affordable, num_tokens, lost, worth_s, most_s = 0, 0, 0.0, 0.0, 0.0
        for number, part in enumerate(parts, start=1):
            if self._prefill is not None:
                worth_s += self._recompute_weight * self._prefill.marginal_seconds(part.num_tokens, num_tokens)
            num_tokens += part.num_tokens
            lost += correction * part.lost
            worth_s += price_s * (earned * part.num_tokens - correction * part.lost)
            is_paid = lost <= credit + earned * num_tokens and worth_s >= most_s
            if lost <= 0.0 or is_paid:  # exact KV costs nothing
                affordable, most_s = number, worth_s
        return affordable

    def note_prompt(self, num_tokens: int) -> None:
        """A request with a prompt of ``num_tokens`` runs, whatever of it was served."""
        if self._prior_tokens:
            self._num_prompts += 1
            self._prompt_tokens += num_tokens

    def note_hit(self, served: Share, refused: Share = NOTHING) -> None:
        """A request runs on ``served`` tokens of the cache; ``refused`` is what could not be afforded besides."""
        num_tokens = served.num_tokens + refused.num_tokens
        if not num_tokens:
            return
        fade = 1.0 - 1.0 / _SIZE_MEMORY
        self._hit_tokens = fade * self._hit_tokens + num_tokens
        self._hit_sum = fade * self._hit_sum + num_tokens * num_tokens
        self._known_tokens += num_tokens
        self._prior_tokens = max(0.0, min(self._prior_tokens, _PROMPT_HITS * self._prompt_size - self._known_tokens))
        fade = 1.0 - 1.0 / MEMORY
        self._recent_tokens = self._recent_tokens * fade + served.num_tokens
        self._recent_lost = self._recent_lost * fade + served.lost
        earned, correction = 1.0 - self.quality, self.correction
        if not earned:
            return
        usual = earned * self._usual_tokens
        self._served_tokens += served.num_tokens
        self.credit += earned * served.num_tokens - correction * served.lost
        if self._usual_hits >= CREDIT_AFTER:
            self._settled_tokens += served.num_tokens
        self.credit = min(self.credit, MAX_CREDIT * usual, MAX_CREDIT_SHARE * self._settled_tokens)
        over = correction * (served.lost + refused.lost) - earned * num_tokens
        self._usual_hits += num_tokens / self._usual_tokens
        gain = max(GAIN, EARLY_GAIN / (1.0 + self._usual_hits / EARLY_HITS))
        self._log_factor = _bounded(self._log_factor + min(gain * max(over / usual, -1.0), MOST_RISE))

    @property
    def _prompt_size(self) -> float:
        return self._prompt_tokens / self._num_prompts

    @property
    def _usual_tokens(self) -> float:
        """Size of the hit in which a token is served, on average: hits of a first token alone do not count for more
        than their one token. Before as many tokens were hit as some prompts have, it is partly that of a prompt."""
        prior = min(self._prior_tokens, _PROMPT_HITS * self._prompt_size)
        return (self._hit_sum + prior * self._prompt_size) / (self._hit_tokens + prior)

    @property
    def _spare_hits(self) -> float:
        """Usual hits whose allowance is unspent; below 0 where more was spent."""
        usual = (1.0 - self.quality) * self._usual_tokens
        return min(max(self.credit / usual, -MAX_DEBT), MAX_CREDIT) if usual else 0.0

    @property
    def _max_debt(self) -> float:
        usual = (1.0 - self.quality) * self._usual_tokens
        earned = (1.0 - self.quality) * self._served_tokens
        return min(MAX_DEBT * usual, MAX_DEBT_SHARE * self._served_tokens, MAX_DEBT_OF_ALLOWANCE * earned)

    # ---- what it was worth

    @property
    def correction(self) -> float:
        """Loss observed over loss predicted, of judged answers: below 1 only where one was judged of late."""
        return self._correction.ratio(self._now_s)

    def note_judged(self, predicted: float, observed: float) -> None:
        """An answer upon a lossy prefix was judged. Raises ValueError for a quality that is not a finite number."""
        self._correction.note_judged(predicted, observed, self._now_s)

    @property
    def predicted(self) -> float | None:
        """Mean predicted quality of the tokens served of late, None before any were."""
        return 1.0 - self._recent_lost / self._recent_tokens if self._recent_tokens else None

    @property
    def measured(self) -> float | None:
        """The same, corrected by what judged answers were worth."""
        predicted = self.predicted
        return None if predicted is None else max(0.0, 1.0 - self.correction * (1.0 - predicted))

    # ---- alpha

    def next_alpha(
        self, now_s: float, prefill: PrefillCost, num_nodes: int = 0, recompute_weight: float = 1.0
    ) -> float | None:
        """Alpha to plan by from now on, or None to go on with the present one; the first call always has one.

        ``now_s`` is the logical time, ``prefill`` the cost by which the policy decides; ``num_nodes`` there are to be
        looked at anew. A second of prefilling what is refused counts ``recompute_weight`` times.
        """
        self._now_s, self._recompute_weight = now_s, recompute_weight
        if self.alpha is not None and now_s - self._moved_s < max(PAUSE_S, PAUSE_S_PER_NODE * num_nodes):
            return None
        seconds = prefill.marginal_seconds(max(1, round(self._usual_tokens)), 0)
        alpha = math.exp(_bounded(self._log_factor - self._spare_hits / ALPHA_CREDIT)) * (seconds or 1.0)
        if self.alpha is not None and abs(math.log(alpha / self.alpha)) < WORTH_A_MOVE:
            return None
        self.alpha, self._moved_s = alpha, now_s
        self._prefill, self._price_s = prefill, alpha / self._usual_tokens
        return alpha


def _bounded(log_factor: float) -> float:
    return min(max(log_factor, math.log(_LEAST_FACTOR)), math.log(_MOST_FACTOR))
