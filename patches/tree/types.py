"""Narrow types of what the parts of the cache are given: SGLang's objects, as far as we touch them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.patches.tree.greedy_answers import Sampling
from sglang_evicpress.patches.tree.node_kv import NodeKV, PrefixView
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.quality_target import Share


class Node(Protocol):
    """SGLang's TreeNode with our record ``kv``. The parent of the root is None."""

    id: int
    key: RadixKey
    value: torch.Tensor | None
    parent: Node
    children: dict[object, Node]
    lock_ref: int
    kv: NodeKV


class LogicalTime(Protocol):
    """Seconds since rank 0's first stamp, equal on every rank."""

    now_s: float


class CostTerms(LogicalTime, Protocol):
    """Time, and what it is spent on."""

    costs: CostSnapshot


class SamplingParams(Sampling, Protocol):
    """Sampling parameters of a request, as far as we read or cut them."""

    max_new_tokens: int
    custom_params: dict[str, object] | None


class Request(Protocol):
    """SGLang's Req: its tokens, and its place in the pool and in the tree."""

    rid: str
    extra_key: str | None
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    sampling_params: SamplingParams
    prefix_indices: torch.Tensor
    last_node: Node
    to_finish: object
    full_untruncated_fill_ids: Sequence[int]

    def get_fill_ids(self) -> Sequence[int]:
        """The tokens that are computed, or about to be."""

    def finished(self) -> bool: ...


class QueuedRequest(Request, Protocol):
    """A request that waits: what it would load, and whether it ran before. ``evicpress_not_loaded``: tokens that it
    computes and could have loaded; ``evicpress_refused``: what the quality target does not let it be served;
    ``evicpress_floored``: tokens that are below its floor; ``skip_radix_cache_insert``: its KV is nobody else's."""

    lora_id: str | None
    host_hit_length: int
    best_match_node: Node
    is_retracted: bool
    retracted_stain: bool
    evicpress_not_loaded: int
    evicpress_refused: Share
    evicpress_floored: int
    skip_radix_cache_insert: bool


class ServedRequest(QueuedRequest, Protocol):
    """A request that runs or has its answer. ``evicpress`` is the prefix it took from the tree, ``evicpress_use`` how
    many tokens that has, and their mean predicted quality where it is lossy, ``evicpress_prefix_quality`` that quality,
    ``evicpress_least_quality`` that of its worst node, and ``evicpress_loaded`` the tier and form of each node that was
    loaded for it, by id.
    ``customized_info``: what SGLang hands on to whoever sends the answer, a list for its tokens by name."""

    multimodal_inputs: object
    input_embeds: object
    custom_logit_processor: str | None
    evicpress: PrefixView
    evicpress_use: tuple[int, float | None]
    evicpress_prefix_quality: float
    evicpress_least_quality: float
    evicpress_loaded: dict[int, tuple[Tier, Form]]
    customized_info: dict[str, list[object]] | None


class Allocator(Protocol):
    """SGLang's allocator of KV slots."""

    size: int

    def available_size(self) -> int: ...
    def alloc(self, num_slots: int) -> torch.Tensor | None:
        """Slots in whole pages; None without so many."""

    def free(self, slots: torch.Tensor) -> None: ...


class ForwardMode(Protocol):
    """Kind of a batch."""

    def is_decode(self) -> bool: ...
    def is_extend(self) -> bool: ...


class Batch(Protocol):
    """SGLang's ScheduleBatch."""

    reqs: list[Request]
    batch_is_full: bool
    forward_mode: ForwardMode
    extend_lens: list[int]

    def is_empty(self) -> bool: ...
    def filter_batch(self, *, keep_indices: list[int]) -> None: ...


class Sender(Protocol):
    """Socket to the tokenizer process."""

    def send_output(self, message: object, request: Request) -> None: ...


class Channels(Protocol):
    """Sockets of the scheduler process."""

    send_to_tokenizer: Sender


class Scheduler(Protocol):
    """SGLang's Scheduler."""

    waiting_queue: list[Request]
    running_batch: Batch
    last_batch: Batch | None
    chunked_req: Request | None
    max_running_requests: int
    server_args: object
    ipc_channels: Channels
    tokenizer: object
    _pending_chunked_abort_req: Request | None

    def _add_request_to_queue(self, req: Request, is_retracted: bool = False) -> None:
        """Let a request wait, anew where it was retracted."""

    def is_fully_idle(self) -> bool:
        """True if nothing runs or waits."""


class Attached(Protocol):
    """A cache that knows its scheduler, once that is complete."""

    @property
    def scheduler(self) -> Scheduler | None:
        """None until then."""


class WaitingTree(Attached, Protocol):
    """The tree, in which requests are looked up that wait."""

    def known_of(self, req: Request) -> list[tuple[Node, int]]: ...
