"""Calibration on tiny random models: queries before RoPE are those of the projections, and a model whose RoPE cannot be
undone is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evicbench.families.table import FAMILIES
from evicbench.testbed.vocabulary import MODEL_DIR
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_evicpress.geometry import file
from sglang_evicpress.geometry.calibrate import CalibratedModel, read_sequences

BY_NAME = {family.name: family for family in FAMILIES}
PLAIN = {  # queries before RoPE are what q_proj gives
    "llama": (False, 1.0, 32),
    "llama-linear": (False, 1.0, 32),
    "qwen2": (False, 0.1 * torch.tensor(4.0).log().item() + 1.0, 32),  # YaRN
    "phi": (False, 1.0, 16),  # half of each head
    "stablelm": (False, 1.0, 8),
    "gemma": (False, 1.0, 128),
    "ernie4.5": (True, 1.0, 32),
    "glm4": (True, 1.0, 16),
    "starcoder2": (False, 1.0, 32),
}
SEEN = ("qwen3", "cohere", "olmo2", "granite", "phi3", "gpt-neox")
"""Queries are changed on their way from the projection: what tells is that the model is taken."""


def made(folder: Path, name: str, **more: object) -> str:
    family = BY_NAME[name]
    torch.manual_seed(1)
    config = AutoConfig.for_model(family.model_type, **{**family.settings, **more})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def projected(model: str, sequences: Sequence[Sequence[int]], head_dim: int) -> Tensor:
    """What the q_proj of every layer gives: [layers, all tokens, heads, head_dim]."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    noted: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, out: noted.append(out[0].unflatten(-1, (-1, head_dim))))
        for name, module in loaded.named_modules()
        if name.endswith("q_proj")
    ]
    parts = []
    for sequence in sequences:
        noted.clear()
        with torch.inference_mode():
            loaded(input_ids=torch.tensor([list(sequence)]))
        parts.append(torch.stack(noted))
    assert hooks
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", PLAIN)
def test_queries_before_rope_are_those_of_the_projection(tmp_path: Path, name: str) -> None:
    is_interleaved, factor, num_turning = PLAIN[name]
    path, sequences = made(tmp_path, name), [tokens(70), tokens(33, 1)]
    model = CalibratedModel(path)
    geometry = model.measure(sequences)
    rope = geometry.rope
    assert (rope.is_interleaved, rope.num_turning) == (is_interleaved, num_turning)
    assert rope.factor == pytest.approx(factor)
    pre = projected(path, sequences, rope.head_dim)
    torch.testing.assert_close(geometry.centres, pre.mean(1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(geometry.lengths, rope.lengths(pre).mean(1), atol=1e-5, rtol=1e-4)
    assert geometry.num_tokens == 103
    facts = geometry.model
    assert (facts.num_layers, facts.num_heads) == tuple(pre.shape[::2])
    settings = BY_NAME[name].settings
    assert facts.num_kv_heads == settings["num_key_value_heads"]


@pytest.mark.parametrize("name", SEEN)
def test_further_families_are_taken(tmp_path: Path, name: str) -> None:
    geometry = CalibratedModel(made(tmp_path, name)).measure([tokens(40)])
    assert geometry.rope.is_interleaved == (name == "cohere")


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("phi3-longrope", {}, "Phi3ForCausalLM has RoPE of type 'longrope'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "LlamaForCausalLM has RoPE of type 'dynamic'",
        ),
        ("gpt2", {}, "GPT2LMHeadModel has no RoPE that can be read"),
        ("opt", {}, "OPTForCausalLM has no RoPE that can be read"),
        ("gpt-j", {}, "has attention of its own, whose queries cannot be seen"),
        ("smollm3", {}, "SmolLM3ForCausalLM has keys in layer 1 whose RoPE cannot be undone"),
        ("hunyuan", {}, "HunYuanDenseV1ForCausalLM has keys in layer 0 whose RoPE cannot be undone"),
    ],
)
def test_a_model_whose_rope_cannot_be_undone_is_refused_by_name(
    tmp_path: Path, name: str, more: dict[str, object], words: str
) -> None:
    path = made(tmp_path, name, **more)
    if name == "hunyuan":  # norms of ones commute with RoPE
        loaded = AutoModelForCausalLM.from_pretrained(path)
        for parameter_name, parameter in loaded.named_parameters():
            if "layernorm" in parameter_name and "self_attn" in parameter_name:
                parameter.data = 1 + torch.rand_like(parameter)
        loaded.save_pretrained(path)
    with pytest.raises(ValueError, match=words) as raised:
        CalibratedModel(path)
    assert "expected" in str(raised.value) and "\n" not in str(raised.value)


def test_halves_are_taken_as_well(tmp_path: Path) -> None:
    path = made(tmp_path, "llama")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    halves = CalibratedModel(path).measure([tokens(60)])
    whole = projected(path, [tokens(60)], 64).mean(1)
    assert float((halves.centres - whole).norm() / whole.norm()) < 0.02


def test_offsets_end_where_the_model_does(tmp_path: Path) -> None:
    model = CalibratedModel(made(tmp_path, "llama"))
    assert model.measure([tokens(20)]).offsets.tolist() == [2**power for power in range(13)]  # of 4096 positions
    assert model.measure([tokens(20)], 5).offsets.tolist() == [1, 2, 4]


def test_without_text_there_is_nothing_to_measure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text to calibrate on"):
        CalibratedModel(made(tmp_path, "llama")).measure([])


def test_a_text_is_read_in_sequences_behind_the_first_token() -> None:
    text = " ".join(["the code ."] * 100)
    sequences = read_sequences(str(MODEL_DIR), text, 50, 21)
    assert [len(each) for each in sequences] == [21, 21, 11]
    assert {each[0] for each in sequences} == {1}
    joined = [token for each in sequences for token in each[1:]]
    assert len(joined) == 50 and joined[:3] == joined[3:6]


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        read_sequences(made(tmp_path, "llama"), "text", 50, 21)


def test_a_file_of_a_measured_model_is_read_again(tmp_path: Path) -> None:
    geometry = CalibratedModel(made(tmp_path, "llama")).measure([tokens(20)])
    file.write(str(tmp_path / "geometry"), geometry)
    assert file.read(str(tmp_path / "geometry")).digest == geometry.digest
    assert replace(geometry, num_tokens=1).model == geometry.model
