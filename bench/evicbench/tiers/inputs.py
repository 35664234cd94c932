"""Shared inputs of the tiers' measurements: a folder on the disk to be measured, and headers of entries."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from evicbench.paths import OUT
from sglang_evicpress.core import EXACT
from sglang_evicpress.tiers.entry.header import Extent, Header, Shape, extent_of
from sglang_evicpress.tiers.entry.identity import fingerprint, namespace_digest
from sglang_evicpress.tiers.host.allocator import Extents, Run
from sglang_evicpress.tiers.host.arena import Arena
from sglang_evicpress.tiers.ssd.index import Ref
from sglang_evicpress.tiers.ssd.store import SsdStore

FINGERPRINT = fingerprint({"model": "bench"})
SHAPE_8B = Shape(32, 8, 128, "bfloat16", 1)
"""KV of an 8B model with grouped queries: 128 KB per token."""


@contextmanager
def scratch(num_bytes: int) -> Iterator[Path]:
    """An empty folder on the disk to be measured, removed afterwards; OSError where ``num_bytes`` are not free."""
    place = Path(os.environ.get("EVICPRESS_SSD", OUT))
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise OSError(f"{place} has {free / 1e9:.1f} GB free, {num_bytes / 1e9:.1f} are needed")
    with tempfile.TemporaryDirectory(dir=place, prefix="tiers-") as folder:
        yield Path(folder)


def take(extents: Extents, num_bytes: int) -> Sequence[Run]:
    """Runs of the arena. Raises RuntimeError where there is no room."""
    runs = extents.alloc(num_bytes)
    if runs is None:
        raise RuntimeError(f"the arena has no room for {num_bytes} bytes")
    return runs


def put(store: SsdStore, header: Header, chunks: Sequence[memoryview]) -> Ref:
    """Write an entry. Raises RuntimeError where there is no room."""
    reservation = store.reserve(header.payload_bytes)
    if reservation is None:
        raise RuntimeError(f"no room: {store.used_bytes} of {store.capacity_bytes} bytes are used")
    return store.write(reservation, header, chunks)


def forget(folder: Path) -> None:
    """Its files out of the page cache; what was not written back stays there."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def timed(
    seconds: dict[str, list[float]],
    ways: Mapping[str, Callable[[], object]],
    number: int = 0,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Add the seconds of each way, another one first in every round, so that all of a round meet the same disk;
    ``check`` follows each."""
    names = list(ways)
    first = number % len(names)
    for name in names[first:] + names[:first]:
        begin = time.perf_counter()
        ways[name]()
        seconds.setdefault(name, []).append(time.perf_counter() - begin)
        check()


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes in one thread, as the workers of the tiers do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def checksums(arena: Arena, runs: Sequence[Run], shape: Shape, num_slots: int) -> tuple[Extent, ...]:
    """The extents of what is in the arena now, one per layer, hashed as a demotion does."""
    size = shape.layer_bytes(num_slots)
    return tuple(extent_of(layer * size, arena.buffers(runs, layer * size, size)) for layer in range(shape.num_layers))


def make_header(
    draw: random.Random, shape: Shape, num_tokens: int, extents: tuple[Extent, ...], payload_offset: int = 0
) -> Header:
    """The header of an exact entry of random tokens, keys and place in its path."""
    tokens = np.frombuffer(draw.randbytes(4 * num_tokens), "<u4") % 128_000
    return Header(
        fingerprint=FINGERPRINT,
        namespace=namespace_digest(None),
        parent_key=draw.randbytes(16),
        key=draw.randbytes(16),
        start=shape.page_size * draw.randrange(4096),
        tokens=tokens.astype("<u4").tobytes(),
        form=EXACT,
        is_lossy_prefix=False,
        num_slots=num_tokens,
        shape=shape,
        extents=extents,
        payload_offset=payload_offset,
    )
