"""The menu of a policy: the forms and tiers it may choose from, and how many bytes a form takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from sglang_evicpress.core import CODECS, EXACT, Form, Tier
from sglang_evicpress.policy.layer_counts import NO_BUDGETS, LayerGroups

MAX_REMEMBERED = 8192

MOST_FORMS = 62
"""On a menu, the exact one counted: sets of them are bits of a number that numpy takes."""

RATIOS: Mapping[str, float] = {name: codec.ratio for name, codec in CODECS.items()}


@dataclass(frozen=True, slots=True)
class Menu:
    """``forms`` (the exact one first, whatever is given) on ``tiers`` (fastest first; the GPU always).

    ``slot_bytes`` is what one slot takes over all layers, ``page_size`` the slots of a page; ``codec_ratio`` gives
    stored bytes over raw bytes of each codec below the GPU; on it every form is raw. ``groups``: the layers that keep
    equally many tokens, and the budgets by which forms spread them. On the GPU a slot is one of all layers, so that a
    node takes as many as its fullest layer; below it takes what its layers keep. Raises ValueError for more than
    ``MOST_FORMS``, a form whose codec has no ratio or whose budget is not one of the groups', or sizes below 1.
    """

    forms: tuple[Form, ...]
    tiers: tuple[Tier, ...] = (Tier.GPU,)
    slot_bytes: int = 1
    page_size: int = 1
    codec_ratio: Mapping[str, float] = field(default_factory=lambda: RATIOS)
    groups: LayerGroups = NO_BUDGETS
    _sizes: Callable[[int, int, bool], tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _smaller: Callable[[Form], int] = field(init=False, repr=False, compare=False)
    _of_codec: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("slot_bytes", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected a whole number of at least 1")
        if len({*self.forms, EXACT}) > MOST_FORMS:
            raise ValueError(f"{len({*self.forms, EXACT})} forms are on the menu: expected at most {MOST_FORMS}")
        for form in self.forms:
            if form.codec not in self.codec_ratio:
                raise ValueError(f"form {form} has no codec ratio: expected one of {', '.join(self.codec_ratio)}")
            self.check_budget(form)
        others = sorted(
            {form for form in self.forms if form != EXACT},
            key=lambda form: (-form.kept_fraction * self.codec_ratio[form.codec], form.press or "", form.codec),
        )
        object.__setattr__(self, "forms", (EXACT, *others))
        object.__setattr__(self, "tiers", tuple(sorted({Tier.GPU, *self.tiers})))
        object.__setattr__(self, "_sizes", lru_cache(MAX_REMEMBERED)(self._sizes_of))
        object.__setattr__(self, "_smaller", lru_cache(MAX_REMEMBERED)(self._smaller_than))
        bits = [(form.codec, 1 << index) for index, form in enumerate(self.forms)]
        masks = {codec: sum(bit for other, bit in bits if other == codec) for codec, _ in bits}
        object.__setattr__(self, "_of_codec", masks)

    def check_budget(self, form: Form) -> None:
        """Raise ValueError for a form whose layer budget is none of the menu's."""
        if form.is_uneven and form.budget not in self.groups.shares:
            known = ", ".join(self.groups.shares) or "none"
            raise ValueError(f"form {form} has no layer budget: expected one of {known}")

    @property
    def everything(self) -> int:
        """The ``allowed_forms`` mask of a node of which every form can be made."""
        return (1 << len(self.forms)) - 1

    def num_slots(self, form: Form, num_tokens: int, sinks: int = 0) -> int:
        """Slots a node of ``num_tokens`` holds in ``form``: ceil(kept * tokens), at least ``sinks``, in whole pages; of
        a form with a layer budget what its fullest layer keeps."""
        if form.budget in self.groups.shares:
            return max(self.layer_counts(form, num_tokens, sinks))
        return self._mean_slots(form, num_tokens, sinks)

    def _mean_slots(self, form: Form, num_tokens: int, sinks: int) -> int:
        kept = max(1, sinks, math.ceil(num_tokens * form.kept_fraction - 1e-9))
        return min(num_tokens, -(-kept // self.page_size) * self.page_size)

    def layer_counts(self, form: Form, num_tokens: int, sinks: int = 0) -> tuple[int, ...]:
        """Tokens that a layer of each group keeps of a node, whole pages: on average those that every layer of the
        uniform form keeps, as near as pages let."""
        mean = self._mean_slots(form, num_tokens, sinks)
        if form.budget not in self.groups.shares:  # also that of an earlier server, of which only its mean is known
            return (mean,) * self.groups.num_groups
        page = self.page_size
        least, most = -(-max(1, sinks) // page), num_tokens // page
        counts = self.groups.counts(form.budget, mean // page, min(least, most), most)
        return tuple(count * page for count in counts)

    def given_counts(self, layer_tokens: Sequence[int], num_tokens: int, sinks: int = 0) -> tuple[int, ...]:
        """Tokens that a layer of each group keeps where ``layer_tokens`` are asked for: whole pages, and no fewer than
        the sinks, as in every form. Raises ValueError for numbers that the groups or the node do not allow."""
        for tokens in layer_tokens:
            if not 1 <= tokens <= num_tokens:
                raise ValueError(f"layer_tokens has {tokens}: expected from 1 to {num_tokens}")
        page, counts = self.page_size, self.groups.counts_of(layer_tokens)
        return tuple(min(num_tokens, -(-max(count, sinks) // page) * page) for count in counts)

    def filled(self, form: Form, num_tokens: int, sinks: int = 0) -> float:
        """Share of a node's slots, over all layers, that hold KV: as little as layers keep less than the fullest."""
        if form.budget not in self.groups.shares:
            return 1.0
        counts = self.layer_counts(form, num_tokens, sinks)
        return self.groups.filled(counts)

    def num_bytes(self, form: Form, num_tokens: int, sinks: int = 0, tier: int = Tier.GPU) -> int:
        """Bytes of those slots on a tier: raw on the GPU, below it as the form's codec stores them."""
        if form.is_uneven and tier != Tier.GPU:
            raw = self.num_slots(form, num_tokens, sinks) * self.slot_bytes * self.filled(form, num_tokens, sinks)
            return self.stored_bytes(form, raw)
        raw_bytes = self.num_slots(form, num_tokens, sinks) * self.slot_bytes
        return raw_bytes if tier == Tier.GPU else self.stored_bytes(form, raw_bytes)

    def stored_bytes(self, form: Form, num_bytes: float) -> int:
        """Bytes below the GPU of KV that takes ``num_bytes`` as it is."""
        return math.ceil(num_bytes * self.codec_ratio[form.codec] - (1e-6 if isinstance(num_bytes, float) else 0))

    def of_codec(self, codec: str) -> int:
        """The ``allowed_forms`` mask of the forms with a codec."""
        return self._of_codec.get(codec, 0)

    def smaller(self, form: Form) -> int:
        """The ``allowed_forms`` mask of a node that holds ``form``: what can be made of it without the exact KV.

        From the exact form everything; from a lossy one fewer of its tokens by its press, or by any if it has all of
        them; if its codec is a fine one, also in a coarser one.
        """
        return self._smaller(form)

    def _smaller_than(self, form: Form) -> int:
        if form.is_exact:
            return self.everything
        mask, ratio, is_fine = 0, self.codec_ratio, form.codec in CODECS and CODECS[form.codec].is_fine
        for index, other in enumerate(self.forms):
            has_tokens = other.method == form.method or form.press is None
            is_coarser = is_fine and ratio[other.codec] < ratio.get(form.codec, 0.0)
            is_made = has_tokens and other.kept_fraction <= form.kept_fraction
            if other != form and is_made and (other.codec == form.codec or is_coarser):
                mask |= 1 << index
        return mask

    def sizes(self, num_tokens: int, sinks: int = 0, tier: int = Tier.GPU) -> tuple[int, ...]:
        """``num_bytes`` of every form, in the order of ``forms``. Remembers some thousand answers."""
        return self._sizes(num_tokens, sinks, tier != Tier.GPU)

    def _sizes_of(self, num_tokens: int, sinks: int, is_stored: bool) -> tuple[int, ...]:
        tier = Tier.HOST if is_stored else Tier.GPU
        return tuple(self.num_bytes(form, num_tokens, sinks, tier) for form in self.forms)
