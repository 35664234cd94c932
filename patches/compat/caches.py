"""The radix cache as each release calls it: translation only, all that it does is in ``EvicPressCache``."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from sglang_evicpress.patches.cache.radix_cache import EvicPressCache
from sglang_evicpress.patches.hook_points import number_of


class CacheOf0515(EvicPressCache):
    """SGLang 0.5.15.post1: a request itself says how much of its KV is good."""

    def cache_finished_req(self, req: Any, is_insert: bool = True) -> None:
        self.end_request(req, req.pop_committed_kv_cache(), is_insert=is_insert)


class CacheOf0517(EvicPressCache):
    """SGLang 0.5.17: who ends a request says how much of its KV is good."""

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        self.end_request(req, kv_len_to_handle, is_insert=is_insert)


def cache_class(version: str | None = None) -> type[EvicPressCache]:
    """The class for a version, by default the installed one."""
    version = importlib.metadata.version("sglang") if version is None else version
    return CacheOf0515 if number_of(version) < number_of("0.5.16") else CacheOf0517
