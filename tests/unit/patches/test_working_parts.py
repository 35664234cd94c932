"""Parts that evict, demote, attach and close, made of fakes: no tree, no pool, no SGLang."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from tests.unit.patches.test_parts_alone import Node, World

from sglang_evicpress.core import EXACT, Decision, Form, Tier
from sglang_evicpress.introspect.operations import NodeBusy, UnknownNode
from sglang_evicpress.patches.cache.eviction import Eviction
from sglang_evicpress.patches.cache.eviction_log import EvictionLog
from sglang_evicpress.patches.tiers import weights
from sglang_evicpress.patches.tiers.admin import TierAdmin
from sglang_evicpress.patches.tiers.arrival import Arrival
from sglang_evicpress.patches.tiers.background import MOST_STEPS, BackgroundDemotion
from sglang_evicpress.patches.tiers.background_clock import BackgroundClock
from sglang_evicpress.patches.tiers.report import TierReport
from sglang_evicpress.patches.tiers.rounds import TierRounds
from sglang_evicpress.patches.tiers.shutdown import TierShutdown
from sglang_evicpress.patches.tiers.ssd_attachment import SsdAttachment
from sglang_evicpress.patches.tree.ranks import Ranks
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.tiers.jobs import Job, Workers

SLOTS, SLOT_BYTES = 256, 16
LOAD = {Tier.HOST: TransferCost(0.0, 1e9), Tier.SSD: TransferCost(0.0, 1e9)}
COSTS = CostSnapshot(PrefillCost(0.0, 1.0, 0.0), LOAD, {})


class Pool:
    size = SLOTS

    def __init__(self, num_free: int = 0) -> None:
        self.num_free = num_free

    def available_size(self) -> int:
        return self.num_free


class Controller:
    """Frees what it is asked for, as far as there are nodes; tells of which tier."""

    def __init__(self, pool: Pool, num_evictable: int) -> None:
        self.pool, self.evictable = pool, num_evictable
        self.num_failed, self.asked = Counter[str](), list[tuple[Tier, int]]()

    def free_bytes(self, tier: Tier, num_bytes: int, *, room: object = None) -> int:
        self.asked.append((tier, num_bytes))
        freed = min(self.evictable, num_bytes // SLOT_BYTES)
        self.evictable -= freed
        self.pool.num_free += freed
        return freed


def eviction(controller: Controller, **given: object) -> Eviction:
    terms = {
        "costs": lambda: COSTS,
        "observe_copies": lambda *_: None,
        "bounded": lambda tier, num_bytes: num_bytes,
        "mark_dirty": lambda: None,
        "num_running": lambda: 0,
        "release_from_tail": lambda: (),
        "release_shadows": lambda: 0,
        "return_aside": lambda: False,
    }
    return Eviction(
        controller.pool,
        controller,
        controller,
        dict,
        {},
        EvictionLog(),
        **terms | given,
        slot_bytes=SLOT_BYTES,
        has_tiers=False,
    )


def test_evicting_frees_a_share_of_the_pool_at_least() -> None:
    controller = Controller(Pool(), 100)
    assert eviction(controller).evict(1) == SLOTS // 128
    assert controller.asked == [(Tier.GPU, SLOTS // 128 * SLOT_BYTES)]


def test_only_what_is_short_is_evicted() -> None:
    controller = Controller(Pool(10), 100)
    parts = eviction(controller)
    parts.make_room(10)
    assert not controller.asked
    parts.make_room(14)
    assert controller.pool.num_free == 14 and parts.has_room(20) and controller.pool.num_free == 20


def test_nothing_is_evicted_for_less_than_the_whole_room() -> None:
    controller, told = Controller(Pool(10), 100), list[str]()

    def shadows() -> int:
        told.append("shadows")
        controller.pool.num_free += 5
        return 5

    parts = eviction(controller, release_shadows=shadows)
    parts.make_whole_room(116)
    assert not controller.asked and told == ["shadows"] and controller.pool.num_free == 15
    parts.make_whole_room(115)
    assert controller.pool.num_free == 115 and told == ["shadows"]


def test_what_waiting_requests_and_shadows_keep_is_given_up_in_turn() -> None:
    controller, told = Controller(Pool(), 4), list[str]()

    def tail() -> object:
        for name in ("last", "first"):
            told.append(name)
            controller.evictable += 2
            yield

    def shadows() -> int:
        told.append("shadows")
        return 3

    assert eviction(controller, release_from_tail=tail, release_shadows=shadows).evict(6) == 6 and told == ["last"]
    assert eviction(controller, release_from_tail=tail, release_shadows=shadows).evict(9) == 7
    assert told == ["last", "last", "first", "shadows"]


def test_plans_take_a_share_of_the_time_unless_somebody_waits() -> None:
    clock, now_s = BackgroundClock(), time.monotonic()
    assert not clock.begin_plan(now_s, is_idle=True), "nothing has changed"
    clock.mark_dirty()
    assert clock.begin_plan(now_s, is_idle=False) and not clock.is_dirty
    clock.end_plan(now_s - 1.0)  # a second: nineteen more have to pass
    clock.mark_dirty()
    assert not clock.begin_plan(now_s + 18.0, is_idle=False) and clock.begin_plan(now_s + 18.0, is_idle=True)
    clock.mark_dirty()
    clock.end_plan(now_s)
    assert not clock.begin_plan(now_s + 0.04, is_idle=False, delays_token=True), "after the first token"
    assert clock.begin_plan(now_s + 0.06, is_idle=False, delays_token=True), "but not for ever"
    clock.mark_dirty(at_once=True)
    assert clock.begin_plan(now_s, is_idle=False, delays_token=True)


def test_a_full_round_begins_no_plan_and_who_waits_within_it_does() -> None:
    clock = BackgroundClock()
    clock.begin_round()
    clock.mark_dirty()
    clock.is_full = True
    assert not clock.begin_plan(time.monotonic(), is_idle=True) and clock.is_dirty
    assert clock.begin_plan(time.monotonic(), is_idle=False), "as a server does that saves its tree while it ends"


class Told(Job):
    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self.told = told

    def run(self) -> None:
        """Nothing."""

    def finish(self) -> None:
        self.told.append("job")


@dataclass
class Threads:
    copying: Workers
    arrival: Arrival
    has_host, ranks, now_s = True, Ranks(None), staticmethod(time.monotonic)

    def meet(self) -> None:
        """Nobody else is there."""

    def finished_jobs(self) -> list[Job]:
        return self.copying.finished()

    @property
    def num_pending_jobs(self) -> int:
        return self.copying.num_pending


def rounds(told: list[str]) -> tuple[TierRounds, Workers, BackgroundClock]:
    arrival, clock = Arrival(), BackgroundClock()
    workers = Workers("copy", 1, arrival)
    threads = Threads(workers, arrival)
    calls = {name: (lambda name=name: told.append(name)) for name in ("begin", "room", "promote", "end")}
    idle = [SimpleNamespace(is_busy=False, advance=calls["promote"])]
    made = TierRounds(threads, clock, idle, first=[calls["begin"]], keep_room=calls["room"], last=calls["end"])
    return made, workers, clock


def test_a_round_takes_in_jobs_before_it_makes_room() -> None:
    told = list[str]()
    made, workers, _ = rounds(told)
    workers.submit(Told(told))
    assert made.has_work
    made.settle(lambda: "job" in told, 30.0)
    last_round = told[-4:]
    assert last_round == ["begin", "job", "room", "end"] and not made.has_jobs
    told.clear()
    made.tick(is_idle=True)
    assert told == ["begin", "promote", "end"] and not made.has_work
    workers.close(time.monotonic() + 5.0)


def background(
    world: World, backup: object, form: Form, to: Tier = Tier.HOST, *, may_write: bool = True, **planner: object
) -> tuple[BackgroundDemotion, Controller]:
    """Of a world in which the policy would have every node leave for that tier in this form."""
    world.adapters.may_reach_ssd = lambda node: True
    decisions = [
        SimpleNamespace(node_id=node_id, option=SimpleNamespace(tier=to, form=form)) for node_id in world.nodes
    ]
    controller = Controller(Pool(SLOTS // 8), 0)
    plan = lambda tier, *_, most_nodes: decisions if tier == Tier.GPU else []  # noqa: E731
    controller.planner = SimpleNamespace(plan=plan, **planner)
    plans = SimpleNamespace(held_bytes=lambda tier: 0)
    free = lambda: {Tier.HOST: world.host.num_bytes}  # noqa: E731
    room = SimpleNamespace(copying_bytes=0, wanted_bytes=0, end_plan=lambda: None, room=free)
    parts = world.nodes, controller.pool, SimpleNamespace(evictable=SLOTS), controller, world, world.adapters
    made = BackgroundDemotion(
        *parts,
        world.placement,
        room,
        plans,
        SimpleNamespace(start_copy=backup),
        SimpleNamespace(repack=lambda: None),
        SimpleNamespace(drop_fragments=lambda: None, may_write=may_write and world.ssd is not None),
        SimpleNamespace(ssd_write_gb_per_day=None),
        costs=lambda: COSTS,
        num_slots_needed=lambda: 0,
        asked_bytes=lambda: 0,
        mark_dirty=lambda *, at_once=False: None,
        is_late=lambda: False,
        ranks=Ranks(None),
        slot_bytes=SLOT_BYTES,
    )
    return made, controller


def test_background_copies_what_is_next_until_there_is_no_room() -> None:
    world, copied = World(3), list[int]()

    def start_copy(node: Node, tier: Tier, *, codec: str | None = None, keeps_planned: bool) -> bool:
        copied.append(node.id)
        return node.id < 2

    made, controller = background(world, start_copy, EXACT)
    made.keep_room()
    assert copied == [1, 2] and not controller.asked


@pytest.mark.parametrize(("is_alone", "num_steps"), [(True, 1), (False, MOST_STEPS)])
def test_a_call_that_is_pressed_ends_by_the_clock_or_with_other_ranks_by_its_steps(
    is_alone: bool, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = background(World(1), lambda *_, **__: True, EXACT)
    made.ranks, steps = SimpleNamespace(is_alone=is_alone), list[int]()
    monkeypatch.setattr(made, "_keep_some_room", lambda: steps.append(1) or True)
    made.is_late = lambda: True
    made.keep_room()
    assert len(steps) == num_steps


@pytest.mark.parametrize(("has_utility", "tier"), [(True, Tier.SSD), (False, Tier.HOST)])
def test_exact_kv_goes_to_the_ssd_first_if_the_policy_may_give_it_back(has_utility: bool, tier: Tier) -> None:
    world, copied = World(1), list[Tier]()
    store = SimpleNamespace(used_bytes=0, capacity_bytes=1000)
    world.ssd = SimpleNamespace(store=store, used_bytes=0)

    def start_copy(node: Node, tier: Tier, *, codec: str | None = None, keeps_planned: bool) -> bool:
        copied.append(tier)
        return True

    made, _ = background(world, start_copy, Form("random", 0.5), has_utility=has_utility)
    made.keep_room()
    assert copied == [tier]


def test_what_the_ssd_takes_no_more_of_is_copied_to_the_host_and_the_next_as_well() -> None:
    """Its write budget is used up: a refused write says nothing of room on the host."""
    world, copied = World(3), list[tuple[int, Tier]]()
    world.ssd = SimpleNamespace(store=SimpleNamespace(used_bytes=0, capacity_bytes=1000), used_bytes=0)

    def start_copy(node: Node, tier: Tier, *, codec: str | None = None, keeps_planned: bool) -> bool:
        copied.append((node.id, tier))
        return tier == Tier.HOST

    made, _ = background(world, start_copy, Form("random", 0.5), Tier.SSD, may_write=False, has_utility=True)
    made.keep_room()
    assert copied == [(1, Tier.HOST), (2, Tier.HOST), (3, Tier.HOST)]


class Ssd:
    folder, room = "/kv", 0

    def __init__(self, told: list[str]) -> None:
        self.told, self.store = told, SimpleNamespace(abandon=lambda: told.append("abandoned"), errors={})

    def close(self, seconds: float | None = None) -> bool:
        self.told.append("closed")
        return True

    def clear(self, workers: object) -> None:
        self.told.append("cleared")

    def reopened(self, identity: bytes) -> Ssd:
        self.told.append(f"opened for {identity[0]}")
        return self


SETTLED = SimpleNamespace(settle=lambda is_settled, seconds: is_settled(), has_jobs=False)


def attachment(world: World, told: list[str]) -> SsdAttachment:
    world.ssd, world.workers = Ssd(told), {"write": SimpleNamespace(num_pending=0)}
    world.use_ssd = lambda ssd: setattr(world, "ssd", ssd)
    parts = world.nodes, Pool(SLOTS - 4), world, world.adapters, world.placement, world.removal
    return SsdAttachment(*parts, SETTLED, SimpleNamespace(), None, lambda: told.append("policy"))


def test_another_model_parts_from_the_ssd_until_the_flush() -> None:
    world, told = World(1), list[str]()
    made = attachment(world, told)
    made.model_changed()
    assert not told, "nobody can tell the model"
    made.know_model(lambda: bytes([7] * 16))
    made.model_changed()
    assert made.is_mixed and world.ssd is None and told == ["policy", "closed"]
    with pytest.raises(ValueError, match="flush it first"):
        made.attach("/kv", 1.0, None)
    world.nodes.clear()
    made.flush()
    assert not made.is_mixed and world.ssd is not None and told[-1] == "opened for 7"
    assert world.adapters.identity == bytes([7] * 16)


def test_an_ssd_is_detached_once() -> None:
    world, told = World(1), list[str]()
    made = attachment(world, told)
    made.detach()
    with pytest.raises(ValueError, match="no SSD tier"):
        made.detach()


def test_everybody_is_told_of_other_weights_and_copies_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    told, arrival = list[str](), threading.Event()
    workers = {"copy": Workers("copy", 1, arrival)}
    storage = SimpleNamespace(workers=workers, submit=lambda name, job: workers[name].submit(job))
    ends = [True]
    load = SimpleNamespace(await_end=lambda deadline_s: ends[0])
    made = weights.Weights(storage, lambda: [load], (lambda: told.append("one"), lambda: told.append("two")))
    made.forget_weights()
    made.know_model(lambda: told.append("forgotten"))
    made.forget_weights()
    made.weights_changed()
    assert told == ["forgotten", "one", "two"]
    made.end_copies()
    ends[0] = False
    with pytest.raises(RuntimeError, match="it is not released"):
        made.end_copies()
    workers["copy"].close(time.monotonic() + 5.0)


def admin(world: World, told: list[object]) -> TierAdmin:
    def execute(decisions: Sequence[Decision]) -> int:
        (decision,) = decisions
        assert decision.source.tier == Tier.GPU and decision.freed_bytes == decision.option.num_bytes
        world.backup(world.nodes[decision.node_id])
        return world.removal.release(decision.node_id, decision.option.tier)

    world.tiers = (Tier.GPU, Tier.HOST)
    holds = SimpleNamespace(hold=lambda *hold: told.append(hold), left_s=lambda node_id: 5.0)
    folders = SimpleNamespace(attach=lambda *terms: told.append(terms), detach=lambda: told.append("detached"))
    parts = world.nodes, world, world.removal, execute, holds, SETTLED, folders
    return TierAdmin(*parts, dict, lambda: told.append("shadows"), Menu((), world.tiers, SLOT_BYTES))


def test_a_node_is_moved_by_hand_unless_it_is_used() -> None:
    world, told = World(2), list[object]()
    made = admin(world, told)
    with pytest.raises(ValueError, match="children above"):
        made.demote_node(1, Tier.HOST)
    answer = made.demote_node(2, Tier.HOST, 5.0)
    moved = {"id": 2, "tier": "host", "form": "exact", "is_there": True, "hold_seconds_left": 5.0}
    assert answer == moved and told == [(2, 5.0)]
    with pytest.raises(UnknownNode):
        made.demote_node(9, Tier.HOST)
    with pytest.raises(ValueError, match="no ssd tier"):
        made.demote_node(1, Tier.SSD)
    world.nodes[1].lock_ref = 1
    with pytest.raises(NodeBusy):
        made.demote_node(1, Tier.HOST)


def test_flushing_the_gpu_gives_up_shadows_and_what_is_nowhere_else() -> None:
    world, told = World(2), list[object]()
    assert admin(world, told).flush_tier(Tier.GPU) == {"tier": "gpu"}
    assert told == ["shadows"] and not world.nodes


def test_a_report_has_the_tiers_that_there_are() -> None:
    world = World(1)
    forms = {"exact": {"nodes": 1, "tokens": 8, "bytes": 64}}
    pool, plans = Pool(SLOTS - 4), SimpleNamespace(num_nodes=lambda tier: 1, forms_on=lambda tier: forms)
    figures = {"transfer_costs": lambda: COSTS.load, "num_prefetching": lambda: 2, "num_set_apart": lambda: 3}
    room = SimpleNamespace(copying_bytes=5)
    figures["num_redundant"] = lambda: world.placement.num_spare
    made = TierReport(pool, world, room, plans, **figures, slot_bytes=SLOT_BYTES)
    world.errors["host_checksum"] = 1
    told = made.describe_tiers()
    sizes = {"capacity_bytes": SLOTS * 16, "used_bytes": 64, "num_nodes": 1}
    assert told["tiers"]["gpu"] == {**sizes, "forms": forms, "compression": 2.0}
    assert set(told["tiers"]) == {"gpu", "host"} and told["tiers"]["host"]["copying_bytes"] == 5
    assert told["errors"] == {"host_checksum": 1}
    assert told["tiers"]["host"]["taken_bytes"] == told["tiers"]["host"]["capacity_bytes"] == world.host.num_bytes
    world.host.arena.num_failed = 2
    assert made.describe_tiers()["errors"] == {"host_checksum": 1, "host_not_grown": 2}
    assert (told["requests_waiting_for_a_copy"], told["slots_set_apart"]) == (2, 3)


def closing(world: World, told: list[str]) -> TierShutdown:
    world.ssd = Ssd(told)
    worker = SimpleNamespace(num_pending=0, close=lambda deadline_s: told.append("worker"))
    world.workers = {"write": worker, "copy": worker}
    world.adapters.may_reach_ssd = lambda node: node.id != 2
    backup = SimpleNamespace(start_copy=lambda node, tier: not told.append(f"save {node.id}"))
    folders = SimpleNamespace(close=lambda ssd, seconds: told.append("folder"))
    return TierShutdown(
        lambda: world.root,
        world.nodes,
        world,
        world.adapters,
        backup,
        SETTLED,
        folders.close,
        lambda: None,
        costs=lambda: COSTS,
        join_loads=lambda: told.append("load"),
        release_shadows=lambda: told.append("shadows"),
        slot_bytes=SLOT_BYTES,
    )


def test_the_most_used_are_saved_first_when_the_server_ends() -> None:
    world, told = World(3), list[str]()
    world.nodes[3].kv.weight = 2.0
    closing(world, told).close()
    assert told == ["load", "shadows", "save 3", "save 1", "worker", "worker", "folder"]


def test_nothing_is_saved_after_an_error() -> None:
    told = list[str]()
    closing(World(1), told).close(save=False)
    assert told == ["abandoned", "worker", "worker"]
