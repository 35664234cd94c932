"""Time to first token where a context is on the host or on SSD only, against computing one as long, side by side.

Contexts are random, so that each is known to the server only where it was put. Of every case the two medians are
compared that were taken in turn, on one server.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evicbench.moves import push_all, sources, wait_until_idle
from evicbench.report import Line
from evicbench.testbed.server import Server
from evicbench.tiers.inputs import scratch

FULL = 4000
SIZES = (64, 128, 256, 512, 1024, 2048, FULL)
SLOW_SIZES = (128, 512, 1024, FULL)
SLOW = "seed=1,delay=1:0.05"
"""Every read and every check takes 50 ms longer, and every layer that is loaded."""

BEST_RATIO = 0.5
WORST_RATIO = 1.1
ROUNDS = 7
MOST_ROUNDS = 60
SECONDS_PER_CASE = 6.0
NEAR_RATIO = 1.05
"""A case above this is measured for four times as long: its medians may be off by more than the rest to the bound."""

VOCABULARY = 512


@dataclass(slots=True)
class Case:
    """Seconds to the first token of contexts of ``num_tokens`` that were only on ``tier``, and of new ones."""

    tier: str
    num_tokens: int
    from_tier: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    num_loaded: int = 0

    @property
    def ratio(self) -> float:
        return statistics.median(self.from_tier) / statistics.median(self.computed)

    @property
    def is_loaded(self) -> bool:
        """True if the cost model chose to load, more often than not."""
        return 2 * self.num_loaded > len(self.from_tier)

    def __str__(self) -> str:
        took = f"{1e3 * statistics.median(self.from_tier):.0f}/{1e3 * statistics.median(self.computed):.0f} ms"
        how = "loaded" if self.is_loaded else "computed"
        return f"{self.num_tokens} from {self.tier} {self.ratio:.2f} ({took}, {how}, {len(self.computed)} rounds)"


class Clock:
    """Measures cases on a running server."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self._rng = random.Random(f"ttft-{seed}")

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Let the server see what computing and loading cost."""
        for size in (*sizes, *sizes):
            for tier in ("ssd", "host"):
                self.server.flush()
                self.first_token_s(self._put(tier, size))

    def measure(self, tier: str, num_tokens: int) -> Case:
        """At least ``ROUNDS`` rounds; short ones, which vary most, as often as the time allows."""
        case, begin = Case(tier, num_tokens), time.monotonic()
        while len(case.computed) < ROUNDS or (
            len(case.computed) < MOST_ROUNDS
            and time.monotonic() - begin < SECONDS_PER_CASE * (4 if case.ratio > NEAR_RATIO else 1)
        ):
            self.server.flush()
            context, new = self._put(tier, num_tokens), self._draw(num_tokens)
            halves = [(context, case.from_tier), (new, case.computed)]
            for ids, times in halves if len(case.computed) % 2 else halves[::-1]:
                seconds, num_loaded = self.first_token_s(ids)
                times.append(seconds)
                if ids is context:
                    case.num_loaded += num_loaded > num_tokens // 2
                wait_until_idle(self.server)
        return case

    def first_token_s(self, ids: list[int]) -> tuple[float, int]:
        """Seconds, and how many tokens came from a tier."""
        begin = time.perf_counter()
        given = self.server.generate(ids, 1)
        return time.perf_counter() - begin, sum(sources(given).values())

    def _draw(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(20, VOCABULARY) for _ in range(num_tokens)]

    def _put(self, tier: str, num_tokens: int) -> list[int]:
        """A context that only ``tier`` has, and a token that nobody has. Raises ServerError where it goes elsewhere."""
        ids = self._draw(num_tokens)
        self.server.generate(ids, 1)
        if push_all(self.server, tier):
            raise self.server.error(f"a context of {num_tokens} tokens could not be put on tier {tier}")
        return [*ids[:-1], *self._draw(1)]


def arguments(folder: Path) -> tuple[str, ...]:
    return (
        *("--kv-policy", "evicpress", "--kv-forms", "exact", "--max-total-tokens", "24000"),
        *("--kv-host-gb", "0.1", "--kv-ssd-dir", str(folder), "--kv-ssd-gb", "1", "--skip-tokenizer-init"),
    )


def measure_cases(
    folder: Path, sizes: Sequence[int], tiers: Sequence[str], seed: int, env: dict[str, str] | None = None
) -> tuple[list[Case], dict[str, int]]:
    """The cases, and the server's counts."""
    with Server(*arguments(folder), env=env) as server:
        clock = Clock(server, seed)
        clock.warm_up(sizes)
        cases = [clock.measure(tier, num_tokens) for num_tokens in sizes for tier in tiers]
        return cases, server.get("/evicpress/tiers")["counts"]


def full_line(case: Case) -> Line:
    return Line(
        f"time to first token, {case.num_tokens} tokens on SSD only, against computing them; CPU testbed",
        f"<= {BEST_RATIO:g} where the cost model chose to load",
        str(case),
        not case.is_loaded or case.ratio <= BEST_RATIO,
    )


def worst_line(what: str, cases: Sequence[Case], counts: dict[str, int]) -> Line:
    """All cases but where loading is much the faster anyway."""
    ordered = sorted(cases, key=lambda case: -case.ratio)
    return Line(
        f"time to first token, {len(cases)} cases of {cases[0].num_tokens} to {cases[-1].num_tokens} tokens, {what}",
        f"never more than {WORST_RATIO:g} of computing",
        f"worst {ordered[0]}; then {'; '.join(map(str, ordered[1:4]))}; "
        f"{counts.get('loads', 0)} loads, {counts.get('late_layers', 0)} layers late",
        ordered[0].ratio <= WORST_RATIO,
    )


def measure(seed: int = 0) -> Iterator[Line]:
    with scratch(3 << 30) as folder:
        cases, counts = measure_cases(folder / "fast", SIZES, ("ssd", "host"), seed)
        yield full_line(next(case for case in cases if (case.tier, case.num_tokens) == ("ssd", FULL)))
        yield worst_line("from the host and from SSD", cases, counts)
        slow = {"SGLANG_EVICPRESS_FAULTS": SLOW}
        cases, counts = measure_cases(folder / "slow", SLOW_SIZES, ("ssd",), seed + 1, slow)
        yield worst_line("from an SSD and a host that take 50 ms for everything", cases, counts)
