"""Random walks over EvicPressCache with both lower tiers, against an oracle that knows every KV row bit for bit.

Each KV row is a function of the token path that ends at it, its position, layer, head and side. So every row of every
node on the GPU can be told right from wrong, wherever it has been in between: compressed, on the host, on the SSD, read
back by another server. Storage is damaged on the way; what is damaged must never be seen again.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from tests.contract.cache.test_radix_cache_model import CONTEXT, CURVES, FORMS, ROWS, Request, Walk, path_hashes

from sglang_evicpress.config import GB, EvicPressConfig
from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.introspect.operations import IntrospectionError
from sglang_evicpress.patches.cache import policy_sync
from sglang_evicpress.patches.cache.radix_cache import EvicPressCache
from sglang_evicpress.patches.tiers import admin, load_back
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.storage import FAULTS_FLAG
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.node import iter_nodes, num_slots, path_to, slots_of, start_of
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost
from sglang_evicpress.tiers.jobs import Job

pytestmark = pytest.mark.sglang

LAYERS, HEADS, DIM, SLOTS = 2, 2, 16, 384
HOST_BYTES, SSD_BYTES = 192 << 10, 512 << 10  # with float32 rows the pool takes as much as the host: a third of the SSD
IDENTITY = bytes(range(16))
DEAR, CHEAP = PrefillCost(0.01, 1.0, 0.0), PrefillCost(0.0, 1e-7, 0.0)
"""Of prefill: so dear that every load is worth it and has seconds of time, so cheap that none is."""

_PLACE = np.arange(2 * LAYERS * HEADS).reshape(2, LAYERS, HEADS, 1)
_FILLER = np.arange(DIM - 7, dtype=np.uint64)


def rows_of(hashes: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """K and V rows, int64 [2, layers, heads, n, dim] from -125 to 125, for what ends paths of these hashes at these
    positions, [n] or [layers, heads, n]. Seven entries say hash, position and place; the others depend on all of that.
    """
    shape = (2, LAYERS, HEADS, hashes.shape[-1])
    hashes, positions, place = (np.broadcast_to(part, shape) for part in (hashes, positions, _PLACE))
    digits = [hashes >> shift & 63 for shift in (0, 6, 12, 18)]
    named = np.stack([*digits, positions & 63, positions >> 6, place], -1)
    mixed = hashes * 0x9E3779B1 + positions * 0x85EBCA77 + place * 0xC2B2AE3D
    mixed = (mixed.astype(np.uint64)[..., None] + _FILLER * np.uint64(0x27D4EB2F)) * np.uint64(0x9FB21C651E98DF25)
    return np.concatenate([named, (mixed >> np.uint64(40)).astype(np.int64) % 251 - 125], -1)


def bits(rows: torch.Tensor) -> np.ndarray:
    """The same rows as bytes."""
    found = rows.contiguous().view(torch.uint8) if rows.numel() else torch.empty(rows.shape, dtype=torch.uint8)
    return found.numpy()


class TierWalk(Walk):
    """A walk whose cache has a host tier and, with ``folder``, an SSD tier. ``is_exact``: nothing is compressed."""

    def __init__(
        self,
        seed: int,
        page_size: int = 1,
        folder: Path | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        is_exact: bool = False,
        identity: bytes = IDENTITY,
        num_slots: int = SLOTS,
        host_bytes: int = HOST_BYTES,
        ssd_bytes: int = SSD_BYTES,
        cost: PrefillCost = DEAR,
    ) -> None:
        self.rng = random.Random(seed)
        self.page, self.dtype, self.folder, self.ssd_bytes = page_size, dtype, folder, ssd_bytes
        self.cost: PrefillCost | None = cost
        self.is_closed = False
        self.asked: list[tuple[list[int], str | None]] = []
        self.rows = ReqToTokenPool(ROWS, CONTEXT + 8, "cpu", False)
        self.pool = MHATokenToKVPool(num_slots, page_size, dtype, HEADS, DIM, LAYERS, "cpu", False)
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(num_slots, dtype, "cpu", self.pool, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(num_slots, page_size, dtype, "cpu", self.pool, False)
        self.config = EvicPressConfig(
            "evicpress",
            alpha=0.3,
            forms=(EXACT,) if is_exact else FORMS,
            min_compress_tokens=8,
            curves=CURVES,
            host_gb=1.0,
            ssd_dir=None if folder is None else str(folder),
            ssd_gb=None if folder is None else 1.0,
            ssd_fsync="none",
        )
        object.__setattr__(self.config, "host_gb", host_bytes / GB)  # smaller than a server may have it
        if folder is not None:
            object.__setattr__(self.config, "ssd_gb", ssd_bytes / GB)
        params = CacheInitParams(False, self.rows, self.allocator, page_size)
        compressor = Compressor(self.pool, page_size, self.config.sinks)
        self.cache = EvicPressCache(params, self.config, compressor, identity)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.documents = [[self.rng.randrange(50) for _ in range(150)] for _ in range(3)]
        self.count = self.num_pressed = 0
        self.cache.attach_scheduler(self.scheduler())
        self.stamp(cost)
        self.be_patient()

    def close(self) -> None:
        """Close like a server that ends; once."""
        if not self.is_closed:
            self.is_closed = True
            self.cache.close()

    # ---- what a scheduler does

    def stamp(self, cost: PrefillCost) -> None:
        self.count += 1
        self.cache.advance(self.count * 11.0, CostSnapshot(cost, policy_sync.START_LOADS, {}))

    def be_patient(self) -> None:
        """A store that could not write tries again at once."""
        if self.cache.ssd is not None:
            self.cache.ssd.store._backoff_s = 0.001

    def arrive(self) -> None:
        if len(self.waiting) > 6:
            return
        if self.cost is None:
            self.stamp(PrefillCost(0.01, self.rng.choice([1e-4, 1e-2, 1.0, 1.0]), 0.0))
        tokens, extra_key = self.rng.choice(self.asked[-8:] or [([], None)])
        if not tokens or self.rng.random() < 0.4:
            document = self.rng.choice(self.documents)
            tokens = document[: self.rng.randrange(1, len(document))]
            extra_key = self.rng.choice([None, None, "lora-a"])
        tokens = tokens[: self.rng.choice([200, 200, self.rng.randrange(1, 200)])]
        tokens = [*tokens, *(self.rng.randrange(50, 60) for _ in range(self.rng.randrange(1, 30)))]
        self.asked.append((tokens, extra_key))
        self.wait(tokens, extra_key)

    def wait(self, tokens: Sequence[int], extra_key: str | None = None) -> Request:
        self.count += 1
        request = Request(f"r{self.count}", list(tokens), len(tokens), extra_key)
        self.waiting.append(request)
        self.cache.on_queued(request)
        return request

    def start(self) -> None:
        if len(self.running) >= ROWS - 2 or not self.waiting:
            return
        request = self.rng.choice(self.waiting)
        if self.cache.is_prefetching(request):
            if self.rng.random() < 0.3:
                return  # passed over
            self.until(lambda: not self.cache.is_prefetching(request))
        self.admit(request, self.rng.choice([1.0, 1.0, self.rng.random()]))

    def admit(self, request: Request, share: float = 1.0) -> int:
        """Admit like SGLang's PrefillAdder a request whose prompt is then prefilled, or a share of it; returns how
        many tokens were loaded."""
        cache, tokens = self.cache, request.tokens
        self.waiting.remove(request)
        key = RadixKey(array("q", tokens), request.extra_key, limit=len(tokens) - 1)
        match = cache.match_prefix(MatchPrefixParams(key=key, req=request))
        request.prefix_indices, request.last_node = match.device_indices, match.last_device_node
        cache.inc_lock_ref(match.last_device_node)
        num_loaded = 0
        if match.host_hit_length:
            loaded, request.last_node = cache.init_load_back(
                InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request)
            )
            num_loaded = len(loaded)
            assert num_loaded in (0, match.host_hit_length)
            request.prefix_indices = torch.cat([request.prefix_indices, loaded])
        request.cache_protected_len = len(request.prefix_indices)
        cache.inc_lock_ref(request.last_node)
        cache.dec_lock_ref(match.last_device_node)
        if not self.extend(request, max(1, round(share * len(tokens)))):
            cache.dec_lock_ref(request.last_node)
            self.waiting.append(request)
            cache.on_queued(request)
        cache.queued_hits.keep_only(self.waiting)
        cache.keep_prefetches(self.waiting)
        return num_loaded

    def serve(self, tokens: Sequence[int], extra_key: str | None = None) -> int:
        """A request from its arrival to its end; returns how many tokens were loaded for it."""
        request = self.wait(tokens, extra_key)
        self.until(lambda: not self.cache.is_prefetching(request))
        num_loaded = self.admit(request)
        if request in self.waiting:  # what is still being loaded for others had to stay: another round
            self.settle()
            num_loaded = self.admit(request)
        self.running.remove(request)
        self.cache.cache_finished_req(request)
        self.rows.free_slots.append(request.req_pool_idx)
        return num_loaded

    def tick(self) -> None:
        self.cache.tick(is_idle=not self.running and not self.waiting)

    def until(self, is_done: object) -> None:
        """Let the threads work until it is; a hang fails."""
        deadline = time.monotonic() + 60.0
        while not is_done():
            assert time.monotonic() < deadline, "nothing comes of it"
            self.cache.arrival.wait(0.005)
            self.tick()

    def settle(self) -> None:
        self.until(lambda: self.cache.storage.num_pending_jobs == 0)

    def end_all(self) -> None:
        super().end_all()
        self.cache.keep_prefetches([])

    def rest(self) -> None:
        """An idle server betters what it holds."""
        self.end_all()
        self.cache._next_look_s = 0.0
        for _ in range(self.rng.randrange(1, 20)):
            self.cache.arrival.wait(0.002)
            self.tick()

    # ---- what an operator, the policy and bad luck do

    def demote(self) -> None:
        """Whichever node can be, in random order."""
        for node in self.rng.sample(list(self.cache.nodes.values()), len(self.cache.nodes)):
            with contextlib.suppress(ValueError, IntrospectionError):
                self.cache.demote_node(node.id, self.rng.choice(self.cache.tiers[1:]))
                return

    def flush(self) -> None:
        self.cache.flush_tier(self.rng.choice(self.cache.tiers))

    def change_ssd(self) -> None:
        if self.folder is None:
            return
        if self.cache.ssd is None:
            self.cache.attach_ssd(str(self.folder), self.ssd_bytes / GB, None)
            self.be_patient()
        else:
            self.cache.detach_ssd()

    def reset(self) -> None:
        """Flush the cache like SGLang: when nothing runs."""
        while self.running:
            self.finish()
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()

    def flip_host(self) -> None:
        """A bit of an entry that nobody has just verified."""
        entries = []
        for entry in self.cache.host.entries():
            is_at_rest = bool(entry.owners) and entry.check is None and entry.pins == (entry.write is not None)
            if is_at_rest and entry.header.payload_bytes:
                entries.append(entry)
        if entries:
            self.damage(self.rng.choice(entries))

    def damage(self, entry: object) -> None:
        at = self.rng.randrange(entry.header.payload_bytes)
        (chunk,) = self.cache.host.arena.buffers(entry.runs, at, 1)
        chunk[0] ^= 1 << self.rng.randrange(8)
        entry.checked_s = 0.0

    def spoil_ssd(self) -> None:
        """Files that are lost, cut short or changed under the store."""
        files = sorted((self.folder / "rank-0").glob("segment-*")) if self.folder else []
        if not files:
            return
        path = self.rng.choice(files)
        size = path.stat().st_size
        kind = self.rng.choice(["lose", "cut", "flip", "flip", "flip"])
        if kind == "lose":
            path.unlink()
        elif kind == "cut":
            with path.open("r+b") as file:
                file.truncate(self.rng.randrange(size + 1))
        elif size:
            with path.open("r+b") as file:
                for at in self.rng.sample(range(size), min(size, 20)):
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << self.rng.randrange(8)]))

    # ---- the oracle

    def compute(self, request: Request, begin: int, end: int, slots: torch.Tensor) -> None:
        hashes = np.array(path_hashes(request.tokens[:end], self.adapter_of(request.extra_key))[begin:])
        rows = torch.from_numpy(rows_of(hashes, np.arange(begin, end))).to(self.dtype)
        for side, buffers in enumerate((self.pool.k_buffer, self.pool.v_buffer)):
            for layer in range(LAYERS):
                buffers[layer][slots] = rows[side, layer].transpose(0, 1)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """[2, layers, heads, n, dim], the way attention reads: what is still being loaded is waited for."""
        getters = (self.pool.get_key_buffer, self.pool.get_value_buffer)
        found = [bits(get(layer))[slots] for get in getters for layer in range(LAYERS)]
        rows = torch.from_numpy(np.stack(found).reshape(-1)).view(self.dtype)
        return rows.view(2, LAYERS, len(slots), HEADS, DIM).transpose(2, 3)

    def expected(self, hashes: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows_of(hashes, positions)).to(self.dtype)

    def view_of(self, request: Request) -> list[set[tuple[int, int]]]:
        row = self.rows.req_to_token[request.req_pool_idx, : request.kv_allocated_len - request.evicpress.holes]
        rows = self.read(row)
        values = rows[0].to(torch.int64).numpy()
        hashes = sum(values[..., index] << 6 * index for index in range(4))
        positions = values[..., 4] + (values[..., 5] << 6)
        assert np.array_equal(bits(rows), bits(self.expected(hashes, positions))), "no row was ever computed so"
        views = []
        for layer, head in np.ndindex(LAYERS, HEADS):
            pairs = list(zip(hashes[layer, head].tolist(), positions[layer, head].tolist(), strict=True))
            assert len(set(pairs)) == len(pairs), "an entry twice"
            views.append(set(pairs))
        return views

    def check_rows(self) -> None:
        """Every node that is on the GPU holds what was computed for its tokens, bit for bit."""
        for node in iter_nodes(self.cache.root_node):
            if node.value is None:
                continue
            tokens = [token for above in path_to(node) for token in above.key.raw_token_ids()]
            hashes = np.array(path_hashes(tokens, self.adapter_of(node.key.extra_key)))
            layout, start = node.kv.layout, start_of(node)
            positions = np.arange(start, len(tokens)) if layout is None else layout.positions.numpy().astype(np.int64)
            found = self.read(slots_of(node))
            assert np.array_equal(bits(found), bits(self.expected(hashes[positions], positions))), f"node {node.id}"

    def check(self) -> None:
        super().check()
        assert not [name for name in self.cache.storage.errors if name.endswith("internal")], self.cache.storage.errors
        if self.rng.random() < 0.5:
            self.check_rows()

    def check_nothing_leaks(self) -> None:
        """All is settled and nothing runs."""
        cache = self.cache
        assert not cache.loads and not cache.promotion_loads
        assert cache.host_room.copying_bytes == cache.ledger.reserved == 0
        entries = cache.host.entries()
        assert all(entry.owners and not entry.pins and entry.check is None is entry.write for entry in entries)
        assert cache.host.arena.extents.used_bytes == sum(entry.num_bytes for entry in entries)
        if cache.ssd is not None:
            assert all(entry.owners and entry.read is None for entry in cache.ssd.entries())
            assert cache.ssd._held_bytes == sum(entry.header.payload_bytes for entry in cache.ssd.entries())
            assert cache.ssd.store._space.reserved == 0
        assert cache.protected_size_ == 0 and not any(node.lock_ref or node.kv.job for node in cache.nodes.values())

    def moves(self) -> dict[Callable[[], None], float]:
        scheduling = {self.arrive: 6, self.leave: 1, self.start: 6, self.decode: 4, self.resume: 3, self.finish: 6}
        memory = {
            self.press: 3,
            self.evict: 2,
            self.demote: 12,
            self.tick: 6,
            self.settle: 3,
            self.flush: 0.3,
            self.rest: 0.7,
        }
        luck = {self.flip_host: 1, self.spoil_ssd: 0.5, self.change_ssd: 0.4, self.reset: 0.1}
        return scheduling | memory | luck

    def run(self, steps: int) -> None:
        self.step(steps)
        self.end_all()
        self.settle()
        self.check()
        self.check_rows()
        self.check_nothing_leaks()
        self.cache.free_slots(self.allocator.size)
        self.check()
        assert self.allocator.available_size() == self.allocator.size
        had_nodes = bool(self.cache.nodes)
        self.reset()
        self.settle()
        assert self.allocator.available_size() == self.allocator.size
        assert self.cache.host.arena.extents.used_bytes == self.cache.host.num_entries == 0
        if self.cache.ssd is not None and had_nodes:
            assert self.cache.ssd.store.num_entries == 0 and not self.cache.ssd.entries()
        self.check()
        self.check_nothing_leaks()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., TierWalk]]:
    """Makes walks, which are closed behind the test; ``has_ssd``: in the test's folder, one at a time."""
    monkeypatch.setattr(admin, "MOVE_WAIT_S", 0.02)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the rows are few
    walks: list[TierWalk] = []

    def open_one(seed: int = 0, page_size: int = 1, *, has_ssd: bool = True, **options: object) -> TierWalk:
        walks.append(TierWalk(seed, page_size, tmp_path if has_ssd else None, **options))
        return walks[-1]

    yield open_one
    for each in walks:
        each.close()
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    ("seed", "page_size", "dtype", "is_exact"),
    [
        (0, 1, torch.float32, False),
        (1, 1, torch.bfloat16, True),
        (2, 4, torch.float16, False),
        (3, 4, torch.float32, True),
        (4, 16, torch.bfloat16, False),
        (5, 16, torch.float16, True),
        (6, 1, torch.float16, False),
        (7, 4, torch.float32, False),
    ],
)
def test_random_walk_keeps_every_row(
    opened: Callable[..., TierWalk], seed: int, page_size: int, dtype: torch.dtype, is_exact: bool
) -> None:
    walk = opened(seed, page_size, dtype=dtype, is_exact=is_exact)
    walk.cost = None
    walk.run(400)
    assert walk.cache.storage.counts["released"] > 0


def test_a_drop_weighs_double_where_a_tier_lies_below(opened: Callable[..., TierWalk]) -> None:
    cache = opened(0, has_ssd=False).cache
    assert cache.recompute_weight == policy_sync.DROP_WEIGHT == 2.0
    assert cache.planner.policy.costs.prefill.per_token_s == pytest.approx(2.0 * cache.costs.prefill.per_token_s)
    cache.advance(1000.0, cache.costs, 3.0)
    assert cache.planner.policy.costs.prefill.per_token_s == pytest.approx(3.0 * cache.costs.prefill.per_token_s)


def test_random_walk_with_the_host_alone_keeps_every_row(opened: Callable[..., TierWalk]) -> None:
    walk = opened(8, has_ssd=False)
    walk.cost = None
    walk.run(400)
    assert walk.cache.storage.counts["released"] > 0


@pytest.mark.parametrize("seed", range(9, 11))
def test_random_walk_over_storage_that_fails_keeps_every_row(
    opened: Callable[..., TierWalk], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rates = "delay=0.02:0.003,eio=0.01,enospc=0.01,short=0.02,flip=0.03,lost=0.01"
    monkeypatch.setenv(FAULTS_FLAG, f"seed={seed},{rates}")
    walk = opened(seed)
    walk.cost = None
    walk.run(400)
    assert walk.cache.host.faults.counts.total() > 0


# ---- one thing at a time


def nodes_of(walk: TierWalk) -> list[object]:
    return list(walk.cache.nodes.values())


def some_tokens(walk: TierWalk, num_tokens: int) -> list[int]:
    return [walk.rng.randrange(50) for _ in range(num_tokens)]


def cached(walk: TierWalk, num_tokens: int) -> tuple[list[int], object]:
    """A context and its node, after a request for it."""
    tokens = some_tokens(walk, num_tokens)
    walk.serve(tokens)
    return tokens, next(node for node in nodes_of(walk) if list(node.key.raw_token_ids()) == tokens)


def sent(walk: TierWalk, node: object, tier: Tier) -> None:
    walk.until(lambda: walk.cache.demote_node(node.id, tier)["is_there"])
    assert tier_of(node) == tier


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
@pytest.mark.parametrize("form", [EXACT, Form("random", 0.5)])
def test_what_was_demoted_comes_back_bit_for_bit(
    opened: Callable[..., TierWalk], form: Form, tier: Tier, page_size: int, dtype: torch.dtype
) -> None:
    walk = opened(0, page_size, dtype=dtype)
    tokens, node = cached(walk, 128)
    if not form.is_exact:
        walk.cache.moves.compress(node.id, form)
    held, layout = num_slots(node), node.kv.layout
    sent(walk, node, tier)
    assert walk.allocator.available_size() == SLOTS
    for slots in (walk.pool.k_buffer, walk.pool.v_buffer):
        for buffer in slots:
            buffer.fill_(77)
    assert walk.serve([*tokens, 59]) == 128
    assert num_slots(node) == held and (layout is None or torch.equal(node.kv.layout.positions, layout.positions))
    walk.check()
    walk.check_rows()


def test_a_damaged_host_copy_is_a_miss_and_the_ssd_serves(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    tokens, node = cached(walk, 100)
    walk.cache.backup.start_copy(node, Tier.SSD)
    walk.settle()
    sent(walk, node, Tier.HOST)
    walk.damage(node.kv.copies[Tier.HOST].entry)
    assert walk.serve([*tokens, 59]) == 100
    assert walk.cache.storage.errors == {"host_checksum": 1} and walk.cache.storage.counts["read"] == 1
    walk.check_rows()


def test_what_is_damaged_everywhere_is_computed_again(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.HOST)
    walk.damage(node.kv.copies[Tier.HOST].entry)
    sent(walk, node, Tier.SSD)  # written as it is: whoever reads it will see that it is not what was saved
    assert walk.serve([*tokens, 59]) == 0
    assert walk.cache.storage.errors == {"ssd_checksum": 1} and node.id not in walk.cache.nodes
    assert walk.cache.ssd.store.num_entries == 0
    walk.check_rows()
    walk.check_nothing_leaks()


@pytest.mark.parametrize("suffix", ["kv", "head"])
def test_a_lost_file_is_a_miss(opened: Callable[..., TierWalk], suffix: str) -> None:
    walk = opened()
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.SSD)
    for path in (walk.folder / "rank-0").glob(f"segment-*.{suffix}"):
        path.unlink()
    assert walk.serve([*tokens, 59]) == (0 if suffix == "kv" else 100)  # the index is in memory
    walk.check_rows()


def test_what_is_read_for_a_waiting_request_counts_as_used(opened: Callable[..., TierWalk]) -> None:
    """Else what was just read would be the first that makes room for what is read after it."""
    walk = opened()
    tokens, node = cached(walk, 60)
    _, other = cached(walk, 60)
    sent(walk, node, Tier.SSD)
    assert node.kv.last_use < other.kv.last_use
    walk.wait([*tokens, 59])
    assert node.kv.last_use > other.kv.last_use
    assert walk.cache.planner.index.candidates[node.id].last_use == node.kv.last_use
    walk.end_all()


@pytest.mark.parametrize("is_cheap", [False, True])
def test_what_is_left_of_an_ssd_entry_does_not_keep_all_of_it(opened: Callable[..., TierWalk], is_cheap: bool) -> None:
    walk = opened()
    tokens = some_tokens(walk, 120)
    walk.serve(tokens)
    (node,) = nodes_of(walk)
    sent(walk, node, Tier.SSD)
    walk.serve([*tokens[:110], 57, 58, 59])  # splits it: both parts are pieces of one entry
    walk.settle()
    entry = node.kv.copies[Tier.SSD].entry
    assert len(entry.owners) == 2 and tier_of(node) == Tier.HOST
    walk.cache.placement.remove_copy(node, Tier.HOST)
    walk.cache.removal.after_loss(node)
    walk.stamp(CHEAP if is_cheap else DEAR)
    walk.cache.placement.remove_copy(node.parent, Tier.SSD)
    walk.cache.changes.changed(node.parent)
    walk.tick()
    assert (node.id in walk.cache.nodes) != is_cheap  # else it is computed anew: sooner than reading all of the entry
    walk.settle()
    assert walk.cache.ssd.store.num_entries == (0 if is_cheap else 1)
    walk.check()


def test_an_urgent_evict_frees_at_once_and_leaves_nothing_to_wait_for(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    for _ in range(3):
        cached(walk, 100)
    for workers in walk.cache.workers.values():
        assert workers.num_pending == 0 or walk.settle() is None
    free, copies = walk.allocator.available_size(), walk.cache.storage.num_pending_jobs
    assert walk.cache.free_slots(150) >= 150
    assert walk.allocator.available_size() - free >= 150 and walk.cache.storage.num_pending_jobs == copies
    walk.check()


def test_each_tier_can_be_emptied(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    first, second, third = (cached(walk, 60)[1] for _ in range(3))
    walk.cache.backup.start_copy(first, Tier.SSD)
    walk.settle()
    sent(walk, first, Tier.HOST)
    sent(walk, second, Tier.HOST)
    walk.cache.flush_tier(Tier.HOST)
    assert tier_of(first) == Tier.SSD and second.id not in walk.cache.nodes and third.value is not None
    assert walk.cache.host.arena.extents.used_bytes == 0
    walk.cache.flush_tier(Tier.GPU)
    assert third.id not in walk.cache.nodes and walk.allocator.available_size() == SLOTS
    walk.cache.flush_tier(Tier.SSD)
    walk.settle()
    assert not nodes_of(walk) and walk.cache.ssd.store.num_entries == 0
    walk.check()


def test_a_detached_ssd_keeps_its_entries_and_gives_them_back(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.SSD)
    walk.cache.detach_ssd()
    assert not nodes_of(walk) and walk.cache.tiers == (Tier.GPU, Tier.HOST)
    walk.check()
    walk.change_ssd()
    assert walk.serve([*tokens, 59]) == 100 and walk.cache.storage.counts["found_again"] == 1
    walk.check_rows()


def test_the_ssd_is_left_alone_while_the_tree_holds_kv_of_two_models(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.SSD)
    walk.cache.identify = lambda: IDENTITY
    walk.cache.weights_changed()
    assert walk.cache.ssd is not None, "the weights are the same"
    other = bytes(reversed(IDENTITY))
    walk.cache.identify = lambda: other
    walk.cache.weights_changed()
    walk.cache.weights_changed()
    assert walk.cache.tiers == (Tier.GPU, Tier.HOST) and not nodes_of(walk)
    with pytest.raises(ValueError, match="flush it first"):
        walk.change_ssd()
    walk.check()
    walk.cache.reset()
    assert walk.cache.tiers == (Tier.GPU, Tier.HOST, Tier.SSD) and walk.cache.adapters.identity == other
    _, node = cached(walk, 100)
    sent(walk, node, Tier.SSD)
    walk.check()
    walk.close()
    walk = opened()  # the first model again
    assert walk.serve([*tokens, 59]) == 100 and walk.cache.storage.counts["found_again"] == 1
    walk.check_rows()


class Block(Job):
    """Holds up a worker thread."""

    rank = -1

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def run(self) -> None:
        assert self.may_end.wait(60.0)

    def finish(self) -> None:
        pass


def blocked(walk: TierWalk, name: str, num_threads: int = 1) -> list[Block]:
    blocks = [Block() for _ in range(num_threads)]
    for block in blocks:
        walk.cache.workers[name].submit(block)
    return blocks


def test_a_read_that_never_ends_is_given_up_at_its_deadline(opened: Callable[..., TierWalk]) -> None:
    walk = opened(cost=PrefillCost(0.0, 1e-3, 0.0))
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.SSD)
    blocks = blocked(walk, "read", 2)
    assert walk.serve([*tokens, 59]) == 0 and walk.cache.storage.counts["prefetches_late"] == 1
    for block in blocks:
        block.may_end.set()
    walk.settle()
    walk.check_rows()


def test_an_ssd_that_hangs_keeps_nothing_on_the_host_from_being_loaded(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.HOST)
    node.kv.copies[Tier.HOST].entry.checked_s = 0.0  # long ago
    blocks = blocked(walk, "read", 2)
    assert walk.serve([*tokens, 59]) == 100
    for block in blocks:
        block.may_end.set()
    walk.settle()
    walk.check_rows()


def test_a_layer_that_is_late_is_copied_by_whoever_waits(
    opened: Callable[..., TierWalk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_back, "LAYER_DEADLINE_S", 0.01)
    walk = opened()
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.HOST)
    (block,) = blocked(walk, "load")
    assert walk.serve([*tokens, 59]) == 100
    walk.check_rows()
    assert walk.cache.loads and node.lock_ref == 1  # its thread has not begun
    block.may_end.set()
    walk.settle()
    assert walk.cache.storage.counts["late_layers"] == LAYERS and node.lock_ref == 0
    walk.check_rows()


def test_a_flush_waits_for_what_is_being_loaded(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    tokens, node = cached(walk, 100)
    sent(walk, node, Tier.HOST)
    (block,) = blocked(walk, "load")
    threading.Timer(0.05, block.may_end.set).start()
    request = walk.wait([*tokens, 59])
    walk.until(lambda: not walk.cache.is_prefetching(request))
    assert walk.admit(request) == 100
    walk.reset()
    walk.check()
    walk.settle()
    assert walk.cache.host.num_entries == 0 and not nodes_of(walk)


# ---- nodes that hang together


def test_a_node_stays_while_a_child_of_it_is_still_on_its_way(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    tokens, node = cached(walk, 60)
    walk.serve([*tokens, *some_tokens(walk, 60)])
    (child,) = node.children.values()
    walk.cache.backup.start_copy(node, Tier.HOST)
    walk.settle()
    assert walk.cache.moves.demote(child.id, Tier.HOST, EXACT) == 0  # its copy takes a while
    assert walk.cache.moves.demote(node.id, Tier.HOST, EXACT) == 0
    walk.check()
    walk.settle()
    assert child.value is None and walk.cache.moves.demote(node.id, Tier.HOST, EXACT) == 60
    walk.check()


def test_a_copy_that_fails_or_comes_too_late_can_be_made_again(
    opened: Callable[..., TierWalk], monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = opened()
    tokens, node = cached(walk, 60)

    def fail(*_: object) -> None:
        raise OSError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(type(walk.cache.copier), "save", fail)
        walk.cache.moves.demote(node.id, Tier.HOST, EXACT)
        walk.settle()
    assert walk.cache.storage.errors == {"host_io": 1}
    walk.cache.moves.demote(node.id, Tier.HOST, EXACT)
    walk.cache.moves.compress(node.id, Form("random", 0.5))
    walk.settle()
    assert walk.cache.storage.counts["copies_outdated"] == 1 and node.value is not None
    sent(walk, node, Tier.HOST)
    walk.check()
    walk.check_nothing_leaks()
    assert walk.serve([*tokens, 59]) == 60


def parted(walk: TierWalk) -> tuple[list[int], object, object]:
    """A context, compressed and then split in two: the lower part holds survivors from above the split."""
    tokens, node = cached(walk, 120)
    walk.cache.moves.compress(node.id, Form("random", 0.5))
    upper = walk.cache._split_node(node.key, node, 60)
    assert int(node.kv.layout.positions.min()) < 60
    return tokens, upper, node


def test_kv_computed_anew_for_a_path_of_absent_nodes_all_finds_its_place(opened: Callable[..., TierWalk]) -> None:
    walk = opened(has_ssd=False)
    tokens, upper, lower = parted(walk)
    sent(walk, lower, Tier.HOST)
    sent(walk, upper, Tier.HOST)
    walk.stamp(CHEAP)
    assert walk.serve([*tokens, 59]) == 0  # the upper part, exact again, leaves no use for the lower one's only copy
    walk.check()
    assert [num_slots(node) for node in nodes_of(walk)] == [len(node.key) for node in nodes_of(walk)]
    walk.check_rows()
    walk.reset()
    walk.check()


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("is_upper_gone", [False, True])
def test_survivors_from_above_a_split_are_only_served_behind_what_they_were_split_from(
    opened: Callable[..., TierWalk], is_restarted: bool, is_upper_gone: bool
) -> None:
    walk = opened()
    tokens, upper, lower = parted(walk)
    for node in (lower, upper):
        sent(walk, node, Tier.SSD)
    if is_restarted:
        walk.close()
        walk = opened()
        assert walk.cache.ssd.store.num_entries == 2
    if is_upper_gone:
        walk.stamp(CHEAP)
        walk.serve([*tokens[:60], 59])  # computes the upper part anew
        walk.stamp(DEAR)
    assert walk.serve([*tokens, 59]) == (0 if is_upper_gone else 120)
    walk.check()
    walk.check_rows()


def test_what_is_left_of_a_path_without_its_absent_end_must_be_worth_it_alone(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    tokens, node = cached(walk, 100)
    walk.cache.moves.compress(node.id, Form("streaming", 0.2))  # keeps 4 sinks and the last 16
    upper = walk.cache._split_node(node.key, node, 80)
    sent(walk, node, Tier.HOST)
    assert num_slots(upper) == 4
    match = walk.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
    assert len(match.device_indices) == 0  # 4 slots for 80 tokens
    assert walk.serve([*tokens, 59]) == 20 and num_slots(upper) == 4
    walk.check()


def test_a_node_of_holes_goes_down_and_comes_back(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    tokens, node = cached(walk, 100)
    walk.cache.moves.compress(node.id, Form("streaming", 0.2))
    upper = walk.cache._split_node(node.key, node, 80)
    middle = walk.cache._split_node(upper.key, upper, 40)
    assert [num_slots(each) for each in (middle, upper, node)] == [4, 0, 16]
    for tier in (Tier.HOST, Tier.SSD):
        for each in (node, upper, middle):
            sent(walk, each, tier)
        walk.check()
    assert walk.serve([*tokens, 59]) == 100
    walk.check()
    walk.check_rows()


def test_a_read_may_take_the_room_of_the_node_below_it(opened: Callable[..., TierWalk]) -> None:
    walk = opened(is_exact=True, host_bytes=80 << 10)  # 512 bytes a token: room for the one or for the other
    tokens, node = cached(walk, 100)
    longer = [*tokens, *some_tokens(walk, 60)]
    walk.serve(longer)
    (child,) = node.children.values()
    walk.cache.backup.start_copy(node, Tier.SSD)
    walk.settle()
    walk.cache.flush_tier(Tier.HOST)
    sent(walk, child, Tier.HOST)
    walk.cache.removal.release(node.id, Tier.SSD)
    assert tier_of(node) == Tier.SSD and tier_of(child) == Tier.HOST
    assert walk.serve([*longer, 59]) == 100
    assert Tier.SSD in child.kv.copies  # it was written first: nothing is lost for a read
    walk.check()
    walk.check_rows()


# ---- another server on the same folder


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("form", [EXACT, Form("random", 0.5)])
@pytest.mark.parametrize(("kept", "added"), [(128, 0), (96, 0), (96, 3), (128, 40)])
def test_the_next_server_finds_the_entries(
    opened: Callable[..., TierWalk], page_size: int, form: Form, kept: int, added: int
) -> None:
    """A prompt that is the entry's, ends inside it, leaves it halfway, or goes on behind it."""
    walk = opened(0, page_size, dtype=torch.bfloat16)
    tokens, node = cached(walk, 128)
    if not form.is_exact:
        walk.cache.moves.compress(node.id, form)
    held = node.kv.layout
    walk.close()
    walk = opened(0, page_size, dtype=torch.bfloat16)
    assert walk.cache.ssd.store.num_entries == 1 and not nodes_of(walk)
    prompt = [*tokens[:kept], *(55 for _ in range(added))]
    allowed_forms = min(kept, len(prompt) - 1) // page_size * page_size
    assert walk.serve(prompt) == allowed_forms
    assert walk.cache.storage.counts["found_again"] == 1 and walk.cache.storage.counts["loads"] == 1
    found = min(nodes_of(walk), key=start_of)
    assert found.kv.form == form
    if held is not None and len(found.key) == 128:
        assert torch.equal(found.kv.layout.positions, held.positions)
        assert torch.equal(found.kv.layout.logical, held.logical)
    walk.check()
    walk.check_rows()


@pytest.mark.parametrize("page_size", [1, 16])
def test_to_find_a_lossy_entry_again_no_more_than_its_survivors_is_read(
    opened: Callable[..., TierWalk], page_size: int
) -> None:
    walk = opened(0, page_size)
    tokens, node = cached(walk, 128)
    walk.cache.moves.compress(node.id, Form("random", 0.5))
    walk.close()
    walk = opened(0, page_size)
    assert walk.serve([*tokens, 59]) == 128
    (entry,) = walk.cache.ssd.entries()
    assert walk.cache.ssd.store.read_bytes == entry.header.payload_bytes + entry.header.extents[-1].num_bytes


@pytest.mark.parametrize("at", ["kv", "survivors"])
def test_a_damaged_lossy_entry_is_a_miss(opened: Callable[..., TierWalk], at: str) -> None:
    walk = opened()
    tokens, node = cached(walk, 100)
    walk.cache.moves.compress(node.id, Form("random", 0.5))
    survivors = 4 * num_slots(node) * (LAYERS * HEADS + 1)
    num_bytes = sum(walk.cache.copier.sizes(num_slots(node), True))
    walk.close()
    (path,) = (walk.folder / "rank-0").glob("segment-*.kv")
    data = bytearray(path.read_bytes())
    data[num_bytes - survivors // 2 if at == "survivors" else num_bytes // 4] ^= 1
    path.write_bytes(data)
    walk = opened()
    assert walk.serve([*tokens, 59]) == 0 and walk.cache.ssd.store.num_entries == 0
    assert walk.cache.storage.counts["found_again"] == (1 if at == "kv" else 0)
    assert walk.cache.ssd.store.errors == {"checksum": 1}
    walk.check()
    walk.check_rows()


def test_the_next_server_follows_a_path_of_many_entries(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    stem, *branches = (some_tokens(walk, 60) for _ in range(4))
    for branch in branches:
        walk.serve([*stem, *branch], "lora-a")
    walk.close()
    walk = opened()
    assert [walk.serve([*stem, *branch, 59], "lora-a") for branch in branches] == [120, 60, 60]
    assert walk.cache.storage.counts["found_again"] == 4
    walk.check()
    walk.check_rows()


def test_lossy_prefixes_stay_marked_over_a_restart(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    tokens, node = cached(walk, 60)
    walk.cache.moves.compress(node.id, Form("random", 0.5))
    longer = [*tokens, *some_tokens(walk, 60)]
    walk.serve(longer)
    assert next(iter(node.children.values())).kv.is_lossy_prefix
    walk.close()
    walk = opened()
    assert walk.serve([*longer, 59]) == 120
    child = next(each for each in nodes_of(walk) if start_of(each) == 60)
    assert child.kv.is_lossy_prefix and child.kv.form.is_exact
    walk.check()


def test_no_entry_is_served_to_another_namespace(opened: Callable[..., TierWalk]) -> None:
    walk = opened()
    tokens = some_tokens(walk, 100)
    walk.serve(tokens, "lora-a")
    walk.close()
    walk = opened()
    for extra_key in (None, "lora-b", ""):
        assert walk.serve([*tokens, 59], extra_key) == 0
    assert walk.cache.storage.counts["found_again"] == 0
    assert walk.serve([*tokens, 59], "lora-a") == 100
    walk.check_rows()


@pytest.mark.parametrize("change", ["identity", "page_size", "dtype"])
def test_no_entry_is_served_to_another_model(opened: Callable[..., TierWalk], change: str) -> None:
    walk = opened()
    tokens, _ = cached(walk, 100)
    walk.close()
    # A page size and a dtype are part of what a server takes the identity from; here they change alone.
    walk = {
        "identity": lambda: opened(identity=bytes(16)),
        "page_size": lambda: opened(0, 4),
        "dtype": lambda: opened(dtype=torch.float16),
    }[change]()
    assert walk.serve([*tokens, 59]) == 0 and walk.cache.storage.counts["found_again"] == 0
    walk.check_rows()


@pytest.mark.parametrize("kind", ["payload", "record"])
def test_a_damaged_entry_is_not_found_again(opened: Callable[..., TierWalk], kind: str) -> None:
    walk = opened()
    tokens, _ = cached(walk, 100)
    walk.close()
    (path,) = (walk.folder / "rank-0").glob("segment-*.kv" if kind == "payload" else "segment-*.head")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    walk = opened()
    assert walk.serve([*tokens, 59]) == 0 and walk.cache.ssd.store.num_entries == 0
    assert walk.cache.storage.counts["found_again"] == (1 if kind == "payload" else 0)
    walk.check()
    walk.check_rows()


def test_the_next_server_after_a_walk_serves_nothing_wrong(opened: Callable[..., TierWalk]) -> None:
    walk, num_found = opened(20), 0
    for num_spoilt in (2, 1, 0):
        walk.cost = None
        walk.step(150)
        while walk.running:
            walk.finish()
        walk.stamp(DEAR)
        if walk.cache.ssd is None:  # the walk has detached it
            walk.cache.attach_ssd(str(walk.folder), walk.ssd_bytes / GB, None)
        for node in nodes_of(walk):
            if node.id in walk.cache.nodes:
                walk.cache.backup.start_copy(node, Tier.SSD)
                walk.settle()
        walk.close()
        for _ in range(num_spoilt):
            walk.spoil_ssd()
        asked = walk.asked
        walk = opened(walk.rng.randrange(1 << 30))
        walk.asked = asked
        for tokens, extra_key in asked[-10:]:
            walk.serve(tokens, extra_key)
            walk.check()
            walk.check_rows()
        num_found += walk.cache.storage.counts["found_again"]
    assert num_found > 0
