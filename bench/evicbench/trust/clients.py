"""Clients that stream from one server, and its operator, for one life of it: until it is killed, or comes to rest."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from evicbench.moves import nodes_of, sources, wait_until_idle
from evicbench.streams import posted
from evicbench.stress import FAILURES, Stress, started
from evicbench.testbed.server import ServerError, greedy
from evicbench.testbed.vocabulary import EOS, load_vocabulary
from evicbench.tiers.accounts import after_flush, at_rest
from evicbench.tiers.prompts import Question
from evicbench.tiers.restart import Stoppable
from evicbench.trust.memory import Memory, sampled
from sglang_evicpress.profiler.scorers.reference import token_f1

NUM_CLIENTS = 64
SSD_GB = 0.064
TIMEOUT_S = 60.0
SETTLE_S = 60.0
PAUSE_S = 10.0
"""All clients wait for so long now and then: the profiler has its turn, and slots and bytes are added up."""

QUANTISED = 0.1  # of the nodes, by the operator
CODECS = ("int8", "int4")
ABORTED = 0.05  # of the requests
KINDS = {"exact": 0.35, "any": 0.45, "budget": 0.2}
BUDGETS = (192, 512, 4096)
"""Tokens of KV that a request may keep; the last one has room for all."""


def is_exact(kind: str, budget: int, served: dict[str, Any], num_tokens: int) -> bool:
    """True of an answer that nothing lossy was served to, and that dropped nothing itself: it is that of the full
    computation. ``num_tokens``: of its prompt and answer."""
    return not served.get("lossy_tokens") and (kind != "budget" or budget >= num_tokens)


def f1(given: Sequence[int], right: Sequence[int]) -> float:
    """F1 of the tokens of an answer, up to where the right one ends."""
    end = load_vocabulary().ids[EOS]
    cut = [ids[: list(ids).index(end)] if end in ids else ids for ids in (given, right)]
    one, other = (" ".join(map(str, ids)) for ids in cut)
    return token_f1(one, other)


class Life(Stress):
    """``f1s``: of answers that lossy KV was served to, or that a budget cut, by kind of request. ``sources``: of the
    tokens of prompts. ``num_cut``: requests left by their clients, ``num_torn``: by the kill."""

    def __init__(
        self, server: Stoppable, questions: Sequence[Question], folder: Path, seed: str, seconds: float
    ) -> None:
        super().__init__(server, seconds)
        self.server: Stoppable = server
        self.num_exact = self.num_wrong = self.num_hung = self.num_cut = self.num_torn = self.num_rests = 0
        self.num_tokens = 0
        self.first_s: list[float] = []
        self.f1s: dict[str, list[float]] = {"any": [], "budget": []}
        self.sources, self.moves = Counter[str](), Counter[str]()
        self.memory = Memory(server.pid)
        self.last: dict[str, Any] = {}
        self._questions, self._folder, self._seed = questions, folder, seed
        self._may_ask, self._is_over, self._is_killed = threading.Event(), threading.Event(), False

    def run(self, *, is_killed: bool) -> None:
        """Until the deadline; then the server is killed while all ask, or all requests end and what is left is
        looked at."""
        self._may_ask.set()
        threads = started([*(partial(self._ask, client) for client in range(NUM_CLIENTS)), self._operate])
        with sampled(self.server.pid) as self.memory:
            while self.goes_on():
                time.sleep(0.1)
        self._look()
        if is_killed and self.server.is_alive():
            self.read_log()
            self._is_killed = True
            self.server.end(signal.SIGKILL)
        self._is_over.set()
        self._may_ask.set()
        for thread in threads:
            thread.join()
        if not is_killed:
            if self.server.is_alive():
                self._settle()
            self.read_log()

    def _look(self) -> None:
        with suppress(*FAILURES):
            self.last = {name: self.server.get(f"/evicpress/{name}") for name in ("stats", "tiers", "profiles")}

    # ---- clients

    def _ask(self, client: int) -> None:
        rng = random.Random(f"soak-{self._seed}-{client}")
        while not self._is_over.is_set() and self.server.is_alive():
            if not self._may_ask.wait(1.0):
                continue
            try:
                self._ask_one(rng)
            except TimeoutError:
                with self.lock:
                    self.num_hung += 1
                self.report(f"no answer within {TIMEOUT_S:g} s")
            except FAILURES as error:
                if self._is_killed:
                    with self.lock:
                        self.num_torn += 1
                    return
                self.report(f"a request failed: {type(error).__name__}: {error}")
                time.sleep(0.2)

    def _ask_one(self, rng: random.Random) -> None:
        question = rng.choice(self._questions)
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        num_new, budget = rng.randint(4, len(question.answer)), rng.choice(BUDGETS)
        body = greedy(question.prompt, num_new, stream=True)
        if kind == "exact":
            body["sampling_params"]["custom_params"] = {"kv_quality": "exact"}
        elif kind == "budget":
            body["sampling_params"]["custom_params"] = {"kv_decode_budget": budget}
        num_read = rng.randint(0, 3) if rng.random() < ABORTED else None
        begin = time.monotonic()
        with posted(self.server, body, timeout_s=TIMEOUT_S) as connection:
            if num_read == 0:
                time.sleep(rng.uniform(0.0, 0.5))
            events, first_s = ([], 0.0) if num_read == 0 else _events(connection.getresponse(), begin, num_read)
        if num_read is not None:
            with self.lock:
                self.num_cut += 1
            return
        self._judge(question, kind, budget, num_new, events, first_s)

    def _judge(
        self, question: Question, kind: str, budget: int, num_new: int, events: list[bytes], first_s: float
    ) -> None:
        if not events:
            raise ServerError("a stream without events")
        whole = json.loads(events[-1])
        if "error" in whole or len(whole["output_ids"]) != num_new:
            raise ServerError(f"answered {str(whole)[:300]}")
        ids, right = tuple(whole["output_ids"]), question.answer[:num_new]
        served = whole["meta_info"].get("kv_cache") or {}
        judged_exact = is_exact(kind, budget, served, len(question.prompt) + num_new)
        is_wrong = ids != right if judged_exact else False
        if kind == "exact" and not judged_exact:
            self.report(f"wrong: an exact request was served {served}")
        with self.lock:
            self.num_requests += 1
            self.num_tokens += num_new
            self.num_exact += judged_exact
            self.num_wrong += is_wrong
            self.first_s.append(first_s)
            self.sources.update(sources(whole))
            if not judged_exact and kind != "exact":
                self.f1s[kind].append(f1(ids, right))
        if is_wrong:
            self.report(f"wrong: {kind} {ids}, expected {right}; {len(question.prompt)} tokens, {served}, {budget}")

    # ---- the operator

    def _operate(self) -> None:
        """Take the SSD away and bring it back, move nodes down in coarser forms, let all rest, and again."""
        rng = random.Random(f"soak-{self._seed}-operator")
        steps = (self._detach_and_attach, partial(self._quantise, rng), self._rest)
        number = 0
        while not self._is_over.wait(rng.uniform(5.0, 12.0)):
            try:
                steps[number % len(steps)]()
            except FAILURES as error:
                if self._is_killed:
                    return
                self.report(f"the operator's step {number}: {type(error).__name__}: {error}")
            number += 1

    def _detach_and_attach(self) -> None:
        self.server.post("/evicpress/tiers/ssd/detach", {})
        self._is_over.wait(1.0)
        deadline = time.monotonic() + SETTLE_S
        body = {"dir": str(self._folder), "gb": SSD_GB}
        while (found := self.server.request("POST", "/evicpress/tiers/ssd", body))[0] != 200:
            if found[0] != 409 or time.monotonic() > deadline:
                self.report(f"the SSD could not be attached again: {found}")
                return
            time.sleep(0.2)
        self.moves["attached"] += 1

    def _quantise(self, rng: random.Random) -> None:
        """Some nodes go down through a codec, children first; then the cache is checked."""
        for node in reversed(nodes_of(self.server)):
            if rng.random() > QUANTISED or self._is_over.is_set():
                continue
            body = {"tier": rng.choice(("host", "ssd")), "codec": rng.choice(CODECS), "hold_seconds": 0}
            status, said = self.server.request("POST", f"/evicpress/nodes/{node['id']}/demote", body)
            self.moves[f"demoted {status}"] += 1
            if status not in (200, 404, 409):
                self.report(f"demotion answered {status}: {said}")
        self.check()

    def _rest(self) -> None:
        self._may_ask.clear()
        try:
            self._is_over.wait(PAUSE_S)
            if not self._is_over.is_set():
                self._account()
        finally:
            self._may_ask.set()

    def _account(self) -> None:
        """Slots and bytes once no user's request runs; what does not add up for some time is a problem."""
        deadline = time.monotonic() + SETTLE_S
        while left := list(at_rest(self.server.get("/evicpress/stats"), self.server.get("/evicpress/tiers"))):
            if time.monotonic() > deadline:
                self.report(f"at rest: {'; '.join(left)}")
                break
            time.sleep(0.2)
        self.num_rests += 1

    def _settle(self) -> None:
        wait_until_idle(self.server)
        self._account()
        self.check()
        self._look()
        self.server.flush()
        deadline = time.monotonic() + SETTLE_S
        while left := list(after_flush(self.server.get("/evicpress/stats"), self.server.get("/evicpress/tiers"))):
            if time.monotonic() > deadline:
                self.report(f"after the flush: {'; '.join(left)}")
                break
            time.sleep(0.5)
        self.check()


def _events(response: Any, begin: float, most: int | None) -> tuple[list[bytes], float]:
    """Events of a stream, the first ``most`` or all of them, and the seconds to the first."""
    events: list[bytes] = []
    first_s = 0.0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        if not events:
            first_s = time.monotonic() - begin
        events.append(line[6:])
        if len(events) == most:
            break
    return events, first_s
