"""Servers that share an external store: one hits what the other has computed; a store that fails costs only hits."""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from evicbench.moves import wait_until_idle
from evicbench.report import Line
from evicbench.testbed.server import Server
from evicbench.tiers.inputs import scratch
from evicbench.trust.mooncake import MooncakeStore
from sglang_evicpress.tiers.external.entries import LEVELS

NUM_CONTEXTS, NUM_TOKENS, NUM_ANSWERED = 12, 1500, 8
ENTRY_MB = 5
"""Of each context."""

SALT = "a salt"
MOST_SLOWER = 2.0
"""Of computing, and a second for whatever else the machine does: a request while the store fails."""


@dataclass(slots=True)
class Answer:
    tokens: list[int]
    num_cached: int
    seconds: float


@dataclass(slots=True)
class Contexts:
    """Random contexts, and what a server answers that computes them."""

    prompts: list[list[int]]
    truth: list[list[int]] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)

    @classmethod
    def drawn(cls, seed: str, number: int = NUM_CONTEXTS) -> Contexts:
        rng = random.Random(seed)
        return cls([[rng.randrange(5, 500) for _ in range(NUM_TOKENS)] for _ in range(number)])


def flags(backend: str, config: dict[str, object]) -> tuple[str, ...]:
    return (
        *("--kv-policy", "evicpress", "--kv-forms", "exact", "--kv-host-gb", "0.5", "--max-total-tokens", "40000"),
        *("--kv-external-backend", backend, "--kv-external-config", json.dumps(config)),
    )


def ask(server: Server, prompt: Sequence[int], **fields: object) -> Answer:
    begin = time.perf_counter()
    found = server.generate(list(prompt), NUM_ANSWERED, **fields)
    seconds = time.perf_counter() - begin
    return Answer(found["output_ids"], found["meta_info"]["cached_tokens"], seconds)


def external(server: Server) -> dict[str, object]:
    """Section of the store in /evicpress/tiers."""
    found: dict[str, object] = server.get("/evicpress/tiers")["tiers"]["external"]
    return found


def compute(server: Server, contexts: Contexts) -> None:
    """Answers of a server that has none of the contexts, which it then publishes."""
    for prompt in contexts.prompts:
        answer = ask(server, prompt)
        contexts.truth.append(answer.tokens)
        contexts.computed_s.append(answer.seconds)
    wait_until_published(server)


def wait_until_published(server: Server, seconds: float = 30.0) -> None:
    wait_until_idle(server)
    deadline, before = time.monotonic() + seconds, -1
    while time.monotonic() < deadline:
        now = int(str(external(server)["num_published"]))
        if now == before:
            return
        before = now
        time.sleep(2.0)


def shared_line(name: str, server: Server, contexts: Contexts) -> Line:
    """Another server is asked for all contexts, each once."""
    answers = [ask(server, prompt) for prompt in contexts.prompts]
    num_hit = sum(answer.num_cached >= NUM_TOKENS - 1 for answer in answers)
    num_wrong = sum(answer.tokens != truth for answer, truth in zip(answers, contexts.truth, strict=True))
    loaded_s = [answer.seconds for answer in answers if answer.num_cached]
    medians = [1e3 * statistics.median(each) if each else float("nan") for each in (loaded_s, contexts.computed_s)]
    return Line(
        f"{name}: {len(answers)} contexts of {NUM_TOKENS} tokens that another server has computed",
        "at least 3 of 4 are hits, every answer is that of computing",
        f"{num_hit} hits, {num_wrong} wrong, {medians[0]:.0f} ms for an answer against {medians[1]:.0f} ms computed",
        num_hit >= 0.75 * len(answers) and not num_wrong,
    )


def salt_line(name: str, server: Server, contexts: Contexts) -> Line:
    """Requests under another salt find nothing; under the one that published, they do."""
    foreign = [ask(server, prompt, cache_salt=SALT) for prompt in contexts.prompts[:4]]
    num_wrong = sum(answer.tokens != truth for answer, truth in zip(foreign, contexts.truth, strict=False))
    num_cached = sum(answer.num_cached for answer in foreign)
    return Line(
        f"{name}: the same contexts under another salt",
        "no token of them is cached",
        f"{num_cached} tokens cached in {len(foreign)} requests, {num_wrong} wrong",
        num_cached == 0 and not num_wrong,
    )


def failing_line(name: str, server: Server, contexts: Contexts, target: str) -> Line:
    """Contexts are asked for while the store fails: that costs hits, and little time."""
    answers = [ask(server, prompt) for prompt in contexts.prompts]
    num_wrong = sum(answer.tokens != truth for answer, truth in zip(answers, contexts.truth, strict=True))
    worst, most = max(answer.seconds for answer in answers), MOST_SLOWER * max(contexts.computed_s) + 1.0
    found = external(server)
    return Line(
        name,
        f"{target}; no answer is wrong, none takes over {MOST_SLOWER:g} times the slowest computed and 1 s",
        f"{num_wrong} of {len(answers)} wrong, {sum(answer.num_cached > 0 for answer in answers)} hits, "
        f"slowest {worst:.2f} s of {most:.2f} s, left alone {found['num_trips']} times",
        not num_wrong and worst <= most,
    )


def measure_file(number: int = NUM_CONTEXTS) -> Iterator[Line]:
    """SGLang's own files, in one folder that servers share."""
    yield from _measure_folder("file", number, {})


def measure_nixl(number: int = NUM_CONTEXTS) -> Iterator[Line]:
    """NIXL with its plugin for files. Raises RuntimeError where it is not installed."""
    if importlib.util.find_spec("nixl") is None:
        raise RuntimeError("NIXL is not installed: pip install nixl nixl-cu13, or the one of your CUDA")
    yield from _measure_folder("nixl", number, {"plugin": {"posix": {"active": True}}})


def _measure_folder(backend: str, number: int, settings: dict[str, object]) -> Iterator[Line]:
    contexts, name = Contexts.drawn(backend, number), f"{backend} backend"
    with scratch(1 << 30) as folder:
        arguments = flags(backend, {"file_storage_path": str(folder), **settings})
        with Server(*arguments) as server:
            compute(server, contexts)
        damaged = _damage(folder, random.Random(0))
        with Server(*arguments) as server:
            yield salt_line(name, server, contexts)
            whole = [index for index in range(number) if index not in damaged_contexts(folder, damaged, contexts)]
            yield shared_line(name, server, _chosen(contexts, whole))
            rest = [index for index in range(number) if index not in whole]
            yield failing_line(
                f"{name}: {len(damaged)} of its files were cut short or changed",
                server,
                _chosen(contexts, rest),
                "each is a miss",
            )


def measure_mooncake(number: int = NUM_CONTEXTS) -> Iterator[Line]:
    first, second, third = (Contexts.drawn(f"mooncake-{part}", number) for part in range(3))
    with MooncakeStore() as store:
        arguments = flags("mooncake", store.config)
        with Server(*arguments, env=store.env) as one, Server(*arguments, env=store.env) as other:
            for contexts in (first, second, third):
                compute(one, contexts)
            yield shared_line("Mooncake with its master, two servers", other, first)
            yield salt_line("Mooncake with its master, two servers", other, first)
            store.stop()
            yield failing_line("Mooncake: the owner of its memory hangs", other, second, "it is not waited for")
            store.stop(goes_on=True)
            store.kill()
            yield failing_line("Mooncake: master and owner are killed", other, third, "it is not waited for")
            store.start()
            again = Contexts.drawn("mooncake-again", number)
            num_hits = recover(one, other, again)
            yield Line(
                "Mooncake: both are started again, and the servers go on",
                "within 90 s one server hits what the other computes",
                f"{num_hits} hits",
                num_hits > 0,
            )
            num_gone = wait_until_gone((one, other), number)
            with Server(*arguments, env=store.env) as new:
                line = shared_line("Mooncake: a third server, as the store was empty when it came back", new, first)
            yield replace(line, figure=f"{line.figure}; {num_gone} copies were seen to be gone and published again")


def measure_full(number: int = NUM_CONTEXTS) -> Iterator[Line]:
    """A store with room for half of the contexts; the last ones are asked for first."""
    contexts = Contexts.drawn("full", number)
    with MooncakeStore(f"{number * ENTRY_MB // 2}MB") as store:
        arguments = flags("mooncake", store.config)
        with Server(*arguments, env=store.env) as one, Server(*arguments, env=store.env) as other:
            compute(one, contexts)
            written = external(one)
            last_first = _chosen(contexts, range(number)[::-1])
            line = failing_line("Mooncake with room for half of the contexts", other, last_first, "others are misses")
            told = f"; {written['num_published']} published, writes left alone {written['num_trips']} times"
            yield replace(line, figure=line.figure + told)


def recover(one: Server, other: Server, contexts: Contexts, seconds: float = 90.0) -> int:
    """Contexts, one after the other, computed by one server and then asked of the other; hits of the first that hit."""
    deadline, number = time.monotonic() + seconds, 0
    rng = random.Random("recover")
    while time.monotonic() < deadline:
        prompt = [rng.randrange(5, 500) for _ in contexts.prompts[0]]
        number += 1
        truth = ask(one, prompt)
        wait_until_published(one, 5.0)
        answer = ask(other, prompt)
        if answer.num_cached and answer.tokens == truth.tokens:
            return 1
        time.sleep(2.0)
    return 0


def wait_until_gone(servers: Sequence[Server], number: int, seconds: float = 90.0) -> int:
    """Until servers have seen that so many copies are gone, which they publish again; returns how many they have."""
    deadline, num_gone = time.monotonic() + seconds, 0
    while num_gone < number and time.monotonic() < deadline:
        time.sleep(1.0)
        num_gone = sum(int(str(external(server)["num_gone"])) for server in servers)
    for server in servers:
        wait_until_published(server)
    return num_gone


def _chosen(contexts: Contexts, which: Sequence[int]) -> Contexts:
    return Contexts(
        [contexts.prompts[index] for index in which],
        [contexts.truth[index] for index in which],
        [contexts.computed_s[index] for index in which],
    )


def _damage(folder: Path, rng: random.Random) -> list[Path]:
    """Change or cut short a third of the payloads of a store's folder."""
    parts = sorted(path for path in folder.rglob("*-0_*") if not any(level in path.name for level in LEVELS))
    chosen = rng.sample(parts, max(1, len(parts) // 3))
    for path in chosen:
        data = bytearray(path.read_bytes())
        if rng.random() < 0.5:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(bytes(data))
    return chosen


def damaged_contexts(folder: Path, damaged: Sequence[Path], contexts: Contexts) -> set[int]:
    """Contexts of which a payload was damaged: told by the tokens in their headers."""
    from sglang_evicpress.tiers.entry.encoding import decode
    from sglang_evicpress.tiers.entry.identity import token_bytes

    found = set()
    for path in damaged:
        (header_file,) = folder.rglob(f"{path.name.split('-')[0]}-header_*")
        header, _ = decode(header_file.read_bytes())
        begins = [token_bytes(prompt[: len(header.tokens) // 4]) for prompt in contexts.prompts]
        found |= {index for index, begin in enumerate(begins) if header.tokens.startswith(begin[: len(header.tokens)])}
    return found
