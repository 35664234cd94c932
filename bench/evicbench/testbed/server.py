"""The real SGLang server on the CPU with the testbed's model, for tests and benchmarks that look inside one server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_evicpress.benchmark import server
from sglang_evicpress.benchmark.server import NoAnswerInTime, ServerError, free_port

__all__ = ["ADMIN_KEY", "GUESSED", "MODEL", "NoAnswerInTime", "Server", "ServerError", "explicit", "greedy"]

MODEL = Path(__file__).parent / "model"
START_S = 300.0
FORKED_START = "EVICPRESS_FORKED_START"
"""Environment variable: 1 has servers of one rank start by forked_start.py, at half the work. Tests set it."""

_COMMAND = ("-m", "sglang.launch_server")
_FORKED_COMMAND = (str(Path(__file__).with_name("forked_start.py")),)

ADMIN_KEY = "the-testbeds-operator"
"""Of every server here that is not started without one: benchmarks look at prompts, and attach folders."""

GUESSED = (
    *("--kv-quality-curves", str(Path(__file__).with_name("guess.json")), "--kv-disable-online-profiling"),
    *("--kv-alpha", "1"),  # compresses from the first request on
)
"""Flags for whoever wants the policy to compress without anything measured, and nothing to be measured meanwhile: every
press is taken to keep a quality of 1 - (1 - kept)^3, the control ``random`` one of what it keeps."""


def explicit(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments of a server that has no tier below the GPU but where they ask for one: what is measured shall not
    depend on the memory that happens to be free."""
    is_silent = "--kv-policy" in arguments and "--kv-host-gb" not in arguments
    return (*arguments, "--kv-host-gb", "0") if is_silent else arguments


def greedy(input_ids: object, max_new_tokens: int, **fields: Any) -> dict[str, Any]:
    """Body for /generate: greedy, <eos> ignored; ``input_ids`` of one prompt or of a batch."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": input_ids, "sampling_params": sampling, **fields}


def _command(arguments: tuple[str, ...]) -> tuple[str, ...]:
    is_forked = os.environ.get(FORKED_START) == "1" and "--tp-size" not in arguments
    return (sys.executable, *(_FORKED_COMMAND if is_forked else _COMMAND))


class Server(server.Server):
    """``with Server("--kv-policy", "evicpress") as server: server.get("/evicpress/tree")``.

    Model, device, dtype (float32), an admin key and a free port are given, and no tier below the GPU but where one is
    asked for; every further argument goes to ``sglang.launch_server`` as it is. ``env`` adds to the environment. It
    runs in a folder of its own with its log in it, which is removed at the end of a block that ends well.
    """

    def __init__(
        self,
        *arguments: str,
        model: Path | str = MODEL,
        env: dict[str, str] | None = None,
        admin_api_key: str | None = ADMIN_KEY,
    ) -> None:
        port = free_port()
        self._own_folder = Path(tempfile.mkdtemp(prefix="evicpress-server-"))
        super().__init__(
            [
                *(*_command(arguments), "--model-path", str(model), "--device", "cpu"),
                *("--dtype", "float32", "--port", str(port), "--mem-fraction-static", "0.2"),
                *("--skip-server-warmup", "--sleep-on-idle", "--log-level", "info", *explicit(arguments)),
                *(() if admin_api_key is None else ("--admin-api-key", admin_api_key)),
            ],
            port=port,
            log=self._own_folder / "server.log",
            env={
                **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},  # tests set it
                "SGLANG_USE_CPU_ENGINE": "1",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
                "EVICPRESS_HIDDEN_PACKAGES": "sklearn",  # see releases/cpu_shim.py
                **(env or {}),
            },
            folder=self._own_folder,
            timeout_s=START_S,
            admin_api_key=admin_api_key,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def run_to_end(self) -> tuple[int, list[str]]:
        """Exit status, and the lines that it printed, of a server that is to refuse what it was given. Raises
        TimeoutExpired if it goes on to run."""
        ended = subprocess.run(
            self.command,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_S,
            check=False,
        )
        shutil.rmtree(self._own_folder, ignore_errors=True)
        return ended.returncode, ended.stdout.rstrip().splitlines()

    def generate(self, input_ids: list[int] | list[list[int]], max_new_tokens: int, **fields: Any) -> Any:
        """SGLang's own /generate, greedy, ignoring <eos>; further fields go into the request. Of a batch, a list."""
        return self.post("/generate", greedy(input_ids, max_new_tokens, **fields))

    def flush(self) -> None:
        """Empty the cache; waits until running requests are gone."""
        for _ in range(100):
            status, _ = self.request("POST", "/flush_cache")
            if status == 200:
                return
            time.sleep(0.1)
        raise ServerError("the cache could not be flushed: requests are still running")
