"""KV through a scratch, in any order that its streams allow: the bytes and checksums of the copy in place."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_evicpress.codec import DoesNotFitError, NotFiniteError, StoredFormError
from sglang_evicpress.device import HostCopy
from sglang_evicpress.survivors import EMPTY, Filling, SurvivorLayout
from sglang_evicpress.tiers import transfers as transfers_module
from sglang_evicpress.tiers.entry.payload import PayloadCopier
from sglang_evicpress.tiers.host.allocator import Run
from sglang_evicpress.tiers.host.arena import Arena
from sglang_evicpress.tiers.transfers import CudaStreams, Transfers

SLOTS = 40
GRANULE = 64
DTYPES = (torch.bfloat16, torch.float32)


class Point:
    def __init__(self, device: Device) -> None:
        self.device, self.is_reached = device, False

    def reach(self) -> None:
        self.is_reached = True

    def synchronize(self) -> None:
        self.device.num_waits += 1
        while not self.is_reached:
            self.device.step()


class Queue:
    """A stream: what is queued is done later, one after the other."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.queued: deque[tuple[Point | None, Callable[[], None]]] = deque()
        self.num_launches = 0

    def run(self, work: Callable[[], None]) -> None:
        self.num_launches += 1
        self.queued.append((None, work))
        self.device.go_on()

    def event(self) -> Point:
        point = Point(self.device)
        self.queued.append((None, point.reach))
        return point

    def wait(self, mark: Point) -> None:
        self.queued.append((mark, lambda: None))

    def is_ready(self) -> bool:
        return bool(self.queued) and (self.queued[0][0] is None or self.queued[0][0].is_reached)


class Device:
    """Does what streams have queued in any order that their waits allow, some of it while more is queued."""

    def __init__(self, seed: int, eagerness: float = 0.5) -> None:
        self.draw, self.eagerness = random.Random(seed), eagerness
        self.streams: list[Queue] = []
        self.kernels = [Queue(self), Queue(self)]
        self.streams += self.kernels
        self.here = 0
        self.num_waits = 0

    def current(self) -> Queue:
        return self.kernels[self.here]

    def another(self) -> Queue:
        self.streams.append(Queue(self))
        return self.streams[-1]

    def step(self) -> None:
        self.draw.choice([stream for stream in self.streams if stream.is_ready()]).queued.popleft()[1]()

    def go_on(self) -> None:
        while self.draw.random() < self.eagerness and any(stream.is_ready() for stream in self.streams):
            self.step()

    def finish(self) -> None:
        while any(stream.queued for stream in self.streams):
            self.step()


def pool_of(dtype: torch.dtype, num_layers: int, num_heads: int, head_dim: int) -> list[list[torch.Tensor]]:
    size = (SLOTS, num_heads, head_dim * dtype.itemsize)
    return [[torch.randint(0, 256, size, dtype=torch.uint8).view(dtype) for _ in range(num_layers)] for _ in range(2)]


def bits(buffers: list[list[torch.Tensor]]) -> np.ndarray:
    """uint8 [2, layers, slots, heads, bytes]."""
    return np.stack([[buffer.view(torch.uint8).numpy() for buffer in layers] for layers in buffers])


def arena_of(num_bytes: int, draw: random.Random, *, is_torn: bool) -> tuple[Arena, tuple[Run, ...]]:
    """An arena full of garbage, and room in it."""
    arena = Arena(4 * (num_bytes + GRANULE), granule=GRANULE, max_runs=10_000)
    arena.data.random_(0, 256)
    taken = [arena.extents.alloc(GRANULE) for _ in range(arena.num_bytes // GRANULE)]
    for index, runs in enumerate(taken):
        if not is_torn or index % draw.choice([2, 3]):
            arena.extents.free(runs)
    found = arena.extents.alloc(max(1, num_bytes))
    assert found is not None
    return arena, found


def payload(arena: Arena, runs: tuple[Run, ...], num_bytes: int) -> bytes:
    return b"".join(bytes(chunk) for chunk in arena.buffers(runs, 0, num_bytes))


def any_slots(draw: random.Random, count: int) -> torch.Tensor:
    return torch.tensor(draw.sample(range(SLOTS), count), dtype=torch.int64)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn]),
    num_layers=st.integers(1, 5),
    num_heads=st.integers(1, 3),
    head_dim=st.sampled_from([3, 8, 16]),
    rows_at_once=st.sampled_from([1, 2, 7, 20, 64, 1000]),
    eagerness=st.sampled_from([0.0, 0.3, 0.6, 0.9]),
    is_torn=st.booleans(),
)
def test_entries_saved_and_loaded_are_those_of_the_copy_in_place(
    seed: int,
    dtype: torch.dtype,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    rows_at_once: int,
    eagerness: float,
    is_torn: bool,
) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    k_buffers, v_buffers = buffers = pool_of(dtype, num_layers, num_heads, head_dim)
    in_place = PayloadCopier(k_buffers, v_buffers, 1)
    device = Device(seed, eagerness)
    scratch_bytes = 4 * rows_at_once * k_buffers[0][0].nbytes
    transfers = Transfers(k_buffers, v_buffers, device, scratch_bytes=scratch_bytes)
    copier = PayloadCopier(k_buffers, v_buffers, 1, transfers=transfers)
    expected = bits(buffers)
    for _ in range(3):
        num_slots = draw.choice([0, 1, draw.randint(1, SLOTS), SLOTS])
        slots = any_slots(draw, num_slots)
        num_bytes = sum(copier.sizes(num_slots, False))
        arena, runs = arena_of(num_bytes, draw, is_torn=is_torn)
        same, same_runs = arena_of(num_bytes, draw, is_torn=False)
        others = arena.data.clone()
        saved = expected[:, :, slots.numpy()]
        extents = copier.save(slots, None, arena, runs)
        assert extents == in_place.save(slots, None, same, same_runs)
        assert payload(arena, runs, num_bytes) == payload(same, same_runs, num_bytes)
        assert np.array_equal(bits(buffers), expected)
        if not num_slots:
            continue
        # Parts of it to slots that nothing else is loaded to: several loads are on their way at once.
        targets = any_slots(draw, draw.randint(1, SLOTS))
        cut = draw.randint(0, len(targets))
        for target in (targets[:cut], targets[cut:]):
            begin = draw.randrange(num_slots)
            target = target[: num_slots - begin]
            expected[:, :, target.numpy()] = saved[:, :, begin : begin + len(target)]
            device.here = draw.randrange(2)  # whoever waits for a late layer copies it in the stream it computes in
            for layers in groups(draw, num_layers, copier.layers_at_once(len(target), begin, num_slots)):
                copier.load_layers(layers, target, arena, runs, extents, begin, num_slots)
        device.finish()
        assert np.array_equal(bits(buffers), expected)
        for begin, size in runs:
            others[begin : begin + size] = arena.data[begin : begin + size]
        assert torch.equal(arena.data, others)


def groups(draw: random.Random, num_layers: int, at_once: int) -> Iterator[range]:
    """The layers in order, at most so many together."""
    first = 0
    while first < num_layers:
        layers = range(first, min(num_layers, first + draw.randint(1, at_once)))
        yield layers
        first = layers.stop


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    codec_and_dtype=st.sampled_from([*product(["int8", "int4", "int2"], DTYPES), ("lossless", torch.bfloat16)]),
    num_layers=st.integers(1, 4),
    head_dim=st.sampled_from([8, 32]),
    rows_at_once=st.sampled_from([1, 40, 70, 1000]),
    eagerness=st.sampled_from([0.0, 0.6]),
    is_torn=st.booleans(),
)
def test_entries_of_a_codec_are_those_of_the_copy_in_place(
    seed: int,
    codec_and_dtype: tuple[str, torch.dtype],
    num_layers: int,
    head_dim: int,
    rows_at_once: int,
    eagerness: float,
    is_torn: bool,
) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    codec, dtype = codec_and_dtype
    there, here = [], []
    for _ in range(2):
        there.append([torch.randn(150, 2, head_dim).to(dtype) for _ in range(num_layers)])
        here.append([buffer.clone() for buffer in there[-1]])
    device = Device(seed, eagerness)
    transfers = Transfers(*here, device, scratch_bytes=4 * rows_at_once * here[0][0][0].nbytes)
    copier, in_place = PayloadCopier(*here, 1, transfers=transfers), PayloadCopier(*there, 1)
    num_slots = draw.choice([0, 1, 32, 70, 128, 133])
    slots = torch.tensor(draw.sample(range(150), num_slots), dtype=torch.int64)
    sizes = copier.sizes(num_slots, False, codec)
    arena, runs = arena_of(sum(sizes), draw, is_torn=is_torn)
    same, same_runs = arena_of(sum(sizes), draw, is_torn=False)
    others = arena.data.clone()
    extents = copier.save(slots, None, arena, runs, codec=codec)
    assert extents == in_place.save(slots, None, same, same_runs, codec=codec)
    assert payload(arena, runs, sum(sizes)) == payload(same, same_runs, sum(sizes))
    is_whole = draw.random() < 0.5
    begin = 0 if is_whole else draw.randint(0, num_slots)
    count = num_slots if is_whole else draw.randint(0, num_slots - begin)
    target = torch.tensor(draw.sample(range(150), count), dtype=torch.int64)
    for layers in groups(draw, num_layers, copier.layers_at_once(count, begin, num_slots, codec)):
        for each, its, its_runs in ((copier, arena, runs), (in_place, same, same_runs)):
            each.load_layers(layers, target, its, its_runs, extents, begin, num_slots, codec)
    for layer in range(num_layers):
        read = copier.read_layer(layer, arena, runs, extents[layer], begin, len(target), num_slots, codec)
        device.finish()
        expected = in_place.read_layer(layer, same, same_runs, extents[layer], begin, len(target), num_slots, codec)
        assert all(torch.equal(rows, its) for rows, its in zip(read, expected, strict=True))
        assert torch.equal(here[0][layer], there[0][layer]) and torch.equal(here[1][layer], there[1][layer])
        pair = there[0][layer][slots], there[1][layer][slots]
        written = [each.write_layer(pair, its, its_runs, extents[layer].offset, None, codec)
                   for each, its, its_runs in ((copier, arena, runs), (in_place, same, same_runs))]  # fmt: skip
        assert written[0] == written[1]
    assert payload(arena, runs, sum(sizes)) == payload(same, same_runs, sum(sizes))
    for at, size in runs:
        others[at : at + size] = arena.data[at : at + size]
    assert torch.equal(arena.data, others)


@pytest.mark.parametrize("rows_at_once", [1, 1000])
@pytest.mark.parametrize(("layer", "slot"), [(0, 0), (1, 69), (2, 33)])
def test_what_is_not_finite_is_known_when_the_save_has_ended(layer: int, slot: int, rows_at_once: int) -> None:
    buffers = [[torch.randn(80, 1, 16) for _ in range(3)] for _ in range(2)]
    buffers[1][layer][slot, 0, 3] = torch.nan
    device = Device(0)
    transfers = Transfers(*buffers, device, scratch_bytes=4 * rows_at_once * 64)
    arena, runs = arena_of(1 << 16, random.Random(0), is_torn=True)
    saving = transfers.queue_encode(torch.arange(70), arena, runs, "int4")
    with pytest.raises(NotFiniteError):
        saving.finish()
    transfers.queue_encode(torch.arange(70, 80), arena, runs, "int4").finish()


@pytest.mark.parametrize("rows_at_once", [1, 1000])
@pytest.mark.parametrize(
    ("rows", "error"), [([33], None), ([33, 34], DoesNotFitError), ([33, 65], None), ([33, 34, 35], NotFiniteError)]
)
def test_what_a_lossless_codec_has_no_room_for_is_known_when_the_save_has_ended(
    rows: list[int], error: type[ValueError] | None, rows_at_once: int
) -> None:
    buffers = [[torch.ones(80, 1, 16).bfloat16() for _ in range(3)] for _ in range(2)]
    buffers[0][1][rows, 0, 1:] = 2.0**-20  # escapes: a block of 32 rows has room for 16
    buffers[1][2][5, 0, 3] = torch.nan if error is NotFiniteError else 1.0
    transfers = Transfers(*buffers, Device(0), scratch_bytes=4 * rows_at_once * 32)
    arena, runs = arena_of(1 << 16, random.Random(0), is_torn=True)
    saving = transfers.queue_encode(torch.arange(70), arena, runs, "lossless")
    if error is None:
        assert len(saving.finish()) == 3
        return
    with pytest.raises(error):
        saving.finish()


def test_bytes_of_another_codec_are_not_decoded() -> None:
    buffers = [[torch.randn(80, 1, 16)] for _ in range(2)]
    transfers = Transfers(*buffers, Device(0))
    arena, runs = arena_of(1 << 16, random.Random(0), is_torn=True)
    (extent,) = transfers.queue_encode(torch.arange(70), arena, runs, "int4").finish()
    for codec, num_slots in (("int8", 70), ("int4", 69), ("lossless", 70)):
        with pytest.raises(StoredFormError):
            transfers.decode(range(1), torch.arange(3), arena, runs, extent, 0, num_slots, codec)


@pytest.mark.parametrize(
    ("rows_at_once", "num_launches"), [(1000, 1), (60, 1), (59, 2), (30, 3), (12, 5), (11, 10), (4, 15)]
)
def test_as_many_layers_go_at_once_as_half_a_scratch_holds(rows_at_once: int, num_launches: int) -> None:
    k_buffers, v_buffers = pool_of(torch.float16, 5, 2, 8)
    device = Device(0)
    transfers = Transfers(k_buffers, v_buffers, device, scratch_bytes=4 * rows_at_once * 32)
    arena, runs = arena_of(5 * 2 * 12 * 32, random.Random(0), is_torn=False)
    transfers.queue_save(torch.arange(12), arena, runs).finish()
    gathers, copies = (stream.num_launches for stream in (device.kernels[0], device.streams[-1]))
    assert gathers == copies == num_launches


def test_all_is_queued_before_the_host_waits_and_a_part_is_gathered_while_the_one_before_is_copied() -> None:
    k_buffers, v_buffers = pool_of(torch.float16, 5, 2, 8)
    device = Device(0, eagerness=0.0)
    transfers = Transfers(k_buffers, v_buffers, device, scratch_bytes=4 * 12 * 32)
    arena, runs = arena_of(5 * 2 * 12 * 32, random.Random(0), is_torn=False)
    found: list[tuple[int, int, int]] = []
    step, gathers = device.step, device.kernels[0]

    def first_step() -> None:
        while not found and gathers.is_ready():  # no copy goes on meanwhile
            gathers.queued.popleft()[1]()
        num_left = sum(isinstance(work, partial) for _, work in gathers.queued)
        found.append((gathers.num_launches, device.num_waits, num_left))
        step()

    device.step = first_step  # type: ignore[method-assign]
    transfers.queue_save(torch.arange(12), arena, runs).finish()
    assert found[0] == (5, 1, 3)


def test_no_copy_is_on_its_way_any_more_when_a_save_fails() -> None:
    k_buffers, v_buffers = pool_of(torch.float16, 5, 2, 8)
    device = Device(0, eagerness=0.0)
    transfers = Transfers(k_buffers, v_buffers, device, scratch_bytes=4 * 12 * 32)
    arena, runs = arena_of(3 * 2 * 12 * 32, random.Random(0), is_torn=False)
    with pytest.raises(ValueError, match="the runs end"):
        transfers.queue_save(torch.arange(12), arena, runs).finish()
    assert device.streams[-1].num_launches == 3 and not device.streams[-1].queued


def test_survivors_follow_the_layers() -> None:
    k_buffers, v_buffers = pool_of(torch.bfloat16, 3, 2, 8)
    positions = torch.arange(18, dtype=torch.int32).view(3, 2, 3)
    layout = SurvivorLayout(HostCopy(positions), HostCopy(torch.tensor([1, 4, 9])), 3)
    found = []
    for transfers in (None, Transfers(k_buffers, v_buffers, Device(0), scratch_bytes=200)):
        copier = PayloadCopier(k_buffers, v_buffers, 1, transfers=transfers)
        num_bytes = sum(copier.sizes(3, True))
        arena, runs = arena_of(num_bytes, random.Random(0), is_torn=True)
        found.append((copier.save(torch.tensor([5, 1, 7]), layout, arena, runs), payload(arena, runs, num_bytes)))
    assert found[0] == found[1] and len(found[0][0]) == 4


def test_the_kernels_are_compiled_without_a_change_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, compiled = pool_of(torch.float16, 2, 2, 16), []
    for name in ("encode", "decode"):
        call = partial(lambda name, *args, **options: compiled.append((name, args[3].bits)), name)
        monkeypatch.setattr(transfers_module, name, call)
    before = bits(buffers)
    transfers = Transfers(*buffers, Device(0))
    transfers.compile(["int4"])
    assert np.array_equal(bits(buffers), before) and compiled == [("encode", 4), ("decode", 4)]
    arena, runs = arena_of(1 << 12, random.Random(0), is_torn=False)
    transfers.queue_encode(torch.arange(3), arena, runs, "int4").finish()
    assert compiled[2:] == [("encode", 4)]  # nothing that would be waited for


def test_interpreted_kernels_save_and_load_the_same(device: str) -> None:
    if device != "cpu":
        pytest.skip("kernels are compiled here, and the pool is on the CPU")
    k_buffers, v_buffers = buffers = pool_of(torch.bfloat16, 3, 2, 16)
    streams = Device(3)
    transfers = Transfers(k_buffers, v_buffers, streams, scratch_bytes=4 * 7 * 64, backend="triton")
    slots = any_slots(random.Random(1), 17)
    arena, runs = arena_of(3 * 2 * 17 * 64, random.Random(0), is_torn=True)
    extents = transfers.queue_save(slots, arena, runs).finish()
    rows = [buffer[slots] for pair in zip(k_buffers, v_buffers, strict=True) for buffer in pair]
    assert payload(arena, runs, 3 * 2 * 17 * 64) == b"".join(row.view(torch.uint8).numpy().tobytes() for row in rows)
    expected = bits(buffers)
    target = any_slots(random.Random(2), 9)
    expected[:, :, target.numpy()] = expected[:, :, slots[4:13].numpy()]
    for layer, extent in enumerate(extents):
        transfers.load(range(layer, layer + 1), target, arena, runs, extent.offset, 4, 17)
    streams.finish()
    assert np.array_equal(bits(buffers), expected)


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "lossless"])
def test_interpreted_kernels_encode_and_decode_the_same(device: str, codec: str) -> None:
    if device != "cpu":
        pytest.skip("kernels are compiled here, and the pool is on the CPU")
    found = []
    for backend in ("triton", "torch"):
        torch.manual_seed(0)
        buffers = [[torch.randn(150, 2, 64).bfloat16() for _ in range(2)] for _ in range(2)]
        streams = Device(3)
        transfers = Transfers(*buffers, streams, scratch_bytes=4 * 40 * 256, backend=backend)  # type: ignore[arg-type]
        arena, runs = arena_of(1 << 17, random.Random(0), is_torn=True)
        extents = transfers.queue_encode(torch.arange(100), arena, runs, codec).finish()
        both, every = range(2), torch.randperm(150)[:100]
        with pytest.raises(ValueError, match="2 layers of 100 slots"):
            transfers.decode(both, every, arena, runs, extents[0], 0, 100, codec)
        Transfers(*buffers, streams, backend=backend).decode(both, every, arena, runs, extents[0], 0, 100, codec)  # type: ignore[arg-type]
        for layer, extent in enumerate(extents):
            transfers.decode(range(layer, layer + 1), torch.arange(60, 140), arena, runs, extent, 10, 100, codec)
        streams.finish()
        found.append((extents, bits(buffers)))
    assert found[0][0] == found[1][0] and np.array_equal(found[0][1], found[1][1])


class Now:
    """Streams in which everything is done at once."""

    def current(self) -> Now:
        return self

    def another(self) -> Now:
        return self

    def event(self) -> Now:
        return self

    def run(self, work: Callable[[], None]) -> None:
        work()

    def wait(self, mark: Now) -> None:
        pass

    def synchronize(self) -> None:
        pass


def test_threads_do_not_share_a_scratch() -> None:
    k_buffers, v_buffers = pool_of(torch.float16, 4, 2, 8)
    paused, go_on = threading.Event(), threading.Event()

    class Pausing(Now):
        """The first copy of the thread that is named so waits for the other one."""

        def run(self, work: Callable[[], None]) -> None:
            is_copy = work.func.__name__ == "write_pieces"  # type: ignore[attr-defined]
            if is_copy and threading.current_thread().name == "first" and not paused.is_set():
                paused.set()
                assert go_on.wait(30)
            work()

    transfers = Transfers(k_buffers, v_buffers, Pausing(), scratch_bytes=4 * 12 * 32)
    in_place = PayloadCopier(k_buffers, v_buffers, 1)
    entries = [(torch.arange(12), arena_of(4 * 2 * 12 * 32, random.Random(0), is_torn=False)) for _ in range(2)]
    entries[1][0].add_(20)
    first = threading.Thread(target=partial(transfers.queue_save, entries[0][0], *entries[0][1]), name="first")
    first.start()
    assert paused.wait(30)
    transfers.queue_save(entries[1][0], *entries[1][1]).finish()
    go_on.set()
    first.join(30)
    for slots, (arena, runs) in entries:
        same, same_runs = arena_of(4 * 2 * 12 * 32, random.Random(0), is_torn=False)
        in_place.save(slots, None, same, same_runs)
        assert payload(arena, runs, 4 * 2 * 12 * 32) == payload(same, same_runs, 4 * 2 * 12 * 32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows_at_once", [100, 1000, 6000])
def test_the_lanes_of_a_cuda_device_lose_nothing(rows_at_once: int) -> None:
    size = (4096, 8, 128)
    pool = [[torch.randint(-(2**15), 2**15, size, dtype=torch.int16).cuda() for _ in range(4)] for _ in range(2)]
    rows = [[buffer.view(torch.bfloat16) for buffer in buffers] for buffers in pool]
    device = pool[0][0].device
    transfers = Transfers(*rows, CudaStreams(device), scratch_bytes=4 * rows_at_once * 2048)
    copier = PayloadCopier(*rows, 1, transfers=transfers)
    num_bytes = sum(copier.sizes(3000, False))
    arena = Arena(3 * num_bytes, is_pinned=True)
    for _ in range(3):
        slots, target = torch.randperm(4096, device=device)[:3000], torch.randperm(4096, device=device)[:2500]
        written = torch.cuda.Event()
        written.record()
        runs = arena.extents.alloc(num_bytes)
        assert runs is not None
        expected = [[buffer.clone() for buffer in buffers] for buffers in pool]
        extents = copier.save(slots, None, arena, runs, written)
        sections = [buffer[slots] for pair in zip(*expected, strict=True) for buffer in pair]
        found = torch.cat(arena.tensors(runs, 0, num_bytes)).view(torch.int16)
        assert torch.equal(found, torch.cat(sections).cpu().view(-1))
        with copier.stream(written):
            for layer in range(len(extents)):
                copier.load_layers(range(layer, layer + 1), target, arena, runs, extents, 300, 3000)
            loaded = copier.finish_layers()
        torch.cuda.current_stream().wait_event(loaded)
        for before, after in zip(expected, pool, strict=True):
            for section, buffer in zip(before, after, strict=True):
                section[target] = section[slots[300:2800]]
                assert torch.equal(buffer, section)
    arena.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "lossless"])
@pytest.mark.parametrize("rows_at_once", [100, 6000])
def test_a_cuda_device_encodes_and_decodes_as_the_cpu(rows_at_once: int, codec: str) -> None:
    there = [[torch.randn(4096, 8, 128).bfloat16() for _ in range(3)] for _ in range(2)]
    here = [[buffer.cuda() for buffer in buffers] for buffers in there]
    device = here[0][0].device
    transfers = Transfers(*here, CudaStreams(device), scratch_bytes=4 * rows_at_once * 2048)
    copier, in_place = PayloadCopier(*here, 1, transfers=transfers), PayloadCopier(*there, 1)
    num_bytes = sum(copier.sizes(3000, False, codec))
    arena, same = Arena(2 * num_bytes, is_pinned=True), Arena(2 * num_bytes)
    runs, same_runs = (each.extents.alloc(num_bytes) for each in (arena, same))
    assert runs is not None and same_runs is not None
    slots, target = torch.randperm(4096)[:3000], torch.randperm(4096)[:2500]
    begun = torch.cuda.Event()
    begun.record()
    extents = copier.save(slots.to(device), None, arena, runs, begun, codec)
    assert extents == in_place.save(slots, None, same, same_runs, codec=codec)
    with copier.stream(begun):
        for layer in range(len(extents)):
            layers = range(layer, layer + 1)
            copier.load_layers(layers, target.to(device), arena, runs, extents, 300, 3000, codec)
            in_place.load_layers(layers, target, same, same_runs, extents, 300, 3000, codec)
        begin = 0
        while begin < len(extents):  # all rows, of as many layers as go at once
            layers = range(begin, min(len(extents), begin + copier.layers_at_once(3000, 0, 3000, codec)))
            every = slots.flip(0)
            copier.load_layers(layers, every.to(device), arena, runs, extents, 0, 3000, codec)
            in_place.load_layers(layers, every, same, same_runs, extents, 0, 3000, codec)
            begin = layers.stop
    for expected, found in zip(there, here, strict=True):
        assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, expected, strict=True))
    arena.close()


@pytest.mark.parametrize("codec", ["raw", "int4", "lossless"])
@pytest.mark.parametrize("seed", range(4))
def test_layers_that_fill_different_slots_are_saved_and_loaded_as_in_place(codec: str, seed: int) -> None:
    torch.manual_seed(seed)
    draw, counts, group_of = random.Random(seed), (70, 33, 0), (0, 1, 2, 1)
    there = [[torch.randn(150, 2, 32).bfloat16() for _ in group_of] for _ in range(2)]
    here = [[buffer.clone() for buffer in buffers] for buffers in there]
    device = Device(seed)
    transfers = Transfers(*here, device, scratch_bytes=4 * 20 * here[0][0][0].nbytes)
    copier, in_place = PayloadCopier(*here, 1, transfers=transfers), PayloadCopier(*there, 1)
    places = [torch.tensor(sorted(draw.sample(range(70), count)), dtype=torch.int64) for count in counts]
    positions = torch.full((4, 2, 70), EMPTY, dtype=torch.int32)
    for layer, group in enumerate(group_of):
        positions[layer][:, places[group]] = places[group].to(torch.int32)
    layout = SurvivorLayout(HostCopy(positions), HostCopy(torch.arange(70)), 70, Filling(group_of, places))
    slots = torch.tensor(draw.sample(range(150), 70))
    sizes = copier.sizes(70, True, codec, layout.layer_slots)
    arena, runs = arena_of(sum(sizes), draw, is_torn=True)
    same, same_runs = arena_of(sum(sizes), draw, is_torn=False)
    extents = copier.begin_save(slots, layout, arena, runs, codec)()
    device.finish()
    assert extents == copier.save(slots, layout, arena, runs, codec=codec)
    assert extents == in_place.save(slots, layout, same, same_runs, codec=codec)
    assert [extent.num_bytes for extent in extents] == sizes
    assert payload(arena, runs, sum(sizes)) == payload(same, same_runs, sum(sizes))
    target = torch.tensor(draw.sample(range(150), 70))
    for layer, group in enumerate(group_of):
        for each, its, its_runs in ((copier, arena, runs), (in_place, same, same_runs)):
            own = target[places[group]]
            each.load_layers(range(layer, layer + 1), own, its, its_runs, extents, 0, counts[group], codec)
    device.finish()
    assert np.array_equal(bits(here), bits(there))
