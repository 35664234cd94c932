"""Speed on the GPU: copy rates of the machine, every kernel against them, and score + select + compact together.

Sizes are 32,768 tokens of Llama-3.1-8B's KV (4.29 GB, far beyond the L2), random data, slots in order and shuffled. A
kernel's share is the bytes it must move over its time, over the bytes that a device-to-device copy reads and writes in
that time. Medians of calls between CUDA events, queued without waiting in between. What planning a decode step costs
needs a scheduler and is measured by ``evicbench.gpu.server``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from evicbench.gpu.figures import Figure, Part, Sample, missing
from evicbench.gpu.machine import Settings, run_phase, settings, time_calls
from evicbench.gpu.pools import BYTES, LLAMA_32K, Pool, Shape, contiguous, random_pool, window_bytes

MIN_MATCH_KEPT = 0.8
MOST_READS = 2.5
COPY_BYTES = 1 << 30
KEPT = (0.5, 0.2)
PAGE_SIZE, WINDOW, QUERY_HEADS = 16, 32, 32
TINY = Shape(96, 2, 2, 64, torch.bfloat16, 128)

JUDGED = ("key_norm", "value_key_ratio", "key_difference", "redundancy", "compact", "fill_holes", "gather", "scatter")
"""Bound by memory. ``page_mean`` reads what fits the L2, ``select_survivors`` counts in registers, ``window_attention``
multiplies: these are timed and not judged by themselves."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A call to be timed, and the bytes it must move."""

    name: str
    kernel: str
    num_bytes: int
    call: Callable[[], object]


class Bench:
    """Times on one device; ``copy_rate`` is bytes read and written per second, once ``measure_copies`` has run."""

    def __init__(self, chosen: Settings) -> None:
        self.chosen = chosen
        self.device = chosen.device
        self.shape = TINY if chosen.tiny else LLAMA_32K
        self.copy_rate = 0.0
        self._generator = torch.Generator(device=chosen.device).manual_seed(chosen.seed)

    def time(self, call: Callable[[], object], repeats: int = 20) -> Sample:
        return time_calls(call, self.device, repeats=2 if self.chosen.tiny else repeats)

    def measure_copies(self) -> Iterator[Figure]:
        size = 1 << 20 if self.chosen.tiny else COPY_BYTES
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self.device, generator=self._generator)
        target = torch.empty_like(source)
        rates = _rates(2 * size, self.time(lambda: target.copy_(source)))
        self.copy_rate = rates.median
        yield _rate_figure("device-to-device copy, bytes read and written", rates)
        is_cuda = self.device == "cuda"
        host = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda)
        host.copy_(source)
        for what, call in (
            ("host-to-device copy, pinned", lambda: target.copy_(host, non_blocking=True)),
            ("device-to-host copy, pinned", lambda: host.copy_(target, non_blocking=True)),
        ):
            yield _rate_figure(what, _rates(size, self.time(call, 10)))

    def measure_kernels(self, is_shuffled: bool) -> Iterator[Figure]:
        where = "shuffled slots" if is_shuffled else "slots in order"
        pool = random_pool(self.shape, self._generator)
        for timed in self.calls(pool if is_shuffled else contiguous(pool)):
            yield self.kernel_figure(f"{timed.name}, {where}", timed, self.time(timed.call))
        for name in _unmeasured():
            yield missing(f"kernel {name}, {where}", "this version has no kernels/stage.py")

    def kernel_figure(self, what: str, timed: Timed, sample: Sample) -> Figure:
        share = _rates(timed.num_bytes, sample).median / self.copy_rate
        is_judged = timed.kernel in JUDGED
        low, high = sample.quartiles
        return Figure(
            f"kernel {what}",
            100 * share,
            "% of the copy rate",
            f">= {MIN_MATCH_KEPT:.0%}" if is_judged else "",
            share >= MIN_MATCH_KEPT if is_judged else None,
            f"{1e3 * sample.median:.3f} ms ({1e3 * low:.3f} to {1e3 * high:.3f}) for {timed.num_bytes / 1e9:.3f} GB",
            extra={"seconds": sample.median, "bytes": timed.num_bytes},
            is_timed=True,
        )

    def measure_together(self) -> Iterator[Figure]:
        """Score, select and compact one after the other, as a compression does, against reading that KV once."""
        from sglang_evicpress.kernels.compact import compact
        from sglang_evicpress.kernels.score import key_difference, key_norm, value_key_ratio
        from sglang_evicpress.kernels.select import select_survivors

        pool = random_pool(self.shape, self._generator)
        scores: dict[str, Callable[[], torch.Tensor]] = {
            "keydiff": lambda: key_difference(pool.k, pool.slots, backend="triton"),
            "knorm": lambda: -key_norm(pool.k, pool.slots, backend="triton"),
            "value_key_ratio": lambda: value_key_ratio(pool.k, pool.v, pool.slots, backend="triton"),
        }
        read_s = self.shape.kv_bytes / self.copy_rate
        for (press, score), kept in [(item, kept) for item in scores.items() for kept in KEPT]:
            num_kept = int(self.shape.n * kept)

            def compress(score: Callable[[], torch.Tensor] = score, num_kept: int = num_kept) -> None:
                survivors = select_survivors(score(), num_kept, backend="triton")
                compact(pool.k, pool.v, pool.slots, survivors, backend="triton")

            sample = self.time(compress)
            yield Figure(
                f"score + select + compact, {press}@{kept}",
                sample.median / read_s,
                "times reading that KV once",
                f"<= {MOST_READS}",
                sample.median <= MOST_READS * read_s,
                f"{1e3 * sample.median:.3f} ms; reading {self.shape.kv_bytes / 1e9:.2f} GB at the copy rate takes "
                f"{1e3 * read_s:.3f} ms",
                extra={"seconds": sample.median, "quartiles": sample.quartiles},
                is_timed=True,
            )

    def calls(self, pool: Pool) -> Iterator[Timed]:
        """Every kernel once on this pool; those that write leave it a valid one."""
        from evicbench.gpu.checks import random_survivors
        from sglang_evicpress.kernels.compact import compact
        from sglang_evicpress.kernels.fill_holes import fill_holes
        from sglang_evicpress.kernels.redundancy import redundancy
        from sglang_evicpress.kernels.score import key_difference, key_norm, page_mean, value_key_ratio
        from sglang_evicpress.kernels.select import select_survivors
        from sglang_evicpress.kernels.window_attention import window_attention

        shape, k, v, slots = self.shape, pool.k, pool.v, pool.slots
        host = torch.Generator().manual_seed(self.chosen.seed)

        def timed(kernel: str, count: int, call: Callable[[], object], note: str = "") -> Timed:
            return Timed(kernel + note, kernel, BYTES[kernel](shape, count), call)

        yield timed("key_norm", 0, lambda: key_norm(k, slots, backend="triton"))
        yield timed("value_key_ratio", 0, lambda: value_key_ratio(k, v, slots, backend="triton"))
        yield timed("key_difference", 0, lambda: key_difference(k, slots, backend="triton"))
        recent = random_survivors(shape, min(WINDOW, shape.n), host).to(self.device)
        yield timed("redundancy", recent.shape[-1], lambda: redundancy(k, slots, recent, backend="triton"))
        scores = torch.randn(shape.num_layers, shape.num_heads, shape.n, device=self.device, generator=self._generator)
        yield timed("page_mean", PAGE_SIZE, lambda: page_mean(scores, PAGE_SIZE, backend="triton"))
        query_heads = 2 * shape.num_heads if self.chosen.tiny else QUERY_HEADS
        queries = torch.randn(
            shape.num_layers, WINDOW, query_heads, shape.head_dim, device=self.device, generator=self._generator
        ).to(shape.dtype)
        positions = torch.arange(shape.n, dtype=torch.int32, device=self.device)
        positions = positions.expand(shape.num_layers, shape.num_heads, -1).contiguous()
        asked = torch.arange(shape.n - WINDOW, shape.n, device=self.device)
        given = queries, k, slots, asked, positions, shape.head_dim**-0.5
        yield Timed(
            "window_attention",
            "window_attention",
            window_bytes(shape, query_heads),
            lambda: window_attention(*given, backend="triton"),
        )
        for kept in KEPT:
            num_kept = int(shape.n * kept)
            survivors = random_survivors(shape, num_kept, host).to(self.device)
            yield timed(
                "select_survivors",
                num_kept,
                lambda num_kept=num_kept: select_survivors(scores, num_kept, backend="triton"),
                f" kept {kept}",
            )
            yield timed(
                "compact",
                num_kept,
                lambda survivors=survivors: compact(k, v, slots, survivors, backend="triton"),
                f" kept {kept}",
            )
        moves = shape.n // 4
        targets = random_survivors(Shape(shape.n - moves, *_rest(shape)), moves, host).to(self.device)
        sources = (shape.n - moves + torch.arange(moves)).expand_as(targets).int().contiguous().to(self.device)
        yield timed("fill_holes", moves, lambda: fill_holes(k, v, slots, targets, sources, backend="triton"))
        yield from self._stage_calls(pool)

    def _stage_calls(self, pool: Pool) -> Iterator[Timed]:
        from evicbench.gpu.checks import stage_module
        from evicbench.gpu.stage_checks import staging

        stage, shape = stage_module(), self.shape
        if stage is None:
            return
        staged = staging(pool, shape, shape.n, self.device)
        table = stage.stage_table(pool.k, pool.v)
        for name in ("gather", "scatter"):
            move = getattr(stage, name)
            yield Timed(
                name,
                name,
                BYTES[name](shape, shape.n),
                lambda move=move: move(pool.k, pool.v, pool.slots, staged, table=table, backend="triton"),
            )


def _unmeasured() -> tuple[str, ...]:
    from evicbench.gpu.checks import stage_module

    return () if stage_module() is not None else ("gather", "scatter")


def _rest(shape: Shape) -> tuple[int, int, int, torch.dtype, int]:
    return shape.num_layers, shape.num_heads, shape.head_dim, shape.dtype, shape.num_slots


def _rates(num_bytes: int, sample: Sample) -> Sample:
    """Bytes per second of each call."""
    return Sample(tuple(num_bytes / seconds for seconds in sample.values))


def _rate_figure(what: str, rates: Sample) -> Figure:
    low, high = rates.quartiles
    return Figure(what, rates.median / 1e9, "GB/s", spread=(low / 1e9, high / 1e9))


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = settings(__doc__, arguments)
    if chosen.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

    def parts() -> list[Part]:
        bench = Bench(chosen)

        def after_copies(measure: Callable[[], Iterator[Figure]]) -> Iterator[Figure]:
            if not bench.copy_rate:
                list(bench.measure_copies())  # --only left it out
            yield from measure()

        kernels = tuple(f"kernel {name}" for name in (*JUDGED, "page_mean", "select_survivors", "window_attention"))
        return [
            Part("copies", ("device-to-device", "host-to-device", "device-to-host"), bench.measure_copies),
            Part("kernels in order", kernels, lambda: after_copies(lambda: bench.measure_kernels(False))),
            Part("kernels shuffled", kernels, lambda: after_copies(lambda: bench.measure_kernels(True))),
            Part("together", ("score + select + compact",), lambda: after_copies(bench.measure_together)),
        ]

    return run_phase("speed", chosen, parts)


if __name__ == "__main__":
    sys.exit(main())
