"""Damaged files: every reader answers with its declared error or with what is still whole, and never with a hit."""

from __future__ import annotations

import json
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save

from evicbench.report import Line
from evicbench.tiers.inputs import FINGERPRINT, make_header, one_thread, put
from evicbench.trust.mutator import mutated
from sglang_evicpress.core import Form
from sglang_evicpress.files import read_json
from sglang_evicpress.geometry.centres import ModelFacts, QueryGeometry
from sglang_evicpress.geometry.file import FORMAT
from sglang_evicpress.geometry.file import read as read_geometry
from sglang_evicpress.geometry.file import write as write_geometry
from sglang_evicpress.geometry.rope import Rope
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.running_stats import RunningStats
from sglang_evicpress.quality.store import ProfileStore, StoreError
from sglang_evicpress.search.budget_file import BudgetFile, read_budget_file, write_budget_file
from sglang_evicpress.tenants import read_tenants
from sglang_evicpress.tiers.entry.encoding import MAX_RECORD_BYTES, decode, encode, encode_tombstone, peek
from sglang_evicpress.tiers.entry.header import BadEntry, Header, Shape, extent_of
from sglang_evicpress.tiers.ssd.folder import StoreError as SsdError
from sglang_evicpress.tiers.ssd.scan import scan
from sglang_evicpress.tiers.ssd.store import SsdStore

NUM_INPUTS = 1_000_000
SHAPE = Shape(2, 2, 16, "float32", 1)


@dataclass(frozen=True, slots=True)
class Reader:
    """``read`` takes damaged bytes, and answers whether it took them for something; it raises AssertionError for a hit
    that is none. ``errors`` is what it may raise else. ``share``: of all inputs."""

    samples: Sequence[bytes]
    read: Callable[[bytes], bool]
    errors: tuple[type[Exception], ...]
    share: float


def _header(rng: random.Random) -> tuple[Header, list[bytes]]:
    num_tokens = rng.choice((1, 4, 32))
    layers = [rng.randbytes(SHAPE.layer_bytes(num_tokens)) for _ in range(SHAPE.num_layers)]
    extents = tuple(extent_of(number * len(each), [each]) for number, each in enumerate(layers))
    return make_header(rng, SHAPE, num_tokens, extents, 4096), layers


def _resealed(read: Callable[[bytes], bool], record: bytes) -> bool:
    """The record of somebody who knows the format: the checksum is right."""
    body = record[:-16]
    return read(body + xxhash.xxh3_128_digest(body))


def _read_record(known: set[bytes], record: bytes) -> bool:
    header, size = decode(record)
    peek(record)
    assert size <= len(record) <= MAX_RECORD_BYTES
    assert record[:size] in known, "a damaged record was taken for an entry"
    assert header.num_tokens > 0
    return True


def _read_planted(record: bytes) -> bool:
    header, _ = decode(record)
    assert encode(header) == record[: len(encode(header))], "a record reads back otherwise"
    return True


def _scan(known: set[bytes], journal: bytes) -> bool:
    head = scan(bytearray(journal))
    for offset, size in zip(head.records.offsets, head.records.record_bytes, strict=True):
        assert journal[offset : offset + size] in known, "a damaged record was found"
    return bool(len(head.records))


def _geometry() -> QueryGeometry:
    rope = Rope(100.0 ** -(torch.arange(4) / 4), 8, False, 1.0)
    facts = ModelFacts("Fuzzed", 2, 2, 1, 8, "0" * 32)
    centres = torch.ones(2, 2, 8)
    return QueryGeometry(facts, rope, centres, rope.lengths(centres) + 0.5, 100, 64)


class _Geometry:
    """A file of tensors that says something else about them."""

    def __init__(self, folder: Path) -> None:
        path = folder / "geometry"
        write_geometry(str(path), _geometry())
        with safe_open(str(path), "pt") as file:
            self.about = file.metadata()[FORMAT].encode()
            self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        self.content, self._spoiled = path.read_bytes(), folder / "spoiled"

    def __call__(self, about: bytes) -> bool:
        self._spoiled.write_bytes(save(self._tensors, {FORMAT: about.decode("utf-8", "replace")}))
        return bool(read_geometry(str(self._spoiled)).digest)


class _File:
    """A file that takes every input in turn."""

    def __init__(self, folder: Path, name: str, read: Callable[[str], object]) -> None:
        self.path, self._read = folder / name, read

    def __call__(self, data: bytes) -> bool:
        self.path.write_bytes(data)
        self._read(str(self.path))
        return True


class _Profiles:
    """A profile store: no profile is given back that was not put."""

    def __init__(self, folder: Path) -> None:
        stats = {Form("knorm", 0.5): RunningStats(4, 0.9, 0.01)}
        self.path, self.identity = folder / "profiles", bytes(16)
        self.profiles = [Profile(b"%016d" % key, 64, stats, "logprob", "0" * 16, 4, 1.5e9) for key in range(3)]
        store = ProfileStore(self.path, self.identity)
        for profile in self.profiles:
            store.put(profile)

    def __call__(self, data: bytes) -> bool:
        for left in self.path.parent.glob("profiles*"):
            left.unlink()
        self.path.write_bytes(data)
        found = ProfileStore(self.path, self.identity).load()
        assert all(profile in self.profiles for profile in found), "a profile that nobody put"
        return bool(found)


class _Folder:
    """An SSD folder: whatever is read from it is what was written."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.written = folder / "ssd", dict[bytes, list[bytes]]()
        self.folder.mkdir(mode=0o700)
        store = self.open()
        for _ in range(6):
            header, layers = _header(rng)
            put(store, header, [memoryview(layer) for layer in layers])
            self.written[header.key] = layers
        store.close()
        self.files = {path.name: path.read_bytes() for path in self.folder.iterdir() if path.is_file()}

    def open(self) -> SsdStore:
        return SsdStore(self.folder, 1 << 24, FINGERPRINT, segment_bytes=1 << 20, sync="none")

    def spoil(self, name: str, data: bytes) -> bool:
        for left in self.folder.iterdir():
            left.unlink()
        for other, content in self.files.items():
            (self.folder / other).write_bytes(data if other == name else content)
            (self.folder / other).chmod(0o600)
        store, num_hits = self.open(), 0
        try:
            for ref in store.entries_behind(None, 100):
                try:
                    header = store.read_header(ref)
                    buffer = bytearray(header.payload_bytes)
                    store.read(ref, header, [memoryview(buffer)])
                except BadEntry:
                    continue
                assert bytes(buffer) == b"".join(self.written[header.key]), "other bytes than were written"
                num_hits += 1
        finally:
            store.close()
        return num_hits > 0


def readers(folder: Path, rng: random.Random) -> dict[str, Reader]:
    headers = [_header(rng)[0] for _ in range(8)]
    records = [encode(header) for header in headers]
    journal = b"".join(
        part for number, record in enumerate(records) for part in (record, encode_tombstone(number * 200))
    )
    plain = b"".join(records)
    tenants = {"gold": {"cache_salt": "a", "kv_quality": "exact"}, "others": {"cache_salt": "b", "kv_quality": 0.9}}
    write_budget_file(str(folder / "budgets"), BudgetFile.of([100, 50, 50, 200], 100, {"by": "a search"}))
    geometry = _Geometry(folder)
    profiles, ssd = _Profiles(folder), _Folder(folder, rng)
    known, files = set(records), ValueError
    result = {
        "records": Reader(records, partial(_read_record, known), (BadEntry,), 0.5),
        "records of strangers": Reader(records, partial(_resealed, _read_planted), (BadEntry,), 0.3),
        "journals of the SSD": Reader([journal, plain], partial(_scan, known), (), 0.12),
        "tenants": Reader(
            [json.dumps(tenants).encode()],
            _File(folder, "spoiled", lambda path: read_tenants(read_json(path, "tenants"))),
            (files,),
            0.03,
        ),
        "layer budgets": Reader(
            [(folder / "budgets").read_bytes()], _File(folder, "spoiled", read_budget_file), (files,), 0.03
        ),
        "geometry": Reader([geometry.content], _File(folder, "spoiled", read_geometry), (files,), 0.01),
        "geometry of strangers": Reader([geometry.about], geometry, (files,), 0.01),
        "profile stores": Reader([profiles.path.read_bytes()], profiles, (files, StoreError), 0.0008),
    }
    for name, content in ssd.files.items():
        if content:
            result[f"SSD folder, {name}"] = Reader([content], partial(ssd.spoil, name), (SsdError,), 0.003)
    return result


def fuzz(reader: Reader, rng: random.Random, num_inputs: int) -> tuple[Counter[str], list[str]]:
    """Counts of how its inputs ended, and those that ended otherwise, by their number."""
    ends, problems = Counter[str](), []
    for number in range(num_inputs):
        data = mutated(rng, rng.choice(reader.samples), reader.samples)
        try:
            ends["taken" if reader.read(data) else "nothing in it"] += 1
        except reader.errors as error:
            ends[type(error).__name__] += 1
        except Exception as error:  # noqa: BLE001 - what a fuzzer looks for
            problems.append(f"input {number}: {type(error).__name__}: {error}"[:300])
    return ends, problems


def measure(num_inputs: int = NUM_INPUTS, seed: int = 0) -> Iterator[Line]:
    logging.disable(logging.WARNING)  # a line for each
    with one_thread(), tempfile.TemporaryDirectory() as name:
        for what, reader in readers(Path(name), random.Random(f"samples-{seed}")).items():
            begin, count = time.monotonic(), max(20, round(reader.share * num_inputs))
            ends, problems = fuzz(reader, random.Random(f"{what}-{seed}"), count)
            yield Line(
                f"damaged {what}: {count:,} inputs, seed {seed}",
                "the declared error or what is still whole; no crash, no hit that was never written",
                f"{', '.join(f'{end} {number:,}' for end, number in ends.most_common())}; "
                f"{time.monotonic() - begin:.0f} s; {len(problems)} problems"
                + (f", the first: {problems[0]}" if problems else ""),
                not problems,
            )
