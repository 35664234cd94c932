"""Behaviour of a release that signatures do not show, tried out before anything is touched, in about a millisecond."""

from __future__ import annotations

import inspect
import pkgutil
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_evicpress.patches.compat.release import Release

INSTALLED = "sglang_evicpress.patches.compat.release.RELEASE"  # its import imports SGLang's
EVICT = "sglang.srt.mem_cache.common.evict_from_tree_cache"
ALLOCATOR = "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator"
CACHE = "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache"
KEY = "sglang.srt.mem_cache.radix_cache.RadixKey"
REQUEST = "sglang.srt.managers.schedule_batch.Req"
SAMPLING_PARAMS = "sglang.srt.sampling.sampling_params.SamplingParams"
KV_INFO = "sglang.srt.managers.schedule_batch.ReqKvInfo"


class _Allocator:
    """5 free slots."""

    page_size = 1

    def available_size(self) -> int:
        return 5

    def evict_to_free_tokens(self, tree: _Tree, num_tokens: int) -> object:
        """SGLang's own, which later releases evict by."""
        return pkgutil.resolve_name(ALLOCATOR).evict_to_free_tokens(self, tree, num_tokens)


class _Tree:
    """A cache that remembers how many slots it was to free."""

    def __init__(self) -> None:
        self.token_to_kv_pool_allocator = _Allocator()
        self.asked: int | None = None

    def is_chunk_cache(self) -> bool:
        return False

    def supports_prefix_sharing(self) -> bool:
        return True

    def evict_for_alloc(self, params: object) -> object:
        """SGLang's own, of later releases."""
        return pkgutil.resolve_name(CACHE).evict_for_alloc(self, params)

    def evict(self, params: object) -> None:
        self.asked = getattr(params, "num_tokens", None)


def behaviour_problem(release: Release | None = None) -> str | None:
    """What differs from the release that we know, as the end of a sentence; None where nothing does."""
    known: Release = pkgutil.resolve_name(INSTALLED) if release is None else release
    return next(iter(_differences(known)), None)


def _differences(release: Release) -> Iterable[str]:
    tree = _Tree()
    pkgutil.resolve_name(EVICT)(tree, 8)
    expected = 3 if release.EVICTS_SHORTFALL else 8
    if tree.asked != expected:
        yield f"{EVICT} with 5 free slots asks the cache for {tree.asked} where 8 are wanted, instead of {expected}"
    fields = frozenset(inspect.signature(pkgutil.resolve_name(KEY)).parameters)
    if fields != release.KEY_FIELDS:
        yield f"{KEY} tells prefixes apart by ({_listed(fields)}) instead of ({_listed(release.KEY_FIELDS)})"
    sampling_params = pkgutil.resolve_name(SAMPLING_PARAMS)()
    request = pkgutil.resolve_name(REQUEST)("", "", array("q"), sampling_params)
    missing = [name for name in release.REQUEST_FIELDS if not hasattr(request, name)]
    if missing:
        yield f"{REQUEST} has no {_listed(missing)}"
    known = frozenset(inspect.signature(pkgutil.resolve_name(KV_INFO)).parameters) if release.KV_FIELDS else frozenset()
    if release.KV_FIELDS - known:
        yield f"{KV_INFO} has no {_listed(release.KV_FIELDS - known)}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
