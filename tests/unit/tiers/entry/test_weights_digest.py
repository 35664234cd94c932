"""The digest of weights tells any two models apart: whatever byte differs, wherever it lies, in whatever layout."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.tiers.entry import weights_digest as module
from sglang_evicpress.tiers.entry.weights_digest import CHUNK_WORDS, named_tensors, weights_digest

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]
SHAPES = [(), (0,), (3, 0), (1,), (7,), (64, 64), (5, 3, 2), (256, 512), (1, 130_001), (2, 65_536)]


def of(*tensors: torch.Tensor) -> bytes:
    return weights_digest((f"w{index}", tensor) for index, tensor in enumerate(tensors))


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes as such a tensor."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).view(torch.bool)
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8).view(dtype).reshape(shape)


def flipped(tensor: torch.Tensor, at: int, bit: int) -> torch.Tensor:
    """The same but for one bit of one byte of its storage."""
    other = tensor.clone(memory_format=torch.preserve_format)
    storage = other.as_strided((other.numel(),), (1,)).view(torch.uint8)
    storage[at] ^= 1 << bit
    return other


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_tensors_have_the_same_digest_and_one_bit_changes_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = drawn(shape, dtype)
    assert of(tensor) == of(tensor.clone())
    num_bytes = tensor.numel() * tensor.element_size()
    bits = 1 if dtype == torch.bool else 8
    for at in {0, num_bytes - 1, random.randrange(num_bytes)} if num_bytes else ():
        assert of(flipped(tensor, at, random.randrange(bits))) != of(tensor)


@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([torch.uint8, torch.int16, torch.int32]),
    st.data(),
)
def test_any_bit_of_any_layout_counts(rows: int, columns: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = drawn((rows, columns), dtype)
    layout = data.draw(st.sampled_from(["plain", "transposed", "misaligned", "gaps"]))
    if layout == "transposed":
        tensor = tensor.t()
    elif layout == "misaligned":
        tensor = torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(rows, columns)
    elif layout == "gaps":
        wide = torch.cat([tensor, tensor], 1)
        tensor = wide[:, :columns]
    row, column = (data.draw(st.integers(0, size - 1)) for size in tensor.shape)
    before = of(tensor)
    element = tensor[row, column].clone().view(1)
    element.view(torch.uint8)[0] ^= 1 << data.draw(st.integers(0, 7))
    tensor[row, column] = element[0]
    assert of(tensor) != before
    if layout == "gaps":
        now = of(tensor)
        wide[:, columns:] = 0  # not a part of it
        assert of(tensor) == now


def swapped(tensor: torch.Tensor, first: int, second: int) -> torch.Tensor:
    order = list(range(len(tensor)))
    order[first], order[second] = second, first
    return tensor[order]


@pytest.mark.parametrize("columns", [1, 64, 100, 256, 1024])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_two_rows_swapped_differ(columns: int, dtype: torch.dtype) -> None:
    """Also where they differ in nothing but the sign of one element."""
    tensor = drawn((512, columns), dtype)
    alike = tensor.clone()
    alike[1:] = alike[0]
    alike[3, columns // 2 : columns // 2 + 1].view(torch.uint8)[-1] ^= 0x80
    for rows in (tensor, alike):
        if torch.equal(rows[3].view(torch.uint8), rows[400].view(torch.uint8)):
            continue
        assert of(swapped(rows, 3, 400)) != of(rows)
        assert of(swapped(rows, 3, 4)) != of(rows)


def test_every_swap_of_words_that_differ_in_their_sign_alone_changes_the_digest() -> None:
    """The hardest difference for a sum of products: 2**31 times the difference of two factors."""
    words = torch.zeros(256, dtype=torch.int32)
    seen = set()
    for at in range(256):
        words.zero_()
        words[at] = -(2**31)
        seen.add(of(words))
    assert len(seen) == 256


@pytest.mark.parametrize("change", ["square transposed", "moved", "swapped", "shape", "dtype", "name", "chunks"])
def test_the_place_of_every_value_counts(change: str) -> None:
    first, second = drawn((64, 64), torch.bfloat16), drawn((64, 64), torch.bfloat16)
    before = of(first, second)
    if change == "square transposed":
        assert of(first.t().contiguous(), second) != before
        assert of(first.t(), second) != before
    elif change == "moved":
        bits, others = first.view(torch.int16).flatten(), second.view(torch.int16).flatten()
        bits[-1], others[0] = others[0].item(), bits[-1].item()
        assert of(first, second) != before
    elif change == "swapped":
        assert of(second, first) != before
    elif change == "shape":
        assert of(first.view(32, 128), second) != before
    elif change == "dtype":
        assert of(first.view(torch.float16), second) != before
    elif change == "name":
        assert weights_digest([("w0", first), ("w2", second)]) != before
    else:
        long = drawn((4 * CHUNK_WORDS, 2), torch.int32)
        assert of(long.view(8, CHUNK_WORDS).flip(0).reshape(-1, 2)) != of(long)


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: tensor.t(),
        lambda tensor: tensor.view(8, 8, 48).permute(2, 0, 1),
        lambda tensor: tensor[1:, 3:],
        lambda tensor: tensor[::2],
        lambda tensor: tensor[:1].expand(64, 48),
        lambda tensor: tensor[:1].expand(64, 48)[:, 4:20].t(),
        lambda tensor: tensor.unfold(0, 4, 2),
    ],
    ids=["transposed", "permuted", "cut", "stepped", "expanded", "expanded and cut", "overlapping"],
)
@pytest.mark.parametrize("at_once", [256, 1 << 23])
def test_layouts_that_cannot_be_viewed_flat_have_a_digest_of_what_they_show(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[torch.Tensor], torch.Tensor], at_once: int
) -> None:
    monkeypatch.setattr(module, "COPY_BYTES", at_once)
    tensor = drawn((64, 48), torch.int16)
    shown = make(tensor)
    before = of(shown)
    assert before == of(make(tensor.clone()))
    for place in ((0,) * shown.dim(), tuple(size - 1 for size in shown.shape)):
        shown[place] += 1
        assert of(shown) != before
        shown[place] -= 1
    assert of(shown) == before


def test_how_much_is_computed_at_once_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk sizes differ between a CPU and another device."""
    tensor = drawn((5 * CHUNK_WORDS + 3,), torch.uint8)
    tensors = [tensor, tensor[1:], drawn((9 * CHUNK_WORDS,), torch.int32), drawn((3,), torch.bfloat16)]
    before = of(*tensors)
    for count in (2, 3, 32):
        monkeypatch.setitem(module.CHUNKS_AT_ONCE, "cpu", count)
        assert of(*tensors) == before


def test_parameters_and_buffers_both_count_and_tied_ones_come_once() -> None:
    model = torch.nn.Linear(4, 4)
    model.register_buffer("scale", torch.ones(3), persistent=False)
    model.tied = model.weight
    assert [name for name, _ in named_tensors(model)] == ["parameter weight", "parameter bias", "buffer scale"]
    before = weights_digest(named_tensors(model))
    model.scale[1] = 2.0
    assert weights_digest(named_tensors(model)) != before


class Wrapped(torch.Tensor):
    """Tensor of a quantisation library: it has no storage, and others in its place."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, *_: object, **__: object) -> object:
        raise NotImplementedError


def test_a_subclass_made_of_other_tensors_is_what_they_are() -> None:
    values, scale = drawn((64, 64), torch.int8), torch.ones(64)
    before = of(Wrapped(values, scale))
    assert before == of(Wrapped(values.clone(), scale.clone()))
    assert before != of(Wrapped(flipped(values, 77, 3), scale)) != of(Wrapped(values, 2 * scale))


@pytest.mark.parametrize(
    "tensor", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()], ids=lambda tensor: str(tensor.layout)
)
def test_a_tensor_without_bytes_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="w0 is .*: expected a strided tensor"):
        of(tensor)
