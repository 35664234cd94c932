"""The one definition of a percentile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def quantile(values: Sequence[float], share: float) -> float:
    """Interpolated between the two values around it, as numpy does; infinite where the upper one is.

    Raises ValueError for a share outside of 0 to 1, or no values.
    """
    if not len(values) or not 0.0 <= share <= 1.0:
        raise ValueError(f"quantile {share} of {len(values)} values: expected one from 0 to 1 of at least one")
    upper = np.quantile(values, share, method="higher")
    return float(upper if np.isinf(upper) else np.quantile(np.minimum(values, upper), share))
