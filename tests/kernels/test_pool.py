from __future__ import annotations

import pytest
import torch

from sglang_evicpress.kernels.pool import check_pool, pointer_table, runs_triton
from sglang_evicpress.kernels.score import key_norm, value_key_ratio

LAYER = torch.zeros(8, 2, 16)
SLOTS = torch.arange(3)


@pytest.mark.parametrize(
    ("buffers", "slots", "message"),
    [
        ([], SLOTS, "at least one layer"),
        ([torch.zeros(8, 32)], SLOTS, "num_slots, num_heads, head_dim"),
        ([LAYER.to(torch.float64)], SLOTS, "float16, bfloat16 or float32"),
        ([LAYER, LAYER.half()], SLOTS, "agree"),
        ([LAYER, torch.zeros(9, 2, 16)], SLOTS, "agree"),
        ([torch.zeros(8, 16, 2).transpose(1, 2)], SLOTS, "contiguous"),
        ([LAYER], SLOTS.int(), "expected int64"),
        ([LAYER], SLOTS.view(1, 3), "expected int64"),
        ([LAYER], SLOTS.to("meta"), "expected int64"),
    ],
)
def test_check_pool_names_what_does_not_fit(buffers, slots, message):
    with pytest.raises(ValueError, match=message):
        check_pool(buffers, slots)


def test_value_key_ratio_refuses_values_of_another_shape():
    with pytest.raises(ValueError, match="k_buffers and v_buffers"):
        value_key_ratio([LAYER], [torch.zeros(8, 2, 8)], SLOTS)


def test_pointer_table_refuses_a_layer_off_the_boundary():
    with pytest.raises(ValueError, match="16-byte"):
        pointer_table([torch.zeros(65)[1:].view(2, 2, 16)])


def test_pointer_table_follows_the_layers_it_is_given(device):
    layers = [LAYER.to(device, copy=True) for _ in range(3)]
    assert pointer_table(layers).tolist() == [layer.data_ptr() for layer in layers]
    assert pointer_table(layers[::-1]).tolist() == [layer.data_ptr() for layer in layers[::-1]]


def test_auto_is_torch_on_the_cpu():
    assert not runs_triton("auto", torch.device("cpu"))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="expected auto, triton or torch"):
        runs_triton("cuda", torch.device("cpu"))


def test_triton_is_refused_on_a_device_its_kernels_were_not_made_for(device):
    other = torch.device("cuda" if device == "cpu" else "cpu")
    with pytest.raises(ValueError, match="the kernels were imported"):
        runs_triton("triton", other)


def test_slots_need_not_be_contiguous(device):
    layer = torch.randn(8, 2, 16).to(device)
    slots = torch.arange(8).to(device)[::2]
    norms = key_norm([layer], slots, backend="triton")
    torch.testing.assert_close(norms, key_norm([layer], slots, backend="torch"))
