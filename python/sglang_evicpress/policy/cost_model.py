"""Costs of delays: of loading, decoding and prefilling, learned from measured durations.

Costs are measured while serving, not configured; only starting values are given. A cost is a sum of terms with
coefficients of 0 or more (``regression``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sglang_evicpress.core import Tier
from sglang_evicpress.policy.regression import Fit

_REFERENCE_BYTES = tuple(2**power for power in (16, 20, 24, 28, 32))
_USUAL_BYTES = 2**22
_REFERENCE_CHUNKS = ((64, 0), (1024, 0), (1024, 16384), (16384, 0), (16384, 65536))


@dataclass(frozen=True, slots=True)
class PrefillCost:
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
                raise ValueError(f"prefill cost {name} is {seconds!r}: expected finite seconds, 0 or more")

    def seconds(self, num_tokens: int, depth_tokens: int) -> float:
        """Seconds to prefill ``num_tokens`` behind ``depth_tokens`` in a batch of their own."""
        return self.fixed_s + self.marginal_seconds(num_tokens, depth_tokens)

    def marginal_seconds(self, num_tokens: int, depth_tokens: int) -> float:
        """Seconds these tokens add to a request that prefills something anyhow: without ``fixed_s``."""
        return self.per_token_s * num_tokens + self.per_pair_s * _pairs(num_tokens, depth_tokens)


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Time to move or decode bytes: fixed_s + num_bytes / bytes_per_s seconds.

    Raises ValueError if ``fixed_s`` is negative or not finite, or ``bytes_per_s`` not finite and above 0.
    """

    fixed_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fixed_s) and self.fixed_s >= 0.0):
            raise ValueError(f"transfer cost fixed_s is {self.fixed_s!r}: expected finite seconds, 0 or more")
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0.0):
            raise ValueError(f"transfer cost bytes_per_s is {self.bytes_per_s!r}: expected a finite number above 0")

    def seconds(self, num_bytes: float) -> float:
        return self.fixed_s + num_bytes / self.bytes_per_s


START_COPY = TransferCost(1e-3, 4e9)
"""Cost of copying off the GPU before any was observed."""


@dataclass(frozen=True, slots=True)
class CostSnapshot:
    """All costs at one moment, as a policy reads them.

    ``load`` holds, per tier below the GPU, what getting bytes back to the GPU costs; ``decode`` holds, per codec,
    what turning stored bytes back to raw costs on top (over the stored bytes; a codec that is absent costs
    nothing). Nobody changes the two mappings once they are handed in. ``copy`` is what a node costs that leaves the
    GPU while a request waits for its room: the time of the scheduler's thread.
    """

    prefill: PrefillCost
    load: Mapping[Tier, TransferCost]
    decode: Mapping[str, TransferCost]
    copy: TransferCost = START_COPY

    def copy_seconds(self, num_copies: int, num_bytes: float) -> float:
        """Seconds to copy so many nodes, of ``num_bytes`` together, off the GPU."""
        return num_copies * self.copy.fixed_s + num_bytes / self.copy.bytes_per_s

    def load_seconds(self, tier: Tier, num_bytes: float, codec: str = "raw") -> float:
        """Seconds until ``num_bytes`` stored on ``tier`` are raw KV on the GPU; 0 if they are there.

        Raises ValueError for a tier without a cost.
        """
        if tier == Tier.GPU:
            return 0.0
        cost = self.load.get(tier)
        if cost is None:
            raise ValueError(f"no load cost for tier {_name(tier)}: expected {_names(self.load)}")
        decode = self.decode.get(codec)
        return cost.seconds(num_bytes) + (decode.seconds(num_bytes) if decode is not None else 0.0)

    def of_a_part(self) -> CostSnapshot:
        """Costs of a node among others of a path. Whatever is on the host comes in one load, so that its fixed cost
        is nobody's, as that of a prefill is not (``PrefillCost.marginal_seconds``), nor is that of decoding; from an
        SSD each is read by itself.
        """
        load = {
            tier: TransferCost(0.0, cost.bytes_per_s) if tier == Tier.HOST else cost for tier, cost in self.load.items()
        }
        decode = {codec: TransferCost(0.0, cost.bytes_per_s) for codec, cost in self.decode.items()}
        return replace(self, load=load, decode=decode)

    def with_recompute_weight(self, weight: float) -> CostSnapshot:
        """The same, where a second of prefilling counts ``weight`` times."""
        cost = self.prefill
        prefill = PrefillCost(weight * cost.fixed_s, weight * cost.per_token_s, weight * cost.per_pair_s)
        return replace(self, prefill=prefill)

    def with_read_weight(self, weight: float) -> CostSnapshot:
        """The same, where a second of reading from below the host counts ``weight`` times."""
        load = {
            tier: TransferCost(weight * cost.fixed_s, cost.bytes_per_s / weight) if tier > Tier.HOST else cost
            for tier, cost in self.load.items()
        }
        return replace(self, load=load)

    def drifted_from(self, other: CostSnapshot, tolerance: float) -> bool:
        """True if a predicted duration differs from that of ``other`` by more than ``tolerance`` of the latter.

        Compared at 64 KiB to 4 GiB for every tier, by each codec for the fastest, and at 64 to 16384 new tokens behind
        0 to 65536 for prefill; a tier that only one of the two has counts as a difference. Raises ValueError unless
        tolerance >= 0.
        """
        if not (math.isfinite(tolerance) and tolerance >= 0.0):
            raise ValueError(f"tolerance is {tolerance!r}: expected a finite share, 0 or more")
        if self.load.keys() != other.load.keys():
            return True
        pairs = [(self.prefill.seconds(*chunk), other.prefill.seconds(*chunk)) for chunk in _REFERENCE_CHUNKS]
        loads = [(tier, "raw") for tier in self.load]  # decoding takes the same from every tier
        loads += [(tier, codec) for tier in sorted(self.load)[:1] for codec in self.decode.keys() | other.decode.keys()]
        pairs += [
            (self.load_seconds(tier, size, codec), other.load_seconds(tier, size, codec))
            for tier, codec in loads
            for size in _REFERENCE_BYTES
        ]
        return any(abs(mine - its) > tolerance * its for mine, its in pairs)


class CostModel:
    """Learns ``CostSnapshot`` from observed durations; until something is observed, its cost is that of ``start``.

    Reads no clock: seconds are handed in. Each observation costs a bounded time and the model a bounded memory.
    The same observations in the same order give the same costs.
    """

    def __init__(self, start: CostSnapshot) -> None:
        self._prefill = Fit((start.prefill.fixed_s, start.prefill.per_token_s, start.prefill.per_pair_s))
        self._load = {tier: _transfer_fit(cost) for tier, cost in start.load.items()}
        self._coded = dict[str, Fit]()  # of loads by a codec, all that they take
        self._copy = _transfer_fit(start.copy)
        self._costs = replace(start, load=dict(start.load), decode=dict(start.decode))

    @property
    def costs(self) -> CostSnapshot:
        """A snapshot that later observations do not change; the same object until the next observation."""
        return self._costs

    def observe_load(self, tier: Tier, num_bytes: int, seconds: float, codec: str = "raw") -> None:
        """``num_bytes`` stored on ``tier`` by ``codec`` were raw KV on the GPU after ``seconds``.

        Of what is not raw, which comes from the host, the seconds beyond those of as many raw bytes are of decoding;
        where there are none, raw bytes take no longer than that either. Raises ValueError for a tier without a starting
        cost (the GPU has none), for a codec on any tier but the host, and unless both are above 0.
        """
        if not (math.isfinite(num_bytes) and num_bytes > 0):
            raise ValueError(f"load num_bytes is {num_bytes!r}: expected a finite number above 0")
        _check_seconds("load", seconds)
        fit = self._load.get(tier)
        if fit is None:
            raise ValueError(f"load from tier {_name(tier)} has no starting cost: expected {_names(self._load)}")
        if codec != "raw":
            if tier != Tier.HOST:
                raise ValueError(f"load by codec {codec} from tier {_name(tier)}: expected one from {Tier.HOST.name}")
            fit = self._coded.setdefault(codec, _transfer_fit(self._costs.load[tier]))
        fit.observe((1.0, float(num_bytes)), seconds)
        load = {**self._costs.load, tier: _transfer_cost(self._load[tier])}
        if tier == Tier.HOST:
            coded = {codec: _transfer_cost(fit) for codec, fit in self._coded.items()}
            load[tier] = min((load[tier], *coded.values()), key=lambda cost: cost.seconds(_USUAL_BYTES))
            decode = {codec: _beyond(cost, load[tier]) for codec, cost in coded.items()}
            self._costs = replace(self._costs, decode={**self._costs.decode, **decode})
        self._costs = replace(self._costs, load=load)

    def observe_copy(self, num_copies: int, num_bytes: int, seconds: float) -> None:
        """So many nodes, of ``num_bytes`` together, were copied off the GPU within ``seconds``.

        Raises ValueError unless all three are above 0.
        """
        if not (num_copies > 0 and num_bytes > 0):
            raise ValueError(f"copies are {num_copies!r} of {num_bytes!r} bytes: expected 1 or more of each")
        _check_seconds("copy", seconds)
        self._copy.observe((float(num_copies), float(num_bytes)), seconds)
        self._costs = replace(self._costs, copy=_transfer_cost(self._copy))

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
        self._costs = replace(self._costs, prefill=PrefillCost(*self._prefill.cost))


_MIN_PER_BYTE_S = 1e-15


def _transfer_fit(cost: TransferCost) -> Fit:
    return Fit((cost.fixed_s, 1.0 / cost.bytes_per_s))


def _transfer_cost(fit: Fit) -> TransferCost:
    fixed_s, per_byte_s = fit.cost
    return TransferCost(fixed_s, 1.0 / max(per_byte_s, _MIN_PER_BYTE_S))


def _beyond(cost: TransferCost, raw: TransferCost) -> TransferCost:
    """Cost of a load beyond that of as many raw bytes."""
    per_byte_s = 1.0 / cost.bytes_per_s - 1.0 / raw.bytes_per_s
    return TransferCost(max(0.0, cost.fixed_s - raw.fixed_s), 1.0 / max(per_byte_s, _MIN_PER_BYTE_S))


def _pairs(num_tokens: int, depth_tokens: int) -> float:
    return num_tokens * (depth_tokens + num_tokens / 2)


def _check_seconds(what: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0.0):
        raise ValueError(f"{what} seconds is {seconds!r}: expected a finite number above 0")


def _name(tier: int) -> str:
    return getattr(tier, "name", str(tier))


def _names(tiers: Mapping[Tier, object]) -> str:
    return f"one of {', '.join(map(_name, sorted(tiers)))}" if tiers else "none, no tier has one"
