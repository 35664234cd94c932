"""The case matrix of all kernels, and outputs that hold garbage until they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """One pool to run a kernel on; ``extreme`` adds zero, tiny and huge tokens."""

    n: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int = 1
    extreme: bool = False

    def __str__(self) -> str:
        parts = [
            f"n{self.n}",
            f"h{self.num_heads}",
            f"d{self.head_dim}",
            str(self.dtype)[6:],
            f"p{self.page_size}",
        ]
        return "-".join(parts + ["extreme"] * self.extreme)


CASES = (
    Case(0, 2, 64, torch.float32),
    Case(1, 2, 64, torch.float32),
    Case(1, 1, 128, torch.bfloat16, page_size=16),
    Case(5, 2, 64, torch.float16, page_size=16),
    Case(16, 1, 80, torch.float32, page_size=16),
    Case(97, 3, 64, torch.bfloat16),
    Case(97, 2, 64, torch.float16, page_size=16, extreme=True),
    Case(150, 2, 128, torch.bfloat16, page_size=16, extreme=True),
    Case(150, 2, 128, torch.float32, page_size=16),
    Case(150, 1, 64, torch.float32, page_size=1, extreme=True),
)


@dataclass(frozen=True, slots=True)
class Pool:
    """Two layers on the CPU whose node lies in scattered slots; every slot outside the node is NaN."""

    k: list[Tensor]
    v: list[Tensor]
    slots: Tensor

    def to(self, device: str) -> Pool:
        """A copy on a device, also where it is the same one."""
        copies = [[layer.to(device, copy=True) for layer in layers] for layers in (self.k, self.v)]
        return Pool(copies[0], copies[1], self.slots.to(device))

    def rows(self, layers: list[Tensor]) -> Tensor:
        """The node's tokens, float64 [layers, heads, n, head_dim]."""
        return torch.stack([layer[self.slots].double() for layer in layers]).transpose(1, 2)


def make_pool(case: Case) -> Pool:
    num_slots = 2 * case.n + 7
    slots = torch.randperm(num_slots)[: case.n]
    layers = []
    for _ in range(4):
        rows = torch.randn(case.n, case.num_heads, case.head_dim)
        if case.extreme:
            huge = 2e3 if case.dtype == torch.float16 else 1e15
            scales = torch.tensor([0.0, 1e-3, 1.0, 1.0, 30.0, huge])
            rows *= scales[torch.randint(0, len(scales), (case.n, case.num_heads, 1))]
        layer = torch.full((num_slots, case.num_heads, case.head_dim), float("nan"), dtype=case.dtype)
        layer[slots] = rows.to(case.dtype)
        layers.append(layer)
    return Pool(layers[:2], layers[2:], slots)


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def pool(case: Case, seed: None) -> Pool:
    return make_pool(case)


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """Fill ``torch.empty`` with NaN, or the largest integer: an unwritten output never passes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def interpreter_with_current_numpy() -> Iterator[None]:
    """The interpreter of Triton 3.6 makes a run-time bound of ``range`` by ``int(array of one)``, which numpy
    deprecated in 1.25 and refuses from 2.5 on."""
    import triton.runtime.interpreter as interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
        yield
