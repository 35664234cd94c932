"""KV as a codec brings it back, in the reference: what nodes store, in their groups, and what an SSD has of it.

The reference encodes its own keys and values. It knows them up to the last bits of a sum, so a value that lies on the
edge between two codes may be rounded either way: there, and nowhere else, the server's choice is taken from its entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from evicbench.correctness.reference import KV, Node
from sglang_evicpress.codec import get_codec
from sglang_evicpress.codec.layout import BITS, GROUP
from sglang_evicpress.tiers.entry.encoding import decode
from sglang_evicpress.tiers.entry.header import Header
from sglang_evicpress.tiers.ssd.scan import scan

NOISE = 5e-5
"""A value of the KV in fp32: the server's and the reference's differ by less; the largest seen is 1.3e-5."""

Rows: TypeAlias = Tensor
"""Keys or values of one layer, [slots, channels]."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an SSD folder."""

    header: Header
    payload: bytes

    @property
    def digests(self) -> list[bytes]:
        return [extent.digest for extent in self.header.extents]

    def decoded(self) -> KV:
        """The rows of its slots, in fp32, as its codec brings them back; zeros behind those of a layer with fewer."""
        shape, num_slots, codec = self.header.shape, self.header.num_slots, get_codec(self.header.form.codec)
        pairs = []
        for layer, extent in enumerate(self.header.extents[: shape.num_layers]):
            count = self.header.slots_of(layer)
            stored = torch.frombuffer(bytearray(self.payload[extent.offset :][: extent.num_bytes]), dtype=torch.uint8)
            rows = torch.empty(2, count, shape.num_heads * shape.head_dim, dtype=getattr(torch, shape.dtype))
            if codec is None:
                rows = stored.view(rows.dtype).view_as(rows)
            else:
                codec.decode(stored, count, 0, rows[0], rows[1])
            pairs.append(pad(rows.float(), (0, 0, 0, num_slots - count)))
        return _from_rows(torch.stack(pairs, 1), shape.num_heads)


def read_entry(folder: Path, node: Node) -> Entry | None:
    """The newest entry of an SSD folder that holds just this node, of a server that writes nothing now."""
    found = None
    tokens = torch.tensor(node.token_ids, dtype=torch.int32).numpy().tobytes()
    for head in sorted(folder.glob("rank-*/segment-*.head")):
        data = bytearray(head.read_bytes())
        for offset in scan(data).records.offsets.tolist():
            header, _ = decode(data, offset)
            if (header.start, header.tokens) == (node.start, tokens):
                payload = head.with_suffix(".kv").read_bytes()[header.payload_offset :][: header.payload_bytes]
                found = Entry(header, payload)
    return found


def positions_of(node: Node, kv: KV) -> Tensor:
    """Absolute positions of what the node's slots hold, int64 [layers, kv_heads, slots]; of a layer that fills fewer
    slots those of these, and then -1."""
    if node.positions is not None:
        compact = torch.full_like(node.positions, -1)
        for layer, positions in enumerate(node.positions):
            held = positions[:, positions[0] >= 0]
            compact[layer, :, : held.shape[1]] = held
        return compact
    return kv.every_position()[..., node.start : node.start + len(node.token_ids)]


def replaced(kv: KV, positions: Tensor, rows: KV) -> KV:
    """``kv`` with other rows at ``positions``; where these are -1 there is no row."""
    keys, values = kv.keys.clone(), kv.values.clone()
    for layer, count in enumerate(_counts(positions)):
        index = positions[layer, :, :count, None].expand(-1, -1, keys.shape[-1])
        keys[layer].scatter_(1, index, rows.keys[layer, :, :count])
        values[layer].scatter_(1, index, rows.values[layer, :, :count])
    return KV(keys, values)


def through(codec: str, rows: KV, dtype: torch.dtype = torch.float32, *, first: int = 0) -> KV:
    """``rows`` encoded and decoded in ``dtype``, in groups from slot ``first`` on; what is before it stays raw. Of a
    layer that has fewer rows the first ones."""
    coder = get_codec(codec)
    assert coder is not None
    given = torch.stack([_rows(rows.keys), _rows(rows.values)]).to(dtype)
    for (keys, values), count in zip(given.unbind(1), _rows_of_layers(rows), strict=True):
        if count <= first:
            continue  # a split may have left nothing of some layers
        chosen = keys[first:count], values[first:count]
        stored = torch.empty(coder.num_bytes(*chosen[0].shape, dtype), dtype=torch.uint8)
        coder.encode(*chosen, stored)
        coder.decode(stored, len(chosen[0]), 0, *chosen)
    return _from_rows(given.float(), rows.keys.shape[1])


def settled(raw: KV, coded: KV, entry: Entry, noise: float = NOISE) -> tuple[KV, int, int]:
    """``coded``, but what lies within ``noise`` of the edge between two codes as the server rounded it; how many values
    that were, and how many others the server has under another code."""
    theirs, codec = entry.decoded(), entry.header.form.codec
    num_ties, num_wrong, result = 0, 0, KV(coded.keys.clone(), coded.values.clone())
    for layer, count in enumerate(_rows_of_layers(raw)):
        for which, steps_of in (("keys", _key_steps), ("values", _value_steps)) if count else ():
            before, mine, other = (getattr(of, which)[layer : layer + 1, :, :count] for of in (raw, coded, theirs))
            step = steps_of(before, codec)
            differs = (mine - other).abs() > step / 2 + noise
            is_near = (mine - before).abs() >= step / 2 - noise
            is_tie = differs & is_near & ((other - before).abs() <= step / 2 + noise)
            getattr(result, which)[layer, :, :count] = torch.where(is_tie, other, mine)[0]
            num_ties += int(is_tie.sum())
            num_wrong += int((differs & ~is_tie).sum())
    return result, num_ties, num_wrong


def _counts(positions: Tensor) -> list[int]:
    """Rows of each layer, of positions [layers, kv_heads, slots] with -1 behind the last one."""
    counts: list[int] = (positions[:, 0] >= 0).sum(-1).tolist()
    return counts


def _rows_of_layers(rows: KV) -> list[int]:
    if rows.hidden is None:
        return [rows.num_tokens] * len(rows.keys)
    counts: list[int] = (~rows.hidden[:, 0]).sum(-1).tolist()
    return counts


def _key_steps(keys: Tensor, codec: str) -> Tensor:
    """What lies between two codes of each value: of a channel over groups of slots; nothing behind the last group."""
    layers, heads, slots, dim = keys.shape
    num_groups = slots // GROUP
    groups = keys[:, :, : num_groups * GROUP].reshape(layers, heads, num_groups, GROUP, dim)
    steps = torch.zeros_like(keys)
    steps[:, :, : num_groups * GROUP] = _spans(groups, 3, codec).expand_as(groups).reshape(layers, heads, -1, dim)
    return steps


def _value_steps(values: Tensor, codec: str) -> Tensor:
    """Of a token over groups of channels."""
    rows = _rows(values)
    groups = rows.view(*rows.shape[:2], -1, gcd(GROUP, rows.shape[-1]))
    steps = _spans(groups, 3, codec).expand_as(groups).reshape(rows.shape)
    return steps.view(*rows.shape[:2], values.shape[1], -1).transpose(1, 2)


def _spans(groups: Tensor, dim: int, codec: str) -> Tensor:
    return (groups.amax(dim, keepdim=True) - groups.amin(dim, keepdim=True)) / ((1 << BITS[codec]) - 1)


def _rows(of: Tensor) -> Tensor:
    """[layers, kv_heads, slots, head_dim] as [layers, slots, channels]."""
    return of.transpose(1, 2).flatten(2)


def _from_rows(rows: Tensor, num_heads: int) -> KV:
    """Keys and values of rows [2, layers, slots, channels]."""
    keys, values = rows.view(*rows.shape[:3], num_heads, -1).transpose(2, 3)
    return KV(keys, values)
