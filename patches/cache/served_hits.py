"""Cached tokens of admitted requests by the tier and form that they were found in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.introspect.served import ServedTokens
from sglang_evicpress.patches.tree.types import CostTerms, Node, ServedRequest


@dataclass(eq=False, repr=False)
class ServedHits:
    """Keeps ``counts``; the seconds saved are those of the learned cost of prefilling, at the depth of the tokens."""

    terms: CostTerms
    counts: ServedTokens = field(default_factory=ServedTokens)

    def count_admitted(self, req: ServedRequest, path: Sequence[Node], num_cached: int) -> None:
        """A user's request runs with so many tokens of its prompt from the nodes of ``path``. One that was retracted
        finds what it computed itself: that is no hit."""
        if req.retracted_stain:
            return
        prefill, begin = self.terms.costs.prefill, 0
        for tier, form, num_tokens in found(req, path, num_cached):
            self.counts.add(tier.label, str(form), num_tokens, prefill.marginal_seconds(num_tokens, begin))
            begin += num_tokens


def found(req: ServedRequest, path: Sequence[Node], num_cached: int) -> Iterator[tuple[Tier, Form, int]]:
    """The tier and form that each node of a request's prefix was found in, and its tokens of the ``num_cached``."""
    loaded: Mapping[int, tuple[Tier, Form]] = getattr(req, "evicpress_loaded", {})
    for node in path:
        num_tokens = min(len(node.key), num_cached)
        if num_tokens <= 0:
            break
        num_cached -= num_tokens
        yield (*loaded.get(node.id, (Tier.GPU, node.kv.form)), num_tokens)
