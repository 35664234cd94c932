"""Agreement of tensor-parallel ranks: each has its own bytes and its own disk, and all must decide alike.

Every method is a collective, which all ranks come to at the same point; a rank alone gets back what it gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

Told = TypeVar("Told")


class Ranks:
    """The ranks of ``group`` (on the CPU), None where there is one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.is_alone = group is None
        self.is_first = self.rank == 0

    def part(self) -> None:
        """The server ends: from now on every rank is alone."""
        self._group, self.is_alone, self.is_first = None, True, True

    def lowest(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise minimum of int64 [n], on the host, over all ranks."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def highest(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum of int64 [n], on the host, over all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag whether any rank has it set; nothing is asked for none."""
        if self.is_alone or not flags:
            return list(flags)
        return [bool(flag) for flag in self.highest(torch.tensor(flags, dtype=torch.int64))]

    def told_by_first(self, value: Told) -> Told:
        """Value of rank 0."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=dist.get_global_rank(self._group, 0), group=self._group)
        return values[0]

    def gathered(self, value: Told) -> list[Told]:
        """Values of all ranks, that of rank 0 first."""
        if self._group is None:
            return [value]
        values = [value] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _reduced(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self._group is None:
            return values
        reduced = values.clone()
        dist.all_reduce(reduced, op=op, group=self._group)
        return reduced
