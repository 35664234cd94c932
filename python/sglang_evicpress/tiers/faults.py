"""Faults of storage on purpose: seeded, counted, for tests and for trying a server out."""

from __future__ import annotations

import errno
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_evicpress.tiers.ssd.os_files import BLOCK_BYTES, Files

KINDS = ("delay", "eio", "enospc", "short", "flip", "host_flip", "lost")

_ACCEPTED = (
    f"expected NAME=RATE with NAME one of {', '.join(KINDS)} and 0 <= RATE <= 1, delay=RATE:SECONDS, "
    "read=BYTES a second, and seed=NUMBER, such as seed=7,delay=0.02:0.05,eio=0.01"
)


@dataclass(slots=True, eq=False)
class Faults:
    """Rates of each kind of fault, and what has happened (``counts``).

    Memory of the host is flipped at the rate of ``host_flip`` where it has one, else at that of ``flip``.
    The same seed and the same sequence of calls give the same faults. ``read_rate``: bytes a second that all reads of
    files together get at most; None: as many as the disk gives. ``hung``: by the name of a call of Files, the event
    that it waits for. Thread-safe.
    """

    seed: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    delay_s: float = 0.01
    read_rate: float | None = None
    counts: Counter[str] = field(default_factory=Counter)
    is_on: bool = True
    hung: dict[str, threading.Event] = field(default_factory=dict)
    _random: random.Random = field(init=False, repr=False)
    _lock: threading.Lock = field(init=False, repr=False, default_factory=threading.Lock)
    _read_until_s: float = field(init=False, repr=False, default=0.0)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @classmethod
    def parse(cls, text: str, rank: int = 0) -> Faults:
        """Read ``seed=7,delay=0.02:0.05,eio=0.01``; each rank has faults of its own, also of other rates where these
        are written one behind the other with | between. Raises ValueError naming the part and what is accepted."""
        texts = text.split("|")
        text = texts[rank % len(texts)]
        faults = cls()
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = part.partition("=")
            rate, colon, seconds = value.partition(":")
            try:
                if name == "seed" and equals:
                    faults.seed = int(value)
                    continue
                number = float(rate)
                delay_s = float(seconds) if colon else faults.delay_s
            except ValueError:
                raise ValueError(f"fault {part!r} has no number: {_ACCEPTED}") from None
            if name == "read" and not colon and 0.0 < number < math.inf:
                faults.read_rate = number
                continue
            if name not in KINDS or not 0.0 <= number <= 1.0 or (colon and (name != "delay" or not 0 <= delay_s < 60)):
                raise ValueError(f"fault {part!r} is not known: {_ACCEPTED}")
            faults.rates[name], faults.delay_s = number, delay_s
        faults.seed += rank
        faults.__post_init__()
        return faults

    def happens(self, kind: str) -> bool:
        """True if it does this time; counted if so."""
        rate = self.rates.get(kind, 0.0)
        if not rate or not self.is_on:
            return False
        with self._lock:
            if self._random.random() >= rate:
                return False
            self.counts[kind] += 1
            return True

    def below(self, limit: int) -> int:
        """A random number from 0 to ``limit`` - 1."""
        with self._lock:
            return self._random.randrange(limit)

    def hang(self, *calls: str) -> threading.Event:
        """From now on these calls of Files do not come back before the event is set."""
        may_go_on = threading.Event()
        self.hung.update(dict.fromkeys(calls, may_go_on))
        return may_go_on

    def maybe_hang(self, call: str) -> None:
        if call in self.hung and self.is_on:
            self.counts["hang"] += 1
            self.hung[call].wait()

    def maybe_delay(self) -> None:
        if self.happens("delay"):
            time.sleep(self.delay_s)

    def pace(self, num_bytes: int) -> None:
        """Sleep until a disk of ``read_rate`` that does one read after the other would have read so much more."""
        if self.read_rate is None or not self.is_on:
            return
        with self._lock:
            now_s = time.monotonic()
            self._read_until_s = max(now_s, self._read_until_s) + num_bytes / self.read_rate
            wait_s = self._read_until_s - now_s
        time.sleep(wait_s)

    def maybe_fail(self, kind: str) -> None:
        """Raise the OSError of "eio" or "enospc" if it happens."""
        if self.happens(kind):
            code = errno.ENOSPC if kind == "enospc" else errno.EIO
            raise OSError(code, f"{os.strerror(code)} (on purpose)")

    def maybe_flip_host(self, memory: memoryview) -> bool:
        return self.maybe_flip(memory, "host_flip" if "host_flip" in self.rates else "flip")

    def maybe_flip(self, memory: memoryview, kind: str = "flip") -> bool:
        """Flip one bit of it, if it happens."""
        if not len(memory) or not self.happens(kind):
            return False
        memory[self.below(len(memory))] ^= 1 << self.below(8)
        return True


class FaultyFiles(Files):
    """Files on a disk that fails."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def open(self, path: str, flags: int) -> int:
        """A file that is lost is really gone."""
        self.faults.maybe_hang("open")
        if not flags & os.O_CREAT and self.faults.happens("lost"):
            super().unlink(path)
        return super().open(path, flags)

    def names(self) -> list[str]:
        self.faults.maybe_hang("names")
        return super().names()

    def free_bytes(self) -> tuple[int, int]:
        self.faults.maybe_hang("free_bytes")
        return super().free_bytes()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._before("preadv", "eio")
        done = super().preadv(fd, buffers, offset)
        self.faults.pace(done)
        if done and self.faults.happens("short"):
            done = self.faults.below(done)
            _spoil(buffers, done)
        if done:
            self.faults.maybe_flip(buffers[self.faults.below(len(buffers))])
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._before("pwritev", "eio")
        total = sum(map(len, buffers))
        for kind in ("short", "enospc"):
            if self.faults.happens(kind):
                # Part of it is there, as after a real one.
                part = self.faults.below(total // BLOCK_BYTES + 1) * BLOCK_BYTES
                done = super().pwritev(fd, _first(buffers, part), offset) if part else 0
                if kind == "short":
                    return done
                raise OSError(errno.ENOSPC, "No space left on device (on purpose)")
        return super().pwritev(fd, buffers, offset)

    def append(self, fd: int, data: bytes) -> int:
        self._before("append", "eio", "enospc")
        if self.faults.happens("short"):
            return super().append(fd, data[: self.faults.below(len(data))])
        changed = bytearray(data)
        self.faults.maybe_flip(memoryview(changed))
        return super().append(fd, bytes(changed))

    def truncate(self, fd: int, num_bytes: int) -> None:
        self._before("truncate", "eio")
        super().truncate(fd, num_bytes)

    def fdatasync(self, fd: int) -> None:
        self._before("fdatasync", "eio")
        super().fdatasync(fd)

    def punch_hole(self, fd: int, offset: int, num_bytes: int) -> None:
        self._before("punch_hole", "eio")
        super().punch_hole(fd, offset, num_bytes)

    def unlink(self, path: str) -> None:
        self._before("unlink", "eio")
        super().unlink(path)

    def _before(self, call: str, *kinds: str) -> None:
        self.faults.maybe_hang(call)
        self.faults.maybe_delay()
        for kind in kinds:
            self.faults.maybe_fail(kind)


def _first(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    first = []
    for buffer in buffers:
        if num_bytes:
            first.append(buffer[:num_bytes])
            num_bytes -= len(first[-1])
    return first


def _spoil(buffers: Sequence[memoryview], begin: int) -> None:
    """Overwrite what is behind the first ``begin`` bytes: a short read left it as it was."""
    for buffer in buffers:
        rest = buffer[begin:]
        rest[:] = b"\xa5" * len(rest)
        begin = max(0, begin - len(buffer))
