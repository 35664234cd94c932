"""Profiles that were put are there after a kill, or after damage is seen; never is another profile there.

Run as a program, this file is the process that forks writers and kills them, or one of two writers at once.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
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
from sglang_evicpress.quality import store as store_module
from sglang_evicpress.quality.evidence import Evidence
from sglang_evicpress.quality.log_format import HEADER, StoreDamaged, StoreError, line_of
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.repair import check, read_all, repair
from sglang_evicpress.quality.store import SPARE_LINES, ProfileStore

OURS, THEIRS = b"ours............", b"theirs.........."
CAP = 20  # of a store that writers are killed in


def make_profile(key: int, version: int = 0, num_forms: int = 15) -> Profile:
    """Another profile for every pair of ``key`` and ``version``; of 200 forms it does not fit a page."""
    draw = random.Random(f"{key} {version}")
    kept = (0.2, 0.4, 0.5, 0.6, 0.8) if num_forms <= 15 else tuple(index / 70 for index in range(1, 70))
    forms = [Form(press, fraction) for press in list(PRESSES)[:3] for fraction in kept][:num_forms]
    evidence = {form: Evidence.of(draw.random() for _ in range(4)) for form in forms}
    return Profile(
        b"%016d" % key, 64 * (1 + version % 1000), evidence, "logprob", "0123456789abcdef", 4, 1.5e9 + version
    )


def load(path: Path, identity: bytes = OURS, max_profiles: int = 10_000) -> list[Profile]:
    with closing(ProfileStore(path, identity, max_profiles)) as store:
        return store.load()


def fill(path: Path, profiles: list[Profile], identity: bytes = OURS, max_profiles: int = 10_000) -> None:
    with closing(ProfileStore(path, identity, max_profiles)) as store:
        for profile in profiles:
            store.put(profile)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profiles.log"


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with the profiles 0 to 39."""
    path = tmp_path_factory.mktemp("forty") / "profiles.log"
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
    assert load(path, max_profiles=3) == [make_profile(1), make_profile(4), make_profile(5)]
    assert load(path, THEIRS) == [make_profile(1)]


def test_smaller_cap_returns_the_latest(path: Path) -> None:
    fill(path, [make_profile(key) for key in range(5)])
    assert load(path, max_profiles=2) == [make_profile(3), make_profile(4)]


def test_oldest_of_all_models_make_room_when_there_are_many(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SPARE_LINES", 0)
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
    path = tmp_path / "a" / "b é%?#" / "profiles.log"
    fill(path, [make_profile(1)])
    assert load(path) == [make_profile(1)]


def test_link_leads_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link, path = tmp_path / "link", tmp_path / "far" / "profiles.log"
    link.symlink_to(path)
    fill(link, [make_profile(1), make_profile(2)])
    assert load(path) == [make_profile(1), make_profile(2)]
    path.write_bytes(_flipped(path.read_bytes(), path.read_bytes().index(b"measured_s") - 20))
    assert repair(link).bad_copy == tmp_path / "far" / "profiles.log.bad"
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
    with pytest.raises(ValueError, match="does not exist"):
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
        with pytest.raises(ValueError, match=f"profile store {path} cannot be used .*denied.*: expected a file"):
            ProfileStore(path, OURS)
        assert check(path) == 1
    path.parent.chmod(0o755)
    assert path.read_bytes() == before


def test_file_that_may_not_be_read_is_refused(path: Path) -> None:
    fill(path, [make_profile(1)])
    path.parent.chmod(0o777)
    path.chmod(0)
    with as_nobody(path):
        with pytest.raises(ValueError, match=f"profile store {path} cannot be used .*denied.*: expected a file"):
            load(path)
        with pytest.raises(StoreError, match=f"profile store {path} cannot be read .*denied"):
            check(path)


def test_closed_store_says_so(path: Path) -> None:
    store = ProfileStore(path, OURS)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.put(make_profile(1))
    with pytest.raises(StoreError, match="is closed"):
        store.load()


def test_file_that_is_taken_away_or_emptied_gets_back_what_it_had(path: Path) -> None:
    fill(path, [make_profile(1)])
    fill(path, [make_profile(1, 5)], THEIRS)
    with closing(ProfileStore(path, OURS)) as store:
        store.put(make_profile(2))
        path.unlink()
        store.put(make_profile(3))
        path.write_bytes(b"")
        store.put(make_profile(4))
        assert store.load() == [make_profile(key) for key in (1, 2, 3, 4)]
    assert load(path) == [make_profile(key) for key in (1, 2, 3, 4)]
    assert load(path, THEIRS) == [make_profile(1, 5)]


def test_folder_that_was_away_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "disk" / "profiles.log"
    with closing(ProfileStore(path, OURS)) as store:
        store.put(make_profile(1))
        path.parent.rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot be written .*No such file"):
                store.put(make_profile(2))
        (tmp_path / "away").rename(path.parent)
        store.put(make_profile(2))
        assert store.load() == [make_profile(1), make_profile(2)]
        shutil.rmtree(path.parent)
        with pytest.raises(StoreError, match="cannot be read .*No such file"):
            store.load()
        path.parent.mkdir()
        store.put(make_profile(3))
        with pytest.raises(StoreError, match="stop it first"):
            repair(path)
    assert load(path) == [make_profile(key) for key in (1, 2, 3)]


def test_two_stores_share_a_file(path: Path) -> None:
    with closing(ProfileStore(path, OURS)) as one, closing(ProfileStore(path, OURS)) as other:
        for key in range(6):
            (one if key % 2 else other).put(make_profile(key))
        assert one.load() == other.load() == [make_profile(key) for key in range(6)]


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


DAMAGES = {
    "text": lambda data: b"no store at all\n" * 50,
    "flip": lambda data: _flipped(data, data.index(b"measured_s") - 20),
    "checksum": lambda data: _flipped(data, data.index(b"\n") + 3),
    "lost end": lambda data: data[: (end := data.index(b"\n", 200))] + b" " + data[end + 1 :],
    "no header": lambda data: data[data.index(b"\n") + 1 :],
    "another version": lambda data: line_of({**HEADER, "version": 2}) + data[data.index(b"\n") + 1 :],
    "no object": lambda data: data + line_of([1]),  # type: ignore[arg-type]
    "no profile": lambda data: data + line_of({"identity": OURS.hex()}),
    "bad profile": lambda data: data + line_of({"identity": OURS.hex(), "profile": {"key": "00"}}),
    "zeros": lambda data: data + bytes(4096) + b"\n",
    "no end at all": lambda data: b'{"keydiff": {"0.5": 0.9}}',
    "header with another end": lambda data: data[: data.index(b"\n")] + b"x",
    "another end": lambda data: data[:-1] + b"x",
    "foreign end": lambda data: data + b"abc, and so on",
    "foreign end behind a checksum": lambda data: data + b"0" * 32 + b"hello",
    "zeros at the end": lambda data: data + bytes(512),
}


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_nothing_is_overwritten(path: Path, forty: bytes, name: str) -> None:
    path.write_bytes(damaged := DAMAGES[name](forty))
    for call in (load, check, read_all):
        with pytest.raises(StoreDamaged, match="evicpress profile repair") as caught:
            call(path)
        assert str(path) in str(caught.value)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("name", DAMAGES)
def test_repair_keeps_every_other_profile_and_the_damaged_file(path: Path, forty: bytes, name: str) -> None:
    path.write_bytes(damaged := DAMAGES[name](forty))
    report = repair(path)
    assert report.bad_copy is not None
    assert report.bad_copy.read_bytes() == damaged
    of_other = {"text": 0, "flip": 39, "checksum": 39, "lost end": 38, "no end at all": 0, "header with another end": 0}
    left = of_other.get(name, 40)
    kept = load(path)
    assert report.num_kept == check(path) == len(kept) == left
    assert all(profile in [make_profile(key) for key in range(40)] for profile in kept)
    assert report.num_lost == {"text": 50, "no header": 0, "header with another end": 0, "another end": 0}.get(name, 1)
    assert report.problem
    fill(path, [make_profile(77)])
    assert load(path)[-1] == make_profile(77)


def test_line_that_a_kill_cut_off_counts_as_never_put(path: Path, forty: bytes) -> None:
    header = forty.index(b"\n")
    last = forty.rindex(b"\n", 0, -1) + 1
    ends = (len(forty) - 1, len(forty) - 300, *range(last, last + 60), header, header - 4, 31, 1, 0)
    for end in ends:
        path.write_bytes(forty[:end])
        whole = [make_profile(key) for key in range(forty[:end].count(b"\n") - 1)] if end > 100 else []
        assert load(path) == whole
        fill(path, [make_profile(50)])
        assert load(path) == [*whole, make_profile(50)]


def test_foreign_file_that_took_the_place_is_not_written_to(path: Path) -> None:
    with closing(ProfileStore(path, OURS)) as store:
        store.put(make_profile(1))
        for foreign in (b"dear diary", b"dear diary\n"):
            path.unlink()
            path.write_bytes(foreign)
            with pytest.raises(StoreDamaged, match=f"{path} is damaged"):
                store.put(make_profile(2))
            assert path.read_bytes() == foreign


def test_repair_of_a_whole_file_changes_nothing(path: Path, forty: bytes) -> None:
    path.write_bytes(forty)
    report = repair(path)
    assert (report.num_kept, report.num_lost, report.bad_copy) == (40, 0, None)
    assert path.read_bytes() == forty


def test_damaged_files_are_numbered(path: Path, forty: bytes) -> None:
    names = []
    for _ in range(3):
        path.write_bytes(DAMAGES["flip"](forty))
        bad_copy = repair(path).bad_copy
        assert bad_copy is not None
        names.append(bad_copy.name)
    assert names == [f"{path.name}.bad{number}" for number in ("", "1", "2")]


def test_repair_is_refused_while_a_store_is_open(path: Path) -> None:
    with closing(ProfileStore(path, OURS)) as store:
        with pytest.raises(StoreError, match="stop it first"):
            repair(path)
        store.put(make_profile(1))
    assert repair(path).num_kept == 1


def test_what_was_replaced_is_left_out_once_there_is_much_of_it(path: Path) -> None:
    num_puts = 3 * (SPARE_LINES + 10)
    with closing(ProfileStore(path, OURS)) as store, closing(ProfileStore(path, THEIRS)) as other:
        other.put(make_profile(8))
        for version in range(num_puts):
            store.put(make_profile(version % 4, version, num_forms=1))
        other.put(make_profile(9))  # into the file that took the place of the one it opened
        assert path.read_bytes().count(b"\n") <= 2 * 6 + SPARE_LINES + 2
        last = [make_profile(version % 4, version, num_forms=1) for version in range(num_puts - 4, num_puts)]
        assert store.load() == last
        assert other.load() == [make_profile(8), make_profile(9)]
    assert [each for _, each in read_all(path)] == [make_profile(8), *last, make_profile(9)]


def test_a_full_disk_is_named_and_leaves_the_file_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(ProfileStore(path, OURS)) as store:
        store.put(make_profile(1))
        write = os.write
        monkeypatch.setattr(store_module.os, "write", lambda fd, data: write(fd, data[:100]))
        with pytest.raises(StoreError, match="cannot be written"):
            store.put(make_profile(2))
        monkeypatch.undo()
        store.put(make_profile(3))
    assert load(path) == [make_profile(1), make_profile(3)]


def spoil(data: bytearray, draw: random.Random) -> None:
    """Some bytes anywhere, a stretch of zeros, or all from some place on."""
    kind = draw.randrange(4)
    at = draw.randrange(len(data))
    if kind == 0:
        del data[at:]
    elif kind == 1:
        data[at : at + 512] = bytes(512)
    else:
        for _ in range(draw.choice([1, 1, 2, 8])):
            at = draw.randrange(len(data))
            data[at] = draw.choice([data[at] ^ 1 << draw.randrange(8), draw.randrange(256), 10])


def test_spoiled_file_gives_an_error_or_only_what_was_put(path: Path) -> None:
    profiles = [make_profile(key, num_forms=15 if key % 8 else 200) for key in range(30)]
    fill(path, profiles)
    pristine = path.read_bytes()
    num_damaged = num_cut = 0
    for seed in range(200):
        data = bytearray(pristine)
        spoil(data, random.Random(seed))
        path.write_bytes(data)
        try:
            loaded = load(path)
        except StoreDamaged:
            num_damaged += 1
            report = repair(path)
            assert report.bad_copy is not None
            report.bad_copy.unlink()
            assert all(profile in profiles for profile in load(path))
            assert report.num_kept >= 10 or len(data) < len(pristine) / 2 or data.count(b"\0") == 512
            continue
        num_cut += len(loaded) < 30
        assert loaded == profiles[: len(loaded)], seed
        assert len(loaded) == 30 or bytes(data) != pristine
    assert num_damaged > 100
    assert num_cut > 20


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
            told += os.read(reader, enough - len(told))
        time.sleep(draw.uniform(0.0, 0.004))
        os.kill(pid, signal.SIGKILL)
        while more := os.read(reader, 4096):
            told += more
        os.close(reader)
        os.waitpid(pid, 0)
        if path.exists() and path.stat().st_size and draw.random() < 0.5:
            before = path.read_bytes()
            check(path)
            assert path.read_bytes() == before
        for index in range(len(told)):
            state = _after(state, _nth(seed, index))
        found = load(path, max_profiles=CAP)
        assert found in (state, _after(state, _nth(seed, len(told)))), (seed, len(told))
        state = found
        num_puts += len(told)
    return str(num_puts)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        _write(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        print(_kill(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0))
