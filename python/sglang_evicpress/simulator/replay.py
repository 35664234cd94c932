"""Replaying a trace: the same policy object and the same tiers as a server, with durations from the cost model."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sglang_evicpress.core import EXACT, Decision, NodeStats, Tier
from sglang_evicpress.policy.cost_model import CostModel, CostSnapshot
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner
from sglang_evicpress.policy.reuse import ReuseClock, weight_of_new
from sglang_evicpress.simulator.sensitivity import Sensitivities
from sglang_evicpress.simulator.tree import Node, Tree
from sglang_evicpress.traces import Request, Trace

NO_QUEUE = math.inf
OBSERVE_EVERY = 4  # requests; learning from every one would take most of the time of a replay
DRIFT = 0.25
SWEPT_PER_REQUEST = 1024  # nodes: a server takes some ten to twenty rounds for a request, each for 64


@dataclass(slots=True)
class Outcome:
    """Result of one request. Seconds are simulated ones; ``hit_tokens`` by the tier they were on.

    ``service_s`` is loading and prefilling without waiting for others, ``ttft_s`` with it; ``recompute_s`` what
    prefilling the whole prompt would have taken instead. ``quality`` is that of the cached prefix: the mean over its
    tokens of the quality of the node they are in, 1 without a prefix. The regret is by how much the request was slower
    than its recomputation, the predicted one by the costs the policy knew.
    """

    arrival_s: float
    num_tokens: int
    hit_tokens: dict[Tier, int]
    load_s: float
    prefill_s: float
    ttft_s: float
    recompute_s: float
    regret_s: float
    predicted_regret_s: float
    quality: float

    @property
    def service_s(self) -> float:
        return self.load_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Machine:
    """The simulated machine: bytes per tier, what moving and computing really cost, and how many serve the trace.

    ``noise`` is the standard deviation of the logarithm of the seconds of every load and prefill. ``num_servers``
    machines share the work; ``NO_QUEUE``: nobody ever waits.
    """

    capacity: Mapping[Tier, int]
    costs: CostSnapshot
    noise: float = 0.0
    num_servers: float = NO_QUEUE


@dataclass
class Replay:
    """One trace under one policy; requests are served in the order of arrival, nothing is decided by their future.

    ``may_recompute``: a request loads only what is not predicted to be prefilled sooner; without it everything cached
    is loaded, as engines do today. ``learns``: the policy starts with ``machine.costs`` too but follows what it sees.
    """

    trace: Trace
    planner: Planner
    menu: Menu
    machine: Machine
    clock: ReuseClock
    sensitivities: Sensitivities
    may_recompute: bool = True
    learns: bool = False
    seed: int = 0
    moved_bytes: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.learner = CostModel(self.machine.costs) if self.learns else None
        self.known = self.machine.costs
        self.tree = Tree(self.trace.block_tokens)
        self.used = dict.fromkeys(self.menu.tiers, 0)
        self._random = random.Random(self.seed)
        self._free_at = dict.fromkeys(self.menu.tiers, 0.0)
        self._tick = 0

    def run(self) -> Iterator[Outcome]:
        for request in self.trace.requests:
            yield self.serve(request)

    def serve(self, request: Request) -> Outcome:
        self._tick += 1
        self.planner.advance(SWEPT_PER_REQUEST)
        now = request.arrival_s
        path = self._match(request)
        if path:
            self.clock.observe_reuse(now - path[-1].last_use_s, sum(node.num_tokens for node in path))
        hit = self._value_of_hit(now)
        kept = self._worth_loading(path)
        outcome = self._time(request, path[:kept])
        promoted = []
        for index, node in enumerate(path):
            node.weight += hit
            node.num_hits += 1
            node.last_use, node.last_use_s = self._tick, now
            if node.tier != Tier.GPU or index >= kept:
                self._bring(node, exact=index >= kept)
                promoted.append(node)
            else:
                self.planner.touch(node.id, node.weight, node.num_hits, self._tick)
        known = sum(len(node.blocks) for node in path)
        if known < len(request.blocks):
            promoted.append(self._insert(path[-1] if path else self.tree.root, request.blocks[known:], hit, now))
        for node in promoted:
            self.planner.add(self._stats(node))
        over = self.used[Tier.GPU] - self.machine.capacity[Tier.GPU]
        if over > 0:
            self._execute(self.planner.plan(Tier.GPU, over, self._room()))
        return outcome

    # ---- the path of a request

    def _match(self, request: Request) -> list[Node]:
        path, matched = self.tree.match(request)
        if path and matched < len(path[-1].blocks):
            if matched == 0:
                path.pop()
            else:
                lower = path[-1]
                path[-1] = self._split(lower, matched)
        return path

    def _split(self, lower: Node, num_blocks: int) -> Node:
        before = lower.num_bytes
        upper = self.tree.split(lower, num_blocks)
        upper.num_bytes = min(before, self.menu.num_bytes(upper.form, upper.num_tokens, tier=upper.tier))
        lower.num_bytes = before - upper.num_bytes
        self.planner.add(self._stats(upper))
        self.planner.add(self._stats(lower))
        return upper

    def _worth_loading(self, path: list[Node]) -> int:
        """Number of nodes of the path taken from the cache: the rest is predicted to be prefilled sooner."""
        if not self.may_recompute:
            return len(path)
        best, best_s, total_s = len(path), 0.0, 0.0
        for index in range(len(path) - 1, -1, -1):
            node = path[index]
            if node.tier == Tier.GPU:
                break
            saved = self.known.prefill.marginal_seconds(node.num_tokens, node.depth_tokens)
            total_s += self.known.load_seconds(node.tier, node.num_bytes, node.form.codec) - saved
            if total_s > best_s:
                best, best_s = index, total_s
        return best

    def _time(self, request: Request, path: list[Node]) -> Outcome:
        arrival, costs = request.arrival_s, self.machine.costs
        hits: dict[Tier, int] = {}
        bytes_from: dict[Tier, int] = {}
        loss = survivors = 0.0
        for node in path:
            hits[node.tier] = hits.get(node.tier, 0) + node.num_tokens
            bytes_from[node.tier] = bytes_from.get(node.tier, 0) + node.num_bytes
            loss += node.num_tokens * (1.0 - node.quality)
            survivors += node.num_tokens * node.form.kept_fraction
        bytes_from.pop(Tier.GPU, None)
        cached = sum(hits.values())
        # New tokens look at the survivors only: a compressed prefix is prefilled upon sooner.
        chunk = (max(request.num_tokens - cached, 1), int(survivors))
        whole = (max(request.num_tokens, 1), 0)
        noise = self._noise()
        prefill_s, recompute_s = costs.prefill.seconds(*chunk) * noise, costs.prefill.seconds(*whole) * noise
        loads = {tier: costs.load_seconds(tier, size) * self._noise() for tier, size in bytes_from.items()}
        predicted_s = self.known.prefill.seconds(*chunk) - self.known.prefill.seconds(*whole)
        predicted_s += sum(self.known.load_seconds(tier, size) for tier, size in bytes_from.items())
        if self.learner is not None and self._tick % OBSERVE_EVERY == 0:
            self.learner.observe_prefill([chunk], prefill_s)
            for tier, size in bytes_from.items():
                if size:
                    self.learner.observe_load(tier, size, loads[tier])
            if self.learner.costs.drifted_from(self.known, DRIFT):
                self.known = self.learner.costs
                self.planner.refresh(self.known)
        for tier, size in bytes_from.items():
            self.moved_bytes[f"{tier.label} to gpu"] += size
        load_s = float(sum(loads.values()))
        return Outcome(
            arrival,
            request.num_tokens,
            hits,
            load_s,
            prefill_s,
            self._queue(arrival, loads, prefill_s),
            recompute_s,
            max(0.0, load_s + prefill_s - recompute_s),
            max(0.0, predicted_s),
            1.0 - loss / cached if cached else 1.0,
        )

    def _noise(self) -> float:
        return math.exp(self._random.gauss(0.0, self.machine.noise)) if self.machine.noise else 1.0

    def _queue(self, arrival: float, loads: Mapping[Tier, float], prefill_s: float) -> float:
        """Seconds to the first token when each tier's link and the GPUs serve one after the other, in order of arrival.

        Loading overlaps with the prefill of others; ``num_servers`` machines drain a queue that many times as fast.
        """
        servers = self.machine.num_servers
        if servers == NO_QUEUE:
            return sum(loads.values()) + prefill_s
        ready = arrival
        for tier, seconds in loads.items():
            begin = max(arrival, self._free_at[tier])
            self._free_at[tier] = begin + seconds / servers
            ready = max(ready, begin + seconds)
        free_at = self._free_at[Tier.GPU]
        self._free_at[Tier.GPU] = max(free_at, arrival) + prefill_s / servers
        return max(ready, free_at) + prefill_s - arrival

    def _value_of_hit(self, now: float) -> float:
        if self.clock.is_due(now):
            restate = self.clock.rebase(now)
            for node in self.tree.nodes.values():
                node.weight = restate(node.weight, node.last_use_s)
            self.planner.reweigh({node.id: node.weight for node in self.tree.nodes.values()})
        return self.clock.value_of_hit(now)

    # ---- moves

    def _bring(self, node: Node, exact: bool) -> None:
        """The node is on the GPU now: loaded, or recomputed, which makes it exact."""
        self.used[node.tier] -= node.num_bytes
        if exact:
            node.form, node.quality = EXACT, 1.0
            node.num_bytes = node.num_tokens * self.menu.slot_bytes
        elif node.tier != Tier.GPU and node.form.codec != "raw":
            node.num_bytes, node.form = self.menu.num_bytes(node.form, node.num_tokens), node.form.decoded
        node.tier = Tier.GPU
        self.used[Tier.GPU] += node.num_bytes

    def _insert(self, parent: Node, blocks: tuple[int, ...], hit: float, now: float) -> Node:
        node = self.tree.add(parent, blocks)
        node.curve = self.sensitivities.curve(blocks[0])
        node.num_bytes = node.num_tokens * self.menu.slot_bytes
        siblings = 0 if parent is self.tree.root else len(parent.children)
        node.weight = weight_of_new(hit, parent.weight, siblings)
        node.num_hits, node.last_use, node.last_use_s = 1, self._tick, now
        self.used[Tier.GPU] += node.num_bytes
        return node

    def _room(self) -> dict[Tier, int]:
        return {tier: self.machine.capacity[tier] - self.used[tier] for tier in self.menu.tiers if tier != Tier.GPU}

    def _execute(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            node = self.tree.nodes[decision.node_id]
            self.decisions[str(decision.option)] += 1
            self.used[node.tier] -= node.num_bytes
            if decision.option.tier is None or decision.option.form is None:
                self.tree.remove(node)
                self.planner.remove(node.id)
                continue
            if decision.option.tier != node.tier:
                name = f"{node.tier.label} to {decision.option.tier.label}"
                self.moved_bytes[name] += decision.option.num_bytes
            if decision.option.form != node.form:
                node.quality = node.curve[self.menu.forms.index(decision.option.form)]
            node.tier, node.form, node.num_bytes = decision.option.tier, decision.option.form, decision.option.num_bytes
            self.used[node.tier] += node.num_bytes
            self.planner.add(self._stats(node))

    def _stats(self, node: Node) -> NodeStats:
        share = node.num_tokens / (node.depth_tokens + node.num_tokens)
        parent = node.parent
        return NodeStats(
            id=node.id,
            parent_id=None if parent is None or parent is self.tree.root else parent.id,
            tier=node.tier,
            form=node.form,
            num_tokens=node.num_tokens,
            num_bytes=node.num_bytes,
            depth_tokens=node.depth_tokens,
            quality=1.0 - share * (1.0 - node.quality),
            curve=[1.0 - share * (1.0 - quality) for quality in node.curve],
            allowed_forms=self.menu.smaller(node.form),
            weight=node.weight,
            num_hits=node.num_hits,
            last_use=node.last_use,
        )
