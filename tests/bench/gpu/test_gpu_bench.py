"""The command lines that the GPU measurements start servers with, as SGLang's own parser sees them; their plugins."""

from __future__ import annotations

import argparse
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from evicbench.gpu import native, watch
from evicbench.gpu.serving import Launch
from evicbench.plugins import plugin_folder
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
from sglang.srt.server_args import ServerArgs

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(
    "launch",
    [
        Launch(Path("m"), "cuda", graphs=32, is_dummy=True),
        Launch(Path("m"), "cuda", backend="triton", dtype="float32", page_size=16),
        Launch(Path("m"), "cpu", dtype="float32"),
    ],
    ids=["graphs", "eager", "cpu"],
)
def test_sglang_knows_every_argument(launch: Launch) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(launch.arguments())
    assert (given.device, given.dtype, given.page_size) == (launch.device, launch.dtype, launch.page_size)
    assert given.grammar_backend == "none" and given.stream_interval == 1
    if launch.device == "cuda":
        assert given.attention_backend == launch.backend
        assert given.cuda_graph_max_bs_decode == (launch.graphs or None)
        assert given.disable_decode_cuda_graph == given.disable_prefill_cuda_graph == (not launch.graphs)


def test_a_plugin_folder_is_a_distribution_with_an_entry_point() -> None:
    with plugin_folder(watch.NAME, "evicbench.gpu.watch:load") as folder:
        (found,) = Distribution.discover(path=[str(folder)])
        (point,) = found.entry_points.select(group="sglang.srt.plugins")
        assert (point.name, point.load()) == (watch.NAME, watch.load)
    assert not folder.exists()


@pytest.mark.skipif(
    not hasattr(MultiPlatformOp, "dispatch_forward"),
    reason="this SGLang chooses its operators elsewhere; the GPU machine is given 0.5.17",
)
def test_native_takes_the_torch_code_of_every_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiPlatformOp, "dispatch_forward", MultiPlatformOp.dispatch_forward)  # put back afterwards
    before = MultiPlatformOp.dispatch_forward
    monkeypatch.delenv(native.SWITCH, raising=False)
    native.load()
    assert MultiPlatformOp.dispatch_forward is before
    monkeypatch.setenv(native.SWITCH, "1")
    native.load()
    norm = RMSNorm(8)
    assert norm._forward_method == norm.forward_native
