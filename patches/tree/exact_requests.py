"""Requests with ``kv_quality: "exact"``: they take exact nodes from the tree and compute whatever follows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from sglang_evicpress.asked_quality import asks_exact
from sglang_evicpress.patches.tree.node import is_lossy, servable_steps
from sglang_evicpress.patches.tree.types import Node, Request


def is_exact_request(req: Request | None) -> bool:
    """True if nothing lossy may be served to a request."""
    return req is not None and asks_exact(req.sampling_params.custom_params)


def usable_steps(
    req: Request | None, steps: Sequence[tuple[Node, int]], min_match_kept: float
) -> list[tuple[Node, int]]:
    """The first of ``steps`` (node, matched tokens), which spell a known prefix, that a request can be served from. An
    exact request's end before the first lossy node, wherever that is: a node below the GPU is what its fastest copy
    is."""
    usable = list(takewhile(lambda step: not is_lossy(step[0]), steps) if is_exact_request(req) else steps)
    return usable[: servable_steps(usable, min_match_kept)]


def count_lossy(path: Sequence[Node]) -> int:
    """Tokens of the lossy nodes of a path."""
    return sum(len(node.key) for node in path if is_lossy(node))


def first_lossy(steps: Sequence[tuple[Node, int]]) -> Node | None:
    """The first lossy node of a known prefix."""
    return next((node for node, _ in steps if is_lossy(node)), None)


def computes_lossy(req: Request) -> bool:
    """True if what a request that runs computes is lossy, as its prefix is."""
    view = getattr(req, "evicpress", None)
    return view is not None and bool(view.is_lossy)
