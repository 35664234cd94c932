"""keydiff, knorm and snapkv against kvpress, on the testbed model (golden data of tests/golden)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sglang_evicpress.press import PressInput, QueryWindow, get_press, select
from sglang_evicpress.press.keydiff import KeyDiff
from sglang_evicpress.press.knorm import Knorm
from sglang_evicpress.press.snapkv import SnapKV

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "bench" / "evicbench" / "testbed" / "model"
GOLDEN = json.loads((ROOT / "tests" / "golden" / "kvpress_selections.json").read_text())
LIKE_KVPRESS = {
    "keydiff": KeyDiff(),
    "knorm": Knorm(),
    "snapkv": SnapKV(GOLDEN["snapkv"]["window_size"], GOLDEN["snapkv"]["kernel_size"], pooling="avg"),
}
SELECTIONS = [
    pytest.param(row, id=f"{row['prompt']}-{row['press']}-{row['kept_fraction']}") for row in GOLDEN["selections"]
]
# What rounding may move between two releases of torch, relative to the score. Equal tokens have equal key
# norms in layer 0, where only the rotation rounds them apart: which of them survives is a toss-up.
SAME_SCORE = 1e-5


@pytest.fixture(scope="module")
def nodes() -> dict[str, PressInput]:
    """The golden prompts as exact nodes that start at 0, each prefilled once by transformers in fp32."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    return {name: prefill(model, token_ids) for name, token_ids in GOLDEN["prompts"].items()}


def prefill(model, token_ids) -> PressInput:
    queries, hooks = [], []
    config = model.config

    def record(module, args, kwargs, output):
        hidden = kwargs["hidden_states"]
        projected = module.q_proj(hidden).view(1, hidden.shape[1], -1, module.head_dim).transpose(1, 2)
        rotated, _ = apply_rotary_pos_emb(projected, projected, *kwargs["position_embeddings"])
        queries.append(rotated[0].transpose(0, 1))

    for layer in model.model.layers:
        hooks.append(layer.self_attn.register_forward_hook(record, with_kwargs=True))
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([token_ids]), past_key_values=cache)
    for hook in hooks:
        hook.remove()

    n = len(token_ids)
    slots = torch.randperm(n + 9, generator=torch.Generator().manual_seed(1))[:n]
    pools = []
    for content in ([layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]):
        pool = torch.zeros(len(content), n + 9, content[0].shape[1], content[0].shape[3])
        pool[:, slots] = torch.cat(content).transpose(1, 2)
        pools.append(list(pool))
    return PressInput(
        k_buffers=pools[0],
        v_buffers=pools[1],
        slots=slots,
        positions=torch.arange(n, dtype=torch.int32).expand(len(cache.layers), config.num_key_value_heads, n),
        start=0,
        num_tokens=n,
        window=QueryWindow(torch.stack(queries)[:, -64:], torch.arange(n - 64, n)),
        scale=config.head_dim**-0.5,
    )


def test_golden_data_are_of_this_model():
    checksum = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert checksum == GOLDEN["weights_sha256"], (
        "the testbed model changed: run tests/golden/make_kvpress_golden.py again"
    )


@pytest.mark.parametrize("row", SELECTIONS)
def test_survivors_equal_those_of_kvpress(nodes, row):
    node, press = nodes[row["prompt"]], LIKE_KVPRESS[row["press"]]
    theirs = torch.tensor(row["survivors"])
    ours = select(press, node, theirs.shape[-1], sinks=0).long()
    scores = press.score(node)
    for layer, head in (ours != theirs).any(dim=-1).nonzero().tolist():
        row_scores = scores[layer, head]
        swapped = set(ours[layer, head].tolist()) ^ set(theirs[layer, head].tolist())
        last_kept = row_scores[ours[layer, head]].min()
        gap = (row_scores[sorted(swapped)] - last_kept).abs().max()
        assert gap <= SAME_SCORE * last_kept.abs(), f"layer {layer} head {head}: {sorted(swapped)} differ by {gap}"


def difference(node, press, row, sinks):
    """Number of (layer, head) rows that keep other tokens than kvpress does."""
    theirs = torch.tensor(row["survivors"])
    return int((select(press, node, theirs.shape[-1], sinks).long() != theirs).any(dim=-1).sum())


@pytest.mark.parametrize("name", LIKE_KVPRESS)
def test_on_purpose_the_first_tokens_survive_here_and_not_in_kvpress(nodes, name):
    row = next(r for r in GOLDEN["selections"] if (r["press"], r["kept_fraction"]) == (name, 0.2))
    theirs, node = torch.tensor(row["survivors"]), nodes[row["prompt"]]
    kept = select(LIKE_KVPRESS[name], node, theirs.shape[-1], sinks=4)
    assert (kept[..., :4] == torch.arange(4)).all()
    assert not (theirs[..., :4] == torch.arange(4)).all()


def test_on_purpose_our_snapkv_takes_the_maximum_of_seven_where_kvpress_takes_the_mean_of_five(nodes):
    ours = get_press("snapkv")
    assert ours == SnapKV(window=32, kernel_size=7, pooling="max")
    for row in GOLDEN["selections"]:
        if row["press"] == "snapkv" and row["kept_fraction"] == 0.5:
            assert difference(nodes[row["prompt"]], ours, row, sinks=0) > 0
            assert difference(nodes[row["prompt"]], LIKE_KVPRESS["snapkv"], row, sinks=0) == 0
