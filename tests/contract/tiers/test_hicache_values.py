"""SGLang's own storage backends keep and give back values, and say no in one sentence."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

from sglang_evicpress.patches.tiers.hicache_values import AddressValues, NixlBackend, open_values
from sglang_evicpress.tiers.entry.header import BadEntry
from sglang_evicpress.tiers.external.values import Values

pytestmark = pytest.mark.sglang

SIZES = (1, 80, 5000, 1 << 20)

DYNAMIC = """
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

class Dictionary(HiCacheStorage):
    def __init__(self, storage_config, kwargs):
        self.values = {}
    def exists(self, key):
        return key in self.values
    def set(self, key, value=None, target_location=None, target_sizes=None):
        self.values[key] = value.clone()
        return True
    def get(self, key, target_location=None, target_sizes=None):
        return target_location.copy_(self.values[key])
    def batch_get(self, keys, target_locations=None, target_sizes=None):
        raise NotImplementedError
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        raise NotImplementedError
"""


def check_values(values: Values) -> None:
    for size in SIZES:
        data, found = bytearray(random.Random(size).randbytes(size)), bytearray(size)
        assert not values.get(f"key-{size}", memoryview(found))
        assert values.put(f"key-{size}", memoryview(data))
        assert values.get(f"key-{size}", memoryview(found)) and found == data


def test_files_keep_values_for_the_next_server(tmp_path: Path) -> None:
    check_values(open_values("file", {"file_storage_path": str(tmp_path)}))
    found = bytearray(80)
    assert open_values("file", {"file_storage_path": str(tmp_path)}).get("key-80", memoryview(found))
    assert found == random.Random(80).randbytes(80)


def test_a_file_of_another_size_is_a_bad_entry(tmp_path: Path) -> None:
    values = open_values("file", {"file_storage_path": str(tmp_path)})
    values.put("key", memoryview(bytearray(100)))
    (path,) = tmp_path.glob("key*")
    path.write_bytes(bytes(50))
    with pytest.raises(BadEntry, match="length"):
        values.get("key", memoryview(bytearray(100)))


def test_a_backend_that_users_bring_along_takes_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv_dictionary.py").write_text(DYNAMIC)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {"backend_name": "dictionary", "module_path": "kv_dictionary", "class_name": "Dictionary"}
    check_values(open_values("dynamic", names))


@pytest.mark.parametrize(
    ("backend", "config", "told"),
    [
        ("dynamic", {}, ("dynamic", "backend_name")),
        ("dynamic", {"backend_name": "x", "module_path": "no_such", "class_name": "X"}, ("ImportError", "no_such")),
    ],
)
def test_a_backend_that_cannot_be_used_is_one_sentence(
    backend: str, config: dict[str, object], told: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match="external_backend .* cannot be used") as caught:
        open_values(backend, config)
    assert all(word in str(caught.value) for word in (*told, "expected one that runs"))


def test_without_its_package_mooncake_is_refused() -> None:
    if importlib.util.find_spec("mooncake") is not None:
        pytest.fail("Mooncake is installed where the tests run: it is measured by make show-trust")
    with pytest.raises(ValueError, match="external_backend 'mooncake' cannot be used .*mooncake"):
        open_values("mooncake", {"master_server_address": "127.0.0.1:1"})


class Addresses:
    """A backend that takes addresses, as Mooncake's does, in memory that is registered."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.registered: list[tuple[int, int]] = []

    def register(self, buffer: object) -> None:
        self.registered.append((buffer.data_ptr(), buffer.data_ptr() + buffer.numel()))

    def exists(self, key: str) -> bool:
        return key in self.values

    def set(self, key: str, value: object, at: int, size: int) -> bool:
        import ctypes

        assert value is None and any(begin <= at and at + size <= end for begin, end in self.registered)
        self.values.setdefault(key, ctypes.string_at(at, size))
        return True

    def get(self, key: str, at: int, size: int) -> bool:
        import ctypes

        assert any(begin <= at and at + size <= end for begin, end in self.registered)
        ctypes.memmove(at, self.values[key], len(self.values[key]))
        return len(self.values[key]) <= size


def test_bytes_are_handed_over_by_address_in_registered_memory() -> None:
    backend = Addresses()
    check_values(AddressValues("mooncake", backend, backend.register))
    assert len(backend.registered) == 1


class Nixl:
    """SGLang's NIXL backend, as far as values need it, and its files by path."""

    def __init__(self) -> None:
        self.kept, self.file_manager = Addresses(), self
        self.is_closed = False

    def get_file_path(self, name: str) -> str:
        return f"/kv/{name}"

    def _get_suffixed_key(self, key: str) -> str:
        return f"{key}_evicpress_0_1"

    def _query_keys_exist(self, names: list[str]) -> list[bool]:
        return [self.kept.exists(self.get_file_path(name)) for name in names]

    def _pre_register_host(self, begin: int, size: int, kind: str) -> None:
        self.kept.registered.append((begin, begin + size))

    def _xfer_pre_registered(self, buffers: list[tuple[int, int]], paths: list[str], direction: str) -> bool:
        ((at, size),), (path,) = buffers, paths
        if direction == "READ":
            return self.kept.get(path, at, size)
        self.kept.values.pop(path, None)
        return self.kept.set(path, None, at, size)

    def close(self) -> None:
        self.is_closed = True


def test_nixl_keeps_bytes_of_registered_memory_without_pages() -> None:
    nixl = Nixl()
    backend = NixlBackend(nixl)
    values = AddressValues("nixl", backend, backend.register)
    check_values(values)
    assert set(nixl.kept.values) == {f"/kv/key-{size}_evicpress_0_1" for size in SIZES}
    nixl.kept.values["/kv/key-80_evicpress_0_1"] = bytes(79)  # of a server that was killed as it wrote
    data, found = bytearray(random.Random(80).randbytes(80)), bytearray(80)
    assert values.put("key-80", memoryview(data)) and values.get("key-80", memoryview(found)) and found == data
    values.close()
    assert nixl.is_closed


def test_nixl_of_a_release_that_has_other_transfers_is_refused() -> None:
    with pytest.raises(ValueError, match="SGLang's NIXL backend has no _get_suffixed_key, .*: expected that of"):
        NixlBackend(object())


def test_the_releases_nixl_has_what_is_used() -> None:
    path = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt/mem_cache/storage/nixl"
    text = (path / "hicache_nixl.py").read_text()
    for name in ("_get_suffixed_key", "_query_keys_exist", "_xfer_pre_registered", "_pre_register_host"):
        assert f"def {name}(" in text
    assert "self.file_manager = (" in text and "use_direct_io" in (path / "nixl_utils.py").read_text()
