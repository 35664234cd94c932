"""Checks of slots before they are used: a sample of what was compressed, loaded or copied must still hold the bytes
that it held when it was first matched. It finds whoever writes into slots that are not theirs."""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_evicpress.patches.tiers.types import Steps, Tiers
from sglang_evicpress.patches.tree.node import iter_nodes, slots_of
from sglang_evicpress.patches.tree.types import Node

logger = logging.getLogger(__name__)

CAUSE = "slot check"


class Sample(NamedTuple):
    """Slots of a node, as it was at this version, and the digest of their rows in every layer."""

    version: int
    slots: torch.Tensor
    digest: bytes


@dataclass(eq=False, repr=False)
class SlotChecks:
    """``share`` of the slots of a node are looked at, at each match of it; the same ones for equal seeds. ``buffers``:
    K and V of each layer. ``drop`` is told of a node and the cause. A node that fails is a miss, and goes with all
    below it once no request holds any of these."""

    share: float
    seed: int
    buffers: Sequence[torch.Tensor]
    storage: Tiers
    drop: Callable[[int, str], int]

    def __post_init__(self) -> None:
        self._samples: dict[int, Sample] = {}

    def sound(self, steps: Steps) -> Steps:
        """The steps of a match before the first node whose sample has changed."""
        if not self.share:
            return steps
        for index, (node, _) in enumerate(steps):
            if self._is_settled(node) and not self._holds(node):
                self._lose(node)
                return steps[:index]
        return steps

    def forget(self, node: Node) -> None:
        """The node is gone."""
        self._samples.pop(node.id, None)

    def clear(self) -> None:
        self._samples.clear()

    def _is_settled(self, node: Node) -> bool:
        """True if the node is on the GPU, nothing of it is on its way, and it was compressed or is on a lower tier."""
        kv = node.kv
        return node.value is not None and kv.load is None and bool(kv.layout is not None or kv.copies)

    def _holds(self, node: Node) -> bool:
        sample = self._samples.get(node.id)
        if sample is None or sample.version != node.kv.version:
            slots = self._drawn(node)
            self._samples[node.id] = Sample(node.kv.version, slots, self._digest(slots))
            return True
        self.storage.counts["slots_checked"] += len(sample.slots)
        return self._digest(sample.slots) == sample.digest

    def _drawn(self, node: Node) -> torch.Tensor:
        slots = slots_of(node)
        draw = random.Random(f"{self.seed}-{node.id}-{node.kv.version}")
        indices = draw.sample(range(len(slots)), math.ceil(self.share * len(slots)))
        return slots[torch.tensor(sorted(indices), dtype=torch.int64, device=slots.device)]

    def _digest(self, slots: torch.Tensor) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for buffer in self.buffers:
            digest.update(buffer[slots].contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.digest()

    def _lose(self, node: Node) -> None:
        self.storage.errors["gpu_slots"] += 1
        logger.error("evicpress: node %d holds other KV than before: it is a miss, and computed anew", node.id)
        lost = [node, *iter_nodes(node)]
        if not any(each.lock_ref for each in lost):
            for each in reversed(lost):
                self.drop(each.id, CAUSE)
