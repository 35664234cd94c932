"""A model in float32 on the GPU, as a plugin that SGLang loads beside ours: norms, rotations and activations by torch.

SGLang's own CUDA kernels for these take 16 bits only. Attention, the pool and everything of ours stay as they are.
"""

from __future__ import annotations

import os

SWITCH = "EVICPRESS_GPU_NATIVE"
NAME = "evicpress_gpu_native"


def load() -> None:
    """SGLang calls this in each of its processes, before a model is made."""
    if SWITCH not in os.environ:
        return
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp

    MultiPlatformOp.dispatch_forward = lambda self: self.forward_native
