"""Entries of an earlier server: they are looked for on the SSD where the tree ends, and put into it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.prefetch import Prefetch
from sglang_evicpress.patches.tiers.ssd_io import Lookup
from sglang_evicpress.patches.tree.node import first_outside, start_of
from sglang_evicpress.policy.load_or_recompute import Piece, num_worth_loading
from sglang_evicpress.survivors import SurvivorLayout
from sglang_evicpress.tiers.entry.copies import Copy
from sglang_evicpress.tiers.entry.identity import PathHash, lookup_key_of, namespace_digest, token_bytes
from sglang_evicpress.tiers.entry.payload import layout_of


class Grafting:
    """The part of EvicPressCache that does it. Everything here runs on the scheduler thread."""

    def _look_up(self: Any, prefetch: Prefetch, key: RadixKey, steps: list[tuple[Any, int]]) -> None:
        """Ask the SSD for entries that continue the path where the tree ends."""
        begin = sum(matched for _, matched in steps)
        if self.ssd is None or begin in prefetch.looked_at or len(key) - begin < self.page_size:
            return
        prefetch.looked_at.add(begin)
        if not self.ssd.store.num_entries:
            return
        scope = self.adapters.ssd_scope(key.extra_key)
        if scope is None:
            return
        tokens = key.token_ids[: len(key)]
        if first_outside(tokens, self.vocab_size) is not None:
            return  # nothing of it was ever written
        hashed = PathHash(*scope)
        hashed.update(tokens[:begin])
        refs = self.ssd.store.find(lookup_key_of(hashed.key, tokens[begin : begin + self.page_size]))
        refs = [ref for ref in refs if not self.ssd.is_held(ref)]
        if not refs:
            return
        num_tokens = min(max(ref.num_tokens for ref in refs), len(key) - begin)
        pieces = [Piece(num_tokens, begin, Tier.SSD, num_tokens * self.menu.slot_bytes)]
        if num_worth_loading(pieces, self.costs, congestion=self._congestion(prefetch)) == 0:
            return
        self._set_max_wait(prefetch, pieces)
        ahead, namespace = token_bytes(tokens[begin:]), namespace_digest(scope.namespace)
        prefetch.jobs.append(self.ssd_io.look_up(refs, ahead, hashed.key, namespace))

    def _graft(self: Any, prefetch: Prefetch, job: Lookup) -> None:
        """Put what a lookup has found into the tree, if it still continues a path there."""
        if job.found is None or job.error is not None or job.ssd is not self.ssd:
            return
        ref, header = job.found
        if self.ssd.is_held(ref) or ref not in self.ssd.store:
            return
        key = self.key_of_waiting(prefetch.req)
        ahead = key.token_ids[: len(key)][header.start :][: len(job.tokens) // 4]
        if first_outside(ahead, self.vocab_size) is not None or token_bytes(ahead) != job.tokens:
            return
        steps = self._steps(key)
        if sum(matched for _, matched in steps) != header.start:
            return
        path = self._take(steps)
        parent = path[-1] if path else self.root_node
        tokens = key.token_ids[:0]
        tokens.extend(int.from_bytes(header.tokens[i : i + 4], "little") for i in range(0, len(header.tokens), 4))
        key_found = RadixKey(tokens, key.extra_key)
        is_new = key_found.child_key(self.page_size) not in parent.children
        if not is_new or not parent.kv.is_text or first_outside(tokens, self.vocab_size) is not None:
            return
        layout = None
        if job.survivors is not None:
            numbers = torch.frombuffer(bytearray(job.survivors), dtype=torch.uint8)
            layout = layout_of(numbers, header.shape, header.num_slots)
            if _repeats(path, layout):
                return
        copy = Copy(
            Tier.SSD, header.form, self.ssd.hold(ref, header), 0, header.num_slots, layout, header.is_lossy_prefix, None
        )
        self.add_absent_leaf(parent, key_found, copy)
        self.storage.counts["found_again"] += 1


def _repeats(path: list[Any], layout: SurvivorLayout) -> bool:
    """True if survivors behind a path are of positions that the path holds itself in the same head: the entry is the
    lower part of a node that was split after it was compressed, and the path holds other KV now (see drop_overlaps)."""
    positions = layout.positions
    for node in path:
        begin = start_of(node)
        if node.kv.layout is None:
            if bool(((positions >= begin) & (positions < begin + len(node.key))).any()):
                return True
            continue
        for known, survivors in zip(node.kv.layout.positions.flatten(0, 1), positions.flatten(0, 1), strict=True):
            if bool(torch.isin(survivors, known).any()):
                return True
    return False
