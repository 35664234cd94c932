"""Passes over running requests: scores, survivors and moves of all rows that are due, batch by batch.

Rows that hold as many slots, and drop as many by the same rule, make one batch: its launches, and the host's work for
them, are as many as for one row. A batch for which the device has no memory, or the pool no slots, is made in halves,
in the end row by row; what is left then is deferred.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch

from sglang_evicpress.decode_budget import schedule
from sglang_evicpress.decode_budget.compaction import (
    hole_moves,
    holefill_copies,
    holefill_positions,
    repack_copies,
    repack_positions,
)
from sglang_evicpress.decode_budget.scores import (
    Rows,
    page_means,
    pages_of,
    score_rows,
    survivors,
    without_pages,
    worst_pages,
)
from sglang_evicpress.decode_budget.stats import PassKind, PassRecord
from sglang_evicpress.device import HostCopy
from sglang_evicpress.kernels.compact import compact
from sglang_evicpress.kernels.fill_holes import fill_holes
from sglang_evicpress.patches.attention.query_ring import QueryRing
from sglang_evicpress.patches.decode_budget.rows import (
    DecodeTree,
    leave_tree,
    path_positions,
    put_rows,
    row_indices,
    rows_of,
    rows_on_device,
    take_slots,
    unshare,
)
from sglang_evicpress.patches.decode_budget.state import (
    BudgetedRequest,
    DecodeState,
    num_logical,
    num_physical,
    num_shared,
    positions_of_rows,
)
from sglang_evicpress.patches.scheduler.paged_allocator import free_whole_pages
from sglang_evicpress.patches.tree.compressor import Compressor

logger = logging.getLogger(__name__)

MAX_BATCH_SCORES = 1 << 24
"""Scores (layers x heads x slots) of a batch at most, unless one row has more: 64 MiB in each array of its scratch."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Plan of a pass over R rows: the survivors, int [L, H, R, m] among the slots of each row, and the int32
    [L, H, R, m] positions held afterwards. ``moves`` are (targets, sources) where holes are filled; ``copies``
    [L, H, R] counts, None where that is known."""

    chosen: torch.Tensor
    positions: torch.Tensor
    moves: tuple[torch.Tensor, torch.Tensor] | None
    copies: torch.Tensor | None


class PassLog(Protocol):
    """Counts of passes."""

    def note_pass(self, state: DecodeState, record: PassRecord, copies: tuple[HostCopy, int] | None) -> None: ...
    def note_deferred(self) -> int: ...


@dataclass(eq=False, repr=False)
class DecodePasses:
    """Passes over running requests, counted in ``log``."""

    tree: DecodeTree
    compressor: Compressor
    log: PassLog

    def make_passes(self, reqs: Sequence[BudgetedRequest]) -> bool:
        """The passes of all these requests, which are due; whether anything was dropped."""
        drops_pages = [req for req in reqs if _frees_blocks(req.kv_budget)]
        drops_tokens = [req for req in reqs if not _frees_blocks(req.kv_budget)]
        parted = self._part_from_tree([req for req in drops_pages if not req.kv_budget.has_left_tree])
        drops_pages = [req for req in drops_pages if req.kv_budget.has_left_tree]
        has_dropped = False
        for group in self._groups(drops_tokens):
            has_dropped |= self._make(self.drop_tokens, group)
        drop_blocks = partial(self.drop_blocks, parted=parted)
        for group in self._groups(drops_pages):
            has_dropped |= self._make(drop_blocks, group)
        return has_dropped

    def _groups(self, reqs: Sequence[BudgetedRequest]) -> list[list[BudgetedRequest]]:
        """Requests whose passes have one shape, in parts that bound the scratch."""
        alike: dict[Hashable, list[BudgetedRequest]] = {}
        for req in reqs:
            alike.setdefault(self._shape_of(req, req.kv_budget), []).append(req)
        parts = []
        for group in alike.values():
            scores = self.compressor.num_layers * self.compressor.num_heads * num_physical(group[0])
            most = max(1, MAX_BATCH_SCORES // scores)
            parts += [group[begin : begin + most] for begin in range(0, len(group), most)]
        return parts

    def _shape_of(self, req: BudgetedRequest, state: DecodeState) -> Hashable:
        settings, num_slots, positions = state.settings, num_physical(req), state.positions
        num_kept = schedule.target(settings, num_slots, self.tree.page_size)
        is_shared, shape = num_shared(req) > 0, None if positions is None else tuple(positions.shape)
        if not state.has_left_tree:
            shape = (req.evicpress.holes > 0, num_shared(req)) if req.evicpress.holes > 0 else None
        rule = settings.method, settings.score, settings.window, settings.protected_pages
        return (*rule, num_slots, num_kept, is_shared, shape, state.is_in_order, self._num_queries(req, state))

    def _make(self, pass_over: Callable[[Sequence[BudgetedRequest]], bool], reqs: Sequence[BudgetedRequest]) -> bool:
        """``pass_over`` all of them, or else each half; whether anything was dropped."""
        try:
            if pass_over(reqs):
                return True
        except torch.OutOfMemoryError as error:
            if not self.compressor.is_alone:  # other ranks make theirs, and would no longer hold the same
                raise
            if len(reqs) == 1:
                self._defer(reqs[0], error)
        if len(reqs) == 1:
            return False
        half = len(reqs) // 2
        first = self._make(pass_over, reqs[:half])
        return self._make(pass_over, reqs[half:]) or first

    def _defer(self, req: BudgetedRequest, error: torch.OutOfMemoryError) -> None:
        """The device has no memory for a pass now: the request stays as it is, and the next round tries again."""
        count = self.log.note_deferred()
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th: every round may try
            text = "evicpress: a pass over request %.64r was put off, the device has no memory for it (time %d): %s"
            logger.warning(text, req.rid, count, error)

    def _part_from_tree(self, reqs: Sequence[BudgetedRequest]) -> dict[int, tuple[int, float]]:
        """Part them from the tree, as far as there is room; the slots that each had to copy and the seconds that it
        took the host, by ``id`` of the request."""
        parted: dict[int, tuple[int, float]] = {}
        begin, most = 0, MAX_BATCH_SCORES // (self.compressor.num_layers * self.compressor.num_heads)
        while begin < len(reqs):
            end, num_slots = begin + 1, num_shared(reqs[begin])
            while end < len(reqs) and num_slots + num_shared(reqs[end]) <= most:
                num_slots += num_shared(reqs[end])
                end += 1
            part = reqs[begin:end]
            began, copied = time.perf_counter(), [num_shared(req) for req in part]
            self._make(partial(unshare, self.tree, self.compressor), part)
            seconds = (time.perf_counter() - began) / len(part)
            parted |= {id(req): (count, seconds) for req, count in zip(part, copied, strict=True)}
            begin = end
        return parted

    def drop_tokens(self, reqs: Sequence[BudgetedRequest]) -> bool:
        """Keep the best tokens of every (layer, head) of these rows, which have one shape, and move them together;
        whether there was room for that.

        Where the tree owns a part of a row, the survivors are copied to slots of the request, and what lay there stays
        as it is. Raises torch.OutOfMemoryError before anything is changed.
        """
        began = time.perf_counter()
        state, num_slots, page = reqs[0].kv_budget, num_physical(reqs[0]), self.tree.page_size
        num_kept = schedule.target(state.settings, num_slots, page)
        whole = -(-num_kept // page) * page
        shared = [num_shared(req) for req in reqs]
        fresh = None
        if shared[0] > 0:
            fresh = take_slots(self.tree, len(reqs) * whole)
            if fresh is None:
                return False
        try:
            index = rows_on_device(self.tree, reqs)
            slots = rows_of(self.tree, index, num_slots)
            self.compressor.wait_for_forward(slots)
            into = None if fresh is None else fresh.view(len(reqs), whole)[:, :num_kept]
            survey = self._survey(reqs, slots, num_kept, into)
            known = None if survey.copies is None else HostCopy(survey.copies.mean((0, 1), dtype=torch.float64))
        except torch.OutOfMemoryError:
            if fresh is not None:
                self.tree.token_to_kv_pool_allocator.free(fresh)
            raise
        for req in reqs:
            if not req.kv_budget.has_left_tree:
                leave_tree(self.tree, req)
        if into is not None:
            runs = [row[count:] for row, count in zip(slots, shared, strict=True)]
            kept = into
        else:
            runs = list(slots[:, whole:])
            kept = slots[:, :num_kept]
            self._compact(slots, survey)
        free_whole_pages(self.tree.token_to_kv_pool_allocator, *runs)
        put_rows(self.tree, reqs, index, kept, num_slots - num_kept)
        seconds = (time.perf_counter() - began) / len(reqs)
        for place, req in enumerate(reqs):
            state = req.kv_budget
            kind: PassKind = "prefill" if state.is_first_visit else _way(state)
            kind = "copy_out" if into is not None else kind
            state.is_in_order = state.is_in_order and survey.moves is None
            state.positions = survey.positions[:, :, place]
            record = PassRecord(
                *(kind, num_logical(req), num_slots, num_kept),
                *(-(-runs[place].numel() // page), None if known is not None else float(num_kept), seconds),
            )
            self.log.note_pass(state, record, None if known is None else (known, place))
        return True

    def _survey(
        self, reqs: Sequence[BudgetedRequest], slots: torch.Tensor, num_kept: int, into: torch.Tensor | None
    ) -> Survey:
        """All of a pass that takes device memory for every layer and head; nothing that anybody uses is changed. What
        is left takes some for the slots of its rows."""
        state = reqs[0].kv_budget
        rows = self._rows(reqs, slots)
        scores = score_rows(state.settings.score, rows, state.settings.window)
        chosen = survivors(scores, rows.positions, num_kept, self.compressor.sinks, in_order=state.is_in_order)
        if into is not None:
            row, survivors_of_all = _as_one_row(slots, chosen)
            self.compressor.copy_survivors(row, survivors_of_all, into.flatten())
            return Survey(chosen, repack_positions(rows.positions, chosen), None, None)
        if _way(state) == "repack":
            return Survey(chosen, repack_positions(rows.positions, chosen), None, repack_copies(chosen))
        targets, sources = moves = hole_moves(chosen, slots.shape[1])
        positions = holefill_positions(rows.positions, targets, sources, num_kept)
        return Survey(chosen, positions, moves, holefill_copies(chosen))

    def _compact(self, slots: torch.Tensor, survey: Survey) -> None:
        """Bring the survivors to the first slots of the rows, in place."""
        buffers = self.compressor.k_buffers, self.compressor.v_buffers
        if survey.moves is None:
            compact(*buffers, slots, survey.chosen)
            return
        one, targets, sources = _as_one_row(slots, *survey.moves)
        fill_holes(*buffers, one, targets, sources)

    def drop_blocks(self, reqs: Sequence[BudgetedRequest], parted: Mapping[int, tuple[int, float]]) -> bool:
        """Free the blocks (``schedule.block_size``) with the lowest mean score of each of these rows, which have one
        shape and have left the tree; what comes behind moves up in the row, and nothing is copied. ``parted`` has the
        slots that were copied before, and the seconds of that, by ``id`` of the request.

        Which ones they are the host does not learn: nothing waits for the device, unless ranks must agree. Raises
        torch.OutOfMemoryError before anything is changed.
        """
        began = time.perf_counter()
        settings, num_slots, page = reqs[0].kv_budget.settings, num_physical(reqs[0]), self.tree.page_size
        block, num_kept = schedule.block_size(page), schedule.target(settings, num_slots, page)
        first, newest = schedule.protected_blocks(settings.protected_pages, block, self.compressor.sinks)
        whole = num_slots // block * block
        if whole < num_slots:
            newest = 0  # it is not full yet, and is not among those that can go
        index = rows_on_device(self.tree, reqs)
        slots = rows_of(self.tree, index, num_slots)
        self.compressor.wait_for_forward(slots)
        positions = self._positions(reqs, num_slots)
        rows = self._rows(reqs, slots, positions)
        scores = score_rows(settings.score, rows, settings.window)[..., :whole]
        means = self.compressor.summed(page_means(scores, block))
        dropped = worst_pages(means, (first, newest), (num_slots - num_kept) // block)
        positions = without_pages(positions, dropped, block)
        freed, kept = pages_of(slots, dropped, block).flatten(), without_pages(slots, dropped, block)
        free_whole_pages(self.tree.token_to_kv_pool_allocator, freed)
        put_rows(self.tree, reqs, index, kept, num_slots - num_kept)
        seconds, num_freed = (time.perf_counter() - began) / len(reqs), (num_slots - num_kept) // page
        for place, req in enumerate(reqs):
            state, (copies, more) = req.kv_budget, parted.get(id(req), (0, 0.0))
            state.positions = positions[..., place, :]
            counts = num_logical(req), num_slots, num_kept, num_freed
            self.log.note_pass(state, PassRecord("page", *counts, float(copies), seconds + more), None)
        return True

    def _positions(self, reqs: Sequence[BudgetedRequest], num_slots: int) -> torch.Tensor:
        """int32 [R, n] where all heads of a row hold the same, else [L, H, R, n]."""
        known = [
            req.kv_budget.positions if req.kv_budget.has_left_tree else path_positions(self.tree, self.compressor, req)
            for req in reqs
        ]
        return positions_of_rows(known, [num_logical(req) for req in reqs], num_slots, self.tree.device)

    def _rows(
        self, reqs: Sequence[BudgetedRequest], slots: torch.Tensor, positions: torch.Tensor | None = None
    ) -> Rows:
        """The rows ``slots`` [R, n] with all that a score looks at."""
        compressor = self.compressor
        if positions is None:
            positions = self._positions(reqs, slots.shape[1])
        positions = positions.expand(compressor.num_layers, compressor.num_heads, *slots.shape)
        ring, size = QueryRing.active, self._num_queries(reqs[0], reqs[0].kv_budget)
        queries = at = None
        if ring is not None and size > 0:
            queries, at = ring.windows_of(row_indices(reqs), size, [num_logical(req) for req in reqs])
        buffers = compressor.k_buffers, compressor.v_buffers
        return Rows(*buffers, slots, positions, queries, at, compressor.scale, compressor.geometry)

    def _num_queries(self, req: BudgetedRequest, state: DecodeState) -> int:
        """Number of its last queries that its score can use."""
        if QueryRing.active is None or not state.settings.reads_queries:
            return 0
        return max(0, min(QueryRing.active.window, num_logical(req) - state.num_cached))


def _frees_blocks(state: DecodeState) -> bool:
    """``paged`` frees whole blocks while it decodes; what a prefill left over the budget goes token by token."""
    return state.settings.method == "paged" and not state.is_first_visit


def _way(state: DecodeState) -> Literal["repack", "holefill"]:
    """``compact`` fills holes: where that copies as much as a repack it is one, and never does it copy more.
    ``paged`` keeps the order, as its pages are of neighbours."""
    return "repack" if state.settings.method in ("paged", "repack") else "holefill"


def _as_one_row(slots: torch.Tensor, *indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``slots`` [R, n] and the ``indices`` [L, H, R, k] into each row (-1 for none) as one row of R * n."""
    num_rows, num_slots = slots.shape
    if num_rows == 1:
        return slots[0], *(each.flatten(2) for each in indices)
    begins = torch.arange(0, num_rows * num_slots, num_slots, dtype=torch.int32, device=slots.device)[:, None]
    return slots.flatten(), *(torch.where(each < 0, each, each + begins).flatten(2) for each in indices)
