"""Compresses a node to different numbers of tokens in each group of layers: score, select and compact group by group,
then spread what each keeps over the node's slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sglang_evicpress.device import HostCopy, to_device
from sglang_evicpress.kernels.compact import compact
from sglang_evicpress.patches.tree.node_kv import NodeSlots
from sglang_evicpress.policy.layer_counts import LayerGroups
from sglang_evicpress.press import Press, PressInput, scored
from sglang_evicpress.press.layers import select_by_layer
from sglang_evicpress.survivors import EMPTY, Filling, SurvivorLayout, place_groups

PressOf = Callable[[Sequence[int]], Press]
"""The press for some layers alone."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the ``layers`` of a group keep of the tokens in ``slots`` [n]: ``survivors`` int32 [layers, heads, count],
    indices of these slots, and ``positions`` of the same shape, absolute."""

    layers: list[int]
    slots: torch.Tensor
    survivors: torch.Tensor
    positions: torch.Tensor


class LayerPress:
    """Works on a pool's buffers, [slots, heads, head_dim] per layer; ``groups`` are those of the server's menu. For one
    rank. Waits for nothing on the device."""

    def __init__(
        self,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        groups: LayerGroups,
        page_size: int,
        sinks: int,
    ) -> None:
        self.groups = groups
        self._k_buffers, self._v_buffers = k_buffers, v_buffers
        self._page_size, self._sinks = page_size, sinks
        self._layers = [groups.layers_of(group) for group in range(groups.num_groups)]

    def compress(
        self, press_of: PressOf, node: NodeSlots, counts: Sequence[int], scale: float
    ) -> tuple[SurvivorLayout, torch.Tensor]:
        """Keep ``counts`` [groups] tokens, moved to the first of the node's slots, as many as the fullest group keeps.
        ``press_of`` layers scores them. Returns what ``Compressor.compress`` does."""
        kept = []
        for group, count in enumerate(counts):
            given = self._input(group, node, scale)
            kept.append(self._kept(group, given, scored(press_of(self._layers[group]), given, self._sinks), count))
        return self._compacted(node, kept)

    def copy_compressed(
        self, press_of: PressOf, node: NodeSlots, counts: Sequence[int], scale: float, into: torch.Tensor
    ) -> tuple[SurvivorLayout, torch.Tensor]:
        """The same of a full node, written to the slots ``into`` [m]; those of the node keep what they hold."""
        kept = []
        for group, count in enumerate(counts):
            given = self._input(group, node, scale)
            kept.append(self._kept(group, given, scored(press_of(self._layers[group]), given, self._sinks), count))
        logical, places = self._placed(node, kept)
        for each, place in zip(kept, places, strict=True):
            self.copy_survivors(each.layers, each.slots, each.survivors, into[place])
        return self._layout(kept, logical, places), _value(node, logical, into)

    def copy_survivors(
        self, layers: Sequence[int], slots: torch.Tensor, survivors: torch.Tensor, into: torch.Tensor
    ) -> None:
        """Bring what survives in ``layers`` of what is in ``slots`` (int [layers, heads, count], indices of them) into
        the slots ``into`` [count]; they may be the same slots."""
        heads = torch.arange(survivors.shape[1], device=slots.device)[:, None]
        for layer, chosen in zip(layers, survivors.to(torch.int64), strict=True):
            for buffer in (self._k_buffers[layer], self._v_buffers[layer]):
                buffer[into[None, :], heads] = buffer[slots[chosen], heads]

    def trim(
        self, press_of: PressOf, node: NodeSlots, layout: SurvivorLayout, replaced: tuple[int, int], scale: float
    ) -> tuple[SurvivorLayout, torch.Tensor] | None:
        """See ``Compressor.trim``: every head of a group gives up as many entries as the one with most overlaps."""
        counts, overlaps = list[int](), list[torch.Tensor]()
        for layers in self._layers:
            held = torch.stack([layout.positions_of(layer) for layer in layers])
            overlaps.append((held >= replaced[0]) & (held < replaced[1]))
            most = int(overlaps[-1].sum(-1).max())
            counts.append((held.shape[-1] - most) // self._page_size * self._page_size)
        if not any(bool(each.any()) for each in overlaps):
            return None
        kept = []
        for group, count in enumerate(counts):
            given = self._input(group, node, scale)
            scores = scored(press_of(self._layers[group]), given, 0)
            scores = scores.nan_to_num()  # finite, so that overlaps really come last
            scores = scores.masked_fill(to_device(overlaps[group], node.slots.device), float("-inf"))
            kept.append(self._kept(group, given, scores, count))
        return self._compacted(node, kept)

    def _input(self, group: int, node: NodeSlots, scale: float) -> PressInput:
        layers, layout, slots = self._layers[group], node.layout, node.slots
        heads, device = self._k_buffers[0].shape[1], slots.device
        if layout is None:
            every = torch.arange(node.start, node.start + len(slots), dtype=torch.int32, device=device)
            positions = every.expand(len(layers), heads, -1)
        else:
            positions = to_device(torch.stack([layout.positions_of(layer) for layer in layers]), device)
            if layout.filling is not None:
                slots = slots[layout.filling.index_of(group, device)]
        window = node.window
        if window is not None and len(layers) < len(self._k_buffers):
            window = replace(window, queries=window.queries[to_device(torch.tensor(layers), device)])
        return PressInput(
            k_buffers=[self._k_buffers[layer] for layer in layers],
            v_buffers=[self._v_buffers[layer] for layer in layers],
            slots=slots,
            positions=positions,
            start=node.start,
            num_tokens=node.num_tokens,
            window=window,
            scale=scale,
        )

    def _kept(self, group: int, given: PressInput, scores: torch.Tensor, count: int) -> _Kept:
        survivors = torch.stack(select_by_layer(scores, [count] * len(scores)))
        positions = given.positions.gather(2, survivors.to(torch.int64))
        return _Kept(self._layers[group], given.slots, survivors, positions)

    def _placed(self, node: NodeSlots, kept: Sequence[_Kept]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        last = [each.positions.amax(dim=(0, 1)).to(torch.int64) for each in kept]
        return place_groups(last, node.start, self._page_size)

    def _compacted(self, node: NodeSlots, kept: Sequence[_Kept]) -> tuple[SurvivorLayout, torch.Tensor]:
        logical, places = self._placed(node, kept)
        for each, place in zip(kept, places, strict=True):
            count = each.survivors.shape[-1]
            k_buffers, v_buffers = ([of[layer] for layer in each.layers] for of in (self._k_buffers, self._v_buffers))
            compact(k_buffers, v_buffers, each.slots, each.survivors)
            if count == len(logical) and each.slots is node.slots:
                continue  # they are where they belong: it fills every slot
            source, target = each.slots[:count], node.slots[place]
            for buffer in (*k_buffers, *v_buffers):
                buffer[target] = buffer[source]  # read as a whole before it is written
        return self._layout(kept, logical, places), _value(node, logical, node.slots)

    def _layout(self, kept: Sequence[_Kept], logical: torch.Tensor, places: Sequence[torch.Tensor]) -> SurvivorLayout:
        num_layers, heads = len(self._k_buffers), self._k_buffers[0].shape[1]
        device = logical.device
        positions = torch.full((num_layers, heads, len(logical)), EMPTY, dtype=torch.int32, device=device)
        for each, place in zip(kept, places, strict=True):
            for layer, of_layer in zip(each.layers, each.positions, strict=True):
                positions[layer].index_copy_(1, place, of_layer)
        return _layout(positions, logical, places, self.groups)


def _value(node: NodeSlots, logical: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The node's logical value: int64 [num_tokens], its slots at their logical indices and holes (0) elsewhere."""
    value = torch.zeros(node.num_tokens, dtype=torch.int64, device=slots.device)
    return value.index_copy_(0, logical, slots[: len(logical)])


def layout_of_layers(
    positions: Sequence[torch.Tensor], groups: LayerGroups, start: int, page_size: int
) -> SurvivorLayout:
    """The layout of survivors that are not in the pool: ``positions`` int32 [heads, count] of each layer, on the
    host."""
    by_group = [torch.stack([positions[layer] for layer in groups.layers_of(g)]) for g in range(groups.num_groups)]
    logical, places = place_groups([each.amax(dim=(0, 1)).to(torch.int64) for each in by_group], start, page_size)
    opened = torch.full((len(positions), positions[0].shape[0], len(logical)), EMPTY, dtype=torch.int32)
    for layer, of_layer in enumerate(positions):
        opened[layer][:, places[groups.group_of[layer]]] = of_layer
    return _layout(opened, logical, places, groups)


def _layout(
    positions: torch.Tensor, logical: torch.Tensor, places: Sequence[torch.Tensor], groups: LayerGroups
) -> SurvivorLayout:
    is_even = all(len(place) == len(logical) for place in places)
    filling = None if is_even else Filling(groups.group_of, places)
    return SurvivorLayout(HostCopy(positions), HostCopy(logical), len(logical), filling)
