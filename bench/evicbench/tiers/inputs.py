"""Shared inputs of the tiers' measurements: a folder on the disk to be measured, and headers of entries."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from evicbench.paths import OUT
from sglang_evicpress.core import EXACT
from sglang_evicpress.tiers.entry.encoding import Extent, Header, Shape, extent_of
from sglang_evicpress.tiers.entry.identity import fingerprint, namespace_digest
from sglang_evicpress.tiers.host.arena import Arena, Run

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
