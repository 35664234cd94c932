"""Looking into the tiers, and changing them from outside: what ``/evicpress/tiers`` and its admin routes answer."""

from __future__ import annotations

import time
from typing import Any

from sglang_evicpress.config import GB
from sglang_evicpress.core import Tier
from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.introspect.operations import NodeBusy, UnknownNode
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tree.node import iter_nodes, size_of, start_of
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.survivors import survivor_bytes
from sglang_evicpress.tiers.ssd.folder import NotAllowedError, StoreError, allowed_roots
from sglang_evicpress.tiers.ssd.tier import SsdTier

MOVE_WAIT_S = 0.5
"""How long a question waits for the move that it asked for; the move goes on after that."""


class TierInspection:
    """The part of EvicPressCache that answers for its tiers. Everything here runs on the scheduler thread."""

    def describe_tiers(self: Any) -> dict[str, object]:
        allocator, index = self.token_to_kv_pool_allocator, self.planner.index
        free = allocator.available_size()
        tiers: dict[str, object] = {
            "gpu": {
                "capacity_bytes": allocator.size * self.menu.slot_bytes,
                "used_bytes": (allocator.size - free) * self.menu.slot_bytes,
                "num_nodes": index.num_on[Tier.GPU],
            }
        }
        if self.host is not None:
            tiers["host"] = self._described_host()
        if self.ssd is not None:
            tiers["ssd"] = self._described_ssd()
        return {
            "tiers": tiers,
            "queue": {name: workers.num_pending for name, workers in self.workers.items()},
            "requests_waiting_for_a_copy": self.num_prefetching,
            "survivors": survivor_bytes(),
            "slots_set_apart": sum(len(slots) for slots in self.set_apart.values()),
            "counts": dict(self.storage.counts),
            "errors": self._errors(),
        }

    def _errors(self: Any) -> dict[str, int]:
        counts = dict(self.storage.errors)
        if self.ssd is not None:
            counts |= {f"ssd_store_{reason}": count for reason, count in self.ssd.store.errors.items()}
        return counts

    def _described_host(self: Any) -> dict[str, object]:
        extents = self.host.arena.extents
        return {
            "capacity_bytes": extents.num_bytes,
            "used_bytes": extents.used_bytes,
            "num_nodes": self.planner.index.num_on[Tier.HOST],
            "num_entries": self.host.num_entries,
            "redundant_copies": self.placement.num_spare,
            "copying_bytes": self.host_room.copying_bytes,
            "fragmentation": extents.fragmentation,
            "largest_free_bytes": extents.largest_free,
            "is_pinned": self.host.arena.is_pinned,
            "load": self._described_load(Tier.HOST),
        }

    def _described_ssd(self: Any) -> dict[str, object]:
        store = self.ssd.store
        return {
            "dir": self.ssd.folder,
            "capacity_bytes": store.capacity_bytes,
            "used_bytes": store.used_bytes,
            "num_nodes": self.planner.index.num_on[Tier.SSD],
            "num_entries": store.num_entries,
            "is_writable": store.is_writable,
            "read_bytes": store.read_bytes,
            "written_bytes": store.written_bytes,
            "wear": self.ssd.wear.describe(self.ssd.now_s),
            "load": self._described_load(Tier.SSD),
        }

    def _described_load(self: Any, tier: Tier) -> dict[str, object]:
        """Learned cost of loading from a tier, as JSON."""
        cost = self.cost_model.costs.load[tier]
        return {"fixed_s": cost.fixed_s, "bytes_per_s": cost.bytes_per_s}

    # ---- changes

    def flush_tier(self: Any, tier: Tier) -> dict[str, object]:
        if tier not in self.tiers:
            raise ValueError(f"there is no {tier.label} tier: expected one of {_labels(self.tiers)}")
        if tier == Tier.GPU:
            self.shadows.release_shadows()
        self.removal.flush_tier_copies(tier)
        self._settle(lambda: False)
        return {"tier": tier.label, **self.describe_tiers()}

    def demote_node(self: Any, node_id: int, tier: Tier, hold_s: float = 0.0) -> dict[str, object]:
        """See ``Inspectable.demote_node``."""
        node = self.nodes.get(node_id)
        if node is None:
            raise UnknownNode(node_id)
        if tier not in self.tiers:
            raise ValueError(f"there is no {tier.label} tier: expected one of {_labels(self.tiers[1:])}")
        if node.lock_ref > 0:
            raise NodeBusy(node_id)
        if node.kv.is_shadow:
            raise NodeBusy(node_id, "it belongs to a shadow", change="moved")
        if tier_of(node) > tier:
            raise ValueError(f"node {node_id} is on tier {tier_of(node).label} already: expected a tier below that")
        above = [child.id for child in node.children.values() if tier_of(child) < tier]
        if above:
            raise ValueError(f"node {node_id} has children above tier {tier.label}, such as {above[0]}: move it first")

        self.hold(node_id, hold_s)

        def is_there() -> bool:
            moved_node = self.nodes.get(node_id)
            return moved_node is None or tier_of(moved_node) >= tier

        deadline = time.monotonic() + MOVE_WAIT_S
        while not is_there() and time.monotonic() < deadline:
            if node.lock_ref > 0:  # a request that waits keeps it where it is
                raise NodeBusy(node_id)
            if node.kv.job is None and not node.kv.is_leaving:
                self.moves.demote(node_id, tier if node.value is None else Tier.HOST, node.kv.form)
            if not is_there() and not self.num_pending_jobs:
                break  # there is no room, or nothing may be written now
            self._settle(is_there)
        moved_node = self.nodes.get(node_id)
        if moved_node is None:
            raise ValueError(f"node {node_id} was dropped on its way: see GET /evicpress/tiers for errors")
        hold_left_s = self.hold_left_s(node_id)
        return {
            "id": node_id,
            "tier": tier_of(moved_node).label,
            "is_there": is_there(),
            "hold_seconds_left": hold_left_s,
        }

    def attach_ssd(self: Any, folder: str, gb: float, write_gb_per_day: float | None) -> dict[str, object]:
        if self.host is None:
            raise ValueError("the SSD tier goes through host RAM, and there is none: start with --kv-host-gb")
        if self.is_mixed:
            raise ValueError("the weights changed and the cache holds KV of the old ones: flush it first")
        if self.ssd is not None:
            raise ValueError(f"the SSD tier is {self.ssd.folder} already: detach it first")
        roots = allowed_roots(self.config.ssd_dir, self.config.ssd_allow_dirs)
        per_day = None if write_gb_per_day is None else write_gb_per_day * GB
        size, sync, faults = int(gb * GB), self.config.ssd_fsync, self.host.faults
        identity = self.adapters.identity
        try:
            self.use_ssd(
                SsdTier.attach(folder, size, per_day, sync, identity, faults, key=self.storage.ssd_key, roots=roots)
            )
        except NotAllowedError as error:
            raise IntrospectionError(403, str(error)) from None
        except (StoreError, OSError) as error:
            raise ValueError(str(error)) from None
        self._change_menu()
        return self.describe_tiers()

    def detach_ssd(self: Any) -> dict[str, object]:
        if self.ssd is None:
            raise ValueError("there is no SSD tier: expected one to be attached")
        self._settle(lambda: self.workers["write"].num_pending == 0)
        ssd = self.ssd
        self.use_ssd(None)
        for node in list(iter_nodes(self.root_node))[::-1]:
            if node.id in self.nodes and Tier.SSD in node.kv.copies:
                self.placement.remove_copy(node, Tier.SSD)
                if node.lock_ref == 0 or node.value is not None:
                    self.removal.after_loss(node)
        for entry in self.host.entries():
            entry.ssd = None
        self._change_menu()
        self.close_ssd(ssd)
        return self.describe_tiers()

    def _change_menu(self: Any) -> None:
        self.menu = Menu(self.menu.forms, self.tiers, self.menu.slot_bytes, self.menu.page_size)
        self.rebuild_policy()

    def _settle(self: Any, is_settled: Any) -> None:
        """Let the threads work, for a moment at most, until it is or they have nothing to do."""
        deadline = time.monotonic() + MOVE_WAIT_S
        while self.num_pending_jobs and not is_settled() and time.monotonic() < deadline:
            self.arrival.wait(0.01)
            self.tick()

    def close(self: Any, *, save: bool = True) -> None:
        """The server ends: publish what is on its way to the SSD, within a few seconds, and let go of everything.
        Without ``save``, after an exception, publish nothing and wait for nothing."""
        if self.host is None:
            return
        if not save:
            if self.ssd is not None:
                self.ssd.store.abandon()
            for workers in self.workers.values():
                workers.close(time.monotonic())
            return
        deadline = time.monotonic() + CLOSE_S
        for load in self.loads:
            load.join()  # what is still arriving cannot be copied yet
        self._save_for_the_next(deadline - 1.0)
        while time.monotonic() < deadline and (self.workers["write"].num_pending or self.workers["copy"].num_pending):
            self.arrival.wait(0.01)
            self.tick()
        for workers in self.workers.values():
            workers.close(deadline + 1.0)
        if self.ssd is not None:
            self.close_ssd(self.ssd, LET_GO_S)

    def close_ssd(self: Any, ssd: SsdTier, seconds: float | None = None) -> None:
        """Let go of a folder; one that does not answer is counted, and waited for no longer."""
        if not ssd.close(seconds):
            self.storage.errors["ssd_close_deadline"] += 1

    def _save_for_the_next(self: Any, deadline_s: float) -> None:
        """Write to the SSD what the next server would sooner read than compute, the most used first."""
        if self.ssd is None:
            return
        self.shadows.release_shadows()
        for node in sorted(iter_nodes(self.root_node), key=lambda node: -node.kv.weight):
            if node.id not in self.nodes or not self.adapters.may_reach_ssd(node):
                continue
            copies, size = node.kv.copies, size_of(node) * self.menu.slot_bytes
            load_s = self.costs.load_seconds(Tier.SSD, size)
            if Tier.SSD in copies or load_s >= self.costs.prefill.marginal_seconds(len(node.key), start_of(node)):
                continue
            while (
                time.monotonic() < deadline_s and not self.backup.start_copy(node, Tier.SSD) and self.num_pending_jobs
            ):
                self.arrival.wait(0.01)
                self.tick()
                if node.id not in self.nodes:
                    break  # it had to make room
            if time.monotonic() >= deadline_s:
                return


CLOSE_S = 6.0
LET_GO_S = 2.0
"""Of an SSD folder, when the server ends."""


def _labels(tiers: tuple[Tier, ...]) -> str:
    return ", ".join(tier.label for tier in tiers)
