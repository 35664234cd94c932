"""What was put is there after a kill, or after damage is seen; never is another profile there.

Run as a program, this file is the process that forks writers and kills them, or one of two writers at once.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import orjson
import pytest

from sglang_evicpress.core import PRESSES, Form
from sglang_evicpress.profiler import store as store_module
from sglang_evicpress.profiler.evidence import Evidence
from sglang_evicpress.profiler.profile import Profile
from sglang_evicpress.profiler.salvage import Found, Row, checksum
from sglang_evicpress.profiler.store import ProfileStore, StoreDamaged, StoreError, check, repair

OURS, THEIRS = b"ours............", b"theirs.........."
CAP = 20  # of a store that writers are killed in


def make_profile(key: int, version: int = 0, num_forms: int = 15) -> Profile:
    """Another profile for every pair of ``key`` and ``version``; of 200 forms it does not fit a page."""
    draw = random.Random(f"{key} {version}")
    kept = (0.2, 0.4, 0.5, 0.6, 0.8) if num_forms <= 15 else tuple(index / 70 for index in range(1, 70))
    forms = [Form(press, fraction) for press in PRESSES[:3] for fraction in kept][:num_forms]
    evidence = {form: Evidence.of(draw.random() for _ in range(4)) for form in forms}
    return Profile(b"%016d" % key, 64 * (1 + version), evidence, "logprob", "0123456789abcdef", 4, 1.5e9 + version)


def load(path: Path, identity: bytes = OURS, max_profiles: int = 10_000) -> list[Profile]:
    with closing(ProfileStore(path, identity, max_profiles)) as store:
        return store.load()


def fill(path: Path, profiles: list[Profile], identity: bytes = OURS, max_profiles: int = 10_000) -> None:
    with closing(ProfileStore(path, identity, max_profiles)) as store:
        for profile in profiles:
            store.put(profile)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profiles.sqlite"


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with the profiles 0 to 39."""
    path = tmp_path_factory.mktemp("forty") / "profiles.sqlite"
    fill(path, [make_profile(key) for key in range(40)])
    return path.read_bytes()


def test_puts_are_loaded_in_their_order_by_the_next_store(path: Path) -> None:
    profiles = [make_profile(key) for key in (5, 3, 9, 1)]
    fill(path, profiles)
    assert load(path) == profiles


def test_put_takes_the_place_of_the_same_context_and_counts_as_the_latest(path: Path) -> None:
    fill(path, [make_profile(1), make_profile(2), make_profile(1, 7), make_profile(1, 8)])
    assert load(path) == [make_profile(2), make_profile(1, 8)]


def test_long_profile_comes_back_whole(path: Path) -> None:
    profiles = [make_profile(key, num_forms=200) for key in range(3)]
    assert len(orjson.dumps(profiles[0].to_json())) > 3 * 4096
    fill(path, profiles)
    assert load(path) == profiles


def test_profiles_of_another_model_are_kept_and_never_returned(path: Path) -> None:
    fill(path, [make_profile(1), make_profile(2)])
    fill(path, [make_profile(1, 5)], THEIRS)
    assert load(path) == [make_profile(1), make_profile(2)]
    assert load(path, THEIRS) == [make_profile(1, 5)]
    assert load(path, b"nobody's........") == []
    assert check(path) == 3


def test_oldest_put_of_the_model_makes_room(path: Path) -> None:
    fill(path, [make_profile(1)], THEIRS)
    fill(path, [make_profile(key) for key in (1, 2, 3, 1, 4, 5)], max_profiles=3)
    assert load(path) == [make_profile(1), make_profile(4), make_profile(5)]
    assert load(path, THEIRS) == [make_profile(1)]


def test_smaller_cap_returns_the_latest(path: Path) -> None:
    fill(path, [make_profile(key) for key in range(5)])
    assert load(path, max_profiles=2) == [make_profile(3), make_profile(4)]


def test_oldest_of_all_models_make_room_when_there_are_many(path: Path) -> None:
    for model in range(store_module.MAX_MODELS + 1):
        fill(path, [make_profile(model), make_profile(100 + model)], b"%016d" % model, max_profiles=2)
    assert check(path) == 2 * store_module.MAX_MODELS
    assert load(path, b"%016d" % 0) == []
    assert load(path, b"%016d" % 1) == [make_profile(1), make_profile(101)]


def test_profile_that_would_not_read_back_is_not_put(path: Path) -> None:
    good = make_profile(1)
    bad = [
        Profile(good.key, 64, {Form("keydiff", 0.5, "int8"): Evidence(1, 0.5)}, "logprob", good.query_set, 1, 0.0),
        Profile(good.key, 65, good.forms, "logprob", good.query_set, 1, 0.0),
        Profile(good.key, 64, good.forms, "logprob", good.query_set, 1, float("nan")),
    ]
    with closing(ProfileStore(path, OURS)) as store:
        store.put(good)
        for profile in bad:
            with pytest.raises(ValueError, match="expected"):
                store.put(profile)
        assert store.load() == [good]


def test_numbers_that_numpy_made_are_put(path: Path) -> None:
    evidence = Evidence.of(np.array([0.25, 0.5], dtype=np.float64))
    profile = Profile(b"k" * 16, 64, {Form("knorm", 0.5): evidence}, "logprob", "0" * 16, 2, 1.0)
    fill(path, [profile])
    assert load(path) == [profile]


def test_folders_that_are_missing_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b é%?#" / "profiles.sqlite"
    fill(path, [make_profile(1)])
    assert load(path) == [make_profile(1)]


def test_link_leads_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link, path = tmp_path / "link", tmp_path / "far" / "profiles.sqlite"
    link.symlink_to(path)
    fill(link, [make_profile(1), make_profile(2)])
    assert load(path) == [make_profile(1), make_profile(2)]
    damage(path)
    assert repair(link).bad_copy == tmp_path / "far" / "profiles.sqlite.bad"
    assert link.is_symlink() and check(link) == 1


@pytest.mark.parametrize("call", [load, check, repair])
def test_folder_in_the_place_of_the_file_is_refused(tmp_path: Path, call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=f"profile store {tmp_path} is a folder: expected a file"):
        call(tmp_path)
    with pytest.raises(ValueError, match="profile store /dev/null is a device: expected a file"):
        call(Path("/dev/null"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/profiles .*: expected"):
        call(tmp_path / "file" / "profiles")


@pytest.mark.parametrize("call", [check, repair])
def test_file_that_is_not_there_is_not_made(path: Path, call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match="is not there"):
        call(path)
    assert not path.exists()


@pytest.mark.parametrize(("identity", "max_profiles"), [(b"short", 10), (OURS, 0)])
def test_bad_arguments_are_refused(path: Path, identity: bytes, max_profiles: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        ProfileStore(path, identity, max_profiles)
    assert not path.exists()


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Root may write anything."""
    if os.geteuid() != 0:
        yield
        return
    folders = [parent for parent in folder.parents if parent.stat().st_mode & 0o011 != 0o011]
    modes = [parent.stat().st_mode for parent in folders]
    for parent, mode in zip(folders, modes, strict=True):
        parent.chmod(mode | 0o011)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for parent, mode in zip(folders, modes, strict=True):
            parent.chmod(mode)


def test_file_that_may_only_be_read_is_checked_and_not_opened(path: Path) -> None:
    fill(path, [make_profile(1)])
    for each in path.parent.iterdir():
        each.chmod(0o444)
    path.parent.chmod(0o555)
    before = path.read_bytes()
    with as_nobody(path):
        with pytest.raises(ValueError, match=f"profile store {path} cannot be used .*: expected a file that can"):
            ProfileStore(path, OURS)
        assert check(path) == 1
    path.parent.chmod(0o755)
    assert path.read_bytes() == before


def test_file_that_may_not_be_read_is_refused(path: Path) -> None:
    fill(path, [make_profile(1)])
    path.parent.chmod(0o777)
    path.chmod(0)
    with as_nobody(path):
        for call in (load, check):
            with pytest.raises(ValueError, match=f"profile store {path} cannot be used .*: expected a file that can"):
                call(path)


def test_closed_store_says_so(path: Path) -> None:
    store = ProfileStore(path, OURS)
    store.close()
    store.close()
    with pytest.raises(StoreError, match=r"cannot be written .*closed"):
        store.put(make_profile(1))
    with pytest.raises(StoreError, match=r"cannot be read .*closed"):
        store.load()


def test_file_that_is_taken_away_loses_no_put_silently(path: Path) -> None:
    with closing(ProfileStore(path, OURS)) as store:
        store.put(make_profile(1))
        path.unlink()
        with pytest.raises(StoreError, match=f"profile store {path}"):
            store.put(make_profile(2))


def test_two_stores_share_a_file(path: Path) -> None:
    with closing(ProfileStore(path, OURS)) as one, closing(ProfileStore(path, OURS)) as other:
        for key in range(6):
            (one if key % 2 else other).put(make_profile(key))
        assert one.load() == other.load() == [make_profile(key) for key in range(6)]


def test_busy_file_is_waited_for_and_then_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path, [make_profile(1)])
    monkeypatch.setattr("sglang_evicpress.profiler.database.BUSY_S", 0.01)
    with closing(ProfileStore(path, OURS)) as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="cannot be written .*locked") as busy:
            store.put(make_profile(2))
        assert not isinstance(busy.value, StoreDamaged)
        with pytest.raises(StoreError, match="cannot be opened .*locked"):
            ProfileStore(path, OURS)
        with pytest.raises(StoreError, match="cannot be read .*locked"):
            check(path)
        other.execute("ROLLBACK")
        store.put(make_profile(2))
    assert load(path) == [make_profile(1), make_profile(2)]


def test_two_processes_write_at_once(path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, __file__, "write", str(path), str(start)]) for start in (0, 1000)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    profiles = load(path)
    for start in (0, 1000):
        keys = range(start, start + 30)
        assert [profile for profile in profiles if int(profile.key) in keys] == [make_profile(key) for key in keys]
    assert len(profiles) == 60


def test_every_put_that_returned_survives_kill(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, "kill", str(path), "40"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 40


# Damage


def damage(path: Path) -> None:
    """In the middle of a profile."""
    data = bytearray(path.read_bytes())
    data[data.index(b"measured_s") - 20] ^= 1
    path.write_bytes(data)


def edit(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def set_row(path: Path, payload: bytes, key: bytes = b"%016d" % 1) -> None:
    """One with a good checksum, of which we would never have put the payload."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        values = Row(900, OURS, key, payload, checksum(900, OURS, key, payload))
        connection.execute("REPLACE INTO profiles VALUES (?, ?, ?, ?, ?)", values)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def _format(path: Path) -> None:
    """Of a version that SQLite reads and does not write."""
    data = bytearray(path.read_bytes())
    data[18] = 3
    path.write_bytes(data)


def _lengthen(path: Path) -> None:
    """As a damaged journal does it, which says how long the file was."""
    damage(path)
    os.truncate(path, 1 << 42)


DAMAGES = {
    "text": lambda path: path.write_text("no database at all\n" * 500),
    "empty": lambda path: os.truncate(path, 0),
    "cut": _cut,
    "flip": damage,
    "format": _format,
    "schema version": lambda path: edit(path, "PRAGMA user_version = 2"),
    "another program's": lambda path: edit(path, "PRAGMA application_id = 7"),
    "schema": lambda path: edit(path, "DROP INDEX by_key"),
    "json": lambda path: set_row(path, b"{"),
    "profile": lambda path: set_row(path, b"{}"),
    "another key": lambda path: set_row(path, orjson.dumps(make_profile(2).to_json())),
    "identity": lambda path: edit(path, "UPDATE profiles SET identity = zeroblob(16) WHERE sequence = 1"),
    "order": lambda path: edit(path, "UPDATE profiles SET sequence = 90 WHERE sequence = 1"),
    "type": lambda path: edit(path, "UPDATE profiles SET payload = CAST(payload AS TEXT), checksum = 3.5"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_nothing_is_overwritten(path: Path, forty: bytes, name: str) -> None:
    path.write_bytes(forty)
    DAMAGES[name](path)
    before = path.read_bytes()
    calls = (check,) if name == "identity" else (check, load)  # another model's row is not looked at
    for call in calls:
        with pytest.raises(StoreDamaged) as error:
            call(path)
        assert f"profile store {path} is damaged" in str(error.value)
        assert f"`evicpress profile repair {path}`" in str(error.value)
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.bad*"))


@pytest.mark.parametrize(
    ("name", "num_kept", "num_lost"),
    [
        ("text", 0, 0),
        ("empty", 0, 0),
        ("flip", 39, 1),
        ("format", 40, 0),
        ("schema version", 40, 0),
        ("another program's", 40, 0),
        ("schema", 40, 0),
        ("json", 39, 1),
        ("profile", 39, 1),
        ("another key", 39, 1),
        ("identity", 39, 1),
        ("order", 39, 1),
    ],
)
def test_repair_keeps_every_other_profile_and_the_damaged_file(
    path: Path, forty: bytes, name: str, num_kept: int, num_lost: int
) -> None:
    path.write_bytes(forty)
    profiles = [make_profile(key) for key in range(40)]
    DAMAGES[name](path)
    before = path.read_bytes()
    report = repair(path)
    assert (report.num_kept, report.num_lost) == (num_kept, num_lost)
    assert report.bad_copy == path.with_name("profiles.sqlite.bad")
    assert report.bad_copy.read_bytes() == before
    kept = load(path)
    assert len(kept) == num_kept and [profile for profile in profiles if profile in kept] == kept
    assert not list(path.parent.glob("*.part"))
    fill(path, profiles[:1])  # and it can be written
    assert load(path)[-1] == profiles[0]


def test_repair_of_a_file_of_many_terabytes_of_nothing_reads_the_rest(path: Path, forty: bytes) -> None:
    path.write_bytes(forty)
    _lengthen(path)
    report = repair(path)
    assert (report.num_kept, report.num_lost) == (39, 1)
    assert report.bad_copy is not None and report.bad_copy.stat().st_blocks * 512 < 2 * len(forty)


def test_repair_of_a_whole_file_changes_nothing(path: Path) -> None:
    fill(path, [make_profile(1), make_profile(1, 2)])
    before = path.read_bytes()
    assert repair(path) == store_module.RepairReport(1, 0, None)
    assert path.read_bytes() == before


def test_damaged_files_are_numbered(path: Path) -> None:
    names = []
    for _ in range(3):
        fill(path, [make_profile(1)])
        damage(path)
        bad = repair(path).bad_copy
        assert bad is not None
        names.append(bad.name)
    assert names == ["profiles.sqlite.bad", "profiles.sqlite.bad-2", "profiles.sqlite.bad-3"]


def test_repair_is_refused_while_a_store_is_open(path: Path) -> None:
    with closing(ProfileStore(path, OURS)) as store:
        store.put(make_profile(1))
        damage(path)
        with pytest.raises(StoreError, match=f"profile store {path} is open in a server: stop it first"):
            repair(path)
    assert repair(path).bad_copy is not None


def test_repair_of_a_truncated_file_keeps_what_is_before_the_cut(path: Path, forty: bytes) -> None:
    left = forty[: len(forty) // 2 + 1000]
    path.write_bytes(left)
    report = repair(path)
    expected = [make_profile(key) for key in range(40) if orjson.dumps(make_profile(key).to_json()) in left]
    assert load(path) == expected
    assert len(expected) > 10 and report.num_lost > 0


def test_repair_reads_long_profiles_and_needs_no_page_but_theirs(path: Path) -> None:
    profiles = [make_profile(key, num_forms=200 if key % 3 else 15) for key in range(30)]
    fill(path, profiles)
    data = bytearray(path.read_bytes())
    data[: 2 * 4096] = bytes(2 * 4096)  # the schema and the root of the table
    path.write_bytes(data)
    assert repair(path).num_kept == 30
    assert load(path) == profiles


def test_repair_does_not_bring_back_what_was_replaced_or_removed(path: Path) -> None:
    fill(path, [make_profile(key % 30, key) for key in range(100)], max_profiles=10)
    edit(path, "PRAGMA user_version = 2")
    assert repair(path).num_kept == 10
    assert load(path) == [make_profile(key % 30, key) for key in range(90, 100)]


@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
def test_repair_finds_what_is_only_in_a_journal_and_leaves_none_beside_the_new_file(path: Path, mode: str) -> None:
    """The process is gone with its last write in a write-ahead log; or in the middle of one, half of which may stay."""
    fill(path, [make_profile(key) for key in range(10)])
    edit(path, "PRAGMA user_version = 7")
    name = OURS, b"%016d" % 50
    payload = orjson.dumps(make_profile(50).to_json())
    row = (99, *name, payload, checksum(99, *name, payload))
    program = f"""if True:
        import os, sqlite3
        connection = sqlite3.connect({str(path)!r}, isolation_level=None)
        connection.execute("PRAGMA journal_mode = {mode}")
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO profiles VALUES (?, ?, ?, ?, ?)", {row!r})
        if {mode == "WAL"}:
            connection.execute("COMMIT")
        else:
            connection.execute("UPDATE profiles SET payload = zeroblob(5000)")
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", program], check=True)
    side = path.with_name(path.name + ("-wal" if mode == "WAL" else "-journal"))
    assert side.stat().st_size > 0
    report = repair(path)
    assert report.num_kept == 11
    assert load(path) == [make_profile(key) for key in [*range(10), 50]]
    assert report.bad_copy is not None and report.bad_copy.with_name(report.bad_copy.name + side.name[15:]).exists()


def test_check_of_a_put_that_was_killed_changes_nothing(path: Path) -> None:
    fill(path, [make_profile(key) for key in range(10)])
    program = f"""if True:
        import os, sqlite3
        connection = sqlite3.connect({str(path)!r}, isolation_level=None)
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        connection.execute("UPDATE profiles SET payload = zeroblob(5000)")
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", program], check=True)
    before = {each: each.read_bytes() for each in path.parent.iterdir()}
    assert before[path.with_name("profiles.sqlite-journal")][:8] == bytes.fromhex("d9d505f920a163d7")
    assert check(path) == 10
    assert repair(path).bad_copy is None
    assert {each: each.read_bytes() for each in path.parent.iterdir()} == before
    assert load(path) == [make_profile(key) for key in range(10)]


def test_record_whose_pages_lead_in_a_circle_is_not_followed_for_ever() -> None:
    page = bytearray(4096)
    page[0], page[4], page[8:10] = 13, 1, (100).to_bytes(2, "big")
    page[100:105] = b"\xff\xff\xff\x7f\x01"  # a record of 256 MiB
    found = Found()
    found.scan({number: bytes(page) for number in (2, 3)})
    assert not found.rows


def spoil(data: bytearray, draw: random.Random) -> None:
    """Some bytes, anywhere or where the file says how it is built; a whole page; or all from some place on."""
    kind = draw.randrange(6)
    if kind == 0:
        del data[draw.randrange(len(data)) :]
    elif kind == 1:
        at = draw.randrange(len(data) // 4096) * 4096
        data[at : at + 4096] = draw.choice([bytes(4096), draw.randbytes(4096), bytes(data[4096:8192])])
    else:
        for _ in range(draw.choice([1, 1, 2, 8])):
            page = draw.randrange(len(data) // 4096) * 4096 if kind > 2 else 0
            at = page + draw.randrange((4096, 100, 100, 4096, 16, 64)[kind])
            data[at] = draw.choice([data[at] ^ 1 << draw.randrange(8), draw.randrange(256), 0])


def spoil_once(path: Path, pristine: dict[Path, bytes], profiles: list[Profile], seed: int) -> str:
    """Spoil a copy of the files and open them: what happened, or AssertionError."""
    draw = random.Random(seed)
    for each in path.parent.iterdir():
        each.unlink()
    for each, content in pristine.items():
        data = bytearray(content)
        if each == path or (len(data) >= 4096 and draw.random() < 0.3):
            spoil(data, draw)
        each.write_bytes(data)
    try:
        loaded = load(path)
    except StoreDamaged:
        report = repair(path)
        kept = load(path)
        assert len(kept) <= report.num_kept == check(path)
        assert all(profile in profiles for profile in kept)
        return f"repaired {len(kept)}"
    assert loaded == profiles, seed
    return "whole"


def test_spoiled_file_gives_an_error_or_exactly_what_was_put(path: Path) -> None:
    profiles = [make_profile(key, num_forms=15 if key % 8 else 200) for key in range(30)]
    fill(path, [make_profile(1)], THEIRS)
    fill(path, profiles)
    pristine = {each: each.read_bytes() for each in path.parent.iterdir()}
    results = [spoil_once(path, pristine, profiles, seed) for seed in range(100)]
    assert len(set(results)) > 10  # also whole ones: not every byte means something
    assert "whole" in results


# As a program


def _write(path: Path, start: int) -> None:
    with closing(ProfileStore(path, OURS)) as store:
        for key in range(start, start + 30):
            store.put(make_profile(key))


def _nth(seed: int, index: int) -> Profile:
    """The put number ``index`` of the writer ``seed``."""
    return make_profile(random.Random(f"{seed} {index}").randrange(2 * CAP), seed * 10_000 + index)


def _after(state: list[Profile], profile: Profile) -> list[Profile]:
    return [*(known for known in state if known.key != profile.key), profile][-CAP:]


def _kill(path: Path, num_kills: int, first_seed: int) -> str:
    """Problems end the process; else the numbers of puts that returned and of kills that left one half done."""
    num_puts = num_inside = 0
    state: list[Profile] = []
    journal = path.with_name(path.name + "-journal")
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
            told += os.read(reader, enough - len(told))
        time.sleep(draw.uniform(0.0, 0.004))
        os.kill(pid, signal.SIGKILL)
        while more := os.read(reader, 4096):
            told += more
        os.close(reader)
        os.waitpid(pid, 0)
        num_inside += journal.exists() and journal.read_bytes()[:1] not in (b"", b"\0")
        if path.exists() and draw.random() < 0.5:
            before = path.read_bytes()
            check(path)
            assert path.read_bytes() == before
        for index in range(len(told)):
            state = _after(state, _nth(seed, index))
        found = load(path, max_profiles=CAP)
        assert found in (state, _after(state, _nth(seed, len(told)))), (seed, len(told))
        state = found
        num_puts += len(told)
    return f"{num_puts} {num_inside}"


if __name__ == "__main__":
    if sys.argv[1] == "write":
        _write(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        print(_kill(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0))
