"""Tokens of the prompt that the cache served, their least quality and their tiers, on their way to the answer.

SGLang hands ``customized_info`` on with the tokens of an answer, a value for each; ours goes with the first token, and
``http/answers.py`` takes it from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sglang_evicpress.asked_quality import KV_CACHE, served_kv
from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tree.exact_requests import count_lossy
from sglang_evicpress.patches.tree.types import Node, ServedRequest


def note_served_kv(req: ServedRequest, path: Sequence[Node], num_cached: int) -> None:
    """A request runs with so many tokens of its prompt from the nodes of ``path``. As SGLang counts cached tokens, only
    the first time: not after it was retracted."""
    if req.customized_info is None or KV_CACHE not in req.customized_info:
        num_lossy = min(count_lossy(path), num_cached)
        info = req.customized_info = req.customized_info or {}
        tiers = _tiers(req, path, num_cached)
        info[KV_CACHE] = [served_kv(num_cached - num_lossy, num_lossy, req.evicpress_least_quality, tiers)]


def _tiers(req: ServedRequest, path: Sequence[Node], num_cached: int) -> Counter[str]:
    """Cached tokens by the tier that they were found on."""
    loaded, tiers, begin = getattr(req, "evicpress_loaded", {}), Counter[str](), 0
    for node in path:
        num_tokens = min(len(node.key), num_cached - begin)
        if num_tokens > 0:
            tier, _ = loaded.get(node.id, (Tier.GPU, None))
            tiers[tier.label] += num_tokens
            begin += num_tokens
    return tiers
