"""Geometry of the served model's queries, checked against that model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_evicpress.geometry import file
from sglang_evicpress.geometry.centres import QueryGeometry
from sglang_evicpress.geometry.checkpoint import digest_of, folder_of
from sglang_evicpress.geometry.rope import Rope

_POSITIONS = (0, 1, 2, 7, 63, 500, 1000, 4000)
"""Where tables of RoPE are compared: beyond, angles in fp32 are no longer what they should be."""

_TOLERANCE = {torch.float32: 2e-3}
_TOLERANCE_OF_HALVES = 2e-2

_OWN = "expected the file of this model, which evicpress calibrate geometry makes"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that SGLang has built. ``path`` and ``revision``: where it was read from; counts are those of all ranks;
    ``rank`` is (rank, size)."""

    module: torch.nn.Module
    path: str
    revision: str | None
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rank: tuple[int, int]


def geometry_of(path: str, model: ServedModel) -> QueryGeometry:
    """The geometry in the file ``path``, for the heads of this rank. Raises ValueError, one sentence, where it is of
    another model: other heads, other RoPE or other weights."""
    geometry = file.read(path)
    facts, where = geometry.model, f"geometry {path!r}"
    for name, wanted in (
        ("num_layers", model.num_layers),
        ("num_heads", model.num_heads),
        ("num_kv_heads", model.num_kv_heads),
        ("head_dim", model.head_dim),
    ):
        if getattr(facts, name) != wanted:
            raise ValueError(
                f"{where} is of a {facts.name} with {name} {getattr(facts, name)}, and this model has {wanted}: {_OWN}"
            )
    problem = rope_problem(geometry.rope, model.module)
    if problem is not None:
        raise ValueError(f"{where} {problem}: {_OWN}")
    if facts.checkpoint != digest_of(folder_of(model.path, model.revision)):
        raise ValueError(f"{where} is of a {facts.name} with other weights than {model.path!r}: {_OWN}")
    return geometry.of_rank(*model.rank)


def rope_problem(rope: Rope, module: torch.nn.Module) -> str | None:
    """Difference of a RoPE from the tables of a built model, as it goes on behind the name of a file; None without
    any."""
    found = list(_tables(module))
    if not found:
        return "needs a model with one table of RoPE for all sequences, which this one has not"
    for table, is_interleaved in found:
        positions = torch.tensor([at for at in _POSITIONS if at < len(table)])
        turns = rope.turns(positions) * rope.factor
        wanted = torch.cat([turns.real, turns.imag], -1).float()
        given = table[positions.to(table.device)].float().cpu()
        if given.shape != wanted.shape:
            return f"is of RoPE with {rope.num_turning} bands, and this model's has {given.shape[-1] // 2}"
        if float((given - wanted).abs().max()) > _TOLERANCE.get(table.dtype, _TOLERANCE_OF_HALVES):
            return "is of RoPE with other frequencies or another factor than this model's"
        if is_interleaved not in (None, rope.is_interleaved):
            return "is of RoPE with other pairs of dimensions than this model's"
    return None


def _tables(module: torch.nn.Module) -> Iterator[tuple[torch.Tensor, bool | None]]:
    """Cosines and sines by position, [positions, 2 * bands], of every RoPE in a model, and whether it is interleaved:
    SGLang's own, or those that its fallback to the code of transformers computes, which do not tell the latter."""
    for each in module.modules():
        table, freq = getattr(each, "cos_sin_cache", None), getattr(each, "inv_freq", None)
        factor = getattr(each, "attention_scaling", None)
        if isinstance(table, torch.Tensor):
            yield table, not each.is_neox_style
        elif isinstance(freq, torch.Tensor) and isinstance(factor, float | int):
            angles = torch.arange(max(_POSITIONS) + 1)[:, None] * freq.detach().float().cpu()
            yield torch.cat([angles.cos(), angles.sin()], -1) * factor, None
