"""Loading back on a device: what waits for which stream, and when the host memory that is read may be another's.

Events and streams are recorded; there is no CUDA here.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_evicpress.patches import load_back
from sglang_evicpress.patches.load_back import LayerGate, Load, Part

pytestmark = pytest.mark.sglang

LAYERS = 3


class Event:
    """Of a copy that ``owner`` (a thread's stream) has launched."""

    def __init__(self, owner: str, log: list[str]) -> None:
        self.owner, self._log = owner, log

    def synchronize(self) -> None:
        self._log.append(f"synchronized {self.owner}")


class Copier:
    num_layers = LAYERS

    def __init__(self, log: list[str]) -> None:
        self.thread, self._log = "waiter", log

    def load_layer(self, layer: int, *_: Any) -> None:
        self._log.append(f"{self.thread} copies {layer}")

    def finish_layer(self) -> Event:
        return Event(self.thread, self._log)

    def stream(self, after: Any) -> Any:
        class Context:
            def __enter__(self) -> Any:
                return SimpleNamespace(synchronize=lambda: None)

            def __exit__(self, *_: object) -> None:
                return None

        return Context()


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.copier = Copier(self.log)
        entry = SimpleNamespace(
            runs=(), header=SimpleNamespace(extents=[None] * LAYERS, num_slots=4), take_check_seconds=lambda: 0.0
        )
        host = SimpleNamespace(
            faults=None, arena=None, pin=lambda entry: None, unpin=lambda entry: self.log.append("unpinned")
        )
        self.cache = SimpleNamespace(
            compressor=SimpleNamespace(written_event=lambda: None, is_cuda=True),
            copier=self.copier,
            host=host,
            loads=[],
            tier_counts=Counter(),
            tier_errors=Counter(),
            menu=SimpleNamespace(slot_bytes=1),
            observe_load=lambda *_: None,
            dec_lock_ref=lambda node: self.log.append("unlocked"),
        )
        part = Part(SimpleNamespace(entry=entry, begin=0), torch.arange(4))  # type: ignore[arg-type]
        self.load = Load(self.cache, [part])
        self.cache.loads.append(self.load)
        stream = SimpleNamespace(wait_event=lambda event: self.log.append(f"waits for {event.owner}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(load_back, "LAYER_DEADLINE_S", 0.001)

    def run(self) -> None:
        """As its thread does."""
        self.copier.thread = "worker"
        self.load.run()
        self.load.has_run.set()
        self.copier.thread = "waiter"


def test_attention_is_ordered_behind_the_copy_of_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.run()
    gate = LayerGate(world.cache.loads, is_cuda=True)
    for layer in range(LAYERS):
        gate.wait_until(layer)
    assert world.log == [f"worker copies {layer}" for layer in range(LAYERS)] + ["waits for worker"] * LAYERS
    world.load.finish()
    assert world.log[-2:] == ["unpinned", "unlocked"] and not any("synchronized" in line for line in world.log)


def test_the_worker_may_come_to_the_end_of_a_layer_that_a_waiter_has_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event then takes the place of the waiter's, which still has to be waited for."""
    world = World(monkeypatch)
    world.load.wait_for(0)
    world.copier.thread = "worker"
    world.load._copy(0)
    world.run()
    world.load.finish()
    assert world.log.index("synchronized waiter") < world.log.index("unpinned")


def test_a_graph_that_is_captured_meanwhile_holds_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.run()
    world.log.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    LayerGate(world.cache.loads, is_cuda=True).wait_until(0)
    assert world.log == []


def test_where_there_is_no_cuda_it_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("no driver")

    world = World(monkeypatch)
    world.run()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    LayerGate(world.cache.loads, is_cuda=False).wait_until(0)
    assert world.log[-1] == "waits for worker"
