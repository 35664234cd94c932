"""Durability of profiles: kill -9 while they are put, another model or tokenizer on the same file, damage."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPException
from pathlib import Path

from evicbench.correctness.reference import changed_model
from evicbench.report import Line
from evicbench.testbed.server import ADMIN_KEY, MODEL, Server, ServerError
from evicbench.testbed.tasks import make_context
from evicbench.testbed.vocabulary import load_vocabulary
from evicbench.tiers.restart import Stoppable, scale_all
from sglang_evicpress.core import Form
from sglang_evicpress.profiler.client import ServerEngine
from sglang_evicpress.profiler.measure import Asked, profile_context
from sglang_evicpress.profiler.scorers import get_scorer
from sglang_evicpress.profiler.transport import HttpTransport
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.running_stats import RunningStats

FORMS = (Form("keydiff", 0.8), Form("keydiff", 0.5), Form("keydiff", 0.2))
NUM_KILLS = 3
NUM_WRITERS = 2
NUM_TOKENS = 20 * 64


def arguments(file: Path) -> tuple[str, ...]:
    policy = ("--kv-policy", "evicpress", "--kv-forms", ",".join(map(str, FORMS)), "--kv-profile-path", str(file))
    return (*policy, "--kv-disable-online-profiling", "--max-total-tokens", "8000")


def made_up(number: int) -> Profile:
    draw = random.Random(f"durability {number}")
    forms = {form: RunningStats.of(draw.random() for _ in range(4)) for form in FORMS}
    return Profile(number.to_bytes(16, "big"), 1984, forms, "logprob", "0123456789abcdef", 4, 1.7e9)


def kill_while_putting(server: Stoppable, first: int, seconds: float) -> dict[str, object]:
    """Profiles that the server acknowledged to threads that put them until all its processes were killed, by key."""
    kept: dict[str, object] = {}
    is_over = threading.Event()

    def put(number: int) -> None:
        with suppress(ServerError, HTTPException, OSError):  # the server is gone, perhaps in the middle of an answer
            while not is_over.is_set():
                profile = made_up(number).to_json()
                server.post("/evicpress/profiles", {"profile": profile, "is_fresh": True})
                kept[str(profile["key"])] = profile
                number += NUM_WRITERS

    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        for index in range(NUM_WRITERS):
            writers.submit(put, first + index)
        time.sleep(seconds)
        server.end(signal.SIGKILL)
        is_over.set()
    return kept


def measure_one(server: Server) -> tuple[str, list[int]]:
    """Profile a real context; its key and the tokens of a prompt of it."""
    context = make_context("needle", NUM_TOKENS + 10, random.Random("durability"))
    prompts = [load_vocabulary().encode(context.prompt(question.text)) for question in context.questions[:2]]
    engine = ServerEngine(HttpTransport(server.url, admin_api_key=ADMIN_KEY), fill_tokens=NUM_TOKENS, may_evict=True)
    queries = [Asked(prompt[NUM_TOKENS:]) for prompt in prompts]
    profile = profile_context(engine, prompts[0][:NUM_TOKENS], None, queries, FORMS, get_scorer("logprob"))
    server.post("/evicpress/profiles", {"profile": profile.to_json(), "is_fresh": True})
    return profile.key.hex(), prompts[0]


def profiled_nodes(server: Server, prompt: list[int]) -> int:
    """Number of nodes that go by a profile once the prompt was served."""
    server.generate(prompt, 1)
    return sum(node["num_profiles"] > 0 for node in server.get("/evicpress/tree")["nodes"])


def listed(server: Server) -> set[str]:
    return {each["key"] for each in server.get("/evicpress/profiles")["profiles"]}


def other_tokenizer(folder: Path) -> Path:
    """The same model whose tokenizer knows one word by another name."""
    shutil.copytree(MODEL, folder)
    path = folder / "tokenizer.json"
    rules = json.loads(path.read_text())
    vocabulary = rules["model"]["vocab"]
    word = next(word for word in vocabulary if word.isalpha() and len(word) > 3)
    vocabulary[f"{word}x"] = vocabulary.pop(word)
    path.write_text(json.dumps(rules))
    return folder


def measure_durability() -> Iterator[Line]:
    with tempfile.TemporaryDirectory(prefix="evicpress-durability-") as name:
        folder = Path(name)
        file = folder / "profiles"
        acknowledged, lost, real, prompt, num_used = kill_often(file)
        yield Line(
            f"kill -9 of the server at {NUM_KILLS} random moments while {NUM_WRITERS} clients put profiles",
            "every acknowledged profile is there as it was put, and a served context goes by its own",
            f"{len(acknowledged)} acknowledged, {lost} lost or changed; nodes of the served context that go by one: "
            f"{num_used}",
            not lost and len(acknowledged) > NUM_KILLS and num_used > 0,
        )
        yield foreign_line(folder, file, prompt)
        yield damage_line(file, real, prompt)


def kill_often(file: Path) -> tuple[dict[str, object], int, str, list[int], int]:
    draw = random.Random("kills")
    acknowledged: dict[str, object] = {}
    real, prompt = "", [0]
    for index in range(NUM_KILLS):
        with Stoppable(*arguments(file)) as server:
            if index == 0:
                real, prompt = measure_one(server)
            acknowledged |= kill_while_putting(server, 1_000_000 * (index + 1), draw.uniform(0.3, 1.5))
    with Server(*arguments(file)) as server:
        found = listed(server)
        lost = sum(key not in found for key in (*acknowledged, real))
        for key in random.Random(1).sample(sorted(acknowledged), min(40, len(acknowledged))):
            shown = server.get(f"/evicpress/profiles/{key}")
            lost += any(shown[field] != value for field, value in acknowledged[key].items())  # type: ignore[attr-defined]
        return acknowledged, lost, real, prompt, profiled_nodes(server, prompt)


def num_profiles(file: Path) -> int:
    with closing(sqlite3.connect(file)) as database:
        return int(database.execute("SELECT count(*) FROM profiles").fetchone()[0])


def foreign_line(folder: Path, file: Path, prompt: list[int]) -> Line:
    before = num_profiles(file)
    figures, is_ok = [], True
    models = {
        "weights 1 % off": changed_model(MODEL, folder / "weights", scale_all),
        "another tokenizer": other_tokenizer(folder / "tokenizer"),
    }
    for what, model in models.items():
        with Server(*arguments(file), model=model) as server:
            num_listed, num_used = len(listed(server)), profiled_nodes(server, prompt)
        figures.append(f"{what}: {num_listed} listed, {num_used} nodes go by one")
        is_ok &= num_listed == num_used == 0
    after = num_profiles(file)
    return Line(
        f"the same file of {before} profiles under another model, and under another tokenizer",
        "none is used, all stay in the file",
        f"{'; '.join(figures)}; {after} in the file",
        is_ok and after == before,
    )


def damage_line(file: Path, real: str, prompt: list[int]) -> Line:
    """One byte of one profile is another one: it is left out, the others are used. Then half of the file is noise."""
    before = num_profiles(file)
    data = bytearray(file.read_bytes())
    at = data.index(b"measured_s", len(data) // 2)
    data[at] ^= 1
    file.write_bytes(data)
    with Server(*arguments(file)) as server:
        num_listed, num_used = len(listed(server)), profiled_nodes(server, prompt)
        is_there = real in listed(server)
    noise = bytes(data[: len(data) // 2]) + b"noise" * 1000
    file.write_bytes(noise)
    with Server(*arguments(file)) as server:
        num_after = len(listed(server))
    is_aside = file.with_name(f"{file.name}.bad").read_bytes() == noise
    return Line(
        "a byte of the file is changed; then half of it",
        "the damaged profile is left out, and the damaged file is set aside",
        f"{num_listed} of {before} listed, {num_used} nodes go by one; then {num_after} listed, "
        f"{'' if is_aside else 'NOT '}set aside",
        num_listed == before - 1 and is_there and num_used > 0 and num_after == 0 and is_aside,
    )
