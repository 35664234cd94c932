"""Attention where layers keep different numbers of tokens: one backend for each group of layers.

The backend that SGLang made serves every batch whose rows are the same in all layers, at no cost. For another batch
each group of layers has a backend of the same class over its own rows, which plans with its own KV lengths; a layer is
computed by that of its group. Such a batch is not replayed from a graph. Touches ``can_run_graph`` of the runners of
graphs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress import spawn
from sglang_evicpress.patches.attention import group_rows
from sglang_evicpress.patches.attention.group_rows import GroupRows
from sglang_evicpress.patches.attention.physical_view import physical_view
from sglang_evicpress.patches.attention.request_holes import RequestHoles
from sglang_evicpress.patches.attention.types import AttentionBackend, AttentionLayer, ForwardBatch, ModelRunner
from sglang_evicpress.patches.kv_flags import config_of
from sglang_evicpress.search.menu_budgets import layer_groups

logger = logging.getLogger(__name__)

_EXECUTOR = "sglang.srt.model_executor"
GRAPH_RUNNERS = (
    f"{_EXECUTOR}.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner",
    f"{_EXECUTOR}.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner",
    f"{_EXECUTOR}.cpu_graph_runner.CPUGraphRunner",
)
"""Those that replay a batch from a graph."""


class LayerGroupBackends:
    """Plans and computes by group of layers. ``main`` is the backend that SGLang made; ``others``, by group, those with
    rows of their own."""

    def __init__(
        self, main: AttentionBackend, others: Sequence[AttentionBackend], rows: GroupRows, first_layer: int
    ) -> None:
        self._rows, self._others, self._first_layer = rows, list(others), first_layer
        self._is_uneven = False
        for name in ("forward_extend", "forward_decode"):
            setattr(main, name, self._by_group(name, getattr(main, name)))

    @classmethod
    def install_on(cls, model_runner: ModelRunner) -> LayerGroupBackends | None:
        """Make the backends where the menu has layer budgets; None else. Raises SystemExit for budgets that this
        model cannot have."""
        group_rows.attach(None)
        config, pool = config_of(model_runner.server_args), model_runner.token_to_kv_pool
        try:
            groups = layer_groups(config.menu_forms, config.layers.shares, pool.layer_num, config.layers.max_counts)
        except ValueError as error:
            raise spawn.refusal(str(error)) from None
        if groups.num_groups == 1:
            return None
        rows = GroupRows(groups, model_runner.req_to_token_pool.req_to_token)
        make: Callable[[ModelRunner], AttentionBackend] = type(model_runner.attn_backend)
        others = [make(_with_rows(model_runner, table.rows)) for table in rows.tables]
        group_rows.attach(rows)
        megabytes = rows.tables[0].rows.nbytes / 1e6
        logger.info("evicpress: %d groups of layers, each with %.1f MB of rows", groups.num_groups, megabytes)
        return cls(model_runner.attn_backend, others, rows, pool.start_layer)

    def plan(self, forward_batch: ForwardBatch | None, table: RequestHoles) -> None:
        """Plan a batch for the groups with rows of their own, if any row of it differs there. None for one that is made
        up, of which there is no row. ``table``: the holes of SGLang's rows."""
        self._is_uneven = forward_batch is not None and bool(self._rows.batch)
        if forward_batch is None or not self._is_uneven:
            return
        lens = physical_view(forward_batch, table)
        self._rows.bring_up_to_date((lens.seq_lens if lens.seq_lens_cpu is None else lens.seq_lens_cpu).tolist())
        for backend, group_table in zip(self._others, self._rows.tables, strict=True):
            backend.init_forward_metadata(physical_view(forward_batch, group_table.holes))

    def _by_group(self, name: str, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        own = [getattr(other, name) for other in self._others]
        by_layer = [own[group] for group in self._rows.groups.group_of]

        def attended(
            q: torch.Tensor, k: object, v: object, layer: AttentionLayer, *args: object, **kwargs: object
        ) -> torch.Tensor:
            of_layer = by_layer[layer.layer_id - self._first_layer] if self._is_uneven else attend
            return of_layer(q, k, v, layer, *args, **kwargs)

        return attended


def _after_can_run_graph(result: object, *args: object, **kwargs: object) -> bool | None:
    """AFTER ``can_run_graph`` of the runners of graphs, for the batch that is about to run: a graph reads the rows of
    one group only."""
    rows = group_rows.active()
    return False if rows is not None and rows.batch else None


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    for runner in GRAPH_RUNNERS:
        registry.register(f"{runner}.can_run_graph", _after_can_run_graph, hook_type.AFTER)


def _with_rows(model_runner: ModelRunner, rows: torch.Tensor) -> ModelRunner:
    """The same runner with other rows, for a backend that is made of it."""
    twin = copy.copy(model_runner)
    twin.req_to_token_pool = copy.copy(model_runner.req_to_token_pool)
    twin.req_to_token_pool.req_to_token = rows
    translator = getattr(model_runner, "kv_index_translator", None)  # since 0.5.22: it holds the rows as well
    if translator is not None:
        twin.kv_index_translator = copy.copy(translator)
        twin.kv_index_translator.req_to_token = rows
    return twin
