"""All hooks of a scheduler process, in the order in which they wrap each other."""

from __future__ import annotations

from typing import Any

from sglang_evicpress.patches.attention import physical_lengths, req_to_token
from sglang_evicpress.patches.cache import eviction, factory
from sglang_evicpress.patches.decode_budget import admission
from sglang_evicpress.patches.scheduler import hooks, paged_allocator, queries, queue_limit


def register(registry: Any, hook_type: Any) -> None:
    factory.install()
    paged_allocator.install(registry, hook_type)
    req_to_token.install(registry, hook_type)
    physical_lengths.install(registry, hook_type)
    queries.install(registry, hook_type)
    hooks.install(registry, hook_type)
    queue_limit.install(registry, hook_type)
    eviction.install(registry, hook_type)
    admission.install(registry, hook_type)
