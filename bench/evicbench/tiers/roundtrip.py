"""Random KV through host memory and SSD and back, in random moves: every bit must be the one that was there."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from evicbench.report import Line
from evicbench.tiers.inputs import FINGERPRINT, make_header, scratch
from sglang_evicpress.core import EXACT, Form
from sglang_evicpress.device import HostCopy
from sglang_evicpress.survivors import SurvivorLayout, place
from sglang_evicpress.tiers.entry.encoding import BadEntry, Header, check_extent
from sglang_evicpress.tiers.entry.payload import PayloadCopier, read_layout
from sglang_evicpress.tiers.host.arena import Arena, Run
from sglang_evicpress.tiers.ssd.store import SsdStore

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
"""Those a pool stores; KV in fp8 it stores as uint8."""

LOSSY = Form("keydiff", 0.5)
NUM_POOLS = 12
NUM_MOVES = 400
POOL_SLOTS = 1024
MAX_NODES = 12
DISK_BYTES = 1 << 30
ORDER = (
    "new",
    "pool to host",
    "host to SSD",
    "SSD to host",
    "of them in several runs",
    "host to pool",
    "freed in the pool",
    "freed on the host",
    "dropped",
    "restart",
)
"""All kinds of moves; each has to happen."""


@dataclass(slots=True, eq=False)
class _Node:
    """``rows``: the bits of K and V of every layer, by slot. It has slots, a host entry, an SSD entry, or several."""

    header: Header
    layout: SurvivorLayout | None
    rows: Sequence[torch.Tensor]
    slots: torch.Tensor | None
    runs: Sequence[Run] | None = None
    is_on_ssd: bool = False


@dataclass(slots=True)
class _Tiers:
    """One pool of random geometry, an arena too small for its nodes to lie in one piece, and a store."""

    draw: random.Random
    dtype: torch.dtype
    folder: Path
    page_size: int = 1
    moves: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    nodes: list[_Node] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(init=False)
    copier: PayloadCopier = field(init=False)
    arena: Arena = field(init=False)
    store: SsdStore = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        draw = self.draw
        self.page_size = draw.choice((1, 1, 4, 16))
        num_layers, num_heads, head_dim = draw.randint(1, 8), draw.randint(1, 4), draw.choice((16, 64, 80, 128))
        size = (POOL_SLOTS, num_heads, head_dim)
        self.buffers = [torch.zeros(size, dtype=self.dtype) for _ in range(2 * num_layers)]
        self.copier = PayloadCopier(self.buffers[::2], self.buffers[1::2], self.page_size)
        self.arena = Arena(max(1 << 16, POOL_SLOTS // 3 * sum(buffer[0].nbytes for buffer in self.buffers)))
        self.store = SsdStore(self.folder, DISK_BYTES // 2, FINGERPRINT)
        self.free = list(range(0, POOL_SLOTS, self.page_size))

    def close(self) -> None:
        self.store.close()
        self.arena.close()

    def move(self) -> None:
        """One that is possible now, of every kind that is."""
        found: list[tuple[str, Callable[[_Node], bool], _Node]] = []
        for node in self.nodes:
            if node.slots is not None and node.runs is None:
                found.append(("pool to host", self.backup, node))
            if node.slots is not None and (node.runs is not None or node.is_on_ssd):
                found.append(("freed in the pool", self.release, node))
            if node.runs is not None:
                found.append(("host to pool", self.load_back, node))
                if not node.is_on_ssd:
                    found.append(("host to SSD", self.write, node))
                else:
                    found.append(("freed on the host", self.drop_host_copy, node))
            elif node.is_on_ssd:
                found.append(("SSD to host", self.read, node))
        kinds = sorted({kind for kind, _, _ in found})
        chosen = self.draw.choice([*kinds, "new", "dropped", "restart"])
        if chosen == "restart":
            is_done = self.draw.random() < 0.2
            if is_done:
                self.store.close()
                self.store = SsdStore(self.folder, DISK_BYTES // 2, FINGERPRINT)
        elif chosen == "dropped":
            is_done = len(self.nodes) > MAX_NODES and self.drop(self.draw.choice(self.nodes))
        elif chosen == "new":
            is_done = self.add()
        else:
            action, node = self.draw.choice([(action, node) for kind, action, node in found if kind == chosen])
            is_done = action(node)
        self.moves[chosen] += is_done

    def take_slots(self, num_slots: int) -> torch.Tensor | None:
        """Pages from anywhere in the pool, or None."""
        num_pages = num_slots // self.page_size
        if num_pages > len(self.free):
            return None
        self.draw.shuffle(self.free)
        taken = [self.free.pop() for _ in range(num_pages)]
        return torch.tensor([page + i for page in taken for i in range(self.page_size)], dtype=torch.int64)

    def give_slots(self, slots: torch.Tensor) -> None:
        """Free them, and overwrite what they hold, as the next owner would."""
        for buffer in self.buffers:
            _bits(buffer)[slots] = 0xA5
        self.free += slots[:: self.page_size].tolist()

    def add(self) -> bool:
        """A node of random size, bits and form; as every move, whether there was room for it."""
        draw, shape = self.draw, self.copier.shape
        num_tokens = self.page_size * max(1, draw.choice((1, 2, draw.randint(1, 256 // self.page_size))))
        is_lossy = draw.random() < 0.4
        num_slots = self.page_size * draw.randint(1, num_tokens // self.page_size) if is_lossy else num_tokens
        slots = self.take_slots(num_slots)
        if slots is None:
            return False
        header = replace(
            make_header(draw, shape, num_tokens, ()), num_slots=num_slots, form=LOSSY if is_lossy else EXACT
        )
        layout = None
        if is_lossy:
            generator = torch.Generator().manual_seed(draw.getrandbits(32))
            weights = torch.rand((shape.num_layers, shape.num_heads, num_tokens), generator=generator)
            positions = (weights.topk(num_slots).indices.sort().values + header.start).to(torch.int32)
            logical = place(positions, header.start, self.page_size)
            layout = SurvivorLayout(HostCopy(positions), HostCopy(logical), num_slots)
        rows = []
        for buffer in self.buffers:
            bits = torch.frombuffer(bytearray(draw.randbytes(num_slots * buffer[0].nbytes)), dtype=torch.uint8)
            _bits(buffer)[slots] = bits.view(num_slots, -1)
            rows.append(bits.view(num_slots, -1))
        self.nodes.append(_Node(header, layout, rows, slots))
        return True

    def backup(self, node: _Node) -> bool:
        runs = self.arena.extents.alloc(sum(self.copier.sizes(node.header.num_slots, node.layout is not None)))
        if runs is None or node.slots is None:
            return False
        extents = self.copier.save(node.slots, node.layout, self.arena, runs)
        node.header, node.runs = replace(node.header, extents=extents), runs
        self.moves["of them in several runs"] += len(runs) > 1
        return True

    def release(self, node: _Node) -> bool:
        if node.slots is not None:
            self.give_slots(node.slots)
        node.slots = None
        return True

    def drop_host_copy(self, node: _Node) -> bool:
        if node.runs is not None:
            for begin, end in ((run.begin, run.begin + run.num_bytes) for run in node.runs):
                self.arena.data[begin:end] = 0x5A
            self.arena.extents.free(node.runs)
        node.runs = None
        return True

    def write(self, node: _Node) -> bool:
        reservation = self.store.reserve(node.header.payload_bytes)
        if node.runs is None or reservation is None:
            raise RuntimeError("the store has no room")
        chunks = self.arena.buffers(node.runs, 0, node.header.payload_bytes)
        self.store.write(reservation, node.header, chunks)
        node.is_on_ssd = True
        return True

    def read(self, node: _Node) -> bool:
        """Found by its lookup key, as after a restart; the header must be the one written, but for where it lies."""
        for ref in self.store.find(node.header.lookup_key):
            header = self.store.read_header(ref)
            if header.key != node.header.key:
                continue
            _demand(replace(header, payload_offset=0) == replace(node.header, payload_offset=0), "another header")
            runs = self.arena.extents.alloc(header.payload_bytes)
            if runs is not None:
                self.store.read(ref, header, self.arena.buffers(runs, 0, header.payload_bytes))
                node.runs = runs
                self.moves["of them in several runs"] += len(runs) > 1
            return runs is not None
        raise RuntimeError("an entry on SSD is not found")

    def load_back(self, node: _Node) -> bool:
        """All of it or some of its pages, into slots that held something else; compared bit by bit."""
        header, runs, num_slots = node.header, node.runs, node.header.num_slots
        num_pages = num_slots // self.page_size
        first = self.draw.choice((0, self.draw.randrange(num_pages)))
        last = self.draw.choice((num_pages, self.draw.randint(first + 1, num_pages)))
        begin, end = first * self.page_size, last * self.page_size
        slots = self.take_slots(end - begin)
        if slots is None or runs is None:
            return False
        for layer in range(self.copier.num_layers):
            extent = header.extents[layer]
            check_extent(extent, self.arena.buffers(runs, extent.offset, extent.num_bytes))
            self.copier.load_layer(layer, slots, self.arena, runs, extent, begin, num_slots)
        for buffer, rows in zip(self.buffers, node.rows, strict=True):
            _demand(torch.equal(_bits(buffer)[slots], rows[begin:end]), "other KV")
            self.num_bytes += rows[begin:end].numel()
        if node.layout is not None:
            layout = read_layout(self.arena, runs, header.extents[-1], header.shape, num_slots)
            _demand(torch.equal(layout.positions, node.layout.positions), "other positions")
            _demand(torch.equal(layout.logical, node.layout.logical), "other logical indices")
        if node.slots is None and end - begin == num_slots:
            node.slots = slots
        else:
            self.give_slots(slots)
        return True

    def drop(self, node: _Node) -> bool:
        self.release(node)
        self.drop_host_copy(node)
        for ref in self.store.find(node.header.lookup_key) if node.is_on_ssd else ():
            if self.store.read_header(ref).key == node.header.key:
                self.store.remove(ref)
        self.nodes.remove(node)
        return True


def _bits(buffer: torch.Tensor) -> torch.Tensor:
    """uint8 [slots, bytes of a row] over the same memory."""
    return buffer.view(torch.uint8).view(len(buffer), -1)


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(f"{otherwise} came back")


def measure_roundtrip(num_pools: int = NUM_POOLS) -> Iterator[Line]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers of the tiers copy
    try:
        for dtype in DTYPES:
            yield _measure(dtype, num_pools)
    finally:
        torch.set_num_threads(num_threads)


def _measure(dtype: torch.dtype, num_pools: int) -> Line:
    moves: Counter[str] = Counter()
    num_bytes, problem = 0, None
    with scratch(DISK_BYTES) as folder:
        for seed in range(num_pools):
            tiers = _Tiers(random.Random(f"{dtype} {seed}"), dtype, folder / str(seed))
            try:
                for _ in range(NUM_MOVES):
                    tiers.move()
            except (RuntimeError, BadEntry) as error:
                problem = problem or f"pool {seed}: {error}"
            finally:
                tiers.close()
            moves += tiers.moves
            num_bytes += tiers.num_bytes
    counts = ", ".join(f"{moves[kind]} {kind}" for kind in ORDER)
    name = str(dtype).removeprefix("torch.")
    return Line(
        f"round trip of {name} KV through host memory and SSD, {num_pools} pools of random shape, random moves",
        "every bit is back",
        problem or f"{num_bytes / 1e6:.0f} MB loaded back and compared, all equal; {counts}",
        problem is None and all(moves[kind] for kind in ORDER),
    )
