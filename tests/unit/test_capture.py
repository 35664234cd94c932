"""The queries kept for presses that look at attention."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_evicpress.patches.capture import MAX_HELD_REQUESTS, QueryCapture

LAYERS, HEADS, DIM, WINDOW = 2, 4, 8, 6


def queries(count: int, layer: int, first: int) -> torch.Tensor:
    """Each query holds its position and layer, so that one sees which were kept."""
    positions = torch.arange(first, first + count, dtype=torch.float32)
    return (positions[:, None, None] * 10 + layer).expand(count, HEADS, DIM).reshape(count, HEADS * DIM)


def prefill(capture: QueryCapture, parts: dict[str, tuple[int, int]]) -> None:
    """One pass over several requests: request id -> (tokens before, new tokens)."""
    batch = SimpleNamespace(
        rids=list(parts),
        extend_seq_lens_cpu=[new for _, new in parts.values()],
        seq_lens_cpu=torch.tensor([before + new for before, new in parts.values()]),
    )
    for layer in range(LAYERS):
        q = torch.cat([queries(new, layer, before) for before, new in parts.values()])
        capture.observe(q, SimpleNamespace(layer_id=layer, tp_q_head_num=HEADS, qk_head_dim=DIM), batch)


def kept(capture: QueryCapture, rid: str, start: int = 0) -> list[int]:
    window = capture.window_of(rid, start)
    assert window is not None
    assert window.queries.shape == (LAYERS, len(window.positions), HEADS, DIM)
    for layer in range(LAYERS):
        assert window.queries[layer, :, 0, 0].tolist() == [
            position * 10 + layer for position in window.positions.tolist()
        ]
    return window.positions.tolist()


def test_the_last_queries_of_each_request_are_kept() -> None:
    capture = QueryCapture(WINDOW, LAYERS, 0)
    prefill(capture, {"a": (0, 20), "b": (5, 3)})
    assert kept(capture, "a") == [14, 15, 16, 17, 18, 19]
    assert kept(capture, "b") == [5, 6, 7]


def test_chunks_of_a_prompt_add_up() -> None:
    capture = QueryCapture(WINDOW, LAYERS, 0)
    prefill(capture, {"a": (0, 4)})
    prefill(capture, {"a": (4, 4)})
    assert kept(capture, "a") == [2, 3, 4, 5, 6, 7]
    prefill(capture, {"a": (8, 1)})
    assert kept(capture, "a") == [3, 4, 5, 6, 7, 8]


def test_a_prompt_that_starts_over_forgets_the_earlier_pass() -> None:
    capture = QueryCapture(WINDOW, LAYERS, 0)
    prefill(capture, {"a": (0, 9)})
    prefill(capture, {"a": (2, 3)})
    assert kept(capture, "a") == [2, 3, 4]


def test_queries_from_before_a_node_are_not_its_window() -> None:
    capture = QueryCapture(WINDOW, LAYERS, 0)
    prefill(capture, {"a": (0, 9)})
    assert capture.window_of("a", 9) is None
    assert kept(capture, "a", 8) == [3, 4, 5, 6, 7, 8]


def test_forgotten_unknown_and_old_requests_have_no_window() -> None:
    capture = QueryCapture(WINDOW, LAYERS, 0)
    for index in range(MAX_HELD_REQUESTS + 1):
        prefill(capture, {f"r{index}": (0, 2)})
    capture.forget("r5")
    assert [capture.window_of(rid, 0) for rid in ("r0", "r5", "never")] == [None, None, None]
    assert kept(capture, "r6") == [0, 1]
