"""Answers given under a budget against those of transformers over the survivors that the server names.

The server says when it dropped something and which positions stayed. Keys, values and queries are the reference's own,
gathered in the order of their positions and never moved; and what stayed must be a best choice by its own scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evicbench.correctness.findings import Finding
from evicbench.correctness.reference import KV, SINKS, Reference, press_scores
from evicbench.decode_budget.requests import WINDOW, Request

TIE = 1e-4  # two candidates closer than this are one to fp32
NEWEST = 1e6  # above every sum of attention: h2o keeps the newest tokens in any case


class MismatchError(ValueError):
    """The server says that it did what no budget may do."""


def expected_scores(
    request: Request, kv: KV, held: Tensor, queries: Tensor, end: int, num_cached: int
) -> Tensor | None:
    """By the papers' formulas, fp32 like ``held`` [layers, kv_heads, m]; None where only the product's own ranks tell.

    ``queries`` [layers, q_heads, w, head_dim] are the last before ``end``, of which a server has those that it computed
    itself.
    """
    if request.score == "r_kv":
        return None
    if request.score not in ("tova", "h2o"):
        return press_scores(request.score, kv, held, queries, end)
    size = 1 if request.score == "tova" else min(WINDOW, queries.shape[2], end - num_cached)
    last = queries[:, :, -size:].unflatten(1, (kv.keys.shape[1], -1))
    logits = last @ kv.keys[:, :, None].transpose(-1, -2) * kv.keys.shape[-1] ** -0.5
    is_later = held[:, :, None, None] > torch.arange(end - size, end)[:, None]
    scores = logits.masked_fill(is_later, -torch.inf).softmax(-1).mean(2).sum(2)
    return scores if request.score == "tova" else torch.where(held >= end - WINDOW, NEWEST + held, scores)


class Generation:
    """One request, computed by transformers along the tokens that the server gave."""

    def __init__(
        self, reference: Reference, request: Request, output: Sequence[int], page_size: int, num_cached: int
    ) -> None:
        self._reference, self._ask, self._block, self._num_cached = reference, request, max(16, page_size), num_cached
        self._tokens = [*request.prompt, *output]
        self._kv: KV | None = None
        self._positions = self._queries = torch.empty(0)
        self._num_computed = 0
        self._is_spoiled = False
        self._rows: dict[int, Tensor] = {}

    def run(self, passes: Sequence[Any], retracted_at: Sequence[int] = (), *, spoil: bool = False) -> Tensor:
        """Log probabilities [new tokens, vocabulary] of what comes at each place of the answer.

        ``passes`` as the server traced them; ``retracted_at``: the lengths at which all was computed anew. ``spoil``
        puts, in the first pass that drops tokens, one dropped token of every head in the place of a survivor.
        Raises MismatchError.
        """
        self._is_spoiled = not spoil
        left, num_prompt, end = list(passes), len(self._ask.prompt), len(self._tokens)
        self._compute(num_prompt)
        for num_tokens in [*retracted_at, end]:
            while left and self._num_computed <= left[0]["logical_tokens"] < num_tokens - 1:
                self._compute(left[0]["logical_tokens"])
                self._drop(left.pop(0))
            self._compute(num_tokens - 1)
            if num_tokens < end:
                self._compute_anew(num_tokens, left)
        # With overlap a step is launched before it is known that the answer is complete.
        if any(record["logical_tokens"] != end - 1 for record in left):
            raise MismatchError(f"a pass at {left[0]['logical_tokens']} tokens that met no step")
        return torch.stack([self._rows[index] for index in range(num_prompt, end)])

    def _compute_anew(self, num_tokens: int, left: list[Any]) -> None:
        """Prompt and answer at once, or in pieces where the server has dropped something in between."""
        self._kv, self._num_computed = None, 0
        while left and self._num_computed < left[0]["logical_tokens"] < num_tokens:
            self._compute(left[0]["logical_tokens"], is_known=True)
            self._drop(left.pop(0))
        self._compute(num_tokens, is_known=True)

    def _compute(self, end: int, *, is_known: bool = False) -> None:
        """``is_known``: the server had its tokens already, so only what follows the last is new."""
        begin = self._num_computed
        if end <= begin:
            return
        out = self._reference.extend(self._kv, begin, self._tokens[begin:end])
        layers, heads = out.kv.keys.shape[:2]
        here = torch.arange(begin, end).expand(layers, heads, -1)
        if self._kv is None:
            self._kv, self._positions, self._queries = out.kv, here, out.queries[:, :, -WINDOW:]
        else:
            self._kv = self._kv.then(out.kv)
            self._positions = torch.cat([self._positions, here], -1)
            self._queries = torch.cat([self._queries, out.queries], 2)[:, :, -WINDOW:]
        self._num_computed = end
        for index, row in enumerate(out.logprobs, begin + 1):
            if not is_known or index == end:
                self._rows[index] = row

    def _drop(self, record: Any) -> None:
        held, kv = self._positions, self._kv
        if kv is None:
            raise MismatchError("a pass before anything was computed")
        stay = torch.tensor(record["positions"]).expand(*held.shape[:2], -1).sort(-1).values.contiguous()
        kept = torch.searchsorted(held.contiguous(), stay).clamp(max=held.shape[-1] - 1)
        if not torch.equal(held.gather(2, kept), stay):
            raise MismatchError(f"at {record['logical_tokens']} tokens: positions that the request did not hold")
        is_kept = torch.zeros_like(held, dtype=torch.bool).scatter_(2, kept, True)
        end = record["logical_tokens"]
        scores = expected_scores(self._ask, kv, held, self._queries, end, self._num_cached)
        if scores is not None:
            problem = (self._page_problem if record["kind"] == "page" else _token_problem)(scores, is_kept, held)
            if problem is not None:
                raise MismatchError(f"at {end} tokens: {problem}")
        if not self._is_spoiled and record["kind"] != "page":
            kept, self._is_spoiled = _swapped(kept, is_kept), True
        self._kv, self._positions = kv.gather(kept), held.gather(2, kept)

    def _page_problem(self, scores: Tensor, is_kept: Tensor, _: Tensor) -> str | None:
        means = scores.mean((0, 1)).view(-1, self._block).mean(1)
        gone = (~is_kept[0, 0].view(-1, self._block)).all(1).nonzero().flatten().tolist()
        if len(gone) != 1 or not 0 < gone[0] < len(means) - 1:
            return f"pages {gone} of {len(means)} were freed, expected one that is neither the first nor the newest"
        lowest = means[1:-1].min()
        if means[gone[0]] > lowest + 1e-5 * lowest.abs():
            return "another page had a lower score"
        return None


def _token_problem(scores: Tensor, is_kept: Tensor, held: Tensor) -> str | None:
    scores = scores.masked_fill(held < SINKS, torch.inf)
    worst = scores.masked_fill(~is_kept, torch.inf).amin(-1)
    best = scores.masked_fill(is_kept, -torch.inf).amax(-1)
    # Equal tokens tie exactly in the first layer, whose keys differ by their rotation alone.
    return None if bool((worst >= best - 1e-5 * best.abs() - 1e-6).all()) else "a better token was dropped"


def _swapped(kept: Tensor, is_kept: Tensor) -> Tensor:
    """In every head the middle survivor out, and the dropped token next to the middle in."""
    swapped, middle = kept.clone(), kept.shape[-1] // 2
    for layer in range(kept.shape[0]):
        for head in range(kept.shape[1]):
            dropped = (~is_kept[layer, head]).nonzero().flatten()
            if dropped.numel():
                nearest = (dropped - kept[layer, head, middle]).abs().argmin()
                swapped[layer, head, middle] = dropped[nearest]
    return swapped.sort(-1).values


def check_answer(
    reference: Reference,
    request: Request,
    answer: Any,
    shown: Any,
    page_size: int,
    *,
    name: str = "",
    spoil: bool = False,
    is_full: bool = False,
) -> Finding:
    """``answer``: the server's, with the log probabilities of its tokens. ``shown``: what it tells of the request, None
    for one without a budget. ``is_full`` ignores the passes, as if nothing had been dropped."""
    output, meta = answer["output_ids"], answer["meta_info"]
    passes, retracted = ([], []) if shown is None or is_full else (shown["trace"], shown["retracted_at"])
    name = f"{name} {request.method} {request.score} {request.budget}"
    if len(output) != request.num_new:
        return Finding(name, (f"{len(output)} tokens came back, expected {request.num_new}",))
    try:
        generation = Generation(reference, request, output, page_size, meta["cached_tokens"])
        rows = generation.run(passes, retracted, spoil=spoil)
    except MismatchError as error:
        return Finding(name, (str(error),))
    mine = rows[torch.arange(len(output)), output]
    told = meta["output_token_logprobs"]
    # SGLang loses the first one of a request that it sends back before its first token was looked at.
    if len(told) != len(output) - (1 if meta["num_retractions"] and len(told) < len(output) else 0):
        return Finding(name, (f"{len(told)} log probabilities for {len(output)} tokens",))
    theirs = torch.tensor([entry[0] for entry in told])
    differs = rows.argmax(-1) != torch.tensor(output)
    is_tie = differs & (rows.max(-1).values - mine < TIE)
    difference = float((mine[-len(told) :] - theirs).abs().max())
    return Finding(name, (), difference, len(output), int((differs & ~is_tie).sum()), int(is_tie.sum()))
