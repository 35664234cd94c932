"""Reference for answers on a compressed prefix, without the product: transformers over a cache of the survivors.

Nothing here knows how the server stores, splits or matches anything. It is told which absolute positions survived in
every (layer, kv head); keys and values are its own, from its own prefill; and the scores that a selection must follow
are written down anew from the papers' formulas.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import max_pool1d
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask

SNAPKV_WINDOW, SNAPKV_KERNEL = 32, 7
SINKS = 4
MIN_MATCH_KEPT = 0.5
SCORE_TOLERANCE = 1e-4  # relative, of a press's score in fp32; a hundredth of it absolute
PEAKY_VOCABULARY = 320


@dataclass(frozen=True, slots=True, eq=False)
class KV:
    """Keys and values of some tokens, fp32 [layers, kv_heads, tokens, head_dim] each; RoPE is in the keys. ``hidden``:
    bool [layers, kv_heads, tokens], what the layers do not have, None where they have all."""

    keys: Tensor
    values: Tensor
    hidden: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]

    def gather(self, positions: Tensor) -> Self:
        """Other tokens in every head: int64 [layers, kv_heads, m], counted from this KV's first token; -1 for none."""
        hidden = positions < 0
        index = positions.clamp(min=0)[..., None].expand(*positions.shape, self.keys.shape[-1])
        keys, values = self.keys.gather(2, index), self.values.gather(2, index)
        return type(self)(keys, values, hidden if bool(hidden.any()) else None)

    def first(self, num_tokens: int) -> Self:
        return type(self)(self.keys[:, :, :num_tokens], self.values[:, :, :num_tokens])

    def then(self, other: Self) -> Self:
        return type(self)(torch.cat([self.keys, other.keys], 2), torch.cat([self.values, other.values], 2))

    def every_position(self) -> Tensor:
        """int64 [layers, kv_heads, tokens]: nothing dropped."""
        return torch.arange(self.num_tokens).expand(*self.keys.shape[:2], -1)


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """One forward pass: ``kv`` of its tokens, ``queries`` [layers, q_heads, tokens, head_dim] and ``logprobs``
    [tokens, vocabulary] of what comes after each. In the queries are RoPE and, where the model's own scale of q.k is
    another, the factor by which it becomes ``head_dim ** -0.5``."""

    kv: KV
    queries: Tensor
    logprobs: Tensor


_NUMBERS = itertools.count()


def _attend(
    queries: list[Tensor],
    hidden: list[Tensor],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of transformers' interface in plain steps, [1, heads, tokens, head_dim] each; notes the queries. A
    layer does not see what is ``hidden`` of it, bool [kv_heads, past tokens] each, where that is not empty."""
    heads, dim = query.shape[1], query.shape[-1]
    scale = dim**-0.5 if scaling is None else scaling
    queries.append(query[0] * (scale * dim**0.5))
    logits = query @ key.repeat_interleave(heads // key.shape[1], 1).transpose(-1, -2) * scale + attention_mask
    if hidden:
        of_layer = hidden[int(module.layer_idx)]  # type: ignore[arg-type]
        of_heads = of_layer.repeat_interleave(heads // key.shape[1], 0)[None, :, None]
        logits[..., : of_layer.shape[-1]].masked_fill_(of_heads, torch.finfo(torch.float32).min)
    weights, value = logits.softmax(-1), value.repeat_interleave(heads // value.shape[1], 1)
    return (weights @ value).transpose(1, 2).contiguous(), None


class Reference:
    """A text model of transformers: plain attention, fp32, one thread. Calls from several threads take turns.

    ``sees_queries`` is False for models whose attention transformers does not let others replace (GPT-J): it is their
    own then, and queries are zero.
    """

    def __init__(self, model: Path | str, *, sees_queries: bool = True) -> None:
        torch.set_num_threads(1)
        self._turn = threading.Lock()
        self._noted: list[Tensor] = []
        self._hidden: list[Tensor] = []
        self._sees_queries = sees_queries
        attention = f"evicbench-{next(_NUMBERS)}" if sees_queries else "eager"
        if sees_queries:
            AttentionInterface.register(attention, partial(_attend, self._noted, self._hidden))
            AttentionMaskInterface.register(attention, eager_mask)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=attention)
        self._model = loaded.eval()

    @property
    def vocabulary_size(self) -> int:
        return int(self._model.config.vocab_size)

    def prefill(self, token_ids: Sequence[int]) -> Extension:
        return self.extend(None, 0, token_ids)

    def extend(self, past: KV | None, start: int, token_ids: Sequence[int]) -> Extension:
        """Compute ``token_ids`` at positions from ``start`` on, seeing all of ``past`` and, causally, each other."""
        with self._turn, torch.inference_mode():
            torch.set_num_threads(1)
            cache, num_past, num_new = DynamicCache(), 0 if past is None else past.num_tokens, len(token_ids)
            if past is not None:
                for layer, (keys, values) in enumerate(zip(past.keys, past.values, strict=True)):
                    cache.update(keys[None], values[None], layer)
            hidden = torch.ones(num_new, num_past + num_new, dtype=torch.bool).triu(num_past + 1)
            mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
            self._noted.clear()
            self._hidden[:] = [] if past is None or past.hidden is None else list(past.hidden)
            output = self._model(
                input_ids=torch.tensor([list(token_ids)]),
                past_key_values=cache,
                position_ids=torch.arange(start, start + num_new)[None],
                attention_mask=mask[None, None],
            )
            kv = KV(
                torch.stack([layer.keys[0, :, num_past:] for layer in cache.layers]),
                torch.stack([layer.values[0, :, num_past:] for layer in cache.layers]),
            )
            queries = torch.stack(self._noted) if self._sees_queries else torch.zeros_like(kv.keys)
            return Extension(kv, queries, output.logits[0].log_softmax(-1))


def press_scores(press: str, kv: KV, positions: Tensor, queries: Tensor, query_end: int) -> Tensor | None:
    """Scores that a press must have given: fp32 [layers, kv_heads, m], the higher survives; None for random, and for
    geometry, which goes by what was calibrated.

    ``kv``: what the node held, at absolute ``positions`` [layers, kv_heads, m]. ``queries``: of the whole prompt that
    wrote the node, or of more; the last ones before ``query_end`` (an absolute position) are the window.
    """
    match press:
        case "knorm":  # low-norm keys get the most attention (arXiv 2406.11430)
            return -kv.keys.norm(dim=-1)
        case "value_key_ratio":  # PagedEviction, algorithm 1
            return kv.values.norm(dim=-1) / kv.keys.norm(dim=-1)
        case "keydiff":  # arXiv 2504.15364: least like the mean direction
            directions = kv.keys / kv.keys.norm(dim=-1, keepdim=True)
            mean = directions.mean(2, keepdim=True)
            return -(directions * mean).sum(-1) / mean.norm(dim=-1)
        case "streaming":  # arXiv 2309.17453: the latest; sinks are kept in any case
            return positions.to(torch.float32)
        case "snapkv":
            return _snapkv_scores(kv.keys, positions, queries, query_end)
        case "random" | "geometry":
            return None
    raise ValueError(f"no formula for press {press!r}")


def _snapkv_scores(keys: Tensor, positions: Tensor, queries: Tensor, query_end: int) -> Tensor:
    """arXiv 2404.14469, settings of EvolKV: window 32 (kept), max over 7 neighbours, softmax over the node's own."""
    layers, heads, m, dim = keys.shape
    window = torch.arange(max(0, query_end - SNAPKV_WINDOW), query_end)
    q = queries[:, :, window].view(layers, heads, -1, len(window), dim)
    logits = q @ keys[:, :, None].transpose(-1, -2) * dim**-0.5
    is_later = positions[:, :, None, None] > window[:, None]
    attention = logits.masked_fill(is_later, -torch.inf).softmax(-1).nan_to_num(0.0).mean(3)
    in_window = positions >= window[0]
    attention = attention.masked_fill(in_window[:, :, None], 0.0)
    pooled = max_pool1d(attention.view(-1, 1, m), SNAPKV_KERNEL, stride=1, padding=SNAPKV_KERNEL // 2)
    scores = pooled.view(layers, heads, -1, m).mean(2)
    return torch.where(in_window, 2.0 + (positions - window[0]), scores)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node as the server shows it: int64 ``positions`` [layers, kv_heads, m], ``logical`` [m]; None while full."""

    id: int
    start: int
    token_ids: tuple[int, ...]
    form: str
    lineage: str
    num_slots: int
    positions: Tensor | None
    logical: Tensor | None
    origin: int | None
    has_queries: bool

    @classmethod
    def shown(cls, node: Any) -> Self:
        """From the JSON of ``/evicpress/nodes/{id}?positions=true&tokens=true``."""
        values = {name: node[name] for name in ("id", "start", "form", "lineage", "num_slots", "origin", "has_queries")}
        kept = {"positions": node["positions"], "logical": node["logical_indices"]}
        tensors = {name: None if of is None else torch.tensor(of, dtype=torch.int64) for name, of in kept.items()}
        return cls(token_ids=tuple(node["token_ids"]), **values, **tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A prompt with its answer and the KV that belongs to them on the server: exact, or computed on a lossy prefix.

    ``queries`` [layers, q_heads, tokens, head_dim] are of the passes that computed the KV, scaled as in ``Extension``;
    ``prompt_end`` is the length of the prompt.
    """

    token_ids: tuple[int, ...]
    kv: KV
    queries: Tensor
    prompt_end: int

    def first(self, num_tokens: int) -> Text:
        queries = self.queries[:, :, :num_tokens]
        return Text(self.token_ids[:num_tokens], self.kv.first(num_tokens), queries, min(self.prompt_end, num_tokens))


def kept_fraction_of(form: str) -> float:
    return float(form.partition("@")[2].partition("+")[0].partition(":")[0])


def expected_match(path: list[Node], token_ids: Sequence[int], page_size: int) -> int:
    """Number of tokens of a prompt that the cache must give: whole pages, one left to compute, and of a compressed node
    at least half of what its form promises to keep of the part that matches (else the match ends above it). Pieces of
    one compression (the same origin, one below the other) count together."""
    limit = (len(token_ids) - 1) // page_size * page_size
    reached = given = 0  # tokens that match, and those of them that the cache must give
    promised, kept, origin = 0.0, 0.0, None
    for node in path:
        common = common_length(node.token_ids, token_ids[node.start : limit]) // page_size * page_size
        if common == 0:
            break
        if node.origin != origin or node.logical is None:
            if given < reached:
                break
            promised, kept, origin = 0.0, 0.0, node.origin
        reached += common
        if node.logical is None or node.positions is None:
            given = reached
        else:
            kept += float((node.positions >= 0)[:, 0, node.logical < common].sum(-1).float().mean())
            promised += MIN_MATCH_KEPT * kept_fraction_of(node.form) * common
            if 0 < kept >= promised:
                given = reached
        if common < len(node.token_ids):
            break
    return given


def survivors(path: list[Node], kv: KV, num_tokens: int) -> Tensor:
    """Absolute positions, int64 [layers, kv_heads, m], that a match of ``num_tokens`` tokens along ``path`` holds."""
    every = kv.every_position()
    parts = [every[..., :0]]
    for node in path:
        end = min(num_tokens, node.start + len(node.token_ids))
        if end <= node.start:
            break
        if node.positions is None or node.logical is None:
            parts.append(every[..., node.start : end])
        else:
            parts.append(node.positions[..., node.logical < end - node.start])
    return torch.cat(parts, -1)


def selection_problems(
    text: Text, before: Node, after: Node, page_size: int, query_end: int, *, tolerance: float = SCORE_TOLERANCE
) -> Iterator[str]:
    """Faults of the survivors of a node brought to another form, by the reference's own scores."""
    press = after.form.partition("@")[0]
    start, end = before.start, before.start + len(before.token_ids)
    held = text.kv.every_position()[..., start:end] if before.positions is None else before.positions
    now, logical = after.positions, after.logical
    if now is None or logical is None:
        yield "the node is still full"
        return
    wanted = -(-len(before.token_ids) * round(kept_fraction_of(after.form) * 10) // 10)
    wanted = -(-wanted // page_size) * page_size
    counts = (now >= 0).sum(-1)
    if ":" in after.form:
        yield from _count_problems(counts, (held >= 0).sum(-1), after.num_slots, wanted, page_size)
    elif bool((counts != min(held.shape[-1], wanted)).any()) or after.num_slots != min(held.shape[-1], wanted):
        yield f"{tuple(now.shape)} positions and {after.num_slots} slots, expected {wanted}"
        return
    for each in (each[each >= 0] for each in now.flatten(0, 1)):
        if bool((each[1:] <= each[:-1]).any()):
            yield "positions are not ascending"
    marked = torch.zeros((*held.shape[:2], text.kv.num_tokens + 1), dtype=torch.bool).scatter(
        2, torch.where(now < 0, text.kv.num_tokens, now), True
    )
    is_kept = marked.gather(2, held.clamp(min=0)) & (held >= 0)
    if bool((is_kept.sum(-1) != counts).any()):
        yield "positions that the node did not hold"
    is_sink = (held >= 0) & (held < SINKS)
    if bool((is_sink & ~is_kept).any()):
        yield "a sink was dropped"
    if bool((now - start >= (logical // page_size + 1) * page_size).any()):
        yield "a slot is shown before its token"
    scores = _scores_of_held(press, text, held, query_end)
    if scores is None:
        return
    worst_kept = scores.masked_fill(~is_kept | is_sink, torch.inf).amin(-1)
    best_dropped = scores.masked_fill(is_kept | (held < 0), -torch.inf).amax(-1)
    excess = (best_dropped - worst_kept) / (tolerance * worst_kept.abs() + 1e-2 * tolerance)
    if bool((excess > 1.0).any()):
        yield f"a better token was dropped (score {float(best_dropped.max()):.6g}, kept {float(worst_kept.min()):.6g})"


def _count_problems(counts: Tensor, held: Tensor, num_slots: int, mean: int, page_size: int) -> Iterator[str]:
    """Faults of what layers keep, ``counts`` [layers, heads] of ``held``, where they keep different numbers and
    ``mean`` on average."""
    if bool((counts != counts[:, :1]).any()):
        yield f"heads of a layer keep different numbers of tokens: {counts.tolist()}"
    if num_slots != int(counts.max()):
        yield f"{num_slots} slots for a layer with {int(counts.max())} tokens"
    if bool((counts % page_size != 0).any()) or bool((counts > held).any()):
        yield f"layers keep {counts[:, 0].tolist()} tokens of {held[:, 0].tolist()}: expected whole pages of them"
    total, layers = int(counts[:, 0].sum()), len(counts)
    is_piece = bool((held != held[:1]).any())  # of a node that was split, and holds less of some layers
    least = max(page_size, SINKS) * layers
    if not is_piece and not mean * layers - layers * page_size < total <= max(mean * layers, least):
        yield f"layers keep {counts[:, 0].tolist()} tokens: expected {mean} on average"


def _scores_of_held(press: str, text: Text, held: Tensor, query_end: int) -> Tensor | None:
    """``press_scores`` of what each layer holds; 0 where a slot is empty."""
    if bool((held >= 0).all()):
        return press_scores(press, text.kv.gather(held), held, text.queries, query_end)
    scores = torch.zeros(held.shape)
    for layer, of_layer in enumerate(held):
        filled = of_layer[0] >= 0
        if not bool(filled.any()):
            continue  # a split has left nothing of it
        kv = KV(text.kv.keys[layer : layer + 1], text.kv.values[layer : layer + 1])
        positions = of_layer[None, :, filled]
        queries = text.queries[layer : layer + 1]
        own = press_scores(press, kv.gather(positions), positions, queries, query_end)
        if own is None:
            return None
        scores[layer][:, filled] = own[0]
    return scores


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    for count, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return count
    return min(len(left), len(right))


def largest_difference(logprobs: Tensor, top: Any) -> float:
    """Largest |difference| to the server's top log probabilities, given per token as [log probability, id, text]."""
    theirs = torch.tensor([[entry[0] for entry in step] for step in top])
    ids = torch.tensor([[entry[1] for entry in step] for step in top])
    return float((logprobs.gather(1, ids) - theirs).abs().max())


def make_peaky_model(folder: Path, head_dim: int = 32) -> Path:
    """A tiny random Llama (4 layers, GQA 4/2) that hangs on every survivor, in a folder SGLang can load.

    Wide query and key weights make attention peaky, wide embeddings and values make its outcome count: one wrong
    survivor moves the answer by far more than rounding does.
    """
    config = LlamaConfig(
        vocab_size=PEAKY_VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(20240501)
    spreads = {"q_proj": 0.15, "k_proj": 0.15, "v_proj": 0.12, "o_proj": 0.12, "mlp": 0.05}
    spreads |= {"embed": 1.0, "lm_head": 0.25}
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for part, spread in spreads.items():
                if part in name:
                    parameter.normal_(0.0, spread, generator=generator)
    model.save_pretrained(folder)
    return folder


def changed_model(model: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """The same model but for its weights, which ``change`` gets by name."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
