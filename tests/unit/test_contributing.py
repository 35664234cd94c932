"""CONTRIBUTING's table of changes: its places exist, and a fake of each kind works through the one registration named.

The fakes are added as a contributor would: to a copy of the package, one file each and a row in one table.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "sglang_evicpress"
TASKS = (
    *("Add a press", "Add a policy", "Add an endpoint", "Add a decode score", "Add a trace reader"),
    *("Add an attention backend", "Add a metric", "Add a codec", "Change the SSD format"),
    "Support another SGLang release",
)


@dataclass(frozen=True, slots=True)
class Change:
    """A ``row`` and its imports for a table of ``registry``, and the file that it names."""

    registry: str
    table: str
    row: str
    imports: str = ""
    file: str = ""
    source: str = ""


CHANGES = {
    "Add a press": Change(
        registry="core.py",
        table="PRESSES: dict[str, PressTraits] = {",
        row='    "fake_press": PressTraits(),',
        file="press/fake_press.py",
        source="""
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True)
class FakePress:
    name: ClassVar[str] = "fake_press"
    needs_queries: ClassVar[bool] = False

    def score(self, node):
        return -node.positions.float()

PRESS = FakePress()
""",
    ),
    "Add a policy": Change(
        registry="policy/__init__.py",
        table="POLICIES: dict[str, PolicyInfo] = {",
        row='    "fake_policy": PolicyInfo(lambda inputs: FakePolicy(inputs.menu)),',
        imports="from sglang_evicpress.policy.rules.fake import FakePolicy",
        file="policy/rules/fake.py",
        source="""
from sglang_evicpress.policy.rules.lru import LruPolicy

class FakePolicy(LruPolicy):
    name = "fake_policy"
""",
    ),
    "Add an endpoint": Change(
        registry="introspect/operations.py",
        table="OPERATIONS: dict[str, Operation] = by_name(",
        row='    Operation("fake", read, "GET", "/evicpress/fake/{number}"),',
        imports="from sglang_evicpress.introspect.fake import read",
        file="introspect/fake.py",
        source="""
from sglang_evicpress.introspect.arguments import accept_only, integer

def read(arguments):
    accept_only(arguments, "number")
    number = integer(arguments, "number", least=0)
    return lambda cache: {"seen": [number, type(cache).__name__]}
""",
    ),
    "Add a decode score": Change(
        registry="decode_budget/scores.py",
        table="SCORES: dict[str, Score] = {",
        row='    "fake_score": Score(lambda rows, window: -rows.positions.float()),',
    ),
    "Add a trace reader": Change(
        registry="traces/reader.py",
        table="READERS = [",
        row='    Reader("fake (at, ids)", ("at",), lambda _: Fake()),',
        imports="from sglang_evicpress.traces.fake import Fake",
        file="traces/fake.py",
        source="""
from sglang_evicpress.traces.base import Request

class Fake:
    block_tokens = 2
    relative = False

    def requests(self, record):
        return [Request(record["at"], tuple(record["ids"]), 2 * len(record["ids"]))]
""",
    ),
}
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.core import Form, Tier
from sglang_evicpress.decode_budget.scores import score
from sglang_evicpress.decode_budget.settings import DecodeSettings
from sglang_evicpress.introspect.operations import OPERATIONS, Inspectable, answer
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.press import PressInput, get_press, select
from sglang_evicpress.traces import read_trace
from sglang_evicpress.cli.main import main

def refusal(ask):
    try:
        ask()
    except ValueError as error:
        return str(error)

cache = type("Cache", (), {name: print for name in dir(Inspectable) if not name.startswith("_")})()
layers = [torch.zeros(8, 1, 4)]
node = PressInput(layers, layers, torch.arange(8), torch.arange(8, dtype=torch.int32).view(1, 1, 8), 0, 8, None, 1.0)
trace = Path("fake.jsonl")
trace.write_text('{"at": 1.0, "ids": [1, 2]}\\n{"at": 2.0, "ids": [1, 3]}\\n')
Path("other.jsonl").write_text('{"what": 1}\\n')
menu = Menu((Form.parse("fake_press@0.5"),), (Tier.GPU,))
print(json.dumps({
    "Add a press": {
        "parsed": str(EvicPressConfig.from_flags("evicpress", forms="fake_press@0.5").forms[0]),
        "listed": refusal(lambda: Form.parse("no@0.5")),
        "used": select(get_press("fake_press"), node, 3, 0).tolist(),
    },
    "Add a policy": {
        "parsed": EvicPressConfig.from_flags("fake_policy").policy,
        "listed": refusal(lambda: EvicPressConfig.from_flags("no")),
        "used": main(["replay", str(trace), "--policy", "fake_policy", "--gpu", "2tok"]),
    },
    "Add an endpoint": {
        "parsed": answer(cache, "fake", {"number": "x"})[0],
        "listed": answer(cache, "no", {})[1]["error"]["reason"] + OPERATIONS["fake"].path,
        "used": answer(cache, "fake", {"number": "7"}),
    },
    "Add a decode score": {
        "parsed": DecodeSettings(64, score="fake_score").score,
        "listed": refusal(lambda: DecodeSettings(64, score="no")),
        "used": score("fake_score", node, 8).tolist(),
    },
    "Add a trace reader": {
        "parsed": len(read_trace(str(trace)).requests),
        "listed": refusal(lambda: read_trace("other.jsonl")),
        "used": read_trace(str(trace)).requests[1].blocks,
    },
}))
"""
EXPECTED: dict[str, tuple[object, str, object]] = {
    "Add a press": ("fake_press@0.5", "fake_press", [[[0, 1, 2]]]),
    "Add a policy": ("fake_policy", "fake_policy", 0),
    "Add an endpoint": (400, "fake", [200, {"seen": [7, "Cache"]}]),
    "Add a decode score": ("fake_score", "fake_score", [[[-float(position) for position in range(8)]]]),
    "Add a trace reader": (2, "fake (at, ids)", [1, 3]),
}


def table() -> dict[str, tuple[str, str]]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Where a change goes")[2]
    rows = [line.strip("|").split("|") for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return {task.strip(): (place.strip(), registration.strip()) for task, place, registration in rows[2:]}


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_task_has_one_place_and_one_registration_that_exist() -> None:
    assert set(table()) == set(TASKS)
    for task, (place, registration) in table().items():
        path = ROOT / quoted(place)[0]
        assert path.exists(), task
        name, where = quoted(registration)[:2]
        source = (ROOT / where).read_text(encoding="utf-8")
        assert re.search(rf"^{name}\b.* = ", source, re.MULTILINE), (task, name, where)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """Answers of the package after each fake was added to a copy of it."""
    folder = tmp_path_factory.mktemp("contributing")
    package = folder / PACKAGE
    shutil.copytree(ROOT / "python" / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for change in CHANGES.values():
        registry = package / change.registry
        source = registry.read_text(encoding="utf-8")
        assert source.count(change.table + "\n") == 1, change.table
        source = source.replace(change.table, f"{change.table}\n{change.row}")
        if change.imports:
            source = source.replace("\nfrom sglang_evicpress", f"\n{change.imports}\nfrom sglang_evicpress", 1)
        registry.write_text(source, encoding="utf-8")
        if change.file:
            (package / change.file).write_text(change.source, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("task", CHANGES)
def test_a_fake_works_through_its_one_registration(task: str, answers: dict[str, dict[str, object]]) -> None:
    parsed, listed, used = EXPECTED[task]
    assert answers[task]["parsed"] == parsed
    assert listed in str(answers[task]["listed"])
    assert answers[task]["used"] == used
    assert quoted(table()[task][1])[1] == f"python/{PACKAGE}/{CHANGES[task].registry}"
