"""Names and deeds in which releases of SGLang differ, behind two interfaces of the same modules. ``RELEASE`` and
``REQUEST_KV`` are those of the installed one."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.compat import sglang_0_5_15, sglang_0_5_17, sglang_0_5_23
from sglang_evicpress.patches.hook_points import of_release
from sglang_evicpress.patches.tree.types import Batch


class Release(Protocol):
    """One module of this folder for all releases that share these answers.

    ``ALLOCATION`` is the module of the functions that give a batch its slots, ``PREFIX_SLOTS`` of these the one that
    reads a prefix, or "". ``BEAMS`` is the function that admits a beam search, or "".
    ``SENT_ONCE`` names the method that tells what an answer carries once, not for each token, or "".
    ``EVICTS_SHORTFALL``: the tree is asked for what is short of the slots wanted; else for all, free ones included.
    ``UPDATE_SESSIONS``: weights are written between two calls, and maybe not by SGLang.
    ``KEY_FIELDS`` tell one key of the tree from another, ``REQUEST_FIELDS`` and ``KV_FIELDS`` are what we read of a
    request and of its ``kv``.
    """

    ALLOCATION: str
    PREFIX_SLOTS: str
    BEAMS: str
    SENT_ONCE: str
    EVICTS_SHORTFALL: bool
    UPDATE_SESSIONS: bool
    KEY_FIELDS: frozenset[str]
    REQUEST_FIELDS: frozenset[str]
    KV_FIELDS: frozenset[str]

    # ---- the scheduler and its ranks

    def ranks_of(self, runner: Any) -> tuple[int, int]:
        """The rank of a model runner among those that share a model, and their number."""

    def total_offset(self, adder: Any) -> int:
        """Tokens of the pool that the batch which is made has taken, or may take."""

    def set_total_offset(self, adder: Any, num_tokens: int) -> None:
        """So many are taken."""

    def send_back(self, scheduler: Any, index: int) -> None:
        """One of those that run gives its slots back, to wait again."""

    def batch_of(self, plan: Any) -> Batch | None:
        """The batch that ``get_next_batch_to_run`` answers; None where there is nothing to run."""

    def current_batch(self, scheduler: Any) -> Any:
        """The batch that runs now; None between two."""

    # ---- the pool's pages, and events

    def free_pages(self, allocator: Any) -> torch.Tensor:
        """Pages [n] that are free."""

    def give_back_pages(self, allocator: Any, pages: torch.Tensor) -> None:
        """Free pages [n], each once, of an allocator with more than one slot a page, and wait for nothing on the
        device."""

    def tell_stored(self, tree: Any, node: Any, tier: Tier) -> None:
        """A tier has a node's KV: to whoever listens to KV events. A block is named by all that is before it."""

    def tell_removed(self, tree: Any, node: Any, tier: Tier) -> None:
        """It has it no more."""

    def event_salt(self, extra_key: str | None) -> str:
        """Part of a namespace that names its blocks: others with the same have equal names for equal tokens."""


class RequestKV(Protocol):
    """The KV of a request, and its prefix: another part of the same modules."""

    # ---- the KV of a request

    def row_of(self, req: Any) -> int | None:
        """Its row of ``req_to_token``; None without one."""

    def holds_kv(self, req: Any) -> bool:
        """True if it has slots that it did not give back."""

    def allocated_len(self, req: Any) -> int:
        """Tokens that it has slots for, those of the tree included. 0 without any."""

    def shorten(self, req: Any, num_tokens: int) -> None:
        """So many of its tokens have no slot any more."""

    def protected_len(self, req: Any) -> int:
        """Tokens at its start whose slots the tree owns."""

    def set_protected_len(self, req: Any, num_tokens: int) -> None:
        """The tree owns the slots of so many tokens at its start."""

    # ---- its prefix

    def prefix_len(self, req: Any) -> int:
        """Tokens that need not be computed for it."""

    def set_prefix(self, req: Any, indices: torch.Tensor) -> None:
        """Slots of the tokens that need not be computed; a hole is slot 0."""

    def match_result(self, indices: torch.Tensor, req: Any, on_gpu: Any, last: Any, num_below: int) -> MatchResult:
        """What the tree answers for a request, or for None: the slots of its prefix on the GPU, that prefix's last
        node, the last node of all, and the tokens of those below the GPU."""

    def loaded(self, req: Any, indices: torch.Tensor, last: Any) -> tuple[Any, Any]:
        """What the tree answers when it has begun a load for a request."""

    def relock(self, tree: Any, req: Any, node: Any) -> None:
        """The request holds this node, and none of those that it held."""


def release_of(version: str) -> Release:
    """The module for a version."""
    choices: dict[str, Release] = {"0.5.15": sglang_0_5_15, "0.5.16": sglang_0_5_17, "0.5.18": sglang_0_5_23}
    return of_release(version, choices)


def request_kv_of(version: str) -> RequestKV:
    """The same module."""
    choices: dict[str, RequestKV] = {"0.5.15": sglang_0_5_15, "0.5.16": sglang_0_5_17, "0.5.18": sglang_0_5_23}
    return of_release(version, choices)


RELEASE = release_of(importlib.metadata.version("sglang"))
REQUEST_KV = request_kv_of(importlib.metadata.version("sglang"))
