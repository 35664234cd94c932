"""Compact rows: physical lengths go in, logical ones come back, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_evicpress.patches.attention import req_to_token
from sglang_evicpress.patches.attention.request_holes import RequestHoles
from sglang_evicpress.patches.scheduler import paged_allocator

META = torch.device("meta")  # stands for a GPU: reading a value from it raises, wherever that would wait


@pytest.fixture(autouse=True)
def no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(req_to_token, "_table", None)
    monkeypatch.setattr(req_to_token, "_extending", [])


@dataclass(frozen=True, slots=True)
class View:
    """Answer of ``adopt``: physical slots of the prefix and the holes among its tokens."""

    slots: torch.Tensor
    holes: int


@dataclass(slots=True)
class Cache:
    view_of: dict[str, View]
    adopted: list[str] = field(default_factory=list)

    @property
    def views(self) -> Cache:
        return self

    def adopt(self, req: Any) -> View:
        self.adopted.append(req.rid)
        return self.view_of[req.rid]


def put_rows(
    out_cache_loc: torch.Tensor,
    req_rows: torch.Tensor,
    rows_cpu: torch.Tensor,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    extend_lens: torch.Tensor,
    extend_lens_cpu: torch.Tensor,
    prefix_tensors: list[torch.Tensor],
    pool: Any,
) -> None:
    """A writer like SGLang's: prefix, then the new slots, by the lengths it is given."""
    begin = 0
    for i, row in enumerate(rows_cpu.tolist()):
        prefix, end, new = int(prefix_lens[i]), int(seq_lens[i]), int(extend_lens[i])
        assert (prefix, end) == (int(prefix_lens_cpu[i]), int(seq_lens_cpu[i]))
        pool.req_to_token[row, :prefix] = prefix_tensors[i]
        pool.req_to_token[row, prefix:end] = out_cache_loc[begin : begin + new]
        begin += new


@dataclass(slots=True)
class Extend:
    """A batch of three requests: 6 of 10 prefix tokens held, a full prefix of 3, no prefix; and its rows."""

    device: str = "cpu"
    rows: tuple[int, ...] = (2, 5, 1)
    prefix_lens: tuple[int, ...] = (10, 3, 0)
    extend_lens: tuple[int, ...] = (2, 1, 4)
    holes: tuple[int, ...] = (4, 0, 0)

    def batch(self) -> Any:
        views = {}
        for i, (prefix, gap) in enumerate(zip(self.prefix_lens, self.holes, strict=True)):
            first = 100 * (i + 1)
            views[f"r{i}"] = View(torch.arange(first, first + prefix - gap, device=self.device), gap)
        reqs = [SimpleNamespace(rid=rid) for rid in views]
        return SimpleNamespace(reqs=reqs, tree_cache=Cache(views))

    def arguments(self, pool: Any) -> tuple[Any, ...]:
        ends = [p + e for p, e in zip(self.prefix_lens, self.extend_lens, strict=True)]
        arguments: list[Any] = [torch.arange(900, 900 + sum(self.extend_lens), device=self.device)]
        for values in (self.rows, self.prefix_lens, ends, self.extend_lens):
            arguments += [torch.tensor(values, device=self.device), torch.tensor(values)]
        return (*arguments, [torch.full((p,), -1) for p in self.prefix_lens], pool)

    def run(self, writer: Callable[..., Any], pool: Any, batch: Any = None) -> Any:
        batch = batch or self.batch()

        def alloc_for_extend(given: Any) -> str:
            assert given is batch
            req_to_token._around_write_cache_indices(writer, *self.arguments(pool))
            return "allocated"

        assert req_to_token._around_alloc_for_extend(alloc_for_extend, batch) == "allocated"
        return batch


def stale_pool(device: str = "cpu") -> Any:
    return SimpleNamespace(req_to_token=torch.full((8, 16), 77, dtype=torch.int32, device=device))


class TestRequestHoles:
    def test_one_tensor_is_its_own_mirror_on_the_cpu(self) -> None:
        table = RequestHoles(6, "cpu")
        assert table.host is table.device
        assert table.device.dtype == torch.int64 and table.device.tolist() == [0] * 6

    def test_written_rows_are_set_and_others_stay(self) -> None:
        table = RequestHoles(6, "cpu")
        where = torch.tensor([4, 1])
        assert table.write(where, where, [7, 0]).tolist() == [7, 0]
        assert table.write(where[:1], where[:1], [3]).tolist() == [3]
        assert table.device.tolist() == [0, 0, 0, 0, 3, 0]

    def test_the_next_batch_is_remembered_in_batch_order(self) -> None:
        table = RequestHoles(6, "cpu")
        where = torch.tensor([4, 1, 2])
        table.write(where, where, [7, 5, 0])
        table.begin_batch(torch.tensor([1, 3, 4]))
        assert table.batch == [5, 0, 7]
        table.begin_batch(None)
        assert table.batch == []

    def test_rows_with_holes_are_known_until_they_are_written_anew(self) -> None:
        table = RequestHoles(6, "cpu")
        where = torch.tensor([4, 1, 2])
        assert not table.has_holes(where)
        table.write(where, where, [7, 0, 5])
        table.add([3], 16, torch.tensor([3]))
        assert [table.has_holes(torch.tensor([row])) for row in range(6)] == [False, False, True, True, True, False]
        assert table.has_holes(torch.tensor([1, 2])) and not table.has_holes(torch.tensor([0, 1, 5]))
        table.write(where, where, [0, 3, 0])
        assert [table.has_holes(torch.tensor([row])) for row in range(6)] == [False, True, False, True, False, False]
        table.begin_batch(torch.tensor([1, 3, 4]))
        assert table.batch == [3, 16, 0]
        table.write(torch.tensor([1, 3]), torch.tensor([1, 3]), [0, 0])
        table.begin_batch(torch.tensor([1, 3, 4]))
        assert not any(table.batch)

    def test_no_table_before_the_attention_backend_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="table of holes"):
            req_to_token.table()
        req_to_token._after_init_new(None, None, SimpleNamespace(req_pool_indices_cpu=torch.tensor([1])), None)

    def test_a_forward_batch_of_the_right_rows_is_begun(self) -> None:
        table = RequestHoles(6, "cpu")
        req_to_token.attach(table)
        table.write(torch.tensor([3]), torch.tensor([3]), [9])
        req_to_token._after_init_new(None, None, SimpleNamespace(req_pool_indices_cpu=torch.tensor([2, 3])), None)
        assert table.batch == [0, 9]


class TestExtend:
    def test_rows_are_physical_and_left_justified(self) -> None:
        req_to_token.attach(RequestHoles(8, "cpu"))
        pool, case = stale_pool(), Extend()
        batch = case.run(put_rows, pool)
        table = pool.req_to_token
        assert table[2].tolist() == [*range(100, 106), 900, 901] + [0] * 8
        assert table[5].tolist() == [200, 201, 202, 902] + [77] * 12
        assert table[1].tolist() == [903, 904, 905, 906] + [77] * 12
        assert req_to_token.table().device.tolist() == [0, 0, 4, 0, 0, 0, 0, 0]
        assert batch.tree_cache.adopted == ["r0", "r1", "r2"]

    def test_a_row_that_is_used_again_forgets_its_holes(self) -> None:
        req_to_token.attach(RequestHoles(8, "cpu"))
        pool = stale_pool()
        Extend().run(put_rows, pool)
        Extend(holes=(0, 1, 0)).run(put_rows, pool)
        assert req_to_token.table().device.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
        Extend(holes=(0, 0, 0)).run(put_rows, pool)
        assert req_to_token.table().device.tolist() == [0] * 8

    def test_without_holes_the_writer_gets_the_lengths_as_they_are(self) -> None:
        req_to_token.attach(RequestHoles(8, "cpu"))
        case, calls = Extend(holes=(0, 0, 0)), []
        case.run(lambda *arguments: calls.append(arguments), stale_pool())
        for given, wanted in zip(calls[0][1:9], case.arguments(None)[1:9], strict=True):
            assert torch.equal(given, wanted) and given.dtype == wanted.dtype

    def test_a_prefix_without_any_slot_is_left_empty(self) -> None:
        req_to_token.attach(RequestHoles(8, "cpu"))
        pool = stale_pool()
        Extend(holes=(10, 3, 0)).run(put_rows, pool)
        assert pool.req_to_token[2, :4].tolist() == [900, 901, 0, 0]
        assert pool.req_to_token[5, :5].tolist() == [902, 0, 0, 0, 0]

    def test_the_batch_is_forgotten_after_an_error(self) -> None:
        def fail(batch: Any) -> None:
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            req_to_token._around_alloc_for_extend(fail, object())
        assert req_to_token._extending == []

    def test_lengths_keep_their_types(self) -> None:
        req_to_token.attach(RequestHoles(8, "cpu"))
        case = Extend()
        arguments = list(case.arguments(stale_pool()))
        arguments[3], arguments[5] = arguments[3].to(torch.int32), arguments[5].to(torch.int32)
        types: list[torch.dtype] = []
        req_to_token._extending.append(case.batch())
        req_to_token._around_write_cache_indices(lambda *given: types.extend(t.dtype for t in given[3:7]), *arguments)
        assert types == [torch.int32, torch.int64, torch.int32, torch.int64]


class TestDecode:
    def batch(self, device: str = "cpu") -> Any:
        where = torch.tensor([2, 5, 1])
        return SimpleNamespace(
            seq_lens=torch.tensor([12, 4, 4], device=device),
            seq_lens_cpu=torch.tensor([12, 4, 4]),
            req_pool_indices=where.to(device),
            req_pool_indices_cpu=where,
        )

    def table(self, device: torch.device | str = "cpu") -> RequestHoles:
        table = RequestHoles(8, device)
        table.note(torch.tensor([2, 1]), [4, 3])
        req_to_token.attach(table)
        return table

    def test_lengths_are_physical_inside_and_logical_again_after(self) -> None:
        self.table()
        batch, seen = self.batch(), []

        def original(given: Any, token_per_req: int) -> str:
            seen.append((given.seq_lens.tolist(), given.seq_lens_cpu.tolist(), token_per_req))
            return "slots"

        before = batch.seq_lens, batch.seq_lens_cpu
        assert req_to_token._around_alloc_for_decode(original, batch, 1) == "slots"
        assert seen == [([8, 4, 1], [8, 4, 1], 1)]
        assert batch.seq_lens is before[0] and batch.seq_lens_cpu is before[1]
        assert batch.seq_lens.tolist() == [12, 4, 4]

    def test_lengths_are_logical_again_after_an_error(self) -> None:
        self.table()
        batch = self.batch()
        before = batch.seq_lens, batch.seq_lens_cpu

        def fail(given: Any, token_per_req: int) -> None:
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            req_to_token._around_alloc_for_decode(fail, batch, 1)
        assert (batch.seq_lens, batch.seq_lens_cpu) == before

    def test_without_holes_the_very_same_tensors_go_in(self) -> None:
        req_to_token.attach(RequestHoles(8, "cpu"))
        batch = self.batch()
        before = batch.seq_lens
        req_to_token._around_alloc_for_decode(lambda given, _: given.seq_lens, batch, 1)
        assert batch.seq_lens is before


class TestNoWaiting:
    """On ``meta`` tensors .item(), .cpu(), .tolist(), bool() and boolean masks raise."""

    @pytest.fixture(autouse=True)
    def pinned(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
        """Pinning needs a GPU; here it is only recorded."""
        pinned: list[torch.Tensor] = []
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
        yield pinned

    @pytest.mark.parametrize("wait", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, bool])
    def test_control_reading_the_device_raises(self, wait: Callable[[torch.Tensor], object]) -> None:
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait(torch.zeros(1, device=META))

    def test_writing_the_table_copies_from_pinned_memory(self, pinned: list[torch.Tensor]) -> None:
        table = RequestHoles(8, META)
        where = torch.tensor([4, 1])
        moved = table.write(where.to(META), where, [7, 5])
        assert moved.device == META and [tensor.tolist() for tensor in pinned] == [[7, 5]]
        assert table.host.tolist() == [0, 5, 0, 0, 7, 0, 0, 0]

    def test_writing_rows(self) -> None:
        req_to_token.attach(RequestHoles(8, META))
        calls: list[Any] = []
        Extend(device="meta").run(lambda *given: calls.append(given), stale_pool("meta"))
        prefix_lens, prefix_lens_cpu = calls[0][3:5]
        assert prefix_lens.device == META and prefix_lens_cpu.tolist() == [6, 3, 0]
        assert calls[0][6].tolist() == [8, 4, 4]
        assert [len(prefix) for prefix in calls[0][9]] == [6, 3, 0]

    def test_decoding(self) -> None:
        TestDecode().table(META)
        seen: list[Any] = []
        batch = TestDecode().batch("meta")
        req_to_token._around_alloc_for_decode(
            lambda given, _: seen.append((given.seq_lens, given.seq_lens_cpu)), batch, 1
        )
        assert seen[0][0].device == META and seen[0][1].tolist() == [8, 4, 1]


def allocator(free_pages: list[int], page_size: int, released: list[int] | None = None) -> Any:
    """Only what the two hooks use of SGLang's paged allocator."""
    fake = SimpleNamespace(
        device="cpu",
        page_size=page_size,
        need_sort=released is not None,
        free_pages=torch.tensor(free_pages, dtype=torch.int64),
        release_pages=torch.tensor(released or [], dtype=torch.int64),
    )

    def merge_and_sort_free() -> None:
        fake.free_pages = torch.cat([fake.free_pages, fake.release_pages]).sort().values
        fake.release_pages = fake.release_pages[:0]

    fake.merge_and_sort_free = merge_and_sort_free
    return fake


def refuse(*args: Any) -> None:
    raise AssertionError("SGLang's Triton kernels were asked for on the CPU")


class TestPagedAllocator:
    def extend(self, fake: Any, prefix_lens: list[int], seq_lens: list[int], last: list[int]) -> Any:
        begins, ends = torch.tensor(prefix_lens), torch.tensor(seq_lens)
        new = int((ends - begins).sum())
        last_loc = torch.tensor(last)
        return paged_allocator._around_alloc_extend(refuse, fake, begins, begins, ends, ends, last_loc, new, None)

    def decode(self, fake: Any, seq_lens: list[int], last: list[int]) -> Any:
        ends = torch.tensor(seq_lens)
        return paged_allocator._around_alloc_decode(refuse, fake, ends, ends, torch.tensor(last))

    def test_a_partial_page_is_filled_before_pages_are_taken(self) -> None:
        fake = allocator([5, 2, 9], 4)
        slots = self.extend(fake, [6, 0], [11, 3], [33, -1])
        assert slots.tolist() == [34, 35, 20, 21, 22, 8, 9, 10]
        assert slots.dtype == torch.int64 and fake.free_pages.tolist() == [9]

    def test_decode_opens_a_page_only_where_one_is_full(self) -> None:
        fake = allocator([5, 2], 4)
        assert self.decode(fake, [7, 9, 4], [41, 63, 14]).tolist() == [42, 20, 15]
        assert fake.free_pages.tolist() == [2]

    def test_too_few_pages_take_none(self) -> None:
        fake = allocator([5], 4)
        assert self.extend(fake, [0], [5], [-1]) is None
        assert self.decode(fake, [5, 9], [3, 11]) is None
        assert fake.free_pages.tolist() == [5]

    def test_released_pages_are_merged_when_the_free_ones_do_not_suffice(self) -> None:
        fake = allocator([5], 4, released=[3, 2])
        assert self.extend(fake, [0], [5], [-1]).tolist() == [8, 9, 10, 11, 12]
        assert fake.free_pages.tolist() == [5] and len(fake.release_pages) == 0

    def test_other_devices_keep_the_kernels(self) -> None:
        calls: list[int] = []
        fake = SimpleNamespace(device="cuda")
        paged_allocator._around_alloc_extend(lambda *given: calls.append(len(given)), fake, *range(7))
        paged_allocator._around_alloc_decode(lambda *given: calls.append(len(given)), fake, *range(3))
        assert calls == [8, 4]
