"""A random storm on the real server: everything a client may do, at once, on a pool far too small for it.

The cache is checked every hundred requests while SGLang's own memory checks run after every scheduler step. When
the storm is over every request must have ended, the cache must be whole and, once flushed, every slot free again.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

from evicbench.report import Line
from evicbench.streams import posted
from evicbench.stress import CHECKS, FAILURES, Stress, started
from evicbench.testbed.server import GUESSED, Server, greedy
from evicbench.testbed.tasks import make_context
from evicbench.testbed.vocabulary import load_vocabulary

POOL_SLOTS = 2560
NUM_CLIENTS = 12
CHECK_EVERY = 100
FORMS = (
    *("keydiff@0.6", "keydiff@0.25", "knorm@0.5", "snapkv@0.5", "snapkv@0.2", "value_key_ratio@0.4"),
    *("value_key_ratio@0.1", "streaming@0.3", "random@0.5", "random@0.15"),
)
FAMILIES = ("needle", "mixed", "mapping", "hop", "record", "redundant")

Ids = list[int]


class Storm(Stress):
    """Clients and a presser against one running server. All randomness comes from ``seed``, all time from the clock."""

    def __init__(self, server: Server, seconds: float, seed: int, check_every: int = CHECK_EVERY) -> None:
        super().__init__(server, seconds)
        self.presses: Counter[str] = Counter()
        self.num_retracted = 0
        self._seed = seed
        self._check_every = check_every
        rng = random.Random(f"storm-{seed}")
        vocabulary = load_vocabulary()
        self._words = [word for word in vocabulary.ids if not word.startswith("<")]
        self._documents = [make_context(family, rng.randint(250, 900), rng).tokens for family in FAMILIES]
        self._encode: Callable[[Sequence[str]], Ids] = lambda words: vocabulary.encode(" ".join(words))
        self._jobs: dict[Callable[[random.Random], object], int] = {
            **{self._plain: 6, self._turns: 3, self._samples: 2, self._logprobs: 2, self._hang_up: 3},
            **{self._abort: 3, self._long: 1, self._too_long: 1, self._chat: 2, self._batch: 2},
        }

    def run(self) -> Self:
        """Blow until the deadline, let every request end, then look at what is left: a flush must free every slot."""
        for thread in started([*(partial(self._blow, client) for client in range(NUM_CLIENTS)), self._press]):
            thread.join()
        if self.server.is_alive():
            self.check()
            self.server.flush()
            stats = self.server.get("/evicpress/stats")
            if stats["free_slots"] != stats["total_slots"]:
                self.report(f"after the flush {stats['free_slots']} of {stats['total_slots']} slots are free")
            self.check()
        self.num_retracted = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", self.read_log())))
        return self

    # ---- the parts of a storm

    def _blow(self, client: int) -> None:
        rng = random.Random(f"storm-{self._seed}-{client}")
        while self.goes_on():
            (job,) = rng.choices(list(self._jobs), list(self._jobs.values()))
            try:
                job(rng)
            except FAILURES as error:
                self.report(f"{job.__name__}: {type(error).__name__}: {error}")
            with self.lock:
                self.num_requests += 1
                is_check_due = self.num_requests % self._check_every == 0
            if is_check_due and self.server.is_alive():
                self.check()

    def _press(self) -> None:
        """Force random nodes to random forms and evict now and then; looks at the tree as a user would."""
        rng = random.Random(f"storm-{self._seed}-press")
        while self.goes_on():
            time.sleep(rng.uniform(0.02, 0.3))
            nodes = self.server.get("/evicpress/tree")["nodes"]
            if not nodes:
                continue
            node, form = f"/evicpress/nodes/{rng.choice(nodes)['id']}", rng.choice(FORMS)
            if rng.random() < 0.1:
                self._ask("evict", {200}, "/evicpress/evict", {"num_slots": rng.randint(1, 400)})
            elif rng.random() < 0.1:
                self._ask("look", {200, 404}, f"{node}?positions=1&tokens=1", None)
            elif rng.random() < 0.02:
                self._ask("flush", {200, 400}, "/flush_cache", {})
            else:
                self._ask("compress", {200, 404, 409}, f"{node}/compress", {"form": form})

    def _ask(self, what: str, expected: set[int], path: str, body: object) -> Any:
        """The answer, None where its status is none of the ``expected`` ones."""
        status, answer = self.server.request("GET" if body is None else "POST", path, body)
        with self.lock:
            self.presses[f"{what} {status}"] += 1
        if status in expected:
            return answer
        self.report(f"{what} answered {status}: {answer}")
        return None

    # ---- what a client does

    def _plain(self, rng: random.Random) -> None:
        self._generate(self._prompt(rng), rng.randint(1, 24), extra_key=self._namespace(rng))

    def _turns(self, rng: random.Random) -> None:
        prompt, namespace = self._prompt(rng), self._namespace(rng)
        for _ in range(rng.randint(2, 4)):
            answer = self._generate(prompt, rng.randint(2, 20), extra_key=namespace)
            if answer is None:
                return
            prompt = [*prompt, *answer["output_ids"], *self._noise(rng, rng.randint(1, 60))]

    def _samples(self, rng: random.Random) -> None:
        sampling = {"temperature": 1.0, "n": rng.randint(2, 4), "max_new_tokens": rng.randint(1, 40)}
        self._generate(self._prompt(rng), 0, sampling_params=sampling)

    def _logprobs(self, rng: random.Random) -> None:
        prompt = self._prompt(rng)
        start = rng.randrange(len(prompt))
        self._generate(prompt, rng.randint(1, 8), return_logprob=True, logprob_start_len=start, top_logprobs_num=2)

    def _long(self, rng: random.Random) -> None:
        self._generate(self._prompt(rng, longest=300), rng.randint(200, 500))

    def _too_long(self, rng: random.Random) -> None:
        """Refused with a reason, or, where only the output does not fit, cut short."""
        prompt = self._noise(rng, POOL_SLOTS + rng.randint(0, 500))
        status, answer = self.server.request("POST", "/generate", greedy(prompt, 4))
        if status == 200:
            self.report(f"a prompt larger than the pool was answered: {str(answer)[:200]}")

    def _chat(self, rng: random.Random) -> None:
        words = [word for word in rng.choice(self._documents) if not word.startswith("<")]
        content = " ".join(words[: rng.randint(4, len(words))])
        body = {"model": "default", "messages": [{"role": "user", "content": content}]}
        body |= {"max_tokens": rng.randint(1, 24), "cache_salt": self._namespace(rng)}
        body |= {"temperature": rng.choice((0.0, 0.8)), "stop": rng.choice((None, ".", ["the", ";"]))}
        self._ask("chat", {200}, "/v1/chat/completions", body)

    def _batch(self, rng: random.Random) -> None:
        prefix = self._prompt(rng, longest=400)
        prompts = [[*prefix, *self._noise(rng, rng.randint(1, 40))] for _ in range(rng.randint(2, 5))]
        self._generate(prompts, rng.randint(1, 30))

    def _hang_up(self, rng: random.Random) -> None:
        """Stream one or two answers, read some events (or none) and close the connection."""
        body = greedy(self._prompt(rng), rng.randint(2, 120), stream=True)
        body["sampling_params"]["n"] = rng.randint(1, 2)
        with posted(self.server, body) as connection:
            if (num_events := rng.randint(0, 12)) == 0:
                time.sleep(rng.uniform(0.0, 0.3))
                return
            answer = connection.getresponse()
            if answer.status != 200:
                self.report(f"a stream was answered {answer.status}: {answer.read()[:300]!r}")
                return
            for _ in range(2 * num_events):  # an event and a blank line
                if not answer.readline():
                    return

    def _abort(self, rng: random.Random) -> None:
        rid = f"abort-{rng.getrandbits(60):x}"
        timer = threading.Timer(rng.uniform(0.0, 1.5), self._ask, ["abort", {200}, "/abort_request", {"rid": rid}])
        timer.start()
        self._ask(
            "aborted", {200, 400, 499, 503}, "/generate", greedy(self._prompt(rng), rng.randint(20, 150), rid=rid)
        )
        timer.join()

    # ---- helpers

    def _generate(self, input_ids: object, max_new_tokens: int, **fields: object) -> Any:
        """The answer of a request that nobody aborts; None where there is none."""
        answer = self._ask("request", {200}, "/generate", greedy(input_ids, max_new_tokens, **fields))
        endings = [each["meta_info"]["finish_reason"]["type"] for each in _listed(answer)]
        if "abort" in endings:
            self.report(f"a request nobody aborted was aborted: {str(answer)[:300]}")
        return answer

    def _prompt(self, rng: random.Random, longest: int = 900) -> Ids:
        """A document cut anywhere, then something of its own."""
        tokens = self._encode(rng.choice(self._documents))
        cut = rng.choice((len(tokens), rng.randint(1, len(tokens))))
        return tokens[: min(cut, longest)] + self._noise(rng, rng.choice((1, 3, 17, rng.randint(1, 120))))

    def _noise(self, rng: random.Random, count: int) -> Ids:
        return self._encode(rng.choices(self._words, k=count))

    def _namespace(self, rng: random.Random) -> str | None:
        return rng.choice((None, None, None, "left", "right"))


def _listed(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [] if answer is None else [answer]


def arguments(page_size: int) -> list[str]:
    """A tiny pool, small chunks and every press."""
    return [
        *("--kv-policy", "evicpress", *GUESSED, "--kv-forms", ",".join(FORMS), "--kv-min-compress-tokens", "16"),
        *("--page-size", str(page_size), "--max-total-tokens", str(POOL_SLOTS), "--max-running-requests", "8"),
        *("--chunked-prefill-size", "64" if page_size == 1 else "128"),
    ]


def measure(page_size: int, seconds: float, seed: int) -> Line:
    with Server(*arguments(page_size), env=CHECKS) as server:
        storm = Storm(server, seconds, seed).run()
    print(*(f"    {problem}\n" for problem in storm.problems[:5]), sep="", end="", flush=True)
    num_compressed = storm.presses["compress 200"]
    return Line(
        f"No leak, ever: random storm of {seconds:g} s, page size {page_size}",
        f"every check clean (every {CHECK_EVERY} requests), all slots free after a flush, nothing in the log",
        f"{storm.num_requests} requests, {storm.num_checks} checks, {num_compressed} forced compressions, "
        f"{storm.num_retracted} retractions, {len(storm.problems)} problems",
        not storm.problems and storm.num_requests > 0 and num_compressed > 0,
    )
