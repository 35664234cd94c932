"""Threads that stress a running server for some time, and what they find wrong."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable, Sequence

from evicbench.testbed.server import Server, ServerError

CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
"""Environment of a server that checks its memory after every step."""

FAILURES = (ServerError, OSError, http.client.HTTPException, ValueError, KeyError)
"""Raised by a request that was not answered as it should."""

_ASKS_ITSELF = re.compile(r"post-warmup freeze_gc failed\n(?:(?!\[\d{4}-).*\n)*")
"""SGLang 0.5.23 without a warm-up: it asks itself before it listens, says so with a traceback, and goes on."""

_BAD_WORDS = ("Traceback", "leak", "Detected", "use-after-free", "double free", "Scheduler hit an exception")


class Stress:
    """A server under stress until ``seconds`` have passed; ``problems`` is everything that should not have been."""

    def __init__(self, server: Server, seconds: float) -> None:
        self.server = server
        self.problems: list[str] = []
        self.num_requests = 0
        self.num_checks = 0
        self.begin = time.monotonic()
        self.deadline = self.begin + seconds
        self.lock = threading.Lock()

    def goes_on(self) -> bool:
        return time.monotonic() < self.deadline and self.server.is_alive()

    def report(self, problem: str) -> None:
        with self.lock:
            self.problems.append(problem)

    def check(self) -> None:
        """Have the server check its cache."""
        status, answer = self.server.request("POST", "/evicpress/check", {})
        with self.lock:
            self.num_checks += 1
        if status != 200 or not answer["ok"]:
            self.report(f"check after {self.num_requests} requests: {status} {answer}")

    def read_log(self) -> str:
        """The server's log; bad words in it are problems, and so is a server that is gone."""
        if not self.server.is_alive():
            self.report("the server died")
        log = _ASKS_ITSELF.sub("", self.server.log.read_text(errors="replace"))
        self.problems += [f"log: {line}" for line in log.splitlines() if any(word in line for word in _BAD_WORDS)]
        return log


def started(actions: Sequence[Callable[[], None]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    return threads
