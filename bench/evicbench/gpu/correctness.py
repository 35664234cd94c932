"""Correctness on the GPU: every kernel against its reference, then greedy answers over holes against transformers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product

import torch

from evicbench.gpu.figures import Figure, Part
from evicbench.gpu.machine import Settings, run_phase, settings
from evicbench.gpu.pools import Shape, random_pool

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 128, 256)
NODES = ((1, 1, 2), (5, 2, 2), (97, 3, 2), (1000, 8, 2), (4099, 2, 3))  # tokens, kv heads, layers
ROUNDS = 3
KERNEL_S = 15.0
TINY_NODES = ((1, 1, 1), (40, 2, 2))
RACE_TOKENS, RACE_ROUNDS = 8192, 40


@contextmanager
def poisoned() -> Iterator[None]:
    """``torch.empty`` gives NaN, or the largest integer, meanwhile: an output that is not written never passes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def shapes(tiny: bool) -> list[Shape]:
    nodes = TINY_NODES if tiny else NODES
    dims = HEAD_DIMS[:1] if tiny else HEAD_DIMS
    return [
        Shape(n, layers, heads, dim, dtype, 2 * n + 7)
        for dtype, dim, (n, heads, layers) in product(DTYPES, dims, nodes)
    ]


def measure_kernel(chosen: Settings, name: str) -> Iterator[Figure]:
    """The worst of all shapes and rounds; no round begins after ``KERNEL_S``, as references on the CPU are slow."""
    from evicbench.gpu.checks import CHECKS, Trial

    generator = torch.Generator().manual_seed(chosen.seed)
    tolerance, check = CHECKS[name]
    worst, where, count, rounds = 0.0, "", 0, 0
    begin = time.monotonic()
    with poisoned():
        while rounds < (1 if chosen.tiny else ROUNDS) and time.monotonic() - begin < KERNEL_S:
            rounds += 1
            for shape in shapes(chosen.tiny):
                for error in check(Trial(random_pool(shape, generator), shape, generator, chosen.device)):
                    count += 1
                    if not error <= worst:
                        worst, where = error, str(shape)
    yield Figure(
        f"kernel {name}",
        worst,
        "relative error" if tolerance else "(0: every bit equal)",
        f"<= {tolerance:g}" if tolerance else "bit for bit",
        worst <= tolerance,
        f"{count} comparisons" + (f", worst at {where}" if where else ""),
    )


def measure_race(chosen: Settings) -> Iterator[Figure]:
    """Dense keeps again and again: only a device runs the warps of ``compact`` at the same time."""
    from evicbench.gpu.checks import Trial, dense_survivors
    from sglang_evicpress.kernels.compact import compact, compact_torch

    n, rounds = (40, 2) if chosen.tiny else (RACE_TOKENS, RACE_ROUNDS)
    generator = torch.Generator().manual_seed(chosen.seed)
    bad = 0
    for index in range(rounds):
        shape = Shape(n, 2, 4, 64 if chosen.tiny else 128, DTYPES[index % len(DTYPES)], n + 9)
        trial = Trial(random_pool(shape, generator), shape, generator, chosen.device)
        bad += trial.moved(compact, compact_torch, dense_survivors(shape, generator)) != 0.0
    what = f"{n} tokens, all but one kept"
    yield Figure("compact under dense keeps", float(bad), f"of {rounds} rounds wrong", "0", bad == 0, what)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = settings(__doc__, arguments)
    if chosen.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

    def parts() -> list[Part]:
        from evicbench.gpu.checks import CHECKS
        from evicbench.gpu.greedy import parts as greedy_parts

        return [
            *(Part(f"kernels {name}", (f"kernel {name}",), partial(measure_kernel, chosen, name)) for name in CHECKS),
            Part("kernels race", ("compact under dense keeps",), lambda: measure_race(chosen)),
            *greedy_parts(chosen),
        ]

    return run_phase("correctness", chosen, parts)


if __name__ == "__main__":
    sys.exit(main())
