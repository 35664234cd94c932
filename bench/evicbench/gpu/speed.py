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
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from evicbench.gpu.figures import Figure, Part, Sample
from evicbench.gpu.machine import Settings, run_phase, settings, time_calls
from evicbench.gpu.pools import BYTES, LLAMA_32K, Pool, Shape, contiguous, random_pool

MIN_SHARE, MIN_CODEC_SHARE = 0.8, 0.6
MOST_READS = 2.5
COPY_BYTES = 1 << 30
KEPT = (0.5, 0.2)
PAGE_SIZE, WINDOW, QUERY_HEADS = 16, 32, 32
TINY = Shape(96, 2, 2, 64, torch.bfloat16, 128)

_MOVERS = "key_norm", "value_key_ratio", "key_difference", "redundancy", "compact", "fill_holes", "gather", "scatter"
JUDGED = dict.fromkeys(_MOVERS, MIN_SHARE) | dict.fromkeys(("encode", "decode"), MIN_CODEC_SHARE)
"""Least share of the copy rate of what is bound by memory. ``page_mean`` reads what fits the L2, ``select_survivors``
counts in registers, ``window_attention`` multiplies: these are timed and not judged by themselves."""


Timed = tuple[str, str, int, Callable[[], object]]
"""A kernel, a note, the bytes it must move, and the call."""


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
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self.device == "cuda")
        host.copy_(source)
        for what, call in (
            ("host-to-device copy, pinned", lambda: target.copy_(host, non_blocking=True)),
            ("device-to-host copy, pinned", lambda: host.copy_(target, non_blocking=True)),
        ):
            yield _rate_figure(what, _rates(size, self.time(call, 10)))

    def measure_kernels(self, is_shuffled: bool) -> Iterator[Figure]:
        pool = random_pool(self.shape, self._generator)
        for kernel, note, num_bytes, call in self.calls(pool if is_shuffled else contiguous(pool)):
            sample = self.time(call)
            share = _rates(num_bytes, sample).median / self.copy_rate
            least = JUDGED.get(kernel)
            low, high = sample.quartiles
            yield Figure(
                f"kernel {kernel}{note}, {'shuffled slots' if is_shuffled else 'slots in order'}",
                100 * share,
                "% of the copy rate",
                "" if least is None else f">= {least:.0%}",
                None if least is None else share >= least,
                f"{1e3 * sample.median:.3f} ms ({1e3 * low:.3f} to {1e3 * high:.3f}) for {num_bytes / 1e9:.3f} GB",
                extra={"seconds": sample.median, "bytes": num_bytes},
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

        def compress(score: Callable[[], torch.Tensor], num_kept: int) -> None:
            survivors = select_survivors(score(), num_kept, backend="triton")
            compact(pool.k, pool.v, pool.slots, survivors, backend="triton")

        read_s = self.shape.kv_bytes / self.copy_rate
        for (press, score), kept in product(scores.items(), KEPT):
            sample = self.time(partial(compress, score, int(self.shape.n * kept)))
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
        """Every kernel on this pool; those that write leave a valid one."""
        from evicbench.gpu.checks import random_survivors, staging
        from sglang_evicpress.codec.layout import BITS, layout_of
        from sglang_evicpress.kernels import group_codec, score, stage
        from sglang_evicpress.kernels.compact import compact
        from sglang_evicpress.kernels.fill_holes import fill_holes
        from sglang_evicpress.kernels.redundancy import redundancy
        from sglang_evicpress.kernels.select import select_survivors
        from sglang_evicpress.kernels.window_attention import window_attention

        shape, k, v, slots = self.shape, pool.k, pool.v, pool.slots
        layers, heads, n = shape.num_layers, shape.num_heads, shape.n
        host = torch.Generator().manual_seed(self.chosen.seed)

        def survivors(num_kept: int, among: Shape = shape) -> torch.Tensor:
            return random_survivors(among, num_kept, host).to(self.device)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(layers, *size, device=self.device, generator=self._generator)

        def timed(kernel: Callable[..., object], count: int, *given: object, note: str = "", **named: object) -> Timed:
            name = kernel.__name__
            return name, note, BYTES[name](shape, count), partial(kernel, *given, **named, backend="triton")

        yield timed(score.key_norm, 0, k, slots)
        yield timed(score.value_key_ratio, 0, k, v, slots)
        yield timed(score.key_difference, 0, k, slots)
        recent = survivors(min(WINDOW, n))
        yield timed(redundancy, recent.shape[-1], k, slots, recent)
        scores = randn(heads, n)
        yield timed(score.page_mean, PAGE_SIZE, scores, PAGE_SIZE)
        query_heads = 2 * heads if self.chosen.tiny else QUERY_HEADS
        queries = randn(WINDOW, query_heads, shape.head_dim).to(shape.dtype)
        positions = torch.arange(n, dtype=torch.int32, device=self.device).expand(layers, heads, -1).contiguous()
        asked = torch.arange(n - WINDOW, n, device=self.device)
        yield timed(window_attention, query_heads, queries, k, slots, asked, positions, shape.head_dim**-0.5)
        for kept in KEPT:
            num_kept, note = int(n * kept), f" kept {kept}"
            yield timed(select_survivors, num_kept, scores, num_kept, note=note)
            yield timed(compact, num_kept, k, v, slots, survivors(num_kept), note=note)
        moves = n // 4
        targets = survivors(moves, replace(shape, n=n - moves))
        sources = (n - moves + torch.arange(moves, device=self.device)).expand_as(targets).int().contiguous()
        yield timed(fill_holes, moves, k, v, slots, targets, sources)
        for codec, bits in BITS.items():
            layout = layout_of(codec, n, heads * shape.head_dim, shape.dtype.itemsize)
            stored = torch.empty((layers, layout.num_bytes), dtype=torch.uint8, device=self.device)
            flag = torch.zeros(1, dtype=torch.int32, device=self.device)
            yield timed(group_codec.encode, bits, k, v, slots, layout, stored, flag, note=f" {codec}")
            yield timed(group_codec.decode, bits, k, v, slots, layout, stored, 0, note=f" {codec}")
        staged, table = staging(shape, n, self.device), stage.stage_table(k, v)
        for move in (stage.gather, stage.scatter):
            yield timed(move, n, k, v, slots, staged, table=table)


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
