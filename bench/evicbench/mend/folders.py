"""SSD folders of other models or salts, or that others have prepared: a miss or a refusal, never a hit."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from evicbench.correctness.reference import changed_model, make_peaky_model
from evicbench.report import Line
from evicbench.testbed.server import Server, ServerError
from evicbench.tiers.inputs import scratch
from evicbench.tiers.prompts import Question
from evicbench.tiers.restart import (
    Answers,
    arguments,
    ask,
    ask_again,
    ask_other,
    draw_contexts,
    put_on_ssd,
    swap_rows,
)

NUM_CONTEXTS = 8
NOBODY = 65534

Plant = Callable[[Path, Path], None]


def measure() -> Iterator[Line]:
    """One folder, written by one model; then servers of other models, another salt, and folders tampered with."""
    rng = random.Random("folders")
    with scratch(1 << 30) as folder, tempfile.TemporaryDirectory() as models:
        model = make_peaky_model(Path(models) / "peaky")
        ssd = folder / "ssd"
        with Server(*arguments(ssd), model=model) as server:
            questions = ask(server, draw_contexts(rng, NUM_CONTEXTS), extra_key="salt")
            put_on_ssd(server)
        with Server(*arguments(ssd), model=model) as server:
            answers = ask_again(server, questions, extra_key="salt")
            yield _hits_line("the same model and salt", answers, wants_hits=True)
            answers = ask_again(server, questions, extra_key="pepper")
            yield _hits_line("the same model, another salt", answers)
        for what, change in (("one byte of the weights other", change_byte), ("two rows swapped", swap_rows)):
            other = changed_model(model, Path(models) / what.replace(" ", "-"), change)
            with Server(*arguments(ssd), model=other) as server:
                yield _hits_line(what, ask_other(server, questions, extra_key="salt"))
        for what, plant in PLANTS.items():
            yield _planted_line(what, plant, ssd, folder, model, questions)


def _planted_line(what: str, plant: Plant, ssd: Path, folder: Path, model: Path, questions: Sequence[Question]) -> Line:
    """A copy of the SSD folder, tampered with, beside a file that is not its own."""
    planted, treasure = folder / "planted", folder / "outside" / "treasure"
    treasure.parent.mkdir(exist_ok=True)
    treasure.write_bytes(b"of somebody else")
    before = _state(treasure.parent)
    shutil.copytree(ssd, planted)
    plant(planted, treasure)
    refusal, answers = "", Answers()
    try:
        with Server(*arguments(planted), model=model) as server:
            answers = ask_again(server, questions, extra_key="salt")
    except ServerError as error:
        refusal = str(error).rstrip().splitlines()[-1]
    is_same = _state(treasure.parent) == before
    is_refused = str(planted) in refusal and "error:" in refusal
    os.chown(planted, os.geteuid(), os.getegid())
    for left in (planted, folder / "elsewhere"):
        shutil.rmtree(left, ignore_errors=True)
    return Line(
        f"SSD folder with {what}",
        "refused in one sentence, or no hit from it; nothing outside touched",
        f"{f'refused: {refusal}' if refusal else answers}; outside {'as it was' if is_same else 'CHANGED'}",
        is_same and (is_refused or (bool(answers.num_asked) and not answers.num_hits and not answers.problems)),
    )


def _segments(planted: Path) -> list[Path]:
    return sorted(path for path in planted.rglob("segment-*") if path.is_file())


def _link_lock(planted: Path, treasure: Path) -> None:
    for lock in planted.rglob("lock"):
        lock.unlink()
        lock.symlink_to(treasure)


def _link_segments(planted: Path, treasure: Path) -> None:
    """The very files, but by a link to where another user could change them."""
    elsewhere = planted.parent / "elsewhere"
    elsewhere.mkdir()
    for path in _segments(planted):
        path.rename(elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)


def _pipes(planted: Path, treasure: Path) -> None:
    for path in _segments(planted):
        path.unlink()
        os.mkfifo(path)


def _of_another_user(planted: Path, treasure: Path, pattern: str = "*") -> None:
    for path in (*([planted] if pattern == "*" else []), *planted.rglob(pattern)):
        os.chown(path, NOBODY, NOBODY)


def _writable_by_all(planted: Path, treasure: Path) -> None:
    planted.chmod(0o777)


PLANTS: dict[str, Plant] = {
    "a lock that links to another's file": _link_lock,
    "segments that are links": _link_segments,
    "pipes in the place of segments": _pipes,
    "everything of another user": _of_another_user,
    "segments of another user": partial(_of_another_user, pattern="segment-*"),
    "write permission for all": _writable_by_all,
}


def _state(folder: Path) -> list[tuple[str, bytes, int]]:
    return [(path.name, path.read_bytes(), path.stat().st_mode) for path in sorted(folder.iterdir())]


def change_byte(weights: dict[str, torch.Tensor]) -> None:
    weights["model.embed_tokens.weight"].view(torch.uint8)[7, 5] ^= 1  # of the mantissa


def _hits_line(what: str, answers: Answers, *, wants_hits: bool = False) -> Line:
    wanted = answers.num_hits == answers.num_asked if wants_hits else answers.num_tokens == 0
    return Line(
        f"restart on an SSD folder: {what}",
        "every context a hit, the same answers" if wants_hits else "no token from the SSD, the model's own answers",
        str(answers),
        wanted and answers.num_asked > 0 and not answers.problems,
    )
