"""A Mooncake store of its own: the master, and a client that owns the memory, as processes that can be ended."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from evicbench.testbed.server import free_port

START_S = 60.0
PACKAGES = "pip install mooncake-transfer-engine-non-cuda, and apt-get install libibverbs1 librdmacm1"


class MooncakeStore:
    """``with MooncakeStore() as store: Server(..., *store.flags)``. Raises RuntimeError where it is not installed."""

    def __init__(self, memory: str = "1GB") -> None:
        found = importlib.util.find_spec("mooncake")
        if found is None or found.origin is None:
            raise RuntimeError(f"Mooncake is not installed: {PACKAGES}")
        beside = [str(Path(sys.executable).parent), str(Path(found.origin).parents[1] / "bin")]
        self._programs = [_program(name, beside) for name in ("mooncake_master", "mooncake_client")]
        self._memory = memory
        self._rpc, self._metrics, self._owner_port = free_port(), free_port(), free_port()
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(found.origin).parents[1]), *sys.path[1:]])}
        self.master: subprocess.Popen[bytes] | None = None
        self.owner: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> dict[str, object]:
        """Settings for SGLang's ``--hicache-storage-backend-extra-config``: a client that owns no memory."""
        return {
            "master_server_address": f"127.0.0.1:{self._rpc}",
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 0,
        }

    @property
    def env(self) -> dict[str, str]:
        return {"PYTHONPATH": self._env["PYTHONPATH"]}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Both processes, the master first."""
        master, owner = self._programs
        self.master = self._run(
            *(master, "--rpc_address=127.0.0.1", f"--rpc_port={self._rpc}", "--metrics_host=127.0.0.1"),
            *(f"--metrics_port={self._metrics}", "--default_kv_lease_ttl=500"),
        )
        _wait_for_port(self._rpc)
        self.owner = self._run(
            *(owner, "--host=127.0.0.1", f"--port={self._owner_port}", f"--global_segment_size={self._memory}"),
            *("--metadata_server=P2PHANDSHAKE", f"--master_server_address=127.0.0.1:{self._rpc}", "--protocol=tcp"),
        )
        _wait_for_port(self._owner_port)

    def kill(self) -> None:
        """``kill -9`` of both."""
        for process in (self.owner, self.master):
            if process is not None:
                process.kill()
                process.wait(30)

    def stop(self, *, goes_on: bool = False) -> None:
        """Let the memory's owner hang, or go on."""
        if self.owner is not None:
            self.owner.send_signal(signal.SIGCONT if goes_on else signal.SIGSTOP)

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self._env)


def _program(name: str, beside: list[str]) -> str:
    found = shutil.which(name, path=os.pathsep.join([*beside, os.environ.get("PATH", "")]))
    if found is None:
        raise RuntimeError(f"{name} is not installed: {PACKAGES}")
    return found


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"nothing listens on port {port} after {START_S:g} s")
