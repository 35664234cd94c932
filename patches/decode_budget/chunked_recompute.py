"""Prefilling again, in chunks, what a request with a budget has generated beyond the room of the pool.

A request that SGLang sends back for want of memory is computed anew, prompt and answer. Where that no longer fits in
the pool as it is, the scheduler would wait for ever; so it is computed in chunks, and after each what is over the
budget is dropped. Nothing of it goes into the tree. Touches ``ScheduleBatch.prepare_for_extend``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress.decode_budget import schedule
from sglang_evicpress.patches.compat.release import RELEASE, REQUEST_KV
from sglang_evicpress.patches.decode_budget.budgets import DecodeBudgets
from sglang_evicpress.patches.decode_budget.state import DecodeState, budget_of, num_shared
from sglang_evicpress.patches.decode_budget.types import PrefillAdder, RunningBatch, WaitingRequest
from sglang_evicpress.patches.tree.node import holes_of

BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch."
TOO_LONG = (
    "the request was sent back for want of memory, and its {} tokens no longer fit in the pool of {}: it could only be "
    "computed anew in pieces, which needs {}"
)


class BudgetedCache(Protocol):
    """The cache, with its budgets."""

    decode_budgets: DecodeBudgets


class BudgetedAdder(PrefillAdder, Protocol):
    """A PrefillAdder over our cache."""

    tree_cache: BudgetedCache


def num_with_copy(adder: PrefillAdder, req: WaitingRequest, state: DecodeState) -> int:
    """Slots of a prefill beyond its prefix in the tree, and of what survives of it: that is copied out while all of it
    is the tree's."""
    num_tokens, page = len(req.full_untruncated_fill_ids), adder.page_size
    prefill = -(-(num_tokens - REQUEST_KV.prefix_len(req)) // page) * page + page
    return prefill + -(-schedule.target(state.settings, num_tokens, page) // page) * page


def most_slots(adder: PrefillAdder, req: WaitingRequest) -> int:
    """Slots of the pool beside those of its prefix in the tree, which has fewer than it has tokens where it has
    holes."""
    return adder.token_to_kv_pool_allocator.size - (REQUEST_KV.prefix_len(req) - holes_of(req)) - 1


def lacks_copy(adder: PrefillAdder, req: WaitingRequest, state: DecodeState) -> bool:
    """True if a request that was retracted fits in the pool, but not with a copy of what survives of it: it would wait
    for that room for ever once the tree has all of its KV, and end the pool."""
    if req.retraction_count == 0:
        return False
    is_over = schedule.is_over(state.settings, len(req.full_untruncated_fill_ids), adder.page_size)
    return is_over and num_with_copy(adder, req, state) > most_slots(adder, req)


def is_too_long(adder: PrefillAdder, req: WaitingRequest, state: DecodeState) -> bool:
    """True if a request that was retracted cannot be prefilled at once even with the pool to itself."""
    num_tokens, page = len(req.full_untruncated_fill_ids), adder.page_size
    room = adder.token_to_kv_pool_allocator.size - 2 * page
    if req.retraction_count > 0 and num_tokens >= room and schedule.is_over(state.settings, num_tokens, page):
        return True
    return adder.rem_chunk_tokens is not None and lacks_copy(adder, req, state)


def add_first_chunk(
    call: Callable[[], object], adder: BudgetedAdder, req: WaitingRequest, state: DecodeState, has_chunked_req: bool
) -> object:
    """``add_one_req`` with the first piece alone. Another request with chunks to come is finished before."""
    page, size = adder.page_size, adder.token_to_kv_pool_allocator.size
    # The prefix is locked and, once it is over the budget, what survives of it is copied.
    taken = REQUEST_KV.prefix_len(req) - holes_of(req) + -(-state.settings.tokens // page) * page
    needs = None
    if adder.rem_chunk_tokens is None:
        needs = "--chunked-prefill-size"
    elif taken + 4 * page > size:
        needs = f"room for {taken + 4 * page} tokens"
    if needs is not None:
        adder.tree_cache.decode_budgets.give_up(req, TOO_LONG.format(len(req.full_untruncated_fill_ids), size, needs))
        return AddReqResult.CONTINUE
    if has_chunked_req or adder.new_chunked_req is not None:
        return AddReqResult.OTHER
    return _add_chunk(call, adder, req, state, min(adder.rem_total_tokens, adder.cur_rem_tokens) - taken)


def add_next_chunk(call: Callable[[], object], adder: PrefillAdder, req: WaitingRequest, state: DecodeState) -> object:
    """``add_chunked_req`` with one more piece; the request stays open, without one, while there is no room."""
    room = min(adder.rem_total_tokens, adder.cur_rem_tokens)
    if not state.has_left_tree:
        room -= num_shared(req)
    if _chunk(adder, state, room) <= 0:
        adder.rem_chunk_tokens = 0
        return req
    return _add_chunk(call, adder, req, state, room)


def _chunk(adder: PrefillAdder, state: DecodeState, room: int) -> int:
    """Tokens of the next piece: as many as the budget has, and as fit; whole pages."""
    page = adder.page_size
    most = max(page, state.settings.tokens)
    return int(min(adder.rem_chunk_tokens or 0, most, room - 2 * page) // page * page)


def _add_chunk(
    call: Callable[[], object], adder: PrefillAdder, req: WaitingRequest, state: DecodeState, room: int
) -> object:
    piece = _chunk(adder, state, room)
    if piece <= 0:
        return AddReqResult.NO_TOKEN
    state.is_chunked = True
    chunk_tokens, before = adder.rem_chunk_tokens or 0, RELEASE.total_offset(adder)
    adder.rem_chunk_tokens = piece
    offset_shown = before - len(req.full_untruncated_fill_ids) - req.sampling_params.max_new_tokens
    RELEASE.set_total_offset(adder, offset_shown)
    result = call()
    is_added = RELEASE.total_offset(adder) != offset_shown
    used = piece - (adder.rem_chunk_tokens or 0)
    is_open = result is req or adder.new_chunked_req is req
    adder.rem_chunk_tokens = 0 if is_open else chunk_tokens - used  # a batch may hold chunks of one request only
    RELEASE.set_total_offset(adder, before + (used + 2 * adder.page_size if is_added else 0))
    return result


def _after_prepare_for_extend(_: None, batch: RunningBatch) -> None:
    """AFTER ``prepare_for_extend``, which counts the KV of a request by its tokens."""
    for req in batch.reqs:
        state = budget_of(req)
        if state is not None and state.num_dropped > 0:
            REQUEST_KV.shorten(req, state.num_dropped)


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    registry.register(BATCH + "prepare_for_extend", _after_prepare_for_extend, hook_type.AFTER)
