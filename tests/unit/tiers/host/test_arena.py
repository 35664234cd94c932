"""The allocator against a map of every granule, and the memory it is about."""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_evicpress.tiers.host import arena as module
from sglang_evicpress.tiers.host.allocator import GRANULE, Extents, Run
from sglang_evicpress.tiers.host.arena import Arena
from sglang_evicpress.tiers.host.memory import Memory

UNIT = 16


def free_runs(extents: Extents) -> list[Run]:
    """By address."""
    return [Run(*item) for item in sorted(extents._free.items())]


class AgainstMap(RuleBasedStateMachine):
    """``owner``: for each granule the allocation that has it, 0 where it is free."""

    @initialize(granules=st.integers(1, 48), spare=st.integers(0, UNIT - 1), max_runs=st.integers(1, 4))
    def start(self, granules: int, spare: int, max_runs: int) -> None:
        self.extents = Extents(granules * UNIT + spare, UNIT, max_runs)
        self.owner = [0] * granules
        self.live: dict[int, tuple[Run, ...]] = {}
        self.freed: list[Run] = []
        self.next_id = 1

    def free_runs(self) -> list[Run]:
        runs, position = [], 0
        for is_free, group in groupby(self.owner, lambda owner: owner == 0):
            size = len(list(group))
            if is_free:
                runs.append(Run(position * UNIT, size * UNIT))
            position += size
        return runs

    def event(self, runs: Sequence[Run], before: int, after: int) -> None:
        for begin, num_bytes in runs:
            assert begin % UNIT == 0 and num_bytes % UNIT == 0 and num_bytes > 0
            for granule in range(begin // UNIT, (begin + num_bytes) // UNIT):
                assert self.owner[granule] == before, "overlap"
                self.owner[granule] = after

    @rule(num_bytes=st.integers(1, 50 * UNIT))
    def alloc(self, num_bytes: int) -> None:
        need = -(-num_bytes // UNIT) * UNIT
        sizes = sorted((run.num_bytes for run in self.free_runs()), reverse=True)
        runs = self.extents.alloc(num_bytes)
        if runs is None:
            assert sum(sizes[: self.extents.max_runs]) < need
            return
        fitting = [size for size in sizes if size >= need]
        if fitting:
            (run,) = runs
            assert any(
                free.begin <= run.begin < free.begin + free.num_bytes and free.num_bytes == min(fitting)
                for free in self.free_runs()
            ), "not the best fit"
        assert sum(run.num_bytes for run in runs) == need
        assert len(runs) <= self.extents.max_runs
        self.event(runs, 0, self.next_id)
        self.live[self.next_id] = runs
        self.next_id += 1

    @rule(granules=st.integers(0, 8), spare=st.integers(0, UNIT - 1))
    def grow(self, granules: int, spare: int) -> None:
        self.extents.grow(self.extents.num_bytes + granules * UNIT + spare)
        self.owner += [0] * granules

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        runs = self.live.pop(key)
        given_back = data.draw(st.permutations(runs))[: data.draw(st.integers(1, len(runs)))]
        self.extents.free(given_back)
        self.event(given_back, key, 0)
        self.freed += given_back
        if len(given_back) < len(runs):
            self.live[key] = tuple(run for run in runs if run not in given_back)

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """A run that is free, cut, shifted or made up, alone or after good ones, changes nothing."""
        held = [run for runs in self.live.values() for run in runs]
        bad = [run for run in self.freed if run not in held]
        bad += [Run(run.begin, run.num_bytes + UNIT) for run in held]
        bad += [Run(run.begin + UNIT, run.num_bytes - UNIT) for run in held if run.begin + UNIT not in self.begins()]
        bad += [Run(0, 0), Run(-UNIT, UNIT), Run(1000 * UNIT, UNIT)]
        chosen = [data.draw(st.sampled_from(bad))]
        if held:
            chosen = data.draw(st.sampled_from([chosen, [held[0], *chosen], [held[0], held[0]]]))
        before = (free_runs(self.extents), self.extents.used_bytes)
        with pytest.raises(ValueError, match=r"not in use|comes twice"):
            self.extents.free(chosen)
        assert (free_runs(self.extents), self.extents.used_bytes) == before
        for run in held[:1]:  # still in use: the map gets it back only once
            self.extents.free([run])
            again = self.extents.alloc(run.num_bytes)
            assert again is not None
            key = next(key for key, runs in self.live.items() if run in runs)
            self.event([run], key, 0)
            self.event(again, 0, key)
            self.live[key] = (*(other for other in self.live[key] if other != run), *again)

    def begins(self) -> set[int]:
        return {run.begin for runs in self.live.values() for run in runs}

    @invariant()
    def agrees(self) -> None:
        free = self.free_runs()
        sizes = sorted((run.num_bytes for run in free), reverse=True)
        extents = self.extents
        assert free_runs(extents) == free
        assert extents.largest_free == max(sizes, default=0)
        assert extents.free_bytes == sum(sizes)
        assert extents.used_bytes + extents.free_bytes == extents.num_bytes == len(self.owner) * UNIT
        lost = sum(sizes[extents.max_runs :])
        assert extents.fragmentation == pytest.approx(lost / sum(sizes) if sizes else 0.0)


AgainstMap.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAgainstMap = AgainstMap.TestCase


def test_gathers_the_largest_runs_and_ends_with_the_best_fit() -> None:
    extents = Extents(20 * UNIT, UNIT)
    blocks = [extents.alloc(size * UNIT) for size in (5, 1, 3, 1, 2, 1, 7)]
    for block in blocks[::2]:
        assert block is not None
        extents.free(block)
    assert [run.num_bytes // UNIT for run in free_runs(extents)] == [5, 3, 2, 7]
    assert extents.alloc(9 * UNIT) == (Run(13 * UNIT, 7 * UNIT), Run(10 * UNIT, 2 * UNIT))


@pytest.mark.parametrize(
    ("num_bytes", "granule", "max_runs", "message"),
    [
        (GRANULE - 1, GRANULE, 1, "4095 bytes are less than one granule of 4096"),
        (0, GRANULE, 1, "0 bytes"),
        (-1, GRANULE, 1, "-1 bytes"),
        (100, 0, 1, "granule 0"),
        (100, 1, 0, "max_runs 0"),
    ],
)
def test_refuses_sizes(num_bytes: int, granule: int, max_runs: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Extents(num_bytes, granule, max_runs)


@pytest.mark.parametrize("num_bytes", [0, -5])
def test_refuses_to_allocate_nothing(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"allocation of {num_bytes} bytes"):
        Extents(GRANULE).alloc(num_bytes)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(8 * GRANULE + 100)
    yield made
    made.close()


def test_arena_is_page_aligned_and_rounded_down(arena: Arena) -> None:
    assert arena.num_bytes == arena.extents.num_bytes == arena.data.numel() == 8 * GRANULE
    with pytest.raises(ValueError, match="cannot grow"):
        arena.extents.grow(7 * GRANULE)
    assert arena.data.dtype == torch.uint8
    assert arena.data.data_ptr() % mmap.PAGESIZE == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_pieces_spell_the_payload(seed: int) -> None:
    draw = random.Random(seed)
    arena = Arena(16 * GRANULE)
    taken = [arena.extents.alloc(draw.randrange(1, 3 * GRANULE)) for _ in range(12)]
    held = [runs for runs in taken if runs is not None]
    for runs in held[::2]:
        arena.extents.free(runs)
    total = arena.extents.free_bytes
    runs = arena.extents.alloc(total)
    assert runs is not None and sum(run.num_bytes for run in runs) == total
    payload = draw.randbytes(total)
    position = 0
    while position < total:
        size = draw.randrange(1, total - position + 1)
        for piece in arena.buffers(runs, position, size):
            piece[:] = payload[position : position + len(piece)]
            position += len(piece)
    begin = draw.randrange(total + 1)
    end = draw.randrange(begin, total + 1)
    assert b"".join(arena.buffers(runs, begin, end - begin)) == payload[begin:end]
    pieces = arena.tensors(runs, begin, end - begin)
    assert b"".join(bytes(piece.tolist()) for piece in pieces) == payload[begin:end]
    assert all(piece.data_ptr() >= arena.data.data_ptr() for piece in pieces)
    arena.close()


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 2 * GRANULE + 1), (2 * GRANULE, 1), (-1, 1), (0, -1)])
def test_pieces_outside_the_runs_are_refused(arena: Arena, offset: int, num_bytes: int) -> None:
    runs = arena.extents.alloc(2 * GRANULE)
    assert runs is not None
    with pytest.raises(ValueError, match=f"{num_bytes} bytes"):
        arena.buffers(runs, offset, num_bytes)
    with pytest.raises(ValueError, match=f"{num_bytes} bytes"):
        arena.tensors(runs, offset, num_bytes)


def test_more_memory_than_there_is() -> None:
    num_bytes = 64 * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    with pytest.raises(RuntimeError, match=rf"{num_bytes} bytes cannot be had, \d+ bytes are available"):
        Arena(num_bytes)


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_memory_that_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(module.mmap, "mmap", refuse)
    with pytest.raises(RuntimeError, match=rf"{GRANULE} bytes cannot be had, \d+ bytes are available"):
        Arena(GRANULE)


class FakeCuda:
    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append((address, num_bytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append((address,))
        return 0


def test_pinned_and_unpinned_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    arena = Arena(5 * GRANULE, is_pinned=True, step_bytes=2 * GRANULE)
    address = arena.data.data_ptr()
    assert arena.is_pinned and cuda.calls == [(address, 2 * GRANULE, 0)]
    arena.alloc(5 * GRANULE)
    arena.join_growth()
    assert cuda.calls[1:] == [(address + 2 * GRANULE, 2 * GRANULE, 0), (address + 4 * GRANULE, GRANULE, 0)]
    arena.close()
    arena.close()
    assert sorted(cuda.calls[3:]) == [(address + offset * GRANULE,) for offset in (0, 2, 4)]
    Arena(GRANULE).close()
    assert len(cuda.calls) == 6


def test_later_steps_are_pinned_for_the_device_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCuda(0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    name = "evicpress-host-growth"
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    arena = Arena(4 * GRANULE, is_pinned=True, step_bytes=2 * GRANULE)
    arena.alloc(2 * GRANULE)
    arena.join_growth()
    assert chosen == [(name, 3)] and arena.extents.num_bytes <= arena.num_bytes
    arena.close()


def test_a_later_step_that_cannot_be_pinned_is_a_full_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    arena = Arena(4 * GRANULE, is_pinned=True, step_bytes=2 * GRANULE)
    cuda.status = 2
    assert arena.alloc(2 * GRANULE) is not None
    arena.join_growth()
    assert arena.alloc(GRANULE) is None and arena.num_bytes == 2 * GRANULE and arena.num_failed == 1
    arena.close()
    assert len(cuda.calls) == 3, "what was not pinned is not unpinned"


def test_pinning_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    with pytest.raises(RuntimeError, match="4096 bytes of host memory cannot be pinned: CUDA error 2"):
        Arena(GRANULE, is_pinned=True)
    assert len(cuda.calls) == 1, "what was not pinned is not unpinned"


def test_pinning_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        Arena(GRANULE, is_pinned=True)


@pytest.mark.parametrize("kind", ["tensor", "buffer"])
def test_closed_under_a_view(arena: Arena, kind: str) -> None:
    """A view outlives the arena and keeps its bytes; new ones are refused."""
    runs = arena.extents.alloc(GRANULE)
    assert runs is not None
    view = arena.tensors(runs, 0, GRANULE)[0] if kind == "tensor" else arena.buffers(runs, 0, GRANULE)[0]
    view[0] = 7
    arena.close()
    assert int(view[0]) == 7 and int(view[1]) == 0
    with pytest.raises(ValueError, match="closed"):
        arena.buffers(runs, 0, 1)
    with pytest.raises(ValueError, match="closed"):
        arena.tensors(runs, 0, 1)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_is_taken_in_steps_before_it_is_needed_and_given_back() -> None:
    """Of 8 steps: none at the start, the second with the first allocation, the others as it fills."""
    step, before = 16 << 20, resident()
    arena = Arena(8 * step, step_bytes=step)
    assert arena.num_bytes == 8 * step and arena.extents.num_bytes == step
    assert resident() - before < step
    held, taken = [], []
    while (runs := arena.alloc(step // 2)) is not None:
        held.append(runs)
        arena.data[runs[0].begin :][: step // 2].fill_(1)
        arena.join_growth()
        taken.append(resident() - before)
    assert len(held) == 16 and arena.extents.used_bytes == arena.num_bytes
    for count, num_bytes in enumerate(taken, 1):
        assert min(count * step // 2 + step, 8 * step) - step // 4 < num_bytes < count * step // 2 + 3 * step
    arena.close()
    assert resident() - before < step


def test_an_eighth_is_taken_from_the_start() -> None:
    arena = Arena(64 * GRANULE, step_bytes=2 * GRANULE)
    arena.join_growth()
    runs = arena.alloc(8 * GRANULE)
    assert runs is not None
    arena.close()


def test_more_than_is_there_yet_is_none_until_it_is_there() -> None:
    arena = Arena(64 * GRANULE, step_bytes=4 * GRANULE)
    assert arena.alloc(40 * GRANULE) is None
    arena.join_growth()
    assert not arena.is_growing
    runs = arena.alloc(40 * GRANULE)
    assert runs is not None and sum(run.num_bytes for run in runs) == 40 * GRANULE
    arena.close()


def test_a_step_that_cannot_be_had_leaves_a_full_arena_that_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, clock = Arena(8 * GRANULE, step_bytes=2 * GRANULE), [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module, "read_memory", lambda: Memory(10**12, 0))

    def filled() -> int:
        arena.alloc(GRANULE)
        arena.join_growth()
        while arena.alloc(GRANULE) is not None:
            arena.join_growth()
        return arena.extents.used_bytes

    assert filled() == arena.num_bytes == arena.extents.num_bytes == 2 * GRANULE
    assert arena.num_failed == 1, "not tried with each allocation"
    monkeypatch.setattr(module, "read_memory", lambda: Memory(10**12, 10**12))
    assert filled() == 2 * GRANULE
    clock[0] += module.RETRY_S
    assert filled() == arena.num_bytes == 8 * GRANULE
    assert arena.num_failed == 1
    arena.close()


def test_growth_leaves_the_reserve_alone_or_what_was_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [Memory(10**12, 10**12)]
    monkeypatch.setattr(module, "read_memory", lambda: memory[0])
    arena = Arena(8 * GRANULE, step_bytes=2 * GRANULE)
    memory[0] = Memory(10**12, 10**11 + GRANULE)
    arena.alloc(GRANULE)
    arena.join_growth()
    assert arena.num_failed == 1, "a tenth of all stays free"
    arena.close()
    memory[0] = Memory(10**12, 9 * GRANULE)
    arena = Arena(8 * GRANULE, step_bytes=2 * GRANULE)
    memory[0] = Memory(10**12, 7 * GRANULE)
    assert arena.alloc(4 * GRANULE) is None
    arena.join_growth()
    assert arena.alloc(4 * GRANULE) is not None and arena.num_failed == 0
    arena.close()


def test_no_piece_lies_in_two_steps() -> None:
    arena = Arena(4 * GRANULE, step_bytes=2 * GRANULE)
    arena.alloc(GRANULE)
    arena.join_growth()
    runs = arena.alloc(3 * GRANULE)
    assert runs == (Run(GRANULE, 3 * GRANULE),)
    assert [len(piece) for piece in arena.buffers(runs, 7, 3 * GRANULE - 7)] == [GRANULE - 7, 2 * GRANULE]
    assert [len(piece) for piece in arena.tensors(runs, 0, GRANULE)] == [GRANULE]
    arena.close()
