"""The scheduler thread never reads the device: not per step, not in a pass, not when something is loaded.

``meta`` tensors stand for a GPU: .item(), .cpu(), .tolist(), bool() and boolean masks raise on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from tests.contract.releases import FakePages, FakeRequest

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.decode_budget import schedule, scores
from sglang_evicpress.decode_budget.settings import METHODS, DecodeSettings
from sglang_evicpress.decode_budget.stats import RequestStats
from sglang_evicpress.device import HostCopy, to_device
from sglang_evicpress.patches.attention import req_to_token
from sglang_evicpress.patches.attention.group_rows import GroupRows
from sglang_evicpress.patches.attention.physical_lengths import physical_view
from sglang_evicpress.patches.attention.prompt_queries import PromptQueries
from sglang_evicpress.patches.attention.query_ring import QueryRing
from sglang_evicpress.patches.attention.request_holes import RequestHoles
from sglang_evicpress.patches.compat import sglang_0_5_23
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.decode_budget import passes
from sglang_evicpress.patches.decode_budget.passes import DecodePasses
from sglang_evicpress.patches.decode_budget.records import BudgetRecords
from sglang_evicpress.patches.decode_budget.state import DecodeState, num_physical
from sglang_evicpress.patches.decode_budget.trace import DecodeTrace
from sglang_evicpress.patches.scheduler.paged_allocator import free_whole_pages
from sglang_evicpress.patches.tiers.placement import Placement
from sglang_evicpress.patches.tree import layer_press
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.layer_press import LayerPress
from sglang_evicpress.patches.tree.node import view_of_path
from sglang_evicpress.patches.tree.node_kv import GroupSlots, NodeKV, NodeSlots, PrefixView
from sglang_evicpress.patches.tree.slot_ledger import SlotLedger
from sglang_evicpress.policy.layer_counts import LayerGroups
from sglang_evicpress.press import QueryWindow, get_press
from sglang_evicpress.survivors import Filling, SurvivorLayout
from sglang_evicpress.tiers.entry.copies import Copy

pytestmark = pytest.mark.sglang

META = "meta"
LAYERS, HEADS, Q_HEADS, DIM, PAGE = 2, 2, 4, 8, 4
NUM_SLOTS, NUM_ROWS, CONTEXT = 400, 6, 120


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Pinning needs a GPU; here it is only recorded."""
    found: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: found.append(self) or self)
    yield found


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> RequestHoles:
    made = RequestHoles(NUM_ROWS, META)
    monkeypatch.setattr(req_to_token, "_table", made)
    return made


def slots(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64, device=META)


def layout(num_slots: int, num_tokens: int) -> SurvivorLayout:
    """Layout made on the device and read since, or from a lower tier: on the host."""
    logical = torch.arange(num_tokens - num_slots, num_tokens)
    return SurvivorLayout(
        HostCopy(logical.to(torch.int32).expand(LAYERS, HEADS, -1).clone()), HostCopy(logical), num_slots
    )


@pytest.mark.parametrize("is_read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, bool])
def test_control_reading_the_device_raises(is_read: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        is_read(torch.zeros(1, device=META))


def test_what_goes_to_the_device_goes_from_pinned_memory(pinned: list[torch.Tensor]) -> None:
    values = torch.arange(3)
    assert to_device(values, META).is_meta and pinned == [values]
    assert to_device(values, "cpu") is values and len(pinned) == 1


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED])
def test_a_step_from_its_rows_to_its_plan(mode: ForwardMode, table: RequestHoles) -> None:
    where, lens = torch.tensor([3, 1, 4]), torch.tensor([40, 9, 33])
    table.write(where.to(META), where, [25, 0, 32])
    table.add([1], 4, slots(1))
    table.begin_batch(where)
    batch = SimpleNamespace(
        forward_mode=mode,
        batch_size=4,  # padded
        req_pool_indices=torch.zeros(4, dtype=torch.int64, device=META),
        seq_lens=torch.zeros(4, dtype=torch.int64, device=META),
        seq_lens_cpu=torch.cat([lens, torch.ones(1, dtype=torch.int64)]),
        seq_lens_sum=83,
        extend_prefix_lens=torch.zeros(4, dtype=torch.int32, device=META) if mode.is_extend() else None,
        extend_prefix_lens_cpu=[39, 8, 32, 0] if mode.is_extend() else None,
    )
    view = physical_view(batch, table)
    assert view.seq_lens.is_meta and view.seq_lens_cpu.tolist() == [15, 5, 1, 1]
    assert view.seq_lens_sum == 22
    if mode.is_extend():
        assert view.extend_prefix_lens.is_meta and view.extend_prefix_lens_cpu == [14, 4, 0, 0]


def test_rows_that_differ_between_layers() -> None:
    """Written with a prefix, and brought up to date by steps and by what was computed at once."""
    groups = LayerGroups((0, 1), {"b": (2, 1)})
    rows = GroupRows(groups, torch.zeros(NUM_ROWS, CONTEXT, dtype=torch.int32, device=META))
    where = torch.tensor([3, 1])
    views = [PrefixView(slots(20), 5, shared=GroupSlots(20, (slots(20), slots(8)))), PrefixView(slots(4))]
    rows.write(where.to(META), where, views)
    rows.begin_batch(where)
    assert rows.batch == [3, 1]
    assert [table.holes.batch for table in rows.tables] == [[5, 0], [17, 0]]
    rows.bring_up_to_date([30, 10])
    rows.bring_up_to_date([31, 11])
    rows.note_written(3, 25)
    rows.bring_up_to_date([32, 12])


def test_compression_of_layers_to_different_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, survivors and places stay on the device; what a request then takes is not waited for either."""
    groups = LayerGroups((0, 1), {"b": (2, 1)})
    buffers = [[torch.zeros(NUM_SLOTS, HEADS, DIM, device=META) for _ in range(LAYERS)] for _ in range(2)]
    press = LayerPress(*buffers, groups, PAGE, 4)
    monkeypatch.setattr(layer_press, "compact", lambda *_: None)  # launches a kernel
    kernel = "sglang_evicpress.press.layers.select_survivors"  # another one
    monkeypatch.setattr(
        kernel, lambda scores, count: torch.zeros(*scores.shape[:2], count, dtype=torch.int32, device=META)
    )
    made, value = press.compress(
        lambda layers: get_press("knorm"), NodeSlots(slots(64), None, 0, 64, None), (32, 8), 1.0
    )
    assert made.num_slots == 32 and made.layer_slots == (32, 8) and value.is_meta
    node = SimpleNamespace(
        key=range(64), value=value, kv=SimpleNamespace(layout=made, slots=slots(32), form=EXACT, is_lossy_prefix=False)
    )
    monkeypatch.setattr(Filling, "index_of", lambda self, group, device: slots(self.counts[group]))
    view = view_of_path([node], torch.device(META))
    assert view.shared is not None and [len(each) for each in view.shared.groups] == [32, 8]


def layer(index: int) -> Any:
    return SimpleNamespace(layer_id=index, tp_q_head_num=Q_HEADS, qk_head_dim=DIM)


def test_the_ring_of_queries() -> None:
    ring = QueryRing(torch.zeros(LAYERS, NUM_ROWS, 4, Q_HEADS, DIM, device=META), first_layer=0)
    decode = SimpleNamespace(req_pool_indices=slots(3), seq_lens=slots(3))
    extend = SimpleNamespace(req_pool_indices=slots(3), extend_prefix_lens_cpu=[0, 7, 9], extend_seq_lens_cpu=[9, 2, 1])
    for index in range(LAYERS):
        ring.observe_decode(torch.zeros(3, Q_HEADS * DIM, device=META), layer(index), decode)
        ring.observe_extend(torch.zeros(12, Q_HEADS * DIM, device=META), layer(index), extend)
    queries, positions = ring.windows_of([2], 4, [40])
    assert queries.shape == (LAYERS, 1, 4, Q_HEADS, DIM) and positions.shape == (1, 4)


def test_windows_of_prompts() -> None:
    prompt_queries = PromptQueries(4, LAYERS, 0, 1 << 20)
    reqs = [SimpleNamespace(rid="a"), SimpleNamespace(rid="b")]
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        reqs=reqs,
        decoding_reqs=[reqs[1]],
        extend_lens=[9, 1],
        seq_lens_cpu=torch.tensor([20, 31]),
    )
    prompt_queries.begin_batch(batch)
    for index in range(LAYERS):
        prompt_queries.observe(torch.zeros(10, Q_HEADS * DIM, device=META), layer(index))
    key, lost = prompt_queries.keep("a", 11)
    window = prompt_queries.kept(key)
    assert lost == [] and isinstance(window, QueryWindow) and window.queries.is_meta
    assert prompt_queries.window_of("b", 0) is None


@pytest.mark.parametrize("count", [1, 4, 7])
def test_pages_that_are_freed(count: int) -> None:
    allocator = FakePages(page_size=PAGE, free_pages=slots(3))
    free_whole_pages(allocator, slots(count))
    assert len(allocator.free_pages) == 3 + -(-count // PAGE)


def test_a_node_that_is_loaded_gets_its_slots(pinned: list[torch.Tensor]) -> None:
    ledger, told = SlotLedger(lambda slots: None), list[object]()
    told_of = lambda *_: 1.0, told.append
    placement = Placement(SimpleNamespace(), SimpleNamespace(), ledger, *told_of, lambda form, size: size, 16)
    node = SimpleNamespace(kv=NodeKV(), key=[0] * 20, value=None, lock_ref=1)
    held = layout(8, 20)
    copy = Copy(Tier.HOST, Form("keydiff", 0.5), None, 0, 8, held, False, None)  # type: ignore[arg-type]
    placement.place(node, copy, slots(8))
    assert node.value.is_meta and len(node.value) == 20 and ledger.protected == 8 and told == [node]
    assert any(each is held.logical for each in pinned)


def select(values: torch.Tensor, num_kept: int) -> torch.Tensor:
    return values.topk(num_kept).indices.sort().values.int()


class Tree:
    """Part of the cache that a pass touches, with the pool on the device; calls of the allocator are recorded."""

    def __init__(self, page_size: int) -> None:
        self.page_size, self.device, self.root_node = page_size, META, SimpleNamespace(parent=None)
        buffers = [torch.zeros(NUM_SLOTS, HEADS, DIM, device=META) for _ in range(2 * LAYERS)]
        pool = SimpleNamespace(
            start_layer=0, layer_num=LAYERS, _get_key_buffer=buffers[:LAYERS].__getitem__,
            _get_value_buffer=buffers[LAYERS:].__getitem__,
        )  # fmt: skip
        self.compressor = Compressor(pool, page_size, 4)
        self.counts: Counter[str] = Counter()
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.zeros(NUM_ROWS, CONTEXT, dtype=torch.int32, device=META)
        )
        self.token_to_kv_pool_allocator = FakePages(
            page_size=page_size,
            free_pages=slots(0),
            alloc=lambda count: self._count("taken", count),
            free=lambda freed: self._count("freed", len(freed)),
        )

    def make_whole_room(self, num_tokens: int) -> None:
        """There is room."""

    def _count(self, name: str, count: int) -> torch.Tensor:
        self.counts[name] += count
        return slots(count)

    def inc_lock_ref(self, node: Any) -> None:
        """The root, which nobody holds."""
        assert node is self.root_node

    def dec_lock_ref(self, node: Any) -> None:
        self.counts["unlocked"] += 1

    def lock(self, node: Any) -> object:
        """A later SGLang's; a node is its own receipt here."""
        self.inc_lock_ref(node)
        return node

    def unlock(self, lock: Any) -> None:
        self.dec_lock_ref(lock)


@pytest.mark.parametrize("score", ["value_key_ratio", "keydiff", "h2o", "tova", "r_kv"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("page_size", [1, PAGE])
def test_a_pass_over_a_row_with_a_compressed_prefix(
    page_size: int, method: str, score: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On the CPU these two count; the kernels for CUDA do not.
    monkeypatch.setattr(scores, "select_survivors", select)
    monkeypatch.setattr(passes, "fill_holes", lambda *arguments: None)
    ring = QueryRing(torch.zeros(LAYERS, NUM_ROWS, 4, Q_HEADS, DIM, device=META), first_layer=0)
    monkeypatch.setattr(QueryRing, "active", ring)
    cache: Any = Tree(page_size)
    made = DecodePasses(cache, cache.compressor, BudgetRecords(META))
    upper = SimpleNamespace(parent=cache.root_node, key=[0] * 40, kv=NodeKV(layout=layout(20, 40)))
    lower = SimpleNamespace(parent=upper, key=[0] * 8, kv=NodeKV())
    settings = DecodeSettings(48, method, score, interval=4, protected_pages=("first", "newest"))  # type: ignore[arg-type]
    state = DecodeState(settings, RequestStats(), num_cached=48, in_tree=True, trace=DecodeTrace())
    req = FakeRequest(
        kv_budget=state, req_pool_idx=3, evicpress=PrefixView(slots(28), 20, True, True), last_node=lower, lock=lower,
        cache_protected_len=48, kv_allocated_len=80, kv_committed_len=80, prefix_indices=slots(48),
    )  # fmt: skip
    assert num_physical(req) == 60
    assert made.make_passes([req])
    kept = schedule.target(settings, 60, page_size)
    assert num_physical(req) == kept and state.has_left_tree and cache.counts["unlocked"] == 1
    assert req.last_node is cache.root_node and (RELEASE is not sglang_0_5_23 or req.lock is cache.root_node)
    assert cache.counts["taken"] == -(-kept // page_size) * page_size
    state.is_first_visit = False
    req.kv_allocated_len += 2 * PAGE
    req.kv_committed_len += 2 * PAGE
    before = num_physical(req)
    assert made.make_passes([req]) and num_physical(req) == schedule.target(settings, before, page_size)
    assert req_to_token.table().host[3] == 80 + 2 * PAGE - 20 - num_physical(req)
