"""Inputs of attention where layers keep different numbers of tokens: each group of layers plans over its own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from tests.contract.attention.test_backend_inputs import (
    Request,
    World,
    assert_ragged,
    flashattention,  # noqa: F401 - a fixture
    flashattention_over,
    flashinfer_backend_over,
    host_as_cuda,  # noqa: F401 - a fixture
    indptr,
    triton_backend_over,
)

from sglang_evicpress.patches.attention import group_rows
from sglang_evicpress.patches.attention.group_rows import GroupRows
from sglang_evicpress.patches.attention.layer_groups import LayerGroupBackends, _after_can_run_graph
from sglang_evicpress.patches.tree.node_kv import GroupSlots, PrefixView
from sglang_evicpress.policy.layer_counts import LayerGroups

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

GROUPS = LayerGroups((0, 1, 1, 2), {"b": (4, 2, 1)})


@dataclass(slots=True)
class Planned:
    """A world whose rows are also written for groups of layers; ``slots`` are what each must read, by group and row."""

    world: World
    rows: GroupRows
    slots: list[dict[int, list[int]]]
    requests: tuple[Request, ...]

    @classmethod
    def of(
        cls,
        requests: tuple[Request, ...],
        shared: dict[int, tuple[list[int], ...]],
        device: str,
        groups: LayerGroups = GROUPS,
        page_size: int = 1,
    ) -> Planned:
        """``shared``: by row, the indices of its first slots that each group reads."""
        world = World.of(requests, device, page_size)
        rows = GroupRows(groups, world.rows)
        views, expected = [], [dict(world.slots) for _ in range(groups.num_groups)]
        for request in requests:
            slots = torch.tensor(world.slots[request.row][: request.held], dtype=torch.int64, device=device)
            taken = None
            if request.row in shared:
                of_groups = [torch.tensor(each, dtype=torch.int64, device=device) for each in shared[request.row]]
                num_shared = max(len(each) for each in of_groups)
                taken = GroupSlots(num_shared, tuple(slots[each] for each in of_groups))
                for group, each in enumerate(of_groups):
                    own = world.slots[request.row][num_shared:]
                    expected[group][request.row] = slots[each].tolist() + own
            views.append(PrefixView(slots, request.holes, shared=taken))
        where = torch.tensor([request.row for request in requests])
        rows.write(where.to(device), where, views)
        rows.begin_batch(where)
        return cls(world, rows, expected, requests)

    def backends(self, make: Callable[[World], Any]) -> tuple[Any, list[Any], LayerGroupBackends]:
        """The backend that SGLang made, those of all groups, and what plans them."""
        main = make(self.world)
        tables = self.rows.tables
        assert [table.group for table in tables] == list(range(self.rows.groups.num_groups))
        others = [make(World(table.rows, {}, table.holes, self.world.device)) for table in tables]
        return main, others, LayerGroupBackends(main, others, self.rows, 0)

    def wanted(self, group: int, *, prefix_only: bool = False) -> list[list[int]]:
        found = [self.slots[group][request.row] for request in self.requests]
        if prefix_only:
            return [slots[: len(slots) - request.new] for slots, request in zip(found, self.requests, strict=True)]
        return found


MIXED = (Request(3, 40, 25, 1), Request(7, 9, 0, 1), Request(1, 600, 17, 1))
SHARED = {3: (list(range(12)), [0, 3, 4, 11], [1, 2]), 1: (list(range(500)), list(range(0, 500, 2)), [499])}
OTHER_FULLEST = {row: (second, first, third) for row, (first, second, third) in SHARED.items()}
EXTEND = tuple(Request(each.row, each.prefix, each.holes, new) for each, new in zip(MIXED, (6, 4, 11), strict=True))


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
@pytest.mark.parametrize("shared", [SHARED, OTHER_FULLEST], ids=["fullest as in the menu", "another is the fullest"])
def test_triton_plans_each_group_over_its_own_slots(
    mode: ForwardMode, shared: dict[int, tuple[list[int], ...]], device: str
) -> None:
    """Which group fills every slot of a node is the node's own: a budget that is searched, an entry of a server with
    another budget, or what a split leaves may have another one than the menu."""
    requests = MIXED if mode.is_decode() else EXTEND
    planned = Planned.of(requests, shared, device)
    _, backends, planner = planned.backends(triton_backend_over)
    batch = planned.world.batch(requests, mode)
    planner.plan(batch, planned.world.table)
    for group, backend in enumerate(backends):
        plan = backend.forward_metadata
        wanted = planned.wanted(group, prefix_only=mode.is_extend())
        assert_ragged(planned.world, plan.kv_indptr, plan.kv_indices, wanted)


@pytest.mark.usefixtures("host_as_cuda")
def test_flashinfer_plans_each_group_over_its_own_slots(device: str) -> None:
    planned = Planned.of(MIXED, SHARED, device)
    _, backends, planner = planned.backends(flashinfer_backend_over)
    planner.plan(planned.world.batch(MIXED, ForwardMode.DECODE), planned.world.table)
    for group in range(3):
        kv_indptr, kv_indices, last_page_lens, *_ = backends[group].decode_wrappers[0].arguments
        assert_ragged(planned.world, kv_indptr, kv_indices, planned.wanted(group))
        assert last_page_lens.tolist() == [1] * len(MIXED)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
@pytest.mark.parametrize("page_size", [1, 16])
def test_flash_attention_plans_each_group_over_its_own_pages(
    flashattention: ModuleType,  # noqa: F811
    page_size: int,
    mode: ForwardMode,
    device: str,
) -> None:
    new = (1, 1, 1) if mode.is_decode() else (6, 40, 11)
    requests = (Request(3, 112, 48, new[0]), Request(7, 16, 0, new[1]), Request(1, 600, 64, new[2]))
    pages = {3: ([0, 1, 2], [0, 2], [1]), 1: (list(range(30)), list(range(0, 30, 3)), [])}
    shared = {
        row: tuple([page * 16 + offset for page in of_group for offset in range(16)] for of_group in groups)
        for row, groups in pages.items()
    }
    planned = Planned.of(requests, shared, device, page_size=16)  # whole pages are whole slots, too
    _, backends, planner = planned.backends(lambda world: flashattention_over(flashattention, world, page_size))
    planner.plan(planned.world.batch(requests, mode), planned.world.table)
    for group in range(3):
        plan, wanted = backends[group].forward_metadata, planned.wanted(group)
        assert plan.cache_seqlens_int32.tolist() == [len(slots) for slots in wanted]
        assert plan.cu_seqlens_k.tolist() == indptr([len(slots) for slots in wanted])
        for row, slots in zip(plan.page_table, wanted, strict=True):
            expected = [slot // page_size for slot in slots[::page_size]]
            assert row[: len(expected)].tolist() == expected


def test_steps_follow_one_another(device: str) -> None:
    """Each decode step brings one more token; rows that do not differ come along when they share a batch."""
    planned = Planned.of(EXTEND, SHARED, device)
    _, backends, planner = planned.backends(triton_backend_over)
    planner.plan(planned.world.batch(EXTEND, ForwardMode.EXTEND), planned.world.table)
    requests, taken = EXTEND, 90_000
    for _ in range(3):
        requests = tuple(Request(each.row, each.logical, each.holes, 1) for each in requests)
        for request in requests:
            taken += 1
            planned.world.rows[request.row, request.physical - 1] = taken
            for slots in planned.slots:
                slots[request.row] = [*slots[request.row], taken]
        planned.requests = requests
        planner.plan(planned.world.batch(requests, ForwardMode.DECODE), planned.world.table)
        for group in range(3):
            plan = backends[group].forward_metadata
            assert_ragged(planned.world, plan.kv_indptr, plan.kv_indices, planned.wanted(group))


def test_a_row_that_was_written_again_is_read_again(device: str) -> None:
    """The tree gives a running request its own slots for KV that both hold."""
    planned = Planned.of(EXTEND, SHARED, device)
    _, backends, planner = planned.backends(triton_backend_over)
    batch = planned.world.batch(EXTEND, ForwardMode.EXTEND)
    planner.plan(batch, planned.world.table)
    begin = 12 + 1  # behind what it shares of row 3, and one token of its own
    planned.world.rows[3, begin:20] = torch.arange(95_000, 95_007, dtype=torch.int32, device=device)
    planned.rows.note_written(3, begin)
    for slots in planned.slots:
        slots[3] = [*slots[3][: len(slots[3]) - 8], *range(95_000, 95_007), slots[3][-1]]
    planner.plan(planned.world.batch(EXTEND, ForwardMode.EXTEND), planned.world.table)
    for table in planned.rows.tables:
        held = len(planned.slots[table.group][3])
        assert table.rows[3, : held - 1].tolist() == planned.slots[table.group][3][: held - 1]
    del backends


def test_a_row_given_to_another_request_forgets_the_first(device: str) -> None:
    planned = Planned.of(MIXED, SHARED, device)
    where = torch.tensor([3, 1])
    slots = torch.arange(5, device=device)
    planned.rows.write(where.to(device), where, [PrefixView(slots), PrefixView(slots, 2)])
    planned.rows.begin_batch(torch.tensor([3, 7, 1]))
    assert planned.rows.batch == []
    for table in planned.rows.tables:
        assert table.holes.host[[3, 1]].tolist() == [0, 2]


class Recorder:
    """A backend that remembers the layers it computed and what it planned."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.plans: list[list[int]] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.plans.append(forward_batch.seq_lens.tolist())

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        self.layers.append(layer.layer_id)
        return q

    forward_decode = forward_extend


def attend(backend: Any, num_layers: int, first: int = 0) -> None:
    for layer in range(first, first + num_layers):
        backend.forward_decode(None, None, None, SimpleNamespace(layer_id=layer), None)
        backend.forward_extend(None, None, None, SimpleNamespace(layer_id=layer), None)


def test_a_layer_is_computed_by_the_backend_of_its_group(device: str) -> None:
    planned = Planned.of(MIXED, SHARED, device)
    main, backends, planner = planned.backends(lambda world: Recorder())
    planner.plan(planned.world.batch(MIXED, ForwardMode.DECODE), planned.world.table)
    attend(main, 4)
    assert [backend.layers for backend in backends] == [[0, 0], [1, 1, 2, 2], [3, 3]]
    lens = [request.physical for request in MIXED]
    fewer = [[8, 0, 250], [10, 0, 499]]
    assert [backend.plans for backend in backends[1:]] == [
        [[length - back for length, back in zip(lens, backs, strict=True)]] for backs in fewer
    ]


def test_a_batch_whose_rows_do_not_differ_costs_nothing(device: str) -> None:
    planned = Planned.of(MIXED, {}, device)
    main, backends, planner = planned.backends(lambda world: Recorder())
    planner.plan(planned.world.batch(MIXED, ForwardMode.DECODE), planned.world.table)
    attend(main, 4)
    assert main.layers == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [backend.plans for backend in backends[1:]] == [[], []]
    assert all(not table.rows.any() for table in planned.rows.tables)


def test_a_made_up_batch_is_planned_for_no_group(device: str) -> None:
    planned = Planned.of(MIXED, SHARED, device)
    main, backends, planner = planned.backends(lambda world: Recorder())
    planner.plan(None, planned.world.table)
    attend(main, 4)
    assert main.layers == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [backend.plans for backend in backends[1:]] == [[], []]


def test_only_a_batch_whose_rows_differ_is_kept_from_graphs(device: str) -> None:
    planned = Planned.of(MIXED, SHARED, device)
    try:
        group_rows.attach(planned.rows)
        assert _after_can_run_graph(True, None, None) is False
        planned.rows.begin_batch(torch.tensor([7]))
        assert _after_can_run_graph(True, None, None) is None
        planned.rows.begin_batch(None)
        assert _after_can_run_graph(True, None, None) is None
        group_rows.attach(None)
        assert _after_can_run_graph(True, None, None) is None
    finally:
        group_rows.attach(None)
