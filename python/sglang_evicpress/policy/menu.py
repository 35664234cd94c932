"""The menu of a policy: the forms and tiers it may choose from, and how many bytes a form takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_evicpress.core import EXACT, Form, Tier

MAX_REMEMBERED = 8192

RAW_ONLY: Mapping[str, float] = {"raw": 1.0}


@dataclass(frozen=True, slots=True)
class Menu:
    """``forms`` (the exact one first, whatever is given) on ``tiers`` (fastest first; the GPU always).

    ``slot_bytes`` is what one slot takes over all layers, ``page_size`` the slots of a page; ``codec_ratio`` gives
    stored bytes over raw bytes of each codec. Raises ValueError for a form whose codec has no ratio, or sizes below 1.
    """

    forms: tuple[Form, ...]
    tiers: tuple[Tier, ...] = (Tier.GPU,)
    slot_bytes: int = 1
    page_size: int = 1
    codec_ratio: Mapping[str, float] = field(default_factory=lambda: RAW_ONLY)
    _sizes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _smaller: dict[Form, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("slot_bytes", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected a whole number of at least 1")
        for form in self.forms:
            if form.codec not in self.codec_ratio:
                raise ValueError(f"form {form} has no codec ratio: expected one of {', '.join(self.codec_ratio)}")
        lossy = sorted(
            {form for form in self.forms if not form.is_exact},
            key=lambda form: (-form.kept_fraction * self.codec_ratio[form.codec], form.press or "", form.codec),
        )
        object.__setattr__(self, "forms", (EXACT, *lossy))
        object.__setattr__(self, "tiers", tuple(sorted({Tier.GPU, *self.tiers})))

    @property
    def everything(self) -> int:
        """The ``allowed_forms`` mask of a node of which every form can be made."""
        return (1 << len(self.forms)) - 1

    def num_slots(self, form: Form, num_tokens: int, sinks: int = 0) -> int:
        """Slots a node of ``num_tokens`` holds in ``form``: ceil(kept * tokens), at least ``sinks``, in whole pages."""
        kept = max(1, sinks, math.ceil(num_tokens * form.kept_fraction - 1e-9))
        return min(num_tokens, -(-kept // self.page_size) * self.page_size)

    def num_bytes(self, form: Form, num_tokens: int, sinks: int = 0) -> int:
        """Bytes of those slots as the form's codec stores them."""
        slots = self.num_slots(form, num_tokens, sinks)
        return math.ceil(slots * self.slot_bytes * self.codec_ratio[form.codec])

    def smaller(self, form: Form) -> int:
        """The ``allowed_forms`` mask of a node that holds ``form``: what can be made of it without the exact KV.

        From the exact form everything; from a lossy one its own press at a smaller fraction, or the same tokens in
        another codec only if it is stored raw.
        """
        known = self._smaller.get(form)
        if known is None:
            if len(self._smaller) >= MAX_REMEMBERED:
                self._smaller.clear()
            known = self._smaller[form] = self._smaller_than(form)
        return known

    def _smaller_than(self, form: Form) -> int:
        if form.is_exact:
            return self.everything
        mask = 0
        for index, other in enumerate(self.forms):
            is_less = other.kept_fraction < form.kept_fraction and other.codec == form.codec
            is_recoded = other.kept_fraction <= form.kept_fraction and form.codec == "raw" != other.codec
            if other.press == form.press and (is_less or is_recoded):
                mask |= 1 << index
        return mask

    def sizes(self, num_tokens: int, sinks: int = 0) -> tuple[int, ...]:
        """``num_bytes`` of every form, in the order of ``forms``. Remembers some thousand answers."""
        known = self._sizes.get((num_tokens, sinks))
        if known is None:
            if len(self._sizes) >= MAX_REMEMBERED:
                self._sizes.clear()
            known = tuple(self.num_bytes(form, num_tokens, sinks) for form in self.forms)
            self._sizes[num_tokens, sinks] = known
        return known
