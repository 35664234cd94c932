"""Predicted seconds of loading what a request wants, against computing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.prefetches import Prefetch
from sglang_evicpress.patches.tiers.ssd_io import SsdReads
from sglang_evicpress.patches.tiers.types import Steps
from sglang_evicpress.patches.tree.node import start_of
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.load_or_recompute import Piece, deadline_s, num_worth_loading

MOST_CONGESTION = 8.0
"""How many times a second of computing counts at most when others wait for it."""


@dataclass(eq=False, repr=False)
class LoadTerms:
    """``num_ready``: requests at the head of the queue that wait for their turn alone."""

    costs: Callable[[], CostSnapshot]
    ssd: SsdReads
    num_ready: Callable[[], int]

    def pieces(self, steps: Steps) -> list[Piece]:
        """What would be loaded for these nodes, with the tokens that are matched of each."""
        pieces, read = [], set()
        depth = 0 if not steps else start_of(steps[0][0])
        for node, matched in steps:
            tier = Tier.HOST if Tier.HOST in node.kv.copies else Tier.SSD
            copy = node.kv.copies[tier]
            num_bytes = copy.num_bytes
            if tier == Tier.SSD:  # all of an entry is read for any piece of it, once
                num_bytes = 0 if copy.entry in read else copy.entry.header.payload_bytes
                read.add(copy.entry)
            pieces.append(Piece(matched, depth, tier, num_bytes, copy.form.codec))
            depth += matched
        return pieces

    def num_worth(
        self, prefetch: Prefetch, pieces: Sequence[Piece], *, slack_s: float = 0.0, has_to_read: bool = False
    ) -> int:
        """Number of pieces, from the first on, that are sooner loaded than computed; ``has_to_read``: behind what is
        read for others; ``slack_s``: until its turn is expected."""
        terms = {"slack_s": slack_s, "congestion": self._congestion(prefetch)}
        waits = {Tier.SSD: self._reads_s(prefetch)} if has_to_read else None
        return num_worth_loading(pieces, self.costs(), waits=waits, **terms)

    def max_wait_s(self, prefetch: Prefetch, pieces: Sequence[Piece]) -> float:
        """So long a request whose turn has come may be passed over for these pieces."""
        load_s = self._reads_s(prefetch) + sum(
            self.costs().load_seconds(piece.tier, piece.num_bytes, piece.codec) for piece in pieces
        )
        prefill = self.costs().prefill
        recompute_s = sum(prefill.marginal_seconds(piece.num_tokens, piece.depth_tokens) for piece in pieces)
        return deadline_s(load_s, self._congestion(prefetch) * recompute_s)

    def _congestion(self, prefetch: Prefetch) -> float:
        """Factor by which a second of computing counts: others that are ready wait for it, and those for whom something
        is being read are ready after half of it, as likely as not."""
        num_ready = max(0, self.num_ready() - (not prefetch.is_waiting))
        num_soon = sum(read not in prefetch.jobs for read in self.ssd.reads)
        return min(MOST_CONGESTION, 1.0 + num_ready + num_soon / 2)

    def _reads_s(self, prefetch: Prefetch) -> float:
        """Seconds that the reads begun for others are predicted to take: the disk does those first."""
        others = sum(read.num_bytes for read in self.ssd.reads if read not in prefetch.jobs)
        return self.costs().load_seconds(Tier.SSD, others) if others else 0.0
