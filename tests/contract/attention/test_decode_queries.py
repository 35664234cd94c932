"""The ring of last queries: what prompts, chunks, mixed batches and decode steps leave in it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_evicpress.patches.attention.query_ring import QueryRing

pytestmark = pytest.mark.sglang

LAYERS, ROWS, WINDOW, HEADS, DIM = 2, 5, 4, 3, 2


@pytest.fixture
def ring() -> QueryRing:
    return QueryRing(torch.zeros(LAYERS, ROWS, WINDOW, HEADS, DIM), first_layer=10)


def query(row: int, position: int, layer: int) -> torch.Tensor:
    """One that says whose it is."""
    return (torch.arange(HEADS * DIM) + 100.0 * position + 10_000.0 * row + 100_000.0 * layer).view(HEADS, DIM)


def extend(ring: QueryRing, *parts: tuple[int, int, int]) -> None:
    """A batch of (row, first position, length)."""
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor([row for row, _, _ in parts]),
        extend_prefix_lens_cpu=[begin for _, begin, _ in parts],
        extend_seq_lens_cpu=[length for _, _, length in parts],
    )
    for layer in range(LAYERS):
        queries = [query(row, at, layer) for row, begin, length in parts for at in range(begin, begin + length)]
        ring.observe_extend(torch.stack(queries).flatten(1), SimpleNamespace(layer_id=10 + layer), batch)


def decode(ring: QueryRing, *rows: tuple[int, int]) -> None:
    """A step of (row, position of its token)."""
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor([row for row, _ in rows]), seq_lens=torch.tensor([at + 1 for _, at in rows])
    )
    for layer in range(LAYERS):
        queries = torch.stack([query(row, at, layer) for row, at in rows])
        ring.observe_decode(queries.flatten(1), SimpleNamespace(layer_id=10 + layer), batch)


def check(ring: QueryRing, row: int, num_computed: int, num_tokens: int) -> None:
    queries, positions = ring.windows_of([row], min(WINDOW, num_computed), [num_tokens])
    expected = list(range(num_tokens - min(WINDOW, num_computed), num_tokens))
    assert positions[0].tolist() == expected
    for layer in range(LAYERS):
        assert torch.equal(queries[layer, 0], torch.stack([query(row, at, layer) for at in expected]))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
def test_a_prompt_leaves_its_last_queries(ring: QueryRing, length: int) -> None:
    extend(ring, (1, 0, length), (3, 6, 2))
    check(ring, 1, length, length)
    check(ring, 3, 2, 8)


def test_what_another_request_left_in_the_row_is_not_shown(ring: QueryRing) -> None:
    extend(ring, (2, 0, 9))
    extend(ring, (2, 20, 1))  # all but its last token were cached
    check(ring, 2, 1, 21)


@pytest.mark.parametrize("seed", range(5))
def test_chunks_mixed_batches_and_steps_leave_the_last_queries_of_every_row(ring: QueryRing, seed: int) -> None:
    numbers = random.Random(seed)
    first = {row: numbers.randrange(0, 12) for row in range(1, ROWS)}
    length = dict(first)
    for _ in range(30):
        some = numbers.sample(sorted(length), numbers.randrange(1, ROWS))
        if numbers.random() < 0.5:
            decode(ring, *((row, length[row]) for row in some))
            grown: dict[int, Any] = dict.fromkeys(some, 1)
        else:
            grown = {row: numbers.choice([1, 1, 2, 7]) for row in some}
            extend(ring, *((row, length[row], grown[row]) for row in some))
        for row in some:
            length[row] += grown[row]
            check(ring, row, length[row] - first[row], length[row])


def test_while_no_pass_is_near_steps_leave_nothing(ring: QueryRing) -> None:
    extend(ring, (1, 0, 5))
    ring.is_needed = False
    decode(ring, (1, 5))
    check(ring, 1, 5, 5)
    ring.is_needed = True
    for at in range(5, 5 + WINDOW):
        decode(ring, (1, at))
    check(ring, 1, 5 + WINDOW, 5 + WINDOW)


def test_a_graph_that_is_made_meanwhile_keeps_queries_all_the_same(
    ring: QueryRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replayed when they are needed again, and would leave out what was left out as it was recorded."""
    monkeypatch.setattr(ring, "_is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    extend(ring, (1, 0, 5))
    ring.is_needed = False
    decode(ring, (1, 5))
    check(ring, 1, 6, 6)
