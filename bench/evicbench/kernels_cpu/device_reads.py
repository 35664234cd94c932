"""Planning of a step over compact rows never waits for the device: the table of holes and the batch lie on torch's
meta device, which has shapes but no data, so that whatever reads data of it on the host raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from evicbench.pytest_runs import run_tests, together, verdict
from evicbench.report import Line

NUM_ROWS = 64
BATCH_SIZES = (1, 7, 32)


def batch_of(size: int, device: str, *, extend: bool) -> SimpleNamespace:
    """Batch as SGLang hands it to a backend: tensors of the device, and the host's copy of lengths."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    lens = torch.arange(100, 100 + size)
    prefix_lens = [90 + index for index in range(size)]
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND if extend else ForwardMode.DECODE,
        batch_size=size,
        req_pool_indices=torch.arange(1, size + 1).to(device),
        seq_lens=lens.to(device),
        seq_lens_cpu=lens,
        seq_lens_sum=int(lens.sum()),
        extend_prefix_lens=torch.tensor(prefix_lens, dtype=torch.int32).to(device) if extend else None,
        extend_prefix_lens_cpu=prefix_lens if extend else None,
    )


def plan(size: int, device: str, *, extend: bool) -> Any:
    from sglang_evicpress.patches.attention.physical_lengths import physical_view
    from sglang_evicpress.patches.attention.req_to_token import RequestHoles

    table = RequestHoles(NUM_ROWS, device)
    where = torch.arange(1, size + 1)
    table.note(where, list(range(10, 10 + size)))  # what write() does to both; pinning needs CUDA
    if table.device is not table.host:
        table.device[where.to(device)] = torch.arange(10, 10 + size).to(device)
    table.add([1], 16, torch.tensor([1]).to(device))  # a budget of a running request frees a page
    table.begin_batch(where)
    return physical_view(batch_of(size, device, extend=extend), table)


def reads_data(act: Callable[[], Any]) -> str | None:
    """Error raised when data was read, one or the other by the operator; None when none was."""
    try:
        act()
    except (NotImplementedError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def measure() -> Iterator[Line]:
    yield views()
    found = run_tests("tests/contract/attention/test_no_device_reads.py", interpreted=True)
    yield verdict(
        "the hooks that run in every step, on tensors without data: rows, holes, queries, budgets, loads",
        "every case reads nothing of the device",
        together(found, ""),
    )


def views() -> Line:
    cases = [(size, extend) for size in BATCH_SIZES for extend in (False, True)]
    problems = []
    for size, extend in cases:
        said = reads_data(lambda size=size, extend=extend: plan(size, "meta", extend=extend))
        if said:
            problems.append(f"batch {size}: {said}")
        on_cpu = plan(size, "cpu", extend=extend)
        held = [length - gap for length, gap in zip(range(100, 100 + size), [26, *range(11, 10 + size)], strict=True)]
        if on_cpu.seq_lens.tolist() != held or on_cpu.seq_lens_cpu.tolist() != held:
            problems.append(f"batch {size}: lengths {on_cpu.seq_lens.tolist()}, expected {held}")
    control = reads_data(lambda: bool((batch_of(2, "meta", extend=False).seq_lens > 0).any()))
    seen = "seen" if control else "NOT seen"
    return Line(
        "the view of a step with holes: reads of device data by the host (decode and extend, batch 1, 7, 32)",
        "0, with the right lengths on both sides, and the control, a read on purpose, is seen",
        f"{len(problems)} in {len(cases)} plans; {'; '.join([*problems[:1], f'control {seen}'])}",
        not problems and control is not None,
    )
