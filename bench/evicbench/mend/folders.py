"""SSD folders of other models or salts, or that others have prepared: a miss or a refusal, never a hit."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from evicbench.correctness.reference import make_peaky_model
from evicbench.report import Line
from evicbench.testbed.server import Server, ServerError
from evicbench.tiers.inputs import scratch
from evicbench.tiers.prompts import Ids, Question
from evicbench.tiers.restart import Answers, Stoppable, arguments, ask, draw_contexts, push_until_there

NUM_CONTEXTS = 8
NOBODY = 65534


def measure() -> Iterator[Line]:
    """One folder, written by one model; then servers of other models, another salt, and folders tampered with."""
    rng = random.Random("folders")
    with scratch(1 << 30) as folder, tempfile.TemporaryDirectory() as models:
        model = make_peaky_model(Path(models) / "peaky")
        ssd = folder / "ssd"
        contexts = draw_contexts(rng, NUM_CONTEXTS)
        with Stoppable(*arguments(ssd), model=model) as server:
            questions = ask(server, contexts, extra_key="salt")
            push_until_there(server)
        with Stoppable(*arguments(ssd), model=model) as server:
            yield _hits_line("the same model and salt", _ask_salted(server, questions, "salt"), wants_hits=True)
            yield _hits_line("the same model, another salt", _ask_salted(server, questions, "pepper"))
        for what, change in (("one byte of the weights other", _other_byte), ("two rows swapped", _swapped_rows)):
            other = _copy(model, Path(models) / what.replace(" ", "-"), change)
            with Stoppable(*arguments(ssd), model=other) as server:
                yield _hits_line(what, _ask_other(server, contexts))
        yield from _tampered(ssd, folder, model, questions)


def _tampered(ssd: Path, folder: Path, model: Path, questions: Sequence[Question]) -> Iterator[Line]:
    outside = folder / "outside"
    outside.mkdir()
    for what, plant in PLANTS.items():
        planted = folder / "planted"
        shutil.copytree(ssd, planted)
        treasure = outside / "treasure"
        treasure.write_bytes(b"of somebody else")
        before = _state(outside)
        plant(planted, treasure)
        refusal, answers = "", Answers()
        try:
            with Stoppable(*arguments(planted), model=model) as server:
                answers = _ask_salted(server, questions, "salt")
        except ServerError as error:
            refusal = str(error).rstrip().splitlines()[-1]
        is_same = _state(outside) == before
        figure = f"refused: {refusal}" if refusal else str(answers)
        is_refused = str(planted) in refusal and "error:" in refusal
        yield Line(
            f"SSD folder with {what}",
            "refused in one sentence, or no hit from it; nothing outside touched",
            f"{figure}; outside {'as it was' if is_same else 'CHANGED'}",
            is_same and (is_refused or (bool(answers.num_asked) and not answers.num_hits and not answers.problems)),
        )
        os.chown(planted, os.geteuid(), os.getegid(), follow_symlinks=False)
        if planted.is_symlink():
            planted.unlink()
        shutil.rmtree(planted, ignore_errors=True)
        shutil.rmtree(folder / "elsewhere", ignore_errors=True)


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


def _of_another_user(planted: Path, treasure: Path) -> None:
    for path in (planted, *planted.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


def _files_of_another_user(planted: Path, treasure: Path) -> None:
    for path in _segments(planted):
        os.chown(path, NOBODY, NOBODY)


def _writable_by_all(planted: Path, treasure: Path) -> None:
    planted.chmod(0o777)


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "a lock that links to another's file": _link_lock,
    "segments that are links": _link_segments,
    "pipes in the place of segments": _pipes,
    "everything of another user": _of_another_user,
    "segments of another user": _files_of_another_user,
    "write permission for all": _writable_by_all,
}


def _state(folder: Path) -> list[tuple[str, bytes, int]]:
    return [(path.name, path.read_bytes(), path.stat().st_mode) for path in sorted(folder.iterdir())]


def _copy(model: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def _other_byte(weights: dict[str, torch.Tensor]) -> None:
    weight = weights["model.embed_tokens.weight"]
    weight.view(torch.uint8)[7, 5] ^= 1  # of the mantissa


def _swapped_rows(weights: dict[str, torch.Tensor]) -> None:
    weight = weights["model.embed_tokens.weight"]
    weight[[10, 11]] = weight[[11, 10]]


def _ask_salted(server: Server, questions: Sequence[Question], salt: str) -> Answers:
    answers = Answers()
    for question in questions:
        given = server.generate(list(question.prompt), len(question.answer), extra_key=salt)
        from_ssd = dict(given["meta_info"].get("cached_tokens_details") or {}).get("storage", 0)
        answers.num_asked += 1
        answers.num_tokens += from_ssd
        answers.num_hits += 2 * from_ssd >= len(question.prompt)
        if tuple(given["output_ids"]) != question.answer:
            answers.problems.append(f"{len(question.prompt)} tokens, {from_ssd} from SSD: another answer")
    return answers


def _ask_other(server: Server, contexts: Sequence[Ids]) -> Answers:
    """Its own answers, computed in a namespace where nothing can be found, must be those in the entries' namespace."""
    return _ask_salted(server, ask(server, contexts, extra_key="nobody else"), "salt")


def _hits_line(what: str, answers: Answers, *, wants_hits: bool = False) -> Line:
    wanted = answers.num_hits == answers.num_asked if wants_hits else answers.num_tokens == 0
    return Line(
        f"restart on an SSD folder: {what}",
        "every context a hit, the same answers" if wants_hits else "no token from the SSD, the model's own answers",
        str(answers),
        wanted and answers.num_asked > 0 and not answers.problems,
    )
