"""The value types every layer shares: forms, options, node statistics and decisions. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

PRESSES = ("keydiff", "knorm", "snapkv", "value_key_ratio", "streaming", "random")


@dataclass(frozen=True, slots=True, order=True)
class Form:
    """What the bytes of a node are: the tokens a press keeps, stored by a codec.

    ``kept_fraction`` is tokens kept / tokens, in (0, 1]; the exact form keeps them all and has no press.
    Written ``exact``, ``keydiff@0.4`` or ``keydiff@0.4+int8``.
    """

    press: str | None = None
    kept_fraction: float = 1.0
    codec: str = "raw"

    @property
    def is_exact(self) -> bool:
        return self.press is None and self.codec == "raw"

    def __str__(self) -> str:
        text = "exact" if self.press is None else f"{self.press}@{self.kept_fraction:g}"
        return text if self.codec == "raw" else f"{text}+{self.codec}"

    @classmethod
    def parse(cls, text: str) -> Form:
        """Read ``exact`` or ``PRESS@KEPT``. Raises ValueError naming the text and what is accepted."""
        accepted = f"'exact' or PRESS@KEPT with PRESS one of {', '.join(PRESSES)} and 0 < KEPT < 1, such as keydiff@0.5"
        text = text.strip()
        if text == "exact":
            return EXACT
        press, at, kept = text.partition("@")
        if not at or press not in PRESSES:
            raise ValueError(f"form {text!r} is not known: expected {accepted}")
        try:
            kept_fraction = float(kept)
        except ValueError:
            raise ValueError(f"form {text!r} has no number after '@': expected {accepted}") from None
        if not 0.0 < kept_fraction < 1.0:
            raise ValueError(f"form {text!r} keeps {kept}: expected {accepted}")
        return cls(press, kept_fraction)


EXACT = Form()


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that can be done with a node on the device tier.

    ``form`` None means drop: forget the node and recompute it on its next use. ``num_slots`` is what the node
    would hold afterwards (whole pages; 0 for drop).
    """

    form: Form | None
    num_slots: int


@dataclass(frozen=True, slots=True)
class NodeStats:
    """A frozen picture of one radix-tree node, all a policy may know of it.

    ``num_tokens`` is logical, ``num_slots`` physical; ``depth_tokens`` is the logical length of the path above.
    ``weight`` is the expected reuse; ``last_use`` a logical tick (never a clock), equal on every rank.
    ``num_children`` counts resident children; ``options`` holds what the cache can do with the node now, without
    staying as it is; it is empty while the node is locked.
    """

    id: int
    parent_id: int | None
    num_tokens: int
    num_slots: int
    depth_tokens: int
    form: Form
    weight: float
    last_use: int
    num_children: int
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """Bring ``node_id`` to ``option``; ``freed_slots`` and ``utility_loss`` are what the policy expected of it."""

    node_id: int
    option: Option
    freed_slots: int
    utility_loss: float
    reason: str
