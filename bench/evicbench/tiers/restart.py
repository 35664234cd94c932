"""A server that starts on the SSD folder of the one before: after a clean stop, after kill -9, with another model or
dtype, and where bytes on the disk have changed."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from evicbench.correctness.reference import PEAKY_VOCABULARY, changed_model, make_peaky_model
from evicbench.moves import push_all, push_down, sources
from evicbench.report import Line
from evicbench.testbed.server import Server, ServerError
from evicbench.tiers.inputs import scratch
from evicbench.tiers.prompts import Ids, Question

NUM_CONTEXTS = 12
NUM_MORE = 40
"""Contexts to be written while the server is killed, at most."""

NUM_ANSWER_TOKENS = 12
STOP_S = 60.0
WRITE_S = 60.0
FLIP_EVERY = 4096


class Stoppable(Server):
    """A server that is ended as others end it."""

    def end(self, sign: signal.Signals) -> float:
        """SIGTERM to its main process, or SIGKILL to all of them; the seconds it took. Nothing is left behind."""
        begin = time.monotonic()
        (os.killpg if sign == signal.SIGKILL else os.kill)(self.pid, sign)
        while self.is_alive() and time.monotonic() < begin + STOP_S:
            time.sleep(0.02)
        took_s, is_alive = time.monotonic() - begin, self.is_alive()
        self.stop()
        if is_alive:
            raise self.error(f"the server did not stop within {STOP_S:g} s")
        return took_s


@dataclass(slots=True)
class Answers:
    """Answers of a server to repeated questions. ``num_hits``: prompts of which half or more came from SSD."""

    num_asked: int = 0
    num_hits: int = 0
    num_tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        figure = f"{self.num_asked} asked, {self.num_hits} hits ({self.num_tokens} tokens from SSD)"
        if self.errors:
            figure += f", errors {self.errors}"
        return figure + (f", {len(self.problems)} problems, first: {self.problems[0]}" if self.problems else "")


def arguments(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        *("--kv-policy", "evicpress", "--kv-forms", "exact", "--max-total-tokens", "24000", "--skip-tokenizer-init"),
        *("--kv-host-gb", "0.05", "--kv-ssd-dir", str(folder), "--kv-ssd-gb", "0.5", *more),
    )


def swap_rows(weights: dict[str, torch.Tensor]) -> None:
    """Each of two tokens gets the other's embedding."""
    rows = weights["model.embed_tokens.weight"]
    rows[[10, 11]] = rows[[11, 10]]


def scale_all(weights: dict[str, torch.Tensor]) -> None:
    """Every weight is a little off."""
    for weight in weights.values():
        weight.mul_(1.01)


def draw_contexts(rng: random.Random, count: int) -> list[Ids]:
    """Contexts that share nothing."""
    return [tuple(rng.randrange(3, PEAKY_VOCABULARY) for _ in range(rng.randint(600, 1400))) for _ in range(count)]


def ask(server: Server, contexts: Sequence[Ids], **fields: object) -> list[Question]:
    given = ((ids, server.generate(list(ids), NUM_ANSWER_TOKENS, **fields)) for ids in contexts)
    return [Question(ids, tuple(answer["output_ids"])) for ids, answer in given]


def ask_again(server: Server, questions: Sequence[Question], **fields: object) -> Answers:
    """Ask what another server has answered, and check the cache."""
    answers = Answers()
    for question in questions:
        given = server.generate(list(question.prompt), len(question.answer), **fields)
        from_ssd = sources(given).get("storage", 0)
        answers.num_asked += 1
        answers.num_tokens += from_ssd
        answers.num_hits += 2 * from_ssd >= len(question.prompt)
        if (ids := tuple(given["output_ids"])) != question.answer:
            answers.problems.append(f"{len(question.prompt)} tokens, {from_ssd} from SSD: {ids} is not the same answer")
    answers.errors = {reason: count for reason, count in server.get("/evicpress/tiers")["errors"].items() if count}
    if not (found := server.post("/evicpress/check"))["ok"]:
        answers.problems.append(f"check: {found['violations']}")
    return answers


def ask_other(server: Server, questions: Sequence[Question], **fields: object) -> Answers:
    """Its own answers, computed in a namespace where nothing is found, must be those where entries are looked for."""
    return ask_again(server, ask(server, [each.prompt for each in questions], extra_key="nobody else"), **fields)


def put_on_ssd(server: Server) -> None:
    if above := push_all(server, "ssd"):
        raise server.error(f"nodes {above[:5]} did not come to the SSD")


def fill(folder: Path, model: Path, contexts: Sequence[Ids]) -> tuple[list[Question], int, float]:
    """A server whose first half of ``contexts`` is on SSD and the others where they are when it is told to stop: the
    answers, how many entries were on SSD before that, and the seconds of stopping."""
    with Stoppable(*arguments(folder), model=model) as server:
        questions = ask(server, contexts[: len(contexts) // 2])
        put_on_ssd(server)
        questions += ask(server, contexts[len(contexts) // 2 :])
        num_written = server.get("/evicpress/tiers")["tiers"]["ssd"]["num_entries"]
        return questions, num_written, server.end(signal.SIGTERM)


def kill_while_writing(server: Stoppable, contexts: Sequence[Ids], rng: random.Random) -> list[Question]:
    """Ask more and more and move all of it to the SSD, until the server is killed in the middle of that; what it had
    answered."""
    questions: list[Question] = []
    has_begun = threading.Event()

    def write() -> None:
        with suppress(OSError, ValueError, ServerError):  # it is dead
            for ids in contexts:
                questions.extend(ask(server, [ids]))
                push_down(server, "ssd")
                if len(questions) >= 3:
                    has_begun.set()

    writer = threading.Thread(target=write)
    writer.start()
    has_begun.wait(WRITE_S)
    time.sleep(rng.uniform(0.0, 0.5))
    server.end(signal.SIGKILL)
    writer.join()
    return questions


def flip_bytes(folder: Path) -> int:
    """Change a byte of every block of the first half of the payloads; how many."""
    count = 0
    for path in sorted(folder.glob("rank-*/segment-*.kv")):
        data = bytearray(path.read_bytes())
        for place in range(FLIP_EVERY // 3, len(data) // 2, FLIP_EVERY):
            data[place] ^= 0x41
            count += 1
        path.write_bytes(data)
    return count


def measure(seed: int = 0, *, with_others: bool = True, most_computed: int = 0) -> Iterator[Line]:
    """``with_others``: also those of another dtype and with other weights, each of which costs a start. So many of the
    first contexts may be computed: on a machine with other work to do a read may seem to take longer than that."""
    rng = random.Random(f"restart-{seed}")
    with scratch(1 << 30) as folder, tempfile.TemporaryDirectory() as models:
        model = make_peaky_model(Path(models) / "peaky")
        ssd = folder / "ssd"
        contexts = draw_contexts(rng, NUM_CONTEXTS + NUM_MORE)
        questions, num_written, took_s = fill(ssd, model, contexts[:NUM_CONTEXTS])
        with Stoppable(*arguments(ssd), model=model) as server:
            answers = ask_again(server, questions)
            yield Line(
                f"restart after SIGTERM: {answers.num_asked} contexts, half of them on SSD, the others still above",
                "every one is a hit from SSD, same outputs, no error",
                f"{answers}; {num_written} entries before SIGTERM, which took {took_s:.1f} s",
                answers.num_hits + most_computed >= answers.num_asked and not answers.problems and not answers.errors,
            )
            questions += kill_while_writing(server, contexts[NUM_CONTEXTS:], rng)
        with Stoppable(*arguments(ssd), model=model) as server:
            answers = ask_again(server, questions)
            yield Line(
                "restart after kill -9 in the middle of writing",
                f"starts, same outputs, at least {NUM_CONTEXTS // 2} hits from SSD",
                str(answers),
                answers.num_hits >= NUM_CONTEXTS // 2 and not answers.problems and answers.num_asked > NUM_CONTEXTS,
            )
            server.end(signal.SIGTERM)
        others = {"in bfloat16": (model, ("--dtype", "bfloat16"))} if with_others else {}
        if with_others:
            swapped = changed_model(model, Path(models) / "other", swap_rows)
            others["with two rows of its embeddings swapped"] = (swapped, ())
        for what, (other, flags) in others.items():
            with Stoppable(*arguments(ssd, *flags), model=other) as server:
                answers = ask_other(server, questions[:4])
                unlike = [reason for reason in answers.errors if "fingerprint" not in reason]
                yield Line(
                    f"restart of the same model {what} on that folder",
                    "no hit, its own outputs, no error but foreign entries counted",
                    str(answers),
                    answers.num_tokens == 0 and not answers.problems and not unlike,
                )
                server.end(signal.SIGTERM)
        num_flipped = flip_bytes(ssd)
        with Stoppable(*arguments(ssd), model=model) as server:
            answers = ask_again(server, questions)
        found = sum(count for reason, count in answers.errors.items() if "checksum" in reason)
        yield Line(
            f"restart after {num_flipped} bytes of the payloads were changed",
            "misses counted, same outputs",
            str(answers),
            found > 0 and not answers.problems and answers.num_hits < answers.num_asked,
        )
