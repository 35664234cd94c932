"""Everything that can be asked of the cache, answered by the part that knows."""

from __future__ import annotations

from sglang_evicpress.introspect.operations import InspectableRequests, InspectableTiers, InspectableTree
from sglang_evicpress.introspect.profile_operations import InspectableProfiles, InspectableShadows


class Inspector:
    """``Inspectable`` and ``Profiled`` in one object."""

    def __init__(
        self,
        tree: InspectableTree,
        tiers: InspectableTiers,
        requests: InspectableRequests,
        shadows: InspectableShadows,
        profiles: InspectableProfiles,
    ) -> None:
        self.describe_tree = tree.describe_tree
        self.describe_node = tree.describe_node
        self.describe_stats = tree.describe_stats
        self.explain_node = tree.explain_node
        self.read_journal = tree.read_journal
        self.compress_node = tree.compress_node
        self.check_integrity = tree.check_integrity
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
        self.list_profiles = profiles.list_profiles
        self.show_profile = profiles.show_profile
        self.put_profile = profiles.put_profile
        self.next_profiling_job = profiles.next_profiling_job
        self.note_observed = profiles.note_observed
        self.note_failed = profiles.note_failed
