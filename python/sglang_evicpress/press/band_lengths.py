"""Band lengths: tokens survive whose keys are long in the bands in which the model's queries usually are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sglang_evicpress.press.base import PressInput
from sglang_evicpress.press.geometry import GeometryPress


@dataclass(frozen=True, slots=True)
class BandLengthsPress(GeometryPress):
    """Score ``sum E|q_f| |k_f|`` over the bands f of a head, by the mean lengths of the model's queries: the geometry
    press as it is where queries gather about no centre (TriAttention, arXiv 2604.04921, has this as its second term).
    Distances play no part."""

    name: ClassVar[str] = "band_lengths"

    def score(self, node: PressInput) -> Tensor:
        """See ``GeometryPress.score``."""
        geometry = None if self.geometry is None else self.geometry.without_centres()
        return GeometryPress(geometry).score(node)


PRESS = BandLengthsPress()
