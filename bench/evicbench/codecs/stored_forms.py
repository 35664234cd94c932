"""Forms of one prompt's KV outside a server: a press, then a codec with any group and window."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from evicbench.correctness.reference import KV, SINKS
from sglang_evicpress.codec.groups import GroupCodec
from sglang_evicpress.press import PressInput, QueryWindow, get_press, select

RAW_BYTES = 2
"""A value of bfloat16, in which KV is held."""
POSITION_BYTES = 4
"""A survivor's position in an entry, per layer and head, and its logical index per layer and slot."""


class Stored(NamedTuple):
    """KV after it was stored and read back, and the bytes that it took."""

    kv: KV
    num_bytes: int


class StorableForm(Protocol):
    @property
    def name(self) -> str: ...

    def store(self, kv: KV, queries: Tensor) -> Stored:
        """``kv`` holds values of bfloat16; ``queries`` [layers, q_heads, tokens, head_dim] are those of the prompt."""


@dataclass(frozen=True, slots=True)
class StoredForm:
    """Tokens that ``press`` keeps, with ``bits`` a value in groups of ``group`` but for the newest ``window`` slots.
    No press keeps all; 16 bits are raw."""

    press: str | None = None
    kept_fraction: float = 1.0
    bits: int = 16
    group: int = 32
    window: int = 0

    @property
    def name(self) -> str:
        base = "exact" if self.press is None else f"{self.press}@{self.kept_fraction:g}"
        if self.bits == 16:
            return base
        return f"{base}+int{self.bits} G{self.group}" + (f" R{self.window}" if self.window else "")

    def store(self, kv: KV, queries: Tensor) -> Stored:
        """See ``StorableForm``."""
        num_bytes = 0
        if self.press is not None:
            kept = survivors(self.press, self.kept_fraction, kv, queries)
            kv, num_bytes = kv.gather(kept), POSITION_BYTES * (kept.numel() + kept.shape[-1])
        if self.bits == 16:
            return Stored(kv, num_bytes + RAW_BYTES * (kv.keys.numel() + kv.values.numel()))
        back, coded = coded_layers(GroupCodec(self.bits, group=self.group, window=self.window), kv)
        return Stored(back, num_bytes + coded)


def survivors(press_name: str, kept_fraction: float, kv: KV, queries: Tensor) -> Tensor:
    """int64 [layers, kv_heads, m]: the positions that the product's press keeps of a prompt that is one node."""
    layers, heads, num_tokens, dim = kv.keys.shape
    window = queries[:, :, -32:].transpose(1, 2).contiguous()
    node = PressInput(
        [keys.transpose(0, 1).contiguous() for keys in kv.keys],
        [values.transpose(0, 1).contiguous() for values in kv.values],
        torch.arange(num_tokens),
        torch.arange(num_tokens, dtype=torch.int32).expand(layers, heads, -1).contiguous(),
        0,
        num_tokens,
        QueryWindow(window, torch.arange(num_tokens - window.shape[1], num_tokens)),
        dim**-0.5,
    )
    return select(get_press(press_name), node, math.ceil(num_tokens * kept_fraction), SINKS).long()


def rows_of(tensor: Tensor) -> Tensor:
    """Rows of a layer's pool, bfloat16 [slots, channels], of its [heads, slots, head_dim]."""
    return tensor.transpose(0, 1).flatten(1).bfloat16().contiguous()


def coded_layers(codec: GroupCodec, kv: KV) -> tuple[KV, int]:
    """KV that went through a codec layer by layer, and its bytes."""
    layers, heads, num_slots, dim = kv.keys.shape
    keys, values, num_bytes = [], [], 0
    for layer in range(layers):
        rows = rows_of(kv.keys[layer]), rows_of(kv.values[layer])
        stored = torch.empty(codec.num_bytes(num_slots, heads * dim, torch.bfloat16), dtype=torch.uint8)
        codec.encode(*rows, stored)
        out = torch.empty_like(rows[0]), torch.empty_like(rows[1])
        codec.decode(stored, num_slots, 0, *out)
        for to, back in zip((keys, values), out, strict=True):
            to.append(back.float().view(num_slots, heads, dim).transpose(0, 1))
        num_bytes += len(stored)
    return KV(torch.stack(keys), torch.stack(values)), num_bytes


BITS = (8, 4, 2)
GROUPS = (32, 64)
WINDOWS = (0, 32, 128)
EQUAL_KEPT = {8: 0.552, 4: 0.306, 2: 0.184}
"""Kept fractions whose tokens with their positions take what all tokens take with so many bits in groups of 32."""
PRESSES = ("keydiff", "snapkv", "knorm")


def coded_forms() -> Iterator[StoredForm]:
    for bits in BITS:
        for group in GROUPS:
            for window in WINDOWS:
                yield StoredForm(bits=bits, group=group, window=window)


def pressed_forms() -> Iterator[StoredForm]:
    for press in PRESSES:
        for kept in (0.8, *EQUAL_KEPT.values()):
            yield StoredForm(press, kept)
    for kept in (0.8, 0.5):
        for bits in BITS[:2]:
            yield StoredForm("keydiff", kept, bits)
