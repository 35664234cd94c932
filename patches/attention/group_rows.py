"""Rows of request slots for groups of layers that keep different numbers of tokens.

SGLang's ``req_to_token`` has a slot wherever any layer keeps a token. Each group of layers has a table of its own,
whose rows are the slots that it fills, left-justified. Which group fills every slot differs from node to node: budgets
that are searched, entries of an earlier server and what a split leaves have other counts than the menu's. The tables
follow SGLang's rows lazily: only a batch with a row that differs brings those of its requests up to date. Nothing is
allocated unless the menu has layer budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_evicpress.device import to_device
from sglang_evicpress.patches.attention.request_holes import RequestHoles
from sglang_evicpress.patches.tree.node_kv import PrefixView
from sglang_evicpress.policy.layer_counts import LayerGroups


@dataclass(frozen=True, slots=True)
class GroupTable:
    """``rows``: int32 [rows, context], the slots that the layers of ``group`` read; ``holes``: tokens of each row
    without one there."""

    group: int
    rows: torch.Tensor
    holes: RequestHoles


class GroupRows:
    """The tables of all groups; ``main``: SGLang's rows [rows, context].

    Written where ``RequestHoles`` are, on the scheduler thread and its stream; brought up to date where a batch is
    planned, in the stream in which it runs.
    """

    def __init__(self, groups: LayerGroups, main: torch.Tensor) -> None:
        self.groups = groups
        self.tables = [
            GroupTable(group, torch.zeros_like(main), RequestHoles(len(main), main.device))
            for group in range(groups.num_groups)
        ]
        self.batch: list[int] = []
        self._main = main
        self._synced = [0] * len(main)  # slots of a row of ``main`` that the tables have as well
        self._none = (0,) * len(self.tables)
        self._fewer: dict[int, tuple[int, ...]] = {}  # by row that differs: how many slots fewer each table's has

    def write(self, rows_device: torch.Tensor, rows_host: torch.Tensor, views: Sequence[PrefixView]) -> None:
        """Requests with these prefixes have these rows now; what they compute comes behind the prefix."""
        rows = rows_host.tolist()
        for row, view in zip(rows, views, strict=True):
            self._fewer.pop(row, None)
            self._synced[row] = 0
            if view.shared is not None:
                self._begin(row, view)
        for index, table in enumerate(self.tables):
            fewer = [self._fewer[row][index] if row in self._fewer else 0 for row in rows]
            holes = [view.holes + count for view, count in zip(views, fewer, strict=True)]
            if any(holes) or table.holes.has_holes(rows_host):
                table.holes.write(rows_device, rows_host, holes)

    def _begin(self, row: int, view: PrefixView) -> None:
        shared = view.shared
        if shared is None:
            return
        fewer = []
        for table in self.tables:
            slots = shared.groups[table.group]
            table.rows[row, : len(slots)] = slots.to(table.rows.dtype)
            fewer.append(shared.num_slots - len(slots))
        self._fewer[row] = tuple(fewer)
        self._synced[row] = shared.num_slots

    def note_written(self, row: int, begin: int) -> None:
        """A row of ``main`` has other slots from ``begin`` on."""
        self._synced[row] = min(self._synced[row], begin)

    def begin_batch(self, rows_host: torch.Tensor | None) -> None:
        """Remember the rows of the batch that is about to run, in batch order, if any of them differs."""
        rows = [] if rows_host is None or not self._fewer else rows_host.tolist()
        self.batch = [] if self._fewer.keys().isdisjoint(rows) else rows
        for table in self.tables if self.batch else ():
            table.holes.begin_batch(rows_host)

    def bring_up_to_date(self, lens: Sequence[int]) -> None:
        """Let the tables have what SGLang's rows have: the first ``lens`` slots of the rows of the batch there."""
        nexts = list[tuple[int, int]]()
        for row, length in zip(self.batch, lens, strict=False):
            begin, fewer = self._synced[row], self._fewer.get(row, self._none)
            if length <= begin:
                continue
            self._synced[row] = length
            if length == begin + 1:
                nexts.append((row, begin))
                continue
            for table, back in zip(self.tables, fewer, strict=True):
                table.rows[row, begin - back : length - back] = self._main[row, begin:length]
        if nexts:  # a decode step: one token of each request, in one operation a table
            fewer_of = [self._fewer.get(row, self._none) for row, _ in nexts]
            ends = [[begin - fewer[index] for (_, begin), fewer in zip(nexts, fewer_of, strict=True)]
                    for index in range(len(self.tables))]  # fmt: skip
            rows, begins, *table_ends = to_device(torch.tensor([*zip(*nexts, strict=True), *ends]), self._main.device)
            slots = self._main[rows, begins]
            for table, table_end in zip(self.tables, table_ends, strict=True):
                table.rows[rows, table_end] = slots


_rows: GroupRows | None = None


def attach(rows: GroupRows | None) -> None:
    """Make these the ones of this process; None where all layers read the same."""
    global _rows
    _rows = rows


def active() -> GroupRows | None:
    return _rows


def note_written(row: int | None, begin: int) -> None:
    """See ``GroupRows.note_written``; nothing where all layers read the same."""
    if _rows is not None and row is not None:
        _rows.note_written(row, begin)
