"""Loading back on a device: what waits for which stream, and when the host memory that is read may be another's.

Streams and events are stand-ins with a clock of their own, which no host call moves but one that waits; there is no
CUDA here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_evicpress.core import EXACT, Tier
from sglang_evicpress.patches.tiers import load as load_module
from sglang_evicpress.patches.tiers.layer_gate import LayerGate
from sglang_evicpress.patches.tiers.load import Load, Part
from sglang_evicpress.patches.tiers.loads import Loads
from sglang_evicpress.tiers.entry.copies import Rows
from sglang_evicpress.tiers.entry.payload import PayloadCopier

pytestmark = pytest.mark.sglang

LAYERS = 3
COPY_S = 0.001
"""Of the device, for one layer of a load."""

FORWARD_S = 0.05
"""Of the forward pass that is in flight when a load begins."""


class Stream:
    """Work of a device, done in order, over at ``end_s`` of the clock."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.end_s = 0.0

    def work(self, seconds: float) -> None:
        self.end_s = max(self.end_s, self.device.now_s) + seconds

    def wait_event(self, event: Event) -> None:
        self.end_s = max(self.end_s, event.at_s)
        self.device.log.append(f"{self.name} waits for {event.owner}")

    def synchronize(self) -> None:
        self.device.now_s = max(self.device.now_s, self.end_s)
        self.device.log.append(f"host waits for {self.name}")


class Event:
    """The point behind what a stream was given until it was recorded."""

    def __init__(self, device: Device, *, enable_timing: bool = False) -> None:
        self.device, self.is_timed = device, enable_timing
        self.at_s, self.owner = math.inf, ""

    def record(self, stream: Stream) -> None:
        self.at_s, self.owner = max(stream.end_s, self.device.now_s), stream.name

    def query(self) -> bool:
        return self.at_s <= self.device.now_s

    def synchronize(self) -> None:
        self.device.now_s = max(self.device.now_s, self.at_s)
        self.device.log.append(f"host waits for what {self.owner} was given")

    def elapsed_time(self, end: Event) -> float:
        """In milliseconds."""
        assert self.is_timed and end.is_timed and self.query() and end.query()
        return 1e3 * (end.at_s - self.at_s)


class Device:
    """One clock; each thread has a current stream, which are told apart by ``current``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.log: list[str] = []
        self.forward = self.current = Stream(self, "forward")
        self.is_capturing = False
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(self, enable_timing=enable_timing))
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(self, "copies"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)

    @contextmanager
    def stream(self, chosen: Stream) -> Iterator[None]:
        former, self.current = self.current, chosen
        try:
            yield
        finally:
            self.current = former

    def load(self, layers: range, slots: torch.Tensor, *_: object) -> None:
        """Queue the work of Transfers.load."""
        for layer in layers:
            self.current.work(COPY_S)
            self.log.append(f"{self.current.name} copies {layer} to {int(slots[0])}")


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = device = Device(monkeypatch)
        self.log = device.log
        buffers = [torch.zeros(16, 1, 1) for _ in range(LAYERS)]
        self.at_once = lambda num_slots: 1
        transfers: Any = SimpleNamespace(load=device.load, layers_at_once=lambda count, _: self.at_once(count))
        copier = PayloadCopier(buffers, buffers, 1, transfers=transfers)
        copier._is_cuda = True
        host = SimpleNamespace(faults=None, arena=None, unpin=lambda entry: self.log.append("unpinned"))
        self.submitted: list[Load] = []
        self.seen: list[tuple[int, float]] = []
        self.copier = copier
        self.storage = SimpleNamespace(
            copier=copier,
            host=host,
            errors=Counter(),
            counts=Counter(),
            submit=lambda name, load: self.submitted.append(load),
            has_host=True,
        )
        self.loads = Loads(
            self.storage, [], self.written_event, self.observe, lambda _: self.log.append("unlocked"), is_cuda=True
        )
        monkeypatch.setattr(load_module, "LAYER_DEADLINE_S", 0.001)

    def observe(self, tier: Tier, num_bytes: int, seconds: float, codec: str) -> None:
        self.seen.append((num_bytes, seconds))

    def written_event(self) -> Event:
        event = Event(self.device)
        event.record(self.device.forward)
        return event

    def load(self, slot: int = 0, check_s: float = 0.0) -> Load:
        """One of 4 slots from ``slot`` on."""
        extents = [SimpleNamespace(offset=0)] * LAYERS
        entry = SimpleNamespace(
            runs=(),
            header=SimpleNamespace(extents=extents, num_slots=4, form=EXACT),
            take_check_seconds=lambda: check_s,
        )
        copy = SimpleNamespace(
            entry=entry, form=EXACT, begin=0, num_bytes=4, layout=None, rows_of=lambda layer: Rows(0, 4, 4)
        )
        part = Part(copy, torch.arange(slot, slot + 4))  # type: ignore[arg-type]
        return self.loads.add([part], SimpleNamespace(parent=None))

    def gate(self, *, is_cuda: bool = True) -> LayerGate:
        return LayerGate(self.loads._loads, is_cuda=is_cuda)

    def run(self, load: Load) -> Load:
        """Run a load like its thread, which takes some of the host's time."""
        load.start()
        load.run()
        load.seconds = 7.0
        load.has_run.set()
        return load


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def copies(slot: int, name: str = "copies") -> list[str]:
    return [f"{name} copies {layer} to {slot}" for layer in range(LAYERS)]


# ---- queued, not waited for


def test_the_second_load_of_a_batch_is_queued_before_the_first_is_done(world: World) -> None:
    """While a forward pass is in flight, which both begin behind."""
    world.device.forward.work(FORWARD_S)
    first, second = world.run(world.load(0)), world.run(world.load(8))
    assert world.device.now_s == 0.0  # the host has waited for nothing
    assert world.log == ["copies waits for forward", *copies(0), "copies waits for forward", *copies(8)]
    assert not first.has_ended() and not second.has_ended()
    world.device.now_s = FORWARD_S + (LAYERS + 0.5) * COPY_S
    assert first.has_ended() and not second.has_ended()


def test_the_first_layer_is_queued_alone_and_those_after_it_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, copy = list[range](), world.device.load

    def count(layers: range, *rest: Any) -> None:
        launched.append(layers)
        copy(layers, *rest)

    monkeypatch.setattr(world.copier._transfers, "load", count)
    world.at_once = lambda num_slots: LAYERS
    load, gate = world.run(world.load()), world.gate()
    assert launched == [range(1), range(1, LAYERS)]
    with gate.launch([load], asks=True):
        for layer, end_s in enumerate((COPY_S, *[LAYERS * COPY_S] * (LAYERS - 1))):
            gate.wait_until(layer)
            assert world.device.forward.end_s == pytest.approx(end_s)


def test_all_parts_of_a_load_share_what_goes_at_once(world: World) -> None:
    """Whoever waits for a layer waits for no more than some scratches hold, however many nodes come."""
    world.at_once = lambda num_slots: LAYERS
    load = world.load(0)
    load.parts *= 4
    assert list(load._groups()) == [range(1), range(1, LAYERS)]
    load.parts *= LAYERS
    assert list(load._groups()) == [range(layer, layer + 1) for layer in range(LAYERS)]
    load.parts[1:] = [Part(load.parts[0].copy, torch.empty(0, dtype=torch.int64))]
    assert list(load._groups()) == [range(1), range(1, LAYERS)]  # a part without slots takes nothing


def test_layers_that_fill_other_slots_are_loaded_one_by_one(world: World) -> None:
    world.at_once = lambda num_slots: LAYERS
    load = world.load()
    load.parts[0].copy.layout = SimpleNamespace(filling=object())  # type: ignore[misc]
    assert list(load._groups()) == [range(layer, layer + 1) for layer in range(LAYERS)]


def test_a_waiter_copies_its_layer_of_a_group_alone(world: World) -> None:
    world.at_once = lambda num_slots: LAYERS
    load = world.load()
    load.wait_for(1)
    assert world.log[-2:] == ["forward copies 1 to 0", "forward waits for forward"]
    world.run(load)
    world.device.now_s = 1.0
    assert load.has_ended() and load.num_late == 1
    assert [line for line in world.log if line.startswith("copies copies")] == copies(0)


def test_a_load_is_over_when_the_device_has_done_it(world: World) -> None:
    load = world.load()
    assert not load.has_ended()
    world.run(load)
    assert not load.has_ended() and not load.await_end(0.0)
    world.device.now_s = 1.0
    assert load.has_ended() and load.await_end(0.0)
    world.log.clear()
    load.finish()
    assert world.log[-2:] == ["unpinned", "unlocked"] and not world.loads
    assert world.device.now_s == 1.0


def test_a_load_that_fails_halfway_is_over_when_what_it_has_queued_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, copy = world.load(), world.device.load

    def fail(layers: range, *rest: Any) -> None:
        copy(layers, *rest)
        if 1 in layers:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(world.copier._transfers, "load", fail)
    load.start()
    with pytest.raises(RuntimeError):
        load.run()
    load.error = "internal"
    load.has_run.set()
    assert not load.has_ended()
    world.device.now_s = 1.0
    assert load.has_ended()
    monkeypatch.setattr(world.copier._transfers, "load", copy)
    load.finish()
    late = [f"forward copies {layer} to 0" for layer in (1, 2)]
    assert [line for line in world.log if line in late] == late and world.device.now_s > 1.0  # they were waited for
    assert world.log[-2:] == ["unpinned", "unlocked"] and world.seen == []


# ---- what is learned


def test_a_load_is_learned_to_take_what_its_copies_take_while_a_forward_pass_is_in_flight(world: World) -> None:
    world.device.forward.work(FORWARD_S)
    first, second = world.run(world.load(0, check_s=0.002)), world.run(world.load(8))
    world.device.now_s = 1.0
    first.finish()
    second.finish()
    assert world.seen == [(4, pytest.approx(LAYERS * COPY_S + 0.002)), (4, pytest.approx(LAYERS * COPY_S))]


def test_on_the_cpu_a_load_is_learned_to_take_its_threads_own_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what it had to wait for a core, or for the interpreter."""
    thread_s = [100.0]
    world.copier._is_cuda = False
    monkeypatch.setattr(world.loads, "written_event", lambda: None)
    monkeypatch.setattr(load_module, "time", SimpleNamespace(thread_time=lambda: thread_s[0]))

    def copy(*_: object) -> None:
        thread_s[0] += COPY_S

    monkeypatch.setattr(world.copier._transfers, "load", copy)
    load = world.run(world.load())
    thread_s[0] += FORWARD_S
    assert load.has_ended()
    load.finish()
    assert world.seen == [(4, pytest.approx(LAYERS * COPY_S))]


def test_nothing_is_learned_of_a_load_that_two_streams_have_worked_on(world: World) -> None:
    load = world.load()
    load.wait_for(0)
    world.run(load)
    world.device.now_s = 1.0
    load.finish()
    assert world.seen == [] and world.storage.counts["late_layers"] == 1


# ---- the gate


def test_attention_is_ordered_behind_the_copy_of_its_layer(world: World) -> None:
    load = world.run(world.load())
    gate = world.gate()
    with gate.launch([load], asks=True):
        for layer in range(LAYERS):
            gate.wait_until(layer)  # keys
            gate.wait_until(layer)  # values, for which nothing more is to be done
    assert world.log[1:] == copies(0) + ["forward waits for copies"] * LAYERS
    assert world.device.forward.end_s == pytest.approx(LAYERS * COPY_S) and world.device.now_s == 0.0


def test_a_batch_waits_only_for_the_loads_that_it_uses(world: World) -> None:
    """Batch n is computed while round n+1 begins a load, or one was begun for a request that did not get in."""
    used, others = world.run(world.load(0)), world.load(8)
    gate = world.gate()
    with gate.launch([used], asks=True):
        for layer in range(LAYERS):
            gate.wait_until(layer)
    assert world.submitted == [used] and others.num_late == 0 and gate.stalled_s == math.inf
    with gate.launch([], asks=True):
        gate.wait_until(0)
    assert others.num_late == 0 and gate.stalled_s == 0.0
    with gate.launch([used, others], asks=True):  # of the next round, which has it on the path of a request
        for layer in range(LAYERS):
            gate.wait_until(layer)
    assert world.submitted == [used, others] and others.num_late == LAYERS  # its thread is stuck: copied here
    assert world.log[-1] == "forward waits for forward" and world.log[-3] == "forward waits for copies"


def test_the_same_layer_is_asked_for_anew_in_the_next_batch(world: World) -> None:
    first, gate = world.run(world.load(0)), world.gate()
    with gate.launch([first], asks=True):
        gate.wait_until(0)
    second = world.run(world.load(8))
    world.log.clear()
    with gate.launch([second], asks=True):
        gate.wait_until(0)
    assert world.log == ["forward waits for copies"]


def test_a_batch_that_asks_for_no_layer_is_launched_behind_the_whole_load(world: World) -> None:
    """A batch replayed from a graph asks for no layer."""
    load = world.run(world.load())
    gate = world.gate()
    with gate.launch([load], asks=False):
        assert world.device.forward.end_s == pytest.approx(LAYERS * COPY_S)


def test_outside_a_launch_every_load_is_waited_for(world: World) -> None:
    load, gate = world.load(), world.gate()
    gate.wait_until(0)
    gate.wait_until(0)
    assert world.submitted == [load] and load.num_late == 1
    assert [line for line in world.log if "waits" in line] == ["forward waits for forward"] * 2


def test_a_batch_whose_loads_are_over_has_not_stalled(world: World) -> None:
    load, gate = world.run(world.load()), world.gate()
    with gate.launch([load], asks=True):
        pass
    assert gate.stalled_s == math.inf
    world.device.now_s = 1.0
    with gate.launch([load], asks=True):
        pass
    assert gate.stalled_s == 0.0


def test_what_a_batch_has_waited_on_the_cpu_is_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def wait(_: int) -> None:
        now_s[0] += 0.5

    monkeypatch.setattr("sglang_evicpress.patches.tiers.layer_gate.time.perf_counter", lambda: now_s[0])
    load: Any = SimpleNamespace(wait_for=wait, join=lambda: wait(0), has_ended=lambda: False)
    gate = LayerGate([load], is_cuda=False)
    with gate.launch([load], asks=True):
        for layer in range(LAYERS):
            gate.wait_until(layer)
    assert gate.stalled_s == 0.5 * LAYERS
    with gate.launch([load], asks=False):
        pass
    assert gate.stalled_s == 0.5


def test_the_worker_may_come_to_the_end_of_a_layer_that_a_waiter_has_copied(world: World) -> None:
    """Its event then takes the place of the waiter's, which still has to be reached."""
    load = world.load()
    world.device.forward.work(1.0)
    load.wait_for(0)
    copies_stream = Stream(world.device, "copies")
    with world.device.stream(copies_stream):
        load._copy(range(1))
    world.run(load)
    world.device.now_s = 0.5
    assert not load.has_ended()
    world.device.now_s = 2.0
    assert load.has_ended()


def test_a_graph_that_is_captured_meanwhile_holds_no_wait(world: World) -> None:
    world.run(world.load())
    world.log.clear()
    world.device.is_capturing = True
    world.gate().wait_until(0)
    assert world.log == []


def test_where_there_is_no_cuda_it_is_not_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("no driver")

    world.run(world.load())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    world.gate(is_cuda=False).wait_until(0)
    assert world.log[-1] == "forward waits for copies"
