"""Utility of one option of one node: quality bought, delay paid, times how often. Pure arithmetic."""

from __future__ import annotations


def utility(weight: float, alpha: float, quality: float, delay_s: float) -> float:
    """weight * (alpha * quality - delay_s), in weighted seconds.

    EvicPress section 4.2: Util(method, ratio, device) = (alpha * quality - TTFT) * frequency; alpha is the seconds a
    user would wait for full quality. ``weight`` is the expected reuse (``reuse``), ``quality`` in [0, 1] the node's
    curve at the option's form. ``delay_s`` is that of getting the KV back to the GPU: 0 for a form kept there, the
    measured transfer and decoding time on a lower tier, and for a dropped node, which then has quality 1 (recomputed
    KV is exact) and occupies nothing, the measured prefill time of its tokens at its depth.
    """
    return weight * (alpha * quality - delay_s)
