"""Devices that are checked by use, and copies between host and device that the scheduler does not wait for."""

from __future__ import annotations

import weakref
from collections import deque

import torch


def checked_device(name: str) -> torch.device:
    """The device of that name. Raises ValueError where there is none on this machine."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):  # no such name, no such device, no such build of torch
        raise ValueError(f"device {name!r} is not there: expected cpu, or cuda on a machine with a GPU") from None
    return device


class HostCopy:
    """A device tensor's copy on the host, started now and waited for only when it is first read.

    On CUDA the copy runs asynchronously on the current stream into pinned memory, so that compressing a node does not
    stall the scheduler, and moves to pageable memory once it has arrived; on the CPU it is the tensor itself.
    """

    __slots__ = ("__weakref__", "_event", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            _unpin_arrived()
            _PINNED.append(weakref.ref(self))
        else:
            self._tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    def read(self) -> torch.Tensor:
        event = self._event  # another thread may be here as well
        if event is not None:
            event.synchronize()
            self._tensor = self._tensor.clone()  # pinned memory is scarce: it goes back
            self._event = None
        return self._tensor

    @property
    def num_elements(self) -> int:
        """Waits for nothing."""
        return self._tensor.numel()

    @property
    def has_arrived(self) -> bool:
        event = self._event
        return event is None or event.query()


_PINNED: deque[weakref.ref[HostCopy]] = deque()
"""Copies that may still be in pinned memory, in the order in which they arrive."""


def _unpin_arrived() -> None:
    """Nobody may ever read a copy: what has arrived leaves pinned memory when the next one is made."""
    while _PINNED:
        first = _PINNED[0]()
        if first is not None:
            if not first.has_arrived:
                return
            first.read()
        _PINNED.popleft()


def to_device(values: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``values``, which are on the host, as a tensor there; the host does not wait for what is queued on the device."""
    if torch.device(device).type != "cpu":
        values = values.pin_memory()  # a copy from pageable memory would wait
    return values.to(device, non_blocking=True)
