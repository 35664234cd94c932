"""A disk that does not answer: nobody waits for it longer than agreed, and it is back in use when it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.tiers.ssd.test_ssd import CAPACITY, FINGERPRINT, fetch, make_entry, put

from sglang_evicpress.tiers.faults import Faults, FaultyFiles
from sglang_evicpress.tiers.ssd import deadline, health
from sglang_evicpress.tiers.ssd import store as store_module
from sglang_evicpress.tiers.ssd.deadline import Caller, Pulse, within
from sglang_evicpress.tiers.ssd.folder import StoreError
from sglang_evicpress.tiers.ssd.store import SsdStore

PATIENCE_S = 30.0


@pytest.fixture
def faults() -> Iterator[Faults]:
    found = Faults()
    yield found
    for event in found.hung.values():
        event.set()


@pytest.fixture
def open_store(tmp_path: Path, faults: Faults) -> Callable[..., SsdStore]:
    return lambda **options: SsdStore(
        tmp_path / "rank-0",
        CAPACITY,
        FINGERPRINT,
        **{"sync": "none", "backoff_s": 0.0, "files": FaultyFiles(faults)} | options,
    )


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_work_in_time_gives_its_result_or_its_error() -> None:
    assert within(PATIENCE_S, "it", lambda: 7) == 7
    with pytest.raises(StoreError, match="no folder"):
        within(PATIENCE_S, "it", lambda: (_ for _ in ()).throw(StoreError("no folder")))


def test_late_work_is_refused_and_undone_when_it_ends() -> None:
    may_end, undone = threading.Event(), []
    with pytest.raises(StoreError, match=r"^SSD folder /kv did not answer within 0.01 s$"):
        within(0.01, "SSD folder /kv", lambda: may_end.wait(PATIENCE_S), undo=undone.append)
    assert undone == []
    may_end.set()
    until(lambda: undone == [True])


def test_a_caller_fails_at_once_while_a_call_hangs_and_works_again_after_it() -> None:
    caller, may_end = Caller(), threading.Event()
    assert caller.call(lambda: 1, PATIENCE_S) == 1
    with pytest.raises(TimeoutError, match="did not answer within 0.01 s"):
        caller.call(lambda: may_end.wait(PATIENCE_S), 0.01)
    assert caller.hangs
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="earlier call"):
        caller.call(lambda: 2, PATIENCE_S)
    assert time.monotonic() - begin < PATIENCE_S / 2
    may_end.set()
    until(lambda: not caller.hangs)
    assert caller.call(lambda: 3, PATIENCE_S) == 3


def test_a_pulse_tells_how_long_something_goes_on() -> None:
    pulse = Pulse()
    assert pulse.oldest_s() == 0.0
    with pulse.beat():
        time.sleep(0.002)
        assert pulse.oldest_s() >= 0.002
    with pulse.beat(PATIENCE_S):
        assert pulse.oldest_s() == 0.0
    assert pulse.oldest_s() == 0.0


def test_a_question_for_room_that_hangs_takes_the_store_out_of_use(
    open_store: Callable[..., SsdStore], faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "ANSWER_S", 0.01)
    monkeypatch.setattr(health, "FRESH_S", 0.0)
    store = open_store()
    header, payload = make_entry(1)
    ref = put(store, header, payload)
    may_go_on = faults.hang("free_bytes")
    assert store.reserve(len(payload)) is None
    assert not store.is_answering and not store.is_writable and store.find(header.lookup_key) == []
    assert store.errors["deadline"] >= 1
    counted = store.errors["deadline"]
    for _ in range(3):
        assert store.find(header.lookup_key) == []  # each hang is counted once
    assert store.errors["deadline"] == counted
    may_go_on.set()
    until(lambda: store.is_answering)
    assert store.find(header.lookup_key) == [ref] and fetch(store, ref) == payload
    assert store.reserve(len(payload)) is not None
    store.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_transfer_that_hangs_takes_the_store_out_of_use(
    open_store: Callable[..., SsdStore], faults: Faults, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(deadline, "SLOWEST_BYTES_PER_S", float("inf"))
    store = open_store()
    header, payload = make_entry(1)
    ref = put(store, header, payload)
    may_go_on = faults.hang(call)
    work = (lambda: fetch(store, ref)) if call == "preadv" else (lambda: put(store, *make_entry(2)))
    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: faults.counts["hang"] > 0)
    monkeypatch.setattr(health, "HANG_S", 0.0)
    assert store.find(header.lookup_key) == [] and not store.is_writable and store.errors == {"deadline": 1}
    may_go_on.set()
    thread.join(PATIENCE_S)
    assert store.find(header.lookup_key) == [ref] and store.is_writable
    store.close()


def test_close_waits_for_the_syncing_thread_no_longer_than_its_deadline(
    open_store: Callable[..., SsdStore], faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_CLOSE_S", 0.01)
    monkeypatch.setattr(store_module, "_SYNC_PERIOD_S", 0.001)
    store = open_store(sync="batch")
    faults.hang("fdatasync")
    put(store, *make_entry(1))
    until(lambda: faults.counts["hang"] > 0)
    faults.hung["fdatasync"] = threading.Event()  # the thread hangs on the old one
    faults.hung["fdatasync"].set()
    store.close()
    assert store.find(make_entry(1)[0].lookup_key) == []
