"""A clean stop: what is on its way to a tier arrives there before the processes end.

SGLang ends a server in two ways. On SIGTERM the main process lets running requests finish, asks the schedulers to stop
and gives them 15 s. Otherwise, as on Ctrl-C, it kills them at once: here they are asked and waited for then too. In a
scheduler, whatever ends the event loop closes the cache. A signal, as a whole process group gets it, ends the loop
between two steps, and a second one at once. After an exception nothing is published, and nobody waits.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, TypeAlias, runtime_checkable

from sglang_evicpress.patches.kv_flags import config_of

logger = logging.getLogger(__name__)

WAIT_S = 10.0  # for the schedulers: what the close() of a cache may take, with a margin
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


Reaction: TypeAlias = Callable[[int, FrameType | None], None] | signal.Handlers
"""Handler of a signal."""


@runtime_checkable
class ClosableCache(Protocol):
    """A cache that has something to save."""

    def close(self, *, save: bool = True) -> None: ...


class StoppableScheduler(Protocol):
    """The scheduler, as far as it is stopped."""

    tree_cache: object
    handle_shutdown: Callable[[None], None]  # at the next step


class ServerArgs(Protocol):
    """SGLang's ServerArgs, with our flags."""

    kv_policy: str | None


class Watchdog(Protocol):
    """SGLang's watchdog over its processes."""

    def stop(self) -> None: ...


class StoppableServer(Protocol):
    """SGLang's TokenizerManager, as far as it stops schedulers."""

    server_args: ServerArgs
    _subprocess_watchdog: Watchdog | None

    def _dispatch_to_scheduler(self, message: object) -> None: ...
    async def _async_dispatch_to_scheduler(self, message: object) -> None: ...


def around_event_loop(
    original: Callable[..., None], scheduler: StoppableScheduler, *args: object, **kwargs: object
) -> None:
    """Run the event loop of a scheduler, then close its cache if that can be closed; after an exception at once, with
    nothing published."""
    cache = scheduler.tree_cache
    if not isinstance(cache, ClosableCache):
        original(scheduler, *args, **kwargs)
        return
    received: list[int] = []

    def stop(signum: int, _: object) -> None:
        received.append(signum)
        if len(received) > 1:
            raise KeyboardInterrupt
        scheduler.handle_shutdown(None)  # at its next step

    with _on_stop_signals(stop):
        try:
            original(scheduler, *args, **kwargs)
        except BaseException:  # what the cache holds may be wrong: nothing of it may outlive this process
            cache.close(save=False)
            raise
        with _on_stop_signals(signal.SIG_IGN):
            cache.close()
    status = 128 + received[0] if received else 0  # other than 0: the main process shall not wait for answers for ever
    if multiprocessing.parent_process() is not None:
        # Taking down the interpreter with all its modules costs seconds, in which nothing is left to be saved.
        atexit.register(os._exit, status)
    if received:
        raise SystemExit(status)


def stop_schedulers(tokenizer_manager: StoppableServer | None) -> None:
    """Ask the schedulers of this process to stop and wait until they have, for at most ``WAIT_S``.

    Does nothing for a server without tiers.
    """
    from sglang.srt.managers.io_struct import ShutdownReq
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    if tokenizer_manager is None or not has_tiers(tokenizer_manager.server_args):
        return
    if tokenizer_manager._subprocess_watchdog is not None:
        tokenizer_manager._subprocess_watchdog.stop()  # it would take their end for a crash and kill the rest
    if not collect_scheduler_processes():
        return
    logger.info("waiting up to %g s for what is on its way to the tiers", WAIT_S)
    try:
        _send(tokenizer_manager, ShutdownReq())
    except (OSError, RuntimeError, TimeoutError) as error:  # zmq's errors are OSErrors
        logger.warning("the schedulers could not be asked to stop: %r", error)
    deadline = time.monotonic() + WAIT_S
    while collect_scheduler_processes():
        if time.monotonic() > deadline:
            logger.warning("the schedulers did not stop within %g s: what was on its way to the tiers is lost", WAIT_S)
            return
        time.sleep(0.05)


def has_tiers(server_args: ServerArgs) -> bool:
    """True if this server was asked to keep KV below the GPU."""
    if server_args.kv_policy is None:
        return False
    try:
        return config_of(server_args).has_tiers
    except ValueError:  # it was fine at the start: the config file or the folder is gone by now
        return True


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit in the main process until SGLang sets its own reaction, at the first request.

    Before that, the web server stops on SIGTERM and then sends it again, which would end the process on the spot.
    """
    if _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))


def _send(tokenizer_manager: StoppableServer, message: object) -> None:
    """By the socket of the tokenizer manager, which wants an event loop, also when the server's own is closed."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(asyncio.wait_for(tokenizer_manager._async_dispatch_to_scheduler(message), timeout=1.0))
    else:
        tokenizer_manager._dispatch_to_scheduler(message)


@contextmanager
def _on_stop_signals(reaction: Reaction) -> Iterator[None]:
    if not _is_main_thread():
        yield
        return
    previous = {signum: signal.signal(signum, reaction) or signal.SIG_DFL for signum in _STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, was in previous.items():
            signal.signal(signum, was)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
