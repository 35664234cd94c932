"""Starts the real SGLang server on the CPU as a child process and leaves no process behind. Shared by tests and
benchmarks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

MODEL = Path(__file__).parent / "model"
START_SECONDS = 300.0

GUESSED = ("--kv-prior", str(Path(__file__).with_name("guess.json")), "--kv-no-recording")
"""Flags for whoever wants the policy to compress without anything measured, and nothing to be measured meanwhile: every
press is taken to keep a quality of 1 - (1 - kept)^3, the control ``random`` one of what it keeps."""


class ServerError(RuntimeError):
    """The server did not come up, or died; the message holds the end of its log."""


class Server:
    """``with Server("--kv-policy", "evicpress") as server: server.get("/evicpress/tree")``.

    Model, device, dtype (float32) and a free port are given; every further argument goes to ``sglang.launch_server``
    as it is. ``env`` adds to the environment; ``log`` is where stdout and stderr go.
    """

    def __init__(self, *arguments: str, model: Path | str = MODEL, env: dict[str, str] | None = None) -> None:
        self.arguments = arguments
        self.model = Path(model)
        self._env = env or {}
        self._folder = Path(tempfile.mkdtemp(prefix="evicpress-server-"))
        self.log = self._folder / "server.log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def command(self) -> list[str]:
        return [
            sys.executable,
            *("-m", "sglang.launch_server", "--model-path", str(self.model), "--device", "cpu"),
            *("--dtype", "float32", "--port", str(self.port), "--mem-fraction-static", "0.2"),
            *("--skip-server-warmup", "--sleep-on-idle", "--log-level", "info", *self.arguments),
        ]

    def start(self) -> None:
        """Start and wait until requests are answered. Raises ServerError with the end of the log."""
        env = {
            **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},  # tests set it
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            **self._env,
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=self._folder,
                start_new_session=True,
            )
        try:
            is_up = self._wait_until_up(self._process)
        except BaseException:  # Ctrl-C while it starts
            self.stop()
            raise
        if not is_up:
            self.stop()
            raise ServerError(f"the server did not start: {' '.join(self.command)}\n{self.log_tail()}")

    def _wait_until_up(self, process: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return False
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=30):
                    return True
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        return False

    def stop(self) -> None:
        """End the server and all its children; returns when none is left."""
        if self._process is None:
            return
        group = self._process.pid
        for sign in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(group, sign)
            except ProcessLookupError:
                break
            try:
                self._process.wait(timeout=8)
            except subprocess.TimeoutExpired:
                continue
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and _group_lives(group):
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.05)
        self._process = None

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        timeout: float = 120.0,
    ) -> tuple[int, Any]:
        """Status and body: parsed JSON when it is JSON, text otherwise."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path,
            data=data,
            method=method,
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, raw = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except json.JSONDecodeError:
            return status, raw.decode(errors="replace")

    def get(self, path: str) -> Any:
        """The JSON at ``path``; raises ServerError for any status but 200."""
        return self._expect_ok("GET", path, None)

    def post(self, path: str, body: object = None) -> Any:
        return self._expect_ok("POST", path, {} if body is None else body)

    def generate(self, input_ids: list[int], max_new_tokens: int, **fields: Any) -> Any:
        """SGLang's own /generate, greedy, ignoring <eos>; further fields go into the request."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        return self.post("/generate", {"input_ids": input_ids, "sampling_params": sampling, **fields})

    def flush(self) -> None:
        """Empty the cache; waits until running requests are gone."""
        for _ in range(100):
            status, _ = self.request("POST", "/flush_cache")
            if status == 200:
                return
            time.sleep(0.1)
        raise ServerError("the cache could not be flushed: requests are still running")

    def _expect_ok(self, method: str, path: str, body: object) -> Any:
        status, answer = self.request(method, path, body)
        if status != 200:
            raise ServerError(f"{method} {path} answered {status}: {answer}")
        return answer


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _free_port() -> int:
    """A port nobody listens on; SGLang takes the one 10000 above it too, so it must not be too high."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port <= 55_535:
            return port
