"""Table of holes: how many tokens of each request's row have no slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_evicpress.device import to_device


class RequestHoles:
    """Holes per request row: one tensor for kernels on the pool's device and its mirror for host-side planning.

    ``device``: int64 [rows]; ``host``: int64 [rows] on the CPU. Both are written when a row is, on the scheduler thread
    and its stream, i.e. under the same barrier that guards ``req_to_token`` itself.
    """

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        self.device = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.host = self.device if self.device.device.type == "cpu" else torch.zeros(num_rows, dtype=torch.int64)
        self._with_holes: set[int] = set()
        self.batch: list[int] = []

    def write(self, rows_device: torch.Tensor, rows_host: torch.Tensor, holes: Sequence[int]) -> torch.Tensor:
        """Set the holes of these rows; returns them as a device tensor (copied without waiting for the device)."""
        host = self.note(rows_host, holes)
        if self.device is self.host:
            return host
        moved = to_device(host, self.device.device)
        self.device[rows_device] = moved
        return moved

    def note(self, rows_host: torch.Tensor, holes: Sequence[int]) -> torch.Tensor:
        """Set what the host knows of these rows; returns ``holes`` as a tensor."""
        for row, count in zip(rows_host.tolist(), holes, strict=True):
            if count:
                self._with_holes.add(row)
            else:
                self._with_holes.discard(row)
        values = torch.tensor(holes, dtype=torch.int64)
        self.host[rows_host] = values
        return values

    def add(self, rows: Sequence[int], num_holes: int, rows_device: torch.Tensor) -> None:
        """So many more tokens of each row have no slot; ``rows_device``: the same rows, int64 on the device."""
        self._with_holes.update(rows)
        self.host[torch.tensor(rows)] += num_holes
        if self.device is not self.host:
            self.device.index_add_(0, rows_device, torch.full_like(rows_device, num_holes))

    def begin_batch(self, rows_host: torch.Tensor | None) -> None:
        """Remember the holes of the batch that is about to run, in batch order."""
        self.batch = [] if rows_host is None or not self._with_holes else self.host[rows_host].tolist()

    def has_holes(self, rows_host: torch.Tensor) -> bool:
        """True if any of these rows has holes. Asked in every step: an operation on tensors takes 20 microseconds."""
        return bool(self._with_holes) and not self._with_holes.isdisjoint(rows_host.tolist())
