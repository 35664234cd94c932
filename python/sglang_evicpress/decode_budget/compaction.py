"""Moving survivors together, and its cost in slot copies.

``survivors`` is int32 [L, H, m], ascending indices into the n slots of a request's row, as ``select_survivors``
gives them. Both ways fill the first m slots of the row: repack keeps the order and slides survivors forward;
hole-filling leaves those below m where they are and moves only the others, so that a head's tokens are no longer
in the order of their positions. Nothing here waits for the device unless it says so.
"""

from __future__ import annotations

import torch
from torch import Tensor


def repack_copies(survivors: Tensor) -> Tensor:
    """int64 [L, H]: survivors that an order-preserving repack moves."""
    front = torch.arange(survivors.shape[-1], device=survivors.device, dtype=survivors.dtype)
    return (survivors != front).sum(-1)


def holefill_copies(survivors: Tensor) -> Tensor:
    """int64 [L, H]: survivors that hole-filling moves; never more than a repack, nor than are dropped."""
    return (survivors >= survivors.shape[-1]).sum(-1)


def hole_moves(survivors: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Moves of hole-filling: ``(targets, sources)``, int32 [L, H, k] with k = min(m, num_slots - m).

    Per head, in ascending order, the survivors at m and above go to the dropped indices below m; entries beyond
    a head's moves are -1 in both. Where a repack would copy no more, the moves are the repack's own, so that these are
    the cheaper ones in each head.
    Raises ValueError when there are more survivors than slots.
    """
    num_kept = survivors.shape[-1]
    if num_kept > num_slots:
        raise ValueError(f"{num_kept} survivors of {num_slots} slots: expected at most as many as slots")
    width = min(num_kept, num_slots - num_kept)
    is_taken = torch.zeros(*survivors.shape[:-1], num_slots, dtype=torch.bool, device=survivors.device)
    is_taken.scatter_(-1, survivors.long(), True)
    # Stable and ascending: the holes come first, in their order.
    holes = is_taken[..., :num_kept].to(torch.uint8).argsort(dim=-1, stable=True)[..., :width]
    num_moves = holefill_copies(survivors).unsqueeze(-1)
    entry = torch.arange(width, device=survivors.device)
    is_move = entry < num_moves
    sources = survivors.gather(-1, (num_kept - num_moves + entry).clamp_(max=max(num_kept - 1, 0)))
    return holes.int().masked_fill_(~is_move, -1), sources.masked_fill_(~is_move, -1)


def repack_positions(positions: Tensor, survivors: Tensor) -> Tensor:
    """The position map after a repack: [L, H, m] of ``positions`` [L, H, n], ascending if it was."""
    return positions.gather(-1, survivors.long())


def holefill_positions(positions: Tensor, targets: Tensor, sources: Tensor, num_kept: int) -> Tensor:
    """The position map after the moves of ``hole_moves``: [L, H, num_kept] of ``positions`` [L, H, n]."""
    # Entries without a move write to the column behind the survivors, which is cut off again.
    front = positions[..., : num_kept + 1].clone()
    moved = positions.gather(-1, sources.clamp(min=0).long())
    front.scatter_(-1, targets.long().masked_fill(targets < 0, num_kept), moved)
    return front[..., :num_kept].contiguous()


def dead_pages(slots: Tensor, is_alive: Tensor, page_size: int) -> Tensor:
    """The pages (slot // page_size) that can be freed as they lie: those with no slot alive; int64, in row order.

    ``slots``: int64 [n], a row whose pages start at its multiples of ``page_size``; ``is_alive``: bool [n],
    whether any layer and head still needs the slot. Waits for the device. A paged allocator gives nothing back
    for the others, however few of their slots are alive.
    """
    if slots.shape != is_alive.shape or slots.dim() != 1:
        raise ValueError(f"slots {tuple(slots.shape)} with is_alive {tuple(is_alive.shape)}: expected two of [n]")
    padding = -slots.numel() % page_size
    alive = torch.nn.functional.pad(is_alive, (0, padding)).view(-1, page_size).any(-1)
    return slots[::page_size][~alive] // page_size
