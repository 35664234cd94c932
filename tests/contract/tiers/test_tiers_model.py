"""Random walks over EvicPressCache with both lower tiers, against an oracle that knows every KV row bit for bit.

Each KV row is a function of the token path that ends at it, its position, layer, head and side. So every row of every
node on the GPU can be told right from wrong, wherever it has been in between: compressed, on the host, on the SSD, read
back by another server. Storage is damaged on the way; what is damaged must never be seen again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.cache.test_radix_cache_model import (
    EXACT_EVERY,
    ROWS,
    SHARES,
    UNEVEN_CURVES,
    UNEVEN_FORMS,
    Request,
    Walk,
    held_in,
    path_hashes,
)
from tests.contract.releases import load_back, lock, unlock

from sglang_evicpress.config import GB, EvicPressConfig
from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.flag_groups import LayerFlags
from sglang_evicpress.introspect.operations import IntrospectionError
from sglang_evicpress.patches.cache import policy_terms
from sglang_evicpress.patches.tiers import load
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.storage import FAULTS_FLAG
from sglang_evicpress.patches.tree.node import iter_nodes, num_slots, start_of, tokens_to
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost
from sglang_evicpress.tiers.jobs import Job

pytestmark = pytest.mark.sglang

LAYERS, HEADS, DIM, SLOTS = 2, 2, 16, 384
HOST_BYTES, SSD_BYTES = 192 << 10, 512 << 10  # with float32 rows the pool takes as much as the host: a third of the SSD
IDENTITY = bytes(range(16))
HALF = Form("random", 0.5)
DEAR, CHEAP = PrefillCost(0.01, 1.0, 0.0), PrefillCost(0.0, 1e-7, 0.0)
"""Of prefill: so dear that every load is worth it and has seconds of time, so cheap that none is."""

Opened = Callable[..., "TierWalk"]
"""What the fixture ``opened`` is: it makes walks."""

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

    dim = DIM
    namespaces: Sequence[str | None] = (None, None, "lora-a")

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
        **settings: object,
    ) -> None:
        self.dtype, self.identity, self.folder = dtype, identity, folder
        self.host_bytes, self.ssd_bytes = host_bytes, ssd_bytes
        self.cost: PrefillCost | None = cost
        self.is_closed = False
        self.asked: list[tuple[list[int], str | None]] = []
        if is_exact:
            settings["forms"] = (EXACT,)
        super().__init__(seed, page_size, num_slots=num_slots, **settings)
        self.stamp(cost)
        self.be_patient()

    def configured(self, policy: str, settings: dict[str, object]) -> EvicPressConfig:
        tiers = {"host_gb": 1.0, "ssd_fsync": "none"}
        if self.folder is not None:
            tiers |= {"ssd_dir": str(self.folder), "ssd_gb": 1.0}
        config = super().configured(policy, tiers | settings)
        object.__setattr__(config, "host_gb", self.host_bytes / GB)  # smaller than a server may have it
        if self.folder is not None:
            object.__setattr__(config, "ssd_gb", self.ssd_bytes / GB)
        return config

    def close(self) -> None:
        """Close once."""
        if not self.is_closed:
            self.is_closed = True
            self.cache.close()

    # ---- what a scheduler does

    def stamp(self, cost: PrefillCost) -> None:
        self.count += 1
        self.cache.terms.advance(self.count * 11.0, CostSnapshot(cost, policy_terms.START_LOADS, {}))
        self.cache.parts.round_begun()

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
            extra_key = self.rng.choice(self.namespaces)
        tokens = tokens[: self.rng.choice([200, 200, self.rng.randrange(1, 200)])]
        tokens = [*tokens, *(self.rng.randrange(50, 60) for _ in range(self.rng.randrange(1, 30)))]
        self.asked.append((tokens, extra_key))
        self.wait(tokens, extra_key, is_exact=self.count % EXACT_EVERY == 0)

    def wait(self, tokens: Sequence[int], extra_key: str | None = None, *, is_exact: bool = False) -> Request:
        self.count += 1
        request = Request(f"r{self.count}", list(tokens), len(tokens), extra_key, is_exact=is_exact)
        self.waiting.append(request)
        self.cache.parts.admission.on_queued(request)
        return request

    def ready(self, tokens: Sequence[int], extra_key: str | None = None, *, is_exact: bool = False) -> Request:
        """A request that could be admitted now."""
        request = self.wait(tokens, extra_key, is_exact=is_exact)
        self.until_ready(request)
        return request

    def until_ready(self, request: Request) -> None:
        self.until(lambda: self._is_ready(request))

    def start(self) -> None:
        if len(self.running) >= ROWS - 2 or not self.waiting:
            return
        request = self.rng.choice(self.waiting)
        if self.tiers.prefetcher.is_prefetching(request):
            if self.rng.random() < 0.3:
                return  # passed over
            patient_until = time.monotonic() + 5.0
            self.until(
                lambda: self._is_ready(request) or (self._is_held_up(request) and time.monotonic() > patient_until)
            )
            if not self._is_ready(request):
                return  # requests before it hold the room that it needs: they go first
        self.admit(request, self.rng.choice([1.0, 1.0, self.rng.random()]))

    def _is_ready(self, request: Request) -> bool:
        return not self.tiers.prefetcher.is_prefetching(request)

    def _is_held_up(self, request: Request) -> bool:
        """True if the request waits for room, and not for anything under way."""
        return self.tiers.prefetches.by_request[id(request)].short_of is not None

    def admit(self, request: Request, share: float = 1.0) -> int:
        """Admit like SGLang's PrefillAdder a request whose prompt is then prefilled, or a share of it; returns how
        many tokens were loaded."""
        cache = self.cache
        self.waiting.remove(request)
        match = self.look_up(request)
        lock(cache, request)
        num_loaded = 0
        if match.host_hit_length:
            num_loaded = load_back(cache, request, match)
            assert num_loaded in (0, match.host_hit_length)
        request.cache_protected_len = request.prefix_len
        if not self.extend(request, max(1, round(share * len(request.tokens)))):
            unlock(cache, request)
            self.waiting.append(request)
            cache.parts.admission.on_queued(request)
        cache.queued_hits.keep_only(self.waiting)
        cache.parts.tiers.prefetches.keep_only(self.waiting)
        return num_loaded

    def serve(self, tokens: Sequence[int], extra_key: str | None = None) -> int:
        """A request from its arrival to its end; returns how many tokens were loaded for it."""
        request = self.ready(tokens, extra_key)
        num_loaded = self.admit(request)
        if request in self.waiting:  # what is still being loaded for others had to stay: another round
            self.settle()
            num_loaded = self.admit(request)
        self.end(request)
        return num_loaded

    def tick(self) -> None:
        self.cache.parts.rounds.tick(is_idle=not self.running and not self.waiting)

    def until(self, is_done: object) -> None:
        """Let the threads work until it is; a hang fails."""
        deadline = time.monotonic() + 60.0
        while not is_done():
            assert time.monotonic() < deadline, "nothing comes of it"
            self.tree.storage.arrival.wait(0.005)
            self.tick()

    def settle(self) -> None:
        self.until(lambda: self.tree.storage.num_pending_jobs == 0)

    def go_on(self, *blocks: Block) -> None:
        """Threads that were held up end what they have."""
        for block in blocks:
            block.may_end.set()
        self.settle()

    def copy_to(self, node: object, tier: Tier) -> None:
        """A node gets a copy on a tier and stays where it is."""
        assert self.tiers.backup.start_copy(node, tier)
        self.settle()

    def end_all(self) -> None:
        super().end_all()
        self.tiers.prefetches.keep_only([])

    def rest(self) -> None:
        """An idle server betters what it holds."""
        self.end_all()
        self.cache.parts.idle_promotion._next_look_s = 0.0
        for _ in range(self.rng.randrange(1, 20)):
            self.tree.storage.arrival.wait(0.002)
            self.tick()

    # ---- what an operator, the policy and bad luck do

    def demote(self) -> None:
        """Whichever node can be, in random order."""
        for node in self.rng.sample(list(self.cache.nodes.values()), len(self.cache.nodes)):
            with contextlib.suppress(ValueError, IntrospectionError):
                self.cache.parts.admin.demote_node(node.id, self.rng.choice(self.tree.storage.tiers[1:]))
                return

    def flush(self) -> None:
        self.cache.parts.admin.flush_tier(self.rng.choice(self.tree.storage.tiers))

    def change_ssd(self) -> None:
        if self.folder is None:
            return
        if self.cache.ssd is None:
            self.cache.parts.admin.attach_ssd(str(self.folder), self.ssd_bytes / GB, None)
            self.be_patient()
        else:
            self.cache.parts.admin.detach_ssd()

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
        rows = self.expected(hashes, np.arange(begin, end))
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
        views = []
        for layer in range(LAYERS):
            rows = self.read(self.row_of(request, layer))
            values = rows[0].to(torch.int64).numpy()
            hashes = sum(values[..., index] << 6 * index for index in range(4))
            positions = values[..., 4] + (values[..., 5] << 6)
            wanted = self.expected(hashes, positions)
            assert np.array_equal(bits(rows[:, layer]), bits(wanted[:, layer])), "no row was ever computed so"
            for head in range(HEADS):
                pairs = list(zip(hashes[layer, head].tolist(), positions[layer, head].tolist(), strict=True))
                assert len(set(pairs)) == len(pairs), "an entry twice"
                views.append(set(pairs))
        return views

    def check_rows(self) -> None:
        """Every node that is on the GPU holds what was computed for its tokens, bit for bit."""
        for node in iter_nodes(self.cache.root_node):
            if node.value is None:
                continue
            tokens = tokens_to(node)
            hashes = np.array(path_hashes(tokens, self.adapter_of(node.key.extra_key)))
            for layer in range(LAYERS):
                slots, held = held_in(node, layer)
                positions = np.broadcast_to(held.numpy().astype(np.int64), (LAYERS, HEADS, len(slots)))
                found, wanted = self.read(slots), self.expected(hashes[positions], positions)
                assert np.array_equal(bits(found[:, layer]), bits(wanted[:, layer])), f"node {node.id}, layer {layer}"

    def check(self) -> None:
        super().check()
        assert not [name for name in self.tree.storage.errors if name.endswith("internal")], self.tree.storage.errors
        if self.rng.random() < 0.5:
            self.check_rows()

    def check_nothing_leaks(self) -> None:
        """All is settled and nothing runs."""
        cache = self.cache
        assert not cache.parts.tiers.loads.unfinished
        assert cache.parts.tiers.host_room.copying_bytes == cache.ledger.reserved == 0
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
        self.cache.parts.eviction.free_slots(self.allocator.size)
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


def soaked(*walk: object) -> object:
    """A walk that only `make soak-cache` takes: test_state_machine.py has its moves and checks, with threads that go in
    steps in place of real ones."""
    return pytest.param(*walk, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("seed", "page_size", "dtype", "is_exact", "has_ssd"),
    [
        (0, 1, torch.float32, False, True),
        soaked(1, 1, torch.bfloat16, True, True),
        soaked(2, 4, torch.float16, False, True),
        soaked(3, 4, torch.float32, True, True),
        (4, 16, torch.bfloat16, False, True),
        soaked(5, 16, torch.float16, True, True),
        soaked(6, 1, torch.float16, False, True),
        soaked(7, 4, torch.float32, False, True),
        (8, 1, torch.float32, False, False),
    ],
)
def test_random_walk_keeps_every_row(
    opened: Opened, seed: int, page_size: int, dtype: torch.dtype, is_exact: bool, has_ssd: bool
) -> None:
    walk = opened(seed, page_size, dtype=dtype, is_exact=is_exact, has_ssd=has_ssd)
    walk.cost = None
    walk.run(400)
    assert walk.tree.storage.counts["released"] > 0


@pytest.mark.parametrize(
    ("seed", "page_size", "dtype", "has_ssd"),
    [
        (0, 1, torch.float32, True),
        soaked(1, 1, torch.bfloat16, True),
        soaked(2, 4, torch.float16, True),
        soaked(3, 16, torch.float32, True),
        soaked(4, 1, torch.float32, False),
        (5, 4, torch.bfloat16, True),
    ],
)
def test_random_walk_over_layers_that_keep_different_numbers_keeps_every_row(
    opened: Opened, seed: int, page_size: int, dtype: torch.dtype, has_ssd: bool
) -> None:
    forms = UNEVEN_FORMS[: -1 if seed % 2 == 0 else None]
    walk = opened(
        seed,
        page_size,
        dtype=dtype,
        has_ssd=has_ssd,
        forms=forms,
        curves=UNEVEN_CURVES,
        layers=LayerFlags(shares=SHARES),
    )
    walk.cost = None
    walk.moves = lambda: {**TierWalk.moves(walk), walk.press: 20}  # by far most compressions are of such forms
    walk.run(300)
    assert walk.tree.storage.counts["released"] > 0


def test_a_drop_weighs_double_where_a_tier_lies_below(opened: Opened) -> None:
    cache = opened(0, has_ssd=False).cache
    assert cache.terms.recompute_weight == policy_terms.DROP_WEIGHT == 2.0
    assert cache.policy.planner.policy.costs.prefill.per_token_s == pytest.approx(
        2.0 * cache.terms.costs.prefill.per_token_s
    )
    cache.terms.advance(1000.0, cache.terms.costs, 3.0)
    assert cache.policy.planner.policy.costs.prefill.per_token_s == pytest.approx(
        3.0 * cache.terms.costs.prefill.per_token_s
    )


@pytest.mark.parametrize("seed", range(9, 11))
def test_random_walk_over_storage_that_fails_keeps_every_row(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, seed: int
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


def cached(walk: TierWalk, num_tokens: int, tier: Tier | None = None) -> tuple[list[int], object]:
    """A context and its node, after a request for it; then on a tier below."""
    tokens = some_tokens(walk, num_tokens)
    walk.serve(tokens)
    node = next(node for node in nodes_of(walk) if list(node.key.raw_token_ids()) == tokens)
    if tier is not None:
        sent(walk, node, tier)
    return tokens, node


def sent(walk: TierWalk, node: object, tier: Tier) -> None:
    walk.until(lambda: walk.cache.parts.admin.demote_node(node.id, tier)["is_there"])
    assert tier_of(node) == tier


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
@pytest.mark.parametrize("form", [EXACT, HALF])
def test_what_was_demoted_comes_back_bit_for_bit(
    opened: Opened, form: Form, tier: Tier, page_size: int, dtype: torch.dtype
) -> None:
    walk = opened(0, page_size, dtype=dtype)
    tokens, node = cached(walk, 128)
    if not form.is_exact:
        walk.cache.parts.moves.compress(node.id, form)
    held, layout = num_slots(node), node.kv.layout
    sent(walk, node, tier)
    assert walk.allocator.available_size() == SLOTS
    for slots in (walk.pool.k_buffer, walk.pool.v_buffer):
        for buffer in slots:
            buffer.fill_(77)
    assert walk.serve([*tokens, 59]) == 128
    assert num_slots(node) == held and (layout is None or torch.equal(node.kv.layout.positions, layout.positions))


def test_a_damaged_host_copy_is_a_miss_and_the_ssd_serves(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100)
    walk.copy_to(node, Tier.SSD)
    sent(walk, node, Tier.HOST)
    walk.damage(node.kv.copies[Tier.HOST].entry)
    assert walk.serve([*tokens, 59]) == 100
    assert walk.tree.storage.errors == {"host_checksum": 1} and walk.tree.storage.counts["read"] == 1


def test_what_is_damaged_everywhere_is_computed_again(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100, Tier.HOST)
    walk.damage(node.kv.copies[Tier.HOST].entry)
    sent(walk, node, Tier.SSD)  # written as it is: whoever reads it will see that it is not what was saved
    assert walk.serve([*tokens, 59]) == 0
    assert walk.tree.storage.errors == {"ssd_checksum": 1} and node.id not in walk.cache.nodes
    assert walk.cache.ssd.store.num_entries == 0
    walk.check_rows()
    walk.check_nothing_leaks()


@pytest.mark.parametrize("suffix", ["kv", "head"])
def test_a_lost_file_is_a_miss(walk: TierWalk, suffix: str) -> None:
    tokens, node = cached(walk, 100, Tier.SSD)
    for path in (walk.folder / "rank-0").glob(f"segment-*.{suffix}"):
        path.unlink()
    assert walk.serve([*tokens, 59]) == (0 if suffix == "kv" else 100)  # the index is in memory


def test_what_is_read_for_a_waiting_request_counts_as_used(walk: TierWalk) -> None:
    """Else what was just read would be the first that makes room for what is read after it."""
    tokens, node = cached(walk, 60)
    _, other = cached(walk, 60)
    sent(walk, node, Tier.SSD)
    assert node.kv.last_use < other.kv.last_use
    walk.wait([*tokens, 59])
    assert node.kv.last_use > other.kv.last_use
    assert walk.cache.policy.planner.index.candidates[node.id].last_use == node.kv.last_use
    walk.end_all()


@pytest.mark.parametrize("is_cheap", [False, True])
def test_what_is_left_of_an_ssd_entry_does_not_keep_all_of_it(walk: TierWalk, is_cheap: bool) -> None:
    tokens = some_tokens(walk, 120)
    walk.serve(tokens)
    (node,) = nodes_of(walk)
    sent(walk, node, Tier.SSD)
    walk.serve([*tokens[:110], 57, 58, 59])  # splits it: both parts are pieces of one entry
    walk.settle()
    entry = node.kv.copies[Tier.SSD].entry
    assert len(entry.owners) == 2 and tier_of(node) == Tier.HOST
    walk.cache.placement.remove_copy(node, Tier.HOST)
    walk.tiers.removal.after_loss(node)
    walk.stamp(CHEAP if is_cheap else DEAR)
    walk.cache.placement.remove_copy(node.parent, Tier.SSD)
    walk.cache.changes.changed(node.parent)
    walk.tick()
    assert (node.id in walk.cache.nodes) != is_cheap  # else it is computed anew: sooner than reading all of the entry
    walk.settle()
    assert walk.cache.ssd.store.num_entries == (0 if is_cheap else 1)


def test_an_urgent_evict_frees_at_once_and_leaves_nothing_to_wait_for(walk: TierWalk) -> None:
    for _ in range(3):
        cached(walk, 100)
    for workers in walk.tree.storage.workers.values():
        assert workers.num_pending == 0 or walk.settle() is None
    free, copies = walk.allocator.available_size(), walk.tree.storage.num_pending_jobs
    assert walk.cache.parts.eviction.free_slots(150) >= 150
    assert walk.allocator.available_size() - free >= 150 and walk.tree.storage.num_pending_jobs == copies


def test_each_tier_can_be_emptied(walk: TierWalk) -> None:
    first, second, third = (cached(walk, 60)[1] for _ in range(3))
    walk.copy_to(first, Tier.SSD)
    sent(walk, first, Tier.HOST)
    sent(walk, second, Tier.HOST)
    walk.cache.parts.admin.flush_tier(Tier.HOST)
    assert tier_of(first) == Tier.SSD and second.id not in walk.cache.nodes and third.value is not None
    assert walk.cache.host.arena.extents.used_bytes == 0
    walk.cache.parts.admin.flush_tier(Tier.GPU)
    assert third.id not in walk.cache.nodes and walk.allocator.available_size() == SLOTS
    walk.cache.parts.admin.flush_tier(Tier.SSD)
    walk.settle()
    assert not nodes_of(walk) and walk.cache.ssd.store.num_entries == 0


def test_an_emptied_ssd_leaves_no_copy_with_what_requests_hold(walk: TierWalk) -> None:
    _, resident = cached(walk, 60)
    walk.copy_to(resident, Tier.SSD)
    _, below = cached(walk, 60, Tier.SSD)
    for node in (resident, below):
        walk.cache.inc_lock_ref(node)
    walk.cache.parts.admin.flush_tier(Tier.SSD)
    walk.settle()
    assert Tier.SSD not in resident.kv.copies and Tier.SSD in below.kv.copies, "what is still to be loaded stays"
    assert below.kv.copies[Tier.SSD].entry.ref in walk.cache.ssd.store and walk.cache.ssd.store.num_entries == 1
    for node in (resident, below):
        walk.cache.dec_lock_ref(node)
    walk.check()


def test_a_detached_ssd_keeps_its_entries_and_gives_them_back(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100, Tier.SSD)
    walk.cache.parts.admin.detach_ssd()
    assert not nodes_of(walk) and walk.tree.storage.tiers == (Tier.GPU, Tier.HOST)
    walk.check()
    walk.change_ssd()
    assert walk.serve([*tokens, 59]) == 100 and walk.tree.storage.counts["found_again"] == 1


def test_the_ssd_is_left_alone_while_the_tree_holds_kv_of_two_models(opened: Opened) -> None:
    walk = opened()
    tokens, node = cached(walk, 100, Tier.SSD)
    walk.cache.parts.ssd_attachment.know_model(lambda: IDENTITY)
    walk.cache.parts.weights.weights_changed()
    assert walk.cache.ssd is not None, "the weights are the same"
    other = bytes(reversed(IDENTITY))
    walk.cache.parts.ssd_attachment.know_model(lambda: other)
    walk.cache.parts.weights.weights_changed()
    walk.cache.parts.weights.weights_changed()
    assert walk.tree.storage.tiers == (Tier.GPU, Tier.HOST) and not nodes_of(walk)
    with pytest.raises(ValueError, match="flush it first"):
        walk.change_ssd()
    walk.check()
    walk.cache.reset()
    assert walk.tree.storage.tiers == (Tier.GPU, Tier.HOST, Tier.SSD) and walk.tree.adapters.identity == other
    _, node = cached(walk, 100, Tier.SSD)
    walk.check()
    walk.close()
    walk = opened()  # the first model again
    assert walk.serve([*tokens, 59]) == 100 and walk.tree.storage.counts["found_again"] == 1


class Block(Job):
    """Holds up a worker thread."""

    priority = -1

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
        walk.tree.storage.workers[name].submit(block)
    return blocks


def test_a_read_that_never_ends_is_given_up_at_its_deadline_and_told(opened: Opened) -> None:
    walk = opened(cost=PrefillCost(0.0, 1e-3, 0.0))
    tokens, node = cached(walk, 100, Tier.SSD)
    blocks = blocked(walk, "read", 2)
    assert walk.serve([*tokens, 59]) == 0 and walk.tree.storage.counts["prefetches_late"] == 1
    assert walk.cache.parts.recomputation.counts.computed["late"] == 100
    walk.go_on(*blocks)


def test_an_ssd_that_hangs_keeps_nothing_on_the_host_from_being_loaded(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100, Tier.HOST)
    node.kv.copies[Tier.HOST].entry.checked_s = 0.0  # long ago
    blocks = blocked(walk, "read", 2)
    assert walk.serve([*tokens, 59]) == 100
    walk.go_on(*blocks)


def test_whoever_waits_for_a_load_that_has_not_begun_copies_it(opened: Opened) -> None:
    walk = opened()
    tokens, node = cached(walk, 100, Tier.HOST)
    (block,) = blocked(walk, "load")
    assert walk.serve([*tokens, 59]) == 100
    walk.check_rows()
    assert walk.tiers.loads and node.lock_ref == 1  # its thread has not begun
    walk.go_on(block)
    assert walk.tree.storage.counts["late_layers"] == 0 and node.lock_ref == 0


def test_a_layer_that_is_late_is_copied_by_whoever_waits(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread has begun with the first one and hangs; the others are taken over at once."""
    monkeypatch.setattr(load, "LAYER_DEADLINE_S", 0.01)
    walk = opened()
    tokens, node = cached(walk, 100, Tier.HOST)
    begun, may_go_on = threading.Event(), threading.Event()
    copy = load.Load._copy

    def hang(one: load.Load, layers: range) -> object:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            may_go_on.wait(10.0)
        return copy(one, layers)

    start = load.Load.start

    def start_and_hang(one: load.Load) -> None:
        start(one)
        assert begun.wait(10.0)

    monkeypatch.setattr(load.Load, "_copy", hang)
    monkeypatch.setattr(load.Load, "start", start_and_hang)
    assert walk.serve([*tokens, 59]) == 100
    walk.check_rows()
    assert walk.tiers.loads and node.lock_ref == 1
    may_go_on.set()
    walk.settle()
    assert walk.tree.storage.counts["late_layers"] == 1 and node.lock_ref == 0


def test_a_flush_waits_for_what_is_being_loaded(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100, Tier.HOST)
    (block,) = blocked(walk, "load")
    threading.Timer(0.05, block.may_end.set).start()
    request = walk.ready([*tokens, 59])
    assert walk.admit(request) == 100
    walk.reset()
    walk.check()
    walk.settle()
    assert walk.cache.host.num_entries == 0 and not nodes_of(walk)


# ---- nodes that hang together


def test_a_node_stays_while_a_child_of_it_is_still_on_its_way(walk: TierWalk) -> None:
    tokens, node = cached(walk, 60)
    walk.serve([*tokens, *some_tokens(walk, 60)])
    (child,) = node.children.values()
    walk.copy_to(node, Tier.HOST)
    assert walk.cache.parts.moves.demote(child.id, Tier.HOST, EXACT) == 0  # its copy takes a while
    assert walk.cache.parts.moves.demote(node.id, Tier.HOST, EXACT) is None
    walk.check()
    walk.settle()
    assert child.value is None and walk.cache.parts.moves.demote(node.id, Tier.HOST, EXACT) == 60


def test_a_copy_that_fails_or_comes_too_late_can_be_made_again(walk: TierWalk, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, node = cached(walk, 60)

    def fail(*_: object) -> None:
        raise OSError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(type(walk.tree.storage.copier), "save", fail)
        walk.cache.parts.moves.demote(node.id, Tier.HOST, EXACT)
        walk.settle()
    assert walk.tree.storage.errors == {"host_io": 1}
    walk.cache.parts.moves.demote(node.id, Tier.HOST, EXACT)
    walk.cache.parts.moves.compress(node.id, HALF)
    walk.settle()
    assert walk.tree.storage.counts["copies_outdated"] == 1 and node.value is not None
    sent(walk, node, Tier.HOST)
    walk.check()
    walk.check_nothing_leaks()
    assert walk.serve([*tokens, 59]) == 60


def parted(walk: TierWalk) -> tuple[list[int], object, object]:
    """A context, compressed and then split in two: the lower part holds survivors from above the split."""
    tokens, node = cached(walk, 120)
    walk.cache.parts.moves.compress(node.id, HALF)
    upper = walk.cache._split_node(node.key, node, 60)
    assert int(node.kv.layout.positions.min()) < 60
    return tokens, upper, node


def test_kv_computed_anew_for_a_path_of_absent_nodes_all_finds_its_place(opened: Opened) -> None:
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


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("is_upper_gone", [False, True])
def test_survivors_from_above_a_split_are_only_served_behind_what_they_were_split_from(
    opened: Opened, is_restarted: bool, is_upper_gone: bool
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


def test_what_is_left_of_a_path_without_its_absent_end_must_be_worth_it_alone(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100)
    walk.cache.parts.moves.compress(node.id, Form("streaming", 0.2))  # keeps 4 sinks and the last 16
    upper = walk.cache._split_node(node.key, node, 80)
    sent(walk, node, Tier.HOST)
    assert num_slots(upper) == 4
    assert walk.match(tokens) == 0  # 4 slots for 80 tokens
    assert walk.serve([*tokens, 59]) == 20 and num_slots(upper) == 4


def test_a_node_of_holes_goes_down_and_comes_back(walk: TierWalk) -> None:
    tokens, node = cached(walk, 100)
    walk.cache.parts.moves.compress(node.id, Form("streaming", 0.2))
    upper = walk.cache._split_node(node.key, node, 80)
    middle = walk.cache._split_node(upper.key, upper, 40)
    assert [num_slots(each) for each in (middle, upper, node)] == [4, 0, 16]
    for tier in (Tier.HOST, Tier.SSD):
        for each in (node, upper, middle):
            sent(walk, each, tier)
        walk.check()
    assert walk.serve([*tokens, 59]) == 100


def test_a_read_may_take_the_room_of_the_node_below_it(opened: Opened) -> None:
    walk = opened(is_exact=True, host_bytes=80 << 10)  # 512 bytes a token: room for the one or for the other
    tokens, node = cached(walk, 100)
    longer = [*tokens, *some_tokens(walk, 60)]
    walk.serve(longer)
    (child,) = node.children.values()
    walk.copy_to(node, Tier.SSD)
    walk.cache.parts.admin.flush_tier(Tier.HOST)
    sent(walk, child, Tier.HOST)
    walk.tiers.removal.release(node.id, Tier.SSD)
    assert tier_of(node) == Tier.SSD and tier_of(child) == Tier.HOST
    assert walk.serve([*longer, 59]) == 100
    assert Tier.SSD in child.kv.copies  # it was written first: nothing is lost for a read


# ---- another server on the same folder


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("form", [EXACT, HALF])
@pytest.mark.parametrize(("kept", "added"), [(128, 0), (96, 0), (96, 3), (128, 40)])
def test_the_next_server_finds_the_entries(opened: Opened, page_size: int, form: Form, kept: int, added: int) -> None:
    """A prompt that is the entry's, ends inside it, leaves it halfway, or goes on behind it."""
    walk = opened(0, page_size, dtype=torch.bfloat16)
    tokens, node = cached(walk, 128)
    if not form.is_exact:
        walk.cache.parts.moves.compress(node.id, form)
    held = node.kv.layout
    walk.close()
    walk = opened(0, page_size, dtype=torch.bfloat16)
    assert walk.cache.ssd.store.num_entries == 1 and not nodes_of(walk)
    prompt = [*tokens[:kept], *(55 for _ in range(added))]
    allowed_forms = min(kept, len(prompt) - 1) // page_size * page_size
    assert walk.serve(prompt) == allowed_forms
    assert walk.tree.storage.counts["found_again"] == 1 and walk.tree.storage.counts["loads"] == 1
    found = min(nodes_of(walk), key=start_of)
    assert found.kv.form == form
    if held is not None and len(found.key) == 128:
        assert torch.equal(found.kv.layout.positions, held.positions)
        assert torch.equal(found.kv.layout.logical, held.logical)


@pytest.mark.parametrize("page_size", [1, 16])
def test_to_find_a_lossy_entry_again_no_more_than_its_survivors_is_read(opened: Opened, page_size: int) -> None:
    walk = opened(0, page_size)
    tokens, node = cached(walk, 128)
    walk.cache.parts.moves.compress(node.id, HALF)
    walk.close()
    walk = opened(0, page_size)
    assert walk.serve([*tokens, 59]) == 128
    (entry,) = walk.cache.ssd.entries()
    assert walk.cache.ssd.store.read_bytes == entry.header.payload_bytes + entry.header.extents[-1].num_bytes


@pytest.mark.parametrize(("at", "form"), [("kv", EXACT), ("record", EXACT), ("kv", HALF), ("survivors", HALF)])
def test_a_damaged_entry_is_a_miss(opened: Opened, at: str, form: Form) -> None:
    walk = opened()
    tokens, node = cached(walk, 100)
    if not form.is_exact:
        walk.cache.parts.moves.compress(node.id, form)
    survivors = 4 * num_slots(node) * (LAYERS * HEADS + 1)
    num_bytes = sum(walk.tree.storage.copier.sizes(num_slots(node), not form.is_exact))
    walk.close()
    (path,) = (walk.folder / "rank-0").glob("segment-*.head" if at == "record" else "segment-*.kv")
    data = bytearray(path.read_bytes())
    where = {"kv": num_bytes // 4, "survivors": num_bytes - survivors // 2, "record": len(data) // 2}
    data[where[at]] ^= 1
    path.write_bytes(data)
    walk = opened()
    assert walk.serve([*tokens, 59]) == 0 and walk.cache.ssd.store.num_entries == 0
    assert walk.tree.storage.counts["found_again"] == (1 if at == "kv" else 0)
    assert at == "record" or walk.cache.ssd.store.errors == {"checksum": 1}


def test_the_next_server_follows_a_path_of_many_entries(opened: Opened) -> None:
    walk = opened()
    stem, *branches = (some_tokens(walk, 60) for _ in range(4))
    for branch in branches:
        walk.serve([*stem, *branch], "lora-a")
    walk.close()
    walk = opened()
    assert [walk.serve([*stem, *branch, 59], "lora-a") for branch in branches] == [120, 60, 60]
    assert walk.tree.storage.counts["found_again"] == 4


def test_lossy_prefixes_stay_marked_over_a_restart(opened: Opened) -> None:
    walk = opened()
    tokens, node = cached(walk, 60)
    walk.cache.parts.moves.compress(node.id, HALF)
    longer = [*tokens, *some_tokens(walk, 60)]
    walk.serve(longer)
    assert next(iter(node.children.values())).kv.is_lossy_prefix
    walk.close()
    walk = opened()
    assert walk.serve([*longer, 59]) == 120
    child = next(each for each in nodes_of(walk) if start_of(each) == 60)
    assert child.kv.is_lossy_prefix and child.kv.form.is_exact and child.kv.prefix_quality < 1.0


def test_no_entry_is_served_to_another_namespace(opened: Opened) -> None:
    walk = opened()
    tokens = some_tokens(walk, 100)
    walk.serve(tokens, "lora-a")
    walk.close()
    walk = opened()
    for extra_key in (None, "lora-b", ""):
        assert walk.serve([*tokens, 59], extra_key) == 0
    assert walk.tree.storage.counts["found_again"] == 0
    assert walk.serve([*tokens, 59], "lora-a") == 100


@pytest.mark.parametrize("change", ["identity", "page_size", "dtype"])
def test_no_entry_is_served_to_another_model(opened: Opened, change: str) -> None:
    walk = opened()
    tokens, _ = cached(walk, 100)
    walk.close()
    # A page size and a dtype are part of what a server takes the identity from; here they change alone.
    walk = {
        "identity": lambda: opened(identity=bytes(16)),
        "page_size": lambda: opened(0, 4),
        "dtype": lambda: opened(dtype=torch.float16),
    }[change]()
    assert walk.serve([*tokens, 59]) == 0 and walk.tree.storage.counts["found_again"] == 0


def test_the_next_server_after_a_walk_serves_nothing_wrong(opened: Opened) -> None:
    walk, num_found = opened(20), 0
    for num_spoilt in (2, 1, 0):
        walk.cost = None
        walk.step(150)
        while walk.running:
            walk.finish()
        walk.stamp(DEAR)
        if walk.cache.ssd is None:  # the walk has detached it
            walk.cache.parts.admin.attach_ssd(str(walk.folder), walk.ssd_bytes / GB, None)
        for node in nodes_of(walk):
            if node.id in walk.cache.nodes:
                walk.tiers.backup.start_copy(node, Tier.SSD)
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
        num_found += walk.tree.storage.counts["found_again"]
    assert num_found > 0
