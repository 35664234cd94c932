"""One context read back from SSD into host memory: our store beside SGLang's file backend, on the same bytes."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import statistics
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evicbench.report import Line
from evicbench.tiers.inputs import SHAPE_8B, checksums, forget, make_header, one_thread, put, take, timed
from sglang_evicpress.tiers.host.arena import Arena
from sglang_evicpress.tiers.ssd.store import SsdStore

NUM_TOKENS = 768
NUM_BYTES = SHAPE_8B.num_layers * SHAPE_8B.layer_bytes(NUM_TOKENS)
PAGE_SIZES = (1, 64)
"""SGLang's default, and what its documentation sets for a storage backend. HiCache makes one file per page."""

NUM_ROUNDS = 8
TIMES = 2.0


class Peer:
    """SGLang's file backend and host pool of one page size, driven as its cache controller drives them.

    The pool is built without its constructor, which pins memory and so needs a GPU; its methods are SGLang's own.
    """

    def __init__(self, folder: Path, page_size: int, memory: memoryview) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what importing SGLang on a CPU says
            from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheFile, HiCacheStorageConfig
            from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
            from sglang.srt.mem_cache.mmap_allocator import alloc_mmap
        self.folder = folder
        self._batch = STORAGE_BATCH_SIZE
        os.environ.pop("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", None)
        config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "bench")
        self.backend: Any = HiCacheFile(config, str(folder))
        shape = SHAPE_8B
        dims = (2, shape.num_layers, NUM_TOKENS, shape.num_heads, shape.head_dim)
        pool: Any = object.__new__(MHATokenToKVPoolHost)
        pool.layout, pool.page_size, pool.device, pool.pin_memory = "layer_first", page_size, "cpu", False
        pool.layer_num, pool.head_num, pool.head_dim = shape.num_layers, shape.num_heads, shape.head_dim
        pool.dtype, pool.size = torch.bfloat16, NUM_TOKENS
        pool.kv_buffer = alloc_mmap(dims, torch.bfloat16)
        pool.kv_buffer.view(torch.uint8).view(-1).copy_(torch.from_numpy(np.frombuffer(memory, np.uint8)))
        self.pool = pool
        self.page_size = page_size
        self.keys = _page_keys(page_size)

    def save(self) -> None:
        """Save like `_generic_page_set`."""
        for begin, keys in self._batches():
            pages = [self.pool.get_data_page((begin + i) * self.page_size) for i in range(len(keys))]
            if not self.backend.batch_set(keys, pages):
                raise RuntimeError("SGLang's file backend did not store a page")

    def load(self) -> None:
        """Load like `_generic_page_get`: pages into new memory, from there to their place in the host pool."""
        for begin, keys in self._batches():
            pages = self.backend.batch_get(keys, [self.pool.get_dummy_flat_data_page() for _ in keys])
            for i, page in enumerate(pages):
                self.pool.set_from_flat_data_page((begin + i) * self.page_size, page)

    def _batches(self) -> Iterator[tuple[int, Sequence[str]]]:
        for begin in range(0, len(self.keys), self._batch):
            yield begin, self.keys[begin : begin + self._batch]


def measure_peer(store: SsdStore, arena: Arena, folder: Path) -> Iterator[Line]:
    with one_thread():  # as both sides' IO threads copy: the barriers of a parallel copy cost more than they gain
        for page_size in PAGE_SIZES:
            yield _compare(store, arena, folder, page_size)


def _compare(store: SsdStore, arena: Arena, folder: Path, page_size: int) -> Line:
    source, target = take(arena.extents, NUM_BYTES), take(arena.extents, NUM_BYTES)
    (memory,), pieces = arena.buffers(source, 0, NUM_BYTES), arena.buffers(target, 0, NUM_BYTES)
    header = make_header(random.Random(2), SHAPE_8B, NUM_TOKENS, checksums(arena, source, SHAPE_8B, NUM_TOKENS))
    ref = put(store, header, [memory])
    store.sync()
    peer = Peer(folder / f"peer-{page_size}", page_size, memory)
    peer.save()
    os.sync()
    expected, seconds = hashlib.blake2b(memory).digest(), dict[str, list[float]]()
    ours, theirs = arena.tensors(target, 0, NUM_BYTES)[0], peer.pool.kv_buffer.view(torch.uint8).view(-1)

    def read() -> None:
        found = store.find(header.lookup_key)[0]
        store.read(found, store.read_header(found), pieces)

    for _ in range(NUM_ROUNDS):
        for files, name, load, memory_read in (
            (folder / "ours", "ours", read, ours),
            (peer.folder, "theirs", peer.load, theirs),
        ):
            memory_read.zero_()
            forget(files)
            timed(seconds, {name: load})
            if hashlib.blake2b(memory_read.numpy()).digest() != expected:
                raise RuntimeError(f"reading gave other bytes back: {name}")
    store.remove(ref)
    store.reclaim()
    arena.extents.free(source)
    arena.extents.free(target)
    shutil.rmtree(peer.folder)
    ratio = statistics.median(other / own for own, other in zip(seconds["ours"], seconds["theirs"], strict=True))
    median, best = ({name: 1e3 * of(took) for name, took in seconds.items()} for of in (statistics.median, min))
    return Line(
        f"cold read of a context of {NUM_BYTES / 1e6:.0f} MB into host memory: SGLang's file backend over ours, at its "
        f"page size {page_size}: {len(peer.keys)} files",
        f">= {TIMES:.0f}x",
        f"{ratio:.1f}x, the median of {NUM_ROUNDS} paired rounds: {median['theirs']:.0f} ms over "
        f"{median['ours']:.0f} ms (best {best['theirs']:.0f} over {best['ours']:.0f}); it verifies nothing",
        ratio >= TIMES,
    )


def _page_keys(page_size: int) -> list[str]:
    """SGLang's: sha256 over the digest before and the page's tokens."""
    keys, digest = [], b""
    tokens = np.arange(NUM_TOKENS, dtype="<u4")
    for begin in range(0, NUM_TOKENS, page_size):
        digest = hashlib.sha256(digest + tokens[begin : begin + page_size].tobytes()).digest()
        keys.append(digest.hex())
    return keys
