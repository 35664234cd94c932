"""Tokens that each layer keeps: groups of layers that keep equally many in every form, and their counts in a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Groups of layers by the budgets of a menu.

    ``group_of`` [layers] is the group of each layer; ``shares`` has, by name of a budget, what a layer of each group
    keeps, in proportion. Without budgets there is one group. Attention builds its metadata once a group.
    """

    group_of: tuple[int, ...]
    shares: Mapping[str, tuple[int, ...]]

    @property
    def num_groups(self) -> int:
        return max(self.group_of, default=0) + 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers in each group."""
        return tuple(self.group_of.count(group) for group in range(self.num_groups))

    def layers_of(self, group: int) -> list[int]:
        return [layer for layer, each in enumerate(self.group_of) if each == group]

    def filled(self, counts: Sequence[int]) -> float:
        """Share of slots, over all layers, that hold KV where a layer of each group keeps so many, and the fullest
        all."""
        most = max(counts) * len(self.group_of)
        return sum(count * size for count, size in zip(counts, self.sizes, strict=True)) / most if most else 1.0

    def counts(self, budget: str, mean: int, least: int, most: int) -> tuple[int, ...]:
        """What a layer of each group keeps, from ``least`` to ``most``, with ``mean`` on average over all layers.

        As near to the shares as whole numbers within these bounds are; the sum over layers is not above
        ``mean * layers``, and below it by less than the smallest group that is not at ``most`` has layers, unless
        ``least`` in every layer is more.
        """
        shares, sizes = self.shares[budget], self.sizes
        counts = [Fraction(0)] * len(shares)
        is_open, left = set(range(len(shares))), Fraction(mean * len(self.group_of))
        while is_open:
            weight = sum(shares[group] * sizes[group] for group in is_open)
            layers = sum(sizes[group] for group in is_open)
            for group in is_open:  # zero shares only: equally many
                counts[group] = left * shares[group] / weight if weight else left / layers
            bounded = {group: min(max(counts[group], Fraction(least)), Fraction(most)) for group in is_open}
            excess = sum((bounded[group] - counts[group]) * sizes[group] for group in is_open)
            # What bounds add to the sum, or take from it, tells which of them bind in the end.
            fixed = {group for group in is_open if excess == 0 or (bounded[group] - counts[group]) * excess > 0}
            for group in fixed:
                counts[group] = bounded[group]
                left -= counts[group] * sizes[group]
            is_open -= fixed
            left = max(left, Fraction(0))
        return self._whole_numbers(counts, mean * len(self.group_of), most)

    def counts_of(self, layer_tokens: Sequence[int]) -> tuple[int, ...]:
        """Tokens that a layer of each group keeps where each layer keeps so many. Raises ValueError for another number
        of layers, and where layers of a group would keep different numbers."""
        if self == NO_BUDGETS:
            raise ValueError(
                "layers of this server keep equally many tokens: expected one whose --kv-forms have layer budgets, "
                "such as snapkv@0.3:pyramid"
            )
        if len(layer_tokens) != len(self.group_of):
            raise ValueError(
                f"layer_tokens has {len(layer_tokens)} numbers: expected one for each of {len(self.group_of)} layers"
            )
        for layer, group in enumerate(self.group_of):
            first = self.group_of.index(group)
            if layer_tokens[layer] != layer_tokens[first]:
                raise ValueError(
                    f"layers {first} and {layer} keep equally many tokens in every form of this server, and "
                    f"{layer_tokens[first]} and {layer_tokens[layer]} are asked for: expected the same, or a server "
                    f"with --kv-forms PRESS@KEPT:pyramid and --kv-max-layer-counts {len(self.group_of)}"
                )
        return tuple(layer_tokens[self.group_of.index(group)] for group in range(self.num_groups))

    def _whole_numbers(self, counts: list[Fraction], total: int, most: int) -> tuple[int, ...]:
        """Rounded down, then up again while the sum allows, what was cut most first; equal shares stay equal, as a
        group has one count."""
        sizes, whole = self.sizes, [int(count) for count in counts]
        left = total - sum(count * size for count, size in zip(whole, sizes, strict=True))
        while fitting := [group for group, size in enumerate(sizes) if size <= left and whole[group] < most]:
            group = max(fitting, key=lambda group: (counts[group] - whole[group], sizes[group]))
            whole[group] += 1
            left -= sizes[group]
        return tuple(whole)


NO_BUDGETS = LayerGroups((0,), {})
"""Those of a menu in which every layer keeps as much."""
