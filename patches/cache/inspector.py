"""Everything that can be asked of the cache, answered by the part that knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from sglang_evicpress.introspect.arguments import PAGE_PROFILES, Json
from sglang_evicpress.introspect.operations import InspectableRequests, InspectableTiers, InspectableTree
from sglang_evicpress.introspect.profile_operations import InspectableProfiles, InspectableShadows

LISTS_OF_STATS = ("evictions", "threads")


class ExpiringShadows(InspectableShadows, Protocol):
    """Shadows that go when nobody uses them."""

    counts: dict[str, int]

    def expire_shadows(self) -> None:
        """Close those that nobody uses any more."""


class CountedProfiles(InspectableProfiles, Protocol):
    """Profiles, with what became of them."""

    counts: dict[str, int]


class Inspector:
    """``Inspectable``, with shadows and profiles."""

    def __init__(
        self,
        tree: InspectableTree,
        describe_stats: Callable[[], Json],
        check_integrity: Callable[[], Json],
        tiers: InspectableTiers,
        requests: InspectableRequests,
        shadows: ExpiringShadows,
        profiles: CountedProfiles,
        background_counts: Mapping[str, int],
    ) -> None:
        self._shadows = shadows
        self._profiles = profiles
        self._guest_counts = background_counts
        self.describe_tree = tree.describe_tree
        self.describe_outline = tree.describe_outline
        self.describe_node = tree.describe_node
        self.describe_stats = describe_stats
        self.explain_node = tree.explain_node
        self.read_journal = tree.read_journal
        self.compress_node = tree.compress_node
        self.check_integrity = check_integrity
        self.evict_slots = tree.evict_slots
        self.describe_tiers = tiers.describe_tiers
        self.flush_tier = tiers.flush_tier
        self.demote_node = tiers.demote_node
        self.attach_ssd = tiers.attach_ssd
        self.detach_ssd = tiers.detach_ssd
        self.describe_requests = requests.describe_requests
        self.open_shadow = shadows.open_shadow
        self.make_shadow_form = shadows.make_shadow_form
        self.drop_shadow_form = shadows.drop_shadow_form
        self.close_shadow = shadows.close_shadow
        self.show_profile = profiles.show_profile
        self.put_profile = profiles.put_profile
        self.note_observed = profiles.note_observed

    def describe_news(self, since: int, limit: int, *, figures: bool = False, requests: int | None = None) -> Json:
        """See ``Inspectable``."""
        news: Json = {"decisions": self.read_journal(since, limit)}
        if figures:
            stats = self.describe_stats()
            news["stats"] = {name: value for name, value in stats.items() if name not in LISTS_OF_STATS}
            news["tiers"] = self.describe_tiers()
        if requests is not None:
            news["requests"] = _without_passes(self.describe_requests(None, positions=False, after=requests, limit=40))
        return news

    def list_profiles(self, after: bytes = b"", limit: int = PAGE_PROFILES) -> Json:
        """See ``InspectableProfiles``; with the counts of shadows and of the requests in them."""
        listed = self._profiles.list_profiles(after, limit)
        counts = {**self._profiles.counts, **self._shadows.counts, "background_requests": dict(self._guest_counts)}
        return {**listed, "counts": counts}

    def note_failed(self, key: bytes) -> Json:
        """See ``InspectableProfiles``."""
        return self._profiles.note_failed(key)

    def next_profiling_job(self) -> Json:
        """See ``InspectableProfiles``."""
        self._shadows.expire_shadows()
        return self._profiles.next_profiling_job()


def _without_passes(answer: Json) -> Json:
    described = answer["requests"]
    requests = [{**each, "last_passes": []} for each in described] if isinstance(described, list) else []
    return {**answer, "requests": requests}
