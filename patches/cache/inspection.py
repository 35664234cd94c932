"""Looking into the cache and checking it: what ``/evicpress/*`` answers, as plain JSON objects."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.introspect.arguments import PAGE_DECISIONS, PAGE_NODES, PAGE_NUMBERS, IntrospectionError
from sglang_evicpress.introspect.keyed_hash import keyed_hash
from sglang_evicpress.introspect.operations import NodeBusy, UnknownNode
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tree.node import census_of, holes_of, is_lossy, num_slots, slots_of, start_of, walk
from sglang_evicpress.policy.cost_model import PrefillLaw
from sglang_evicpress.survivors import SurvivorLayout
from sglang_evicpress.threads import WatchedThread

_BOOKED = (
    *("num_tokens", "num_bytes", "depth_tokens", "quality", "reachable", "weight"),
    *("num_hits", "last_use", "sinks", "is_locked"),
)


MAX_CHILDREN = 256  # named in a node's description
MAX_NAMESPACES = 1024  # whose hashes are kept


class Inspection:
    """The ``Inspectable`` part of EvicPressCache; reads everything, and changes only through its own operations."""

    def describe_tree(self: Any, after: int = 0, limit: int = PAGE_NODES) -> dict[str, object]:
        ids = list(self.nodes)  # in ascending order: ids are never reused
        begin = bisect_right(ids, after)
        shown = ids[begin : begin + min(limit, PAGE_NODES)]
        starts: dict[int, int] = {self.root_node.id: 0}
        found = sorted((_start_of(self.nodes[node_id], starts), node_id) for node_id in shown)
        nodes = [self._summary(self.nodes[node_id], start) for start, node_id in found]  # parents first
        return {
            "page_size": self.page_size,
            "num_nodes": len(ids),
            "nodes": nodes,
            "next": shown[-1] if shown and shown[-1] != ids[-1] else None,
        }

    def describe_node(
        self: Any, node_id: int, *, positions: bool, tokens: bool, layer: int | None = None
    ) -> dict[str, object]:
        node = self._node(node_id)
        layout = node.kv.layout
        tokens_of_node = node.key.raw_token_ids()
        described = self._summary(node, start_of(node))
        described["tokens_hash"] = self._keyed_hash(tokens_of_node.tobytes(), 32)
        described["options"] = [
            {"form": str(option.form or "drop"), "num_slots": option.num_bytes // self.menu.slot_bytes}
            for option in self.options_of(node)
        ]
        described["hold_seconds_left"] = self.hold_left_s(node_id)
        described["decisions"] = self.controller.journal.about(node_id)
        if positions:
            described["positions"] = None if layout is None else _numbers_of(layout, node_id, layer)
            described["logical_indices"] = None if layout is None else layout.logical.numpy()
        if tokens:
            described["token_ids"] = np.frombuffer(tokens_of_node, dtype=np.int64)
        return described

    def explain_node(self: Any, node_id: int) -> dict[str, object]:
        node = self._node(node_id)
        return {
            **self.policy.explain(node_id, self.value_of_hit()),
            "num_hits": node.kv.num_hits,
            "half_life_s": self.clock.half_life_s,
            "half_life_is_learned": self.clock.is_learned,
            "costs": _described_law(self.costs.prefill),
            "recompute_weight": self.recompute_weight,
            "decisions": self.controller.journal.about(node_id),
        }

    def read_journal(self: Any, since: int, limit: int) -> dict[str, object]:
        return {"now_s": self.now_s, **self.controller.journal.read(since, min(limit, PAGE_DECISIONS))}

    def describe_stats(self: Any) -> dict[str, object]:
        allocator = self.token_to_kv_pool_allocator
        census, controller = self.census, self.controller
        return {
            "policy": self.config.policy,
            "alpha": self.config.alpha,
            "half_life_s": self.clock.half_life_s,
            "half_life_is_learned": self.clock.is_learned,
            "forms": [str(form) for form in self.menu.forms[1:]],
            "now_s": self.now_s,
            "costs": {
                "in_use": _described_law(self.costs.prefill),
                "learned": _described_law(self.cost_model.costs.prefill),
                "num_observations": self.prefill_times.num_observed,
                "recompute_weight": round(self.recompute_weight, 3),
            },
            "waiting": {"requests": len(self.claims), "claimed_nodes": self.claims.num_nodes},
            "queue": {
                "expected_wait_s": self.turns.wait_s(len(self.claims)),  # one claim per user's request that waits
                "margin_s": 0.0 if self.first_tokens is None else self.first_tokens.margin.seconds,
                "admitted_per_s": self.turns.rate,
                "refused": self.num_refused,
            },
            "page_size": self.page_size,
            "total_slots": allocator.size,
            "free_slots": allocator.available_size(),
            "evictable_slots": self.evictable_size_,
            "protected_slots": self.protected_size_,
            "in_flight_slots": sum(held for _, held in self._in_flight()),
            "shadow_slots": self.num_shadow_slots,
            "num_nodes": census.num_nodes,
            "cached_tokens": census.num_tokens,
            "cached_slots": census.num_slots,
            "resident_forms": census.by_form(),
            "decisions": {
                "compressed": dict(controller.num_compressed),
                "dropped": controller.num_dropped,
                "demoted": dict(controller.num_demoted),
                "dropped_tokens": controller.dropped_tokens,
                "freed_slots": controller.freed_slots,
                "failed": dict(controller.num_failed),
            },
            "admission": self.recomputed.describe(self.prefill_times.not_loaded_s),
            "drops": self.recomputed.describe_drops(),
            "evictions": self.describe_evictions(),
            "utility_lost_s": controller.journal.lost if self.policy.has_utility else None,
            "threads": [thread.describe() for thread in self.threads()],
        }

    def compress_node(self: Any, node_id: int, form: Form, hold_s: float = 0.0) -> dict[str, object]:
        """See ``Inspectable.compress_node``."""
        node = self._node(node_id)
        if node.lock_ref > 0:
            raise NodeBusy(node_id)
        if node.kv.is_shadow:
            raise NodeBusy(node_id, "it belongs to a shadow")
        before, after = num_slots(node), self.slots_in(node, form, start_of(node))
        if after is None:
            why = "its press needs queries of the prompt, and none were kept (they are when --kv-forms names the press)"
            if form.is_exact or not node.kv.form.is_exact:
                why = f"it holds {node.kv.form}: expected a smaller form of the same press"
            raise ValueError(f"node {node_id} cannot be brought to {form}: {why}")
        if after >= before:
            raise ValueError(
                f"node {node_id} cannot be brought to {form}: it holds {before} slots and would keep {after} "
                f"(whole pages of {self.page_size})"
            )
        freed = self.compress(node_id, form)
        if node_id not in self.nodes:
            raise IntrospectionError(507, f"node {node_id} was dropped: the device has no memory to compress it")
        self.hold(node_id, hold_s)
        held = {"hold_seconds_left": self.hold_left_s(node_id)}
        return {**self._summary(node, start_of(node)), "freed_slots": freed, **held}

    def threads(self: Any) -> Iterator[WatchedThread]:
        """Every thread that works for the cache in this process."""
        for workers in self.workers.values():
            yield from workers.threads
        if self.ssd is not None:
            yield from self.ssd.store.threads

    def evict_slots(self: Any, num_slots: int) -> dict[str, object]:
        freed = self.relieve(num_slots)
        return {"freed_slots": freed, "free_slots": self.token_to_kv_pool_allocator.available_size()}

    def check_integrity(self: Any) -> dict[str, object]:
        """Check every invariant; lists each one that is broken."""
        found = list(self._violations())
        return {"ok": not found, "violations": found[:100], "num_nodes": len(self.nodes)}

    # ---- parts

    def _node(self: Any, node_id: int) -> Any:
        node = self.nodes.get(node_id)
        if node is None:
            raise UnknownNode(node_id)
        return node

    def _summary(self: Any, node: Any, start: int) -> dict[str, object]:
        kv, extra_key = node.kv, node.key.extra_key  # a cache salt is a secret: only its hash is shown
        return {
            "id": node.id,
            "parent_id": None if node.parent is self.root_node else node.parent.id,
            "children": [child.id for child in islice(node.children.values(), MAX_CHILDREN)],
            "num_children": len(node.children),
            "start": start,
            "num_tokens": len(node.key),
            "num_slots": num_slots(node),
            "form": str(kv.form),
            "is_shadow": kv.is_shadow,
            "num_profiles": len(kv.profiles),
            "tier": tier_of(node).label,
            "copies": {tier.label: str(copy.form) for tier, copy in sorted(kv.copies.items())},
            "origin": kv.origin,
            "lineage": "lossy" if is_lossy(node) else "exact",
            "computed_on": "lossy" if kv.is_lossy_prefix else "exact",
            "lock_ref": node.lock_ref,
            "weight": self.clock.faded(kv.weight, self.now_s),
            "num_hits": kv.num_hits,
            "last_use": kv.last_use,
            "has_queries": self.window_of(node) is not None,
            "namespace": None if extra_key is None else self._shown_namespace(extra_key),
        }

    def _shown_namespace(self: Any, extra_key: str) -> str:
        """Worked out once for each of the last namespaces: clients choose them, and how long they are."""
        if extra_key not in self.shown_namespaces:
            while len(self.shown_namespaces) >= MAX_NAMESPACES:
                del self.shown_namespaces[next(iter(self.shown_namespaces))]
            self.shown_namespaces[extra_key] = self._keyed_hash(extra_key.encode(), 8)
        return str(self.shown_namespaces[extra_key])

    def _keyed_hash(self: Any, value: bytes, num_bytes: int) -> str:
        return keyed_hash(value, self.inspection_key, num_bytes)

    def _in_flight(self: Any) -> Iterator[tuple[Any, int]]:
        """Requests that hold slots of their own, with how many: allocated (whole pages) less what the tree owns."""
        scheduler = self.scheduler
        if scheduler is None:
            return
        seen: set[int] = set()
        reqs: list[Any] = []
        for batch in (scheduler.last_batch, scheduler.running_batch, scheduler.cur_batch):
            reqs.extend(batch.reqs if batch is not None else [])
        if scheduler.chunked_req is not None:
            reqs.append(scheduler.chunked_req)
        for req in reqs:
            if id(req) in seen or req.req_pool_idx is None or req.kv_committed_freed:
                continue
            seen.add(id(req))
            allocated = -(-req.kv_allocated_len // self.page_size) * self.page_size
            yield req, allocated - req.cache_protected_len

    def _violations(self: Any) -> Iterator[str]:
        allocator = self.token_to_kv_pool_allocator
        page = self.page_size
        evictable = protected = 0
        owners: list[tuple[str, torch.Tensor]] = []
        for node in walk(self.root_node):
            name = f"node {node.id}"
            slots = slots_of(node)
            owners.append((name, slots))
            if node.lock_ref > 0:
                protected += num_slots(node)
            else:
                evictable += num_slots(node)
            if self.nodes.get(node.id) is not node:
                yield f"{name} is not in the table of nodes"
            if node.parent is not self.root_node and node.lock_ref > node.parent.lock_ref:
                yield f"{name} has {node.lock_ref} locks, its parent {node.parent.lock_ref}"
            if node.value is None:
                continue
            if len(node.value) != len(node.key) or len(node.key) % page:
                yield f"{name} has {len(node.key)} tokens, {len(node.value)} entries, pages of {page}"
            if len(slots) != num_slots(node) or int((node.value != 0).sum()) != len(slots):
                yield f"{name} holds {len(slots)} slots but counts {num_slots(node)}"
            yield from self._layout_violations(node)
            yield from self.census.differences(node.id, census_of(node))
        if self.census.num_nodes != len(owners):
            yield f"the census has {self.census.num_nodes} nodes, the tree {len(owners)}"
        if len(self.nodes) != len(owners):
            yield f"the table knows {len(self.nodes)} nodes, the tree holds {len(owners)}"
        protected += self.ledger.reserved
        if (evictable, protected) != (self.evictable_size_, self.protected_size_):
            yield (
                f"evictable {self.evictable_size_} and protected {self.protected_size_} slots are counted, "
                f"{evictable} and {protected} are held"
            )
        in_flight = 0
        for req, held in self._in_flight():
            in_flight += held
            holes = holes_of(req)
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
            own = row[req.cache_protected_len - holes : req.kv_allocated_len - holes].to(torch.int64)
            owners.append((f"request {req.rid}", torch.unique(own // page) if page > 1 else own))
        free = allocator.available_size()
        if free + evictable + protected + in_flight != allocator.size:
            yield (
                f"free {free} + evictable {evictable} + protected {protected} + in flight {in_flight} slots "
                f"are not the total of {allocator.size}"
            )
        yield from self._sharing_violations(owners)
        yield from self._book_violations()
        yield from self.tier_violations()

    def _book_violations(self: Any) -> Iterator[str]:
        """The policy's book against the tree."""
        book = self.policy.book
        for node in walk(self.root_node):
            record = book.records.get(node.id)
            if record is None:
                yield f"node {node.id} is not in the policy's book"
                continue
            now = self.stats_of(node)
            for name in ("parent_id", "form", *_BOOKED):
                noted, held = getattr(record, name), getattr(now, name)
                if noted != held:
                    yield f"node {node.id}: the policy's book has {name} {noted}, the tree {held}"
            if record.rank != now.tier:
                yield f"node {node.id}: the policy's book has it on tier {record.rank}, it is on {int(now.tier)}"
            for claim in node.kv.claims.values():
                if claim.nodes.get(node.id) is not node:
                    yield f"node {node.id} carries a claim that does not know of it"
        if len(book.records) != len(self.nodes):
            yield f"the policy's book has {len(book.records)} nodes, the tree {len(self.nodes)}"
        held_bytes = sum(map(num_slots, self.nodes.values())) * self.menu.slot_bytes
        idle_shadows = sum(num_slots(node) for node in self.shadow_nodes() if node.lock_ref == 0)  # as if locked
        aside = sum(num_slots(self.nodes[node_id]) for node_id in self.aside if self.nodes[node_id].lock_ref == 0)
        locked = (self.protected_size_ - self.ledger.reserved + idle_shadows + aside) * self.menu.slot_bytes
        if (book.num_bytes[Tier.GPU], book.locked_bytes[Tier.GPU]) != (held_bytes, locked):
            yield (
                f"the policy's book has {book.num_bytes[Tier.GPU]} bytes, {book.locked_bytes[Tier.GPU]} locked; "
                f"the tree has {held_bytes}, {locked} locked"
            )

    def _layout_violations(self: Any, node: Any) -> Iterator[str]:
        layout, name = node.kv.layout, f"node {node.id}"
        if layout is None:
            if not node.kv.form.is_exact:
                yield f"{name} is {node.kv.form} but has no survivors' positions"
            return
        logical, positions = layout.logical, layout.positions
        if layout.num_slots == 0:
            return
        if not bool((logical[1:] > logical[:-1]).all()) or int(logical[0]) < 0 or int(logical[-1]) >= len(node.key):
            yield f"{name}: logical indices of its slots are not strictly increasing inside the node"
        if not torch.equal(node.value[logical.to(node.value.device)], node.kv.slots):
            yield f"{name}: its slots are not where its layout says"
        if not bool((positions[..., 1:] > positions[..., :-1]).all()):
            yield f"{name}: survivors' positions are not ascending"
        start = start_of(node)
        page = self.page_size
        bound = (logical // page + 1) * page + start
        if not bool((positions < bound).all()):
            yield f"{name}: a survivor sits before its position"
        # After a split the lower part may hold, in some heads, survivors from above it; nobody else may hold those too.
        strays = [(layer, head) for layer, head in ((positions[..., 0] < start).nonzero().tolist())]
        above, end = node.parent, start
        while strays and above is not self.root_node:
            begin = end - len(above.key)
            for layer, head in strays:
                held = positions[layer, head]
                held = held[(held >= begin) & (held < end)]
                if above.kv.layout is not None:
                    held = held[torch.isin(held, above.kv.layout.positions[layer, head])]
                if len(held):
                    yield f"{name} holds position {int(held[0])} of layer {layer}, head {head}, as does node {above.id}"
            above, end = above.parent, begin

    def _sharing_violations(self: Any, owners: list[tuple[str, torch.Tensor]]) -> Iterator[str]:
        allocator, page = self.token_to_kv_pool_allocator, self.page_size
        pages: dict[int, str] = {}
        for index in torch.cat([allocator.free_pages, allocator.release_pages]).tolist():
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


def _start_of(node: Any, starts: dict[int, int]) -> int:
    """Start of a node like ``start_of``, with known starts by id: every node above is passed once for a whole page."""
    path = []
    above = node.parent
    while above.id not in starts:
        path.append(above)
        above = above.parent
    for each in reversed(path):
        starts[each.id] = starts[each.parent.id] + (0 if each.parent.parent is None else len(each.parent.key))
    parent = node.parent
    return starts[parent.id] + (0 if parent.parent is None else len(parent.key))


def _numbers_of(layout: SurvivorLayout, node_id: int, layer: int | None) -> object:
    """Positions as nested arrays [layers, heads, slots], or [heads, slots] of one layer. Raises IntrospectionError 400
    for a layer that is not there, or more numbers than one call may ask for, before any is read."""
    num_layers, num_heads, num_slots = layout.shape
    if layer is not None and layer >= num_layers:
        raise IntrospectionError(400, f"layer is {layer}: expected 0 to {num_layers - 1}")
    count = num_heads * num_slots * (num_layers if layer is None else 1)
    if count > PAGE_NUMBERS:
        way_out = "ask without them" if layer is not None else f"ask for one layer, 0 to {num_layers - 1}, at a time"
        raise IntrospectionError(
            400, f"node {node_id} has {count} positions, and {PAGE_NUMBERS} are shown at once: {way_out}"
        )
    positions = layout.positions if layer is None else layout.positions_of(layer)
    return np.ascontiguousarray(positions.numpy())


def _described_law(law: PrefillLaw) -> dict[str, object]:
    return {
        "prefill_fixed_s": law.fixed_s,
        "prefill_per_token_s": law.per_token_s,
        "prefill_per_pair_s": law.per_pair_s,
    }
