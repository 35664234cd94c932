"""Storage backends of SGLang's HiCache as engines of the external store.

Two of their ways to hand bytes over: as tensors (file, and what users bring along), or as an address and a size within
memory that was registered (Mooncake).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from sglang_evicpress.tiers.entry.header import BadEntry
from sglang_evicpress.tiers.external.entries import MOST_VALUE_BYTES
from sglang_evicpress.tiers.external.values import Values

BACKENDS = ("file", "mooncake", "dynamic")
"""Those of --hicache-storage-backend that keep values of any size under any key."""

_OWNER = "evicpress"  # as the model's name in their keys: pages of HiCache in the same store are none of ours
_FILE_FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
_MOONCAKE_LIMITS = {"MC_RPC_TIMEOUT_MS": "1000", "MC_RPC_CONNECT_TIMEOUT_MS": "1000", "MC_TCP_STATUS_TIMEOUT_SEC": "2"}
"""Mooncake waits half a minute for a peer that hangs unless it is told otherwise before it is imported."""


MOST_KEPT_BACK = 3
"""Values, one after the other, that are not handed over: then the store has failed, and not they."""


class HiCacheBackend(Protocol):
    """SGLang's ``HiCacheStorage``."""

    def exists(self, key: str) -> bool: ...
    def get(self, key: str, target_location: Any, target_sizes: Any = None) -> Any: ...
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...


class TensorValues:
    """A backend that takes tensors."""

    def __init__(self, name: str, backend: HiCacheBackend) -> None:
        self.name, self._backend = name, backend

    def has(self, key: str) -> bool:
        return bool(self._backend.exists(key))

    def put(self, key: str, value: memoryview) -> bool:
        return self._backend.exists(key) or bool(self._backend.set(key, _tensor(value)))

    def get(self, key: str, target: memoryview) -> bool:
        wanted = _tensor(target)
        try:  # a backend may log each value that is not there
            found = self._backend.get(key, wanted) if self._backend.exists(key) else None
        except OSError as error:
            if error.errno is not None:
                raise
            raise BadEntry("length", f"value {key} is not of {len(target)} bytes") from error  # what file says of it
        if found is None:
            return False
        if found.data_ptr() != wanted.data_ptr():  # one of its own
            found = found.contiguous().view(torch.uint8).flatten()
            if len(found) != len(wanted):
                raise BadEntry("length", f"value {key} is not of {len(target)} bytes")
            wanted.copy_(found)
        return True

    def close(self) -> None:
        _close(self._backend)


class AddressValues:
    """A backend that takes addresses in memory which ``register`` makes known to it."""

    def __init__(self, name: str, backend: HiCacheBackend, register: Callable[[torch.Tensor], object]) -> None:
        self.name, self._backend, self._register = name, backend, register
        self._of_thread = threading.local()
        self._num_kept_back = 0  # values, one after the other, that were there and were not handed over

    def has(self, key: str) -> bool:
        return bool(self._backend.exists(key))

    def put(self, key: str, value: memoryview) -> bool:
        buffer = self._buffer(len(value))
        buffer[: len(value)] = _tensor(value)
        return bool(self._backend.set(key, None, buffer.data_ptr(), len(value)))

    def get(self, key: str, target: memoryview) -> bool:
        if not self._backend.exists(key):
            return False
        buffer = self._buffer(len(target))
        if not self._backend.get(key, buffer.data_ptr(), len(target)):
            self._num_kept_back += 1
            if self._num_kept_back >= MOST_KEPT_BACK:
                raise OSError(f"{self.name} has value {key} and does not hand it over, as others before")
            raise BadEntry("missing", f"value {key} went meanwhile, or has more than {len(target)} bytes")
        self._num_kept_back = 0
        _tensor(target)[:] = buffer[: len(target)]
        return True

    def close(self) -> None:
        _close(self._backend)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Registered memory of this thread."""
        buffer: torch.Tensor | None = getattr(self._of_thread, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = torch.empty(max(num_bytes, MOST_VALUE_BYTES), dtype=torch.uint8)  # no value is larger
            self._register(buffer)
            self._of_thread.buffer = buffer
        return buffer


def open_values(backend: str, extra_config: Mapping[str, object]) -> Values:
    """The engine of that name. Raises ValueError, one sentence, when it cannot be used."""
    if backend == "mooncake":
        for name, value in _MOONCAKE_LIMITS.items():
            os.environ.setdefault(name, value)
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=_OWNER,
        extra_config=dict(extra_config),
    )
    folder = extra_config.get("file_storage_path") if backend == "file" else None
    try:
        with _file_folder(folder):
            opened = StorageBackendFactory.create_backend(backend, config, None)
    except Exception as error:
        raise ValueError(
            f"external_backend {backend!r} cannot be used ({type(error).__name__}: {error}): expected one that runs, "
            "with the external_config that SGLang's --hicache-storage-backend-extra-config would have"
        ) from error
    if backend == "mooncake":
        return AddressValues(backend, opened, opened.register_buffer)
    return TensorValues(backend, opened)


@contextmanager
def _file_folder(folder: object) -> Iterator[None]:
    """The backend ``file`` of older releases reads its folder from the environment alone."""
    known = os.environ.get(_FILE_FOLDER)
    if folder is not None:
        os.environ[_FILE_FOLDER] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(_FILE_FOLDER, None)
        if known is not None:
            os.environ[_FILE_FOLDER] = known


def _tensor(memory: memoryview) -> torch.Tensor:
    """Its bytes, not copied. They may be read-only; nobody writes to those."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def _close(backend: object) -> None:
    close = getattr(backend, "close", None)
    if close is not None:
        close()
