"""Messages for which SGLang has to be idle, held back until background requests have given way: nobody who sends one
knows of these."""

from __future__ import annotations

from typing import Protocol

from sglang.srt.managers import io_struct

LONGEST_S = 10.0
"""After which they go on all the same: SGLang says then what it says to whoever comes while it runs."""

NEEDS_IDLE = (
    io_struct.FlushCacheReqInput,
    io_struct.ReleaseMemoryOccupationReqInput,
    io_struct.UpdateWeightFromDiskReqInput,
    io_struct.UpdateWeightsFromDistributedReqInput,
    io_struct.UpdateWeightsFromIPCReqInput,
    io_struct.UpdateWeightsFromTensorReqInput,
)


class GiveWay:
    """Sent by rank 0 to all: every background request is to be given up."""


class Load(Protocol):
    """What the scheduler has to do: ``has_background`` alone, with no user's request, or nothing at all. While it
    ``is_paused`` nothing comes to its end; ``awaits_idle``: it keeps a flush itself until it is idle."""

    @property
    def is_paused(self) -> bool: ...
    @property
    def awaits_idle(self) -> bool: ...
    @property
    def has_background(self) -> bool: ...
    @property
    def is_idle(self) -> bool: ...
    @property
    def has_users(self) -> bool: ...


class HeldMessages:
    """On the rank that receives. Those held go on in the order in which they came."""

    def __init__(self) -> None:
        self._held: list[object] = []
        self._since_s = 0.0

    def sift(self, received: list[object], load: Load, now_s: float) -> None:
        """Take what has to wait out of ``received``, and put what has waited before it."""
        is_background_alone = load.has_background and not (load.has_users or load.is_paused)
        if not self._held:
            if is_background_alone and load.awaits_idle:
                received.append(GiveWay())
            if not any(isinstance(message, NEEDS_IDLE) for message in received) or not is_background_alone:
                return
            self._since_s = now_s
        elif load.is_idle or load.has_users or load.is_paused or now_s - self._since_s > LONGEST_S:
            received[:0] = self._held
            self._held = []
            return
        self._held += [message for message in received if isinstance(message, NEEDS_IDLE)]
        received[:] = [message for message in received if not isinstance(message, NEEDS_IDLE)]
        received.append(GiveWay())
