"""Interference of online profiling with users: a server that profiles beside one that does not, with equal clients.

Both are the real server, started once. Only one of them runs at a time, the other is stopped by SIGSTOP, and they take
turns every few seconds, so that whatever else the machine does hits both. A random model is used: its answers go on,
so that what profiling generates is as long as it may be.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from evicbench.correctness.reference import PEAKY_VOCABULARY, make_peaky_model
from evicbench.paths import out_file
from evicbench.report import Line
from evicbench.streams import Streamed, stream
from evicbench.testbed.server import Server, ServerError
from sglang_evicpress.quantiles import quantile

MOST_ITL_RATIO = 1.10
FORMS = "keydiff@0.8,keydiff@0.5,keydiff@0.2,snapkv@0.5,streaming@0.5"
POOL_TOKENS = 140_000
"""Room for everything: nothing is compressed, so that profiling is all that differs."""

NUM_CONTEXTS, CONTEXT_TOKENS, QUERY_TOKENS = 64, 960, 16
NUM_QUERIES = 8
"""That were asked about each context, as many as the recorder keeps."""

NUM_OPEN = 4
"""Contexts that the clients ask about, besides those that wait to be profiled."""

NUM_CLIENTS, NUM_NEW = 3, 120
ROUND_S = 3.0
NUM_PAIRS = 14
PAUSES_S = {"with gaps": 1.0, "without gaps": 0.0}
"""Mean seconds between a client's requests."""

_ARGUMENTS = (
    *("--kv-policy", "evicpress", "--kv-alpha", "1", "--kv-forms", FORMS, "--max-total-tokens", str(POOL_TOKENS)),
    "--skip-tokenizer-init",
)

Ids = tuple[int, ...]


class Freezable(Server):
    """A server whose processes can be stopped and go on as if nothing had been."""

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def waited_s(self) -> dict[str, float]:
        """Seconds that each thread of the server has waited for a CPU."""
        if self._process is None:
            raise ServerError("the server does not run")
        found = {}
        for path in Path("/proc").glob("[0-9]*/task/[0-9]*/schedstat"):
            with suppress(OSError):  # it ended
                if os.getpgid(int(path.parts[2])) == self._process.pid:
                    found[str(path)] = int(path.read_text().split()[1]) / 1e9
        return found

    def _signal(self, sign: signal.Signals) -> None:
        if self._process is None:
            raise ServerError("the server does not run")
        os.killpg(self._process.pid, sign)


@dataclass(frozen=True, slots=True)
class Round:
    """A few seconds of load on one server. ``num_touched`` of its ``num_steps`` in which users decode had profiling
    in them, which computed ``num_tokens`` in all; ``num_held_up`` were profiling's while a user's request waited that
    could have begun. ``num_left``: contexts that were still to be profiled at the end.
    ``waited``: the share of the time that the server's busiest thread could have run but had no CPU."""

    streams: Sequence[Streamed]
    num_steps: int = 0
    num_touched: int = 0
    num_held_up: int = 0
    num_tokens: int = 0
    num_profiled: int = 0
    num_left: int = 0
    waited: float = 0.0

    @property
    def itl_s(self) -> list[float]:
        return [gap for each in self.streams for gap in each.steps_s]

    @property
    def ttft_s(self) -> list[float]:
        return [each.first_s for each in self.streams]


@dataclass(slots=True)
class Rounds:
    """``on[i]`` and ``off[i]`` had the same load, one right after the other."""

    on: list[Round] = field(default_factory=list)
    off: list[Round] = field(default_factory=list)

    def ratio(self, share: float) -> float:
        """Median over the pairs of that percentile of ITL, on over off."""
        return statistics.median(
            quantile(on.itl_s, share) / quantile(off.itl_s, share) for on, off in zip(self.on, self.off, strict=True)
        )

    def ratio_of_all(self, share: float) -> float:
        """That percentile of the ITL of all rounds together, on over off."""
        on, off = ([gap for each in rounds for gap in each.itl_s] for rounds in (self.on, self.off))
        return quantile(on, share) / quantile(off, share)

    def ttft_differences_s(self, share: float) -> list[float]:
        """Difference of each pair at that percentile of TTFT, on minus off."""
        return [
            quantile(on.ttft_s, share) - quantile(off.ttft_s, share) for on, off in zip(self.on, self.off, strict=True)
        ]

    @property
    def step_s(self) -> float:
        """One decode step: the median time between tokens without profiling."""
        return quantile([gap for each in self.off for gap in each.itl_s], 0.5)


def draw_prompts(rng: random.Random) -> list[list[Ids]]:
    """Prompts about each context."""

    def row(count: int) -> Ids:
        return tuple(rng.randrange(3, PEAKY_VOCABULARY) for _ in range(count))

    contexts = [row(CONTEXT_TOKENS) for _ in range(NUM_CONTEXTS + NUM_OPEN)]
    return [[context + row(QUERY_TOKENS) for _ in range(NUM_QUERIES)] for context in contexts]


def seed(server: Server, prompts: Sequence[Sequence[Ids]]) -> None:
    """Ask all of them, by several clients so that profiling hardly gets to run meanwhile."""

    def ask(own: Sequence[Ids]) -> None:
        for ids in (own[0], *own):  # the first time nothing is shared yet
            server.generate(list(ids), 2)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, prompts))


def steady_load(server: Server, prompts: Sequence[Sequence[Ids]], mean_pause_s: float, seed: str) -> list[Streamed]:
    """Streams of the clients, each of which asks, waits about ``mean_pause_s`` and asks again, and begins nothing after
    a round's time. Prompts and pauses are the same for the same ``seed``. Raises ServerError at a request that fails.
    """
    end_s = time.perf_counter() + ROUND_S
    has_failed = threading.Event()

    def client(number: int) -> list[Streamed]:
        rng = random.Random(f"{seed}-{number}")
        streams: list[Streamed] = []
        while not has_failed.is_set():
            pause_s = rng.expovariate(1.0 / mean_pause_s) if mean_pause_s > 0.0 else 0.0
            prompt = rng.choice(prompts[-rng.randint(1, NUM_OPEN)])
            if time.perf_counter() + pause_s >= end_s:
                break
            time.sleep(pause_s)
            try:
                streams.append(stream(server, prompt, NUM_NEW))
            except (ServerError, OSError, HTTPException):
                has_failed.set()
                raise
        return streams

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return [each for part in pool.map(client, range(NUM_CLIENTS)) for each in part]


def run_round(server: Freezable, prompts: Sequence[Sequence[Ids]], mean_pause_s: float, name: str) -> Round:
    """Only this server runs, for as long as it takes."""
    server.thaw()
    try:
        before = server.get("/evicpress/profiles")
        waited_s, begin_s = server.waited_s(), time.perf_counter()
        streams = steady_load(server, prompts, mean_pause_s, name)
        took_s, later_s = time.perf_counter() - begin_s, server.waited_s()
        after = server.get("/evicpress/profiles")
    finally:
        server.freeze()
    return Round(
        streams,
        num_steps=_more(before, after, "user_steps"),
        num_touched=_more(before, after, "user_steps_touched"),
        num_held_up=_more(before, after, "users_held_up"),
        num_tokens=_more(before, after, "tokens"),
        num_profiled=after["counts"]["profiled"] - before["counts"]["profiled"],
        num_left=after["num_recorded_contexts"] - len(after["profiles"]),
        waited=max(later_s[thread] - waited_s.get(thread, 0.0) for thread in later_s) / took_s,
    )


def _more(before: dict[str, Any], after: dict[str, Any], name: str) -> int:
    return int(after["counts"]["background_requests"][name] - before["counts"]["background_requests"][name])


@contextmanager
def both_servers(model: Path) -> Iterator[tuple[Freezable, Freezable]]:
    """One that profiles and one that does not, both frozen."""
    on = Freezable(*_ARGUMENTS, model=model)
    off = Freezable(*_ARGUMENTS, "--kv-disable-online-profiling", model=model)
    try:
        for server in (on, off):
            server.start()
            server.freeze()
        yield on, off
    finally:
        on.stop()
        off.stop()


def measure_rounds(num_pairs: int = NUM_PAIRS) -> dict[str, Rounds]:
    prompts = draw_prompts(random.Random("interference"))
    found = {name: Rounds() for name in PAUSES_S}
    with tempfile.TemporaryDirectory() as folder, both_servers(make_peaky_model(Path(folder) / "peaky")) as servers:
        for server in servers:
            server.thaw()
            seed(server, prompts)
            server.freeze()
        for name, pause_s in reversed(PAUSES_S.items()):  # without gaps little is profiled: the backlog lasts
            for number in range(num_pairs):
                pair = [run_round(server, prompts, pause_s, f"{name}-{number}") for server in _in_turn(servers, number)]
                on, off = _in_turn(pair, number)
                found[name].on.append(on)
                found[name].off.append(off)
    return found


def _in_turn(pair: Sequence[Any], number: int) -> Sequence[Any]:
    """Order of a pair, reversed from pair to pair; done twice, the order is as before."""
    return pair if number % 2 == 0 else pair[::-1]


def measure_interference(num_pairs: int = NUM_PAIRS) -> Iterator[Line]:
    found = measure_rounds(num_pairs)
    figures = {name: _figures(rounds) for name, rounds in found.items()}
    out_file("profiler", "interference.json").write_text(json.dumps(figures, indent=1))
    for name, rounds in found.items():
        yield from lines_of(name, rounds)


def lines_of(name: str, rounds: Rounds) -> Iterator[Line]:
    load = f"{NUM_CLIENTS} clients of {NUM_NEW} tokens {name}"
    steps, touched = (sum(getattr(each, what) for each in rounds.on) for what in ("num_steps", "num_touched"))
    profiled = sum(each.num_profiled for each in rounds.on)
    num_gaps = sum(len(each.itl_s) for each in rounds.on)
    p95 = rounds.ratio(0.95), rounds.ratio_of_all(0.95)
    was_busy = all(each.num_left > 0 for each in rounds.on) and sum(each.num_tokens for each in rounds.on) > 0
    waited = " and ".join(f"{statistics.fmean(each.waited for each in of):.0%}" for of in (rounds.on, rounds.off))
    yield Line(
        f"p95 ITL of {load}, profiling busy all the time over no profiling; {len(rounds.on)} pairs of rounds of "
        f"{ROUND_S:g} s",
        f"<= {MOST_ITL_RATIO:.2f}x in the median pair",
        f"{p95[0]:.3f}x in the median pair, {p95[1]:.3f}x over all (p50 {rounds.ratio(0.5):.3f}x, p99 "
        f"{rounds.ratio(0.99):.3f}x); p50/p95/p99 on {_spread(rounds.on)}, off {_spread(rounds.off)} over {num_gaps} "
        f"tokens; {touched} of {steps} steps of users touched ({touched / max(1, steps):.1%}), {profiled} contexts "
        f"profiled{'' if was_busy else '; NOT busy all the time'}; the scheduler waited for a CPU {waited} of the time",
        p95[0] <= MOST_ITL_RATIO and was_busy,
    )
    held_up = sum(each.num_held_up for each in rounds.on)
    median, tail = (statistics.median(rounds.ttft_differences_s(share)) for share in (0.5, 0.95))
    yield Line(
        f"TTFT of {load}: how much longer with profiling, in the median pair; steps that were profiling's while a user "
        "could have begun",
        "p50 by at most one decode step, no such step",
        f"p50 {1e3 * median:+.1f} ms, p95 {1e3 * tail:+.1f} ms, a decode step is {1e3 * rounds.step_s:.1f} ms; p50/p95 "
        f"on {_ttft(rounds.on)}, off {_ttft(rounds.off)} of {sum(len(each.streams) for each in rounds.on)} requests; "
        f"{held_up} such steps",
        median <= rounds.step_s and held_up == 0,
    )


def _figures(rounds: Rounds) -> dict[str, list[dict[str, object]]]:
    return {
        which: [
            {
                "itl_ms": [round(1e3 * quantile(each.itl_s, share), 3) for share in (0.5, 0.95, 0.99)],
                "ttft_ms": [round(1e3 * value, 2) for value in each.ttft_s],
                "user_steps": each.num_steps,
                "touched": each.num_touched,
                "held_up": each.num_held_up,
                "profiling_tokens": each.num_tokens,
                "profiled": each.num_profiled,
                "left": each.num_left,
                "waited_for_cpu": round(each.waited, 3),
            }
            for each in of
        ]
        for which, of in (("on", rounds.on), ("off", rounds.off))
    }


def _spread(rounds: Sequence[Round]) -> str:
    itl_s = [gap for each in rounds for gap in each.itl_s]
    return "/".join(f"{1e3 * quantile(itl_s, share):.1f}" for share in (0.5, 0.95, 0.99)) + " ms"


def _ttft(rounds: Sequence[Round]) -> str:
    ttft_s = [each for one in rounds for each in one.ttft_s]
    return "/".join(f"{1e3 * quantile(ttft_s, share):.0f}" for share in (0.5, 0.95)) + " ms"
