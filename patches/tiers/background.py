"""Keeping room free ahead of need: what is taken next is copied below before it is due, and released between two
watermarks, so that evicting normally only frees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.controller.controller import AHEAD, NO_COPY
from sglang_evicpress.core import Decision, Option, Tier
from sglang_evicpress.patches.tiers.types import (
    Backups,
    Controlling,
    Copies,
    HostForms,
    HostMemory,
    Names,
    Plans,
    Slots,
    Tiers,
)
from sglang_evicpress.patches.tree.node import is_lossy, start_of
from sglang_evicpress.patches.tree.ranks import Ranks
from sglang_evicpress.patches.tree.types import Allocator, Node
from sglang_evicpress.policy.cost_model import CostSnapshot

AHEAD_SHARE = 1 / 4  # of the pool, and of the host tier, that is taken next: copied before it is due
HOST_AHEAD_SHARE = 1 / 2  # of the host tier where writing costs nothing but time: then a read need not wait for writes
MOST_NEEDED_SHARE = 1 / 4  # of the pool, and of the host tier: what is kept free for the next requests
# of the host tier, without and with an SSD below: for such copies at most
REDUNDANT_SHARE = {False: 1 / 4, True: 1 / 2}
LOW_SHARE, HIGH_SHARE = 1 / 32, 1 / 16  # of the pool: below the first, nodes are released until the second is free
HOST_LOW_SHARE, HOST_HIGH_SHARE = 1 / 16, 1 / 8  # the same of the host tier
SSD_LOW_SHARE, SSD_HIGH_SHARE = 1 / 32, 1 / 16  # the same of the SSD tier

MOST_NODES = 2
"""Nodes that a step moves or begins to copy."""

MOST_STEPS = 6
"""Steps of a call where requests would have to evict else, unless the time of the round is over; with other ranks,
which no clock holds together, the steps alone count."""

HOST_STEPS = 4
"""Steps after which whoever found no room on the host may ask again, or give up."""

LOOKED_AHEAD, LEAST_READY, MOST_PUT_OFF = 8, 4, 8
"""Nodes of which a step finds out what they are to be soon: more than are taken before the next one. Where all were
ready for that, the next look waits until fewer of them are left on the GPU, or for so many steps: they may be used."""


class Marking(Protocol):
    """Tells of something that calls for plans."""

    def __call__(self, *, at_once: bool = False) -> None: ...


class SsdRoom(Protocol):
    """Room on the SSD; ``may_write``: it takes more."""

    @property
    def may_write(self) -> bool: ...
    def drop_fragments(self) -> None: ...
    def make_ssd_room(self, num_bytes: int) -> None: ...


@dataclass(eq=False, repr=False)
class BackgroundDemotion:
    """Keeps room free on every tier. ``num_slots_needed``: what the next requests will take; ``asked_bytes``: what is
    asked for on the host at a time; ``is_late``: the round's time is over; ``mark_dirty``: there is more to be done."""

    nodes: Mapping[int, Node]
    allocator: Allocator
    ledger: Slots
    controller: Controlling
    storage: Tiers
    names: Names
    placement: Copies
    room: HostMemory
    plans: Plans
    backup: Backups
    host_forms: HostForms
    ssd: SsdRoom
    config: EvicPressConfig
    _: KW_ONLY
    costs: Callable[[], CostSnapshot]
    num_slots_needed: Callable[[], int]
    asked_bytes: Callable[[], int]
    mark_dirty: Marking
    is_late: Callable[[], bool]
    ranks: Ranks
    slot_bytes: int

    def __post_init__(self) -> None:
        self._planned: Sequence[int] = ()  # self.nodes that the last look ahead would have leave the GPU
        self._ahead = deque[Decision]()  # of these, those that were not looked at yet
        # What a look ahead has found, where none of it was to be begun: ids and versions.
        self._ready: Sequence[tuple[int, int]] = ()
        self._num_put_off = 0  # looks ahead since
        self._todo: list[Callable[[], int]] = []
        self._is_gpus_turn = False
        self._num_host_steps = 0  # of the present plan for the host
        self._has_done_any = False  # since the work was listed

    def keep_room(self) -> None:
        """Make room that is short on any tier, and copy below what is next. A step does one of these, for a few nodes:
        every other one for the GPU, where requests wait for it. What few steps do not do is left to the next call."""
        is_pressing: bool | None = None
        for _ in range(MOST_STEPS):
            is_pressing = self._keep_some_room()
            if not is_pressing or (self.ranks.is_alone and self.is_late()):
                break
        if is_pressing is not None:
            self.mark_dirty(at_once=is_pressing)

    def _keep_some_room(self) -> bool | None:
        """True if a request would have to evict, all that it needs in one piece; None if there is nothing to do."""
        self._is_gpus_turn = not self._is_gpus_turn
        num_released = self._keep_gpu_room() if self._is_gpus_turn else 0
        if not num_released:
            if not self._todo:
                self._todo = [self._look_ahead_on_gpu, self._look_ahead_on_host, self._keep_host_room]
                self._keep_ssd_room()
                self._has_done_any = False
            while self._todo and not self._has_done(self._todo.pop()()):
                pass
        if self._is_gpus_turn and not num_released and not self._todo and not self._has_done_any:
            return None
        return self._slots_short() > 0

    def _has_done(self, num_nodes: int) -> bool:
        self._has_done_any |= num_nodes > 0
        return num_nodes > 0

    def _slots_short(self) -> int:
        """Slots to be released on the GPU."""
        allocator = self.allocator
        free = allocator.available_size()
        needed = min(self.num_slots_needed(), int(MOST_NEEDED_SHARE * allocator.size))
        if free >= max(LOW_SHARE * allocator.size, needed):
            return 0
        return min(max(int(HIGH_SHARE * allocator.size), needed) - free, self.ledger.evictable)

    def _keep_gpu_room(self) -> int:
        """Returns how many nodes it was about, as do the others."""
        num_slots = self._slots_short()
        return self._release(Tier.GPU, num_slots * self.slot_bytes) if num_slots > 0 else 0

    def _look_ahead_on_gpu(self) -> int:
        allocator, slot_bytes = self.allocator, self.slot_bytes
        ahead = min(
            int(AHEAD_SHARE * allocator.size),
            int(REDUNDANT_SHARE[self.storage.ssd is not None] * self.storage.host.num_bytes) // slot_bytes,
        )
        ahead = min(ahead - allocator.available_size(), self.ledger.evictable)
        if ahead <= 0:
            self._ahead.clear()
            self._ready = ()
            self._plan_to_leave([])
            return 0
        num_begun = self._prepare_ahead()
        if num_begun:
            self._plan_to_leave(self._planned)  # copies that came meanwhile are kept as well
            return num_begun
        self._num_put_off += 1
        if self._num_put_off <= MOST_PUT_OFF and sum(map(self._is_ready, self._ready)) >= LEAST_READY:
            return 0
        self._num_put_off = 0
        self._ahead.extend(self._plan_ahead(Tier.GPU, ahead * slot_bytes, LOOKED_AHEAD))
        self._plan_to_leave([one.node_id for one in self._ahead if one.option.tier in (Tier.HOST, Tier.SSD)])
        found = (self.nodes[one.node_id] for one in self._ahead)  # of one that is copied more may be to be done then
        self._ready = [(node.id, node.kv.version) for node in found if node.kv.job is None]
        return self._prepare_ahead()

    def _is_ready(self, found: tuple[int, int]) -> bool:
        """True if a node that was ready to leave the GPU has not left, changed or come into use since."""
        node = self.nodes.get(found[0])
        return node is not None and node.value is not None and node.kv.version == found[1] and not node.lock_ref

    def _prepare_ahead(self) -> int:
        """Begin with the next nodes that are to leave the GPU; returns how many copies were begun."""
        num_begun = 0
        while self._ahead:
            decision = self._ahead.popleft()
            node = self.nodes.get(decision.node_id)  # None: it had to make room on the host
            if node is None or node.value is None or node.kv.job is not None:
                continue
            is_ready = self._prepare(node, decision.option)
            num_begun += node.kv.job is not None
            if not is_ready or node.kv.job is not None:
                self._ready = ()
            if not is_ready:
                self._ahead.clear()
            if num_begun >= MOST_NODES:
                break
        return num_begun

    def _release(self, tier: Tier, num_bytes: int) -> int:
        plan, former = self._plan_ahead(tier, num_bytes, MOST_NODES), self.controller.num_moves
        self.controller.execute(plan, occasion=AHEAD)
        if plan and self.controller.num_moves == former:  # the first ones cannot move: others may
            plan = self._plan_ahead(tier, num_bytes, LOOKED_AHEAD)
            self.controller.execute(plan, occasion=AHEAD)
        is_in_vain = self.controller.num_moves == former and any(one.option.tier == Tier.SSD for one in plan)
        if is_in_vain and tier == Tier.HOST and self.room.wanted_bytes and not self.ssd.may_write:
            # It was planned as if the SSD took it all, so that nothing there is dropped for what will not come.
            plan = self.plans.plan_without_copies(tier, self.plans.bounded(tier, num_bytes, LOOKED_AHEAD))
            plan = [one for one in plan if not self._is_written(one.node_id)]  # its memory would not be free
            self.controller.execute(plan[:MOST_NODES], NO_COPY, occasion=AHEAD)
        return self.controller.num_moves - former

    def _is_written(self, node_id: int) -> bool:
        copy = self.nodes[node_id].kv.copies.get(Tier.HOST)
        return copy is not None and copy.entry.write is not None

    def _plan_ahead(self, tier: Tier, num_bytes: int, num_nodes: int) -> Sequence[Decision]:
        return self.controller.planner.plan(tier, num_bytes, self.room.room(), most_nodes=num_nodes)

    def _plan_to_leave(self, node_ids: Sequence[int]) -> None:
        """These are to leave the GPU soon, the first first; what they have on the host is given up last."""
        self._planned = node_ids
        self.placement.plan_to_leave(node_ids)

    def _prepare(self, node: Node, option: Option) -> bool:
        """See that a node can become, without waiting, what it is to be soon. False when there is no room for it.

        What is to go to the host in a smaller form is copied as it is first and compressed there; until it leaves, the
        GPU has all of it.
        """
        tier, form, kv = option.tier, option.form, node.kv
        if not (kv.is_text and kv.is_finite):
            return True  # it is dropped when it has to go
        if tier == Tier.SSD and not self.ssd.may_write:
            tier = Tier.HOST  # from where it goes on when it can
        is_to_lose = form is None or form.decoded != kv.form
        if is_to_lose and self._lacks_exact(node) and self.backup.start_copy(node, Tier.SSD, keeps_planned=True):
            return True  # else there is no room for all of it: what it is to become may fit
        if tier is None or tier == Tier.GPU or (tier == Tier.SSD and not self.names.may_reach_ssd(node)):
            return True
        copy = kv.copies.get(tier)
        if copy is not None and (tier == Tier.SSD or not copy.form.is_exact):
            return True
        is_as_it_is = form is not None and form.pressed == kv.form.pressed
        if copy is None or (is_as_it_is and not self.placement.has_same(node, tier, form)):
            codec = form.codec if form is not None and is_as_it_is else None
            return self.backup.start_copy(node, tier, codec=codec, keeps_planned=True)
        if form is not None and form != copy.form:
            self.host_forms.compress_on_host(node, form)
        return True

    def _keep_ssd_room(self) -> None:
        self.ssd.drop_fragments()
        ssd = self.storage.ssd
        if ssd is not None and ssd.used_bytes > (1 - SSD_LOW_SHARE) * ssd.store.capacity_bytes:
            self.ssd.make_ssd_room(int(SSD_HIGH_SHARE * ssd.store.capacity_bytes))

    def _free_on_host(self) -> int:
        return self.room.room()[Tier.HOST] - self._prepared_bytes()

    def _keep_host_room(self) -> int:
        """Below the low watermark of free host memory, or where an SSD is below what is asked for at a time, nodes
        shrink, go on to the SSD, or are dropped, up to the high one, or to what was missing last."""
        host, num_nodes = self.storage.host, 0
        self.host_forms.repack()
        free = self._free_on_host()
        usual = 0 if self.storage.ssd is None else min(self.asked_bytes(), int(MOST_NEEDED_SHARE * host.num_bytes))
        low, high = (max(int(share * host.num_bytes), usual) for share in (HOST_LOW_SHARE, HOST_HIGH_SHARE))
        if free < low or self.room.wanted_bytes:
            # Pieces of one entry free it only together, so what is counted as free may not be all that can be had.
            lacking = max(self.room.wanted_bytes - host.free_bytes, self.room.wanted_bytes // 4)
            wanted = max(high - free, lacking)
            num_nodes = self._release(Tier.HOST, wanted)
        self._num_host_steps += 1
        is_enough = host.free_bytes >= self.room.wanted_bytes
        if not num_nodes or is_enough or self._num_host_steps >= HOST_STEPS:
            self._num_host_steps = 0
            self.room.end_plan()
        return num_nodes

    def _look_ahead_on_host(self) -> int:
        """What is next to leave the host is written to the SSD ahead."""
        if self.storage.ssd is None:
            return 0
        share = HOST_AHEAD_SHARE if self.config.ssd_write_gb_per_day is None else AHEAD_SHARE
        ahead = int(share * self.storage.host.num_bytes) - self._free_on_host()
        if ahead <= 0:
            return 0
        num_begun = 0
        for decision in self._plan_ahead(Tier.HOST, ahead, LOOKED_AHEAD):
            node = self.nodes.get(decision.node_id)
            if node is None or not self.names.may_reach_ssd(node):
                continue  # it had to make room on the SSD, or never goes there
            is_move = decision.option.tier == Tier.SSD and node.value is None and node.kv.job is None
            if is_move and not self._prepare_on_ssd(node, decision.option):
                break
            num_begun += is_move and node.kv.job is not None
            if num_begun >= MOST_NODES:
                break
        return num_begun

    def _prepare_on_ssd(self, node: Node, option: Option) -> bool:
        """See that the SSD has a node that only the host has in the form in which it is to go there, or a smaller one:
        what lies there in a larger one takes longer to read. False when there is no room for it."""
        there, form = node.kv.copies.get(Tier.SSD), option.form
        if node.kv.job is not None:
            return True
        if there is not None and (there.form == form or there.num_bytes <= option.num_bytes):
            return True
        if form is None or form == node.kv.form:
            return self.placement.has_same(node, Tier.SSD) or self.backup.start_copy(node, Tier.SSD)
        if self.room.is_busy:
            return False
        if self.host_forms.copy_to_ssd(node, form) or there is not None:
            return True
        return self.backup.start_copy(node, Tier.SSD)  # as it is, to be there if need be

    def _prepared_bytes(self) -> int:
        """Bytes of host copies whose nodes are to leave the GPU soon."""
        nodes = (node for node_id in self._planned if (node := self.nodes.get(node_id)) and node.value is not None)
        return sum(copy.num_bytes for node in nodes if (copy := node.kv.copies.get(Tier.HOST)) is not None)

    def _lacks_exact(self, node: Node) -> bool:
        """True if a node that is about to become lossy should have its exact KV on the SSD first: it is had sooner from
        there than by computing it, and a policy that plans promotions may give it back."""
        is_missing = self.ssd.may_write and not is_lossy(node) and Tier.SSD not in node.kv.copies
        if not is_missing or not self.controller.planner.has_utility or not self.names.may_reach_ssd(node):
            return False
        num_tokens = len(node.key)
        costs = self.costs()
        load_s = costs.load_seconds(Tier.SSD, num_tokens * self.slot_bytes)
        return load_s < costs.prefill.marginal_seconds(num_tokens, start_of(node))
