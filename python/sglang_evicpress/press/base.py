"""Input and result of a press, and the one selection that turns scores into survivors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sglang_evicpress.kernels.select import select_survivors


@dataclass(frozen=True, slots=True, eq=False)
class QueryWindow:
    """The last queries of the prefill that wrote a node, in token order.

    ``queries`` is [L, W, Hq, D] with RoPE applied; ``positions`` int64 [W], absolute and ascending. The
    window may end inside the node or lie after it (the queries of a later part of the same path).
    """

    queries: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PressInput:
    """One node as its bytes lie in the device pool. A press reads it and changes nothing.

    ``k_buffers`` and ``v_buffers`` hold one pool tensor [num_slots, H, D] per layer; ``slots`` (int64 [n])
    are the node's, in logical order. ``positions`` (int32 [L, H, n]) is the absolute position of what each
    slot holds, ascending along n; it differs per (layer, head) once a node has been compressed, and then
    n < ``num_tokens``, its logical length. ``start`` is the absolute position of the node's first token,
    ``scale`` the attention's factor on q.k. Raises ValueError when the shapes do not agree.
    """

    k_buffers: Sequence[Tensor]
    v_buffers: Sequence[Tensor]
    slots: Tensor
    positions: Tensor
    start: int
    num_tokens: int
    window: QueryWindow | None
    scale: float

    def __post_init__(self) -> None:
        num_layers, num_slots = len(self.k_buffers), self.slots.numel()
        if num_layers == 0 or num_layers != len(self.v_buffers):
            raise ValueError(f"{num_layers} layers of keys, {len(self.v_buffers)} of values: expected one each")
        want = (num_layers, self.k_buffers[0].shape[1], num_slots)
        if self.slots.dim() != 1 or tuple(self.positions.shape) != want:
            got = f"slots {tuple(self.slots.shape)} with positions {tuple(self.positions.shape)}"
            raise ValueError(f"{got}: expected {want[2:]} with {want}")
        if num_slots > self.num_tokens:
            raise ValueError(f"{num_slots} slots for {self.num_tokens} tokens: a slot holds one token")


class Press(Protocol):
    """A way to tell which tokens matter; ``needs_queries`` says whether it reads ``PressInput.window``."""

    name: ClassVar[str]
    needs_queries: ClassVar[bool]

    def score(self, node: PressInput) -> Tensor:
        """fp32 [L, H, n], one figure per slot of the node; the higher survives."""
        ...


def scored(press: Press, node: PressInput, sinks: int) -> Tensor:
    """fp32 [L, H, n] by which survivors are chosen, wherever that is done: the press's scores, infinite for slots that
    hold an absolute position below ``sinks`` (StreamingLLM, arXiv 2309.17453: attention sinks are the first tokens of
    the *sequence*, so a node that starts later has none). A node without slots has no scores. Raises ValueError for a
    press whose scores have another shape."""
    scores = press.score(node) if node.slots.numel() else node.positions.to(torch.float32)
    if scores.shape != node.positions.shape:
        want = tuple(node.positions.shape)
        raise ValueError(f"press {press.name} scored {tuple(scores.shape)}: expected {want}")
    return scores.masked_fill(node.positions < sinks, float("inf"))


def select(press: Press, node: PressInput, num_kept: int, sinks: int) -> Tensor:
    """The survivors: int32 [L, H, num_kept], ascending indices into ``node.slots``; ties keep the lower one.

    They are the best of each (layer, head) by ``scored``. A score that is not a number ranks last.

    Raises ValueError when ``num_kept`` is below 1, above n, or below the number of sinks. That number is
    counted from ``start``, not read from ``positions``, so that nothing waits for the device: a node that an
    earlier compression left without its sinks is refused as if it had them.
    """
    num_slots = node.slots.numel()
    if not 1 <= num_kept <= num_slots:
        raise ValueError(f"cannot keep {num_kept} of {num_slots} slots: expected 1 to {num_slots}")
    num_sinks = min(max(0, sinks - node.start), num_slots)
    if num_kept < num_sinks:
        raise ValueError(f"cannot keep {num_kept} slots of a node with {num_sinks} sinks: keep at least those")
    return select_survivors(scored(press, node, sinks), num_kept)
