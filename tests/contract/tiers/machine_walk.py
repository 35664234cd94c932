"""A walk over all that the cache does at once: both tiers, codecs, uneven layers, shadows, and budgets of running
requests, with threads that go on when the walk says so.

Moves and checks are those of the walks of each part; here are moves that none of them has, and what has to be said
differently where all of them meet. ``machine_oracle.py`` has the checks.
"""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

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
)
from tests.contract.decode_budget.test_decode_budgets import SCORES, SINKS, Budgeted, BudgetWalk
from tests.contract.profiling.test_shadows import ShadowMoves
from tests.contract.tiers.machine_oracle import ROUNDING, MachineOracle
from tests.contract.tiers.stepped import Clock, StepArrival
from tests.contract.tiers.test_tiers_model import DIM, HEADS, LAYERS
from tests.unit.geometry.made import make_geometry, make_rope

from sglang_evicpress.core import EXACT, Form
from sglang_evicpress.decode_budget import schedule
from sglang_evicpress.decode_budget.settings import METHODS, DecodeSettings
from sglang_evicpress.flag_groups import LayerFlags
from sglang_evicpress.introspect.operations import IntrospectionError
from sglang_evicpress.patches.attention import req_to_token
from sglang_evicpress.patches.attention.request_holes import RequestHoles
from sglang_evicpress.patches.decode_budget.state import budget_of
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node_kv import PrefixView
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


class MachineWalk(ShadowMoves, MachineOracle):
    """Walk of which ``choose`` makes every choice once it is made. ``held`` are nodes that somebody has locked."""

    visit, retract, decode = BudgetWalk.visit, BudgetWalk.retract, BudgetWalk.decode
    alloc_next, is_stuck = BudgetWalk.alloc_next, BudgetWalk.is_stuck
    defers = False

    def __init__(self, setting: Setting, folder: Path, choose: random.Random) -> None:
        self.setting, self.kinds, self.held = setting, dict[str, int](), list[object]()
        self.rounding = ROUNDING.get(setting.menu, 0.0)
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
                load._copy(range(missing[0], missing[0] + 1))

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

    def note_row(self, where: torch.Tensor, view: PrefixView) -> None:
        super().note_row(where, view)
        self.table.note(where, [view.holes])

    def is_result_due(self, request: Request) -> bool:
        return budget_of(request) is None or self.rng.randrange(2) == 0

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
                if ROUNDING.get(codec, 0.0) <= self.rounding:
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

    # ---- the end

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
