"""Cost of groups of layers that read different slots: what is planned for each, over a decode step of a real server."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from evicbench.correctness.reference import PEAKY_VOCABULARY, make_peaky_model
from evicbench.report import Line
from evicbench.testbed.server import Server
from sglang_evicpress.core import Form
from sglang_evicpress.patches.attention.cpu_backend import SdpaBackend
from sglang_evicpress.patches.attention.group_rows import GroupRows
from sglang_evicpress.patches.attention.layer_groups import LayerGroupBackends
from sglang_evicpress.patches.attention.request_holes import RequestHoles
from sglang_evicpress.patches.tree.node_kv import GroupSlots, PrefixView
from sglang_evicpress.search.menu_budgets import layer_groups

BOUND = 0.05
FORM, NUM_LAYERS, KEPT = Form("keydiff", 0.4, budget="pyramid"), 4, 0.4
CONTEXT, BATCH, STEPS = 1000, 8, 64
WARM_STEPS, ROUNDS = 8, 5


def decode_step_s(model: Path) -> float:
    """Seconds of a decode step of ``BATCH`` requests over compressed contexts: the median of some rounds."""
    draw = random.Random(0)
    with Server(
        *("--kv-policy", "evicpress", "--kv-alpha", "1", "--kv-disable-online-profiling", "--skip-tokenizer-init"),
        *("--kv-forms", str(FORM), "--max-total-tokens", "65536", "--chunked-prefill-size", "16384"),
        model=model,
    ) as server:
        contexts = [[draw.randrange(3, PEAKY_VOCABULARY) for _ in range(CONTEXT)] for _ in range(BATCH)]
        for context in contexts:
            server.generate(context, 1)
        for node in server.get("/evicpress/tree")["nodes"]:
            if node["num_tokens"] < CONTEXT // 2:
                continue  # what two of them share
            server.post(f"/evicpress/nodes/{node['id']}/compress", {"form": str(FORM)})
        seconds = []
        for _ in range(ROUNDS):
            taken = []
            for num_tokens in (WARM_STEPS, WARM_STEPS + STEPS):
                prompts = [[*context, *(draw.randrange(3, PEAKY_VOCABULARY) for _ in range(8))] for context in contexts]
                begin = time.perf_counter()
                server.generate(prompts, num_tokens)
                taken.append(time.perf_counter() - begin)
            seconds.append((taken[1] - taken[0]) / STEPS)
        return statistics.median(seconds)


def planned_s() -> float:
    """Seconds that a step of the same batch spends on the groups that have rows of their own, median over steps."""
    groups = layer_groups([FORM], {}, NUM_LAYERS, NUM_LAYERS)
    counts = groups.counts(FORM.budget, round(KEPT * CONTEXT), 4, CONTEXT)
    main = torch.zeros(BATCH + 1, CONTEXT + STEPS + 16, dtype=torch.int32)
    rows, table = GroupRows(groups, main), RequestHoles(len(main), "cpu")
    where, num_shared = torch.arange(1, BATCH + 1), max(counts)
    shared = GroupSlots(num_shared, tuple(torch.arange(count) for count in counts))
    views = [PrefixView(torch.arange(num_shared), CONTEXT - num_shared, shared=shared)] * BATCH
    table.write(where, where, [view.holes for view in views])
    rows.write(where, where, views)
    others = [None if group == groups.whole else _backend(rows, group) for group in range(groups.num_groups)]
    planner = LayerGroupBackends(_backend(rows, None), others, rows, 0)
    seconds = []
    for step in range(STEPS):
        lens = torch.full((BATCH,), CONTEXT + 1 + step)
        batch: Any = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=BATCH,
            req_pool_indices=where,
            seq_lens=lens,
            seq_lens_cpu=lens,
            seq_lens_sum=int(lens.sum()),
        )
        begin = time.perf_counter()
        table.begin_batch(where)
        rows.begin_batch(where)
        planner.plan(batch, table)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _backend(rows: GroupRows, group: int | None) -> Any:
    backend = object.__new__(SdpaBackend)
    of_group = next((table.rows for table in rows.tables if table.group == group), torch.zeros(1, 1))
    vars(backend).update(req_to_token_pool=SimpleNamespace(req_to_token=of_group))
    return backend


def measure() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        step_s = decode_step_s(make_peaky_model(Path(folder)))
    extra_s = planned_s()
    share = extra_s / step_s
    yield Line(
        f"uneven layers: planning {NUM_LAYERS} counts instead of one, over a decode step on the CPU ({BATCH} requests, "
        f"{CONTEXT} tokens, 4 layers)",
        f"<= {BOUND:.0%} of the step",
        f"{share:.1%}: {1e6 * extra_s:.0f} us of {1e3 * step_s:.2f} ms",
        share <= BOUND,
    )
