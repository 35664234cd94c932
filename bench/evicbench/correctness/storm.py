"""A random storm on the real server: everything a client may do, at once, on a pool far too small for it.

The cache is checked every hundred requests while SGLang's own memory checks run after every scheduler step. When
the storm is over every request must have ended, the cache must be whole and, once flushed, every slot free again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evicbench.report import Line, print_line
from evicbench.testbed.server import GUESSED, Server, ServerError
from evicbench.testbed.tasks import make_context
from evicbench.testbed.vocabulary import load_vocabulary

POOL_SLOTS = 2560
NUM_CLIENTS = 12
CHECK_EVERY = 100
FORMS = (
    "keydiff@0.6,keydiff@0.25,knorm@0.5,snapkv@0.5,snapkv@0.2,"
    "value_key_ratio@0.4,value_key_ratio@0.1,streaming@0.3,random@0.5,random@0.15"
)
CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
BAD_WORDS = ("Traceback", "leak", "Detected", "use-after-free", "double free", "Scheduler hit an exception")

Ids = list[int]


@dataclass(slots=True)
class Outcome:
    """Result of a storm: counts by kind of request and everything that should not have been."""

    requests: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    presses: Counter[str] = field(default_factory=Counter)
    num_checks: int = 0
    num_retracted: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return self.requests.total()


class Storm:
    """Clients and a presser against one running server. All randomness comes from ``seed``, all time from the clock."""

    def __init__(self, server: Server, seconds: float, seed: int, check_every: int = CHECK_EVERY) -> None:
        self.server = server
        self.seed = seed
        self.outcome = Outcome()
        self._deadline = time.monotonic() + seconds
        self._check_every = check_every
        self._lock = threading.Lock()
        rng = random.Random(f"storm-{seed}")
        families = ("needle", "mixed", "mapping", "hop", "record", "redundant")
        vocabulary = load_vocabulary()
        self._words = [word for word in vocabulary.ids if not word.startswith("<")]
        self._documents = [make_context(family, rng.randint(250, 900), rng).tokens for family in families]
        self._encode: Callable[[Sequence[str]], Ids] = lambda words: vocabulary.encode(" ".join(words))
        self._jobs: tuple[tuple[int, Callable[[random.Random], str]], ...] = (
            (6, self._plain),
            (3, self._turns),
            (2, self._samples),
            (2, self._logprobs),
            (3, self._hang_up),
            (3, self._abort),
            (1, self._long),
            (1, self._too_long),
            (2, self._chat),
            (2, self._batch),
        )

    def run(self) -> Outcome:
        """Blow until the deadline, let every request end, then look at what is left."""
        threads = [threading.Thread(target=self._blow, args=(i,)) for i in range(NUM_CLIENTS)]
        threads.append(threading.Thread(target=self._press))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.server.is_alive():
            self._check()
            self._settle()
        else:
            self._report("the server died")
        log = self.server.log.read_text(errors="replace").splitlines()
        self.outcome.num_retracted = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", "\n".join(log))))
        self.outcome.problems += [f"log: {line}" for line in log if any(word in line for word in BAD_WORDS)]
        return self.outcome

    # ---- the parts of a storm

    def _blow(self, client: int) -> None:
        rng = random.Random(f"storm-{self.seed}-{client}")
        weights = [weight for weight, _ in self._jobs]
        while self._goes_on():
            job = rng.choices(self._jobs, weights)[0][1]
            kind = job.__name__.strip("_")
            try:
                ending = job(rng)
            except (ServerError, OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self._report(f"{kind}: {type(error).__name__}: {error}")
                ending = "failed"
            with self._lock:
                self.outcome.requests[kind] += 1
                self.outcome.endings[f"{kind} {ending}"] += 1
                is_check_due = self.outcome.num_requests % self._check_every == 0
            if is_check_due and self.server.is_alive():
                self._check()

    def _press(self) -> None:
        """Force random nodes to random forms and evict now and then; looks at the tree as a user would."""
        rng = random.Random(f"storm-{self.seed}-press")
        forms = FORMS.split(",")
        while self._goes_on():
            time.sleep(rng.uniform(0.02, 0.3))
            nodes = self.server.get("/evicpress/tree")["nodes"]
            if not nodes:
                continue
            node, form = rng.choice(nodes), rng.choice(forms)
            if rng.random() < 0.1:
                self._ask("evict", {200}, "/evicpress/evict", {"num_slots": rng.randint(1, 400)})
            elif rng.random() < 0.1:
                self._ask("look", {200, 404}, f"/evicpress/nodes/{node['id']}?positions=1&tokens=1", None)
            elif rng.random() < 0.02:
                self._ask("flush", {200, 400}, "/flush_cache", {})
            else:
                self._ask("compress", {200, 404, 409}, f"/evicpress/nodes/{node['id']}/compress", {"form": form})

    def _ask(self, what: str, expected: set[int], path: str, body: object) -> None:
        status, answer = self.server.request("GET" if body is None else "POST", path, body)
        with self._lock:
            self.outcome.presses[f"{what} {status}"] += 1
        if status not in expected:
            self._report(f"{what} answered {status}: {answer}")

    def _check(self) -> None:
        status, answer = self.server.request("POST", "/evicpress/check", {})
        with self._lock:
            self.outcome.num_checks += 1
        if status != 200 or not answer["ok"]:
            self._report(f"check after {self.outcome.num_requests} requests: {status} {answer}")

    def _settle(self) -> None:
        """Once nothing runs, a flush must give every slot back."""
        self.server.flush()
        stats = self.server.get("/evicpress/stats")
        if stats["free_slots"] != stats["total_slots"]:
            self._report(f"after the flush {stats['free_slots']} of {stats['total_slots']} slots are free")
        self._check()

    def _goes_on(self) -> bool:
        return time.monotonic() < self._deadline and self.server.is_alive()

    def _report(self, problem: str) -> None:
        with self._lock:
            self.outcome.problems.append(problem)

    # ---- what a client does; each returns how it ended

    def _plain(self, rng: random.Random) -> str:
        return self._generate(self._prompt(rng), rng.randint(1, 24), extra_key=self._namespace(rng))

    def _turns(self, rng: random.Random) -> str:
        prompt, namespace = self._prompt(rng), self._namespace(rng)
        ending = "stop"
        for _ in range(rng.randint(2, 4)):
            status, answer = self._post(prompt, rng.randint(2, 20), extra_key=namespace)
            ending = self._ending(status, answer)
            if status != 200:
                break
            prompt = [*prompt, *answer["output_ids"], *self._noise(rng, rng.randint(1, 60))]
        return ending

    def _samples(self, rng: random.Random) -> str:
        sampling = {"temperature": 1.0, "n": rng.randint(2, 4), "max_new_tokens": rng.randint(1, 40)}
        return self._generate(self._prompt(rng), 0, sampling_params=sampling)

    def _logprobs(self, rng: random.Random) -> str:
        prompt = self._prompt(rng)
        fields = {"return_logprob": True, "logprob_start_len": rng.randrange(len(prompt)), "top_logprobs_num": 2}
        return self._generate(prompt, rng.randint(1, 8), **fields)

    def _long(self, rng: random.Random) -> str:
        return self._generate(self._prompt(rng, longest=300), rng.randint(200, 500))

    def _too_long(self, rng: random.Random) -> str:
        """Refused with a reason, or, where only the output does not fit, cut short."""
        status, answer = self._post(self._noise(rng, POOL_SLOTS + rng.randint(0, 500)), 4)
        if status == 200:
            self._report(f"a prompt larger than the pool was answered: {str(answer)[:200]}")
        return str(status)

    def _chat(self, rng: random.Random) -> str:
        words = [word for word in self._document(rng) if not word.startswith("<")]
        body: dict[str, object] = {
            "model": "default",
            "messages": [{"role": "user", "content": " ".join(words[: rng.randint(4, len(words))])}],
            "max_tokens": rng.randint(1, 24),
            "cache_salt": self._namespace(rng),
            "temperature": rng.choice((0.0, 0.8)),
            "stop": rng.choice((None, ".", ["the", ";"])),
        }
        status, answer = self.server.request("POST", "/v1/chat/completions", body)
        if status != 200:
            self._report(f"chat answered {status}: {answer}")
        return str(status)

    def _batch(self, rng: random.Random) -> str:
        prefix = self._prompt(rng, longest=400)
        prompts = [[*prefix, *self._noise(rng, rng.randint(1, 40))] for _ in range(rng.randint(2, 5))]
        sampling = {"temperature": 0, "max_new_tokens": rng.randint(1, 30), "ignore_eos": True}
        status, answer = self.server.request("POST", "/generate", {"input_ids": prompts, "sampling_params": sampling})
        if status != 200:
            self._report(f"a batch was answered {status}: {answer}")
        return str(status)

    def _hang_up(self, rng: random.Random) -> str:
        """Stream one or two answers, read some events (or none) and close the connection."""
        sampling = {"temperature": 0, "max_new_tokens": rng.randint(2, 120), "n": rng.randint(1, 2), "ignore_eos": True}
        body = {"input_ids": self._prompt(rng), "sampling_params": sampling, "stream": True}
        return self._stream(json.dumps(body), rng.randint(0, 12), rng)

    def _abort(self, rng: random.Random) -> str:
        rid = f"abort-{rng.getrandbits(60):x}"
        timer = threading.Timer(rng.uniform(0.0, 1.5), self._post_abort, [rid])
        timer.start()
        status, answer = self._post(self._prompt(rng), rng.randint(20, 150), rid=rid)
        timer.join()
        if status not in (200, 400, 499, 503):
            self._report(f"an aborted request was answered {status}: {answer}")
        return str(status)

    # ---- helpers

    def _document(self, rng: random.Random) -> Sequence[str]:
        return rng.choice(self._documents)

    def _prompt(self, rng: random.Random, longest: int = 900) -> Ids:
        """A document cut anywhere, then something of its own."""
        tokens = self._encode(self._document(rng))
        cut = rng.choice((len(tokens), rng.randint(1, len(tokens))))
        return tokens[: min(cut, longest)] + self._noise(rng, rng.choice((1, 3, 17, rng.randint(1, 120))))

    def _noise(self, rng: random.Random, count: int) -> Ids:
        return self._encode(rng.choices(self._words, k=count))

    def _namespace(self, rng: random.Random) -> str | None:
        return rng.choice((None, None, None, "left", "right"))

    def _post(self, prompt: Ids, max_new_tokens: int, **fields: object) -> tuple[int, Any]:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        return self.server.request("POST", "/generate", {"input_ids": prompt, "sampling_params": sampling, **fields})

    def _generate(self, prompt: Ids, max_new_tokens: int, **fields: object) -> str:
        return self._ending(*self._post(prompt, max_new_tokens, **fields))

    def _ending(self, status: int, answer: Any) -> str:
        """A request nobody aborts must be answered in full."""
        if status != 200:
            self._report(f"a request was answered {status}: {answer}")
            return str(status)
        answers = answer if isinstance(answer, list) else [answer]
        endings = {each["meta_info"]["finish_reason"]["type"] for each in answers}
        if "abort" in endings:
            self._report(f"a request nobody aborted was aborted: {str(answer)[:300]}")
        return "+".join(sorted(endings))

    def _post_abort(self, rid: str) -> None:
        status, answer = self.server.request("POST", "/abort_request", {"rid": rid})
        if status != 200:
            self._report(f"abort answered {status}: {answer}")

    def _stream(self, body: str, num_events: int, rng: random.Random) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        try:
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            if num_events == 0:
                time.sleep(rng.uniform(0.0, 0.3))
                return "unread"
            answer = connection.getresponse()
            if answer.status != 200:
                self._report(f"a stream was answered {answer.status}: {answer.read()[:300]!r}")
                return str(answer.status)
            for _ in range(2 * num_events):  # an event and a blank line
                if not answer.readline():
                    return "complete"
            return "hung up"
        finally:
            connection.close()


def arguments(page_size: int) -> list[str]:
    """A tiny pool, small chunks and every press."""
    return [
        *("--kv-policy", "evicpress", *GUESSED, "--kv-forms", FORMS, "--kv-min-compress-tokens", "16"),
        *("--page-size", str(page_size), "--max-total-tokens", str(POOL_SLOTS), "--max-running-requests", "8"),
        *("--chunked-prefill-size", "64" if page_size == 1 else "128"),
    ]


def storm(
    seconds: float,
    page_size: int,
    seed: int,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    check_every: int = CHECK_EVERY,
    keep_log: Path | None = None,
) -> Outcome:
    """Start a server and run a storm on it.

    ``keep_log``: where the server's log goes if something was wrong.
    """
    with Server(*arguments(page_size), *extra_args, env={**CHECKS, **(env or {})}) as server:
        outcome = Storm(server, seconds, seed, check_every).run()
        if outcome.problems and keep_log is not None:
            shutil.copy(server.log, keep_log)
        return outcome


def line(outcome: Outcome, page_size: int, seconds: float) -> Line:
    return Line(
        f"No leak, ever: random storm of {seconds:g} s, page size {page_size}",
        f"every check clean (every {CHECK_EVERY} requests), all slots free after a flush, nothing in the log",
        f"{outcome.num_requests} requests, {outcome.num_checks} checks, "
        f"{outcome.presses['compress 200']} forced compressions, {outcome.num_retracted} retractions, "
        f"{len(outcome.problems)} problems",
        not outcome.problems and outcome.num_requests > 0 and outcome.presses["compress 200"] > 0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each page size (default: 600)")
    parser.add_argument("--page-size", type=int, action="append", help="may be repeated (default: 1 and 16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=CHECK_EVERY, help="requests between two integrity checks")
    parser.add_argument("--keep-log", type=Path, help="where the server's log goes if something was wrong")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the server")
    parser.add_argument("server_args", nargs="*", help="further server arguments, after --")
    options = parser.parse_args()
    env = dict(pair.split("=", 1) for pair in options.env)
    is_ok = True
    for page_size in options.page_size or (1, 16):
        outcome = storm(
            options.seconds,
            page_size,
            options.seed,
            options.server_args,
            env,
            options.check_every,
            options.keep_log,
        )
        for counts in (outcome.requests, outcome.endings, outcome.presses):
            print(f"  {dict(sorted(counts.items()))}", flush=True)
        for problem in outcome.problems[:40]:
            print(f"  {problem}", flush=True)
        result = line(outcome, page_size, options.seconds)
        print_line(result)
        is_ok &= result.ok
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
