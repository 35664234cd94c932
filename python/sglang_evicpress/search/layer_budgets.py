"""Layer budgets: how many tokens each layer of a node keeps, on average ``target``.

``complete`` and the expansion to other targets are EvolKV's (section 3.2, "KV Cache Budget Completion"); ``pyramid`` is
PyramidKV's arithmetic series, most tokens in the lowest layer (Cai et al. 2024, section 4.2, with beta 20).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

PYRAMID_BETA = 20
"""The top layer keeps ``1 / PYRAMID_BETA`` of the mean."""

MAX_DENOMINATOR = 10**6
"""Shares of a file are taken for the nearest fractions: the budgets they were made of, where their sum is less."""

Budgets = tuple[int, ...]
"""Tokens kept by layer, the lowest layer first."""


def uniform(num_layers: int, target: int) -> Budgets:
    return (target,) * num_layers


def pyramid(num_layers: int, target: int) -> Budgets:
    """From ``target * (2 - 1 / beta)`` in the lowest layer down to ``target / beta`` in the highest, in equal steps."""
    if num_layers == 1:
        return uniform(num_layers, target)
    least = Fraction(target, PYRAMID_BETA)
    step = (2 * target - 2 * least) / (num_layers - 1)
    return complete([max(1, round(2 * target - least - layer * step)) for layer in range(num_layers)], target)


def complete(budgets: Sequence[int | Fraction], target: int) -> Budgets:
    """Budgets in the same proportions that are ``target`` on average: ``ceil(k + k / A * (T - A))`` with ``A`` their
    sum and ``T = target * L`` (EvolKV, section 3.2). The sum is at least ``T`` and less than ``T + L``. So are budgets
    that were found at one target expanded to another.

    Raises ValueError where a budget is negative, or none is positive.
    """
    if not budgets or min(budgets) < 0 or not any(budgets):
        raise ValueError(f"budgets are {tuple(budgets)}: expected none below 0 and one above")
    total, wanted = sum(budgets), target * len(budgets)
    return tuple(math.ceil(Fraction(each * wanted, total)) for each in budgets)


def expanded(shares: Sequence[float], target: int) -> Budgets:
    """Tokens by layer of a budget file's shares at a target, completed. Raises ValueError as ``complete``."""
    return complete([Fraction(share).limit_denominator(MAX_DENOMINATOR) for share in shares], target)


def round_counts(budgets: Sequence[int], most_counts: int) -> Budgets:
    """Budgets with at most so many distinct values, as near as possible by squared difference, whose sum is not above
    that of ``budgets``, and below it by less than the fewest layers that share a value.

    Attention builds its metadata once for each distinct value. Raises ValueError where ``most_counts`` is below 1.
    """
    if most_counts < 1:
        raise ValueError(f"most_counts is {most_counts}: expected at least 1")
    ascending = sorted(budgets)
    groups = _nearest_groups(ascending, min(most_counts, len(set(ascending))))
    means = [Fraction(sum(ascending[begin:end]), end - begin) for begin, end in groups]
    values, sizes = [int(mean) for mean in means], [end - begin for begin, end in groups]
    left = sum(ascending) - sum(value * size for value, size in zip(values, sizes, strict=True))
    while fitting := [index for index, size in enumerate(sizes) if size <= left]:
        index = max(fitting, key=lambda index: (means[index] - values[index], sizes[index]))
        values[index] += 1
        left -= sizes[index]
    order = sorted(range(len(budgets)), key=lambda layer: budgets[layer])
    rounded = dict[int, int]()
    for value, (begin, end) in zip(values, groups, strict=True):
        rounded.update(dict.fromkeys(order[begin:end], value))
    return tuple(rounded[layer] for layer in range(len(budgets)))


def _nearest_groups(ascending: Sequence[int], num_groups: int) -> list[tuple[int, int]]:
    """The split of sorted numbers into so many runs whose squared distances to their means sum up to least; equal
    numbers stay together."""
    size = len(ascending)
    sums, squares = [0], [0]
    for each in ascending:
        sums.append(sums[-1] + each)
        squares.append(squares[-1] + each * each)

    def cost(begin: int, end: int) -> Fraction:
        total = sums[end] - sums[begin]
        return squares[end] - squares[begin] - Fraction(total * total, end - begin)

    borders = [end for end in range(1, size + 1) if end == size or ascending[end] != ascending[end - 1]]
    best: dict[int, tuple[Fraction, list[tuple[int, int]]]] = {end: (cost(0, end), [(0, end)]) for end in borders}
    for _ in range(num_groups - 1):
        best = {
            end: min(
                [best[end]] + [(best[b][0] + cost(b, end), [*best[b][1], (b, end)]) for b in borders if b < end],
                key=lambda found: found[0],
            )
            for end in borders
        }
    return best[size][1]
