"""A profile that could not be written when it was measured is written with the next one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sglang_evicpress.core import Form
from sglang_evicpress.introspect.arguments import IntrospectionError, Json
from sglang_evicpress.patches.http import profile_writer
from sglang_evicpress.patches.http.profile_writer import ProfileFile
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.running_stats import RunningStats
from sglang_evicpress.quality.store import ProfileStore

OURS, THEIRS = "aa" * 16, "bb" * 16


def answered(number: int, mean: float = 0.5, identity: str = OURS) -> Json:
    forms = {Form("knorm", 0.5): RunningStats(2.0, mean)}
    profile = Profile(bytes([number] * 16), 640, forms, "logprob", "0" * 16, 2, 1.5e9)
    return {"identity": identity, "profile": profile.to_json()}


def saved(path: Path) -> list[tuple[str, int, float]]:
    return [
        (identity, each.key[0], each.forms[Form("knorm", 0.5)].mean)
        for identity in (OURS, THEIRS)
        for each in ProfileStore(path, bytes.fromhex(identity)).load()
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "profiles"


def refuse(file: ProfileFile, given: Json) -> None:
    with pytest.raises(IntrospectionError, match="was not saved: profile store"):
        file.keep_now(given)


def test_what_came_before_the_file_could_be_opened_is_saved_later(path: Path) -> None:
    path.parent.touch()
    file = ProfileFile(str(path))
    refuse(file, answered(1))
    refuse(file, answered(2))
    refuse(file, answered(1, 0.75))
    path.parent.unlink()
    file.keep_now(answered(3))
    assert saved(path) == [(OURS, 2, 0.5), (OURS, 1, 0.75), (OURS, 3, 0.5)]


def test_what_came_while_the_folder_was_away_is_saved_later(path: Path) -> None:
    file = ProfileFile(str(path))
    file.keep_now(answered(1))
    shutil.rmtree(path.parent)
    refuse(file, answered(2))
    refuse(file, answered(3))
    path.parent.mkdir()
    file.keep_now(answered(4))
    assert saved(path) == [(OURS, number, 0.5) for number in (2, 3, 4)]


def test_what_waits_is_bounded_and_of_one_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_writer, "MAX_UNSAVED", 2)
    path.parent.touch()
    file = ProfileFile(str(path))
    for number in (1, 2, 3):
        refuse(file, answered(number, identity=THEIRS))
    for number in (4, 5, 6):
        refuse(file, answered(number))
    path.parent.unlink()
    file.keep_now(answered(7))
    assert saved(path) == [(OURS, 6, 0.5), (OURS, 7, 0.5)]
