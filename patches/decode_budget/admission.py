"""Admission of requests with a decode-time budget: their settings, and the memory reserved for them.

Touches ``Scheduler.init_req_max_new_tokens``, ``_add_request_to_queue`` and what ``PrefillAdder`` charges. SGLang keeps
room for a prompt and all that may be generated; a request with a budget needs its prompt once, and from then on what
its budget allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress.decode_budget import schedule
from sglang_evicpress.decode_budget.settings import DecodeSettings
from sglang_evicpress.patches.compat.release import RELEASE, REQUEST_KV
from sglang_evicpress.patches.decode_budget import chunked_recompute
from sglang_evicpress.patches.decode_budget.chunked_recompute import BudgetedAdder, BudgetedCache
from sglang_evicpress.patches.decode_budget.state import BudgetedRequest, DecodeState, budget_of, num_physical
from sglang_evicpress.patches.decode_budget.types import ArrivingRequest, PrefillAdder, WaitingRequest

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder."


class ModelConfig(Protocol):
    """SGLang's ModelConfig."""

    context_len: int


class AdmittingScheduler(Protocol):
    """The scheduler, as requests come to it."""

    page_size: int
    max_total_num_tokens: int
    model_config: ModelConfig
    tree_cache: BudgetedCache


def _around_init_req_max_new_tokens(
    original: Callable[..., object], scheduler: AdmittingScheduler, req: ArrivingRequest
) -> object:
    """AROUND ``init_req_max_new_tokens``, which every request passes once: where the pool has room for what its budget
    allows, its answer may outgrow the pool."""
    sampling = req.sampling_params
    asked, least = sampling.max_new_tokens, sampling.min_new_tokens
    result = original(scheduler, req)
    if req.to_finish is not None:
        return result
    budgets = scheduler.tree_cache.decode_budgets
    try:
        settings, wants_trace = budgets.settings_of(req)
    except ValueError as error:
        req.kv_refusal = str(error)
        req.set_finish_with_abort(req.kv_refusal)
        return original(scheduler, req)
    if settings is None:
        return result
    num_prompt, size = len(req.origin_input_ids), scheduler.max_total_num_tokens
    if num_alone(settings, num_prompt, scheduler.page_size) < size:
        most = max(0, scheduler.model_config.context_len - num_prompt - 2)
        limit = getattr(scheduler, "max_new_tokens_limit", None)  # the operator's; not on 0.5.15
        if limit is not None and limit > 0:
            most = min(most, limit)
        sampling.max_new_tokens = most if asked is None else min(asked, most)
        sampling.min_new_tokens = min(least, sampling.max_new_tokens)
    if sampling.max_new_tokens > 1:  # one token needs no decode step
        budgets.begin(req, settings, wants_trace=wants_trace)
    return result


def _before_add_request_to_queue(_: object, req: ArrivingRequest, *__: object, **___: object) -> None:
    """BEFORE ``_add_request_to_queue``: in between SGLang checks an aborted request by the one token that is left of
    its prompt, and may have put another reason in the place of ours."""
    why = getattr(req, "kv_refusal", None)
    if why is not None and (req.to_finish is None or req.to_finish.message != why):
        req.set_finish_with_abort(why)


def num_remaining(req: BudgetedRequest) -> int:
    """Tokens it may still generate, as SGLang counts on them."""
    return min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)


def num_alone(settings: DecodeSettings, num_prompt: int, page_size: int) -> int:
    """Slots at most, from its prompt on, of a request that has the pool to itself: those of its budget and, while it
    copies what it shares, the prompt or the copy once more."""
    twice = max(-(-num_prompt // page_size), -(-settings.tokens // page_size)) * page_size
    return schedule.peak(settings, page_size) + twice + page_size


def num_needed(adder: PrefillAdder, req: WaitingRequest, state: DecodeState) -> int:
    """Slots to keep for a request that waits, beyond those of its prefix in the tree. Never more than the pool has:
    what cannot come is not waited for."""
    page, settings = adder.page_size, state.settings
    num_tokens, num_cached = len(req.full_untruncated_fill_ids), REQUEST_KV.prefix_len(req)
    prefill = -(-(num_tokens - num_cached) // page) * page + page
    asked = num_tokens - num_cached + num_remaining(req) + page
    peak = schedule.peak(settings, page)
    most = chunked_recompute.most_slots(adder, req)
    if schedule.is_over(settings, num_tokens, page):
        with_copy = chunked_recompute.num_with_copy(adder, req, state)
        if with_copy <= most:
            return max(with_copy, min(peak, most))
    return min(asked, max(prefill, min(peak, most)))


def _around_add_one_req(
    original: Callable[..., object], adder: BudgetedAdder, req: WaitingRequest, *args: object, **kwargs: object
) -> object:
    """AROUND ``PrefillAdder.add_one_req``: it compares with what is left, and charges, a prompt and its answer."""
    state = budget_of(req)
    if state is None:
        return original(adder, req, *args, **kwargs)
    if chunked_recompute.is_too_long(adder, req, state):
        has_chunked_req = bool(kwargs["has_chunked_req"] if "has_chunked_req" in kwargs else args[0])
        return chunked_recompute.add_first_chunk(
            lambda: original(adder, req, *args, **kwargs), adder, req, state, has_chunked_req
        )
    asked = len(req.full_untruncated_fill_ids) - REQUEST_KV.prefix_len(req) + num_remaining(req) + adder.page_size
    needed = num_needed(adder, req, state)
    before = RELEASE.total_offset(adder)
    offset_shown = before - (asked - needed)
    RELEASE.set_total_offset(adder, offset_shown)
    result = original(adder, req, *args, **kwargs)
    is_added = RELEASE.total_offset(adder) != offset_shown
    RELEASE.set_total_offset(adder, before + needed if is_added else before)
    if is_added and chunked_recompute.lacks_copy(adder, req, state):
        state.in_tree = True  # without chunks: the tree is offered nothing of it, so that passes need no copy
    return result


def _around_add_chunked_req(original: Callable[..., object], adder: PrefillAdder, req: WaitingRequest) -> object:
    """AROUND ``PrefillAdder.add_chunked_req``: its last chunk is charged with the whole answer."""
    state = budget_of(req)
    if state is None:
        return original(adder, req)
    if state.is_chunked:
        return chunked_recompute.add_next_chunk(lambda: original(adder, req), adder, req, state)
    before = RELEASE.total_offset(adder)
    needed = num_needed(adder, req, state)
    result = original(adder, req)
    RELEASE.set_total_offset(adder, before + needed)
    return result


def _around_running_offset(original: Callable[..., object], adder: PrefillAdder, req: BudgetedRequest) -> object:
    """AROUND ``PrefillAdder._get_running_request_total_token_offset``: the bound is certain, so nothing is scaled by
    how many tokens answers usually take."""
    state = budget_of(req)
    if state is None:
        return original(adder, req)
    page, remaining = adder.page_size, num_remaining(req)
    peak = schedule.peak(state.settings, page)
    own = -(-(REQUEST_KV.allocated_len(req) - REQUEST_KV.protected_len(req)) // page) * page
    bound = max(0, peak - own)
    if not state.has_left_tree and num_physical(req) + remaining + page > peak:
        return bound  # what it shares is to be copied
    return min(remaining, bound)


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    registry.register(SCHEDULER + "init_req_max_new_tokens", _around_init_req_max_new_tokens, hook_type.AROUND)
    registry.register(SCHEDULER + "_add_request_to_queue", _before_add_request_to_queue, hook_type.BEFORE)
    chunked_recompute.install(registry, hook_type)
    registry.register(ADDER + "add_one_req", _around_add_one_req, hook_type.AROUND)
    registry.register(ADDER + "add_chunked_req", _around_add_chunked_req, hook_type.AROUND)
    registry.register(ADDER + "_get_running_request_total_token_offset", _around_running_offset, hook_type.AROUND)
