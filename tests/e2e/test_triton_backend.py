"""The real server on SGLang's own Triton attention, interpreted on the CPU: its kernels read compact rows unchanged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from evicbench.correctness.reference import KV, Reference
from evicbench.testbed.server import ADMIN_KEY, GUESSED, MODEL, Server

from sglang_evicpress.introspect.keyed_hash import key_of, keyed_hash

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.sglang]

CONTEXT, SUFFIX, ANSWER = 96, 10, 6
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    arguments = (
        *("--attention-backend", "triton", "--chunked-prefill-size", "64"),
        *("--kv-policy", "evicpress", *GUESSED, "--kv-min-compress-tokens", "16", "--max-total-tokens", "4096"),
        *("--max-running-requests", "8", "--kv-forms", "keydiff@0.5,keydiff@0.4:pyramid"),
    )
    with Server(*arguments, env={"TRITON_INTERPRET": "1"}) as server:
        yield server


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(MODEL)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A cached context, in a namespace of its own, of which ``used`` tokens come before a suffix nobody has seen."""

    name: str
    context: list[int]
    used: int
    suffix: list[int]

    @property
    def token_ids(self) -> list[int]:
        return self.context[: self.used] + self.suffix


def make_prompt(name: str, used: int = CONTEXT) -> Prompt:
    draw = random.Random(name)
    words = [draw.randrange(16, 300) for _ in range(CONTEXT + SUFFIX)]
    suffix = words[CONTEXT:]
    if used < CONTEXT and suffix[0] == words[used]:
        suffix[0] += 1
    return Prompt(name, words[:CONTEXT], used, suffix)


def path_of(server: Server, name: str) -> list[Any]:
    """The nodes of a namespace that holds one path, from the root on, with their survivors."""
    shown = keyed_hash(name.encode(), key_of(ADMIN_KEY), 8)
    ids = [node["id"] for node in server.get("/evicpress/tree")["nodes"] if node["namespace"] == shown]
    nodes = [server.get(f"/evicpress/nodes/{node_id}?positions=true") for node_id in ids]
    return sorted(nodes, key=lambda node: node["start"])


def held(path: list[Any], kv: KV, num_tokens: int) -> torch.Tensor:
    """Positions [layers, kv_heads, m] that whoever matches ``num_tokens`` tokens of a path gets."""
    every, parts = kv.every_position(), []
    for node in path:
        start, end = node["start"], min(num_tokens, node["start"] + node["num_tokens"])
        if node["positions"] is None:
            parts.append(every[..., start:end])
        else:
            taken = torch.tensor(node["logical_indices"]) < end - start
            parts.append(torch.tensor(node["positions"])[..., taken])
    return torch.cat(parts, 2)


def answer_logprobs(reference: Reference, past: KV, start: int, prompt: Prompt, output: list[int]) -> torch.Tensor:
    """Log probabilities [answer, vocabulary] of the answer, after ``past`` (what came before ``start``)."""
    rest = prompt.token_ids[start:] + output[:-1]
    return reference.extend(past, start, rest).logprobs[-len(output) :]


def test_a_batch_over_compressed_partial_and_exact_prefixes_equals_transformers(
    server: Server, reference: Reference
) -> None:
    page_size = server.get("/evicpress/stats")["page_size"]
    assert "attention over compact rows on TritonAttnBackend" in server.log_tail(10_000)
    compressed = [make_prompt("whole"), make_prompt("part", used=60)]
    uneven = [make_prompt("uneven whole"), make_prompt("uneven part", used=60)]  # layers keep different numbers
    prompts = [*compressed, *uneven, make_prompt("exact"), make_prompt("unknown", used=0)]
    paths: dict[str, list[Any]] = {}
    for prompt in prompts[:-1]:
        server.generate(prompt.context, 1, extra_key=prompt.name)
        for node in path_of(server, prompt.name) if prompt in [*compressed, *uneven] else []:
            if node["num_tokens"] >= 2 * page_size:
                form = "keydiff@0.5" if prompt in compressed else "keydiff@0.4:pyramid"
                server.post(f"/evicpress/nodes/{node['id']}/compress", {"form": form})
        paths[prompt.name] = path_of(server, prompt.name)
    assert sum(node["positions"] is not None for prompt in compressed for node in paths[prompt.name]) >= 2
    counts = [node["layer_slots"] for prompt in uneven for node in paths[prompt.name] if node["layer_slots"]]
    assert len(counts) >= 2 and all(len(set(each)) == 3 for each in counts)

    answers = server.post(
        "/generate",
        {
            "input_ids": [prompt.token_ids for prompt in prompts],
            "extra_key": [prompt.name for prompt in prompts],
            "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True},
            "return_logprob": True,
        },
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        output, cached = answer["output_ids"], answer["meta_info"]["cached_tokens"]
        assert cached == prompt.used // page_size * page_size, prompt.name
        kv = reference.prefill(prompt.context).kv
        positions = held(paths.get(prompt.name, []), kv, cached) if cached else kv.every_position()[..., :0]
        assert (positions < cached).all()
        wanted = answer_logprobs(reference, kv.gather(positions), cached, prompt, output)
        assert output == wanted.argmax(-1).tolist(), prompt.name
        got = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        chosen = torch.tensor(output)[:, None]
        assert (got - wanted.gather(1, chosen)[:, 0]).abs().max() < TOLERANCE, prompt.name
        if prompt in [*compressed, *uneven]:  # control: over the whole cache the answer would be another
            assert positions.shape[2] < cached
            full = answer_logprobs(reference, kv.first(cached), cached, prompt, output)
            assert (got - full.gather(1, chosen)[:, 0]).abs().max() > 100 * TOLERANCE, prompt.name
    assert server.post("/evicpress/check")["violations"] == []
