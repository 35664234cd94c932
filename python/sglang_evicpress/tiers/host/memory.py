"""Memory that can be had: what the machine has available, or what a container's limit leaves of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from sglang_evicpress.config import GB, MIN_TIER_BYTES

POOL_MULTIPLE = 4  # of the KV pool's bytes: more prefixes than that are seldom asked for again
_RESERVE_BYTES, _RESERVE_SHARE = 4 * GB, 10  # kept for everything else: the larger of the first and a tenth of all
_LIMIT, _USAGE = ("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes")
_CACHE = ("inactive_file", "active_file"), ("total_inactive_file", "total_active_file")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in all, and bytes that can be taken without swapping."""

    total: int
    free: int

    @property
    def reserve(self) -> int:
        """Bytes that a tier of automatic size leaves alone."""
        return max(_RESERVE_BYTES, self.total // _RESERVE_SHARE)


def auto_bytes(memory: Memory, pool_bytes: int, num_sharing: int = 1) -> int:
    """Size of a host tier that nobody chose: the least of half of what is free beyond the reserve and 4 KV pools, but
    no less than the smallest tier; 0 where that half is less. ``num_sharing`` ranks each take one from this memory."""
    spare = (memory.free - memory.reserve) // (2 * num_sharing)
    return 0 if spare < MIN_TIER_BYTES else max(MIN_TIER_BYTES, min(spare, POOL_MULTIPLE * pool_bytes))


def read_memory(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Memory:
    """The machine's memory now, and no more than the limit of any control group that this process is in.

    ``cgroups`` is where these are mounted, ``own`` the file that names those of this process. A limit leaves what is
    not used; page cache counts as free, as the kernel takes it back first.
    """
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    for limit, used in _limits(cgroups, own):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return Memory(total, free)


def _limits(cgroups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use without page cache) of each group from this process's own up to the mount's root.

    In a container the path of ``own`` may be one of the machine outside: folders that are missing are passed over.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 1 and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if version == 1 else cgroups
        folder = root / path.strip("/")
        while True:
            group = _limit_of(folder, version)
            if group is not None:
                yield group
            if folder == root:
                break
            folder = folder.parent


def _limit_of(folder: Path, version: int) -> tuple[int, int] | None:
    """None without a limit: version 2 says "max", version 1 a number beyond any memory."""
    column = 2 - version
    try:
        limit, used = int((folder / _LIMIT[column]).read_text()), int((folder / _USAGE[column]).read_text())
        lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        stat = {name: int(number) for name, number in lines}
    except (OSError, ValueError):
        return None
    return limit, used - sum(stat.get(name, 0) for name in _CACHE[column])
