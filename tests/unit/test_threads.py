from __future__ import annotations

import logging
import threading

import pytest

from sglang_evicpress.threads import WatchedThread

PATIENCE_S = 30.0


class NoArgument(BaseException):
    """Exception that nobody expects, like SystemExit."""


@pytest.mark.parametrize("error", [ValueError("the user's prompt"), SystemExit(1), NoArgument()])
def test_a_failing_thread_is_logged_counted_and_begins_anew(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, calls = threading.Event(), []

    def target() -> None:
        calls.append(None)
        if len(calls) < 3:
            raise error
        assert goes_on.wait(PATIENCE_S)

    thread = WatchedThread("evicpress-test", target, pause_s=0.001)
    assert thread.describe() == {
        "name": "evicpress-test", "state": "new", "num_failures": 0, "last_failure": None
    }  # fmt: skip
    with caplog.at_level(logging.ERROR):
        thread.start()
        while len(calls) < 3:
            thread.join(0.001)
    described = thread.describe()
    assert (described["state"], described["num_failures"]) == ("running", 2)
    assert str(described["last_failure"]).startswith(f"{type(error).__name__} at test_threads.py:")
    assert caplog.text.count("thread evicpress-test failed") == 2 and "prompt" not in caplog.text
    goes_on.set()
    thread.join(PATIENCE_S)
    assert thread.describe()["state"] == "ended"


def test_a_stopped_thread_that_fails_is_not_called_again() -> None:
    calls = []

    def target() -> None:
        calls.append(None)
        raise ValueError("again")

    thread = WatchedThread("evicpress-test", target, pause_s=3600.0)
    thread.start()
    while thread.describe()["state"] != "paused":
        thread.join(0.001)
    thread.stop()
    thread.join(PATIENCE_S)
    assert thread.describe()["state"] == "ended" and len(calls) == 1


def test_a_thread_that_never_began_is_not_waited_for() -> None:
    WatchedThread("evicpress-test", lambda: None).join(PATIENCE_S)
