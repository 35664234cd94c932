"""Surface of one real server: constrained answers, evictions, moves by hand, floors, refusals."""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from evicbench.moves import nodes_of
from evicbench.pytest_runs import passed
from evicbench.report import Line
from evicbench.testbed.server import GUESSED, Server, ServerError, greedy

HOLD_S = 6.0
PAGE_1_BUDGET = 64
PAGE_1_TOKENS = 300
LEAST_TOKENS_A_PASS = 16


def measure() -> Iterator[Line]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(
            *("--kv-policy", "evicpress", *GUESSED, "--max-total-tokens", "20000", "--kv-host-gb", "0.05"),
            *("--kv-ssd-dir", f"{folder}/ssd", "--kv-ssd-gb", "0.2"),
        ) as server,
    ):
        yield _evict_line(server)
        yield from _hold_lines(server)
        yield _floors_line(server)
        yield _passes_line(server)
        yield _threads_line(server)
        yield _folder_line(server, Path(folder))
    with tempfile.TemporaryDirectory() as made:
        model = make_byte_model(Path(made))
        with Server("--kv-policy", "evicpress", "--max-total-tokens", "8000", model=model) as server:
            yield _grammar_line(server)
    yield passed(
        "--kv-decode-score h2o with too many running requests, which only the scheduler can refuse",
        "the refusal is the last line on stderr, status 2",
        "tests/e2e/test_refusals.py",
    )


def make_byte_model(folder: Path) -> Path:
    """A tiny random Llama that reads and writes bytes: grammars need letters to put together."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(("<s>", "</s>", *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _grammar_line(server: Server) -> Line:
    """Constrained answers on the CPU, where SGLang's default backend would end the server."""
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    good, problems = 0, []
    for constraint in ({"regex": "(yes|no)"}, {"json_schema": schema}):
        body = {"text": "is it?", "sampling_params": {"max_new_tokens": 24, "temperature": 0, **constraint}}
        try:
            status, answer = server.request("POST", "/generate", body)
        except ServerError as error:
            problems.append(str(error).splitlines()[0])
            continue
        text = answer["text"].strip() if status == 200 else ""
        is_good = re.fullmatch("(yes|no)", text) if "regex" in constraint else text.startswith("{")
        good += bool(is_good)
        if not is_good:
            problems.append(f"{next(iter(constraint))}: {status} {text or answer!r:.200}")
    alive = server.is_alive() and server.request("GET", "/health")[0] == 200
    return Line(
        "regex and JSON-schema requests on a CPU, no --grammar-backend given",
        "answers that match, and the server lives",
        f"{good} of 2 match, server {'lives' if alive else 'is dead'}; {'; '.join(problems) or 'no problem'}",
        good == 2 and alive,
    )


def _evict_line(server: Server) -> Line:
    rng = random.Random("evict")
    for _ in range(4):
        server.generate([rng.randrange(5, 200) for _ in range(600)], 2)
    free = server.get("/evicpress/stats")["free_slots"]
    freed = server.post("/evicpress/evict", {"num_slots": 500})["freed_slots"]
    return Line(
        f"POST /evicpress/evict of 500 slots while {free} are free",
        "at least 500 freed",
        f"{freed} freed",
        freed >= 500,
    )


def _hold_lines(server: Server) -> Iterator[Line]:
    """A node moved by hand stays while it is held, on an idle server, and a use of it ends that."""
    rng = random.Random("hold")
    server.generate([rng.randrange(5, 200) for _ in range(1000)], 1)
    leaves = [node for node in nodes_of(server) if not node["children"]]
    node = max(leaves, key=lambda each: (each["tier"] == "gpu") * each["num_tokens"])
    server.post(f"/evicpress/nodes/{node['id']}/demote", {"tier": "host", "hold_seconds": HOLD_S})
    begin, seen = time.monotonic(), []
    while time.monotonic() - begin < HOLD_S - 1.0:
        time.sleep(0.5)
        seen.append(_tier_of(server, node["id"]))
    yield Line(
        f"a node demoted by hand on an idle server, looked at for {HOLD_S - 1.0:g} s",
        "where it was put, every time",
        f"{seen.count('host')} of {len(seen)} times on host",
        seen.count("host") == len(seen),
    )
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline and _tier_of(server, node["id"]) == "host":
        time.sleep(0.5)
    took_s = time.monotonic() - begin
    is_back = _tier_of(server, node["id"]) == "gpu"
    yield Line(
        f"the same node once {HOLD_S:g} s are over",
        "promoted again",
        f"{'on the GPU' if is_back else 'not promoted'} after {took_s:.1f} s",
        is_back,
    )


def _floors_line(server: Server) -> Line:
    asked: tuple[dict[str, Any], ...] = (
        {"kv_decode_budget": 64, "kv_decode_interval": 1},
        {"kv_decode_budget": 64, "kv_decode_interval": -3},
        {"kv_decode_budget": "many"},
        {"kv_decode_budget": 100_000, "kv_decode_score": "r_kv", "kv_decode_method": "compact"},
    )
    refused = []
    for params in asked:
        body = {"text": "the", "sampling_params": {"max_new_tokens": 2, "custom_params": params}}
        status, answer = server.request("POST", "/generate", body)
        refused.append(status == 400 and "kv_decode" in str(answer))
    return Line(
        "custom_params of a client that would cost a pass per token, or are no numbers",
        "each refused with 400 and the name of the field",
        f"{sum(refused)} of {len(refused)} refused",
        all(refused),
    )


def _passes_line(server: Server) -> Line:
    """Decode budgets with pages of one token, SGLang's default on a GPU."""
    before = server.get("/evicpress/requests")["totals"]
    rng = random.Random("passes")
    body = greedy([rng.randrange(5, 200) for _ in range(80)], PAGE_1_TOKENS)
    body["sampling_params"]["custom_params"] = {"kv_decode_budget": PAGE_1_BUDGET, "kv_decode_method": "paged"}
    server.post("/generate", body)
    after = server.get("/evicpress/requests")["totals"]
    passes, evicted = after["passes"] - before["passes"], after["tokens_evicted"] - before["tokens_evicted"]
    most = PAGE_1_TOKENS / LEAST_TOKENS_A_PASS + 4
    return Line(
        f"paged budget of {PAGE_1_BUDGET} with pages of 1: passes for {PAGE_1_TOKENS} tokens",
        f"at most {most:.0f}, one per {LEAST_TOKENS_A_PASS} tokens and what the prompt is over",
        f"{passes} passes, {evicted} tokens dropped",
        0 < passes <= most and evicted >= PAGE_1_TOKENS - PAGE_1_BUDGET,
    )


def _threads_line(server: Server) -> Line:
    threads = server.get("/evicpress/stats")["threads"]
    running = [each for each in threads if each["state"] in ("new", "running") and each["num_failures"] == 0]
    return Line(
        "threads of ours in /evicpress/stats",
        "all running or not needed yet, none ever failed",
        f"{len(running)} of {len(threads)}: {', '.join(each['name'] for each in threads)}",
        bool(threads) and len(running) == len(threads),
    )


def _folder_line(server: Server, folder: Path) -> Line:
    server.post("/evicpress/tiers/ssd/detach", {})
    outside = Path(tempfile.mkdtemp())
    refused = []
    for target in (outside / "kv", Path("/etc/kv"), folder / ".." / "kv", Path("/proc/self/cwd/kv")):
        status, answer = server.request("POST", "/evicpress/tiers/ssd", {"dir": str(target), "gb": 0.1})
        refused.append(400 <= status < 500 and bool(answer["error"]["reason"]) and not target.exists())
    status, _ = server.request("POST", "/evicpress/tiers/ssd", {"dir": str(folder / "ssd"), "gb": 0.1})
    outside.rmdir()
    return Line(
        "POST /evicpress/tiers/ssd of folders that no flag allows",
        "refused and not made; the one of --kv-ssd-dir is taken",
        f"{sum(refused)} of {len(refused)} refused; the allowed one answered {status}",
        all(refused) and status == 200,
    )


def _tier_of(server: Server, node_id: int) -> str:
    status, node = server.request("GET", f"/evicpress/nodes/{node_id}")
    return str(node["tier"]) if status == 200 else "gone"
