"""Calibration: the geometry of a model's queries, measured on some text by transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sglang_evicpress.device import checked_device
from sglang_evicpress.geometry.centres import MAX_OFFSET, ModelFacts, QueryGeometry
from sglang_evicpress.geometry.checkpoint import digest_of, folder_of
from sglang_evicpress.geometry.rope import Rope

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose turn of a position is the same in every sequence."""

_PROBED = (0, 1, 5, 64, 257)  # positions at which one token must have one key before RoPE
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_OF_HALVES = 0.05
_OWN_ATTENTION = (
    "has attention of its own, whose queries cannot be seen: expected a model of transformers' attention interface"
)
_NUMBERS = itertools.count()


@dataclass(slots=True)
class _Seen:
    """Queries and keys that attention of each layer was given in one pass: [tokens, heads, head_dim]."""

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class CalibratedModel:
    """A text model of transformers on ``device``, whose queries are seen where attention takes them.

    Raises ValueError, one sentence, for a model that cannot be read, whose attention is not transformers' own
    interface, or whose RoPE is none of ``ROPE_TYPES`` or cannot be undone.
    """

    def __init__(self, model: str, device: str = "cpu", revision: str | None = None) -> None:
        self._device = checked_device(device)
        folder = folder_of(model, revision)
        self._checkpoint = digest_of(folder)
        self._seen = _Seen()
        attention = f"evicpress-geometry-{next(_NUMBERS)}"
        AttentionInterface.register(attention, partial(_attend, self._seen))
        AttentionMaskInterface.register(attention, sdpa_mask)
        try:
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation=attention)
        except KeyError:  # of a table of its own
            raise ValueError(f"model {model!r} {_OWN_ATTENTION}") from None
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            said = str(error).partition("\n")[0]
            raise ValueError(f"model {model!r} cannot be read ({said:.200}): expected a text model") from None
        self._model: Any = loaded.eval().to(self._device)
        self._name = type(loaded).__name__
        self.rope = self._read_rope()

    @property
    def max_positions(self) -> int:
        """Tokens that the model reads at most."""
        return int(getattr(self._model.config, "max_position_embeddings", None) or MAX_OFFSET)

    def measure(self, sequences: Iterable[Sequence[int]], max_offset: int = MAX_OFFSET) -> QueryGeometry:
        """Geometry of the queries of all these tokens, each sequence from position 0 on; what lies farther ahead than
        the model reads does not count. Raises ValueError without any token, or for queries that are no numbers."""
        num_tokens, totals = 0, list[tuple[Tensor, Tensor]]()
        for sequence in sequences:
            at = torch.arange(len(sequence), device=self._device)[:, None]
            parts = [self._totals(queries, at) for queries, _ in self._pass(sequence)]
            if totals:
                parts = [(a + c, b + d) for (a, b), (c, d) in zip(totals, parts, strict=True)]
            totals = parts
            num_tokens += len(sequence)
        if not totals:
            raise ValueError("there is no text to calibrate on: expected some tokens")
        centres, lengths = ((torch.stack(each) / num_tokens).float().cpu() for each in zip(*totals, strict=True))
        rope = self.rope.to(torch.device("cpu"))
        num_layers, num_heads = centres.shape[:2]
        facts = ModelFacts(self._name, num_layers, num_heads, self._num_kv_heads, rope.head_dim, self._checkpoint)
        geometry = QueryGeometry(facts, rope, centres, lengths, num_tokens, min(max_offset, self.max_positions))
        geometry.check_values()
        return geometry

    def _totals(self, queries: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of queries [tokens, heads, head_dim] before RoPE, and of the lengths of their bands, in float64."""
        pre = self.rope.undo(queries.float(), positions)
        return pre.double().sum(0), self.rope.lengths(pre).double().sum(0)

    def _read_rope(self) -> Rope:
        """The model's own frequencies, in the order of bands that undoes its RoPE in every layer."""
        kind = (getattr(self._model.config, "rope_parameters", None) or {}).get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise ValueError(
                f"{self._name} has RoPE of type {kind!r}, which turns by the length of a sequence: expected one of "
                f"{', '.join(ROPE_TYPES)}"
            )
        found = [module for module in self._model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
        if not found or any(not torch.equal(each.inv_freq, found[0].inv_freq) for each in found):
            what = "several kinds of RoPE" if found else "no RoPE that can be read"
            raise ValueError(f"{self._name} has {what}: expected a model whose layers share one RoPE")
        freq = found[0].inv_freq.detach().float()
        factor = float(getattr(found[0], "attention_scaling", 1.0))
        _, keys = self._pass([self._probe])[0]
        self._num_kv_heads, head_dim = keys.shape[1:]
        wrong_layers = []
        for is_interleaved in (False, True):
            rope = Rope(freq, head_dim, is_interleaved, factor)
            wrong = self._first_wrong_layer(rope)
            if wrong is None:
                return rope
            wrong_layers.append(wrong)
        raise ValueError(
            f"{self._name} has keys in layer {max(wrong_layers)} whose RoPE cannot be undone, as where a layer has "
            "none, or a norm behind it: expected a model with RoPE as the last step"
        )

    @property
    def _probe(self) -> int:
        return int(self._model.config.vocab_size) // 2

    def _first_wrong_layer(self, rope: Rope) -> int | None:
        """Layer in which a token by itself, which sees nothing else, has other queries or keys before RoPE at another
        position; None without one."""
        tolerance = _TOLERANCE.get(self._model.dtype, _TOLERANCE_OF_HALVES)
        passes = [self._pass([self._probe], position) for position in _PROBED]
        for layer, at_positions in enumerate(zip(*passes, strict=True)):
            for heads in zip(*at_positions, strict=True):
                undone = [
                    rope.undo(each.float(), torch.tensor(position, device=self._device))
                    for each, position in zip(heads, _PROBED, strict=True)
                ]
                first = undone[0]
                if not all(float((each - first).norm() / first.norm()) <= tolerance for each in undone[1:]):
                    return layer
        return None

    def _pass(self, tokens: Sequence[int], start: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Queries and keys of every layer, [tokens, heads, head_dim], of a sequence at positions from ``start`` on."""
        self._seen.layers.clear()
        ids = torch.tensor([list(tokens)], device=self._device)
        positions = torch.arange(start, start + len(tokens), device=self._device)[None]
        with torch.inference_mode():
            self._model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
        layers = [self._seen.layers[index] for index in sorted(self._seen.layers)]
        if not layers or len(layers) != self._model.config.num_hidden_layers:
            raise ValueError(f"{self._name} {_OWN_ATTENTION}")
        return layers


def read_sequences(model: str, text: str, num_tokens: int, length: int, revision: str | None = None) -> list[list[int]]:
    """The first ``num_tokens`` tokens of a text in sequences of ``length`` at most, each behind the model's first token
    where it has one. Raises ValueError for a model without a tokenizer."""
    folder = folder_of(model, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        raise ValueError(f"model {model!r} has no tokenizer: expected one in {str(folder)!r}") from None
    begin = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:num_tokens]
    return list(_parts(ids, length - len(begin), begin))


def _parts(ids: Sequence[int], length: int, begin: list[int]) -> Iterator[list[int]]:
    for first in range(0, len(ids), length):
        yield [*begin, *ids[first : first + length]]


def _attend(
    seen: _Seen, module: torch.nn.Module, query: Tensor, key: Tensor, *args: object, **kwargs: object
) -> tuple[Tensor, None]:
    """Attention of transformers' interface, [1, heads, tokens, head_dim] each; notes queries and keys."""
    layer: int = getattr(module, "layer_idx", len(seen.layers))
    seen.layers[layer] = query[0].transpose(0, 1), key[0].transpose(0, 1)
    attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, *args, **kwargs)
    return attended
