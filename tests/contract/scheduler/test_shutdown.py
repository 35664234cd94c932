"""A server with tiers stops cleanly: however it ends, caches are closed first and their processes are waited for."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import ShutdownReq
from sglang.srt.utils import cudacore_pyspy_dump_utils

from sglang_evicpress.patches.kv_flags import DEPENDENT_FLAGS
from sglang_evicpress.patches.scheduler import shutdown

pytestmark = pytest.mark.sglang

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Scheduler:
    """Its loop runs ``step`` until it is asked to stop, at most 5 times."""

    def __init__(self, step: Callable[[], object], close: Callable[[], object] | None) -> None:
        self.gracefully_exit = False
        self.num_steps = 0
        self.num_closed = 0
        self._step = step
        self._close = close
        self.saved: list[bool] = []
        self.tree_cache = SimpleNamespace() if close is None else SimpleNamespace(close=self._count_close)

    def handle_shutdown(self, request: object) -> None:
        self.gracefully_exit = True

    def run_event_loop(self) -> None:
        while not self.gracefully_exit and self.num_steps < 5:
            self.num_steps += 1
            self._step()

    def _count_close(self, *, save: bool = True) -> None:
        self.num_closed += 1
        self.saved.append(save)
        if self._close is not None:
            self._close()

    def run(self) -> None:
        shutdown.around_event_loop(Scheduler.run_event_loop, self)


def nothing() -> None:
    pass


def raiser(error: BaseException) -> Callable[[], None]:
    def step() -> None:
        raise error

    return step


@pytest.fixture(autouse=True)
def at_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls registered for the end of this process; the reactions to signals must be as they were."""
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *call: registered.append(call))
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield registered
    assert {signum: signal.getsignal(signum) for signum in SIGNALS} == before


# ---- the scheduler process


def test_the_cache_is_closed_when_the_event_loop_ends(at_exit: list[Any]) -> None:
    scheduler = Scheduler(nothing, nothing)
    scheduler.run()
    assert (scheduler.num_steps, scheduler.saved) == (5, [True])
    assert at_exit == []  # not a child: whoever runs it may have more to do


@pytest.mark.parametrize("error", [RuntimeError("out of slots"), KeyboardInterrupt(), SystemExit(3)])
def test_the_cache_is_closed_and_nothing_of_it_saved_when_the_event_loop_fails(error: BaseException) -> None:
    scheduler = Scheduler(raiser(error), nothing)
    with pytest.raises(type(error)) as raised:
        scheduler.run()
    assert raised.value is error
    assert scheduler.num_closed == 1 and scheduler.saved == [False]


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_ends_the_loop_between_two_steps(signum: signal.Signals) -> None:
    finished: list[str] = []

    def step() -> None:
        signal.raise_signal(signum)
        finished.append("step")

    scheduler = Scheduler(step, nothing)
    with pytest.raises(SystemExit) as stopped:
        scheduler.run()
    assert stopped.value.code == 128 + signum
    assert (finished, scheduler.saved) == (["step"], [True])


def test_a_second_signal_ends_a_step_that_hangs() -> None:
    def step() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second signal was not noticed")

    scheduler = Scheduler(step, nothing)
    with pytest.raises(KeyboardInterrupt):
        scheduler.run()
    assert scheduler.saved == [False]


@pytest.mark.parametrize("signum", SIGNALS)
def test_closing_is_not_interrupted(signum: signal.Signals) -> None:
    finished: list[str] = []

    def close() -> None:
        signal.raise_signal(signum)
        finished.append("close")

    Scheduler(nothing, close).run()
    assert finished == ["close"]


def test_a_cache_that_cannot_be_closed_leaves_the_loop_as_it_is() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            Scheduler(lambda: signal.raise_signal(signal.SIGINT), None).run()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("signum", "status"), [(None, 0), (signal.SIGINT, 130)])
def test_a_scheduler_process_ends_at_once_after_closing(
    monkeypatch: pytest.MonkeyPatch, at_exit: list[Any], signum: signal.Signals | None, status: int
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    scheduler = Scheduler(nothing if signum is None else lambda: signal.raise_signal(signum), nothing)
    if signum is None:
        scheduler.run()
    else:
        with pytest.raises(SystemExit):
            scheduler.run()
    assert at_exit == [(os._exit, status)]


# ---- the main process


class TokenizerManager:
    def __init__(self, **flags: object) -> None:
        self.server_args = server_args(**flags)
        self.sent: list[object] = []
        self.loops: list[bool] = []
        self.stopped: list[str] = []
        self._subprocess_watchdog = SimpleNamespace(stop=lambda: self.stopped.append("watchdog"))

    def _dispatch_to_scheduler(self, message: object) -> None:
        self.loops.append(True)
        self.sent.append(message)

    async def _async_dispatch_to_scheduler(self, message: object) -> None:
        self.loops.append(False)
        self.sent.append(message)


def server_args(**flags: object) -> Any:
    given: dict[str, object] = dict.fromkeys(DEPENDENT_FLAGS)
    return SimpleNamespace(**given | {"kv_policy": "lru", "kv_host_gb": 0.1} | flags)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Processes alive at each look, one a second; nothing once that is used up."""
    looks: list[list[str]] = []
    monkeypatch.setattr(cudacore_pyspy_dump_utils, "collect_scheduler_processes", lambda: looks.pop(0) if looks else [])
    seconds = itertools.count()
    monkeypatch.setattr(shutdown, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    return looks


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, True),
        ({"kv_policy": None}, False),
        ({"kv_host_gb": None}, True),
        ({"kv_host_gb": "0"}, False),
        ({"kv_policy_config": "/a/file/that/is/gone.json"}, True),
    ],
)
def test_who_has_tiers(flags: dict[str, object], expected: bool) -> None:
    assert shutdown.has_tiers(server_args(**flags)) is expected


def test_schedulers_are_asked_once_and_waited_for(processes: list[list[str]]) -> None:
    processes += [["scheduler"]] * 4
    manager = TokenizerManager()
    shutdown.stop_schedulers(manager)
    assert processes == []
    assert [type(message) for message in manager.sent] == [ShutdownReq]
    assert (manager.stopped, manager.loops) == (["watchdog"], [False])


def test_schedulers_are_asked_from_within_a_loop_too(processes: list[list[str]]) -> None:
    processes += [["scheduler"]] * 2
    manager = TokenizerManager()

    async def on_signal() -> None:
        shutdown.stop_schedulers(manager)

    asyncio.run(on_signal())
    assert [type(message) for message in manager.sent] == [ShutdownReq]
    assert manager.loops == [True]


@pytest.mark.parametrize("manager", [None, TokenizerManager(kv_policy=None), TokenizerManager(kv_host_gb=0)])
def test_a_server_without_tiers_is_left_alone(processes: list[list[str]], manager: TokenizerManager | None) -> None:
    processes += [["scheduler"]]
    shutdown.stop_schedulers(manager)
    assert len(processes) == 1
    assert manager is None or (manager.sent, manager.stopped) == ([], [])


def test_schedulers_that_are_gone_are_not_asked(processes: list[list[str]]) -> None:
    manager = TokenizerManager()
    manager._subprocess_watchdog = None  # type: ignore[assignment]
    shutdown.stop_schedulers(manager)
    assert manager.sent == []


def test_a_hung_scheduler_is_given_up_at_the_deadline(
    processes: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    processes += [["scheduler"]] * 1000
    shutdown.stop_schedulers(TokenizerManager())
    assert 1000 - len(processes) == shutdown.WAIT_S + 2  # one before, then one a second
    assert "did not stop within 10 s" in caplog.text


def test_schedulers_that_cannot_be_asked_are_waited_for(
    processes: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    class Unplugged(TokenizerManager):
        async def _async_dispatch_to_scheduler(self, message: object) -> None:
            raise OSError("socket closed")

    processes += [["scheduler"]] * 3
    shutdown.stop_schedulers(Unplugged())
    assert processes == []
    assert "socket closed" in caplog.text


def test_sigterm_before_the_first_request_unwinds(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        shutdown.exit_on_sigterm()
        with pytest.raises(SystemExit) as stopped:
            signal.raise_signal(signal.SIGTERM)
        assert stopped.value.code == 143
        ours = signal.getsignal(signal.SIGTERM)
        shutdown.exit_on_sigterm()  # somebody has a reaction: it stays
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)
