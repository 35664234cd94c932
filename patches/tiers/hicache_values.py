"""Storage backends of SGLang's HiCache as engines of the external store.

Two of their ways to hand bytes over: as tensors (file, and what users bring along), or as an address and a size within
memory that was registered (Mooncake, NIXL).
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

BACKENDS = ("file", "mooncake", "nixl", "dynamic")
"""Those of --hicache-storage-backend that keep values of any size under any key."""

_OWNER = "evicpress"  # as the model's name in their keys: pages of HiCache in the same store are none of ours
_FOLDERS = {"file": "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "nixl": "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"}
_FOLDER = "file_storage_path"  # in their settings
_MOONCAKE_LIMITS = {"MC_RPC_TIMEOUT_MS": "1000", "MC_RPC_CONNECT_TIMEOUT_MS": "1000", "MC_TCP_STATUS_TIMEOUT_SEC": "2"}
"""Mooncake waits half a minute for a peer that hangs unless it is told otherwise before it is imported."""


MOST_KEPT_BACK = 3
"""Values, one after the other, that are not handed over: then the store has failed, and not they."""


class HiCacheBackend(Protocol):
    """SGLang's ``HiCacheStorage``."""

    def exists(self, key: str) -> bool: ...
    def get(self, key: str, target_location: Any, target_sizes: Any = None) -> Any: ...
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...


class NixlBackend:
    """SGLang's NIXL backend without its pages: their transfers take any bytes of registered memory. Raises ValueError
    for a release that has other ones."""

    def __init__(self, nixl: Any) -> None:
        used = ("_get_suffixed_key", "_query_keys_exist", "_xfer_pre_registered", "_pre_register_host", "file_manager")
        if missing := [name for name in used if not hasattr(nixl, name)]:
            raise ValueError(f"SGLang's NIXL backend has no {', '.join(missing)}: expected that of a supported release")
        self._nixl = nixl

    def register(self, buffer: torch.Tensor) -> None:
        """Make memory known to it, until it is closed."""
        self._nixl._pre_register_host(buffer.data_ptr(), buffer.numel(), "evicpress")

    def exists(self, key: str) -> bool:
        return bool(self._nixl._query_keys_exist([self._nixl._get_suffixed_key(key)])[0])

    def get(self, key: str, target_location: Any, target_sizes: Any = None) -> bool:
        return self._transfer(key, target_location, target_sizes, "READ")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """A value that is there is written again, with the same bytes: it may be of a server that was killed."""
        return self._transfer(key, target_location, target_sizes, "WRITE")

    def close(self) -> None:
        self._nixl.close()

    def _transfer(self, key: str, address: int, num_bytes: int, direction: str) -> bool:
        name, files = self._nixl._get_suffixed_key(key), self._nixl.file_manager
        if files is not None:
            name = files.get_file_path(name)
        return bool(self._nixl._xfer_pre_registered([(address, num_bytes)], [name], direction))


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
        extra_config={},
    )
    settings = dict(extra_config)
    if backend == "nixl":  # values have sizes of their own, which direct reads and writes do not take
        settings["use_direct_io"] = False
    folder = settings.pop(_FOLDER, None) if backend == "nixl" else settings.get(_FOLDER)
    config.extra_config = settings
    try:
        with _folder_in_environment(_FOLDERS.get(backend), folder):
            opened = StorageBackendFactory.create_backend(backend, config, None)
            nixl = NixlBackend(opened) if backend == "nixl" else None
    except Exception as error:
        raise ValueError(
            f"external_backend {backend!r} cannot be used ({type(error).__name__}: {error}): expected one that runs, "
            "with the external_config that SGLang's --hicache-storage-backend-extra-config would have"
        ) from error
    if nixl is not None:
        return AddressValues(backend, nixl, nixl.register)
    if backend == "mooncake":
        return AddressValues(backend, opened, opened.register_buffer)
    return TensorValues(backend, opened)


@contextmanager
def _folder_in_environment(name: str | None, folder: object) -> Iterator[None]:
    """Some backends read their folder from the environment alone."""
    if name is None or folder is None:
        yield
        return
    known = os.environ.get(name)
    os.environ[name] = str(folder)
    try:
        yield
    finally:
        del os.environ[name]
        if known is not None:
            os.environ[name] = known


def _tensor(memory: memoryview) -> torch.Tensor:
    """Its bytes, not copied. They may be read-only; nobody writes to those."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def _close(backend: object) -> None:
    close = getattr(backend, "close", None)
    if close is not None:
        close()
