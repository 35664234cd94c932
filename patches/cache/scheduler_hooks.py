"""All hooks of a scheduler process, in the order in which they wrap each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sglang_evicpress.patches.attention import layer_groups, physical_lengths, req_to_token
from sglang_evicpress.patches.cache import factory, served_kv
from sglang_evicpress.patches.cache.radix_cache import EvicPressCache
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.decode_budget import admission
from sglang_evicpress.patches.scheduler import garbage, hooks, next_batch, paged_allocator, queries, queue_limit

EVICT = "sglang.srt.mem_cache.common.evict_from_tree_cache"
NO_BEAMS = "Beam search is not supported with --kv-policy: send the request without beam_width."


def _around_evict_from_tree_cache(original: Callable[..., object], tree_cache: object, num_tokens: int) -> None:
    """AROUND ``evict_from_tree_cache``: SGLang 0.5.15.post1 asks ``evict`` for all the slots that it is about to take,
    free ones included, later releases for what is short of them. Our cache is asked for the shortfall."""
    if isinstance(tree_cache, EvicPressCache):
        tree_cache.parts.eviction.make_room(num_tokens)
    else:
        original(tree_cache, num_tokens)


class BeamCoordinator(Protocol):
    """SGLang's BeamCoordinator."""

    tree_cache: object


def _around_beams(
    original: Callable[..., str | None], coordinator: BeamCoordinator, req: object, received: object
) -> str | None:
    """AROUND ``BeamCoordinator.validate_and_init``, which answers with a reason to refuse: beams copy and free rows by
    the positions of tokens, which a compact row does not keep."""
    if isinstance(coordinator.tree_cache, EvicPressCache):
        return NO_BEAMS
    return original(coordinator, req, received)


def register(registry: Any, hook_type: Any) -> None:
    factory.install()
    paged_allocator.install(registry, hook_type)
    req_to_token.install(registry, hook_type)
    physical_lengths.install(registry, hook_type)
    layer_groups.install(registry, hook_type)
    queries.install(registry, hook_type)
    next_batch.install(registry, hook_type)
    hooks.install(registry, hook_type)
    queue_limit.install(registry, hook_type)
    garbage.install(registry, hook_type)
    served_kv.install(registry, hook_type)
    registry.register(EVICT, _around_evict_from_tree_cache, hook_type.AROUND)
    if RELEASE.BEAMS:
        registry.register(RELEASE.BEAMS, _around_beams, hook_type.AROUND)
    admission.install(registry, hook_type)
