"""A storm on a server whose host memory and SSD fail on purpose: every answer is right, and nothing hangs or leaks."""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evicbench.correctness.reference import make_peaky_model
from evicbench.correctness.storm import BAD_WORDS, CHECKS
from evicbench.report import Line, print_line
from evicbench.testbed.server import NoAnswerInTime, Server, ServerError
from evicbench.tiers.inputs import scratch
from evicbench.tiers.prompts import Question, Texts, answered, nodes_of, reference, sources
from sglang_evicpress.benchmark.client import lift_file_limit

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

RATES = "delay=0.1:0.02,eio=0.01,enospc=0.01,short=0.02,flip=0.06,lost=0.01"
"""Of every read, write, append, sync, ... and, for delays and flips, of every check and copy on the host."""

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


@dataclass(slots=True)
class Outcome:
    """Result of a storm. ``errors``: of the tiers, by reason, as the server counts them. ``ssd_left_bytes``: of the
    disk after the flush, for what could not be given back because of a fault. ``num_offered``: requests sent at their
    time, whatever became of those before, at a multiple of ``saturation_rps``."""

    num_requests: int = 0
    num_tokens: int = 0
    num_wrong: int = 0
    num_hung: int = 0
    num_cut: int = 0
    num_checks: int = 0
    saturation_rps: float = 0.0
    num_offered: int = 0
    ssd_left_bytes: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    counts: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Chaos:
    """Clients and one who moves nodes about, against a running server. All randomness but time comes from ``seed``."""

    def __init__(
        self,
        server: Server,
        questions: Sequence[Question],
        folder: Path,
        seconds: float,
        seed: int,
        overload: float = 0.0,
    ) -> None:
        self.server = server
        self._folder = folder
        self.questions = questions
        self.seed = seed
        self.outcome = Outcome()
        self._overload = overload
        self._begin = time.monotonic()
        self._deadline = self._begin + seconds
        self._clients_end = self._begin + CALIBRATION * seconds if overload else self._deadline
        # All that is offered above saturation is answered in the end: the longest wait is about as long as it lasts.
        self._timeout_s = CLIENT_TIMEOUT_S + overload * seconds
        self._lock = threading.Lock()

    def run(self) -> Outcome:
        """Until the deadline; then let every request end, look at what is left, flush, and look again."""
        threads = [threading.Thread(target=self._ask, args=(client,)) for client in range(NUM_CLIENTS)]
        threads.append(threading.Thread(target=self._move))
        for thread in threads:
            thread.start()
        for thread in threads[:-1]:
            thread.join()
        if self._overload:
            self._offer()
        threads[-1].join()
        if self.server.is_alive():
            self._settle()
        if not self.server.is_alive():
            self._report("the server died")
        log = self.server.log.read_text(errors="replace").splitlines()
        self.outcome.problems += [f"log: {line}" for line in log if any(word in line for word in BAD_WORDS)]
        return self.outcome

    # ---- clients

    def _ask(self, client: int) -> None:
        rng = random.Random(f"chaos-{self.seed}-{client}")
        while time.monotonic() < self._clients_end and self.server.is_alive():
            self._ask_one(rng)

    def _ask_one(self, rng: random.Random) -> None:
        question = rng.choice(self.questions)
        num_tokens = rng.randint(1, len(question.answer))
        try:
            if rng.random() < 0.04:
                self._hang_up(question, rng)
            else:
                self._compare(question, num_tokens)
        except (TimeoutError, NoAnswerInTime):
            with self._lock:
                self.outcome.num_hung += 1
            self._report(f"no answer within {self._timeout_s:g} s: prompt of {len(question.prompt)} tokens")
        except (ServerError, OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self._report(f"a request failed: {type(error).__name__}: {error}")
            time.sleep(0.2)

    def _offer(self) -> None:
        """Requests at a multiple of what the clients were answered per second, until the deadline; then wait for all
        answers. A thread for each, as nobody waits for those before."""
        lift_file_limit()
        rng = random.Random(f"chaos-{self.seed}-offered")
        outcome, took_s = self.outcome, time.monotonic() - self._begin
        outcome.saturation_rps = (outcome.num_requests + outcome.num_cut) / took_s
        threads = list[threading.Thread]()
        while self._goes_on() and outcome.saturation_rps > 0:
            time.sleep(rng.expovariate(self._overload * outcome.saturation_rps))
            one = random.Random(f"chaos-{self.seed}-offered-{len(threads)}")
            threads.append(threading.Thread(target=self._ask_one, args=(one,)))
            threads[-1].start()
        outcome.num_offered = len(threads)
        for thread in threads:
            thread.join()

    def _compare(self, question: Question, num_tokens: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"input_ids": question.prompt, "sampling_params": sampling}
        status, given = self.server.request("POST", "/generate", body, timeout_s=self._timeout_s)
        if status != 200:
            self._report(f"a request was answered {status}: {str(given)[:200]}")
            return
        ids, expected = tuple(given["output_ids"]), question.answer[:num_tokens]
        with self._lock:
            self.outcome.num_requests += 1
            self.outcome.num_tokens += num_tokens
            self.outcome.num_wrong += ids != expected
            self.outcome.sources.update(sources(given))
        if ids != expected:
            self._report(f"wrong: {ids}, expected {expected}; {len(question.prompt)} tokens, {sources(given)}")

    def _hang_up(self, question: Question, rng: random.Random) -> None:
        """Ask for a stream and leave before it ends."""
        sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        body = json.dumps({"input_ids": question.prompt, "sampling_params": sampling, "stream": True})
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=self._timeout_s)
        try:
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            if rng.random() < 0.5:
                connection.getresponse().readline()
            else:
                time.sleep(rng.uniform(0.0, 0.2))
        finally:
            connection.close()
        with self._lock:
            self.outcome.num_cut += 1

    # ---- the one who moves nodes, and looks

    def _move(self) -> None:
        """Now and then push nodes down, empty a tier, or take the SSD away and bring it back; check the cache every few
        seconds."""
        rng = random.Random(f"chaos-{self.seed}-moves")
        ways = (*("demote",) * 12, *("gpu",) * 3, *("host",) * 3, "ssd", "detach")
        next_check = time.monotonic() + CHECK_S
        while self._goes_on():
            time.sleep(rng.uniform(0.1, 1.5))
            try:
                if time.monotonic() > next_check:
                    next_check = time.monotonic() + CHECK_S
                    self._check()
                elif (way := rng.choice(ways)) == "demote":
                    self._demote(rng)
                elif way == "detach":
                    self._detach_and_attach()
                else:
                    self._post(f"flush {way}", f"/evicpress/flush?tier={way}", None, {200})
            except (ServerError, OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self._report(f"a move failed: {type(error).__name__}: {error}")

    def _demote(self, rng: random.Random) -> None:
        tier = rng.choice(("host", "ssd"))
        for node in reversed(nodes_of(self.server)[-10:]):
            self._post(
                f"demote {tier}",
                f"/evicpress/nodes/{node['id']}/demote",
                {"tier": tier, "hold_seconds": 0},
                {200, 404, 409},
            )

    def _detach_and_attach(self) -> None:
        """The folder is opened with faults too: what is refused is tried again."""
        self._post("detach", "/evicpress/tiers/ssd/detach", {}, {200})
        body = {"dir": str(self._folder), "gb": SSD_GB}
        deadline = time.monotonic() + SETTLE_S
        while not self._post("attach", "/evicpress/tiers/ssd", body, {200, 409}):
            if time.monotonic() > deadline or not self.server.is_alive():
                self._report("the SSD could not be attached again")
                return
            time.sleep(0.2)

    def _post(self, what: str, path: str, body: object, accepted: set[int]) -> bool:
        status, answer = self.server.request("POST", path, body)
        with self._lock:
            self.outcome.moves[what] += status == 200
        if status not in accepted:
            self._report(f"{what} answered {status}: {answer}")
        return status == 200

    def _check(self) -> None:
        status, answer = self.server.request("POST", "/evicpress/check", {})
        with self._lock:
            self.outcome.num_checks += 1
        if status != 200 or not answer["ok"]:
            self._report(f"check after {self.outcome.num_requests} requests: {status} {answer}")

    # ---- when it is over

    def _settle(self) -> None:
        described = self.server.get("/evicpress/tiers")
        self.outcome.counts, self.outcome.errors = described["counts"], described["errors"]
        self._check()
        self.server.flush()
        deadline = time.monotonic() + SETTLE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.5)
        if left:
            self._report(f"after the flush: {left}")
        self._check()
        counted = self.server.get("/evicpress/tiers")["tiers"]["ssd"]["used_bytes"]
        blocks = sum(path.stat().st_blocks for path in self._folder.glob("rank-*/*"))
        self.outcome.ssd_left_bytes = 512 * blocks
        if 512 * blocks > counted + MOST_UNCOUNTED_BYTES:
            self._report(f"after the flush: {512 * blocks} bytes on the disk, {counted} of them counted")

    def _left(self) -> str:
        """Leftovers once nothing runs and all was flushed; nothing is fine."""
        stats, described = self.server.get("/evicpress/stats"), self.server.get("/evicpress/tiers")
        host, ssd = described["tiers"]["host"], described["tiers"]["ssd"]
        found = {
            "slots": stats["total_slots"] - stats["free_slots"],
            "host bytes": host["used_bytes"],
            "host entries": host["num_entries"],
            "bytes being copied": host["copying_bytes"],
            "SSD entries": ssd["num_entries"],
            "requests waiting": described["requests_waiting_for_a_copy"],
            "jobs": sum(described["queue"].values()),
        }
        return ", ".join(f"{count} {what}" for what, count in found.items() if count)

    def _goes_on(self) -> bool:
        return time.monotonic() < self._deadline and self.server.is_alive()

    def _report(self, problem: str) -> None:
        with self._lock:
            self.outcome.problems.append(problem)


def draw_questions(model: Path, seed: int, number: int = NUM_QUESTIONS) -> list[Question]:
    """Prompts of 64 to 1500 tokens with the answers of a server without a cache."""
    rng = random.Random(f"chaos-{seed}")
    texts = Texts(rng, num_roots=number // 12)
    prompts = [texts.prompt() for _ in range(number)]
    with reference(model) as server:
        return answered(server, prompts, [NUM_ANSWER_TOKENS] * len(prompts))


def storm(
    seconds: float,
    seed: int = 0,
    page_size: int = 1,
    rates: str = RATES,
    keep_log: Path | None = None,
    overload: float = 0.0,
    num_questions: int = NUM_QUESTIONS,
) -> Outcome:
    """Record the right answers, start a server with faults, and ask it for so long.

    ``keep_log``: where its log goes if something was wrong. ``overload``: for the last two thirds of the time requests
    come at so many times the rate at which clients were answered in the first; 0 for clients all the time.
    """
    with scratch(1 << 29) as folder, tempfile.TemporaryDirectory() as models:
        model = make_peaky_model(Path(models) / "peaky")
        questions = draw_questions(model, seed, num_questions)
        env = {**CHECKS, "SGLANG_EVICPRESS_FAULTS": f"seed={seed},{rates}"}
        with Server(*arguments(folder / "ssd", page_size), model=model, env=env) as server:
            outcome = Chaos(server, questions, folder / "ssd", seconds, seed, overload).run()
            if outcome.problems and keep_log is not None:
                shutil.copy(server.log, keep_log)
            return outcome


def lines(outcome: Outcome, seconds: float, rates: str = RATES) -> list[Line]:
    errors = {reason: count for reason, count in sorted(outcome.errors.items()) if count}
    on_ssd = [reason for reason in errors if reason.startswith("ssd")]
    on_host = [reason for reason in errors if reason.startswith("host")]
    loaded = {place: outcome.sources[place] for place in ("device", "host", "storage")}
    offered = (
        f", then {outcome.num_offered} requests at a multiple of their {outcome.saturation_rps:.1f} answers/s"
        if outcome.num_offered
        else ""
    )
    others = [problem for problem in outcome.problems if not problem.startswith(("wrong", "no answer"))]
    return [
        Line(
            f"chaos for {seconds:g} s, {NUM_CLIENTS} clients{offered}, faults {rates}",
            "no wrong output, no hung request, the cache whole at every check, no leaked slot or byte, server alive",
            f"{outcome.num_requests} requests ({outcome.num_tokens} tokens), {outcome.num_wrong} wrong, "
            f"{outcome.num_hung} hung, {outcome.num_cut} cut off, {outcome.num_checks} checks, "
            f"{len(others)} other problems, {outcome.ssd_left_bytes} bytes left on the disk"
            + (f"; first: {outcome.problems[0][:300]}" if outcome.problems else ""),
            not outcome.problems and outcome.num_requests > 0 and outcome.num_checks > 1,
        ),
        Line(
            "the faults happened, and what failed was a counted miss",
            f"at least {LEAST_REASONS} reasons on SSD and one on the host; KV loaded from both",
            f"errors {errors}; tokens from GPU, host, SSD: {'/'.join(map(str, loaded.values()))}; "
            f"moves {dict(sorted(outcome.moves.items()))}; {outcome.counts}",
            len(on_ssd) >= LEAST_REASONS and len(on_host) >= 1 and min(loaded.values()) > 0,
        ),
    ]


def measure_chaos(seconds: float = 300.0, seed: int = 0, keep_log: Path | None = None) -> Iterator[Line]:
    yield from lines(storm(seconds, seed, keep_log=keep_log), seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of the storm (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--rates", default=RATES, help=f"of the faults (default: {RATES})")
    parser.add_argument(
        "--overload", type=float, default=0.0, metavar="TIMES", help="then offer so many times what was answered"
    )
    parser.add_argument("--keep-log", type=Path, help="where the server's log goes if something was wrong")
    options = parser.parse_args()
    outcome = storm(options.seconds, options.seed, options.page_size, options.rates, options.keep_log, options.overload)
    for problem in outcome.problems[:40]:
        print(f"  {problem}", flush=True)
    found = lines(outcome, options.seconds, options.rates)
    for line in found:
        print_line(line)
    return 0 if all(line.ok for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
