"""Checkpoints of running requests, made once their first tokens are sent.

SGLang hands a prompt's KV to the tree between computing a token and sending it: half a millisecond that nobody has to
wait for. Of a batch of many prompts some are handed over before the next requests are received, so that
no call takes long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from sglang_evicpress.patches.tree.types import Request

MOST_AT_ONCE = 2
"""Prompts handed to the tree behind one batch's tokens."""


class Keep(Protocol):
    """Hands all KV that a running request has to the tree; ``is_chunk``: more of its prompt is to be computed."""

    def __call__(self, req: Request, token_ids: Sequence[int], *, is_chunk: bool) -> None: ...


class LateCheckpoints:
    """Deferred is what comes while the results of one batch are processed: until requests are received that may ask the
    tree for it, at most."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._is_open = False
        self._pending: list[tuple[Request, Sequence[int]]] = []

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """While the results of a batch are processed and sent. What fails in between ends the server."""
        self._is_open = True
        yield
        self._is_open = False
        self.settle(MOST_AT_ONCE)

    def keep(self, req: Request, token_ids: Sequence[int], *, is_chunk: bool) -> None:
        """Make a checkpoint, or defer that of a whole prompt."""
        if self._is_open and not is_chunk:
            self._pending.append((req, token_ids))
        else:
            self._keep(req, token_ids, is_chunk=is_chunk)

    def settle(self, most: int | None = None) -> None:
        """Make ``most`` of those that were deferred, or all, in the order they came: before a request of the same batch
        ends, too."""
        made, self._pending = self._pending[:most], self._pending[most:] if most is not None else []
        for req, token_ids in made:
            self._keep(req, token_ids, is_chunk=False)
