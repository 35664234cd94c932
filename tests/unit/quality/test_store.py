"""Profiles that were put are there after a kill, and never is another profile there.

Run as a program, this file is the process that forks writers and kills them, or one of two writers at once.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sglang_evicpress.core import PRESSES, Form
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.running_stats import RunningStats
from sglang_evicpress.quality.store import MAX_MODELS, ProfileStore, StoreError

OURS, THEIRS = b"ours............", b"theirs.........."
CAP = 20  # of a store that writers are killed in


def make_profile(key: int, version: int = 0, num_forms: int = 15) -> Profile:
    """Another profile for every pair of ``key`` and ``version``; of 200 forms it does not fit a page."""
    draw = random.Random(f"{key} {version}")
    kept = (0.2, 0.4, 0.5, 0.6, 0.8) if num_forms <= 15 else tuple(index / 70 for index in range(1, 70))
    forms = [Form(press, fraction) for press in tuple(PRESSES)[:3] for fraction in kept][:num_forms]
    stats = {form: RunningStats.of(draw.random() for _ in range(4)) for form in forms}
    return Profile(b"%016d" % key, 64 * (1 + version % 1000), stats, "logprob", "0123456789abcdef", 4, 1.5e9 + version)


def load(path: Path, identity: bytes = OURS, max_profiles: int = 10_000) -> list[Profile]:
    return ProfileStore(path, identity, max_profiles).load()


def fill(path: Path, profiles: list[Profile], identity: bytes = OURS, max_profiles: int = 10_000) -> None:
    store = ProfileStore(path, identity, max_profiles)
    for profile in profiles:
        store.put(profile)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a b" / "é%?#.db"


def test_puts_are_loaded_in_their_order_and_the_latest_of_a_context_counts(path: Path) -> None:
    profiles = [make_profile(key, num_forms=200) for key in (5, 3)]
    fill(path, [*profiles, make_profile(1), make_profile(9), make_profile(1, 7)])
    assert load(path) == [*profiles, make_profile(9), make_profile(1, 7)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_profiles_of_another_model_are_kept_and_never_returned(path: Path) -> None:
    fill(path, [make_profile(1), make_profile(2)])
    fill(path, [make_profile(1, 5)], THEIRS)
    assert load(path) == [make_profile(1), make_profile(2)]
    assert load(path, THEIRS) == [make_profile(1, 5)]
    assert load(path, b"nobody's........") == []


def test_oldest_put_of_the_model_makes_room(path: Path) -> None:
    fill(path, [make_profile(1)], THEIRS)
    fill(path, [make_profile(key) for key in (1, 2, 3, 1, 4, 5)], max_profiles=3)
    assert load(path) == [make_profile(1), make_profile(4), make_profile(5)]
    assert load(path, max_profiles=1) == [make_profile(5)]
    assert load(path, THEIRS) == [make_profile(1)]


def test_oldest_of_all_models_make_room_when_there_are_many(path: Path) -> None:
    for model in range(MAX_MODELS + 1):
        fill(path, [make_profile(model), make_profile(100 + model)], b"%016d" % model, max_profiles=2)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM profiles").fetchone() == (2 * MAX_MODELS,)
    assert load(path, b"%016d" % 0) == []


def test_profile_that_would_not_read_back_is_not_put(path: Path) -> None:
    good = make_profile(1)
    store = ProfileStore(path, OURS)
    store.put(good)
    for num_tokens, measured_s in ((65, 0.0), (64, float("nan"))):
        with pytest.raises(ValueError, match="expected"):
            store.put(Profile(good.key, num_tokens, good.forms, "logprob", good.query_set, 1, measured_s))
    stats = RunningStats.of(np.array([0.25, 0.5], dtype=np.float64))
    of_numpy = Profile(b"k" * 16, 64, {Form("knorm", 0.5): stats}, "logprob", "0" * 16, 2, 1.0)
    store.put(of_numpy)
    assert store.load() == [good, of_numpy]


def test_what_cannot_be_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"profile store {tmp_path} is a folder: expected a file"):
        load(tmp_path)
    with pytest.raises(ValueError, match="profile store /dev/null is a device: expected a file"):
        load(Path("/dev/null"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/profiles cannot be used .*: expected a file"):
        load(tmp_path / "file" / "profiles")
    for identity, max_profiles in ((b"short", 10), (OURS, 0)):
        with pytest.raises(ValueError, match="expected"):
            ProfileStore(tmp_path / "none", identity, max_profiles)
    assert not (tmp_path / "none").exists()


def test_link_leads_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "profiles.db")
    fill(tmp_path / "link", [make_profile(1)])
    assert load(tmp_path / "far" / "profiles.db") == [make_profile(1)]


def test_a_file_or_folder_that_is_taken_away_is_made_again_or_named(path: Path) -> None:
    store = ProfileStore(path, OURS)
    store.put(make_profile(1))
    path.unlink()
    store.put(make_profile(2))
    assert store.load() == [make_profile(2)]
    path.parent.rename(path.parent.with_name("away"))
    with pytest.raises(StoreError, match="cannot be written .*No such file"):
        store.put(make_profile(3))
    path.parent.with_name("away").rename(path.parent)
    store.put(make_profile(3))
    assert store.load() == [make_profile(2), make_profile(3)]


def test_foreign_file_that_took_the_place_is_not_written_to(path: Path) -> None:
    store = ProfileStore(path, OURS)
    path.write_bytes(b"dear diary" * 20)
    with pytest.raises(StoreError, match="cannot be written .*not a database"):
        store.put(make_profile(1))
    assert path.read_bytes() == b"dear diary" * 20


def of_something_else(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE diary (entry)")
        database.commit()


def of_version_2(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 2")


OTHER_KINDS: dict[str, Callable[[Path], object]] = {
    "no database": lambda path: path.write_text("no store at all\n" * 50),
    "a database of something else": of_something_else,
    "of version 2, not 1": of_version_2,
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(path.read_bytes()[:4096] + bytes(path.stat().st_size - 4096)),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_what_is_no_profile_store_is_refused_and_stays_as_it_is(path: Path, kind: str) -> None:
    fill(path, [make_profile(1)])
    OTHER_KINDS[kind](path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=re.escape(f"profile store {path} is {kind}: expected a file that")):
        ProfileStore(path, OURS)
    assert path.read_bytes() == before and not list(path.parent.glob("*.bad*"))


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_set_aside_and_said(path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    for count in ("", "1"):
        fill(path, [make_profile(key) for key in range(40)])
        DAMAGES[name](path)
        damaged = path.read_bytes()
        caplog.clear()
        assert load(path) == []
        aside = path.with_name(f"{path.name}.bad{count}")
        assert aside.read_bytes() == damaged
        assert [str(aside) in record.getMessage() for record in caplog.records] == [True]


def test_profile_with_another_byte_is_left_out_and_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path, [make_profile(key, num_forms=1) for key in range(5)])
    data = path.read_bytes()
    at = data.index(b"measured_s")
    path.write_bytes(data[: at - 20] + bytes([data[at - 20] ^ 1]) + data[at - 19 :])
    kept = load(path)
    assert len(kept) == 4 and all(profile in [make_profile(key, num_forms=1) for key in range(5)] for profile in kept)
    assert "does not match its checksum" in caplog.text


def test_full_disk_leaves_the_file_whole(path: Path) -> None:
    store = ProfileStore(path, OURS)
    store.put(make_profile(1))
    resource = pytest.importorskip("resource")
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        with pytest.raises(StoreError, match="cannot be written"):
            store.put(make_profile(2, num_forms=200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    store.put(make_profile(3))
    assert load(path) == [make_profile(1), make_profile(3)]


def test_two_processes_write_at_once(path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, __file__, "write", str(path), str(start)]) for start in (0, 1000)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    profiles = load(path)
    for start in (0, 1000):
        keys = range(start, start + 30)
        assert [profile for profile in profiles if int(profile.key) in keys] == [make_profile(key) for key in keys]
    assert len(profiles) == 60


def test_every_put_that_returned_survives_kill(path: Path) -> None:
    path.parent.mkdir()
    done = subprocess.run(
        [sys.executable, __file__, "kill", str(path), "40"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 40
    assert not list(path.parent.glob("*.bad*"))


# As a program


def _nth(seed: int, index: int) -> Profile:
    """The put number ``index`` of the writer ``seed``."""
    return make_profile(random.Random(f"{seed} {index}").randrange(2 * CAP), seed * 10_000 + index)


def _after(state: list[Profile], profile: Profile) -> list[Profile]:
    return [*(known for known in state if known.key != profile.key), profile][-CAP:]


def _kill(path: Path, num_kills: int, first_seed: int) -> str:
    """Problems end the process; else the number of puts that returned."""
    num_puts = 0
    state: list[Profile] = []
    for seed in range(first_seed, first_seed + num_kills):
        draw = random.Random(seed)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            store = ProfileStore(path, OURS, CAP)
            for index in range(100_000):
                store.put(_nth(seed, index))
                os.write(writer, b".")
        os.close(writer)
        told, enough = b"", draw.randint(1, 12) if draw.random() < 0.9 else 0
        while len(told) < enough:
            part = os.read(reader, enough - len(told))
            assert part, "the writer ended by itself"
            told += part
        time.sleep(draw.uniform(0.0, 0.004))
        os.kill(pid, signal.SIGKILL)
        while more := os.read(reader, 4096):
            told += more
        os.close(reader)
        os.waitpid(pid, 0)
        for index in range(len(told)):
            state = _after(state, _nth(seed, index))
        found = load(path, max_profiles=CAP)
        assert found in (state, _after(state, _nth(seed, len(told)))), (seed, len(told))
        state = found
        num_puts += len(told)
    return str(num_puts)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        fill(Path(sys.argv[2]), [make_profile(key) for key in range(int(sys.argv[3]), int(sys.argv[3]) + 30)])
    else:
        print(_kill(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0))
