"""A geometry against the model that SGLang builds: its own RoPE is undone, and a file of another model is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.geometry.made import make_geometry

from sglang_evicpress.core import Form
from sglang_evicpress.geometry import file
from sglang_evicpress.geometry.centres import QueryGeometry
from sglang_evicpress.geometry.checkpoint import digest_of
from sglang_evicpress.geometry.rope import Rope
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.model_geometry import ServedModel, geometry_of, rope_problem
from sglang_evicpress.patches.tree.node_kv import NodeSlots

pytestmark = pytest.mark.sglang

LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "partial": {"partial_rotary_factor": 0.25},
    "interleaved": {"is_neox_style": False},
    "partial-interleaved": {"is_neox_style": False, "partial_rotary_factor": 0.5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": YARN},
    "partial-yarn": {"rope_scaling": YARN, "partial_rotary_factor": 0.5},
}
HEAD_DIM = 64


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks the environment for that, once, when it is imported; older releases ask for the server's arguments
    as well."""
    from sglang.srt.layers.rotary_embedding import base

    monkeypatch.setattr(base, "_is_cpu", True)
    plain = SimpleNamespace(rl_on_policy_target=None, deterministic=SimpleNamespace(rl_on_policy_target=None))
    for name in ("get_exec", "get_global_server_args"):
        if hasattr(base, name):
            monkeypatch.setattr(base, name, lambda: plain)


@pytest.fixture
def module(request: pytest.FixtureRequest) -> torch.nn.Module:
    """A model of SGLang's as far as RoPE goes."""
    from sglang.srt.layers.rotary_embedding import get_rope

    return torch.nn.ModuleList([get_rope(HEAD_DIM, HEAD_DIM, 2048, 10000, **VARIANTS[request.param])])


def rope_of(name: str) -> Rope:
    """RoPE of a variant by transformers' formulas."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = VARIANTS[name]
    num = int(HEAD_DIM * given.get("partial_rotary_factor", 1.0))
    scaling = given.get("rope_scaling", {"rope_type": "default"})
    plain = 1.0 / 10000 ** (torch.arange(0, num, 2).float() / num)
    freq, factor = plain, 1.0
    if scaling["rope_type"] != "default":
        parameters = {"rope_theta": 10000.0, "partial_rotary_factor": num / HEAD_DIM, **scaling}
        config = LlamaConfig(
            head_dim=HEAD_DIM, hidden_size=128, num_attention_heads=2, max_position_embeddings=2048,
            rope_parameters=parameters,
        )  # fmt: skip
        freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    return Rope(freq, HEAD_DIM, not given.get("is_neox_style", True), factor)


@pytest.mark.parametrize(("module", "name"), [(name, name) for name in VARIANTS], indirect=["module"], ids=VARIANTS)
def test_what_sglang_turns_is_turned_back(module: Any, name: str) -> None:
    rope, positions = rope_of(name), torch.tensor([0, 1, 77, 1999])
    assert rope_problem(rope, module) is None
    heads = torch.randn(4, 3, HEAD_DIM)
    query, key = module[0].forward_native(positions, heads.flatten(1).clone(), heads.flatten(1).clone())
    for turned in (query, key):
        back = rope.undo(turned.view(4, 3, HEAD_DIM), positions[:, None])
        torch.testing.assert_close(back, heads, atol=2e-3, rtol=0)
    torch.testing.assert_close(rope.apply(heads, positions[:, None]), key.view(4, 3, HEAD_DIM), atol=2e-3, rtol=0)


@pytest.mark.parametrize("module", ["default"], indirect=True)
@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (Rope(rope_of("default").inv_freq * 1.01, HEAD_DIM), "other frequencies"),
        (Rope(rope_of("default").inv_freq, HEAD_DIM, factor=1.1), "other frequencies or another factor"),
        (Rope(rope_of("default").inv_freq, HEAD_DIM, is_interleaved=True), "other pairs of dimensions"),
        (rope_of("partial"), "8 bands, and this model's has 32"),
        (rope_of("llama3"), "other frequencies"),
        (rope_of("yarn"), "other frequencies"),
    ],
)
def test_another_rope_is_told(module: torch.nn.Module, rope: Rope, words: str) -> None:
    assert words in (rope_problem(rope, module) or "")


def test_long_rope_and_models_without_rope_are_told() -> None:
    from sglang.srt.layers.rotary_embedding import get_rope

    scaling = {
        **{"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32},
        "original_max_position_embeddings": 512,
    }
    longrope = get_rope(HEAD_DIM, HEAD_DIM, 2048, 10000, rope_scaling=scaling)
    for module in (torch.nn.ModuleList([longrope]), torch.nn.Linear(2, 2)):
        assert "needs a model with one table of RoPE" in (rope_problem(rope_of("default"), module) or "")


def test_the_code_of_transformers_is_read_by_its_frequencies() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=HEAD_DIM, hidden_size=128, num_attention_heads=2, max_position_embeddings=2048)
    module = torch.nn.ModuleList([LlamaRotaryEmbedding(config)])
    assert rope_problem(rope_of("default"), module) is None
    assert rope_problem(rope_of("llama3"), module) is not None


def test_a_node_of_a_server_with_a_geometry_is_trimmed_by_one_without() -> None:
    keys, values = torch.randn(2, 2, 128, 2, 16)
    pool = SimpleNamespace(
        start_layer=0,
        layer_num=2,
        _get_key_buffer=lambda layer: keys[layer],
        _get_value_buffer=lambda layer: values[layer],
    )
    form, slots = Form("geometry", 0.5), torch.arange(1, 61)
    with_one = Compressor(pool, 1, 4, geometry=make_geometry(2))
    layout, _ = with_one.compress(form, NodeSlots(slots, None, 0, 60, None), 30)
    num_overlaps = int(((layout.positions >= 10) & (layout.positions < 20)).sum(-1).max())
    trimmed = Compressor(pool, 1, 4).trim(form, NodeSlots(slots[:30], layout, 0, 60, None), (10, 20))
    assert trimmed is not None
    left = trimmed[0].positions
    assert left.shape[-1] == 30 - num_overlaps and not bool(((left >= 10) & (left < 20)).any())


# ---- the file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"weight": torch.arange(10)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def geometry(folder: Path) -> QueryGeometry:
    made = make_geometry(2, 4, 2, rope_of("default"))
    return replace(made, model=replace(made.model, checkpoint=digest_of(folder)))


def served(module: torch.nn.Module, folder: Path, **changes: Any) -> ServedModel:
    counts = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": HEAD_DIM, "rank": (0, 1)}
    return ServedModel(**{"module": module, "path": str(folder), "revision": None, **counts, **changes})


@pytest.mark.parametrize("module", ["default"], indirect=True)
def test_the_file_of_the_served_model_is_taken(module: torch.nn.Module, folder: Path, geometry: QueryGeometry) -> None:
    path = str(folder / "geometry")
    file.write(path, geometry)
    assert geometry_of(path, served(module, folder)).digest == geometry.digest
    second = geometry_of(path, served(module, folder, rank=(1, 2)))
    assert torch.equal(second.centres, geometry.centres[:, 2:]) and second.model.num_kv_heads == 1


@pytest.mark.parametrize("module", ["default"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 3}, "with num_layers 2, and this model has 3"),
        ({"num_heads": 8}, "with num_heads 4, and this model has 8"),
        ({"num_kv_heads": 4}, "with num_kv_heads 2, and this model has 4"),
        ({"head_dim": 128}, "with head_dim 64, and this model has 128"),
    ],
)
def test_a_file_of_another_shape_is_refused(
    module: torch.nn.Module, folder: Path, geometry: QueryGeometry, changes: dict[str, int], words: str
) -> None:
    path = str(folder / "geometry")
    file.write(path, geometry)
    with pytest.raises(ValueError, match=words) as raised:
        geometry_of(path, served(module, folder, **changes))
    assert "expected the file of this model" in str(raised.value) and path in str(raised.value)


@pytest.mark.parametrize("module", ["default"], indirect=True)
def test_a_file_of_other_weights_is_refused(
    module: torch.nn.Module, folder: Path, geometry: QueryGeometry, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, other = str(folder / "geometry"), tmp_path_factory.mktemp("other")
    file.write(path, geometry)
    save_file({"weight": torch.arange(10) + 1}, other / "model.safetensors")
    with pytest.raises(ValueError, match="with other weights than"):
        geometry_of(path, served(module, other))


@pytest.mark.parametrize("module", ["llama3"], indirect=True)
def test_a_file_of_another_rope_is_refused(module: torch.nn.Module, folder: Path, geometry: QueryGeometry) -> None:
    path = str(folder / "geometry")
    file.write(path, geometry)
    with pytest.raises(ValueError, match="is of RoPE with other frequencies") as raised:
        geometry_of(path, served(module, folder))
    assert path in str(raised.value) and "\n" not in str(raised.value)
