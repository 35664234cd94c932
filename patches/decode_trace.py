"""The passes of requests that asked for a trace of them, with the positions that each left, in bounded memory.

For tests and for finding faults: `kv_decode_trace` in a request's custom parameters, `&positions=true` to read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakSet

import torch

from sglang_evicpress.decode.tally import PassRecord
from sglang_evicpress.layout import HostCopy

MAX_PASSES = 1024
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

    def to_json(self) -> list[dict[str, object]]:
        return [{**record.to_json(), "positions": held.read().tolist()} for record, held in self.passes]


class TraceRoom:
    """What all traces of a server may take together. Running requests come first: of those that ended the oldest give
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
        for oldest in ended:
            if missing <= 0:
                break
            missing -= oldest.num_bytes
            oldest.passes, oldest.final, oldest.is_cut, oldest.num_bytes = [], None, True, 0
        if missing > 0:
            return False
        trace.num_bytes += needed
        self._traces.add(trace)
        return True
