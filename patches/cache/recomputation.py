"""Tokens that are computed although the cache has them, or had: counted by reason, and drops by what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from sglang_evicpress.core import Tier
from sglang_evicpress.introspect.recomputed import TAIL_TOKENS, Drop, Recomputed, place_of
from sglang_evicpress.patches.tiers.prefetches import Prefetch
from sglang_evicpress.patches.tree.exact_requests import first_lossy, is_exact_request, usable_steps
from sglang_evicpress.patches.tree.node import start_of
from sglang_evicpress.patches.tree.types import CostTerms, Node, QueuedRequest, WaitingTree
from sglang_evicpress.policy.load_or_recompute import Piece
from sglang_evicpress.policy.quality_target import NOTHING


@dataclass(eq=False, repr=False)
class Recomputation:
    """Keeps ``counts``. ``prefetches`` are by ``id()`` of the request; ``pieces``: what is to be loaded of nodes;
    ``room``: free bytes of the tiers; ``regret`` tells the journal what recomputing after a
    decision took, by its number; ``note_not_loaded`` how much of a request could have been loaded."""

    tree: WaitingTree
    prefetches: Mapping[int, Prefetch]
    pieces: Callable[[list[tuple[Node, int]]], list[Piece]]
    terms: CostTerms
    room: Callable[[], Mapping[Tier, int]]
    regret: Callable[[int | None, float], object]
    note_not_loaded: Callable[[QueuedRequest, int], None]
    _: KW_ONLY
    slot_bytes: int
    page_size: int
    min_match_kept: float

    def __post_init__(self) -> None:
        self.counts = Recomputed()

    def count_admitted(self, req: QueuedRequest, _path: Sequence[Node], num_cached: int) -> None:
        """The request runs with so many tokens of its prompt from the cache."""
        counts, tokens = self.counts, req.origin_input_ids
        num_cached = min(num_cached, len(tokens))
        if req.retracted_stain:  # its prompt was counted when it first ran
            counts.compute_again("retracted", len(tokens) - num_cached)
            return
        counts.admit(len(tokens), num_cached)
        known = self.tree.known_of(req)
        num_known = sum(matched for _, matched in known)
        if num_known > num_cached:
            reason, load_s = self._why_not_used(req, known, num_cached)
            counts.blame(reason, num_known - num_cached)
            if reason == "not_worth":
                compute_s = self.terms.costs.prefill.marginal_seconds(num_known - num_cached, num_cached)
                counts.not_worth_s["load"] += load_s
                counts.not_worth_s["predicted"] += compute_s
                self.note_not_loaded(req, num_known - num_cached)
        begin = max(num_known, num_cached)
        if begin + self.page_size >= len(tokens):
            return
        for drop in counts.miss(tokens, begin, req.extra_key, self.page_size):
            self.regret(drop.number, drop.recompute_s)

    def _why_not_used(self, req: QueuedRequest, known: list[tuple[Node, int]], num_cached: int) -> tuple[str, float]:
        """Why a request does not take all that the tree knows of its prompt, with what loading the rest would take."""
        usable = usable_steps(req, known, self.min_match_kept)
        begin, unused = 0, []
        for node, matched in usable:
            if begin >= num_cached:
                unused.append((node, matched))
            begin += matched
        if getattr(req, "evicpress_refused", NOTHING).num_tokens:
            return "too_lossy", 0.0
        if getattr(req, "evicpress_floored", 0):
            return "asked_quality", 0.0
        absent = [(node, matched) for node, matched in unused if node.value is None and node.kv.copies]
        if not absent and not unused and is_exact_request(req) and first_lossy(known):
            return "asked_exact", 0.0
        if not absent:
            return ("came_meanwhile" if unused else "not_servable"), 0.0
        pieces = self.pieces(absent)
        load_s = sum(self.terms.costs.load_seconds(piece.tier, piece.num_bytes, piece.codec) for piece in pieces)
        prefetch = self.prefetches.get(id(req))
        if getattr(req, "evicpress_without_room", False):
            return "no_gpu_room", load_s
        if prefetch is None:
            return "not_prefetched", load_s
        if prefetch.is_late:
            return "late", load_s
        if prefetch.short_of is not None or prefetch.is_without_room:
            return "no_host_room", load_s
        if prefetch.is_waiting:
            return "unverified", load_s
        return "not_worth", load_s

    def note_drop(self, node: Node, reason: str, number: int | None) -> None:
        """A node is about to be dropped."""
        if node.kv.is_shadow:
            return
        start = start_of(node)
        before: list[int] = []
        above = node.parent
        while above.parent is not None and len(before) < TAIL_TOKENS:
            before = [*above.key.raw_token_ids()[-TAIL_TOKENS:], *before]
            above = above.parent
        page = node.key.raw_token_ids()[: self.page_size]
        needed, room = self.slot_bytes * len(node.key), self.room()
        self.counts.drop(
            place_of(before, page, start, node.key.extra_key),
            Drop(
                len(node.key),
                self.terms.costs.prefill.marginal_seconds(len(node.key), start),
                reason,
                any(free >= needed for free in room.values()),
                number,
            ),
        )
