"""Where the survivors of a compressed node sit: the M layout (DESIGN section 2), which makes splits and partial
matches free.

Survivors differ per (layer, kv head) but their number does not: the j-th survivor of every head lives in the node's
j-th physical slot. That slot is shown at the logical index M_j = max over (layer, head) of the position of the j-th
survivor. M is strictly increasing, so whoever takes the first p tokens of the node gets exactly the slots with M_j < p,
and those hold positions < p in every layer and head.
"""

from __future__ import annotations

import torch


class HostCopy:
    """A device tensor's copy on the host, started now and waited for only when it is first read.

    On CUDA the copy runs asynchronously on the current stream into pinned memory, so that compressing a node does not
    stall the scheduler; on the CPU it is the tensor itself.
    """

    __slots__ = ("_event", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def size(self) -> int:
        """Its elements; waits for nothing."""
        return self._tensor.numel()

    def read(self) -> torch.Tensor:
        event = self._event  # another thread may be here as well
        if event is not None:
            event.synchronize()
            self._event = None
        return self._tensor


def to_device(values: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``values``, which are on the host, as a tensor there; the host does not wait for what is queued on the device."""
    if torch.device(device).type != "cpu":
        values = values.pin_memory()  # a copy from pageable memory would wait
    return values.to(device, non_blocking=True)


class SurvivorLayout:
    """Placement of one compressed node's survivors; immutable.

    ``positions``: int32 [layers, kv_heads, m], absolute logical position held by slot j of each head, ascending in j.
    ``logical``: int64 [m], the node-relative logical index at which slot j is shown, strictly increasing.
    """

    __slots__ = ("_logical", "_positions", "num_slots")

    def __init__(self, positions: HostCopy, logical: HostCopy, num_slots: int) -> None:
        self._positions = positions
        self._logical = logical
        self.num_slots = num_slots

    @property
    def positions(self) -> torch.Tensor:
        return self._positions.read()

    @property
    def logical(self) -> torch.Tensor:
        return self._logical.read()

    def slots_before(self, num_tokens: int) -> int:
        """How many slots a request gets that matches the node's first ``num_tokens`` tokens."""
        return int(torch.searchsorted(self.logical, num_tokens))

    def split(self, num_tokens: int) -> tuple[SurvivorLayout, SurvivorLayout]:
        """The layouts of the first ``num_tokens`` tokens and of the rest (its logical indices start at 0 again)."""
        cut = self.slots_before(num_tokens)
        positions, logical = self.positions, self.logical
        left = SurvivorLayout(HostCopy(positions[..., :cut]), HostCopy(logical[:cut]), cut)
        right = SurvivorLayout(
            HostCopy(positions[..., cut:]), HostCopy(logical[cut:] - num_tokens), self.num_slots - cut
        )
        return left, right


def place(positions: torch.Tensor, start: int, page_size: int) -> torch.Tensor:
    """Logical index of each slot: int64 [m], node-relative, strictly increasing.

    ``positions``: [layers, kv_heads, m] absolute and ascending; ``start``: absolute position of the node's first token.
    With pages (m is a whole number of them), physical page j is shown at logical page floor(M of its last slot /
    page_size): it holds only positions below that page's end, and pages stay whole.
    """
    last = positions.amax(dim=(0, 1)).to(torch.int64) - start
    if page_size == 1:
        return last
    page = last.view(-1, page_size)[:, -1] // page_size
    offsets = torch.arange(page_size, device=last.device)
    return (page[:, None] * page_size + offsets).reshape(-1)
