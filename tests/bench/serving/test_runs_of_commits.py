"""A measurement is of one commit: runs of another are put aside."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
from evicbench.serving import runs

from sglang_evicpress.benchmark.environment import commit


def add_run(folder: Path, system: str, made_by: str) -> None:
    path = folder / "runs" / system / "0-0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(orjson.dumps({"run": {"system": system, "commit": made_by}}) + b"\n{}\n")


@pytest.mark.parametrize(("others", "begins_anew"), [((), False), (("0123456789ab",), True)])
def test_runs_of_another_commit_are_made_anew(
    others: tuple[str, ...], begins_anew: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "OUT", tmp_path)
    commands: list[list[str]] = []
    ran = lambda command, check: commands.append(command) or SimpleNamespace(returncode=0)  # noqa: E731
    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(run=ran))
    for number, made_by in enumerate((commit(), *others)):
        add_run(runs.folder_of("codecs"), f"system-{number}", made_by)
    runs.serve("codecs")
    assert ("--fresh" in commands[0]) == begins_anew
