"""Scenarios of SGLang's own behaviour suites, written anew: each asks a server and says what it was answered.

The servers of a pair get the same requests. A scenario's answers are what must not depend on the cache; what it
counts is proof that the behaviour happened.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from evicbench.moves import sources
from evicbench.streams import posted
from evicbench.testbed.server import Server, ServerError, greedy
from evicbench.testbed.tasks import make_context
from evicbench.testbed.vocabulary import load_vocabulary

CHUNK_TOKENS = 128
POOL_SLOTS = 3000
NUM_RUNNING = 6
NUM_CONCURRENT = 4
FAMILIES = ("needle", "multikv", "mapping", "hop", "record", "mixed")
NUM_CONTEXTS = 16
PAUSED_S = 1.0

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """Greedy tokens, their log probabilities, by how much each led the second, and those of the prompt's tokens."""

    tokens: Ids
    logprobs: tuple[float, ...]
    leads: tuple[float, ...]
    of_prompt: tuple[float, ...] = ()


@dataclass(slots=True)
class Played:
    """``given`` in the order asked; ``counts``: what happened; ``sources``: of the prompts' tokens."""

    given: list[Given] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Any) -> None:
        info = answer["meta_info"]
        pairs = [[one[0] for one in step[:2]] for step in info["output_top_logprobs"]]
        of_prompt = [one[0] for one in info.get("input_token_logprobs") or () if one[0] is not None]
        tokens, logprobs = tuple(answer["output_ids"]), tuple(one[0] for one in info["output_token_logprobs"])
        self.given.append(Given(tokens, logprobs, tuple(best - second for best, second in pairs), tuple(of_prompt)))
        self.sources.update(sources(answer))
        self.counts["retractions"] += info.get("num_retractions") or 0


Scenario = Callable[[Server, random.Random], Played]


def contexts_of(seed: str) -> list[Ids]:
    """More than the pool and host memory of a server hold."""
    rng, vocabulary = random.Random(f"behaviours-{seed}"), load_vocabulary()
    lengths = [rng.randint(200, 900) for _ in range(NUM_CONTEXTS)]
    made = [make_context(FAMILIES[at % len(FAMILIES)], length, rng) for at, length in enumerate(lengths)]
    return [tuple(vocabulary.encode(each.prompt(each.questions[0].text))) for each in made]


def body_of(prompt: Sequence[int], num_new: int, **fields: Any) -> dict[str, Any]:
    return greedy(list(prompt), num_new, return_logprob=True, top_logprobs_num=2, **fields)


def ask_all(server: Server, bodies: Sequence[dict[str, Any]], played: Played, at_once: int = NUM_CONCURRENT) -> None:
    """Add all answers, in order; of a request with n > 1 all of its own."""
    with ThreadPoolExecutor(at_once) as pool:
        for answer in pool.map(lambda body: server.post("/generate", body), bodies):
            for each in answer if isinstance(answer, list) else [answer]:
                played.add(each)


def drawn(rng: random.Random, count: int, num_new: int, **fields: Any) -> list[dict[str, Any]]:
    """Requests about contexts in random order, some left in the middle, each with a few tokens of its own."""
    contexts = contexts_of("shared")
    bodies = []
    for _ in range(count):
        context = rng.choice(contexts)
        cut = len(context) if rng.random() < 0.6 else rng.randint(50, len(context))
        bodies.append(
            body_of([*context[:cut], *(rng.randrange(10, 300) for _ in range(rng.randint(1, 6)))], num_new, **fields)
        )
    return bodies


# ---- the scenarios


def chunked_prefill(server: Server, rng: random.Random) -> Played:
    """Prompts of many chunks, begun while others are answered."""
    played = Played()
    contexts = contexts_of("shared")
    joined = [[*rng.choice(contexts), *rng.choice(contexts)] for _ in range(8)]
    bodies = [body_of(prompt, 8) for prompt in joined] + drawn(rng, 24, 12)
    rng.shuffle(bodies)
    ask_all(server, bodies, played)
    played.counts["prompts of several chunks"] = sum(len(body["input_ids"]) > 2 * CHUNK_TOKENS for body in bodies)
    return played


def abort_storm(server: Server, rng: random.Random) -> Played:
    """Half of all requests are aborted, by name, by hanging up and all at once; the others are answered as ever."""
    played = Played()
    for number in range(6):
        victims = [{**body, "rid": f"victim-{number}-{at}"} for at, body in enumerate(drawn(rng, 8, 200))]
        threads = [threading.Thread(target=_abort, args=(server, body, rng.random())) for body in victims]
        for thread in threads:
            thread.start()
        ask_all(server, drawn(rng, 8, 8), played)
        if number % 2:
            server.post("/abort_request", {"abort_all": True})
        for thread in threads:
            thread.join()
        played.counts["aborted"] += len(victims)
    ask_all(server, drawn(rng, 8, 8), played)
    return played


def _abort(server: Server, body: dict[str, Any], way: float) -> None:
    with posted(server, {**body, "stream": True}) as connection:
        time.sleep(way)
        if way < 0.5:
            server.post("/abort_request", {"rid": body["rid"]})
            connection.getresponse().read()


def retraction(server: Server, rng: random.Random) -> Played:
    """Long answers that together do not fit: some lose their slots and are computed again."""
    played = Played()
    bodies = [body_of([rng.randrange(10, 300) for _ in range(rng.randint(150, 300))], 500) for _ in range(10)]
    for body in bodies:  # for one that ignores <eos> SGLang keeps room to its end
        body["sampling_params"] |= {"ignore_eos": False, "min_new_tokens": 500}
    others = drawn(rng, 16, 8)
    ask_all(server, others, played)
    ask_all(server, bodies, played, len(bodies))
    ask_all(server, others, played)
    return played


def sessions(server: Server, rng: random.Random) -> Played:
    """Turns that are appended to, a branch from the middle, and a turn that is replaced."""
    played = Played()
    for context in rng.sample(contexts_of("shared"), 6):
        session = server.post("/open_session", {"capacity_of_str_len": 100_000})
        rids: list[str] = []
        for turn in range(4):
            new = context if turn == 0 else [rng.randrange(10, 300) for _ in range(rng.randint(5, 60))]
            params: dict[str, Any] = {"id": session, "rid": rids[-1] if rids else None}
            answer = server.post("/generate", body_of(new, 8, session_params=params))
            played.add(answer)
            rids.append(answer["meta_info"]["id"])
        ask_all(server, drawn(rng, 3, 4), played)  # pushes the session's KV down
        for params in ({"rid": rids[1]}, {"rid": rids[2], "replace": True}, {"rid": rids[0], "offset": 40}):
            new = [rng.randrange(10, 300) for _ in range(20)]
            played.add(server.post("/generate", body_of(new, 8, session_params={"id": session, **params})))
            played.counts["branches"] += 1
        server.request("POST", "/close_session", {"session_id": session})
        played.counts["sessions"] += 1
    return played


def logprobs(server: Server, rng: random.Random) -> Played:
    """Log probabilities of prompts from their start, their middle and their end on, and of tokens by name."""
    played = Played()
    bodies = drawn(rng, 30, 8)
    for at, body in enumerate(bodies):
        body["logprob_start_len"] = (-1, 0, len(body["input_ids"]) // 2)[at % 3]
        body["token_ids_logprob"] = [11, 42]
    ask_all(server, bodies, played)
    played.counts["of tokens of prompts"] = sum(len(each.of_prompt) for each in played.given)
    return played


def several_answers(server: Server, rng: random.Random) -> Played:
    """n > 1, greedy: all alike; and sampled ones, of which there are as many as were asked for."""
    played = Played()
    bodies = drawn(rng, 12, 10)
    for body in bodies:
        body["sampling_params"]["n"] = rng.randint(2, 4)
    ask_all(server, bodies, played)
    starts = list(accumulate((body["sampling_params"]["n"] for body in bodies), initial=0))
    played.counts["answers"] = len(played.given)
    played.counts["unlike each other"] = sum(
        len({each.tokens for each in played.given[begin:end]}) > 1
        for begin, end in zip(starts, starts[1:], strict=False)
    )
    for body in drawn(rng, 4, 10):
        body["sampling_params"] |= {"n": 4, "temperature": 1.0}
        played.counts["sampled"] += len(server.post("/generate", body))
    return played


_NOUN = "[bdfgklmnprstvz][aeiou][bdfgklmnprstvz]"
PATTERNS = (r"(code|log)([a-z][0-9]){3}", r"([a-z][0-9]){4}", f"(title|note):({_NOUN}){{2}}")
"""The testbed's tokens have no blanks in them, and a part of a pattern is a token: else an answer can come to a place
where no token goes on."""


def constrained(server: Server, rng: random.Random) -> Played:
    """Regular expressions, by outlines: what is answered matches, and is the same."""
    played = Played()
    bodies = drawn(rng, 18, 24)
    for at, body in enumerate(bodies):
        body["sampling_params"] |= {"regex": PATTERNS[at % len(PATTERNS)], "ignore_eos": False}
    with ThreadPoolExecutor(NUM_CONCURRENT) as pool:
        answers = list(pool.map(lambda body: server.post("/generate", body), bodies))
    for body, answer in zip(bodies, answers, strict=True):
        played.add(answer)
        is_match = re.fullmatch(body["sampling_params"]["regex"], answer["text"].replace(" ", "")) is not None
        played.counts["matching" if is_match else "not matching"] += 1
    return played


def flush(server: Server, rng: random.Random) -> Played:
    """Refused while requests run; an empty cache afterwards, and the same answers."""
    played, bodies = Played(), drawn(rng, 24, 8)
    with running(server, rng) as answers:
        status, _ = server.request("POST", "/flush_cache")
        played.counts["refused"] += status == 400
        played.counts["answered"] += len([each.result() for each in answers])
    for _ in range(3):
        server.flush()
        first = server.post("/generate", bodies[0])
        played.add(first)
        played.counts["cached after a flush"] += first["meta_info"]["cached_tokens"]
        played.counts["flushes"] += 1
        ask_all(server, bodies[1:], played)
    return played


def pause(server: Server, rng: random.Random) -> Played:
    """Streams that stand still while the server is paused, and go on as if nothing had been; or end, if so asked."""
    played = Played()
    for mode in ("in_place", "retract", "abort"):
        with running(server, rng) as answers:
            server.post("/pause_generation", {"mode": mode})
            num_done = sum(each.done() for each in answers)
            time.sleep(PAUSED_S)
            if mode != "abort":
                played.counts[f"went on while paused, {mode}"] += sum(each.done() for each in answers) - num_done
                played.counts[f"paused, {mode}"] += len(answers) - num_done
            server.post("/continue_generation", {})
            for each in answers:
                answer = each.result()
                ending = answer["meta_info"]["finish_reason"]["type"]
                if mode == "abort":
                    played.counts["aborted"] += ending == "abort"
                else:
                    played.add(answer)
        ask_all(server, drawn(rng, 8, 8), played)
    return played


@contextmanager
def running(server: Server, rng: random.Random, count: int = NUM_CONCURRENT) -> Iterator[list[Future[Any]]]:
    """Streams of long answers that have begun."""
    with ThreadPoolExecutor(count) as pool:
        bodies = [{**body, "stream": True} for body in drawn(rng, count, 250)]
        has_begun = [threading.Event() for _ in bodies]
        answers = [pool.submit(_streamed, server, *pair) for pair in zip(bodies, has_begun, strict=True)]
        for event in has_begun:
            event.wait(60.0)
        yield answers


def _streamed(server: Server, body: dict[str, Any], has_begun: threading.Event) -> Any:
    last = b"{}"
    with posted(server, body) as connection:
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                last = line[6:]
                has_begun.set()
    whole = json.loads(last)
    if "meta_info" not in whole:
        raise ServerError(f"a stream ended with {str(whole)[:200]}")
    return whole


def weight_updates(other: Path, first: Path) -> Scenario:
    """Other weights and back: no answer is of the KV of the ones before."""

    def play(server: Server, rng: random.Random) -> Played:
        played, bodies = Played(), drawn(rng, 10, 8)
        for model in (first, other, first):
            answer = server.post("/update_weights_from_disk", {"model_path": str(model)})
            played.counts["updates"] += bool(answer["success"])
            ask_all(server, bodies * 2, played)
        asked = 2 * len(bodies)
        before, between = ([each.tokens for each in played.given[at : at + asked]] for at in (0, asked))
        played.counts["answers that changed"] = sum(one != two for one, two in zip(before, between, strict=True))
        return played

    return play


def adapters(server: Server, rng: random.Random) -> Played:
    """The same prompts to two adapters and to neither, in turn."""
    played = Played()
    bodies, names = drawn(rng, 14, 8), ("one", "two", None)
    asked = [{**body, "lora_path": name} for body in bodies * 2 for name in names]
    ask_all(server, asked, played)
    trios = [played.given[at : at + 3] for at in range(0, len(asked), 3)]
    played.counts["prompts"] = len(bodies)
    played.counts["answered otherwise by adapters"] = sum(len({each.tokens for each in trio}) > 1 for trio in trios)
    return played
