"""A local model of transformers that answers questions over other tokens of a context in each layer and head.

Keys hold their RoPE, and what follows the context keeps its logical position, so attention over survivors needs no more
than their keys and values. All questions about a context share its KV: they are computed side by side, and a mask keeps
them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PretrainedConfig
from transformers.utils import logging

from sglang_evicpress.device import checked_device
from sglang_evicpress.press.base import PressInput, QueryWindow
from sglang_evicpress.profiler.engine import Answer, Likelihood
from sglang_evicpress.profiler.prompts import PromptKind

_NUMBERS = itertools.count()
_REFUSED = ("sliding_window", "softcap", "s_aux")
_PADDING = -1


@dataclass(frozen=True, slots=True, eq=False)
class ContextKV:
    """Exact KV of one context: ``keys`` and ``values`` [layers, n, kv_heads, head_dim], RoPE in the keys, and as
    ``node`` the same for a press to score, with the last queries of the prefill."""

    keys: Tensor
    values: Tensor
    node: PressInput

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """Tokens that attention sees of one context. ``indices``: per layer int64 [kv_heads, m], the same or another m in
    each layer; ``is_kept``: bool of the same shapes, False where a head keeps fewer than m; None if none does."""

    indices: Sequence[Tensor]
    is_kept: Sequence[Tensor] | None = None


class _Attention:
    """Attention of transformers' interface. The mask covers the tokens behind the context; every column before them is
    of the context, and seen where ``seen`` says so, or always. ``noted`` gets the last ``num_noted`` queries of every
    layer."""

    def __init__(self) -> None:
        self.num_noted = 0
        self.noted: list[Tensor] = []
        self.scale = 0.0
        self.seen: Sequence[Tensor] | None = None  # per layer bool [contexts, kv_heads, m]

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: object,
    ) -> tuple[Tensor, None]:
        if refused := [name for name in _REFUSED if options.get(name) is not None]:
            raise ValueError(f"the model's attention has {refused[0]}: expected plain causal attention in every layer")
        self.scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.num_noted:
            self.noted.append(query[:, :, -self.num_noted :].clone())
        mask = None if attention_mask is None else self._whole_mask(module, query, key, attention_mask)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    def _whole_mask(self, module: torch.nn.Module, query: Tensor, key: Tensor, new: Tensor) -> Tensor:
        num_contexts, num_heads, num_tokens, _ = query.shape
        num_past = key.shape[2] - new.shape[-1]
        if self.seen is None:
            past = torch.ones(num_contexts, 1, num_tokens, num_past, dtype=torch.bool, device=query.device)
            return torch.cat([past, new], -1)
        layer = module.layer_idx
        if not isinstance(layer, int):
            raise TypeError(f"the attention's layer_idx is {layer!r}: expected an int")
        seen = self.seen[layer].repeat_interleave(num_heads // key.shape[1], 1)
        past = seen[:, :, None].expand(-1, -1, num_tokens, -1)
        return torch.cat([past, new.expand(-1, num_heads, -1, -1)], -1)


def _check_attention(config: PretrainedConfig) -> None:
    """Raise ValueError for attention by chunks or windows, which is told in masks that are not made here, and for one
    that is scaled by the number of cached tokens."""
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    told = [f"layer_types {kinds[0]!r}"] if kinds else []
    for name in ("attention_chunk_size", "attn_temperature_tuning"):
        told += [f"{name} {value!r}"] if (value := getattr(config, name, None)) else []
    if told:
        raise ValueError(f"the model has {told[0]}: expected plain causal attention in every layer")


class LocalModel:
    """The model in ``folder``, as transformers saves it, on ``device``; in fp32 on a CPU.

    Raises ValueError where it cannot be loaded, or there is no such device, and for a model whose attention sees parts
    of a context or depends on how long the cache is. Models with sinks in attention or capped logits are refused by the
    first prefill.
    """

    def __init__(self, folder: Path, *, device: str = "cpu", window: int = 32) -> None:
        place = checked_device(device)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json: expected the folder of a model of transformers")
        self._attention = _Attention()
        name = f"evicpress-{next(_NUMBERS)}"
        AttentionInterface.register(name, self._attention)
        dtype = torch.float32 if place.type == "cpu" else "auto"
        shows_progress = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # of reading the weights
        try:
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=name)
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            why = " ".join(f"{error!s:.200}".split())
            raise ValueError(f"the model in {folder} cannot be loaded ({why}): expected one of transformers") from None
        finally:
            if shows_progress:
                logging.enable_progress_bar()
        _check_attention(loaded.config.get_text_config())
        self._model = loaded.to(place).eval()
        self._device = place
        self._window = window
        ends = loaded.generation_config.eos_token_id
        self._ends = sorted(ends) if isinstance(ends, list) else [] if ends is None else [ends]

    @property
    def num_layers(self) -> int:
        return int(self._model.config.num_hidden_layers)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    def tokens(self, kind: PromptKind, text: str) -> list[int]:
        """Tokens of a prompt, as a server of this model makes them: one message of a user, or a bare text."""
        if kind == "text":
            return list(self.tokenizer(text, verbose=False)["input_ids"])
        message = [{"role": "user", "content": text}]
        return list(self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[Sequence[int]]) -> list[ContextKV]:
        """Exact KV of contexts of one length, computed together."""
        if len({len(each) for each in tokens}) != 1 or not tokens[0]:
            raise ValueError(f"contexts have {sorted({len(each) for each in tokens})} tokens: expected one length")
        attention, cache = self._attention, DynamicCache()
        attention.num_noted, attention.noted, attention.seen = self._window, [], None
        try:
            self._model(input_ids=torch.tensor(tokens, device=self._device), past_key_values=cache, logits_to_keep=1)
        finally:
            noted, attention.num_noted, attention.noted = attention.noted, 0, []
        if len(noted) != self.num_layers:
            raise ValueError(f"{len(noted)} of {self.num_layers} layers call transformers' attention: expected all")
        keys = torch.stack([layer.keys.transpose(1, 2) for layer in cache.layers], 1)
        values = torch.stack([layer.values.transpose(1, 2) for layer in cache.layers], 1)
        queries = torch.stack(noted, 1).transpose(2, 3)  # [contexts, layers, window, q_heads, head_dim]
        parts = zip(keys, values, queries, strict=True)
        return [_context_kv(one, other, window, attention.scale) for one, other, window in parts]

    @torch.inference_mode()
    def generate(
        self,
        contexts: Sequence[ContextKV],
        survivors: Sequence[Survivors],
        questions: Sequence[Sequence[Sequence[int]]],
        max_new_tokens: int,
    ) -> list[list[Answer]]:
        """Greedy answers to the questions about each context, whose tokens stand right behind it; with the token that
        ends them, which ``text`` leaves out."""
        rows = _Rows(self, contexts, survivors, questions)
        logprobs, positions = rows.last(rows.prompt_logprobs(), questions), rows.ends(questions)
        owners = torch.where(positions >= 0, torch.arange(positions.shape[1]), _PADDING)
        tokens, chosen = list[Tensor](), list[Tensor]()
        is_open = owners != _PADDING
        ends = torch.tensor(self._ends, dtype=torch.int64)
        for step in range(max_new_tokens):
            best, likeliest = (each.cpu() for each in logprobs.max(-1))
            tokens.append(likeliest.masked_fill(~is_open, -1))
            chosen.append(best)
            is_open &= ~torch.isin(likeliest, ends)
            if step + 1 == max_new_tokens or not bool(is_open.any()):
                break
            logprobs = rows.extend(likeliest, owners, positions + step)
        return [
            [self._answer(torch.stack(tokens), torch.stack(chosen), row, column) for column in range(len(asked))]
            for row, asked in enumerate(questions)
        ]

    @torch.inference_mode()
    def score(
        self,
        contexts: Sequence[ContextKV],
        survivors: Sequence[Survivors],
        questions: Sequence[Sequence[Sequence[int]]],
        answers: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[Likelihood]]:
        """Likelihood of a given answer to each question, in one pass. ``best`` and ``expected`` are left empty."""
        whole = [
            [[*question, *answer] for question, answer in zip(*row, strict=True)]
            for row in zip(questions, answers, strict=True)
        ]
        rows = _Rows(self, contexts, survivors, whole)
        logprobs = rows.prompt_logprobs()
        scored = list[list[Likelihood]]()
        for row, (asked, given) in enumerate(zip(questions, answers, strict=True)):
            scored.append([])
            for column, (question, answer) in enumerate(zip(asked, given, strict=True)):
                begin = column * rows.width + len(question) - 1
                place = torch.arange(begin, begin + len(answer), device=logprobs.device)
                tokens = torch.tensor(list(answer), dtype=torch.int64, device=logprobs.device)
                scored[-1].append(Likelihood(tuple(logprobs[row, place, tokens].tolist())))
        return scored

    def logprobs(self, cache: DynamicCache, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """fp32 [contexts, tokens, vocabulary] of what follows each of ``tokens``, which go into ``cache``; ``mask`` is
        bool [contexts, tokens, tokens behind the context]."""
        output = self._model(
            input_ids=tokens, past_key_values=cache, position_ids=positions, attention_mask=mask[:, None]
        )
        logprobs: Tensor = output.logits.float().log_softmax(-1)
        return logprobs

    def load(self, contexts: Sequence[ContextKV], survivors: Sequence[Survivors]) -> DynamicCache:
        """A cache of the survivors of all contexts, and the attention made ready for it."""
        cache, seen, is_padded = DynamicCache(), list[Tensor](), False
        for layer in range(self.num_layers):
            indices = [each.indices[layer] for each in survivors]
            longest = max(index.shape[-1] for index in indices)
            kept = [
                torch.ones_like(each.indices[layer], dtype=torch.bool) if each.is_kept is None else each.is_kept[layer]
                for each in survivors
            ]
            is_padded |= any(index.shape[-1] < longest for index in indices)
            is_padded |= any(each.is_kept is not None for each in survivors)
            padded = torch.stack([_widened(index, longest) for index in indices])
            seen.append(torch.stack([_widened(each, longest) for each in kept]).to(self._device))
            stored = [(each.keys[layer], each.values[layer]) for each in contexts]
            keys, values = (
                torch.stack([_gathered(part, index) for part, index in zip(parts, padded, strict=True)])
                for parts in zip(*stored, strict=True)
            )
            cache.update(keys.to(self._device), values.to(self._device), layer)
        self._attention.seen = seen if is_padded else None
        return cache

    def _answer(self, tokens: Tensor, logprobs: Tensor, row: int, column: int) -> Answer:
        """From int64 and fp32 [steps, contexts, questions]; steps after the end hold -1."""
        ids = [token for token in tokens[:, row, column].tolist() if token >= 0]
        values = logprobs[: len(ids), row, column].tolist()
        return Answer(tuple(ids), tuple(values), self.tokenizer.decode(ids, skip_special_tokens=True))


class _Rows:
    """A pass over several contexts: a row each, in which its questions lie side by side, ``width`` tokens apart. A
    column is seen by the tokens of the same question alone."""

    def __init__(
        self,
        model: LocalModel,
        contexts: Sequence[ContextKV],
        survivors: Sequence[Survivors],
        questions: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        self._model = model
        self._cache = model.load(contexts, survivors)
        self._device = contexts[0].keys.device
        self._starts = torch.tensor([[context.num_tokens] for context in contexts])
        self.width = max(len(question) for row in questions for question in row)
        self._num_columns = max(len(row) for row in questions)
        shape = (len(questions), self._num_columns * self.width)
        self._tokens = torch.zeros(shape, dtype=torch.int64)
        self._offsets = torch.zeros(shape, dtype=torch.int64)
        self._owners = torch.full(shape, _PADDING)
        for number, row in enumerate(questions):
            for column, question in enumerate(row):
                if not question:
                    raise ValueError("a question has no token: expected at least one")
                place = slice(column * self.width, column * self.width + len(question))
                self._tokens[number, place] = torch.tensor(list(question))
                self._offsets[number, place] = torch.arange(len(question))
                self._owners[number, place] = column

    def prompt_logprobs(self) -> Tensor:
        return self._pass(self._tokens, self._owners, self._starts + self._offsets, self._owners)

    def last(self, logprobs: Tensor, questions: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        """[contexts, questions, vocabulary] behind the last token of each question."""
        last = self.ends(questions) - self._starts - 1 + torch.arange(self._num_columns) * self.width
        index = last.clamp_min(0).to(logprobs.device)[..., None].expand(-1, -1, logprobs.shape[-1])
        return logprobs.gather(1, index)

    def ends(self, questions: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        """int64 [contexts, questions]: the position behind each question, -1 where a context has fewer."""
        ends = torch.full((len(questions), self._num_columns), -1)
        for number, row in enumerate(questions):
            for column, question in enumerate(row):
                ends[number, column] = int(self._starts[number]) + len(question)
        return ends

    def extend(self, tokens: Tensor, owners: Tensor, positions: Tensor) -> Tensor:
        """One more token for each question: [contexts, questions, vocabulary] behind it."""
        self._owners = torch.cat([self._owners, owners], 1)
        return self._pass(tokens, owners, positions.clamp_min(0), self._owners)

    def _pass(self, tokens: Tensor, owners: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        num_before = columns.shape[1] - tokens.shape[1]
        is_earlier = torch.ones(tokens.shape[1], columns.shape[1], dtype=torch.bool).tril(num_before)
        mask = (owners[:, :, None] == columns[:, None]) & is_earlier
        device = self._device
        return self._model.logprobs(self._cache, tokens.to(device), positions.to(device), mask.to(device))


def _context_kv(keys: Tensor, values: Tensor, queries: Tensor, scale: float) -> ContextKV:
    layers, num_tokens, heads, _ = keys.shape
    window = QueryWindow(queries, torch.arange(num_tokens - queries.shape[1], num_tokens, device=keys.device))
    positions = torch.arange(num_tokens, dtype=torch.int32, device=keys.device).expand(layers, heads, -1)
    node = PressInput(
        k_buffers=list(keys),
        v_buffers=list(values),
        slots=torch.arange(num_tokens, device=keys.device),
        positions=positions,
        start=0,
        num_tokens=num_tokens,
        window=window,
        scale=scale,
    )
    return ContextKV(keys, values, node)


def _widened(tensor: Tensor, width: int) -> Tensor:
    """The last axis made longer by zeros."""
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))


def _gathered(part: Tensor, indices: Tensor) -> Tensor:
    """[n, kv_heads, head_dim] and int64 [kv_heads, m] -> [kv_heads, m, head_dim]."""
    heads = torch.arange(part.shape[1], device=part.device)
    return part[indices, heads[:, None]]
