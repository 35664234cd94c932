"""When Ctrl-C, SIGTERM and SIGHUP take effect. In another thread than the main one, nothing here does anything."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put them off until the block is done."""
    received: list[int] = []

    def note(signum: int, _: FrameType | None) -> None:
        received.append(signum)

    with _reacting((signal.SIGINT, *_ENDING), note):
        yield
    for signum in received[:1]:
        signal.raise_signal(signum)


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, with their number."""

    def interrupt(signum: int, _: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(signum)

    with _reacting(_ENDING, interrupt):
        yield


@contextmanager
def _reacting(signs: tuple[signal.Signals, ...], reaction: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Set a reaction to signals; ignored ones stay ignored: a child keeps that, whereas it loses every reaction."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {sign: was for sign in signs if (was := signal.getsignal(sign)) not in (signal.SIG_IGN, None)}
    for sign in previous:
        signal.signal(sign, reaction)
    try:
        yield
    finally:
        for sign, was in previous.items():
            signal.signal(sign, was)
