"""A walk over all that the cache does at once: both tiers, codecs, uneven layers, shadows, and budgets of running
requests, with threads that go on when the walk says so.

Moves and oracles are those of the walks of each part; here are those that none of them has, and what has to be said
differently where all of them meet.
"""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from tests.contract.cache.test_radix_cache_model import (
    CURVES,
    FORMS,
    ROWS,
    SHARES,
    UNEVEN_CURVES,
    UNEVEN_FORMS,
    Request,
    Walk,
    held_in,
    path_hashes,
)
from tests.contract.decode_budget.test_decode_budgets import SCORES, SINKS, Budgeted, BudgetWalk
from tests.contract.profiling.test_shadows import ShadowMoves, without
from tests.contract.releases import checkpoint
from tests.contract.tiers.stepped import Clock, StepArrival
from tests.contract.tiers.test_tiers_model import DIM, HEADS, LAYERS, TierWalk, bits
from tests.unit.geometry.made import make_geometry, make_rope

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.decode_budget import schedule
from sglang_evicpress.decode_budget.settings import METHODS, DecodeSettings
from sglang_evicpress.flag_groups import LayerFlags
from sglang_evicpress.introspect.operations import IntrospectionError
from sglang_evicpress.patches.attention import req_to_token
from sglang_evicpress.patches.attention.request_holes import RequestHoles
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.decode_budget.state import budget_of, num_logical, num_physical, positions_of
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node import iter_nodes, path_to, slots_of, tokens_to
from sglang_evicpress.policy.cost_model import PrefillCost
from sglang_evicpress.tiers.ssd.os_files import unlock_folder

MOST_ROUNDS = 2000
"""In which whatever a walk waits for must come about."""

CODED = {
    "int8": ("exact+int8", "knorm@0.8", "knorm@0.5+int8", "random@0.5+int8"),
    "int4": ("exact+int8", "exact+int4", "streaming@0.5", "random@0.5+int4"),
    "lossless": ("exact+lossless", "knorm@0.8", "knorm@0.5+lossless"),
}
CODED_CURVES = {**CURVES, "knorm": {"0.8": 0.99, "0.5": 0.9}, "exact+int8": 1.0, "exact+int4": 0.9}
ROUNDING = {"int8": 1.5, "int4": 11.0, "int2": 46.0}
"""Error of a value from -125 to 125 that comes back, at most: half of what lies between two codes, that of the codec
that it may have had before, and the rounding to 16 bits."""


@dataclass(frozen=True)
class Setting:
    """Setting of a walk. ``menu``: press, uneven, exact, or a codec."""

    menu: str = "press"
    page_size: int = 1
    dtype: torch.dtype = torch.float32
    host_bytes: int = 192 << 10
    num_slots: int = 384
    has_budgets: bool = True

    @property
    def settings(self) -> dict[str, object]:
        """Settings of EvicPressConfig."""
        if self.menu == "uneven":
            return {"forms": UNEVEN_FORMS, "curves": UNEVEN_CURVES, "layers": LayerFlags(shares=SHARES)}
        if self.menu in CODED:
            forms = tuple(map(Form.parse_stored, CODED[self.menu]))
            return {"forms": forms, "curves": CODED_CURVES, "alpha": 1e-4}
        return {"forms": (EXACT,) if self.menu == "exact" else FORMS}


class MachineWalk(ShadowMoves, TierWalk):
    """Walk of which ``choose`` makes every choice once it is made. ``held`` are nodes that somebody has locked."""

    visit, retract, decode = BudgetWalk.visit, BudgetWalk.retract, BudgetWalk.decode
    alloc_next, is_stuck = BudgetWalk.alloc_next, BudgetWalk.is_stuck
    defers = False
    is_looking = False  # without waiting for what is being loaded, as attention does

    def __init__(self, setting: Setting, folder: Path, choose: random.Random) -> None:
        self.setting, self.kinds, self.held = setting, dict[str, int](), list[object]()
        self.seen: dict[int, tuple[bytes, list[set[tuple[int, int]]]]] = {}
        self.table = req_to_token._table = RequestHoles(ROWS + 1, "cpu")
        TreeNode.counter = 0  # names of nodes, and their order, are the same whatever was before
        super().__init__(
            0,
            setting.page_size,
            folder,
            dtype=setting.dtype,
            num_slots=setting.num_slots,
            host_bytes=setting.host_bytes,
            **setting.settings,
        )
        self.cost = None
        self.cache.compressor.presses.geometry = make_geometry(LAYERS, 2 * HEADS, HEADS, make_rope(DIM))
        self.rng = choose
        self.arrival: StepArrival = self.tree.storage.arrival
        self.clock: Clock = self.arrival.clock
        self.arrival.work = self.work_or_not

    def scheduler(self) -> SimpleNamespace:
        stub = super().scheduler()
        batch = SimpleNamespace(reqs=self.running, batch_is_full=False)
        stub.running_batch = stub.last_batch = batch
        return stub

    # ---- threads and time

    def work(self) -> bool:
        """One job of one kind of thread; False when there is none."""
        busy = self.arrival.busy()
        if busy:
            group = self.rng.choice(busy)
            group.step(self.rng.randrange(min(group.width, group.num_waiting)))
        return bool(busy)

    def work_or_not(self) -> bool:
        return self.rng.randrange(4) > 0 and self.work()

    def work_all(self) -> None:
        while busy := self.arrival.busy():
            busy[0].step()

    def load_layer(self) -> None:
        """Copy a layer of a load, as a thread that goes on with the next one later."""
        loads = [load for load in self.tiers.loads.unfinished if load.is_started and not load.has_run.is_set()]
        if loads:
            load = self.rng.choice(loads)
            missing = [layer for layer, is_here in enumerate(load._here) if not is_here.is_set()]
            if missing:
                load._copy(missing[0])

    def until(self, is_done: object) -> None:
        for _ in range(MOST_ROUNDS):
            if is_done():
                return
            if not self.work():
                self.clock.sleep(0.005)
            self.tick()
        raise AssertionError("nothing comes of it")

    def pass_time(self) -> None:
        """Let so much pass that what was verified is no longer, that a hold ends, or that shadows expire."""
        self.clock.sleep(self.rng.choice([0.06, 1.0, 5.0, 100.0]))
        self.stamp(PrefillCost(0.01, self.rng.choice([1e-7, 1e-4, 1e-2, 1.0]), 0.0))

    # ---- requests

    def wait(self, tokens: Sequence[int], extra_key: str | None = None, *, is_exact: bool = False) -> Request:
        self.count += 1
        request = Budgeted(f"r{self.count}", list(tokens), len(tokens), extra_key, is_exact=is_exact)
        is_free = not is_exact and not is_shadow_name(extra_key)
        if is_free and self.setting.has_budgets and self.groups is None and self.rng.randrange(3) == 0:
            self.give_budget(request)
        self.waiting.append(request)
        self.cache.parts.admission.on_queued(request)
        return request

    def enqueue(self, name: str | None, tokens: list[int]) -> Request:
        return self.wait(tokens, name)

    def give_budget(self, request: Budgeted) -> None:
        method = self.rng.choice(METHODS)
        least = 3 * schedule.block_size(self.page) if method == "paged" else self.page + SINKS
        settings = DecodeSettings(
            least + self.rng.choice([0, 7, 30]),
            method,
            self.rng.choice(SCORES),
            interval=self.rng.choice([1, 8]),
            protected_pages=self.rng.choice([(), ("first",), ("first", "newest")]),
        )
        if settings.tokens >= schedule.least_tokens(settings, self.page, SINKS):
            self.cache.decode_budgets.begin(request, settings, wants_trace=True)

    def arrive(self) -> None:
        if len(self.waiting) > 6:
            return
        self.stamp(PrefillCost(0.01, self.rng.choice([1.0, 1e-2, 1e-4]), 0.0))
        self.wait(*self.some_prompt(), is_exact=self.rng.randrange(6) == 0)

    def some_prompt(self) -> tuple[list[int], str | None]:
        """A part of a document, or of what was asked before, and an end of its own."""
        if self.asked and self.rng.randrange(3):
            tokens, extra_key = self.rng.choice(self.asked[-8:])
        else:
            tokens, extra_key = self.rng.choice(self.documents), self.rng.choice(self.namespaces)
        tokens = tokens[: self.rng.choice([200, 200, self.rng.randrange(1, 150)])]
        end = random.Random(self.rng.randrange(8))
        tokens = [*tokens, *(end.randrange(50, 60) for _ in range(end.randrange(1, 30)))]
        self.asked.append((tokens, extra_key))
        return tokens, extra_key

    def start(self) -> None:
        """Admit a request, if it is ready after some rounds in which it was passed over."""
        if len(self.running) >= ROWS - 2 or not self.waiting:
            return
        self.cache.background.begin_round(self.stub)
        if not self.waiting:
            return
        request = self.rng.choice(self.waiting)
        for _ in range(self.rng.choice([0, 3, 30])):
            if self._is_ready(request):
                break
            self.arrival.wait(0.05)
            self.tick()
        if self._is_ready(request):
            self.admit(request, self.rng.choice([1.0, 1.0, 0.5]))

    def serve_one(self) -> None:
        """A request from its arrival to its end, with threads that do at once what they are asked to."""
        if len(self.running) >= ROWS - 2 or len(self.waiting) > 6:
            return
        self.stamp(PrefillCost(0.01, 1.0, 0.0))
        request = self.wait(*self.some_prompt())
        for _ in range(20):
            if self._is_ready(request):
                break
            self.work_all()
            self.clock.sleep(0.05)
            self.tick()
        else:
            return
        self.admit(request)
        if request not in self.waiting:
            self.end(request)

    def extend(self, request: Request, upto: int) -> bool:
        begin = len(request.prefix_indices)
        upto = max(upto, begin + 1)
        slots = self.alloc(request, begin, upto)
        if slots is None:
            return False
        view = self.cache.views.adopt(request)
        if request.req_pool_idx is None:
            request.req_pool_idx = self.rows.free_slots.pop()
            self.running.append(request)
        where = torch.tensor([request.req_pool_idx])
        row = self.rows.req_to_token[request.req_pool_idx]
        row[: len(view.slots)] = view.slots
        row[len(view.slots) : len(view.slots) + len(slots)] = slots
        self.table.note(where, [view.holes])
        if self.groups is not None:
            self.groups.write(where, where, [view])
        self.compute(request, begin, upto, slots)
        request.kv_allocated_len = request.kv_committed_len = request.filled = upto
        request.frozen_view = self.view_of(request)
        is_chunk = upto < len(request.tokens)
        if budget_of(request) is None or is_chunk or self.rng.randrange(2):  # else its first pass comes before
            checkpoint(self.cache, request, is_chunk=is_chunk)
        self.verify(request)
        return True

    def prefill(self, request: Request, upto: int | None = None) -> None:
        """Admit it, or not: a request in a shadow need not find the room that it was promised, as here others have
        locked nodes since."""
        request.num_cached = 0
        self.admit(request, 1.0 if upto is None else upto / len(request.tokens))

    def ask(self, name: str, tokens: list[int]) -> int | None:
        request = self.enqueue(name, tokens)
        self.cache.background.begin_round(self.stub)
        if request in self.waiting and self._is_ready(request):
            self.admit(request)
        if request in self.running:
            self.end(request)
        return None

    def begin(self, name: str, tokens: list[int]) -> Request | None:
        request = super().begin(name, tokens)
        return request if request in self.running else None

    def abort(self) -> None:
        """A running request is aborted: nothing of it goes to the tree."""
        if self.running:
            self.end(self.rng.choice(self.running), is_insert=False)

    def end(self, request: Request | None, *, is_insert: bool = True) -> None:
        if request is not None:
            self.seen.pop(id(request), None)
            super().end(request, is_insert=is_insert)

    def leave(self) -> None:
        super().leave()
        self.tiers.prefetches.keep_only(self.waiting)

    def begin_one(self) -> None:
        """A request that comes, and is admitted at once if it can be; it goes on running."""
        if len(self.running) < ROWS - 2 and len(self.waiting) < 7:
            self.stamp(PrefillCost(0.01, 1.0, 0.0))
            request = self.wait(*self.some_prompt(), is_exact=self.rng.randrange(6) == 0)
            self.tick()
            if self._is_ready(request):
                self.admit(request, self.rng.choice([1.0, 1.0, 0.5]))

    def fill(self) -> None:
        """A request in a shadow computes what its context lacks."""
        shadow = self.some()
        if shadow is not None and len(self.waiting) < 7 and len(self.running) < ROWS - 2:
            self.ask(shadow.exact, shadow.tokens)

    # ---- what else is done to the tree

    def some_node(self) -> object | None:
        nodes = list(self.cache.nodes.values())
        return self.rng.choice(nodes) if nodes else None

    def look(self) -> None:
        """A prefix is looked up for nobody."""
        tokens, extra_key = self.rng.choice(self.asked) if self.asked else (self.documents[0], None)
        self.match(tokens[: self.rng.choice([200, self.rng.randrange(1, 100)])], extra_key)

    def insert(self) -> None:
        """KV that was computed elsewhere is put into the tree."""
        tokens, extra_key = self.some_prompt()
        num_tokens = len(tokens) // self.page * self.page
        slots = self.allocator.alloc(num_tokens) if num_tokens else None
        if slots is None:
            return
        request = Request("inserted", tokens[:num_tokens], num_tokens, extra_key)
        self.compute(request, 0, num_tokens, slots)
        key = RadixKey(array("q", request.tokens), extra_key)
        num_known = self.cache.insert(InsertParams(key=key, value=slots)).prefix_len
        if num_known:
            self.allocator.free(slots[:num_known])

    def lock_one(self) -> None:
        node = self.some_node()
        if node is not None and node.value is not None and not node.kv.is_shadow and len(self.held) < 3:
            self.cache.inc_lock_ref(node)
            self.held.append(node)

    def unlock_one(self) -> None:
        if self.held:
            self.cache.dec_lock_ref(self.held.pop(self.rng.randrange(len(self.held))))

    def split(self) -> None:
        """A node is parted where another prompt would leave it."""
        node = self.some_node()
        num_pages = 0 if node is None else len(node.key) // self.page
        if num_pages > 1 and not node.kv.is_shadow:
            self.cache._split_node(node.key, node, self.page * self.rng.randrange(1, num_pages))

    def demote(self) -> None:
        node = self.some_node()
        if node is not None:
            with contextlib.suppress(ValueError, IntrospectionError):
                self.cache.parts.admin.demote_node(node.id, self.rng.choice(self.tree.storage.tiers[1:]))
                assert not node.kv.is_shadow

    def quantise(self) -> None:
        node = self.some_node()
        if node is not None and self.setting.menu in CODED:
            codec, tier = self.rng.choice(["int8", "int4", "lossless"]), self.rng.choice(self.tree.storage.tiers[1:])
            with contextlib.suppress(ValueError, IntrospectionError):
                if codec != "int4" or self.setting.menu == "int4":
                    self.cache.parts.admin.demote_node(node.id, tier, codec=codec)

    def copy_down(self) -> None:
        """A node gets a copy below and stays where it is."""
        node = self.some_node()
        if node is not None and not node.kv.is_shadow:
            self.tiers.backup.start_copy(node, self.rng.choice(self.tree.storage.tiers[1:]))

    def free_copy(self) -> None:
        node = self.some_node()
        if node is not None and node.kv.copies and node.lock_ref == 0:
            tier = self.rng.choice(sorted(node.kv.copies))
            if node.value is not None or len(node.kv.copies) > 1:
                self.cache.placement.remove_copy(node, tier)
                self.tiers.removal.after_loss(node)

    def rest(self) -> None:
        """An idle server betters what it holds."""
        if self.running or self.waiting:
            return
        self.cache.parts.idle_promotion._next_look_s = 0.0
        self.clock.sleep(5.0)
        for _ in range(self.rng.choice([2, 10, 40])):
            self.arrival.wait(0.05)
            self.tick()

    def flush(self) -> None:
        self.cache.parts.admin.flush_tier(self.rng.choice(self.tree.storage.tiers))

    def end_running(self) -> None:
        """End every lock and every request that runs."""
        while self.held:
            self.unlock_one()
        while self.running:
            self.end(self.running[0], is_insert=self.rng.randrange(2) == 0)

    def reset(self) -> None:
        self.end_running()
        if self.rng.randrange(2):  # else loads come too late, into slots that are set apart
            self.tiers.loads.start(None)
            self.work_all()
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()
        self.open.clear()

    def finish_all(self) -> None:
        """End everything: nothing is left over, and every slot can be had again."""
        self.end_running()
        while self.waiting:
            self.leave()
        self.cache.background.begin_round(self.stub)
        for number in list(self.cache.shadows.spaces):
            self.cache.shadows.close_shadow(number, False)
        self.tiers.prefetches.keep_only([])
        self.tick()
        self.settle()
        self.check()
        self.check_nothing_leaks()
        self.cache.parts.eviction.free_slots(self.allocator.size)
        self.settle()
        self.cache.parts.eviction.free_slots(self.allocator.size)
        self.check()
        left = [node.kv for node in self.cache.nodes.values() if node.value is not None]
        assert self.allocator.available_size() == self.allocator.size, f"slots that nobody uses cannot be had: {left}"

    # ---- the oracle

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        if not self.is_looking:
            return super().read(slots)
        buffers = (*self.pool.k_buffer, *self.pool.v_buffer)
        found = torch.stack([buffer[slots] for buffer in buffers])
        return found.view(2, LAYERS, len(slots), HEADS, DIM).transpose(2, 3)

    @property
    def rounding(self) -> float:
        """Rounding of any row, at most."""
        return ROUNDING.get(self.setting.menu, 0.0)

    def view_of(self, request: Request) -> list[set[tuple[int, int]]]:
        """View as of TierWalk; rows that a codec has rounded are those of the request's tokens that they are like."""
        if self.rounding == 0.0:
            return super().view_of(request)
        rows = torch.stack([self.read(self.row_of(request, layer))[:, layer] for layer in range(LAYERS)])
        data = bits(rows).tobytes()
        if id(request) in self.seen and self.seen[id(request)][0] == data:
            return self.seen[id(request)][1]
        num_tokens = len(request.tokens)
        hashes = np.array(path_hashes(request.tokens, self.adapter_of(request.extra_key)))
        at = np.broadcast_to(np.arange(num_tokens), (LAYERS, HEADS, num_tokens))
        known = self.expected(hashes[at], at).transpose(0, 1).float()  # [layers, K or V, heads, tokens, dim]
        views = []
        for layer in range(LAYERS):
            for head in range(HEADS):
                own = rows[layer, :, head].float().transpose(0, 1).flatten(1)
                others = known[layer, :, head].transpose(0, 1).flatten(1)
                distance = torch.cdist(own, others, p=float("inf"))
                nearest = distance.min(1)
                assert (nearest.values <= self.rounding).all(), "no row was ever computed so"
                positions = nearest.indices.tolist()
                assert len(set(positions)) == len(positions), "an entry twice"
                views.append({(int(hashes[position]), position) for position in positions})
        self.seen[id(request)] = data, views
        return views

    def verify(self, request: Request) -> None:
        state = budget_of(request)
        if state is None or not state.has_left_tree:
            super().verify(request)
            assert state is None or state.num_dropped == 0
            return
        assert state.num_dropped % self.page == 0, "own holes are whole pages"
        assert int(self.table.host[request.req_pool_idx]) == state.num_dropped
        assert request.evicpress.holes == request.cache_protected_len == 0
        num_slots = num_physical(request)
        assert num_logical(request) == len(request.tokens)
        assert num_slots <= schedule.peak(state.settings, self.page)
        held = positions_of(state.positions, num_logical(request), num_slots, "cpu").long()
        held = held.expand(LAYERS, HEADS, -1).numpy()
        hashes = np.array(path_hashes(request.tokens, self.adapter_of(request.extra_key)))
        row = self.rows.req_to_token[request.req_pool_idx, :num_slots].long()
        self.compare(self.read(row), self.expected(hashes[held], held), self.rounding, request.rid)
        for before, now in zip(request.frozen_view, self.view_of(request), strict=True):
            assert before <= now, "something was dropped without a pass"

    def compare(self, found: torch.Tensor, wanted: torch.Tensor, rounding: float, what: str) -> None:
        if rounding == 0.0:
            assert np.array_equal(bits(found), bits(wanted)), f"{what} holds other rows than were computed"
        elif found.numel():
            distance = float((found.float() - wanted.float()).abs().max())
            assert distance <= rounding, f"{what} holds rows that are off by {distance}"

    def check_rows(self) -> None:
        """Check every node on the GPU against what was computed for its tokens: bit for bit, or within what its codec
        rounds. Layers that are still on their way are left out."""
        arriving = list(self.tiers.loads)
        for node in iter_nodes(self.cache.root_node):
            if node.value is None:
                continue
            load = None if node.kv.load is None else node.kv.load.whole
            hashes = np.array(path_hashes(tokens_to(node), self.adapter_of(node.key.extra_key)))
            for layer in range(LAYERS):
                if load in arriving and not load._here[layer].is_set():
                    continue
                slots, held = held_in(node, layer)
                held = held.numpy().astype(np.int64)
                positions = np.broadcast_to(held, (LAYERS, *held.shape))
                found, wanted = self.read(slots)[:, layer], self.expected(hashes[positions], positions)[:, layer]
                rounding = ROUNDING[node.kv.form.codec] if node.kv.form.has_lossy_codec else 0.0
                self.compare(found, wanted, rounding, f"node {node.id} in form {node.kv.form}, layer {layer},")

    def check_slots(self) -> None:
        """Count slots without the product: each is free, a node's, a request's or a load's, and only that."""
        owners = [("free", RELEASE.free_pages(self.allocator))]
        owners += [(f"node {node.id}", slots_of(node) // self.page) for node in iter_nodes(self.cache.root_node)]
        for request in self.running:
            own = request.cache_protected_len - request.evicpress.holes
            end = request.kv_allocated_len - request.evicpress.holes
            row = self.rows.req_to_token[request.req_pool_idx, own:end].long()
            owners.append((request.rid, row // self.page))
        for load in [*self.tiers.loads._unseen, *self.tiers.loads.late]:
            owners += [("a load", part.slots // self.page) for part in load.parts]
        pages: dict[int, str] = {}
        for name, held in owners:
            for page in torch.unique(held).tolist() if name != "free" else held.tolist():
                assert page not in pages, f"page {page} is {name}'s and {pages[page]}'s"
                pages[page] = name
        assert sorted(pages) == list(range(1, self.allocator.size // self.page + 1)), "a page is nobody's"

    def check_tiers(self) -> None:
        """Check that all above a node on the GPU is there too, that no node is nowhere, that each lock has a holder."""
        locks: dict[int, int] = {}
        holders = [request.last_node for request in self.running] + self.held
        holders += [each.pinned for each in self.tiers.prefetches.by_request.values() if each.pinned is not None]
        holders += [last for load in self.tiers.loads for last in load.last_nodes]
        for holder in holders:
            for node in path_to(holder) if holder is not self.cache.root_node else ():
                locks[node.id] = locks.get(node.id, 0) + 1
        for node in self.cache.nodes.values():
            is_top = node.parent is self.cache.root_node
            assert node.value is not None or node.kv.copies, f"node {node.id} is nowhere"
            assert is_top or node.value is None or node.parent.value is not None, f"node {node.id} hangs in the air"
            assert is_top or node.parent.id in self.cache.nodes
            assert node.kv.is_shadow == is_shadow_name(node.key.extra_key)
            assert not (node.kv.is_shadow and tier_of(node) != Tier.GPU), "a shadow was moved"
            assert node.lock_ref == locks.get(node.id, 0), f"node {node.id} has other locks than holders"

    def check(self) -> None:
        self.is_looking = True
        try:
            background = [request for request in self.waiting if is_shadow_name(request.extra_key)]
            with without(self.waiting, background):  # they queued hit nothing
                Walk.check(self)
            for request in self.running:
                assert all(node.key.extra_key == request.extra_key for node in path_to(request.last_node))
            assert not [name for name in self.tree.storage.errors if name.endswith("internal")]
            assert not self.cache.parts.controller.num_failed, self.cache.parts.controller.num_failed
            self.check_slots()
            self.check_tiers()
            self.check_rows()
        finally:
            self.is_looking = False

    def save_and_close(self) -> None:
        """The server ends, well or by an exception."""
        self.close(is_saved=self.rng.randrange(3) > 0)

    def close(self, *, is_saved: bool = False) -> None:
        if self.is_closed:
            return
        self.is_closed, ssd = True, self.cache.ssd
        self.cache.close(save=is_saved)
        if ssd is not None and not is_saved:
            unlock_folder(ssd.store._lock_fd)  # as the end of the process does
