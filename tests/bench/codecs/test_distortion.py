"""Forms of a prompt's KV and answers over them, as the measurement of rate and distortion has them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from evicbench.codecs.answers import cases, greedy, relative_error
from evicbench.codecs.distortion import Point, hull_names, kind_of, synthetic_kv
from evicbench.codecs.quantisers import errors
from evicbench.codecs.stored_forms import EQUAL_KEPT, StoredForm, rows_of
from evicbench.correctness.reference import KV, Reference
from evicbench.testbed.vocabulary import EOS, MODEL_DIR, load_vocabulary


@pytest.fixture(scope="module")
def kv() -> KV:
    torch.manual_seed(0)
    keys, values = (torch.randn(3, 2, 2400, 64).bfloat16().float() for _ in "kv")
    return KV(keys, values)


def queries_of(kv: KV) -> torch.Tensor:
    layers, heads, num_tokens, dim = kv.keys.shape
    return torch.randn(layers, 2 * heads, num_tokens, dim)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("press", ["keydiff", "snapkv", "knorm"])
def test_a_press_is_compared_with_a_codec_in_equal_bytes(kv: KV, press: str, bits: int) -> None:
    queries = queries_of(kv)
    coded = StoredForm(bits=bits).store(kv, queries)
    pressed = StoredForm(press, EQUAL_KEPT[bits]).store(kv, queries)
    assert 0.98 < pressed.num_bytes / coded.num_bytes < 1.002
    assert pressed.kv.num_tokens < kv.num_tokens


def test_the_newest_slots_and_the_tail_of_keys_stay_raw(kv: KV) -> None:
    stored = StoredForm(bits=4, group=64, window=32).store(kv.first(300), queries_of(kv)).kv
    assert torch.equal(stored.keys[:, :, 256:], kv.keys[:, :, 256:300])
    assert torch.equal(stored.values[:, :, 268:], kv.values[:, :, 268:300])
    assert not torch.equal(stored.values[:, :, 267], kv.values[:, :, 267])
    assert 0.0 < relative_error(kv.keys[:, :, :256], stored.keys[:, :, :256]) < 0.15


def test_the_codec_keeps_its_bound_and_is_not_above_other_quantisers() -> None:
    synthetic, _ = synthetic_kv(512)
    found = errors(rows_of(synthetic.keys[0]), rows_of(synthetic.values[0]), 4, 32)
    assert 0.5 < found.over_bound <= 1.0
    assert found.codec == pytest.approx(found.float64, rel=1e-3)
    assert found.codec == pytest.approx(found.torchao, rel=1e-2)


def test_an_answer_does_not_depend_on_the_one_that_is_tried_first() -> None:
    reference = Reference(MODEL_DIR)
    case = next(cases(reference, 1, 4, 3))
    pressed = StoredForm("keydiff", 0.3).store(case.kv, case.queries).kv
    end = load_vocabulary().ids[EOS]
    for prompt, exact in zip(case.prompts, case.exact, strict=True):
        plain = greedy(reference, pressed, case.num_tokens, prompt, [])
        assert greedy(reference, pressed, case.num_tokens, prompt, exact) == plain
        assert greedy(reference, pressed, case.num_tokens, prompt, [*plain[:1], end]) == plain
        assert greedy(reference, case.kv, case.num_tokens, prompt, exact) == exact == [*exact[:-1], end]


def point(name: str, num_bytes: int, f1: Sequence[float]) -> Point:
    class Named:
        def __init__(self) -> None:
            self.name = name

    return Point(Named(), num_bytes, 100, [0.1] * len(f1), list(f1), list(f1))  # type: ignore[arg-type]


def test_the_hull_begins_at_the_smallest_of_the_best() -> None:
    points = [
        point("exact", 100, [1.0, 1.0]),
        point("fine", 60, [1.0, 1.0]),
        point("below a line", 40, [0.8, 0.8]),
        point("coarse", 20, [0.9, 0.9]),
        point("no smaller, worse", 20, [0.5, 0.5]),
        point("least", 10, [0.4, 0.6]),
    ]
    assert hull_names(points) == ["fine", "coarse", "least"]
    assert points[-1].margin == pytest.approx(0.196)


def test_kinds_of_forms() -> None:
    assert kind_of("exact+int4 G32 R128") == "int, all bits: G32 R128"
    assert kind_of("keydiff@0.5") == "keydiff"
    assert kind_of("keydiff@0.5+int4 G32") == "keydiff + int4 G32"
