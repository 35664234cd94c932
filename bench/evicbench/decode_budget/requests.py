"""Requests with and without a budget, asked side by side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evicbench.testbed.server import MODEL, Server
from evicbench.testbed.tasks import MIN_CONTEXT_TOKENS, make_context
from evicbench.testbed.vocabulary import load_vocabulary
from sglang_evicpress.decode_budget.scores import SCORES

WINDOW = 8
PLAIN_SCORES = tuple(name for name, score in SCORES.items() if not score.needs_geometry)
"""Scores that need nothing calibrated of the model."""

FAMILIES = ("needle", "multikv", "record", "hop")


def server_flags(page_size: int, num_slots: int, num_running: int, *more: str) -> tuple[str, ...]:
    """Flags of a server of token ids whose cache is exact: only budgets drop anything."""
    return (
        *("--kv-policy", "lru", "--kv-disable-online-profiling", "--skip-tokenizer-init"),
        *("--page-size", str(page_size), "--max-total-tokens", str(num_slots)),
        *("--max-running-requests", str(num_running), *more),
    )


@dataclass(frozen=True, slots=True)
class Request:
    """One request; ``budget`` 0 asks for none, ``interval`` None for the interval of the server. Its answer has
    ``num_new`` tokens, whatever they are."""

    prompt: Sequence[int]
    num_new: int
    budget: int = 0
    method: str = "paged"
    score: str = "value_key_ratio"
    interval: int | None = 128

    @property
    def params(self) -> dict[str, Any]:
        """Fields for ``custom_params``."""
        chosen = {
            "kv_decode_budget": self.budget,
            "kv_decode_method": self.method,
            "kv_decode_score": self.score,
        }
        return chosen if self.interval is None else {**chosen, "kv_decode_interval": self.interval}

    def body(self, rid: str, *, is_traced: bool = True) -> dict[str, Any]:
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": self.num_new, "ignore_eos": True}
        if self.budget:
            sampling["custom_params"] = {**self.params, "kv_decode_trace": is_traced}
        fields = {"return_logprob": True, "logprob_start_len": -1}
        return {"input_ids": list(self.prompt), "sampling_params": sampling, "rid": rid, **fields}


def random_prompt(draw: random.Random, num_tokens: int) -> list[int]:
    """Tokens that both models have."""
    return [draw.randrange(3, 320) for _ in range(num_tokens)]


def context_prompt(draw: random.Random, num_tokens: int) -> list[int]:
    """A context of the testbed, cut at its front, with a question at its end; of exactly so many tokens."""
    context = make_context(draw.choice(FAMILIES), max(num_tokens, MIN_CONTEXT_TOKENS), draw)
    words = context.prompt(draw.choice(context.questions).text)
    return load_vocabulary().encode(words)[-num_tokens:]


def prompt_for(model: Path, draw: random.Random, num_tokens: int) -> list[int]:
    return context_prompt(draw, num_tokens) if model == MODEL else random_prompt(draw, num_tokens)


def ask_all(server: Server, requests: Sequence[Request], *, name: str = "r", is_traced: bool = False) -> list[Any]:
    """All at once; the answers in the order of ``requests``, whose request ids are ``name`` and their number."""
    with ThreadPoolExecutor(len(requests)) as clients:
        bodies = [request.body(f"{name}{index}", is_traced=is_traced) for index, request in enumerate(requests)]
        return list(clients.map(lambda body: server.post("/generate", body), bodies))


def shown_of(server: Server, rid: str) -> dict[str, Any]:
    """Description of the last request of that name, with its trace where it asked for one: ``positions`` of
    the request and of each pass are lists [n] or [L][H][n]."""
    shown: dict[str, Any] = server.get(f"/evicpress/requests?rid={rid}&positions=true")["requests"][0]
    return shown
