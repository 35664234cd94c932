"""Narrow types of the scheduler for decode-time budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_evicpress.patches.decode_budget.state import BudgetedRequest, DecodeState
from sglang_evicpress.patches.tree.types import Allocator, Channels, SamplingParams


class RunningBatch(Protocol):
    """Requests that run together."""

    reqs: Sequence[BudgetedRequest]
    batch_is_full: bool


class DecodeScheduler(Protocol):
    """The scheduler, as far as budgets look at it."""

    waiting_queue: list[BudgetedRequest]
    running_batch: RunningBatch
    last_batch: RunningBatch | None
    chunked_req: BudgetedRequest | None
    ipc_channels: Channels


class Finish(Protocol):
    """Why a request ends."""

    message: str


class ArrivingRequest(Protocol):
    """A request on its way into the queue; ``kv_refusal`` is our reason where it is refused."""

    extra_key: str | None
    origin_input_ids: Sequence[int]
    sampling_params: SamplingParams
    to_finish: Finish | None
    kv_refusal: str
    kv_budget: DecodeState

    def set_finish_with_abort(self, why: str) -> None: ...


class WaitingRequest(BudgetedRequest, Protocol):
    """A request that may be admitted."""

    full_untruncated_fill_ids: Sequence[int]
    retraction_count: int


class PrefillAdder(Protocol):
    """SGLang's PrefillAdder: what is left for the batch that is made."""

    page_size: int
    token_to_kv_pool_allocator: Allocator
    rem_chunk_tokens: int | None
    new_chunked_req: object

    @property
    def rem_total_tokens(self) -> int: ...
    @property
    def cur_rem_tokens(self) -> int: ...
