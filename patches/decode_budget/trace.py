"""The passes of requests that asked for a trace of them, with the positions that each left, in bounded memory.

For tests and for finding faults: `kv_decode_trace` in a request's custom parameters, on a server started with
`--kv-decode-client-budgets trace`, and `&positions=true` to read it, a page of values at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakSet

import numpy as np
import torch

from sglang_evicpress.decode_budget.stats import PassRecord
from sglang_evicpress.device import HostCopy

MAX_PASSES = 512
MAX_TRACES_BYTES = 64 << 20
PASS_BYTES = 1024  # what a pass takes beside its positions, roundly


@dataclass(slots=True, eq=False, weakref_slot=True)
class DecodeTrace:
    """Every pass of one request, oldest first, with the positions that it left; ``final``: those held at its end.
    ``is_cut``: some have found no room."""

    passes: list[tuple[PassRecord, HostCopy]] = field(default_factory=list)
    final: HostCopy | None = None
    is_cut: bool = False
    num_bytes: int = 0

    def forget_from(self, num_tokens: int) -> None:
        """Without the passes at ``num_tokens`` tokens or more; their room is not given back before the trace is."""
        self.passes = [entry for entry in self.passes if entry[0].logical < num_tokens]

    @property
    def num_values(self) -> int:
        """Positions of all passes together."""
        return sum(positions.num_elements for _, positions in self.passes)

    def values(self, begin: int, end: int) -> np.ndarray:
        """int32 [at most end - begin]: of the positions of all passes, one after the other, those from ``begin`` on."""
        parts, at = [], 0
        for _, positions in self.passes:
            if at >= end:
                break
            if at + positions.num_elements > begin:
                parts.append(positions.read().numpy().reshape(-1)[max(0, begin - at) : end - at])
            at += positions.num_elements
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def to_json(self) -> list[dict[str, object]]:
        """The passes with the shapes of what they left, [n] or [L, H, n]."""
        return [{**record.to_json(), "positions_shape": list(positions.shape)} for record, positions in self.passes]


class TraceRoom:
    """Memory of all traces of a server. Running requests come first: of those that ended the oldest give
    up theirs."""

    def __init__(self, most_bytes: int = MAX_TRACES_BYTES) -> None:
        self._most_bytes = most_bytes
        self._traces: WeakSet[DecodeTrace] = WeakSet()

    @property
    def num_bytes(self) -> int:
        return sum(trace.num_bytes for trace in self._traces)

    def add(self, trace: DecodeTrace, record: PassRecord, positions: torch.Tensor, ended: list[DecodeTrace]) -> None:
        """Keep a pass, or mark the trace as cut. ``ended`` are the traces of requests that ended, oldest first."""
        if len(trace.passes) < MAX_PASSES and self._has_room(trace, positions, ended):
            trace.passes.append((record, HostCopy(positions)))
        else:
            trace.is_cut = True

    def end(self, trace: DecodeTrace, positions: torch.Tensor | None, ended: list[DecodeTrace]) -> None:
        """Keep what the request holds at its end, where its row is its own."""
        if positions is None:
            return
        if self._has_room(trace, positions, ended):
            trace.final = HostCopy(positions)
        else:
            trace.is_cut = True

    def _has_room(self, trace: DecodeTrace, positions: torch.Tensor, ended: list[DecodeTrace]) -> bool:
        needed = PASS_BYTES + positions.numel() * positions.element_size()
        missing = self.num_bytes + needed - self._most_bytes
        if missing > sum(each.num_bytes for each in ended):
            return False
        for oldest in ended:
            if missing <= 0:
                break
            missing -= oldest.num_bytes
            oldest.passes, oldest.final, oldest.is_cut, oldest.num_bytes = [], None, True, 0
        trace.num_bytes += needed
        self._traces.add(trace)
        return True
