"""A storm on a server whose host memory and SSD fail on purpose: every answer is right, and nothing hangs or leaks."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from evicbench.correctness.reference import make_peaky_model
from evicbench.moves import nodes_of, sources
from evicbench.report import Line
from evicbench.streams import posted
from evicbench.stress import CHECKS, FAILURES, Stress, started
from evicbench.testbed.server import NoAnswerInTime, Server, greedy
from evicbench.tiers.accounts import after_flush
from evicbench.tiers.inputs import scratch
from evicbench.tiers.prompts import Question, Texts, answered, reference
from sglang_evicpress.benchmark.client import lift_file_limit

SECONDS = 300.0
NUM_CLIENTS = 8
NUM_QUESTIONS = 240
NUM_ANSWER_TOKENS = 12
POOL_SLOTS = 6144
SSD_GB = 0.064
CHECK_S = 5.0
CLIENT_TIMEOUT_S = 60.0
SETTLE_S = 60.0
CALIBRATION = 1 / 3
"""Of the time of a storm above saturation: clients ask one request after the other, to see how many are answered."""

RATES = "delay=0.1:0.02,eio=0.01,enospc=0.01,short=0.02,flip=0.06,host_flip=0.3,lost=0.01"
"""Of every read, write, append, sync, ... and, for delays and host_flip, of every check and copy on the host, which are
few: an entry is taken to be good for ten seconds."""

LEAST_REASONS = 3
MOST_UNCOUNTED_BYTES = 1 << 20  # what the file system needs for itself


def arguments(folder: Path, page_size: int) -> tuple[str, ...]:
    """Far less than is asked for on every tier, so that all of them overflow."""
    return (
        *("--kv-policy", "evicpress", "--kv-forms", "exact", "--page-size", str(page_size)),
        *("--max-total-tokens", str(POOL_SLOTS), "--max-running-requests", str(NUM_CLIENTS)),
        *("--chunked-prefill-size", "512", "--skip-tokenizer-init"),
        *("--kv-host-gb", "0.016", "--kv-ssd-dir", str(folder), "--kv-ssd-gb", str(SSD_GB)),
    )


class Chaos(Stress):
    """Clients and one who moves nodes about, against a running server. All randomness but time comes from ``seed``.

    ``overload``: see ``storm``. ``errors``: of the tiers, by reason, as the server counts them. ``ssd_left_bytes``: of
    the disk after the flush, for what could not be given back because of a fault. ``num_offered``: requests sent at
    their time, whatever became of those before, at a multiple of ``saturation_rps``.
    """

    def __init__(
        self,
        server: Server,
        questions: Sequence[Question],
        folder: Path,
        seconds: float,
        seed: int,
        overload: float = 0.0,
    ) -> None:
        super().__init__(server, seconds)
        self.num_tokens = self.num_wrong = self.num_hung = self.num_cut = self.num_offered = self.ssd_left_bytes = 0
        self.saturation_rps = 0.0
        self.sources, self.moves = Counter[str](), Counter[str]()
        self.counts, self.errors = dict[str, int](), dict[str, int]()
        self._questions, self._folder, self._seed, self._overload = questions, folder, seed, overload
        self._clients_end = self.begin + CALIBRATION * seconds if overload else self.deadline
        # All that is offered above saturation is answered in the end: the longest wait is about as long as it lasts.
        self._timeout_s = CLIENT_TIMEOUT_S + overload * seconds

    def run(self) -> Self:
        """Until the deadline; then let every request end, look at what is left, flush, and look again."""
        *clients, mover = started([*(partial(self._ask, client) for client in range(NUM_CLIENTS)), self._move])
        for thread in clients:
            thread.join()
        if self._overload:
            self._offer()
        mover.join()
        if self.server.is_alive():
            self._settle()
        self.read_log()
        return self

    # ---- clients

    def _ask(self, client: int) -> None:
        rng = random.Random(f"chaos-{self._seed}-{client}")
        while time.monotonic() < self._clients_end and self.server.is_alive():
            self._ask_one(rng)

    def _ask_one(self, rng: random.Random) -> None:
        question = rng.choice(self._questions)
        num_tokens = rng.randint(1, len(question.answer))
        try:
            if rng.random() < 0.04:
                self._hang_up(question, rng)
            else:
                self._compare(question, num_tokens)
        except (TimeoutError, NoAnswerInTime):
            with self.lock:
                self.num_hung += 1
            self.report(f"no answer within {self._timeout_s:g} s: prompt of {len(question.prompt)} tokens")
        except FAILURES as error:
            self.report(f"a request failed: {type(error).__name__}: {error}")
            time.sleep(0.2)

    def _offer(self) -> None:
        """Requests at a multiple of what the clients were answered per second, until the deadline; then wait for all
        answers. A thread for each, as nobody waits for those before."""
        lift_file_limit()
        rng = random.Random(f"chaos-{self._seed}-offered")
        self.saturation_rps = (self.num_requests + self.num_cut) / (time.monotonic() - self.begin)
        threads = list[threading.Thread]()
        while self.goes_on() and self.saturation_rps > 0:
            time.sleep(rng.expovariate(self._overload * self.saturation_rps))
            one = random.Random(f"chaos-{self._seed}-offered-{len(threads)}")
            threads += started([partial(self._ask_one, one)])
        self.num_offered = len(threads)
        for thread in threads:
            thread.join()

    def _compare(self, question: Question, num_tokens: int) -> None:
        body = greedy(question.prompt, num_tokens)
        status, given = self.server.request("POST", "/generate", body, timeout_s=self._timeout_s)
        if status != 200:
            self.report(f"a request was answered {status}: {str(given)[:200]}")
            return
        ids, expected = tuple(given["output_ids"]), question.answer[:num_tokens]
        if not self.is_judged(question, num_tokens):
            expected = ids
        with self.lock:
            self.num_requests += 1
            self.num_tokens += num_tokens
            self.num_wrong += ids != expected
            self.sources.update(sources(given))
        if ids != expected:
            self.report(f"wrong: {ids}, expected {expected}; {len(question.prompt)} tokens, {sources(given)}")

    def is_judged(self, question: Question, num_tokens: int) -> bool:
        """False where KV may have been dropped on purpose."""
        return True

    def _hang_up(self, question: Question, rng: random.Random) -> None:
        """Ask for a stream and leave before it ends."""
        with posted(self.server, greedy(question.prompt, 40, stream=True), timeout_s=self._timeout_s) as connection:
            if rng.random() < 0.5:
                connection.getresponse().readline()
            else:
                time.sleep(rng.uniform(0.0, 0.2))
        with self.lock:
            self.num_cut += 1

    # ---- the one who moves nodes, and looks

    def _move(self) -> None:
        """Now and then push nodes down, empty a tier, or take the SSD away and bring it back; check the cache every few
        seconds."""
        rng = random.Random(f"chaos-{self._seed}-moves")
        ways = (*("demote",) * 12, *("gpu",) * 3, *("host",) * 3, "ssd", "detach")
        next_check = time.monotonic() + CHECK_S
        while self.goes_on():
            time.sleep(rng.uniform(0.1, 1.5))
            try:
                if time.monotonic() > next_check:
                    next_check = time.monotonic() + CHECK_S
                    self.check()
                elif (way := rng.choice(ways)) == "demote":
                    tier = rng.choice(("host", "ssd"))
                    for node in reversed(nodes_of(self.server)[-10:]):
                        path, body = f"/evicpress/nodes/{node['id']}/demote", {"tier": tier, "hold_seconds": 0}
                        self._post(f"demote {tier}", path, body, {200, 404, 409})
                elif way == "detach":
                    self._detach_and_attach()
                else:
                    self._post(f"flush {way}", f"/evicpress/flush?tier={way}", None, {200})
            except FAILURES as error:
                self.report(f"a move failed: {type(error).__name__}: {error}")

    def _detach_and_attach(self) -> None:
        """The folder is opened with faults too: what is refused is tried again."""
        self._post("detach", "/evicpress/tiers/ssd/detach", {}, {200})
        body = {"dir": str(self._folder), "gb": SSD_GB}
        deadline = time.monotonic() + SETTLE_S
        while not self._post("attach", "/evicpress/tiers/ssd", body, {200, 409}):
            if time.monotonic() > deadline or not self.server.is_alive():
                self.report("the SSD could not be attached again")
                return
            time.sleep(0.2)

    def _post(self, what: str, path: str, body: object, accepted: set[int]) -> bool:
        status, answer = self.server.request("POST", path, body)
        with self.lock:
            self.moves[what] += status == 200
        if status not in accepted:
            self.report(f"{what} answered {status}: {answer}")
        return status == 200

    # ---- when it is over

    def _settle(self) -> None:
        described = self.server.get("/evicpress/tiers")
        self.counts, self.errors = described["counts"], described["errors"]
        self.check()
        self.server.flush()
        deadline = time.monotonic() + SETTLE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.5)
        if left:
            self.report(f"after the flush: {left}")
        self.check()
        # Each rank gives back the bytes of its own disk when it can, and says nothing of it.
        while (uncounted := self._uncounted_bytes()) > MOST_UNCOUNTED_BYTES and time.monotonic() < deadline:
            time.sleep(0.5)
        if uncounted > MOST_UNCOUNTED_BYTES:
            self.report(f"after the flush: {self.ssd_left_bytes} bytes on the disk, {uncounted} of them not counted")

    def _uncounted_bytes(self) -> int:
        counted: int = self.server.get("/evicpress/tiers")["tiers"]["ssd"]["used_bytes"]
        self.ssd_left_bytes = 512 * sum(path.stat().st_blocks for path in self._folder.glob("rank-*/*"))
        return self.ssd_left_bytes - counted

    def _left(self) -> str:
        """Leftovers once nothing runs and all was flushed; nothing is fine."""
        return ", ".join(after_flush(self.server.get("/evicpress/stats"), self.server.get("/evicpress/tiers")))


def draw_questions(model: Path, seed: int, number: int = NUM_QUESTIONS) -> list[Question]:
    """Prompts of 64 to 1500 tokens with the answers of a server without a cache."""
    rng = random.Random(f"chaos-{seed}")
    texts = Texts(rng, num_roots=number // 12)
    prompts = [texts.prompt() for _ in range(number)]
    with reference(model) as server:
        return answered(server, prompts, [NUM_ANSWER_TOKENS] * len(prompts))


def storm(
    seconds: float,
    *,
    seed: int = 0,
    page_size: int = 1,
    overload: float = 0.0,
    num_questions: int = NUM_QUESTIONS,
    more: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    make: type[Chaos] = Chaos,
) -> Chaos:
    """Record the right answers, start a server with faults, and ask it for so long. ``more``: arguments of the server,
    ``env`` adds to its environment; ``make``: what asks it.

    ``overload``: for the last two thirds of the time requests come at so many times the rate at which clients were
    answered in the first; 0 for clients all the time.
    """
    with scratch(1 << 29) as folder, tempfile.TemporaryDirectory() as models:
        model = make_peaky_model(Path(models) / "peaky")
        questions = draw_questions(model, seed, num_questions)
        env = {**CHECKS, "SGLANG_EVICPRESS_FAULTS": f"seed={seed},{RATES}", **(env or {})}
        with Server(*arguments(folder / "ssd", page_size), *more, model=model, env=env) as server:
            chaos = make(server, questions, folder / "ssd", seconds, seed, overload).run()
    for problem in chaos.problems[:40]:
        print(f"    {problem}", flush=True)
    return chaos


def lines(chaos: Chaos, seconds: float) -> list[Line]:
    errors = {reason: count for reason, count in sorted(chaos.errors.items()) if count}
    num_on_ssd, num_on_host = (sum(reason.startswith(tier) for reason in errors) for tier in ("ssd", "host"))
    loaded = [chaos.sources[place] for place in ("device", "host", "storage")]
    others = [problem for problem in chaos.problems if not problem.startswith(("wrong", "no answer"))]
    offered = f", then {chaos.num_offered} requests at a multiple of their {chaos.saturation_rps:.1f} answers/s"
    return [
        Line(
            f"chaos for {seconds:g} s, {NUM_CLIENTS} clients{offered if chaos.num_offered else ''}, faults {RATES}",
            "no wrong output, no hung request, the cache whole at every check, no leaked slot or byte, server alive",
            f"{chaos.num_requests} requests ({chaos.num_tokens} tokens), {chaos.num_wrong} wrong, "
            f"{chaos.num_hung} hung, {chaos.num_cut} cut off, {chaos.num_checks} checks, "
            f"{len(others)} other problems, {chaos.ssd_left_bytes} bytes left on the disk"
            + (f"; first: {chaos.problems[0][:300]}" if chaos.problems else ""),
            not chaos.problems and chaos.num_requests > 0 and chaos.num_checks > 1,
        ),
        Line(
            "the faults happened, and what failed was a counted miss",
            f"at least {LEAST_REASONS} reasons on SSD and one on the host; KV loaded from both",
            f"errors {errors}; tokens from GPU, host, SSD: {'/'.join(map(str, loaded))}; "
            f"moves {dict(sorted(chaos.moves.items()))}; {chaos.counts}",
            num_on_ssd >= LEAST_REASONS and num_on_host >= 1 and min(loaded) > 0,
        ),
    ]


def measure() -> list[Line]:
    return lines(storm(SECONDS), SECONDS)
