"""Random walks over EvicPressCache with SGLang's own pools, against an oracle that reads every KV entry back.

Each KV entry is written with the hash of the token path that ends at it and its position. So for every running request,
in every layer and head, one can see whether each entry it would attend to belongs to its own tokens, lies in its
past, and is there once; and that what the request computed itself is all there.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from tests.contract.releases import NO_BATCH, HasKV, checkpoint, end_request, lock, matched_slots, unlock

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.core import Form, Tier
from sglang_evicpress.flag_groups import LayerFlags
from sglang_evicpress.patches.attention import group_rows
from sglang_evicpress.patches.attention.group_rows import GroupRows
from sglang_evicpress.patches.cache import policy_terms
from sglang_evicpress.patches.cache.late_checkpoints import MOST_AT_ONCE, LateCheckpoints
from sglang_evicpress.patches.cache.lifecycles import cache_class
from sglang_evicpress.patches.cache.parts import MOST_PUT_OFF
from sglang_evicpress.patches.cache.queued_hits import QUEUED_RATE
from sglang_evicpress.patches.scheduler.prefill_times import _chunks_of
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.node import holes_of, is_lossy, iter_nodes, num_slots, slots_of, start_of, tokens_to
from sglang_evicpress.patches.tree.node_kv import PrefixView
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.search.menu_budgets import layer_groups
from sglang_evicpress.tiers.entry.identity import KEY_BYTES

pytestmark = pytest.mark.sglang

LAYERS, HEADS, DIM, SLOTS, ROWS, CONTEXT = 2, 2, 4, 512, 12, 400
SLOT_BYTES = 2 * LAYERS * HEADS * DIM * 4
EXACT_EVERY = 4  # of the requests: one takes exact KV only
FORMS = tuple(Form(press, kept) for press in ("knorm", "streaming", "random") for kept in (0.8, 0.5, 0.2))
CURVES = {"default": {"0.8": 0.99, "0.5": 0.875, "0.2": 0.49}, "random": {"0.5": 0.5}}  # without, nothing is compressed


def path_hashes(tokens: list[int], extra_key: str | None) -> list[int]:
    """An integer per position that names the whole path up to it; exact in float32."""
    value, hashes = (hash_of(extra_key)), []
    for token in tokens:
        value = (value * 1_000_003 + token * 7919 + 17) % 16_777_213
        hashes.append(value)
    return hashes


def hash_of(extra_key: str | None) -> int:
    return 5 if extra_key is None else sum(map(ord, extra_key)) * 31 + 11


@dataclass
class Request(HasKV):
    """Part of SGLang's Req that the cache touches."""

    rid: str
    tokens: list[int]
    prompt_len: int
    extra_key: str | None
    req_pool_idx: int | None = None
    prefix_indices: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    last_node: object = None
    cache_protected_len: int = 0
    kv_allocated_len: int = 0
    kv_committed_len: int = 0
    kv_committed_freed: bool = False
    is_retracted: bool = False
    retracted_stain: bool = False
    lora_id: str | None = None
    to_finish: object = None
    multimodal_inputs: object = None
    custom_logit_processor: str | None = None
    input_embeds: object = None
    customized_info: dict[str, list[object]] | None = None
    is_exact: bool = False
    quality: float | None = None
    retention: float | None = None
    top_k: int = 1
    filled: int = 0
    frozen_view: list[set[tuple[int, int]]] = field(default_factory=list)

    @property
    def origin_input_ids(self) -> array[int]:
        return array("q", self.tokens[: self.prompt_len])

    @property
    def output_ids(self) -> array[int]:
        return array("q", self.tokens[self.prompt_len :])

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return array("q", self.tokens)

    @property
    def sampling_params(self) -> SamplingParams:
        asked = "exact" if self.is_exact else self.quality
        fields = {"kv_quality": asked, "kv_retention_seconds": self.retention}
        params = {name: value for name, value in fields.items() if value is not None} or None
        return SamplingParams(top_k=self.top_k, max_new_tokens=9, custom_params=params)

    def finished(self) -> bool:
        return self.kv_committed_freed

    def get_fill_ids(self) -> array[int]:
        return array("q", self.tokens[: self.filled])

    def pop_committed_kv_cache(self) -> int:
        self.kv_committed_freed = True
        return self.kv_allocated_len


def held_in(node: object, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of a node that a layer fills [n], and the positions in them, int32 [heads, n]."""
    layout, slots = node.kv.layout, slots_of(node)
    if layout is None:
        start = start_of(node)
        return slots, torch.arange(start, start + len(slots), dtype=torch.int32).expand(HEADS, -1)
    places = slice(None) if layout.filling is None else layout.filling.of_layer(layer)
    return slots[places], layout.positions_of(layer)


def costs_of(cost: PrefillCost) -> CostSnapshot:
    return CostSnapshot(cost, policy_terms.START_LOADS, {})


class Walk:
    """``settings`` are those of EvicPressConfig."""

    dim, dtype, identity = DIM, torch.float32, bytes(KEY_BYTES)
    is_sound = True  # what it holds is looked at when its test ends
    is_closed = False
    group: ClassVar[object] = None  # of ranks
    made: ClassVar[list[Walk]] = []
    tree = property(lambda self: self.cache.parts.tree)
    tiers = property(lambda self: self.cache.parts.tiers)

    def __init__(
        self, seed: int, page_size: int, policy: str = "evicpress", *, num_slots: int = SLOTS, **settings: object
    ) -> None:
        self.made.append(self)
        self.rng = random.Random(seed)
        self.page = page_size
        self.rows = ReqToTokenPool(ROWS, CONTEXT + 8, "cpu", False)
        self.pool = MHATokenToKVPool(num_slots, page_size, self.dtype, HEADS, self.dim, LAYERS, "cpu", False)
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(num_slots, self.dtype, "cpu", self.pool, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(num_slots, page_size, self.dtype, "cpu", self.pool, False)
        params = CacheInitParams(False, self.rows, self.allocator, page_size)
        config = self.configured(policy, settings)
        groups = layer_groups(config.menu_forms, config.layers.shares, LAYERS, config.layers.max_counts)
        compressor = Compressor(self.pool, page_size, config.sinks, groups=groups, group=self.group)
        self.groups = GroupRows(groups, self.rows.req_to_token) if groups.num_groups > 1 else None
        group_rows.attach(self.groups)
        self.cache = cache_class()(params, config, compressor, self.identity)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.documents = [[self.rng.randrange(50) for _ in range(150)] for _ in range(3)]
        self.count = self.num_pressed = self.num_uneven = 0
        self.cache.attach_scheduler(self.scheduler())

    def configured(self, policy: str, settings: dict[str, object]) -> EvicPressConfig:
        given = {"alpha": 0.3, "forms": FORMS, "min_compress_tokens": 8, "curves": CURVES, "host_gb": 0.0, **settings}
        return EvicPressConfig(policy, **given)

    def close(self) -> None:
        """Close like a server that ends."""

    def adapter_of(self, extra_key: str | None) -> str | None:
        """Adapter of a namespace: here every namespace is another adapter's."""
        return extra_key

    def scheduler(self) -> SimpleNamespace:
        batch = SimpleNamespace(reqs=self.running)
        channels = SimpleNamespace(recv_from_tokenizer=None, recv_from_rpc=None)
        return SimpleNamespace(
            last_batch=batch,
            running_batch=None,
            **NO_BATCH,
            chunked_req=None,
            tokenizer=None,
            metrics_reporter=None,
            metrics_collector=None,
            ipc_channels=channels,
        )

    # ---- what a scheduler does

    def arrive(self) -> None:
        """A request enters the queue."""
        if len(self.waiting) > 6:
            return
        self.cache.terms.advance(self.count * 7.0, costs_of(PrefillCost(0.01, self.rng.choice([1e-4, 3e-4]), 0.0)))
        self.cache.late_checkpoints.settle()
        self.cache.parts.round_begun()
        document = self.rng.choice(self.documents)
        tokens = document[: self.rng.randrange(1, len(document))] + [
            self.rng.randrange(50, 60) for _ in range(self.rng.randrange(1, 30))
        ]
        self.count += 1
        request = Request(f"r{self.count}", tokens, len(tokens), self.rng.choice([None, None, "lora-a"]))
        request.is_exact = self.count % EXACT_EVERY == 0
        self.waiting.append(request)
        self.cache.parts.admission.on_queued(request)

    def leave(self) -> None:
        """A waiting request is aborted."""
        if self.waiting:
            self.waiting.pop(self.rng.randrange(len(self.waiting)))
            self.cache.queued_hits.keep_only(self.waiting)

    def start(self) -> None:
        if len(self.running) >= ROWS - 2 or not self.waiting:
            return
        request = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        tokens = request.tokens
        self.look_up(request)
        lock(self.cache, request)
        upto = self.rng.choice([len(tokens), len(tokens), self.rng.randrange(1, len(tokens) + 1)])
        if not self.extend(request, upto):
            unlock(self.cache, request)
            self.waiting.append(request)  # its queued hit, if it was settled, is gone; it counts when it runs
            self.cache.parts.admission.on_queued(request)

    def match(self, tokens: list[int], extra_key: str | None = None) -> int:
        """Number of tokens that the GPU has of a context."""
        key = RadixKey(array("q", tokens), extra_key)
        return len(matched_slots(self.cache, self.cache.match_prefix(MatchPrefixParams(key=key))))

    def look_up(self, request: Request) -> MatchResult:
        """Match a request as SGLang does before it runs."""
        key = RadixKey(array("q", request.tokens), request.extra_key, limit=len(request.tokens) - 1)
        match = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        request.prefix_indices, request.last_node = matched_slots(self.cache, match), match.last_device_node
        request.cache_protected_len = request.prefix_len
        return match

    def extend(self, request: Request, upto: int) -> bool:
        """Prefill up to ``upto`` tokens (a chunk, or all); False when memory does not allow it."""
        begin = len(request.prefix_indices)
        upto = max(upto, begin + 1)
        slots = self.alloc(request, begin, upto)
        if slots is None:
            return False
        view = self.cache.views.adopt(request)
        if request.req_pool_idx is None:
            request.req_pool_idx = self.rows.free_slots.pop()
            self.running.append(request)
        row = self.rows.req_to_token[request.req_pool_idx]
        row[: len(view.slots)] = view.slots
        row[len(view.slots) : len(view.slots) + len(slots)] = slots
        self.note_row(torch.tensor([request.req_pool_idx]), view)
        self.compute(request, begin, upto, slots)
        request.kv_allocated_len = request.kv_committed_len = request.filled = upto
        request.frozen_view = self.view_of(request)
        self.verify(request)
        is_chunk = upto < len(request.tokens)
        if is_chunk or self.is_result_due(request):
            with self.cache.late_checkpoints.deferring():
                checkpoint(self.cache, request, is_chunk=is_chunk)
        self.verify(request)
        return True

    def note_row(self, where: torch.Tensor, view: PrefixView) -> None:
        """A request's row, whose number ``where`` has, begins with what the view shows."""
        if self.groups is not None:
            self.groups.write(where, where, [view])

    def is_result_due(self, request: Request) -> bool:
        """False where the result of a prefill comes only after the next step has begun."""
        return True

    def alloc(self, request: Request, begin: int, end: int) -> torch.Tensor | None:
        own_end = -(-begin // self.page) * self.page
        tail = []
        if begin % self.page:  # the request's own partial page goes on
            last = int(self.rows.req_to_token[request.req_pool_idx, begin - 1 - request.evicpress.holes])
            tail = list(range(last + 1, last + 1 + min(end, own_end) - begin))
        needed = -(-max(0, end - own_end) // self.page) * self.page
        promised = self.allocator.available_size() + self.cache.evictable_size()
        self.cache.parts.eviction.make_room(needed)
        if needed == 0:
            return torch.tensor(tail, dtype=torch.int64)
        fresh = self.allocator.alloc(needed)
        if fresh is None:
            assert promised < needed, "SGLang ends the server"
            return None
        return torch.cat([torch.tensor(tail, dtype=torch.int64), fresh[: end - begin - len(tail)]])

    def compute(self, request: Request, begin: int, end: int, slots: torch.Tensor) -> None:
        hashes = path_hashes(request.tokens[:end], self.adapter_of(request.extra_key))
        for position, slot in zip(range(begin, end), slots.tolist(), strict=True):
            for buffers in (self.pool.k_buffer, self.pool.v_buffer):
                for layer in range(LAYERS):
                    for head in range(HEADS):
                        noise = ((position * 37 + layer * 11 + head * 5) * 2654435761 % 97) / 97
                        buffers[layer][slot, head] = torch.tensor(
                            [hashes[position], position, noise, layer * 10 + head]
                        )

    def decode(self) -> None:
        ready = [request for request in self.running if request.filled >= request.prompt_len]
        if not ready:
            return
        request = self.rng.choice(ready)
        if len(request.tokens) >= CONTEXT:
            return
        request.tokens.append(self.rng.randrange(60))
        begin = request.kv_allocated_len
        slots = self.alloc(request, begin, begin + 1)
        if slots is None:
            request.tokens.pop()
            return
        self.rows.req_to_token[request.req_pool_idx, begin - request.evicpress.holes] = slots[0]
        self.compute(request, begin, begin + 1, slots)
        request.kv_allocated_len = request.filled = begin + 1

    def resume(self) -> None:
        for request in self.running:
            if request.filled < request.prompt_len:
                self.extend(request, self.rng.randrange(request.filled + 1, request.prompt_len + 1))
                return

    def finish(self) -> None:
        if self.running:
            self.end(self.rng.choice(self.running), is_insert=self.rng.random() < 0.85)

    def end(self, request: Request, *, is_insert: bool = True) -> None:
        self.running.remove(request)
        end_request(self.cache, request, is_insert=is_insert)
        self.rows.free_slots.append(request.req_pool_idx)

    def press(self) -> None:
        options = {node.id: self.cache.parts.view.options_of(node) for node in self.cache.nodes.values()}
        candidates = [node_id for node_id, found in options.items() if len(found) > 1]
        if candidates:
            node_id = self.rng.choice(candidates)
            self.cache.parts.moves.compress(node_id, self.rng.choice(options[node_id][:-1]).form)
            self.num_pressed += 1

    def evict(self) -> None:
        self.cache.parts.eviction.free_slots(self.rng.randrange(1, 120))

    # ---- the oracle

    def row_of(self, request: Request, layer: int) -> torch.Tensor:
        """Slots that a layer reads for a request."""
        row, length = request.req_pool_idx, request.kv_allocated_len - holes_of(request)
        if self.groups is not None:
            self.groups.begin_batch(torch.tensor([row]))
            self.groups.bring_up_to_date([length])
            self.num_uneven += bool(self.groups.batch)
            for table in self.groups.tables if self.groups.batch else ():
                if table.group == self.groups.groups.group_of[layer]:
                    num_holes = int(table.holes.host[row])
                    assert num_holes >= holes_of(request)
                    return table.rows[row, : request.kv_allocated_len - num_holes].long()
        return self.rows.req_to_token[row, :length].long()

    def view_of(self, request: Request) -> list[set[tuple[int, int]]]:
        """Per (layer, head) the (hash, position) of every entry the request would attend to."""
        entries = []
        for layer in range(LAYERS):
            row = self.row_of(request, layer)
            keys = self.pool.k_buffer[layer][row]
            assert torch.equal(keys, self.pool.v_buffer[layer][row])
            for head in range(HEADS):
                assert (keys[:, head, 3] == layer * 10 + head).all()
                pairs = [(int(a), int(b)) for a, b in keys[:, head, :2].tolist()]
                assert len(set(pairs)) == len(pairs), "an entry twice"
                entries.append(set(pairs))
        return entries

    def verify(self, request: Request) -> None:
        hashes = path_hashes(request.tokens[: request.kv_allocated_len], self.adapter_of(request.extra_key))
        for index, entries in enumerate(self.view_of(request)):
            assert len(entries) == len(self.row_of(request, index // HEADS))
            for value, position in entries:
                assert position < len(hashes) and hashes[position] == value, "KV of another token path"
            begin = 0 if request.is_exact else request.cache_protected_len
            missing = set(range(begin, len(hashes))) - {position for _, position in entries}
            assert not missing, "the request's own KV is not all there, or an exact request lacks some of its prefix"
        for before, now in zip(request.frozen_view, self.view_of(request), strict=True):
            assert before <= now, "the KV view of a running request changed"
        if holes_of(request):
            assert request.evicpress.is_lossy
        assert not (request.is_exact and request.evicpress.is_lossy)

    def check(self) -> None:
        result = self.cache.inspector.check_integrity()
        assert result["ok"], result["violations"]
        for request in self.running:
            self.verify(request)
        for node in self.cache.nodes.values():
            assert 0 <= len(node.kv.queued_hits) < node.kv.num_hits, "a queued hit is its own, and taken back once"
        assert len(self.cache.queued_hits) == len(self.waiting)

    def check_rows(self) -> None:
        """Every node holds what was computed for its tokens."""
        for node in iter_nodes(self.cache.root_node):
            if node.value is None:
                continue
            tokens = tokens_to(node)
            hashes = torch.tensor(path_hashes(tokens, self.adapter_of(node.key.extra_key)), dtype=torch.float32)
            for layer in range(LAYERS):
                slots, positions = held_in(node, layer)
                for head in range(HEADS):
                    keys = self.pool.k_buffer[layer][slots, head]
                    at = positions[head].long()
                    assert torch.equal(keys[:, 1].long(), at) and torch.equal(keys[:, 0], hashes[at]), node.id

    def moves(self) -> dict[Callable[[], None], float]:
        """Next moves, with weights."""
        scheduling = {self.arrive: 6, self.leave: 1, self.start: 5, self.decode: 6, self.resume: 3, self.finish: 3}
        return scheduling | {self.press: 3, self.evict: 1}

    def step(self, steps: int) -> None:
        moves = self.moves()
        for _ in range(steps):
            self.rng.choices(list(moves), list(moves.values()))[0]()
            self.check()

    def end_all(self) -> None:
        while self.running:
            self.finish()
        while self.waiting:
            self.leave()

    def run(self, steps: int) -> None:
        self.step(steps)
        self.end_all()
        self.check()
        assert len(self.cache.queued_hits) == 0 and not any(node.kv.queued_hits for node in self.cache.nodes.values())
        self.cache.parts.eviction.free_slots(self.allocator.size)
        self.check()
        assert self.allocator.available_size() == self.allocator.size


@pytest.fixture
def walk() -> Walk:
    return Walk(0, 1)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 8))])
def test_random_walk_keeps_every_invariant(seed: int, page_size: int) -> None:
    walk = Walk(seed, page_size)
    walk.run(150)
    assert walk.cache.parts.controller.num_dropped > 0 and walk.num_pressed > 0


def test_a_random_walk_whose_checkpoints_wait_for_the_next_request_keeps_every_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_evicpress.patches.cache.late_checkpoints.MOST_AT_ONCE", 0)
    walk = Walk(0, 1)
    walk.run(150)
    assert walk.cache.parts.controller.num_dropped > 0 and walk.num_pressed > 0


SHARES = {"rising-0a1b2c3d": (0.5, 1.5)}
UNEVEN_FORMS = (
    *(Form(press, kept, budget="pyramid") for press in ("knorm", "random") for kept in (0.5, 0.2)),
    *(Form("streaming", 0.5), Form("random", 0.4, budget="rising-0a1b2c3d")),
)
UNEVEN_CURVES = {**CURVES, "random:pyramid": {"0.5": 0.6}}


@pytest.mark.parametrize("page_size", [1, 16])
def test_random_walks_over_layers_that_keep_different_numbers_keep_every_invariant(page_size: int) -> None:
    """With an even seed the lower layer keeps most in every form; else another may. Not every walk has a request that
    reads such a node."""
    met = Counter[int]()
    for seed in range(8):
        forms = UNEVEN_FORMS[: -1 if seed % 2 == 0 else None]
        walk = Walk(seed, page_size, forms=forms, curves=UNEVEN_CURVES, layers=LayerFlags(shares=SHARES))
        assert walk.groups is not None and len(walk.groups.tables) == 2
        walk.run(150)
        assert walk.cache.parts.controller.num_dropped > 0
        met[seed % 2] += walk.num_uneven
    assert met[0] > 0 and met[1] > 0


def test_stats_tell_the_utility_lost_as_the_journal_does_where_the_policy_weighs_it() -> None:
    for policy in ("evicpress", "lru", "adaptcache"):
        walk = Walk(0, 1, policy)
        walk.run(60)
        entries = walk.cache.inspector.read_journal(0, 4096)["entries"]
        assert entries
        lost = walk.cache.inspector.describe_stats()["utility_lost_s"]
        if policy == "evicpress":
            assert lost == pytest.approx(sum(entry["loss"] for entry in entries))
            assert lost > 0.0
        else:
            assert lost is None


def finished(walk: Walk, tokens: list[int], extra_key: str | None = None) -> None:
    request = Request("x", list(tokens), len(tokens), extra_key)
    walk.look_up(request)
    lock(walk.cache, request)
    assert walk.extend(request, len(tokens))
    walk.end(request)


def served(walk: Walk, num_tokens: int) -> list[int]:
    """A context that nobody knew, after a request for it."""
    tokens = [walk.rng.randrange(50) for _ in range(num_tokens)]
    finished(walk, tokens)
    return tokens


def nodes_of(walk: Walk) -> list[object]:
    return list(walk.cache.nodes.values())


def test_short_partial_match_falls_back_to_the_parent_and_its_recomputed_kv_upgrades_the_node(walk: Walk) -> None:
    tokens = served(walk, 100)
    (node,) = nodes_of(walk)
    walk.cache.parts.moves.compress(node.id, Form("streaming", 0.2))  # keeps 4 sinks and the last 16
    assert walk.match([*tokens[:60], 58]) == 0 and len(nodes_of(walk)) == 1  # 4 slots for 60 tokens: nothing is split
    finished(walk, [*tokens[:60], 58])
    upper = next(node for node in nodes_of(walk) if node.parent is walk.cache.root_node)
    assert len(upper.key) == 60 and num_slots(upper) == 60 and not is_lossy(upper)


def skewed(walk: Walk, num_tokens: int) -> list[int]:
    """A cached context whose first head has its smallest keys, those knorm keeps, all at the end."""
    tokens = served(walk, num_tokens)
    walk.is_sound = False
    (node,) = nodes_of(walk)
    for layer in range(LAYERS):
        walk.pool.k_buffer[layer][node.value, 0] = 1.0 / (1 + torch.arange(num_tokens))[:, None].expand(-1, DIM)
    return tokens


def test_a_split_loses_nothing_on_the_original_path(walk: Walk) -> None:
    tokens = skewed(walk, 200)
    (node,) = nodes_of(walk)
    walk.cache.parts.moves.compress(node.id, Form("knorm", 0.2))
    walk.cache.inc_lock_ref(node)  # a request runs on it, so nothing of it can be replaced
    assert walk.match(tokens) == 200
    other = [*tokens[:150], 58, 57]
    assert walk.match(other) == 0
    finished(walk, other)  # splits it at 150, where far too few slots lie before
    assert node.parent is not walk.cache.root_node
    assert walk.match(tokens) == 200
    walk.cache.dec_lock_ref(node)


def test_a_lossy_node_only_ever_gets_smaller_forms_and_counts_as_what_it_holds(walk: Walk) -> None:
    tokens = skewed(walk, 200)
    (node,) = nodes_of(walk)
    walk.cache.parts.moves.compress(node.id, Form("knorm", 0.5))
    walk.cache._split_node(node.key, node, 100)
    stats = {each.id: walk.cache.parts.view.stats_of(each) for each in nodes_of(walk)}
    for each in nodes_of(walk):
        kept = [option.form.kept_fraction for option in walk.cache.parts.view.options_of(each) if option.form]
        assert all(fraction < 0.5 for fraction in kept)
        held = Form("knorm", min(0.5, num_slots(each) / len(each.key)))
        assert stats[each.id].quality == Curves.from_json(CURVES).quality(held)
        assert stats[each.id].num_bytes == num_slots(each) * SLOT_BYTES
    assert len(tokens) == sum(each.num_tokens for each in stats.values())


def test_what_an_upgraded_node_holds_again_leaves_the_nodes_below_it(walk: Walk) -> None:
    walk.cache.config = replace(walk.cache.config, min_match_kept=1.0)
    tokens = served(walk, 100)
    (node,) = nodes_of(walk)
    walk.cache.parts.moves.compress(node.id, Form("random", 0.5))
    finished(walk, [*tokens[:20], 58])  # too few slots for 20 tokens: computed anew, in the split's upper part
    upper = node.parent
    assert num_slots(upper) == len(upper.key) == 20
    assert int(node.kv.layout.positions.min()) >= 20
    walk.check()
    request = Request("y", [*tokens, 59], 101, None)
    walk.look_up(request)
    held = walk.pool.k_buffer[0][request.evicpress.slots][:, 0, 1].tolist()
    assert request.prefix_len in (20, 100) and len(set(held)) == len(held)


def test_kv_computed_on_a_lossy_prefix_is_marked_and_an_exact_copy_replaces_it(walk: Walk) -> None:
    tokens = served(walk, 80)
    (node,) = nodes_of(walk)
    walk.cache.parts.moves.compress(node.id, Form("random", 0.5))
    longer = [*tokens, *range(50, 60)]
    finished(walk, longer)
    child = next(each for each in nodes_of(walk) if each.parent is node)
    assert child.kv.is_lossy_prefix and child.kv.form.is_exact
    walk.tiers.removal.drop(child.id)
    walk.tiers.removal.drop(node.id)
    finished(walk, longer)
    assert not any(is_lossy(each) for each in nodes_of(walk))


def test_namespaces_never_share(walk: Walk) -> None:
    tokens = served(walk, 40)
    assert walk.match(tokens, "lora-a") == 0


def test_a_locked_node_is_neither_compressed_nor_dropped(walk: Walk) -> None:
    served(walk, 80)
    (node,) = nodes_of(walk)
    walk.cache.inc_lock_ref(node)
    assert walk.cache.parts.view.options_of(node) == ()
    with pytest.raises(RuntimeError, match="cannot be brought to"):
        walk.cache.parts.moves.compress(node.id, FORMS[0])
    with pytest.raises(RuntimeError, match="locked or has children"):
        walk.tiers.removal.drop(node.id)
    assert walk.cache.parts.eviction.free_slots(10) == 0


def test_check_integrity_sees_a_slot_with_two_owners_and_a_lost_one(walk: Walk) -> None:
    walk.is_sound = False
    served(walk, 80)
    (node,) = nodes_of(walk)
    node.value[3] = node.value[4]
    assert not walk.cache.inspector.check_integrity()["ok"]
    node.value[3] = walk.allocator.free_pages[0]
    assert any("belongs to" in text for text in walk.cache.inspector.check_integrity()["violations"])


def unmatched(walk: Walk, num_tokens: int = 20) -> Request:
    """A request that runs and never went through ``match_prefix``: ``req.evicpress`` is not there."""
    request = Request("u", [walk.rng.randrange(50) for _ in range(num_tokens)], num_tokens, None)
    request.req_pool_idx = walk.rows.free_slots.pop()
    slots = walk.allocator.alloc(num_tokens)
    walk.rows.req_to_token[request.req_pool_idx, :num_tokens] = slots.int()
    walk.compute(request, 0, num_tokens, slots)
    request.kv_allocated_len = request.filled = num_tokens
    request.frozen_view = walk.view_of(request)
    walk.running.append(request)
    return request


def test_a_request_that_was_never_matched_is_adopted_with_an_empty_prefix(walk: Walk) -> None:
    view = walk.cache.views.adopt(unmatched(walk))
    assert (len(view.slots), view.holes, view.is_lossy) == (0, 0, False)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_was_never_matched_hands_in_what_it_computed(walk: Walk, chunked: bool) -> None:
    request = unmatched(walk)
    checkpoint(walk.cache, request, is_chunk=chunked)
    (node,) = nodes_of(walk)
    assert len(node.key) == request.cache_protected_len == 20 and node.lock_ref == 1
    walk.check()
    walk.finish()
    assert node.lock_ref == 0


@pytest.mark.parametrize("is_insert", [False, True])
def test_a_request_that_was_never_matched_ends(walk: Walk, is_insert: bool) -> None:
    request = unmatched(walk)
    walk.running.clear()
    end_request(walk.cache, request, is_insert=is_insert)
    assert sum(map(num_slots, nodes_of(walk))) == 20 * is_insert


def test_a_request_that_was_never_matched_is_looked_into(walk: Walk) -> None:
    unmatched(walk)
    assert walk.cache.inspector.describe_stats()["in_flight_slots"] == 20
    assert walk.cache.inspector.check_integrity()["ok"]


def test_the_prefill_of_a_request_that_was_never_matched_is_timed_by_its_whole_prefix() -> None:
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, reqs=[unmatched(Walk(0, 1))], extend_lens=[70], prefix_lens=[30]
    )
    assert _chunks_of(batch) == [(70, 30)]


def hits_of(walk: Walk) -> dict[int, tuple[int, int]]:
    """Waiting requests that hit a node and the number of its hits, by where it ends."""
    for node in nodes_of(walk):
        rate = walk.cache.terms.reuse.rate(node.id)
        assert node.kv.weight == rate + QUEUED_RATE * len(node.kv.queued_hits)
        assert walk.cache.policy.planner.index.candidates[node.id].weight == node.kv.weight
    ends = {node.id: start_of(node) + len(node.key) for node in nodes_of(walk)}
    return {ends[node.id]: (len(node.kv.queued_hits), node.kv.num_hits) for node in nodes_of(walk)}


def waiting(walk: Walk, tokens: list[int]) -> Request:
    walk.count += 1
    request = Request(f"w{walk.count}", list(tokens), len(tokens), None)
    walk.cache.parts.admission.on_queued(request)
    return request


def ran(walk: Walk, request: Request) -> None:
    """The scheduler matches the request, locks its prefix and adopts it; then it ends without giving anything back."""
    walk.look_up(request)
    walk.cache.views.adopt(request)
    walk.cache.views.adopt(request)  # as for the next chunk: counted already


def test_a_waiting_request_counts_at_once_and_only_once(walk: Walk) -> None:
    tokens = served(walk, 100)
    assert hits_of(walk) == {100: (0, 1)}
    request = waiting(walk, [*tokens, 59])
    assert hits_of(walk) == {100: (1, 2)} and walk.cache.terms.reuse.model.num_uses == 0
    ran(walk, request)
    assert hits_of(walk) == {100: (0, 2)} and len(walk.cache.queued_hits) == 0
    assert walk.cache.terms.reuse.model.num_uses == 1
    ran(walk, Request("never waited", [*tokens, 58], 101, None))
    assert hits_of(walk) == {100: (0, 3)} and walk.cache.terms.reuse.model.num_uses == 2


def test_a_request_that_leaves_the_queue_takes_its_hit_with_it(walk: Walk) -> None:
    tokens = served(walk, 100)
    first, second = waiting(walk, [*tokens, 59]), waiting(walk, [*tokens, 58])
    walk.cache._split_node(nodes_of(walk)[0].key, nodes_of(walk)[0], 40)  # meanwhile another request parts the node
    assert hits_of(walk) == {40: (2, 3), 100: (2, 3)}
    walk.cache.queued_hits.keep_only([second])
    assert hits_of(walk) == {40: (1, 2), 100: (1, 2)}
    walk.cache.queued_hits.keep_only([second])
    ran(walk, second)
    assert hits_of(walk) == {40: (0, 2), 100: (0, 2)}
    walk.cache.queued_hits.release(first)  # twice is once


def test_what_a_waiting_request_turns_out_not_to_use_loses_the_hit(walk: Walk) -> None:
    tokens = served(walk, 100)
    request = waiting(walk, [*tokens[:40], 59])  # only a part of the node, which is not split for it
    assert hits_of(walk) == {100: (1, 2)}
    ran(walk, request)
    assert hits_of(walk) == {40: (0, 2), 100: (0, 1)}


def test_a_claim_survives_that_its_node_is_dropped_or_all_are_flushed(walk: Walk) -> None:
    tokens = served(walk, 100)
    first, second = waiting(walk, [*tokens, 59]), waiting(walk, [*tokens, 58])
    walk.tiers.removal.drop(nodes_of(walk)[0].id)
    finished(walk, tokens)
    ran(walk, first)
    assert hits_of(walk) == {100: (0, 2)}
    third = waiting(walk, [*tokens, 57])
    walk.cache.reset()
    assert len(walk.cache.queued_hits) == 2 and walk.cache.policy.planner.index.candidates == {}
    ran(walk, second)
    walk.cache.queued_hits.release(third)
    assert len(walk.cache.queued_hits) == 0
    walk.is_sound = False  # it was reset without its pools


def test_a_waiting_request_saves_its_prefix_from_being_the_victim() -> None:
    for waits, dropped in ((False, "old"), (True, "new")):
        walk = Walk(0, 1, min_compress_tokens=1000)  # nothing is compressed
        walk.is_sound = False
        old, new = ([walk.rng.randrange(50) for _ in range(60)] for _ in range(2))
        finished(walk, old)
        finished(walk, new)
        if waits:
            waiting(walk, [*old, 59])
        walk.cache.parts.eviction.free_slots(1)
        (left,) = nodes_of(walk)
        assert (left.key.token_ids[0] == (new if dropped == "old" else old)[0]) and left.key.token_ids[1:4] == array(
            "q", (new if dropped == "old" else old)[1:4]
        )


def test_weights_fall_by_the_stamped_clock_which_never_goes_back(walk: Walk) -> None:
    cost = costs_of(walk.cache.terms.costs.prefill)
    walk.cache.terms.advance(1e6, cost)
    first = [walk.rng.randrange(50) for _ in range(60)]
    finished(walk, first)
    (node,) = nodes_of(walk)
    fresh = node.kv.weight
    walk.cache.terms.advance(5.0, cost)  # a stamp from the past
    assert walk.cache.terms.now_s == 0.0 and node.kv.weight == fresh
    walk.cache.terms.advance(1e6 + 100.0, cost)
    walk.cache.parts.round_begun()
    old = node.kv.weight
    assert walk.cache.terms.now_s == 100.0 and old < fresh / 10.0 and hits_of(walk) == {60: (0, 1)}
    ran(walk, waiting(walk, [*first, 59]))
    assert node.kv.weight > old and hits_of(walk) == {60: (0, 2)}


def test_recomputing_weighs_as_many_times_as_requests_wait_for_it(walk: Walk) -> None:
    cost = walk.cache.terms.costs.prefill
    assert walk.cache.host is None and walk.cache.terms.recompute_weight == 1.0
    for number, (congestion, weight) in enumerate([(1.0, 1.0), (4.0, 4.0), (1.0, 1.0)], start=1):
        walk.cache.terms.advance(1000.0 * number, costs_of(cost), congestion)
        seen = walk.cache.policy.planner.policy.costs.prefill
        assert seen.per_token_s == pytest.approx(weight * cost.per_token_s)
        assert walk.cache.terms.costs.prefill == cost
        assert walk.cache.inspector.describe_stats()["costs"]["recompute_weight"] == weight
        walk.check()


def test_gaps_are_those_between_bursts_not_within_them(walk: Walk) -> None:
    cost, model = walk.cache.terms.costs.prefill, walk.cache.terms.reuse.model
    tokens = served(walk, 60)
    (node,) = nodes_of(walk)
    for index in range(1, 40):
        walk.cache.terms.advance(10.0 * index, costs_of(cost))
        burst = [waiting(walk, [*tokens, 59]) for _ in range(4)]  # while one waits already
        ran(walk, burst.pop())
        walk.cache.inc_lock_ref(node)
        burst += [waiting(walk, [*tokens, 58]) for _ in range(4)]  # and while one runs
        for request in burst:
            ran(walk, request)
        walk.cache.dec_lock_ref(node)
        walk.cache.parts.round_begun()
    assert model.typical_gap_s == 10.0
    assert walk.cache.inspector.describe_stats()["reuse"]["typical_gap_s"] == 10.0


def test_work_at_many_nodes_is_put_off_while_a_token_waits_and_not_for_ever(walk: Walk) -> None:
    parts, told = walk.cache.parts, list[str]()
    parts.round_begun.subscribe(lambda: told.append("work"))
    for _ in range(2 * MOST_PUT_OFF):
        told.append("round")
        parts.begin_round(delays_token=True)
    assert told == 2 * [*MOST_PUT_OFF * ["round"], "work"]
    parts.begin_round(delays_token=False)
    assert told[-2:] == ["work", "work"]


def test_of_many_nodes_each_kind_of_work_has_rounds_of_its_own(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, told = walk.cache.parts, list[str]()
    monkeypatch.setattr(parts.tree.queued_hits, "grow_older", lambda: told.append("grow"))
    monkeypatch.setattr(parts.tree.policy, "advance", lambda: told.append("steps"))
    clock = parts.tree.background_clock
    clock.mark_dirty()
    assert parts.begin_round(delays_token=False), "there is time to learn"
    assert told == ["grow", "steps"] and not clock.is_full, "of few, all of it in one"
    monkeypatch.setattr("sglang_evicpress.patches.cache.parts.MANY_NODES", 0)
    rounds = [(parts.begin_round(delays_token=False), clock.is_full) for _ in range(12)]
    assert told[2:] == 2 * ["grow", "steps", "steps"]
    room = (False, False)
    assert rounds == 2 * [room, (False, True), room, (False, True), room, (True, True)], "(learns, makes no room)"
    assert not clock.begin_plan(0.0, is_idle=True)
    parts.begin_round(delays_token=True)
    assert clock.begin_plan(0.0, is_idle=True), "a round that delays a token does none of it"
    del told[:]
    for _ in range(2 * MOST_PUT_OFF):
        parts.begin_round(delays_token=True)
    assert sorted(told) == ["grow", "steps"], "but one in some, for they would wait for ever"


def test_a_round_whose_time_other_work_took_does_nothing_at_many_nodes(
    walk: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, told = walk.cache.parts, list[str]()
    parts.round_begun.subscribe(lambda: told.append("work"))
    clock = parts.tree.background_clock
    clock.mark_dirty()
    assert parts.begin_round(delays_token=False, is_full=True) and told == ["work"], "at few it does"
    assert clock.begin_plan(0.0, is_idle=True)
    monkeypatch.setattr("sglang_evicpress.patches.cache.parts.MANY_NODES", 0)
    clock.mark_dirty()
    assert not parts.begin_round(delays_token=False, is_full=True) and told == ["work"]
    assert not clock.begin_plan(0.0, is_idle=True), "no room is made either"
    assert clock.begin_plan(0.0, is_idle=True), "but for who waits within the round"
    for _ in range(MOST_PUT_OFF):  # it is not counted among the rounds that are put off
        parts.begin_round(delays_token=True, is_full=True)
        parts.begin_round(delays_token=True)
    assert told == ["work", "work"]
    monkeypatch.setattr(parts.tree.ranks, "is_alone", False)
    parts.begin_round(delays_token=False, is_full=True)
    assert told == ["work", "work", "work"], "all ranks do it in the same rounds"


def test_a_server_that_ends_has_all_prompts_in_its_tree(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    made, ended = list[str](), list[list[str]]()
    late = LateCheckpoints(lambda req, token_ids, *, is_chunk: made.append(req))
    monkeypatch.setattr(walk.cache, "late_checkpoints", late)
    monkeypatch.setattr(walk.cache.parts, "shutdown", SimpleNamespace(close=lambda *, save: ended.append([*made])))
    names = [f"r{number}" for number in range(MOST_AT_ONCE + 1)]
    with late.deferring():
        for name in names:
            late.keep(name, [1], is_chunk=False)
    walk.cache.close()
    assert ended == [names], "before it is saved"


def test_what_is_used_every_few_seconds_stays_and_what_was_used_once_goes(walk: Walk) -> None:
    cost = costs_of(walk.cache.terms.costs.prefill)
    often = served(walk, 60)
    (kept,) = nodes_of(walk)
    for index in range(1, 40):
        walk.cache.terms.advance(3.0 * index, cost)
        walk.cache.parts.round_begun()
        ran(walk, waiting(walk, [*often, 59]))
        if index % 10 == 0:
            once = served(walk, 60)
    assert len(once) == 60 and len(nodes_of(walk)) == 4
    others = [node.kv.weight for node in nodes_of(walk) if node is not kept]
    assert kept.kv.weight > 3.0 * max(others) and kept.kv.weight == pytest.approx(1.0 / 3.0, rel=0.5)
    walk.check()


def test_costs_that_drift_reach_the_policy_and_small_changes_do_not(
    walk: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_policy = lambda: walk.cache.policy.planner.policy.costs.prefill.per_token_s  # noqa: E731
    walk.cache.terms.advance(0.0, costs_of(PrefillCost(0.0, 1.05e-4, 0.0)))
    assert walk.cache.terms.costs.prefill.per_token_s == 1e-4
    walk.cache.terms.advance(20.0, costs_of(PrefillCost(0.0, 5e-4, 0.0)))
    assert walk.cache.terms.costs.prefill.per_token_s == in_policy() == 5e-4
    walk.cache.terms.advance(21.0, costs_of(PrefillCost(0.0, 9e-4, 0.0)))
    assert in_policy() == 5e-4 and walk.cache.terms.costs.prefill.per_token_s == 9e-4, "not so soon again"
    walk.cache.terms.advance(40.0, costs_of(PrefillCost(0.0, 9e-4, 0.0)))
    assert in_policy() == 9e-4
    for now_s, given, expected in ((40.9, 4e-4, 9e-4), (41.1, 5e-4, 9e-4), (42.0, 4e-4, 9e-4), (42.2, 4e-4, 4e-4)):
        walk.cache.terms.advance(now_s, costs_of(PrefillCost(0.0, given, 0.0)))  # soon where it doubled or halved
        assert in_policy() == expected
    walk.cache.terms.advance(43.3, costs_of(PrefillCost(0.0, 9e-4, 0.0)))
    assert in_policy() == 9e-4
    monkeypatch.setattr(policy_terms, "REFRESH_S_PER_NODE", 30.0)  # as if there were ten thousand times as many
    served(walk, 60)
    for now_s, expected in ((45.0, 9e-4), (46.4, 2e-4)):
        walk.cache.terms.advance(now_s, costs_of(PrefillCost(0.0, 2e-4, 0.0)))
        assert in_policy() == expected


def test_check_integrity_sees_a_book_that_is_out_of_step(walk: Walk) -> None:
    walk.is_sound = False
    served(walk, 80)
    (node,) = nodes_of(walk)
    record = walk.cache.policy.planner.index.candidates[node.id]
    for name, wrong in (("num_bytes", 1), ("is_locked", True), ("parent_id", 77), ("tier", Tier.HOST)):
        right = getattr(record, name)
        setattr(record, name, wrong)
        assert any("policy's index" in text for text in walk.cache.inspector.check_integrity()["violations"]), name
        setattr(record, name, right)
    walk.check()
    del walk.cache.policy.planner.index.candidates[node.id]
    assert any("not in the policy's index" in text for text in walk.cache.inspector.check_integrity()["violations"])


def test_decisions_are_journalled_with_what_they_rest_on(walk: Walk) -> None:
    served(walk, 100)
    walk.cache.parts.eviction.free_slots(10)
    walk.cache.parts.eviction.free_slots(SLOTS)
    journal = walk.cache.inspector.read_journal(0, 100)
    numbers = [entry["number"] for entry in journal["entries"]]
    assert numbers == list(range(1, len(numbers) + 1)) and journal["num_lost"] == 0
    first, last = journal["entries"][0], journal["entries"][-1]
    assert first["from"] == "exact/gpu" and first["weight"] > 0.0 and last["to"] == "drop"
    assert first["freed_bytes"] == first["bytes_before"] - first["bytes"]
    assert walk.cache.inspector.read_journal(numbers[-1], 5)["entries"] == []


@pytest.mark.parametrize(
    "policy", ["lru", "lfu", "slru", "tlru", "hpt", "gdsf", "s3fifo", "sieve", "adaptcache", "knorm@0.5+lru"]
)
def test_every_policy_keeps_every_invariant(policy: str) -> None:
    Walk(3, 1, policy).run(80)


def test_ranks_that_get_the_same_stamps_decide_alike_whatever_they_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's own clock and batch times must not enter."""
    seen = []
    for rank in range(2):
        monkeypatch.setattr(TreeNode, "counter", 0)  # a process of its own
        walk = Walk(11, 1)
        for _ in range(20):
            walk.cache.terms.cost_model.observe_prefill([(100, 0)], 1.0 + 99.0 * rank)
        monkeypatch.setattr(time, "monotonic", lambda rank=rank: 1e6 * rank)
        walk.run(150)
        assert walk.cache.terms.cost_model.costs.prefill.seconds(100, 0) == pytest.approx(1.0 + 99.0 * rank, rel=0.1)
        seen.append(
            (walk.cache.inspector.read_journal(0, 10_000), walk.cache.terms.costs, walk.cache.terms.reuse.describe())
        )
    assert seen[0] == seen[1]
    assert seen[0][0]["num_decisions"] > 20
