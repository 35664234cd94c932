"""State of a request with a decode-time budget, at ``req.kv_budget``, and its lengths.

SGLang counts such a request logically. Physical are its row, its entry of the hole table and
the lengths that SGLang keeps of its KV; of the tokens without a slot those in the prefix it took from the tree are
``req.evicpress.holes``, all others ``num_dropped``, which is always whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sglang_evicpress.decode_budget.settings import DecodeSettings
from sglang_evicpress.decode_budget.stats import PassRecord, RequestStats
from sglang_evicpress.device import HostCopy, to_device
from sglang_evicpress.patches.compat.release import REQUEST_KV
from sglang_evicpress.patches.decode_budget.trace import DecodeTrace
from sglang_evicpress.patches.tree.node import holes_of
from sglang_evicpress.patches.tree.node_kv import PrefixView
from sglang_evicpress.patches.tree.types import Request


@dataclass(slots=True)
class DecodeState:
    """``positions`` (int32 [k] or [L, H, k]) is what the first k slots of the row hold, None for their order in the
    text; whatever comes behind was appended in order. ``is_in_order``: they ascend. ``num_cached`` tokens were found in
    the tree, and not computed. ``in_tree``: its prompt was offered to the tree. ``has_left_tree``: it holds no lock
    there any more, and its whole row is its own. ``trace`` is there where the request asked for one; ``retracted`` are
    its lengths in tokens whenever it was to be computed anew; ``unsettled`` are the passes whose copies the device has
    counted, with the place of each among the counts of its batch. ``number`` counts the requests with a budget, from 1.
    """

    settings: DecodeSettings
    stats: RequestStats
    num_dropped: int = 0
    num_cached: int = 0
    positions: torch.Tensor | None = None
    in_tree: bool = False
    has_left_tree: bool = False
    is_first_visit: bool = True
    is_in_order: bool = True
    is_chunked: bool = False
    trace: DecodeTrace | None = None
    retracted: list[int] = field(default_factory=list)
    unsettled: list[tuple[PassRecord, HostCopy, int]] = field(default_factory=list)
    number: int = 0

    def reset(self) -> None:
        """Nothing is held any more: the request ended, or is to be computed anew."""
        self.num_dropped = 0
        self.positions = None
        self.in_tree = self.has_left_tree = self.is_chunked = False
        self.is_first_visit = self.is_in_order = True


class BudgetedRequest(Request, Protocol):
    """A request as decode-time budgets see it; ``kv_budget`` is there where it has one."""

    inflight_middle_chunks: int
    evicpress: PrefixView
    kv_budget: DecodeState


def budget_of(req: object) -> DecodeState | None:
    """The budget of a request; None without one."""
    state: DecodeState | None = getattr(req, "kv_budget", None)
    return state


def view_between(req: Request, state: DecodeState) -> PrefixView:
    """View from which a request's row is written for its next chunk: its own slots, and all that has none."""
    return PrefixView(req.prefix_indices[state.num_dropped :], state.num_dropped, True, True)


def num_physical(req: BudgetedRequest) -> int:
    """The slots of its row, the token in flight included."""
    return REQUEST_KV.allocated_len(req) - holes_of(req)


def num_logical(req: BudgetedRequest) -> int:
    """The tokens that have, or had, a slot: those of ``num_physical`` and all holes."""
    return REQUEST_KV.allocated_len(req) + req.kv_budget.num_dropped


def num_shared(req: BudgetedRequest) -> int:
    """The slots at the start of its row that the tree owns."""
    return REQUEST_KV.protected_len(req) - holes_of(req)


def holds_kv(req: BudgetedRequest) -> bool:
    """True if its slots are there and stay there: not finished, retracted or in between two chunks of its prompt."""
    return REQUEST_KV.holds_kv(req) and not req.finished()


def row_is_own(req: BudgetedRequest, state: DecodeState) -> bool:
    """True if all slots of its row are its own."""
    return REQUEST_KV.holds_kv(req) and state.has_left_tree


def positions_of_row(req: BudgetedRequest, state: DecodeState, device: torch.device | str) -> torch.Tensor | None:
    """Positions that the slots of its row hold; None unless they are all its own."""
    if not row_is_own(req, state):
        return None
    return positions_of(state.positions, num_logical(req), num_physical(req), device)


def positions_of(
    known: torch.Tensor | None, num_logical: int, num_slots: int, device: torch.device | str
) -> torch.Tensor:
    """Position in each slot of a row of ``num_slots``: int32 [n] where all heads hold the same, else [L, H, n].

    ``known`` is that of its first slots; those behind hold the last tokens of ``num_logical``, in order.
    """
    num_known = 0 if known is None else known.shape[-1]
    begin = num_logical - (num_slots - num_known)
    behind = torch.arange(begin, num_logical, dtype=torch.int32, device=device)
    return behind if known is None else torch.cat([known, behind.expand(*known.shape[:-1], -1)], -1)


def positions_of_rows(
    known: Sequence[torch.Tensor | None], nums_logical: Sequence[int], num_slots: int, device: torch.device | str
) -> torch.Tensor:
    """``positions_of`` of R rows of ``num_slots`` whose ``known`` have one shape: int32 [R, n], or [L, H, R, n]."""
    first = known[0]
    num_behind = num_slots - (0 if first is None else first.shape[-1])
    begins = to_device(torch.tensor([num - num_behind for num in nums_logical], dtype=torch.int32), device)
    behind = begins[:, None] + torch.arange(num_behind, dtype=torch.int32, device=device)
    if first is None:
        return behind
    known_positions = torch.stack([each for each in known if each is not None], -2)
    return torch.cat([known_positions, behind.expand(*known_positions.shape[:-1], -1)], -1)


def position_values(
    known: torch.Tensor | None, num_logical: int, num_slots: int, begin: int, end: int, device: torch.device | str
) -> torch.Tensor:
    """int32 [end - begin]: what ``positions_of`` has there, flattened, without making the rest of it."""
    every = torch.arange(begin, end, device=device)
    slot, num_known = every % num_slots, 0 if known is None else known.shape[-1]
    behind = slot + (num_logical - num_slots)
    if known is None or num_known == 0:
        return behind.int()
    at = slot.clamp(max=num_known - 1)
    if known.dim() == 1:
        known_positions = known[at]
    else:
        head = every // num_slots
        known_positions = known[head // known.shape[1], head % known.shape[1], at]
    return torch.where(slot < num_known, known_positions, behind.int())
