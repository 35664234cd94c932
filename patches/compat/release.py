"""What releases of SGLang name or do differently, behind one interface; ``RELEASE`` is the one that is installed."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Protocol

from sglang_evicpress.patches.compat import sglang_0_5_15, sglang_0_5_17
from sglang_evicpress.patches.hook_points import number_of
from sglang_evicpress.patches.tree.types import Batch


class Release(Protocol):
    """One module of this folder for all releases that share these answers.

    ``ALLOCATION`` is the module of the functions that give a batch its slots. ``EVICTS_SHORTFALL``: the tree is asked
    for what is short of the slots wanted; else for all of them, free ones included. ``KEY_FIELDS`` tell one key of the
    tree from another, ``REQUEST_FIELDS`` and ``KV_FIELDS`` are what we read of a request and of its ``kv``.
    """

    ALLOCATION: str
    EVICTS_SHORTFALL: bool
    KEY_FIELDS: frozenset[str]
    REQUEST_FIELDS: frozenset[str]
    KV_FIELDS: frozenset[str]

    def holds_kv(self, req: Any) -> bool:
        """True if it has slots that it did not give back."""

    def allocated_len(self, req: Any) -> int:
        """Tokens that it has slots for, those of the tree included. 0 without any."""

    def shorten(self, req: Any, num_tokens: int) -> None:
        """So many of its tokens have no slot any more."""

    def batch_of(self, plan: Any) -> Batch | None:
        """The batch that ``get_next_batch_to_run`` answers; None where there is nothing to run."""

    def current_batch(self, scheduler: Any) -> Any:
        """The batch that runs now; None between two."""


def release_of(version: str) -> Release:
    """The module for a version; for one that is not supported, which is refused elsewhere, the nearest."""
    return sglang_0_5_15 if number_of(version) < number_of("0.5.16") else sglang_0_5_17


RELEASE = release_of(importlib.metadata.version("sglang"))
