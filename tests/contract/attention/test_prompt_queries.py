"""The queries kept for presses that look at attention."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.patches.attention import prompt_queries as prompt_queries_module
from sglang_evicpress.patches.attention.prompt_queries import MAX_HELD_REQUESTS, PromptQueries

LAYERS, HEADS, DIM, WINDOW = 2, 4, 8, 6


def queries(count: int, layer: int, first: int) -> torch.Tensor:
    """Each query holds its position and layer, so that one sees which were kept."""
    positions = torch.arange(first, first + count, dtype=torch.float32)
    return (positions[:, None, None] * 10 + layer).expand(count, HEADS, DIM).reshape(count, HEADS * DIM)


def prefill(prompt_queries: PromptQueries, parts: dict[str, tuple[int, int]], decoding: tuple[str, ...] = ()) -> None:
    """One pass over several requests: request id -> (tokens before, new tokens)."""
    reqs = [SimpleNamespace(rid=rid) for rid in parts]
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        reqs=reqs,
        decoding_reqs=[req for req in reqs if req.rid in decoding],
        extend_lens=[new for _, new in parts.values()],
        seq_lens_cpu=torch.tensor([before + new for before, new in parts.values()]),
    )
    prompt_queries.begin_batch(batch)
    for layer in range(LAYERS):
        q = torch.cat([queries(new, layer, before) for before, new in parts.values()])
        prompt_queries.observe(q, SimpleNamespace(layer_id=layer, tp_q_head_num=HEADS, qk_head_dim=DIM))


def kept(prompt_queries: PromptQueries, rid: str, start: int = 0) -> list[int]:
    window = prompt_queries.window_of(rid, start)
    assert window.queries.shape == (LAYERS, len(window.positions), HEADS, DIM)
    for layer in range(LAYERS):
        assert window.queries[layer, :, 0, 0].tolist() == [
            position * 10 + layer for position in window.positions.tolist()
        ]
    return window.positions.tolist()


def test_the_last_queries_of_each_request_are_kept() -> None:
    prompt_queries = PromptQueries(WINDOW, LAYERS, 0, 1 << 20)
    prefill(prompt_queries, {"a": (0, 20), "b": (5, 3)})
    assert kept(prompt_queries, "a") == [14, 15, 16, 17, 18, 19]
    assert kept(prompt_queries, "b") == [5, 6, 7]


def test_chunks_of_a_prompt_add_up() -> None:
    prompt_queries = PromptQueries(WINDOW, LAYERS, 0, 1 << 20)
    prefill(prompt_queries, {"a": (0, 4)})
    prefill(prompt_queries, {"a": (4, 4)})
    assert kept(prompt_queries, "a") == [2, 3, 4, 5, 6, 7]
    prefill(prompt_queries, {"a": (8, 1)})
    assert kept(prompt_queries, "a") == [3, 4, 5, 6, 7, 8]


def test_a_prompt_that_starts_over_forgets_the_earlier_pass() -> None:
    prompt_queries = PromptQueries(WINDOW, LAYERS, 0, 1 << 20)
    prefill(prompt_queries, {"a": (0, 9)})
    prefill(prompt_queries, {"a": (2, 3)})
    assert kept(prompt_queries, "a") == [2, 3, 4]


def test_queries_from_before_a_node_are_not_its_window() -> None:
    prompt_queries = PromptQueries(WINDOW, LAYERS, 0, 1 << 20)
    prefill(prompt_queries, {"a": (0, 9)})
    assert prompt_queries.window_of("a", 9) is None
    assert kept(prompt_queries, "a", 8) == [3, 4, 5, 6, 7, 8]


def test_forgotten_unknown_and_old_requests_have_no_window() -> None:
    prompt_queries = PromptQueries(WINDOW, LAYERS, 0, 1 << 20)
    for index in range(MAX_HELD_REQUESTS + 1):
        prefill(prompt_queries, {f"r{index}": (0, 2)})
    prompt_queries.forget("r5")
    assert [prompt_queries.window_of(rid, 0) for rid in ("r0", "r5", "never")] == [None, None, None]
    assert kept(prompt_queries, "r6") == [0, 1]


def test_every_prompt_of_a_large_batch_keeps_its_window_and_so_do_those_of_the_pass_before() -> None:
    prompt_queries = PromptQueries(WINDOW, LAYERS, 0, 1 << 20)
    first, second = ([f"{name}{index}" for index in range(MAX_HELD_REQUESTS + 9)] for name in "ab")
    for rids in (first, second):
        prefill(prompt_queries, dict.fromkeys(rids, (0, 2)))
    assert all(prompt_queries.window_of(rid, 0) is not None for rid in first + second)


def test_a_decoding_request_in_a_mixed_batch_keeps_the_window_of_its_prompt() -> None:
    prompt_queries = PromptQueries(WINDOW, LAYERS, 0, 1 << 20)
    prefill(prompt_queries, {"a": (0, 9)})
    prefill(prompt_queries, {"b": (0, 2), "a": (9, 1)}, decoding=("a",))
    assert kept(prompt_queries, "a") == [3, 4, 5, 6, 7, 8]
    assert kept(prompt_queries, "b") == [0, 1]


def test_a_pass_that_was_not_announced_is_not_looked_at() -> None:
    prompt_queries = PromptQueries(WINDOW, LAYERS, 0, 1 << 20)
    prompt_queries.observe(queries(5, 0, 0), SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, qk_head_dim=DIM))
    prefill(prompt_queries, {"a": (0, 3)})
    prompt_queries.observe(queries(8, 0, 0), SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, qk_head_dim=DIM))
    assert kept(prompt_queries, "a") == [0, 1, 2]


def test_windows_of_nodes_make_room_when_they_take_too_much() -> None:
    one = LAYERS * 2 * HEADS * DIM * 4
    prompt_queries = PromptQueries(WINDOW, LAYERS, 0, 2 * one)
    keys = []
    for rid in ("a", "b", "c"):
        prefill(prompt_queries, {rid: (0, 2)})
        key, lost = prompt_queries.keep(rid, 0)
        assert lost == (keys[:1] if rid == "c" else [])
        keys.append(key)
    assert [prompt_queries.kept(key) is not None for key in keys] == [False, True, True]
    assert prompt_queries.kept(None) is None
    assert prompt_queries.keep("unknown", 0) == (None, [])


class Counted(TorchDispatchMode):
    """Counts the operations that do more than to look at a tensor in another way."""

    VIEWS = ("aten.view.default", "aten.select.int")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if str(func) not in self.VIEWS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_requests", [1, 2, 40])
def test_a_layer_takes_one_operation_however_many_requests_there_are(num_requests: int) -> None:
    num_layers = 4
    prompt_queries = PromptQueries(WINDOW, num_layers, 0, 1 << 20)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        reqs=[SimpleNamespace(rid=f"r{index}") for index in range(num_requests)],
        decoding_reqs=None,
        extend_lens=[9] * num_requests,
        seq_lens_cpu=torch.full((num_requests,), 9),
    )
    prompt_queries.begin_batch(batch)
    q = torch.zeros(9 * num_requests, HEADS * DIM)
    for layer in range(num_layers):
        with Counted() as counted:
            prompt_queries.observe(q, SimpleNamespace(layer_id=layer, tp_q_head_num=HEADS, qk_head_dim=DIM))
        if 0 < layer < num_layers - 1:  # not what a pass begins and ends with
            assert len(counted.found) == 1
    assert prompt_queries.window_of(f"r{num_requests - 1}", 0) is not None


def test_windows_are_those_of_whoever_cuts_each_from_its_own_prompt() -> None:
    rng = random.Random(0)
    prompt_queries, begun, ends = PromptQueries(WINDOW, LAYERS, 0, 1 << 30), dict[str, int](), dict[str, int]()
    for number in range(60):
        parts: dict[str, tuple[int, int]] = {}
        for rid in rng.sample("abcdefghij", rng.randrange(1, 7)):
            before = ends.get(rid, 0)
            if rid not in ends or rng.random() < 0.2:
                before = 1000 * number  # it starts over
                begun[rid] = before
            parts[rid] = before, rng.randrange(1, 12)
            ends[rid] = sum(parts[rid])
        prefill(prompt_queries, parts)
        for rid, end in ends.items():
            assert kept(prompt_queries, rid) == list(range(max(begun[rid], end - WINDOW), end)), number


def test_a_pass_that_ends_early_leaves_the_windows_of_the_one_before() -> None:
    prompt_queries = PromptQueries(WINDOW, LAYERS, 0, 1 << 20)
    prefill(prompt_queries, {"a": (0, 3)})
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        reqs=[SimpleNamespace(rid="a")],
        decoding_reqs=None,
        extend_lens=[2],
        seq_lens_cpu=torch.tensor([5]),
    )
    prompt_queries.begin_batch(batch)
    prompt_queries.observe(queries(2, 0, 3), SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, qk_head_dim=DIM))
    assert kept(prompt_queries, "a") == [0, 1, 2]
    prefill(prompt_queries, {"a": (3, 2)})
    assert kept(prompt_queries, "a") == [0, 1, 2, 3, 4]


def test_a_window_does_not_keep_those_of_the_other_requests() -> None:
    prompt_queries = PromptQueries(WINDOW, LAYERS, 0, 1 << 20)
    prefill(prompt_queries, {"a": (0, 9), "b": (0, 9), "c": (0, 2)})
    window = prompt_queries.window_of("c", 0)
    assert window is not None and window.queries.untyped_storage().nbytes() == LAYERS * 2 * HEADS * DIM * 4


def test_attention_is_given_all_that_it_was_given_without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    backend = SimpleNamespace(forward_extend=lambda *args, **kwargs: calls.append((*args, kwargs)))
    pool = SimpleNamespace(
        head_num=HEADS, head_dim=DIM, store_dtype=torch.float32, layer_num=LAYERS, size=8, start_layer=0
    )
    config = EvicPressConfig.from_flags("evicpress", None, forms="snapkv@0.5")
    monkeypatch.setattr(prompt_queries_module, "config_of", lambda server_args: config)
    monkeypatch.setattr(PromptQueries, "active", None)
    PromptQueries.install_on(SimpleNamespace(server_args=None, token_to_kv_pool=pool, attn_backend=backend))  # type: ignore[arg-type]
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, qk_head_dim=DIM)
    backend.forward_extend(q := queries(2, 0, 0), "k", "v", layer, "batch", save_kv_cache=True)
    assert calls == [(q, "k", "v", layer, "batch", {"save_kv_cache": True})]
