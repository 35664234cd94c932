"""Narrow types of what the parts of the cache are given: SGLang's objects, as far as we touch them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_evicpress.patches.tree.node import NodeKV


class Node(Protocol):
    """SGLang's TreeNode with our record ``kv``. The parent of the root is None."""

    id: int
    key: RadixKey
    value: torch.Tensor | None
    parent: Node
    children: dict[object, Node]
    lock_ref: int
    kv: NodeKV


class SamplingParams(Protocol):
    """Sampling parameters of a request, as far as we read or cut them."""

    max_new_tokens: int
    custom_params: dict[str, object] | None
    top_k: int


class Request(Protocol):
    """SGLang's Req: its tokens, and its place in the pool and in the tree."""

    rid: str
    extra_key: str | None
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    sampling_params: SamplingParams
    prefix_indices: torch.Tensor
    cache_protected_len: int
    last_node: Node
    req_pool_idx: int | None
    to_finish: object
    full_untruncated_fill_ids: Sequence[int]

    def finished(self) -> bool:
        """It has its whole answer."""


class Allocator(Protocol):
    """SGLang's allocator of KV slots."""

    size: int

    def available_size(self) -> int:
        """Slots that are free."""

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        """Slots in whole pages; None without so many."""

    def free(self, slots: torch.Tensor) -> None:
        """Take slots back."""


class ForwardMode(Protocol):
    """Kind of a batch."""

    def is_decode(self) -> bool:
        """One more token for each of its requests."""


class Batch(Protocol):
    """SGLang's ScheduleBatch."""

    reqs: list[Request]
    batch_is_full: bool
    forward_mode: ForwardMode
    extend_lens: list[int]

    def is_empty(self) -> bool:
        """No request is in it."""

    def release_req(self, index: int, num_left: int, server_args: object) -> None:
        """Give back the slots of a request that is to wait again."""

    def filter_batch(self, *, keep_indices: list[int]) -> None:
        """Go on with these requests alone."""


class Sender(Protocol):
    """Socket to the tokenizer process."""

    def send_output(self, message: object, request: Request) -> None:
        """Send what is told of a request."""


class Channels(Protocol):
    """Sockets of the scheduler process."""

    send_to_tokenizer: Sender


class Scheduler(Protocol):
    """SGLang's Scheduler."""

    waiting_queue: list[Request]
    running_batch: Batch
    last_batch: Batch | None
    cur_batch: Batch | None
    chunked_req: Request | None
    max_running_requests: int
    server_args: object
    ipc_channels: Channels
    tokenizer: object
    _pending_chunked_abort_req: Request | None

    def _add_request_to_queue(self, req: Request, is_retracted: bool = False) -> None:
        """Let a request wait, anew where it was retracted."""


class Attached(Protocol):
    """A cache that knows its scheduler, once that is complete."""

    @property
    def scheduler(self) -> Scheduler | None:
        """None until then."""
