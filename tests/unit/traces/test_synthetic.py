"""The made-up traces: the same from the same name, and of the shape they are named for."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.traces.written import write_trace

from sglang_evicpress.traces import Trace, read_trace

KINDS = ("chat", "agent", "rag")
CODE = """
import hashlib, sys
from sglang_evicpress.traces import read_trace
print(hashlib.sha256(repr(read_trace(sys.argv[1]).requests).encode()).hexdigest())
"""


def reuse(trace: Trace) -> float:
    """Share of the prompts' tokens that an infinite cache serves."""
    in_blocks = sum(len(request.blocks) for request in trace.requests) * trace.block_tokens
    return (in_blocks - trace.working_set_tokens) / sum(request.num_tokens for request in trace.requests)


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind: str) -> None:
    trace = read_trace(f"synthetic:{kind}:3")
    assert trace == read_trace(f"synthetic:{kind}:3")
    assert trace.requests != read_trace(f"synthetic:{kind}:4").requests
    assert read_trace(f"synthetic:{kind}") == read_trace(f"synthetic:{kind}:0")
    assert trace.name == f"synthetic:{kind}:3"


def test_another_process_makes_the_same() -> None:
    here = hashlib.sha256(repr(read_trace("synthetic:chat:1").requests).encode()).hexdigest()
    there = subprocess.run(
        [sys.executable, "-c", CODE, "synthetic:chat:1"],
        env={**os.environ, "PYTHONHASHSEED": "11"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert there.strip() == here


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_keeps_the_promise_of_a_trace(kind: str, seed: int) -> None:
    trace = read_trace(f"synthetic:{kind}:{seed}")
    arrivals = [request.arrival_s for request in trace.requests]
    assert 2000 <= len(arrivals) <= 6000
    assert arrivals == sorted(arrivals) and arrivals[0] >= 0
    assert all(len(r.blocks) == r.num_tokens // trace.block_tokens for r in trace.requests)
    assert all(len(set(r.blocks)) == len(r.blocks) and r.output_tokens >= 1 for r in trace.requests)
    # Chained like a real trace: a block has one place and one block before it.
    before: dict[int, int] = {}
    for request in trace.requests:
        for parent, block in zip((-1, *request.blocks), request.blocks, strict=False):
            assert before.setdefault(block, parent) == parent


def test_the_shapes_differ_as_the_real_ones_do() -> None:
    chat, agent, rag = (read_trace(f"synthetic:{kind}") for kind in KINDS)
    assert (chat.block_tokens, agent.block_tokens, rag.block_tokens) == (512, 64, 64)
    assert 0.3 < reuse(chat) < 0.6
    assert reuse(agent) > 0.9
    assert reuse(rag) > 0.8
    longest = max(agent.requests, key=lambda request: request.num_tokens)
    assert longest.num_tokens > 100_000


def test_limit_keeps_the_earliest() -> None:
    whole = read_trace("synthetic:rag:2")
    assert read_trace("synthetic:rag:2", limit=5).requests == whole.requests[:5]
    assert read_trace("synthetic:rag:2", limit=10**9) == whole


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("synthetic:", "unknown kind '', expected .* one of chat, agent, rag"),
        ("synthetic:gossip:1", "unknown kind 'gossip'"),
        ("synthetic:chat:", "seed '', expected an integer of at least 0"),
        ("synthetic:chat:-1", "seed '-1'"),
        ("synthetic:chat:1:2", "seed '1:2'"),
        ("synthetic:chat:²", "seed '²'"),
    ],
)
def test_a_wrong_name_is_explained(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_trace(source)


def test_can_be_written_and_read_back(tmp_path: Path) -> None:
    trace = read_trace("synthetic:chat:5", limit=50)
    write_trace(trace, tmp_path / "chat.jsonl")
    assert read_trace(str(tmp_path / "chat.jsonl")) == trace
