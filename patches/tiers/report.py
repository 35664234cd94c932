"""Sizes, speeds and counts of the tiers: the answer to ``/evicpress/tiers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.types import HostMemory, Plans, Tiers
from sglang_evicpress.patches.tree.types import Allocator
from sglang_evicpress.policy.cost_model import TransferCost
from sglang_evicpress.survivors import survivor_bytes
from sglang_evicpress.tiers.external.store import ExternalStore
from sglang_evicpress.tiers.ssd.tier import SsdTier


@dataclass(eq=False, repr=False)
class TierReport:
    """Reader of all tiers. ``transfer_costs`` are what loads have taken."""

    allocator: Allocator
    storage: Tiers
    room: HostMemory
    plans: Plans
    _: KW_ONLY
    transfer_costs: Callable[[], Mapping[Tier, TransferCost]]
    num_prefetching: Callable[[], int]
    num_set_apart: Callable[[], int]
    num_redundant: Callable[[], int]
    slot_bytes: int

    def describe_tiers(self) -> dict[str, object]:
        """See ``InspectableTiers.describe_tiers``."""
        allocator, storage = self.allocator, self.storage
        on_gpu = self.plans.forms_on(Tier.GPU)
        tiers: dict[str, object] = {
            "gpu": {
                "capacity_bytes": allocator.size * self.slot_bytes,
                "used_bytes": (allocator.size - allocator.available_size()) * self.slot_bytes,
                "num_nodes": self.plans.num_nodes(Tier.GPU),
                "forms": on_gpu,
                "compression": self._compression(on_gpu),
            }
        }
        errors = dict(storage.errors)
        if storage.has_host:
            tiers["host"] = self._described_host()
            if storage.host.arena.num_failed:
                errors["host_not_grown"] = storage.host.arena.num_failed
        if storage.external is not None:
            tiers["external"] = self._described_external(storage.external)
            errors |= {f"external_store_{reason}": count for reason, count in storage.external.circuit.errors.items()}
        if storage.ssd is not None:
            tiers["ssd"] = self._described_ssd(storage.ssd)
            errors |= {f"ssd_store_{reason}": count for reason, count in storage.ssd.store.errors.items()}
        return {
            "tiers": tiers,
            "queue": {name: workers.num_pending for name, workers in storage.workers.items()},
            "requests_waiting_for_a_copy": self.num_prefetching(),
            "survivors": survivor_bytes(),
            "slots_set_apart": self.num_set_apart(),
            "counts": dict(storage.counts),
            "errors": errors,
        }

    def _described_host(self) -> dict[str, object]:
        host = self.storage.host
        extents, forms = host.arena.extents, self.plans.forms_on(Tier.HOST)
        return {
            "capacity_bytes": host.num_bytes,
            "taken_bytes": extents.num_bytes,
            "used_bytes": extents.used_bytes,
            "num_nodes": self.plans.num_nodes(Tier.HOST),
            "forms": forms,
            "compression": self._compression(forms),
            "num_entries": host.num_entries,
            "redundant_copies": self.num_redundant(),
            "copying_bytes": self.room.copying_bytes,
            "fragmentation": extents.fragmentation,
            "largest_free_bytes": extents.largest_free,
            "is_pinned": host.arena.is_pinned,
            "load": self._described_load(Tier.HOST),
        }

    def _described_ssd(self, ssd: SsdTier) -> dict[str, object]:
        store, forms = ssd.store, self.plans.forms_on(Tier.SSD)
        return {
            "dir": ssd.folder,
            "capacity_bytes": store.capacity_bytes,
            "used_bytes": store.used_bytes,
            "num_nodes": self.plans.num_nodes(Tier.SSD),
            "forms": forms,
            "compression": self._compression(forms),
            "num_entries": store.num_entries,
            "is_writable": store.is_writable,
            "read_bytes": store.read_bytes,
            "written_bytes": store.written_bytes,
            "wear": ssd.wear.describe(ssd.now_s),
            "load": self._described_load(Tier.SSD),
        }

    def _described_external(self, store: ExternalStore) -> dict[str, object]:
        counts = self.storage.counts
        return {
            "backend": store.name,
            "may_read": store.may_read,
            "may_write": store.may_write,
            "num_trips": store.circuit.num_trips,
            "num_published": counts["external_published"],
            "published_bytes": store.published_bytes,
            "num_found": counts["external_found"],
            "num_gone": counts["external_gone"],
            "read_bytes": store.read_bytes,
            "lookup": {"hit_share": store.gain.hit_share, "seconds": store.gain.seconds},
            "load": self._described_load(Tier.EXTERNAL),
        }

    def _compression(self, forms: Mapping[str, Mapping[str, int]]) -> float | None:
        """Bytes of exact, raw KV of what is held in these forms, over the bytes that it takes."""
        num_bytes = sum(form["bytes"] for form in forms.values())
        num_tokens = sum(form["tokens"] for form in forms.values())
        return num_tokens * self.slot_bytes / num_bytes if num_bytes else None

    def _described_load(self, tier: Tier) -> dict[str, object]:
        """Learned cost of loading from a tier."""
        cost = self.transfer_costs()[tier]
        return {"fixed_s": cost.fixed_s, "bytes_per_s": cost.bytes_per_s}
