"""Profiles of all contexts, measured once before the runs, on a server whose pool holds everything."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import orjson

from sglang_evicpress.benchmark.config import DEFAULT_SCORER, Config
from sglang_evicpress.benchmark.contexts import Context
from sglang_evicpress.benchmark.interrupts import uninterrupted
from sglang_evicpress.benchmark.run_dir import RunDir
from sglang_evicpress.benchmark.server import Server, ServerError
from sglang_evicpress.benchmark.workload import write_training

_CLI = "import sys; from sglang_evicpress.cli.main import main; sys.exit(main())"
_STOP_S = 20.0


class Profiles:
    """The file of profiles that systems of an out folder read.

    While they are measured, ``profiles.part`` says of what, and ``profiles.done`` once all are: an interrupted
    profiling goes on, one of something else begins anew.
    """

    def __init__(self, config: Config, contexts: Sequence[Context], folder: RunDir) -> None:
        self.path = folder.path / "profiles.log"
        self._done, self._part = self.path.with_suffix(".done"), self.path.with_suffix(".part")
        self._training = folder.path / "training.jsonl"
        self._log = folder.log_file("profile")
        self._config = config
        self._contexts = contexts

    def open(self) -> bool:
        """Remove what is there of other contexts, or was made otherwise; True if profiles are still to be measured."""
        write_training(self._config, self._contexts, self._training)
        identity = self._identity()
        if self.path.exists() and _read(self._done) == identity:
            return False
        self._done.unlink(missing_ok=True)
        if _read(self._part) != identity:
            self._part.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
            self._part.write_bytes(identity)
        return True

    def measure(self, server: Server) -> None:
        """Raises ServerError when not all could be measured. The server writes them to ``path``."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            status = _run(self._command(server.url), log.fileno())
        if status:
            raise ServerError(
                f"profiling the contexts ended with status {status}; its output is in {self._log}, and the log of its "
                f"server is {server.log}"
            )

    def close(self) -> None:
        """All are measured, and the server that wrote them has stopped."""
        self._part.replace(self._done)

    def _command(self, url: str) -> list[str]:
        return [
            *(sys.executable, "-P", "-c", _CLI, "profile", "--url", url, "--contexts", str(self._training)),
            *("--forms", self._config.forms, "--template", self._config.workload.template, "--resume"),
            *("--max-new-tokens", str(self._config.workload.max_new_tokens), "--scorer", self._config.scorer),
        ]

    def _identity(self) -> bytes:
        config = self._config
        parts = {
            **{name: config.identity()[name] for name in ("model", "server", "env", "policy_flags", "template")},
            "forms": config.forms,
            "max_new_tokens": config.workload.max_new_tokens,
            "training": sha256(self._training.read_bytes()).hexdigest(),
            **({"scorer": config.scorer} if config.scorer != DEFAULT_SCORER else {}),
            **({"files": dict(config.files_sha256)} if config.files_sha256 else {}),
        }
        return orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)


def _run(command: Sequence[str], output: int) -> int:
    """The exit status. Its progress goes to our stderr; Ctrl-C ends it too, before it is raised."""
    with uninterrupted():
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        with uninterrupted():
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        raise


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
