"""Tokens of the prompt that the cache served, their least quality and their tiers, on their way to the answer.

SGLang hands ``customized_info`` on with the tokens of an answer, a value for each, or where a release knows such,
one for all. Ours goes with the first token, and ``http/answers.py`` takes it from there.

Touches ``SchedulerOutputStreamer.is_request_level_customized_info_key``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress.asked_quality import KV_CACHE, served_kv
from sglang_evicpress.patches.cache.served_hits import found
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.tree.exact_requests import count_lossy
from sglang_evicpress.patches.tree.types import Node, ServedRequest


def note_served_kv(req: ServedRequest, path: Sequence[Node], num_cached: int) -> None:
    """A request runs with so many tokens of its prompt from the nodes of ``path``. As SGLang counts cached tokens, only
    the first time: not after it was retracted."""
    if req.customized_info is None or KV_CACHE not in req.customized_info:
        num_lossy = min(count_lossy(path), num_cached)
        info = req.customized_info = req.customized_info or {}
        tiers = Counter[str]()
        for tier, _, num_tokens in found(req, path, num_cached):
            tiers[tier.label] += num_tokens
        info[KV_CACHE] = [served_kv(num_cached - num_lossy, num_lossy, req.evicpress_least_quality, tiers)]


def _around_sent_once(original: Callable[..., bool], streamer: object, key: str) -> bool:
    """AROUND ``is_request_level_customized_info_key``: else each token of an answer is sent with a place for our value,
    pickled."""
    return key == KV_CACHE or original(streamer, key)


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    if RELEASE.SENT_ONCE:
        registry.register(RELEASE.SENT_ONCE, _around_sent_once, hook_type.AROUND)
