"""One form for every node, then least recently used."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_evicpress.core import EXACT, Form, LowerCopy, Tier
from sglang_evicpress.policy.base import DROPPED, Candidate, Step, lower_bytes
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.lru import CascadePolicy

CHUNK_TOKENS = 64
RUN_TOKENS = 16


class FixedFormPolicy(CascadePolicy):
    """Fixed compression with LRU, the baseline of EvicPress section 6.1; with a codec, that of AdaptCache.

    A tier that is short first brings every node that is still exact to ``form``, least recently used first; only when
    none is left do nodes go down, by last use. A node that the form does not make smaller, or that is in another
    lossy form, stays as it is. The codec of the form is that below the GPU, to which nodes are brought on their way
    down; on the GPU they are pressed only. Simplified: a node is compressed when memory first runs short, not when it
    is stored, so an idle cache stays exact. Raises ValueError if the form is not on the menu.
    """

    def __init__(self, menu: Menu, form: Form, name: str | None = None) -> None:
        super().__init__(menu)
        self.compresses = True
        if form not in menu.forms or form == EXACT:
            others = ", ".join(str(other) for other in menu.forms[1:])
            raise ValueError(
                f"form {form} is not on the menu: expected one of {others or 'none, it has no other form'}"
            )
        self.name = f"{form}+lru" if name is None else name
        self.form = form
        self._pressed = form.pressed
        self._index = menu.forms.index(form)

    def key(self, candidate: Candidate) -> float:
        return 1.0

    def step(
        self, candidate: Candidate, excluded_tiers: int = 0, lower_copies: Sequence[LowerCopy] | None = None
    ) -> Step | None:
        form = self._pressed if candidate.tier == Tier.GPU else self.form
        if candidate.form.is_exact and form != EXACT and candidate.allowed_forms >> self._index & 1:
            num_bytes = self.menu.num_bytes(form, candidate.num_tokens, candidate.sinks, candidate.tier)
            if num_bytes < candidate.num_bytes:
                return Step(0.0, candidate.tier, form, num_bytes, candidate.curve[self.menu.forms.index(form)])
        step = super().step(candidate, excluded_tiers, lower_copies)
        if step is not None and step.form is None and step.tier < DROPPED and self._is_coded(candidate):
            num_bytes = self.menu.stored_bytes(self.form, lower_bytes(self.menu, candidate))
            return step._replace(form=self.form, num_bytes=num_bytes, quality=candidate.curve[self._index])
        return step

    def _is_coded(self, candidate: Candidate) -> bool:
        """True if only the codec of the form is missing, and may be used."""
        return candidate.form == self._pressed and bool(candidate.allowed_forms >> self._index & 1)


def grown_fraction(important: float, chunk_tokens: int = CHUNK_TOKENS, run_tokens: float = RUN_TOKENS) -> float:
    """The fraction of tokens in chunks that hold at least one important token.

    Important tokens, a fraction x of all, come in runs of ``run_tokens`` r on average (a two-state Markov chain: after
    an unimportant token an important one follows with probability p = x / (r * (1 - x))), so a chunk of
    ``chunk_tokens`` c has none with probability (1 - x) * (1 - p) ** (c - 1). With r = 1 / (1 - x), tokens at random,
    that is (1 - x) ** c. Raises ValueError unless 0 < x < 1, c >= 1 and r >= 1.
    """
    if not 0.0 < important < 1.0:
        raise ValueError(f"important fraction is {important!r}: expected a number between 0 and 1")
    if not (chunk_tokens >= 1 and run_tokens >= 1.0):
        raise ValueError(f"chunks of {chunk_tokens} and runs of {run_tokens} tokens: expected at least 1 each")
    start = min(1.0, important / (run_tokens * (1.0 - important)))
    return 1.0 - (1.0 - important) * (1.0 - start) ** (chunk_tokens - 1)


def impress_form(important: float) -> Form:
    """The form that stands for IMPRESS at a fraction of important tokens, kept in steps of and up to 1 - 0.001."""
    return Form("snapkv", min(999, math.ceil(grown_fraction(important) * 1000.0)) / 1000.0)


class ImpressPolicy(FixedFormPolicy):
    """IMPRESS (Chen et al., FAST 2025) as EvicPress section 6.1 describes it, then LRU.

    IMPRESS finds the top X % of tokens by the attention of three of eight heads, splits the KV into chunks and loads
    only chunks that hold one of them. Whole chunks are kept, so unimportant tokens take room: ``impress_form`` keeps
    ``grown_fraction`` of X by snapkv, the press that also scores by attention.

    Simplified, all assumed, none measured: chunks of 64 tokens; runs of 16 important tokens on average; the other
    chunks are dropped when memory runs short instead of being kept below; the quality is snapkv's at the grown
    fraction, as if what rides along were the next most important, which is in favour of IMPRESS; and its reordering
    of chunks, which would need fewer, is left out.
    """

    def __init__(self, menu: Menu, important: float) -> None:
        super().__init__(menu, impress_form(important), f"impress@{important:g}")
