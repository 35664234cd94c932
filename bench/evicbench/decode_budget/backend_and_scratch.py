"""Limits of a pass: the attention backend stays the one that SGLang chose, and no pass needs N x N of anything."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evicbench.decode_budget.requests import PLAIN_SCORES, Request, ask_all, context_prompt, server_flags
from evicbench.decode_budget.watch import watched
from evicbench.report import Line
from evicbench.testbed.server import Server
from sglang_evicpress.decode_budget.settings import METHODS

LENGTHS = (1024, 2048, 4096)
MOST_GROWTH = 2.1
LAYERS, HEADS, QUERY_HEADS, DIM, PAGE, WINDOW = 3, 2, 4, 64, 16, 8


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that are made within, at most at one time. What an operator takes only for itself is not
    seen; on a GPU it would be."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), args)
        return out

    def _count(self, storage: torch.UntypedStorage, args: Any) -> None:
        given = {
            each.untyped_storage().data_ptr()
            for each in torch.utils._pytree.tree_leaves(args)
            if isinstance(each, torch.Tensor)
        }
        key = storage.data_ptr()
        if key in given or key in self._seen or storage.nbytes() == 0:
            return
        self._seen.add(key)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


def peak_bytes(work: Callable[[], object]) -> int:
    with LiveBytes() as live:
        work()
    return live.most


@dataclass(frozen=True, slots=True)
class Row:
    """A request of ``num_slots`` slots, with the last queries that a server keeps for tova and h2o."""

    node: Any
    num_slots: int

    @classmethod
    def of(cls, num_slots: int) -> Row:
        from sglang_evicpress.press import PressInput, QueryWindow

        draw = torch.Generator().manual_seed(num_slots)
        k_buffers, v_buffers = (
            [torch.randn(num_slots + PAGE, HEADS, DIM, generator=draw) for _ in range(LAYERS)] for _ in "kv"
        )
        queries = torch.randn(LAYERS, WINDOW, QUERY_HEADS, DIM, generator=draw)
        window = QueryWindow(queries, torch.arange(num_slots - WINDOW, num_slots))
        positions = torch.arange(num_slots, dtype=torch.int32).expand(LAYERS, HEADS, -1)
        slots = torch.arange(PAGE, num_slots + PAGE)
        node = PressInput(k_buffers, v_buffers, slots, positions, 0, num_slots, window, DIM**-0.5)
        return cls(node, num_slots)

    def drop(self, method: str, score: str) -> None:
        """Compute a pass: paged chooses one page, the others drop an eighth and move the rest together."""
        from sglang_evicpress.decode_budget import scores
        from sglang_evicpress.decode_budget.compaction import hole_moves, holefill_positions, repack_positions
        from sglang_evicpress.kernels.compact import compact
        from sglang_evicpress.kernels.fill_holes import fill_holes

        node = self.node
        given = scores.score(score, node, WINDOW)
        if method == "paged":
            scores.worst_pages(scores.page_means(given, PAGE), (1, 1))
            return
        num_kept = self.num_slots * 7 // 8
        chosen = scores.survivors(given, node.positions, num_kept, 4, in_order=True)
        buffers = node.k_buffers, node.v_buffers
        if method == "repack":
            compact(*buffers, node.slots, chosen)
            repack_positions(node.positions, chosen)
        else:
            targets, sources = hole_moves(chosen, self.num_slots)
            fill_holes(*buffers, node.slots, targets, sources)
            holefill_positions(node.positions, targets, sources, num_kept)


def scratch() -> dict[tuple[str, str], list[int]]:
    """Peak bytes at each of the lengths; ``compact`` is one of the others."""
    return {
        (method, score): [peak_bytes(lambda row=row, m=method, s=score: row.drop(m, s)) for row in map(Row.of, LENGTHS)]
        for method in ("paged", "repack", "holefill")
        for score in PLAIN_SCORES
    }


def scratch_line(peaks: dict[tuple[str, str], list[int]]) -> Line:
    growth = {
        name: max(after / before for before, after in zip(sizes, sizes[1:], strict=False))
        for name, sizes in peaks.items()
    }
    worst = max(growth, key=growth.__getitem__)
    sizes = ", ".join(f"{size / 1024:.0f} KiB" for size in peaks[worst])
    return Line(
        f"walls: peak scratch bytes of a pass at {', '.join(map(str, LENGTHS))} slots, {len(peaks)} methods by scores",
        f"at most {MOST_GROWTH} times as much for twice as many",
        f"at worst {growth[worst]:.2f} times ({' by '.join(worst)}: {sizes})",
        growth[worst] <= MOST_GROWTH,
    )


def backends(requests: Sequence[Request]) -> tuple[str, set[str], int]:
    """SGLang's name of its attention backend, the types that it ran, and the passes that ``requests`` led to."""
    score = "tova" if any(request.budget for request in requests) else "value_key_ratio"
    flags = server_flags(PAGE, 16384, 8, "--kv-decode-score", score, "--kv-decode-interval", "16")
    with watched() as watch, Server(*flags, env=watch.env) as server:
        ask_all(server, requests)
        return (
            str(server.get("/server_info")["attention_backend"]),
            watch.backends(),
            sum(bool(each.passes) for each in watch.rounds()),
        )


def backend_line() -> Line:
    draw = random.Random("walls")
    requests = [
        Request(context_prompt(draw, 100), 40, 96, method, score, 16)
        for method, score in itertools.product(METHODS, PLAIN_SCORES)
    ]
    name, types, _ = backends([Request(context_prompt(draw, 100), 40)])
    with_name, with_types, num_rounds = backends(requests)
    return Line(
        f"walls: attention backend of a server that keeps queries for tova and answers by {len(METHODS)} methods with "
        f"{len(PLAIN_SCORES)} scores",
        "in every round the one that the server without a budget has, by name and by type",
        f"{with_name}, {' '.join(sorted(with_types))}, against {name}, {' '.join(sorted(types))}; {num_rounds} rounds "
        f"with a pass",
        (with_name, with_types) == (name, types) and len(types) == 1 and num_rounds > 0,
    )


def measure_scratch() -> Iterator[Line]:
    yield scratch_line(scratch())


def measure() -> Iterator[Line]:
    yield from measure_scratch()
    yield backend_line()
