"""Starts a server as a child in a session of its own, asks it things, and leaves no process of it behind."""

from __future__ import annotations

import atexit
import json
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import getsid, kill
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import httpx
import psutil  # type: ignore[import-untyped]

from sglang_evicpress.benchmark.interrupts import uninterrupted

START_S = 900.0
"""What a server may take until it answers: loading weights, capturing CUDA graphs."""

STOP_S = 15.0
"""What a server may take to stop by itself; ours gives what is on its way to the tiers 10 s."""

_RUST_TREE_CORE = "sglang/srt/mem_cache/rust_tree_core/"
_PORTS = range(20_000, 22_768)
"""Below those that Linux lends to connections: between the question and the server's start one of these may be taken.
SGLang takes the one 10000 above it too, which is below them as well."""


class ServerError(RuntimeError):
    """The server did not start, died, or refused; the message names its log and, where that helps, has its end."""


class NoAnswerInTime(ServerError):
    """The server took longer for a request than it was given."""


def free_port() -> int:
    """A port of this machine that nobody listens on at the moment. Raises OSError where every one is taken."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does: not those that linger
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise OSError(f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free")


class Server:
    """``with Server(command, port=port, log=file) as server: server.get("/health")``.

    The command must listen on the port. ``admin_api_key`` goes with every request.
    ``env`` is the whole environment, None for ours. Output goes to ``log``, whose
    folder is made; an older log is replaced. ``start_s`` is how long the start took, once it is up.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        timeout_s: float = START_S,
        admin_api_key: str | None = None,
    ) -> None:
        self.command = tuple(command)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.start_s = 0.0
        self.start_id = ""
        self._env = env
        self._folder = folder
        self._timeout_s = timeout_s
        # Said to the server too: a pool that keeps none may still give one to two threads, and close it for both.
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if admin_api_key is not None:
            headers["Authorization"] = f"Bearer {admin_api_key}"
        self._process: subprocess.Popen[bytes] | None = None
        one_request_each = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.Client(headers=headers, limits=one_request_each, trust_env=False)  # never by a proxy

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until ``/health`` answers. Raises ServerError when it ends or takes longer than allowed."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        begin, self.start_id = time.monotonic(), uuid4().hex
        atexit.register(self.stop)
        try:
            with uninterrupted(), self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    cwd=self._folder,
                    start_new_session=True,
                )
            self._wait_until_up(begin + self._timeout_s)
        except BaseException:  # Ctrl-C while it starts
            self.stop()
            raise
        self.start_s = time.monotonic() - begin

    def _wait_until_up(self, deadline: float) -> None:
        while self.is_alive():
            try:
                if self.request("GET", "/health", timeout_s=30.0)[0] == 200:
                    return
            except ServerError:
                pass  # nobody listens yet
            if time.monotonic() > deadline:
                raise self.error(f"the server did not answer within {self._timeout_s:g} s of its start")
            time.sleep(0.2)
        raise self.error("the server ended while it started")

    @property
    def pid(self) -> int:
        """Process id of the first process. Raises ServerError when none was started."""
        if self._process is None:
            raise self.error("the server was not started")
        return self._process.pid

    @property
    def tree_core(self) -> str:
        """``rust`` where a process of the server has SGLang's Rust tree core loaded, as only those have that use it;
        else ``python``. Raises ServerError when none was started."""
        first = psutil.Process(self.pid)
        for process in (first, *first.children(recursive=True)):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                if _RUST_TREE_CORE in Path(f"/proc/{process.pid}/maps").read_text():
                    return "rust"
        return "python"

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End every process of its session. The first one is asked by SIGINT and has ``STOP_S`` to end, and to end the
        others; SIGKILL ends what is left then. Ctrl-C meanwhile waits until that is done."""
        process = self._process
        if process is None:
            return
        with uninterrupted():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # only to it: SGLang takes a child that ends first for a crash
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
            while members := _session(process.pid):  # one may be born meanwhile
                for pid in members:
                    with suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
                process.poll()  # else it stays as a zombie
                time.sleep(0.02)
            process.wait()
            self._process = None
        atexit.unregister(self.stop)

    # ---- asking

    def request(self, method: str, path: str, body: object = None, *, timeout_s: float = 120.0) -> tuple[int, Any]:
        """Status and body: parsed when it is JSON, else text. Raises ServerError when no answer comes, NoAnswerInTime
        when none has come after ``timeout_s``."""
        data = None if body is None else json.dumps(body).encode()
        try:
            response = self._client.request(method, self.url + path, content=data, timeout=timeout_s)
        except httpx.TimeoutException:
            raise self.error(f"{method} {path} got no answer within {timeout_s:g} s", kind=NoAnswerInTime) from None
        except httpx.HTTPError as error:
            raise self.error(f"{method} {path} got no answer: {str(error) or type(error).__name__}") from None
        try:
            return response.status_code, json.loads(response.content)
        except ValueError:
            return response.status_code, response.content.decode("utf-8", "replace")

    def get(self, path: str) -> Any:
        """Raises ServerError for any status but 200."""
        return self._expect_ok("GET", path, None)

    def post(self, path: str, body: object = None) -> Any:
        """An empty object where there is no body. Raises ServerError for any status but 200."""
        return self._expect_ok("POST", path, {} if body is None else body)

    def _expect_ok(self, method: str, path: str, body: object) -> Any:
        status, answer = self.request(method, path, body)
        if status != 200:
            raise self.error(f"{method} {path} answered {status}: {answer!r:.500}")
        return answer

    # ---- saying what went wrong

    def error(self, what: str, *, kind: type[ServerError] = ServerError) -> ServerError:
        """``what``, the name of the log and its last lines."""
        tail = self.log_tail()
        end = f", which ends with:\n{tail}" if tail else ", which is empty"
        return kind(f"{what}; its log is {self.log}{end}")

    def log_tail(self, num_lines: int = 25) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])
        except OSError:
            return ""


def _session(session: int) -> list[int]:
    """The processes of a session that still run. A whole session: a child may make a group of its own."""
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it ended meanwhile
            if getsid(process.pid) == session and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                members.append(process.pid)
    return members
