"""State machine over the whole cache: all that can happen to it, in an order that hypothesis chooses and shortens.

After every rule each slot has one owner, each lock a holder, and each row is what was computed for it, or not there.
What threads do, and when, is chosen like everything else: a failure happens again, and is made as short as it can be.
``make soak-cache`` goes on for as long as it is told to, with other seeds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import tempfile
import time
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.contract.tiers.machine_walk import CODED, MachineWalk, Setting
from tests.contract.tiers.stepped import stepped

from sglang_evicpress.patches.attention import req_to_token

pytestmark = pytest.mark.sglang

HALF_PRECISION = (torch.bfloat16, torch.float16)
PROFILE_STEPS = ("open_one", "fill", "fill", "make_form", "make_form", "question", "drop_form", "close_one", "mend")


@st.composite
def every_setting(draw: st.DrawFn) -> Setting:
    menu = draw(st.sampled_from(["press", "uneven", "exact", *CODED]))
    dtypes = (torch.bfloat16,) if menu == "lossless" else (torch.float32, *HALF_PRECISION)
    return Setting(
        menu,
        page_size=draw(st.sampled_from([1, 4, 16])),
        dtype=draw(st.sampled_from(dtypes)),
        host_bytes=draw(st.sampled_from([192 << 10, 64 << 10])),
        has_budgets=draw(st.booleans()),
    )


def runs(machine: CacheMachine) -> bool:
    return bool(machine.walk.running)


def waits(machine: CacheMachine) -> bool:
    return bool(machine.walk.waiting)


def has_nodes(machine: CacheMachine) -> bool:
    return bool(machine.walk.cache.nodes)


def has_work(machine: CacheMachine) -> bool:
    return bool(machine.walk.arrival.busy())


class CacheMachine(RuleBasedStateMachine):
    """A server's cache, from its start to its end, and the next server's."""

    walk: MachineWalk

    def __init__(self) -> None:
        super().__init__()
        MachineWalk.made.clear()
        self.exits = contextlib.ExitStack()
        self.is_started = False
        self.exits.callback(setattr, req_to_token, "_table", req_to_token._table)
        self.exits.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        self.folder = Path(self.exits.enter_context(tempfile.TemporaryDirectory()))
        self.exits.enter_context(stepped())

    @initialize(setting=every_setting(), choose=st.randoms(use_true_random=False))
    def begin(self, setting: Setting, choose: Random) -> None:
        self.setting, self.choose = setting, choose
        self.open()
        self.serve(times=2)

    def open(self, asked: object = ()) -> None:
        self.walk = MachineWalk(self.setting, self.folder, self.choose)
        self.walk.asked = list(asked)
        self.walk.be_patient()
        self.is_started = True

    # ---- requests

    @rule(times=st.integers(1, 4))
    def serve(self, times: int) -> None:
        for _ in range(times):
            self.walk.serve_one()

    @rule(times=st.integers(1, 3))
    def admit(self, times: int) -> None:
        for _ in range(times):
            self.walk.begin_one()

    @rule()
    def arrive(self) -> None:
        self.walk.arrive()

    @precondition(waits)
    @rule()
    def leave(self) -> None:
        self.walk.leave()

    @precondition(waits)
    @rule(times=st.integers(1, 3))
    def start(self, times: int) -> None:
        for _ in range(times):
            self.walk.start()

    @precondition(runs)
    @rule()
    def resume(self) -> None:
        self.walk.resume()

    @precondition(runs)
    @rule(times=st.integers(1, 8))
    def decode_with_budget_pass(self, times: int) -> None:
        for _ in range(times):
            self.walk.decode()

    @precondition(runs)
    @rule()
    def finish(self) -> None:
        self.walk.finish()

    @precondition(runs)
    @rule()
    def abort(self) -> None:
        self.walk.abort()

    @precondition(runs)
    @rule()
    def retract(self) -> None:
        self.walk.retract()

    # ---- the tree

    @precondition(has_nodes)
    @rule()
    def match(self) -> None:
        self.walk.look()

    @rule()
    def insert(self) -> None:
        self.walk.insert()

    @precondition(has_nodes)
    @rule()
    def lock(self) -> None:
        self.walk.lock_one()

    @precondition(lambda machine: bool(machine.walk.held))
    @rule()
    def unlock(self) -> None:
        self.walk.unlock_one()

    @precondition(has_nodes)
    @rule()
    def split(self) -> None:
        self.walk.split()

    @precondition(has_nodes)
    @rule()
    def compress(self) -> None:
        self.walk.press()

    @precondition(has_nodes)
    @rule()
    def evict(self) -> None:
        self.walk.evict()

    # ---- the tiers

    @precondition(has_nodes)
    @rule()
    def quantise(self) -> None:
        self.walk.quantise()

    @precondition(has_nodes)
    @rule(times=st.integers(1, 4))
    def demote(self, times: int) -> None:
        for _ in range(times):
            self.walk.demote()

    @precondition(has_nodes)
    @rule()
    def copy_down(self) -> None:
        self.walk.copy_down()

    @precondition(has_nodes)
    @rule()
    def free_copy(self) -> None:
        self.walk.free_copy()

    @precondition(lambda machine: not machine.walk.running and not machine.walk.waiting)
    @rule()
    def promote(self) -> None:
        self.walk.rest()

    @precondition(has_work)
    @rule(times=st.integers(1, 4))
    def work(self, times: int) -> None:
        for _ in range(times):
            self.walk.work()

    @precondition(has_work)
    @rule(step=st.sampled_from(["load_layer", "settle"]))
    def thread(self, step: str) -> None:
        getattr(self.walk, step)()

    @rule(is_long=st.booleans())
    def round(self, is_long: bool) -> None:
        if is_long:
            self.walk.pass_time()
        self.walk.tick()

    # ---- profiles

    @rule(step=st.sampled_from(PROFILE_STEPS))
    def profile(self, step: str) -> None:
        if step != "open_one" and not self.walk.cache.shadows.spaces:
            step = "open_one"
        getattr(self.walk, step)()

    # ---- operators and bad luck

    @precondition(has_nodes)
    @rule(where=st.sampled_from(["flip_host", "spoil_ssd"]))
    def damage(self, where: str) -> None:
        getattr(self.walk, where)()

    @precondition(has_nodes)
    @rule(step=st.sampled_from(["flush_tier", "flush", "detach", "restart"]))
    def operate(self, step: str) -> None:
        """Take one step of four: after each of these little is left to go wrong, so they share a rule."""
        if step == "restart":
            self.walk.end_running()
            self.walk.save_and_close()
            self.open(self.walk.asked)
        elif step == "flush_tier":
            self.walk.flush()
        elif step == "flush":
            self.walk.reset()
        elif self.walk.cache.ssd is not None:
            self.walk.change_ssd()

    @precondition(lambda machine: machine.walk.cache.ssd is None)
    @rule()
    def attach(self) -> None:
        self.walk.change_ssd()

    # ---- what must hold

    @invariant()
    def every_row_is_right_or_absent(self) -> None:
        if self.is_started:
            self.walk.check()

    def teardown(self) -> None:
        try:
            if self.is_started and self.is_sound:
                self.walk.finish_all()
        finally:
            if self.is_started:
                self.walk.close()
            self.exits.close()
            MachineWalk.made.clear()

    is_sound = True


SHORT = settings(
    max_examples=40,
    stateful_step_count=80,
    deadline=None,
    database=None,
    derandomize=True,
    print_blob=True,
    report_multiple_bugs=False,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_the_cache_keeps_every_row_whatever_happens() -> None:
    run_state_machine_as_test(CacheMachine, settings=SHORT)


@pytest.mark.soak
def test_the_cache_keeps_every_row_for_as_long_as_it_is_told_to() -> None:
    seed = int(os.environ.get("EVICPRESS_SOAK_SEED", secrets.randbelow(1 << 32)))
    end_s = time.monotonic() + float(os.environ.get("EVICPRESS_SOAK_SECONDS", "120"))
    while time.monotonic() < end_s:
        print(f"EVICPRESS_SOAK_SEED={seed}", flush=True)
        machine = seeded(seed)(type("SoakedMachine", (CacheMachine,), {}))
        try:
            run_state_machine_as_test(machine, settings=settings(SHORT, derandomize=False))
        except BaseException as error:
            error.add_note(f"EVICPRESS_SOAK_SEED={seed} makes this happen again")
            raise
        seed += 1
        gc.collect()
