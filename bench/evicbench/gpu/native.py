"""Plugin that SGLang loads beside ours, for what the greedy check needs of a server on a GPU.

A model in float32: norms, rotations and activations by torch, as SGLang's own CUDA kernels for these take 16 bits only.
And a cache that always loads: so small a model computes most prefixes sooner. Attention, the pool and all else of ours
stay as they are.
"""

from __future__ import annotations

import os

from evicbench import always_load

SWITCH = "EVICPRESS_GPU_NATIVE"
LOADS = "EVICPRESS_GPU_ALWAYS_LOADS"
NAME = "evicpress_gpu_native"


def load() -> None:
    """SGLang calls this in each of its processes, before a model is made."""
    if SWITCH in os.environ:
        from sglang.srt.layers.utils.multi_platform import MultiPlatformOp

        MultiPlatformOp.dispatch_forward = lambda self: self.forward_native
    if LOADS in os.environ:
        always_load.load()
