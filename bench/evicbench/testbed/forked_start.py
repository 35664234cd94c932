"""SGLang's server for tests, its processes forked where SGLang is imported already: each would import it again.

``python .../forked_start.py ARGS`` is ``python -m sglang.launch_server ARGS``, but for this: SGLang is imported first,
then two spare processes are forked, which wait. Where SGLang spawns a process, a spare one takes its place, with the
environment of that moment; it has imported SGLang and done nothing else, as a spawned one would have. Where none is
left one is spawned as ever.

Types are ignored where ``multiprocessing`` keeps a name to itself: there is no public way to hand a process to one that
runs already.

Hash seeds are those of the first process: what looks for differences between ranks starts its servers by SGLang's own
command.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import runpy
import socket
import sys
import threading
from multiprocessing import forkserver, popen_fork, popen_forkserver, popen_spawn_posix, resource_tracker, spawn, util
from multiprocessing.context import reduction, set_spawning_popen
from multiprocessing.process import BaseProcess

NUM_SPARE = 2  # a scheduler, and a detokenizer
MAX_FDS = 64
IMPORTS = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
)

_spares: list[tuple[int, socket.socket]] = []
"""Process ids, each with our end of its socket."""


def _wait_for_work(channel: socket.socket) -> int:
    """In the spare process: its exit status."""
    message, fds, _, _ = socket.recv_fds(channel, 1 << 20, MAX_FDS)
    channel.close()
    if not message:  # the server ended
        return 0
    environment: dict[str, str] = pickle.loads(message)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    os.environ.update(changed)  # not all: setproctitle finds a process's title by its first environment
    tracker, data, sentinel, *inherited = fds
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    forkserver._forkserver._inherited_fds = inherited  # type: ignore[attr-defined]
    return int(spawn._main(data, sentinel))  # type: ignore[attr-defined]


def _fork_spare() -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    for _, channel in _spares:
        channel.close()
    sys.exit(_wait_for_work(theirs))


class Popen(popen_fork.Popen):
    """A spawned process that runs in a spare one."""

    method = "spawn"
    DupFd = popen_forkserver._DupFd  # type: ignore[attr-defined]

    def __init__(self, process: BaseProcess) -> None:
        self._fds: list[int] = []
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process: BaseProcess) -> None:
        pickled = io.BytesIO()
        preparation = spawn.get_preparation_data(process.name)
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, pickled)
            reduction.dump(process, pickled)
        finally:
            set_spawning_popen(None)
        self.pid, channel = _spares.pop(0)
        self.sentinel, child_sentinel = os.pipe()  # readable once the child is gone
        data, writing = os.pipe()
        fds = [resource_tracker.getfd(), data, child_sentinel, *self._fds]
        with channel:
            socket.send_fds(channel, [pickle.dumps(dict(os.environ))], fds)
        os.close(data)
        os.close(child_sentinel)
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, writing))
        with open(writing, "wb", closefd=False) as stream:
            stream.write(pickled.getbuffer())


def main() -> None:
    sys.path.pop(0)  # this folder
    for name in IMPORTS:
        importlib.import_module(name)
    if threading.active_count() == 1:  # a fork has only the thread that forks
        for _ in range(NUM_SPARE):
            _spares.append(_fork_spare())
    spawned = popen_spawn_posix.Popen
    popen_spawn_posix.Popen = lambda process: Popen(process) if _spares else spawned(process)  # type: ignore[assignment,misc]
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
