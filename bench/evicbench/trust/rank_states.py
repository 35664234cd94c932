"""Comparison of what tensor-parallel ranks hold, after every round of a real server, as a plugin that SGLang loads
beside ours.

Ranks exchange a digest; the first time that these differ, each tells what it holds, and the server ends: from there on
they would wait for each other where they do not meet.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from evicbench.plugins import PluginLog, Tell, plugin_folder, watch_scheduler
from sglang_evicpress.patches.decode_budget.state import budget_of

NAME = "evicpress_rank_states"
TOLD_EVERY = 100
LAST_DECISIONS = 12


class RankStates(PluginLog):
    """``with compared() as states, Server(..., env=states.env): ...``."""

    @property
    def num_rounds(self) -> int:
        """Rounds after which every rank held the same, to the last hundred."""
        return max((line["rounds"] for line in self.lines()), default=0)

    @property
    def differences(self) -> list[str]:
        """What the first difference was, a sentence for each part of what ranks hold."""
        return [text for line in self.lines() for text in line.get("differences", ())]


@contextmanager
def compared() -> Iterator[RankStates]:
    with plugin_folder(NAME, "evicbench.trust.rank_states:load") as folder:
        yield RankStates(folder)


# ---- in the server


def load() -> None:
    watch_scheduler(_attach)


def _attach(scheduler: Any, tell: Tell) -> None:
    cache = scheduler.tree_cache
    rounds, ranks = cache.parts.rounds, cache.parts.tree.ranks
    if ranks.is_alone:
        return
    original: Callable[..., None] = rounds.tick
    num_rounds = 0

    def tick(**options: bool) -> None:
        nonlocal num_rounds
        original(**options)
        held = state_of(scheduler)
        digest = hashlib.sha256(repr(held).encode()).digest()
        num_rounds += 1
        if len(set(ranks.gathered(digest))) > 1:
            states = ranks.gathered(held)
            if ranks.is_first:
                tell(rounds=num_rounds, differences=list(differences(*states[:2])))
            os._exit(1)
        if ranks.is_first and num_rounds % TOLD_EVERY == 0:
            tell(rounds=num_rounds)

    rounds.tick = tick


def state_of(scheduler: Any) -> dict[str, list[Any]]:
    """What must be the same on every rank, by what it is."""
    cache = scheduler.tree_cache
    parts = cache.parts
    tree, tiers, storage = parts.tree, parts.tiers, parts.tree.storage
    journal = parts.controller.journal
    ssd = storage.ssd
    return {
        "nodes": [
            (
                *(node.id, str(node.kv.form), node.value is not None, node.lock_ref, node.kv.num_hits),
                *(node.kv.version, node.kv.last_use, node.kv.num_prefetches, node.kv.is_leaving),
                None if node.kv.job is None else (type(node.kv.job).__name__, node.kv.job.number),
                node.kv.weight,
                [(int(tier), str(copy.form), copy.num_slots, copy.begin) for tier, copy in node.kv.copies.items()],
            )
            for node in cache.nodes.values()
        ],
        "jobs": [(name, workers.num_pending, sorted(workers._open)) for name, workers in storage.workers.items()],
        "room": [
            *(cache.token_to_kv_pool_allocator.available_size(), cache.evictable_size_, tiers.host_room.copying_bytes),
            *(tiers.host_room.wanted_bytes, storage.host.arena.extents.used_bytes),
            *(() if ssd is None else (ssd.used_bytes, ssd.room, ssd.is_writable, ssd.is_answering)),
        ],
        "queue": [req.rid for req in scheduler.waiting_queue],
        "running": [
            (
                *(req.rid, len(req.output_ids), None if (state := budget_of(req)) is None else state.num_dropped),
                *((state.has_left_tree, state.is_in_order) if state is not None else ()),
            )
            for req in scheduler.running_batch.reqs
        ],
        "prefetches": [
            (
                *(one.req.rid, one.turn_s, one.max_wait_s, one.is_late, one.short_of, one.is_without_room),
                *(one.num_needed, sorted(one.reserved), sorted(one.looked_at), [job.number for job in one.jobs]),
            )
            for one in tiers.prefetches.by_request.values()
        ],
        "time": [tree.terms.now_s, storage.now_s(), tree.background_clock.is_dirty, repr(tree.terms.weighed)],
        "journal": [journal.next_number, *journal.read(max(0, journal.next_number - LAST_DECISIONS), LAST_DECISIONS)],
    }


def differences(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> Iterator[str]:
    """A sentence for each part in which two ranks differ."""
    for name, held in one.items():
        pairs = [(left, right) for left, right in zip(held, other[name], strict=False) if left != right]
        if pairs or len(held) != len(other[name]):
            yield f"{name}: {len(held)} against {len(other[name])}; first {pairs[:2]}"
