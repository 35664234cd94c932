"""Invariants of the cache: tree, slots, index of the policy, copies below the GPU and what requests hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_evicpress.core import NodeStats, Tier
from sglang_evicpress.introspect.census import Census
from sglang_evicpress.patches.attention.types import RowPool
from sglang_evicpress.patches.compat.release import RELEASE, REQUEST_KV
from sglang_evicpress.patches.decode_budget.rows import PoolAllocator
from sglang_evicpress.patches.decode_budget.state import BudgetedRequest
from sglang_evicpress.patches.decode_budget.types import RunningBatch
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.types import Slots
from sglang_evicpress.patches.tree.node import census_of, holes_of, iter_nodes, num_slots, size_of, slots_of, start_of
from sglang_evicpress.patches.tree.ranks import Ranks
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner
from sglang_evicpress.policy.tenant_plans import TenantPlans
from sglang_evicpress.survivors import SurvivorLayout
from sglang_evicpress.tiers.entry.copies import HostEntry, SsdEntry
from sglang_evicpress.tiers.host.tier import HostTier

MAX_VIOLATIONS = 100  # that are listed

_INDEXED = (
    *("num_tokens", "num_bytes", "depth_tokens", "quality", "allowed_forms"),
    *("num_hits", "last_use", "sinks", "is_locked"),
)


class RunningScheduler(Protocol):
    """The scheduler, with all that runs."""

    last_batch: RunningBatch | None
    running_batch: RunningBatch | None
    chunked_req: BudgetedRequest | None


class CheckedTree(Protocol):
    """The tree, and the requests that run on it."""

    page_size: int
    root_node: Node
    nodes: dict[int, Node]
    req_to_token_pool: RowPool
    token_to_kv_pool_allocator: PoolAllocator

    @property
    def scheduler(self) -> RunningScheduler | None: ...


class PolicyInUse(Protocol):
    """The policy and the census, which are kept in step with the tree."""

    planner: Planner
    menu: Menu
    census: Census
    tenant_plans: TenantPlans

    def finish(self) -> None: ...
    def tenant_differences(self) -> Iterator[str]: ...


class CheckedTiers(Protocol):
    """Tiers below the GPU."""

    host: HostTier | None


def in_flight(scheduler: RunningScheduler | None, page_size: int) -> Iterator[tuple[BudgetedRequest, int]]:
    """Requests that hold slots of their own, with how many: allocated (whole pages) less what the tree owns."""
    if scheduler is None:
        return
    seen: set[int] = set()
    reqs: list[BudgetedRequest] = []
    for batch in (scheduler.last_batch, scheduler.running_batch, RELEASE.current_batch(scheduler)):
        reqs.extend(batch.reqs if batch is not None else [])
    if scheduler.chunked_req is not None:
        reqs.append(scheduler.chunked_req)
    for req in reqs:
        if id(req) in seen or not REQUEST_KV.holds_kv(req):
            continue
        seen.add(id(req))
        allocated = -(-REQUEST_KV.allocated_len(req) // page_size) * page_size
        yield req, allocated - REQUEST_KV.protected_len(req)


def num_running(scheduler: RunningScheduler | None) -> int:
    batch = None if scheduler is None else scheduler.running_batch
    return 0 if batch is None else len(batch.reqs)


@dataclass(eq=False, repr=False)
class Integrity:
    """Check of all invariants; the policy takes ``shadow_nodes`` and those ``aside`` for locked. ``stats_of``: a node
    as the policy is to see it."""

    tree: CheckedTree
    slots: Slots
    policy: PolicyInUse
    stats_of: Callable[[Node], NodeStats]
    aside: Iterable[int]
    tiers: CheckedTiers
    shadow_nodes: Callable[[], Iterable[Node]]
    ranks: Ranks
    digest_of_journal: Callable[[], bytes]

    def check_integrity(self) -> dict[str, object]:
        """Every invariant that can be seen between two steps, on every rank; lists each one that is broken."""
        self.policy.finish()
        found = list(self._violations())
        if not self.ranks.is_alone:
            found = self._of_all_ranks(found)
        return {"ok": not found, "violations": found[:MAX_VIOLATIONS], "num_nodes": len(self.tree.nodes)}

    def _of_all_ranks(self, found: list[str]) -> list[str]:
        """Problems found on any rank, and what ranks have decided differently."""
        told = self.ranks.gathered((found, self._decided()))
        broken = [f"rank {rank}: {each}" for rank, (theirs, _) in enumerate(told) for each in theirs]
        _, of_first = told[0]
        for rank, (_, decided) in enumerate(told):
            others = (name for name, digest in decided.items() if digest != of_first[name])
            broken += [f"rank {rank} has other {name} than rank 0" for name in others]
        return broken

    def _decided(self) -> dict[str, bytes]:
        """Digests of what all ranks must have alike."""
        nodes = [
            (
                (node.id, len(node.key), str(node.kv.form), int(tier_of(node)), node.lock_ref, node.kv.num_hits),
                [(int(tier), str(copy.form), copy.begin, copy.num_slots) for tier, copy in node.kv.copies.items()],
                [] if node.kv.layout is None else node.kv.layout.logical.tolist(),
            )
            for node in iter_nodes(self.tree.root_node)
        ]
        slots = [slots_of(node).tolist() for node in iter_nodes(self.tree.root_node)]
        free = RELEASE.free_pages(self.tree.token_to_kv_pool_allocator).tolist()
        told = {"nodes": nodes, "slots": [slots, free]}
        return {"journal": self.digest_of_journal()} | {
            name: hashlib.sha256(repr(each).encode()).digest() for name, each in told.items()
        }

    def _violations(self) -> Iterator[str]:
        allocator = self.tree.token_to_kv_pool_allocator
        page = self.tree.page_size
        evictable = protected = 0
        owners: list[tuple[str, torch.Tensor]] = []
        for node in iter_nodes(self.tree.root_node):
            name = f"node {node.id}"
            slots = slots_of(node)
            owners.append((name, slots))
            if node.lock_ref > 0:
                protected += num_slots(node)
            else:
                evictable += num_slots(node)
            if self.tree.nodes.get(node.id) is not node:
                yield f"{name} is not in the table of nodes"
            if node.parent is not self.tree.root_node and node.lock_ref > node.parent.lock_ref:
                yield f"{name} has {node.lock_ref} locks, its parent {node.parent.lock_ref}"
            if node.value is None:
                continue
            if len(node.value) != len(node.key) or len(node.key) % page:
                yield f"{name} has {len(node.key)} tokens, {len(node.value)} entries, pages of {page}"
            if len(slots) != num_slots(node) or int((node.value != 0).sum()) != len(slots):
                yield f"{name} holds {len(slots)} slots but counts {num_slots(node)}"
            yield from self._layout_violations(node)
            yield from self.policy.census.differences(node.id, census_of(node))
        if self.policy.census.num_nodes != len(owners):
            yield f"the census has {self.policy.census.num_nodes} nodes, the tree {len(owners)}"
        if len(self.tree.nodes) != len(owners):
            yield f"the table knows {len(self.tree.nodes)} nodes, the tree holds {len(owners)}"
        protected += self.slots.reserved
        counted = self.slots.evictable, self.slots.protected
        if (evictable, protected) != counted:
            yield (
                f"evictable {counted[0]} and protected {counted[1]} slots are counted, "
                f"{evictable} and {protected} are held"
            )
        num_in_flight = 0
        for req, held in in_flight(self.tree.scheduler, page):
            num_in_flight += held
            holes = holes_of(req)
            row = self.tree.req_to_token_pool.req_to_token[REQUEST_KV.row_of(req)]
            own = row[REQUEST_KV.protected_len(req) - holes : REQUEST_KV.allocated_len(req) - holes].to(torch.int64)
            owners.append((f"request {req.rid}", torch.unique(own // page) if page > 1 else own))
        free = allocator.available_size()
        if free + evictable + protected + num_in_flight != allocator.size:
            yield (
                f"free {free} + evictable {evictable} + protected {protected} + in flight {num_in_flight} slots "
                f"are not the total of {allocator.size}"
            )
        yield from self._sharing_violations(owners)
        yield from self._index_violations()
        yield from self._tier_violations()

    def _index_violations(self) -> Iterator[str]:
        """The policy's index against the tree."""
        index = self.policy.planner.index
        for node in iter_nodes(self.tree.root_node):
            candidate = index.candidates.get(node.id)
            if candidate is None:
                yield f"node {node.id} is not in the policy's index"
                continue
            now = self.stats_of(node)
            for name in ("parent_id", "form", *_INDEXED):
                noted, held = getattr(candidate, name), getattr(now, name)
                if noted != held:
                    yield f"node {node.id}: the policy's index has {name} {noted}, the tree {held}"
            if candidate.tier != now.tier:
                yield f"node {node.id}: the policy's index has it on tier {candidate.tier}, it is on {int(now.tier)}"
            for queued_hit in node.kv.queued_hits.values():
                if queued_hit.nodes.get(node.id) is not node:
                    yield f"node {node.id} carries a queued hit that does not know of it"
        yield from self.policy.tenant_differences()
        if len(index.candidates) != len(self.tree.nodes):
            yield f"the policy's index has {len(index.candidates)} nodes, the tree {len(self.tree.nodes)}"
        held_bytes = sum(map(num_slots, self.tree.nodes.values())) * self.policy.menu.slot_bytes
        idle = [node for node in self.shadow_nodes() if node.lock_ref == 0]  # counted as locked, like those aside
        aside = [node for node in map(self.tree.nodes.__getitem__, self.aside) if node.lock_ref == 0]
        num_locked = self.slots.protected - self.slots.reserved + sum(map(num_slots, [*idle, *aside]))
        locked = num_locked * self.policy.menu.slot_bytes
        if (index.num_bytes[Tier.GPU], index.locked_bytes[Tier.GPU]) != (held_bytes, locked):
            yield (
                f"the policy's index has {index.num_bytes[Tier.GPU]} bytes, {index.locked_bytes[Tier.GPU]} locked; "
                f"the tree has {held_bytes}, {locked} locked"
            )

    def _layout_violations(self, node: Node) -> Iterator[str]:
        layout, name = node.kv.layout, f"node {node.id}"
        if layout is None:
            if node.kv.form.press is not None:
                yield f"{name} is {node.kv.form} but has no survivors' positions"
            return
        logical = layout.logical
        if layout.num_slots == 0:
            return
        if not bool((logical[1:] > logical[:-1]).all()) or int(logical[0]) < 0 or int(logical[-1]) >= len(node.key):
            yield f"{name}: logical indices of its slots are not strictly increasing inside the node"
        slots = node.kv.slots
        if node.value is None or slots is None or not torch.equal(node.value[logical.to(node.value.device)], slots):
            yield f"{name}: its slots are not where its layout says"
        yield from self._position_violations(node, layout)

    def _position_violations(self, node: Node, layout: SurvivorLayout) -> Iterator[str]:
        name, start, page = f"node {node.id}", start_of(node), self.tree.page_size
        num_layers, _, num_slots = layout.shape
        by_layer = [layout.positions_of(layer) for layer in range(num_layers)]
        bounds = (layout.logical // page + 1) * page + start
        for layer, positions in enumerate(by_layer):
            places = torch.arange(num_slots) if layout.filling is None else layout.filling.of_layer(layer)
            if positions.shape[1] != len(places) or not bool((places[1:] > places[:-1]).all()):
                yield f"{name}: layer {layer} does not have a position for each slot that it fills"
                return
            if not bool((positions[:, 1:] > positions[:, :-1]).all()):
                yield f"{name}: survivors' positions are not ascending"
            if not bool((positions < bounds[places]).all()):
                yield f"{name}: a survivor sits before its position"
        # After a split the lower part may hold, in some heads, survivors from above it; nobody else may hold those too.
        overlaps = [
            (layer, head)
            for layer, positions in enumerate(by_layer)
            for head in (positions[:, :1] < start).flatten().nonzero().flatten().tolist()
        ]
        above, end = node.parent, start
        while overlaps and above is not self.tree.root_node:
            begin = end - len(above.key)
            for layer, head in overlaps:
                held = by_layer[layer][head]
                held = held[(held >= begin) & (held < end)]
                if above.kv.layout is not None:
                    held = held[torch.isin(held, above.kv.layout.positions_of(layer)[head])]
                if len(held):
                    yield f"{name} holds position {int(held[0])} of layer {layer}, head {head}, as does node {above.id}"
            above, end = above.parent, begin

    def _sharing_violations(self, owners: list[tuple[str, torch.Tensor]]) -> Iterator[str]:
        allocator, page = self.tree.token_to_kv_pool_allocator, self.tree.page_size
        pages: dict[int, str] = {}
        for index in RELEASE.free_pages(allocator).tolist():
            if index in pages:
                yield f"page {index} is free twice"
            pages[index] = "the free list"
        for name, slots in owners:
            is_request = name.startswith("request")
            units = slots if page == 1 or is_request else torch.unique(slots // page)
            for index in units.tolist():
                if index == 0:
                    yield f"{name} holds the padding slot"
                elif index in pages:
                    yield f"page {index} belongs to {name} and to {pages[index]}"
                pages[index] = name

    def _tier_violations(self) -> Iterator[str]:
        """Broken invariants of copies and entries, as far as they can be seen between two steps."""
        if self.tiers.host is None:
            return
        owners: dict[int, tuple[HostEntry | SsdEntry, set[int]]] = {}
        for node in iter_nodes(self.tree.root_node):
            name, parent = f"node {node.id}", node.parent
            if node.value is None and not node.kv.copies:
                yield f"{name} is on no tier"
            if node.value is not None and parent is not self.tree.root_node and parent.value is None:
                yield f"{name} is on the GPU, its parent {parent.id} is not"
            for tier, copy in node.kv.copies.items():
                owners.setdefault(id(copy.entry), (copy.entry, set()))[1].add(node.id)
                if copy.tier != tier or node.id not in copy.entry.owners:
                    yield f"{name} has a copy on tier {tier.label} that does not know of it"
                if copy.begin + copy.num_slots > copy.entry.header.num_slots:
                    yield f"{name}: its copy on tier {tier.label} ends beyond the entry"
                if copy.layout is None and copy.num_slots != len(node.key):
                    yield f"{name} has {len(node.key)} tokens, its full copy on tier {tier.label} {copy.num_slots}"
            shown = node.kv.copies.get(tier_of(node))
            if (
                node.value is None
                and shown is not None
                and (shown.form, shown.num_slots) != (node.kv.form, size_of(node))
            ):
                yield f"{name} does not show its fastest copy"
            if node.value is None and num_slots(node):
                yield f"{name} is not on the GPU and holds slots"
        for entry, held_by in owners.values():
            if entry.owners != held_by:
                yield f"an entry is held by the nodes {sorted(held_by)} and lists {sorted(entry.owners)}"
        runs = sorted(run for entry in self.tiers.host.entries() for run in entry.runs)
        for (begin, size), (after, _) in zip(runs, runs[1:], strict=False):
            if begin + size > after:
                yield f"two host entries share byte {after}"
        held = sum(size for _, size in runs)
        if held != self.tiers.host.arena.extents.used_bytes:
            yield f"host entries hold {held} bytes, {self.tiers.host.arena.extents.used_bytes} are taken"
