"""Holdings of a load until it has ended, on a device that lags behind the host."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_evicpress.core import EXACT
from sglang_evicpress.patches.tiers import load
from sglang_evicpress.patches.tiers.load import Part
from sglang_evicpress.patches.tiers.loads import Loads
from sglang_evicpress.tiers.entry.copies import Rows

NUM_LAYERS = 3


class Event:
    """One of the device: reached only when it is waited for."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def synchronize(self) -> None:
        self._log.append("reached")

    def query(self) -> bool:
        return False


class Copier:
    num_layers = NUM_LAYERS
    is_by_threads = False

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def layers_at_once(self, *_: object) -> int:
        return 1

    def load_layers(self, layers: range, *_: object) -> None:
        self._log.extend(f"copy {layer}" for layer in layers)

    def finish_layers(self) -> Event:
        return Event(self._log)


def load_of(log: list[str]) -> Any:
    """A load of one entry whose thread never begins."""
    entry = SimpleNamespace(
        runs=(),
        header=SimpleNamespace(extents=[None] * NUM_LAYERS, num_slots=4, form=EXACT),
        take_check_seconds=lambda: 0.0,
    )
    storage = SimpleNamespace(
        copier=Copier(log),
        host=SimpleNamespace(arena=None, faults=None, unpin=lambda _: log.append("unpin")),
        errors=Counter(),
        counts=Counter(),
        submit=lambda *_: None,
        has_host=True,
    )
    loads = Loads(storage, [], lambda: None, lambda *_: None, lambda _: log.append("unlock"), is_cuda=True)
    copy = SimpleNamespace(
        entry=entry, form=EXACT, begin=0, num_bytes=32, layout=None, rows_of=lambda layer: Rows(0, 4, 4)
    )
    return loads.add([Part(copy, torch.arange(4))], SimpleNamespace(parent=None))


@pytest.fixture(autouse=True)
def waiting_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "LAYER_DEADLINE_S", 0.001)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=lambda _: None))


@pytest.mark.parametrize("num_late", [1, NUM_LAYERS])
def test_an_entry_stays_until_the_device_has_copied_the_late_layers(num_late: int) -> None:
    log: list[str] = []
    began = load_of(log)
    for layer in range(num_late):
        began.wait_for(layer)
    assert log == [f"copy {layer}" for layer in range(num_late)]
    began.has_run.set()
    assert not began.has_ended()  # not before the device has
    began.finish()
    assert log[num_late:] == ["reached"] * num_late + ["unpin", "unlock"]


def test_an_entry_stays_until_what_a_failed_load_left_is_copied() -> None:
    log: list[str] = []
    began = load_of(log)
    began.error = "internal"
    began.has_run.set()
    began.finish()
    copies = [f"copy {layer}" for layer in range(NUM_LAYERS)]
    assert log == [*copies, *["reached"] * NUM_LAYERS, "unpin", "unlock"]
