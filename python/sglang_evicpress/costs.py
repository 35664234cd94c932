"""What delays cost: laws for loading, decoding and prefilling, and how they are learned from measured durations.

DESIGN section 4: costs are measured while serving, not configured; only starting values are given. A law is a
sum of terms with coefficients of 0 or more, fitted to a bounded window of observations by exponentially weighted
least squares on relative errors. The weights are Huber's (Robust Estimation of a Location Parameter, 1964), so
that a stall counts for little; while the recent predictions are wrong, old observations are forgotten faster
(a variable forgetting factor; Fortescue, Kershenbaum, Ydstie, Automatica 17(6), 1981).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import mul

from sglang_evicpress.core import Tier

_REFERENCE_BYTES = tuple(2**power for power in (16, 20, 24, 28, 32))
_REFERENCE_CHUNKS = ((64, 0), (1024, 0), (1024, 16384), (16384, 0), (16384, 65536))


@dataclass(frozen=True, slots=True)
class PrefillLaw:
    """Prefill time of n tokens: fixed_s + per_token_s * n + per_pair_s * n * (depth + n / 2) seconds.

    ``fixed_s`` (seconds) is what any batch costs, ``per_token_s`` (seconds per token) the part linear in length,
    ``per_pair_s`` (seconds per pair of tokens) that of attention: ``depth`` tokens come before the n, so that a
    new token looks at depth + n / 2 on average. Raises ValueError if one is negative or not finite.
    """

    fixed_s: float
    per_token_s: float
    per_pair_s: float

    def __post_init__(self) -> None:
        for name in ("fixed_s", "per_token_s", "per_pair_s"):
            seconds: float = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise ValueError(f"prefill law {name} is {seconds!r}: expected finite seconds, 0 or more")

    def seconds(self, num_tokens: int, depth_tokens: int) -> float:
        """Seconds to prefill ``num_tokens`` behind ``depth_tokens`` in a batch of their own."""
        return self.fixed_s + self.marginal_seconds(num_tokens, depth_tokens)

    def marginal_seconds(self, num_tokens: int, depth_tokens: int) -> float:
        """Seconds these tokens add to a request that prefills something anyhow: without ``fixed_s``."""
        return self.per_token_s * num_tokens + self.per_pair_s * _pairs(num_tokens, depth_tokens)


@dataclass(frozen=True, slots=True)
class TransferLaw:
    """Time to move or decode bytes: fixed_s + num_bytes / bytes_per_s seconds.

    Raises ValueError if ``fixed_s`` is negative or not finite, or ``bytes_per_s`` not finite and above 0.
    """

    fixed_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fixed_s) and self.fixed_s >= 0.0):
            raise ValueError(f"transfer law fixed_s is {self.fixed_s!r}: expected finite seconds, 0 or more")
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0.0):
            raise ValueError(f"transfer law bytes_per_s is {self.bytes_per_s!r}: expected a finite number above 0")

    def seconds(self, num_bytes: float) -> float:
        return self.fixed_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Costs:
    """All laws at one moment, as a policy reads them.

    ``load`` holds, per tier below the GPU, what getting bytes back to the GPU costs; ``decode`` holds, per codec,
    what turning stored bytes back to raw costs on top (over the stored bytes; a codec that is absent costs
    nothing). Nobody changes the two mappings once they are handed in.
    """

    prefill: PrefillLaw
    load: Mapping[Tier, TransferLaw]
    decode: Mapping[str, TransferLaw]

    def load_seconds(self, tier: Tier, num_bytes: float, codec: str = "raw") -> float:
        """Seconds until ``num_bytes`` stored on ``tier`` are raw KV on the GPU; 0 if they are there.

        Raises ValueError for a tier without a law.
        """
        if tier == Tier.GPU:
            return 0.0
        law = self.load.get(tier)
        if law is None:
            raise ValueError(f"no load law for tier {_name(tier)}: expected {_names(self.load)}")
        decode = self.decode.get(codec)
        return law.seconds(num_bytes) + (decode.seconds(num_bytes) if decode is not None else 0.0)

    def of_a_part(self) -> Costs:
        """What a node among others of a path costs. Whatever is on the host comes in one load, so that its fixed cost
        is nobody's, as that of a prefill is not (``PrefillLaw.marginal_seconds``); from an SSD each is read by itself.
        """
        load = {
            tier: TransferLaw(0.0, law.bytes_per_s) if tier == Tier.HOST else law for tier, law in self.load.items()
        }
        return replace(self, load=load)

    def drifted_from(self, other: Costs, tolerance: float) -> bool:
        """Whether a predicted duration differs from that of ``other`` by more than ``tolerance`` of the latter.

        Compared at 64 KiB to 4 GiB for every transfer, at 64 to 16384 new tokens behind 0 to 65536 for prefill;
        a law that only one of the two has counts as a difference. Raises ValueError unless tolerance >= 0.
        """
        if not (math.isfinite(tolerance) and tolerance >= 0.0):
            raise ValueError(f"tolerance is {tolerance!r}: expected a finite share, 0 or more")
        if self.load.keys() != other.load.keys() or self.decode.keys() != other.decode.keys():
            return True
        pairs = [(self.prefill.seconds(*chunk), other.prefill.seconds(*chunk)) for chunk in _REFERENCE_CHUNKS]
        laws = [(law, other.load[tier]) for tier, law in self.load.items()]
        laws += [(law, other.decode[codec]) for codec, law in self.decode.items()]
        pairs += [(mine.seconds(size), its.seconds(size)) for mine, its in laws for size in _REFERENCE_BYTES]
        return any(abs(mine - its) > tolerance * its for mine, its in pairs)


class CostModel:
    """Learns ``Costs`` from observed durations; until something is observed, its law is that of ``start``.

    Reads no clock: seconds are handed in. Each observation costs a bounded time and the model a bounded memory.
    The same observations in the same order give the same laws.
    """

    def __init__(self, start: Costs) -> None:
        self._prefill = _Fit((start.prefill.fixed_s, start.prefill.per_token_s, start.prefill.per_pair_s))
        self._load = {tier: _transfer_fit(law) for tier, law in start.load.items()}
        self._decode = {codec: _transfer_fit(law) for codec, law in start.decode.items()}
        self._costs = Costs(start.prefill, dict(start.load), dict(start.decode))

    @property
    def costs(self) -> Costs:
        """A snapshot that later observations do not change; the same object until the next observation."""
        return self._costs

    def observe_load(self, tier: Tier, num_bytes: int, seconds: float, codec: str = "raw") -> None:
        """``num_bytes`` stored on ``tier`` were raw KV on the GPU after ``seconds``.

        What decoding is predicted to take is not put down to the tier, but at least a tenth of the time is.
        Raises ValueError for a tier without a starting law (the GPU has none), and unless both are above 0.
        """
        _check_transfer("load", num_bytes, seconds)
        fit = self._load.get(tier)
        if fit is None:
            raise ValueError(f"load from tier {_name(tier)} has no starting law: expected {_names(self._load)}")
        decode = self._costs.decode.get(codec)
        decode_s = decode.seconds(num_bytes) if decode is not None else 0.0
        fit.observe((1.0, float(num_bytes)), max(seconds - decode_s, 0.1 * seconds))
        load = {**self._costs.load, tier: _transfer_law(fit)}
        self._costs = Costs(self._costs.prefill, load, self._costs.decode)

    def observe_decode(self, codec: str, num_bytes: int, seconds: float) -> None:
        """Turning ``num_bytes`` stored by ``codec`` back to raw took ``seconds``.

        A codec without a starting law gets one with its first observation. Raises ValueError unless both are
        above 0.
        """
        _check_transfer("decode", num_bytes, seconds)
        if codec not in self._decode:
            self._decode[codec] = _Fit((0.0, _possible(seconds) / num_bytes))
        fit = self._decode[codec]
        fit.observe((1.0, float(num_bytes)), seconds)
        decode = {**self._costs.decode, codec: _transfer_law(fit)}
        self._costs = Costs(self._costs.prefill, self._costs.load, decode)

    def observe_prefill(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """One batch took ``seconds``; ``chunks`` holds (new tokens, prefix length) of each of its requests.

        Raises ValueError naming the chunk or the seconds if there is no chunk, one has no new token or a negative
        prefix, or the seconds are not finite and above 0.
        """
        _check_seconds("prefill", seconds)
        if not chunks:
            raise ValueError("prefill chunks are empty: expected one or more of (new tokens, prefix length)")
        for num_tokens, depth_tokens in chunks:
            if not (0 < num_tokens < math.inf and 0 <= depth_tokens < math.inf):
                raise ValueError(
                    f"prefill chunk is {(num_tokens, depth_tokens)!r}: expected 1 or more new tokens, prefix 0 or more"
                )
        tokens = float(sum(num_tokens for num_tokens, _ in chunks))
        pairs = sum(_pairs(num_tokens, depth_tokens) for num_tokens, depth_tokens in chunks)
        self._prefill.observe((1.0, tokens, pairs), seconds)
        self._costs = Costs(PrefillLaw(*self._prefill.law), self._costs.load, self._costs.decode)


_WINDOW = 64  # observations a law remembers
_STEADY = -math.log(0.96)  # forgetting per observation: half the weight is on the last 17
_HASTY = -math.log(0.7)  # the same while predictions are wrong: on the last 2
_FORGOTTEN = 7.0  # older than this (weight below e**-7) is left out
_RECENT = 8  # observations that tell whether predictions are wrong,
_WRONG = 0.3  # which they are when the logarithms of their ratios come to this on average,
_MOST_WRONG = 1.5  # each counted up to this, so that one stall is not enough
_LEFT_BEHIND = 0.7  # an observation as far off as this (x2) is dropped once predictions are right again
_HUBER = 0.1  # relative error from which on an observation pulls no harder
_PRIOR = 0.02  # weight of the expected coefficients, in observations
_PRIOR_SHARE = 0.1  # a term is free to change by this share of the duration, however small it is expected
_ANCHOR_RATE = 1 / 32  # how fast the expected shape of the law follows the fitted one
_PASSES = 3  # reweighting steps per observation; each starts where the last one ended
_MIN_SECONDS, _MAX_SECONDS = 1e-9, 1e9  # outside of what a duration can be; keeps ratios within floats
_MIN_PER_BYTE_S = 1e-15
_SINGULAR = 1e-12  # of a pivot's first value


class _Fit:
    """Coefficients >= 0 of a law that is linear in its terms, fitted to the last observations.

    ``law`` holds one coefficient per term. Expected is the starting law (later: its slow average), scaled by one
    factor to what is observed: if the terms were observed in one proportion only, such as transfers of one size,
    the fit is that scaled law.
    """

    __slots__ = ("law", "_anchor", "_clock", "_hasty", "_rows")

    def __init__(self, start: tuple[float, ...]) -> None:
        self.law = start
        self._anchor = start
        self._clock = 0.0
        self._hasty = False
        self._rows: deque[tuple[tuple[float, ...], float, float]] = deque(maxlen=_WINDOW)  # terms, seconds, birth

    def observe(self, terms: tuple[float, ...], seconds: float) -> None:
        """``terms``: one value above 0 per coefficient; ``seconds``: what the sum came to."""
        self._clock += _HASTY if self._hasty else _STEADY
        self._rows.append((terms, _possible(seconds), self._clock))
        while self._clock - self._rows[0][2] > _FORGOTTEN:
            self._rows.popleft()
        rows, took, births = zip(*self._rows, strict=True)
        columns = list(zip(*rows, strict=True))
        weights = [math.exp(birth - self._clock) for birth in births]
        anchored = _weighted_sum(self._anchor, columns)
        scale = _median([y / p for y, p in zip(took, anchored, strict=True)], weights) if all(anchored) else 1.0
        expected = [scale * coefficient for coefficient in self._anchor]
        for _ in range(_PASSES):
            self.law = _refined(self.law, columns, took, weights, expected)
        self._anchor = tuple(old + _ANCHOR_RATE * (new - old) for old, new in zip(expected, self.law, strict=True))
        fitted = _weighted_sum(self.law, columns)
        errors = [abs(math.log(y / p)) for y, p in zip(took, fitted, strict=True)]
        was_hasty = self._hasty
        self._hasty = sum(min(error, _MOST_WRONG) for error in errors[-_RECENT:]) > _WRONG * _RECENT
        if was_hasty and not self._hasty:
            # The law has caught up with a change: what it left behind is not to pull it back.
            fitting = [row for row, error in zip(self._rows, errors, strict=True) if error < _LEFT_BEHIND]
            self._rows = deque(fitting, maxlen=_WINDOW)


def _refined(
    law: tuple[float, ...],
    columns: Sequence[Sequence[float]],
    took: Sequence[float],
    weights: Sequence[float],
    expected: Sequence[float],
) -> tuple[float, ...]:
    """One step of iteratively reweighted least squares from ``law``.

    ``columns`` holds per term its value in each observation. Unknown is the share each term has in a typical
    duration, which makes all numbers of the order of 1.
    """
    # A law of zeros predicts nothing yet: the observed durations stand in.
    predicted = [p or y for p, y in zip(_weighted_sum(law, columns), took, strict=True)]
    ratios = [y / p for y, p in zip(took, predicted, strict=True)]
    pulls = [w * _HUBER / max(abs(ratio - 1.0), _HUBER) for w, ratio in zip(weights, ratios, strict=True)]
    total = sum(pulls)
    shares = []  # of each term in each predicted duration, then in units of the typical share
    reach = []
    for column in columns:
        share = [x / p for x, p in zip(column, predicted, strict=True)]
        reach.append(_dot(pulls, share) / total)
        shares.append([value / reach[-1] for value in share])
    gram = [[0.0] * len(law) for _ in law]
    right = [0.0] * len(law)
    for i, share in enumerate(shares):
        pulled = list(map(mul, pulls, share))
        right[i] = _dot(pulled, ratios)
        for j in range(i + 1):
            gram[i][j] = gram[j][i] = _dot(pulled, shares[j])
        prior = expected[i] * reach[i]
        trust = _PRIOR / max(prior, _PRIOR_SHARE) ** 2
        gram[i][i] += trust
        right[i] += trust * prior
    return tuple(share / unit for share, unit in zip(_non_negative(gram, right), reach, strict=True))


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    total: float = sum(map(mul, left, right))
    return total


def _weighted_sum(law: Sequence[float], columns: Sequence[Sequence[float]]) -> list[float]:
    """What ``law`` says for each observation: the sum over terms of coefficient times value."""
    return [_dot(law, terms) for terms in zip(*columns, strict=True)]


def _median(values: Sequence[float], weights: Sequence[float]) -> float:
    half = sum(weights) / 2
    for value, weight in sorted(zip(values, weights, strict=True)):
        half -= weight
        if half <= 0.0:
            return value
    return max(values)  # only by rounding


def _non_negative(gram: list[list[float]], right: list[float]) -> list[float]:
    """The u >= 0 of least u' gram u / 2 - right' u, for a positive definite ``gram`` of at most 3 x 3.

    The minimum is the free minimum over those of its coordinates that are not 0. So of all sets of coordinates
    whose free minimum is >= 0 (at most 7), the one of least value is it; its value is -right' u / 2.
    """
    size = len(right)
    best, best_gain = [0.0] * size, 0.0
    for count in range(size, 0, -1):
        for kept in combinations(range(size), count):
            part = _solve([[gram[i][j] for j in kept] for i in kept], [right[i] for i in kept])
            gain = sum(right[i] * value for i, value in zip(kept, part, strict=True))
            if min(part) >= 0.0 and gain > best_gain:
                best, best_gain = [0.0] * size, gain
                for i, value in zip(kept, part, strict=True):
                    best[i] = value
        if count == size and best_gain > 0.0:
            break
    return best


def _solve(gram: list[list[float]], right: list[float]) -> list[float]:
    """Solve a positive definite system by elimination, in place; all -1 if it is singular to rounding."""
    size = len(right)
    least = [_SINGULAR * gram[i][i] for i in range(size)]
    for i in range(size):
        if gram[i][i] <= least[i]:
            return [-1.0] * size
        for j in range(i + 1, size):
            factor = gram[j][i] / gram[i][i]
            right[j] -= factor * right[i]
            for k in range(i, size):
                gram[j][k] -= factor * gram[i][k]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(gram[i][k] * right[k] for k in range(i + 1, size))) / gram[i][i]
    return right


def _transfer_fit(law: TransferLaw) -> _Fit:
    return _Fit((law.fixed_s, 1.0 / law.bytes_per_s))


def _transfer_law(fit: _Fit) -> TransferLaw:
    fixed_s, per_byte_s = fit.law
    return TransferLaw(fixed_s, 1.0 / max(per_byte_s, _MIN_PER_BYTE_S))


def _pairs(num_tokens: int, depth_tokens: int) -> float:
    return num_tokens * (depth_tokens + num_tokens / 2)


def _check_seconds(what: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0.0):
        raise ValueError(f"{what} seconds is {seconds!r}: expected a finite number above 0")


def _possible(seconds: float) -> float:
    return min(max(seconds, _MIN_SECONDS), _MAX_SECONDS)


def _check_transfer(what: str, num_bytes: int, seconds: float) -> None:
    if not (math.isfinite(num_bytes) and num_bytes > 0):
        raise ValueError(f"{what} num_bytes is {num_bytes!r}: expected a finite number above 0")
    _check_seconds(what, seconds)


def _name(tier: int) -> str:
    return getattr(tier, "name", str(tier))


def _names(tiers: Mapping[Tier, object]) -> str:
    return f"one of {', '.join(map(_name, sorted(tiers)))}" if tiers else "none, no tier has one"
