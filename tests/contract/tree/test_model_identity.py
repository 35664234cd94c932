"""The identity of a model: another for every other model, read once, and none that can be found while it is unknown."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.parameter import ChannelQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_int8
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.flag_groups import LayerFlags
from sglang_evicpress.patches.cache.factory import selection
from sglang_evicpress.patches.tree import model_identity
from sglang_evicpress.patches.tree.model_identity import ModelIdentity, adapter_digest

pytestmark = pytest.mark.sglang

WIDTH = 64  # as a power of two, so that a stride through all values keeps to few columns


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    )
    model.register_buffer("scale", torch.ones(4))
    return model.to(torch.bfloat16).requires_grad_(False)


def identity_of(model: torch.nn.Module, rank: int = 0, page_size: int = 1) -> ModelIdentity:
    runner = SimpleNamespace(model=model)
    config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": WIDTH}))
    pool = SimpleNamespace(dtype=torch.bfloat16, start_layer=0, layer_num=2)
    return ModelIdentity(runner, config, pool, page_size, (rank, 1))


def one_byte(model: torch.nn.Module) -> None:
    model[0].weight.view(torch.uint8)[77, 31] ^= 1


def rows_swapped(model: torch.nn.Module) -> None:
    model[0].weight[[3, 201]] = model[0].weight[[201, 3]]


def all_columns_but_two(model: torch.nn.Module) -> None:
    for layer in model:
        layer.weight[:, 1:-1] += 1


def transposed(model: torch.nn.Module) -> None:
    model[1].weight.copy_(model[1].weight.t().clone())


def layers_swapped(model: torch.nn.Module) -> None:
    model[1].weight.data, model[2].weight.data = model[2].weight.data, model[1].weight.data


def a_buffer(model: torch.nn.Module) -> None:
    model.scale[3] = 2


CHANGES = [one_byte, rows_swapped, all_columns_but_two, transposed, layers_swapped, a_buffer]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_differs_anywhere_has_another_identity(change: Callable[[torch.nn.Module], None]) -> None:
    model, other = make_model(), make_model()
    change(other)
    ours, same, others = identity_of(model), identity_of(make_model()), identity_of(other)
    assert ours.of_model() == same.of_model() != others.of_model()
    assert ours.of_profiles(None) == same.of_profiles(None) != others.of_profiles(None)


def test_another_geometry_has_other_profiles_but_the_same_kv() -> None:
    model = make_model()
    plain, one, other = identity_of(model), identity_of(model), identity_of(model)
    one.geometry, other.geometry = "1" * 64, "2" * 64
    assert len({each.of_profiles(None) for each in (plain, one, other)}) == 3
    assert len({each.of_model() for each in (plain, one, other)}) == 1


def test_another_rank_has_other_kv_but_the_same_profiles() -> None:
    model = make_model()
    ours, rank, pages = identity_of(model), identity_of(model, rank=1), identity_of(model, page_size=16)
    assert len({each.of_model() for each in (ours, rank, pages)}) == 3
    assert ours.of_profiles(None) == rank.of_profiles(None)


def test_settings_by_which_forms_keep_other_tokens_have_other_profiles() -> None:
    """A form of a short node keeps more of it in whole pages, and a press that looks at other queries keeps others."""
    given = EvicPressConfig("evicpress")
    counts = EvicPressConfig("evicpress", forms="snapkv@0.3:pyramid", layers=LayerFlags(max_counts=1))
    selections = [
        selection(given, 1),
        selection(given, 16),
        selection(EvicPressConfig("evicpress", sinks=0), 1),
        selection(EvicPressConfig("evicpress", window=8), 1),
        selection(counts, 1),
        selection(EvicPressConfig("evicpress", forms="snapkv@0.3:pyramid"), 1),
    ]
    assert selections[0] == selections[-1] == {}
    model, found = make_model(), set()
    for chosen in selections[:-1]:
        identity = identity_of(model)
        identity.selection = chosen
        found.add(identity.of_profiles(None))
    assert len(found) == 5


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for every time that weights are read."""
    seen: list[object] = []
    digest = model_identity.weights_digest

    def count(tensors: object) -> bytes:
        seen.append(tensors)
        return digest(tensors)

    monkeypatch.setattr(model_identity, "weights_digest", count)
    return seen


def test_weights_are_read_once_until_they_may_have_changed(reads: list[object]) -> None:
    model = make_model()
    identity = identity_of(model)
    first = identity.of_model(), identity.of_profiles(None)
    assert (identity.of_model(), identity.of_profiles(None)) == first and len(reads) == 1
    identity.forget_weights()
    assert (identity.of_model(), identity.of_profiles(None)) == first and len(reads) == 2
    one_byte(model)
    assert identity.of_model() == first[0], "nobody said so"
    identity.forget_weights()
    assert identity.of_model() != first[0] and identity.of_profiles(None) != first[1] and len(reads) == 3


def test_released_weights_are_not_read_and_nothing_that_is_kept_meanwhile_is_found(reads: list[object]) -> None:
    identity = identity_of(make_model())
    known = identity.of_model()
    identity.is_released = lambda: True
    assert identity.of_model() == known, "they are what they were"
    identity.forget_weights()
    unknown = identity.of_model()
    assert unknown == identity.of_model() != known and identity.of_profiles(None) and len(reads) == 1
    identity.forget_weights()
    assert identity.of_model() not in (known, unknown)
    identity.is_released = lambda: False
    assert identity.of_model() == known and len(reads) == 2


def test_a_model_that_cannot_be_read_is_served_under_an_identity_that_nobody_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model().to("meta")
    first, second = identity_of(model), identity_of(model)
    assert first.of_model() == first.of_model() != second.of_model()
    assert "the weights cannot be read" in caplog.text and "parameter 0.weight" in caplog.text


def test_ranks_agree_on_whether_the_weights_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with different shards; one of them may not be able to read its own."""
    given: list[tuple[bytes | None, bytes]] = []
    shards: list[bytes | None] = [b"shard 0", b"shard 1"]

    def gathered(value: tuple[bytes | None, bytes], group: object) -> list[tuple[bytes | None, bytes]]:
        given.append(value)
        return [(shard, f"random {rank}".encode()) for rank, shard in enumerate(shards)]

    monkeypatch.setattr(model_identity, "gathered", gathered)
    for other, is_known in ((b"shard 1", True), (b"another", True), (None, False)):
        shards[1] = other
        seen = {identity_of(make_model(), rank).weights() for rank in (0, 1)}
        assert len(seen) == 1 and seen.pop().startswith("unknown") != is_known
    assert all(digest is not None and len(number) == 16 for digest, number in given)
    assert len({number for _, number in given}) == len(given)


# ---- quantised layouts, as SGLang's methods leave them


def loader(*_: object, **__: object) -> None:
    """Nothing is loaded here."""


def fp8_weight(columns: int = 32) -> torch.Tensor:
    return torch.randint(0, 120, (WIDTH, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)


def int8_weight(columns: int = 32) -> torch.Tensor:
    return torch.randint(-127, 127, (WIDTH, columns), dtype=torch.int8)


def layer_of(weight: torch.Tensor, scale: torch.nn.Parameter | torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    for name, tensor in (("weight", weight), ("weight_scale", scale)):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        layer.register_parameter(name, tensor if is_parameter else torch.nn.Parameter(tensor, requires_grad=False))
    return layer


def compressed_tensors_int8() -> torch.nn.Module:
    """Layer as its own ``process_weights_after_loading`` leaves it."""
    scheme = compressed_tensors_w8a8_int8.CompressedTensorsW8A8Int8(
        compressed_tensors_w8a8_int8.QuantizationStrategy.CHANNEL, False, True
    )
    layer = torch.nn.Module()
    weight = ModelWeightParameter(data=int8_weight(), input_dim=1, output_dim=0, weight_loader=loader)
    scale = ChannelQuantScaleParameter(data=torch.rand(WIDTH, 1), output_dim=0, weight_loader=loader)
    layer.register_parameter("weight", weight)
    layer.register_parameter("weight_scale", scale)
    scheme.process_weights_after_loading(layer)
    assert not layer.weight.is_contiguous()
    return layer


LAYOUTS: dict[str, Callable[[], torch.nn.Module]] = {
    "fp8 per tensor": lambda: layer_of(fp8_weight().t(), torch.tensor(0.5)),
    "fp8 per channel": lambda: layer_of(fp8_weight().t(), torch.rand(WIDTH, 1).t()),
    "fp8 padded": lambda: layer_of(fp8_weight(48)[:, :32], torch.rand(WIDTH)),
    "w8a8_int8": lambda: layer_of(int8_weight().t(), torch.rand(WIDTH, 1)),
    "compressed-tensors int8": compressed_tensors_int8,
    "not yet processed": lambda: layer_of(
        ModelWeightParameter(data=fp8_weight(), input_dim=1, output_dim=0, weight_loader=loader),
        PerTensorScaleParameter(data=torch.rand(3), weight_loader=loader),
    ),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_quantised_layers_have_an_identity_that_every_byte_counts_in(make: Callable[[], torch.nn.Module]) -> None:
    layer = make()
    before = identity_of(layer).of_model()
    assert identity_of(layer).of_model() == before and identity_of(layer).of_profiles(None)
    for tensor in (layer.weight, layer.weight_scale):
        storage = tensor.data.as_strided((1,), (1,), tensor.storage_offset()).view(torch.uint8)
        storage[0] ^= 1
        assert identity_of(layer).of_model() != before
        storage[0] ^= 1
    assert identity_of(layer).of_model() == before


# ---- adapters


def adapter(values: float = 0.5, alpha: int = 8) -> LoRAAdapter:
    config = LoRAConfig.from_dict(
        {"peft_type": "LORA", "target_modules": ["q_proj", "k_proj", "v_proj"], "r": 4, "lora_alpha": alpha}
    )
    made = LoRAAdapter("id", config, SimpleNamespace(num_hidden_layers=2), None, None)
    tensors = {}
    for layer in range(2):
        for module in ("q_proj", "k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_"
            tensors |= {f"{name}A.weight": torch.full((4, 16), 0.25), f"{name}B.weight": torch.full((16, 4), values)}
    made.initialize_weights_from_tensors(tensors)
    return made


def digest_of(made: LoRAAdapter, modules: tuple[str, ...] = ("qkv_proj",)) -> bytes | None:
    manager = SimpleNamespace(loras={"id": made}, target_modules=set(modules), experts_shared_outer_loras=False)
    return adapter_digest(manager, "id")


def test_an_adapter_that_was_trained_anew_has_another_digest() -> None:
    """By its tensors, and by what else its KV depends on; name, path and id are the same."""
    ours = digest_of(adapter())
    assert ours is not None and ours == digest_of(adapter())
    others = [adapter(0.50001), adapter(alpha=16)]
    digests = {digest_of(other) for other in others} | {digest_of(adapter(), ("qkv_proj", "o_proj"))}
    changed = adapter()
    next(iter(changed.layers[1].weights.values()))[3, 7] += 1
    digests.add(digest_of(changed))
    assert len(digests) == 4 and not digests & {ours, None}


def test_an_adapter_that_cannot_be_read_has_none(caplog: pytest.LogCaptureFixture) -> None:
    made = adapter()
    made.layers[0].weights["x"] = torch.empty(3, device="meta")
    assert digest_of(made) is None and "stays off the SSD" in caplog.text
    assert adapter_digest(SimpleNamespace(loras={}), "id") is None
