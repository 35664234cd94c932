"""The value types every layer shares: forms, options, node statistics and decisions. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class PressTraits:
    """A press as far as it is known without tensors. ``needs_queries``: it scores by the last queries of a prompt;
    ``needs_geometry``: by what was calibrated of the model's queries."""

    needs_queries: bool = False
    needs_geometry: bool = False


PRESSES: dict[str, PressTraits] = {
    "keydiff": PressTraits(),
    "knorm": PressTraits(),
    "snapkv": PressTraits(needs_queries=True),
    "value_key_ratio": PressTraits(),
    "geometry": PressTraits(needs_geometry=True),
    "band_lengths": PressTraits(needs_geometry=True),
    "streaming": PressTraits(),
    "random": PressTraits(),
}
"""Every press by name; the module ``press/NAME.py`` has it, with its default settings, as ``PRESS``."""


@dataclass(frozen=True, slots=True)
class CodecTraits:
    """A codec as far as it is known without tensors. ``ratio``: its bytes over raw ones of many slots of 16-bit values;
    ``is_exact``: what it stores comes back bit for bit; ``is_fine``: what it stores can be stored anew by a coarser
    codec, whose loss is then hardly more than from the exact values."""

    ratio: float
    is_exact: bool = False
    is_fine: bool = False


CODECS: dict[str, CodecTraits] = {
    "raw": CodecTraits(1.0, is_exact=True, is_fine=True),
    "lossless": CodecTraits(49 / 64, is_exact=True, is_fine=True),
    "int8": CodecTraits(9 / 16, is_fine=True),
    "int4": CodecTraits(5 / 16),
    "int2": CodecTraits(3 / 16),
}
"""Every codec by name; the module ``codec/NAME.py`` has it, with its default settings, as ``CODEC``."""


UNIFORM, PYRAMID = "uniform", "pyramid"
"""Layer budgets that need no file: equally many tokens in every layer, or most in the lowest one."""

_BUDGET = re.compile(r"[0-9A-Za-z_.-]{1,64}")


@dataclass(frozen=True, slots=True, order=True)
class Form:
    """Form of a node's bytes: the tokens a press keeps, stored by a codec.

    ``kept_fraction`` is tokens kept / tokens, in (0, 1]; the exact form keeps them all and has no press. ``budget``
    names how the tokens kept are spread over layers; ``kept_fraction`` is then their mean. Written ``exact``,
    ``keydiff@0.4``, ``keydiff@0.4:pyramid``, ``exact+int8`` or ``keydiff@0.4:pyramid+int8``.
    """

    press: str | None = None
    kept_fraction: float = 1.0
    codec: str = "raw"
    budget: str = UNIFORM

    @property
    def is_exact(self) -> bool:
        return self.press is None and not self.has_lossy_codec

    @property
    def has_lossy_codec(self) -> bool:
        """True if what the codec stores may not come back bit for bit; so of one that is not known."""
        return self.codec not in CODECS or not CODECS[self.codec].is_exact

    @property
    def pressed(self) -> Form:
        """The same tokens, raw."""
        return self if self.codec == "raw" else replace(self, codec="raw")

    @property
    def is_uneven(self) -> bool:
        """True if layers may keep different numbers of tokens."""
        return self.budget != UNIFORM

    @property
    def method(self) -> str | None:
        """The press and its budget, as ``snapkv`` or ``snapkv:pyramid``; None for all tokens."""
        return f"{self.press}:{self.budget}" if self.is_uneven else self.press

    def can_take(self, codec: str) -> bool:
        """True if what is in this form can be stored by ``codec`` and is then no more than it says: by its own, by one
        that loses as little as its own, or, from a fine one, by a coarser."""
        if codec == self.codec:
            return True
        own, other = CODECS.get(self.codec), CODECS.get(codec)
        if own is None or other is None:
            return False
        return (own.is_exact and other.is_exact) or (own.is_fine and other.ratio < own.ratio)

    @property
    def decoded(self) -> Form:
        """The form on the GPU of what is stored in this one: a codec that loses nothing leaves no trace there."""
        return self if self.has_lossy_codec else self.pressed

    def __str__(self) -> str:
        text = "exact" if self.press is None else f"{self.press}@{self.kept_fraction:g}"
        text = f"{text}:{self.budget}" if self.is_uneven else text
        return text if self.codec == "raw" else f"{text}+{self.codec}"

    @classmethod
    def parse(cls, text: str) -> Form:
        """Read ``exact``, ``PRESS@KEPT`` or ``PRESS@KEPT:BUDGET``. Raises ValueError naming the text and what is
        accepted."""
        accepted = (
            f"'exact' or PRESS@KEPT with PRESS one of {', '.join(PRESSES)} and 0 < KEPT < 1, such as keydiff@0.5, "
            "perhaps with :BUDGET, such as keydiff@0.5:pyramid"
        )
        text = text.strip()
        if text == "exact":
            return EXACT
        base, colon, budget = text.partition(":")
        press, at, kept = base.partition("@")
        if not at or press not in PRESSES:
            raise ValueError(f"form {text!r} is not known: expected {accepted}")
        try:
            kept_fraction = float(kept)
        except ValueError:
            raise ValueError(f"form {text!r} has no number after '@': expected {accepted}") from None
        if not 0.0 < kept_fraction < 1.0:
            raise ValueError(f"form {text!r} keeps {kept}: expected {accepted}")
        if colon and not _BUDGET.fullmatch(budget):
            raise ValueError(f"form {text!r} has the budget {budget!r}: expected a name of letters, digits, _ . and -")
        return cls(press, kept_fraction, budget=budget if colon else UNIFORM)

    @classmethod
    def parse_stored(cls, text: str) -> Form:
        """Read what ``parse`` reads, or that and ``+CODEC``. Raises ValueError as ``parse``."""
        base, plus, codec = text.strip().partition("+")
        form = cls.parse(base)
        if plus and (codec not in CODECS or codec == "raw"):
            coded = ", ".join(name for name in CODECS if name != "raw")
            raise ValueError(f"form {text!r} has codec {codec!r}: expected one of {coded}, or no '+'")
        return replace(form, codec=codec) if plus else form


EXACT = Form()


class Tier(IntEnum):
    """Tier of a node's bytes, fastest first. A dropped node is on none."""

    GPU = 0
    HOST = 1
    SSD = 2
    EXTERNAL = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that can be done with a node: hold ``form`` on ``tier`` in ``num_bytes`` (whole pages).

    ``form`` and ``tier`` None mean drop: forget the node and recompute it on its next use; it holds 0 bytes.
    """

    form: Form | None
    tier: Tier | None
    num_bytes: int

    @property
    def is_drop(self) -> bool:
        return self.tier is None

    def __str__(self) -> str:
        return "drop" if self.tier is None else f"{self.form}/{self.tier.label}"


DROP = Option(None, None, 0)


class LowerCopy(NamedTuple):
    """A copy of a node that lies on the lower tier of ``tier``: the node can be as that is there at once."""

    tier: int
    form: Form
    num_bytes: int
    quality: float


@dataclass(frozen=True, slots=True)
class NodeStats:
    """A frozen picture of one radix-tree node, all a policy may know of it.

    ``num_tokens`` is logical, ``num_bytes`` what it holds on ``tier`` in ``form``; ``depth_tokens`` is the logical
    length of the path above. ``quality`` in [0, 1] is that of what it holds, ``curve`` that of every form of the
    policy's menu, in its order; bit i of ``allowed_forms`` says that form i can be made of what the node holds.
    ``weight`` is the expected reuse (``reuse``), ``num_hits`` the plain count; ``last_use`` a logical tick (never
    a clock), equal on every rank. ``sinks`` of its tokens survive any press. A locked node does not move.
    ``exact_on`` is a lower tier that holds the exact KV of a lossy node as well. ``lower_copies`` are all its copies on
    lower tiers, ``external`` is what the external store has once it is dropped. ``filled``: share of its slots, over
    all layers, that hold KV; below the GPU the others take nothing.
    """

    id: int
    parent_id: int | None
    tier: Tier
    form: Form
    num_tokens: int
    num_bytes: int
    depth_tokens: int
    quality: float
    curve: Sequence[float]
    allowed_forms: int
    weight: float
    num_hits: int
    last_use: int
    sinks: int = 0
    is_locked: bool = False
    exact_on: Tier | None = None
    lower_copies: Sequence[LowerCopy] = ()
    filled: float = 1.0
    external: LowerCopy | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Bring ``node_id`` from what it holds to ``option``, and what the policy expected of it when it chose.

    ``freed_bytes`` counts on the tier the node was on. ``weight``, ``quality``, ``delay_s`` (seconds) and ``loss``
    (weighted utility given up, negative for a gain) are the inputs of the choice; the delay and quality are those of
    the option, the ``_before`` ones those of what the node held. Policies that weigh nothing leave them 0.
    ``is_forced``: a drop that nobody chose, for there was no other step left.
    """

    node_id: int
    source: Option
    option: Option
    freed_bytes: int
    weight: float = 0.0
    quality_before: float = 1.0
    quality: float = 1.0
    delay_before_s: float = 0.0
    delay_s: float = 0.0
    loss: float = 0.0
    is_forced: bool = False

    @property
    def kind(self) -> str:
        """``drop``, ``promote``, ``compress`` (smaller on the same tier) or ``demote``."""
        if self.option.is_drop:
            return "drop"
        if self.is_promotion:
            return "promote"
        return "compress" if self.option.tier == self.source.tier else "demote"

    @property
    def is_promotion(self) -> bool:
        """True if the node comes to a faster tier, or gets its exact form back."""
        source, option = self.source, self.option
        if source.form is None or source.tier is None or option.form is None or option.tier is None:
            return False
        is_restored = option.form.is_exact and not source.form.is_exact
        return option.tier < source.tier or (option.tier == source.tier and is_restored)
