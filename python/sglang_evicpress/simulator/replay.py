"""Replaying a trace: the same policy object and the same tiers as a server, with durations from the cost model."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sglang_evicpress.core import EXACT, Decision, NodeStats, Tier
from sglang_evicpress.policy.cost_model import CostModel, CostSnapshot
from sglang_evicpress.policy.load_or_recompute import Piece, num_worth_loading
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner
from sglang_evicpress.policy.quality_target import QualityTarget, Share
from sglang_evicpress.policy.reuse_tracker import ReuseTracker
from sglang_evicpress.policy.wait_cost import SEARCHED_FROM_S
from sglang_evicpress.simulator.queue import NO_QUEUE, Queue
from sglang_evicpress.simulator.sensitivity import Sensitivities
from sglang_evicpress.simulator.tree import Node, Tree
from sglang_evicpress.traces import Request, Trace

MIN_COMPRESS_TOKENS = 64  # as a server has it unless told otherwise
OBSERVE_EVERY = 4  # requests; learning from every one would take most of the time of a replay
DRIFT = 0.25
JUDGE_EVERY = 8  # lossy hits, of which one is judged, as a server's profiler does
SWEPT_PER_REQUEST = 1024  # nodes: a server takes some ten to twenty rounds for a request, each for 64


@dataclass(slots=True)
class Outcome:
    """Result of one request. Seconds are simulated ones; ``hit_tokens`` by the tier they were on.

    ``service_s`` is loading and prefilling without waiting for others, ``ttft_s`` with it; ``recompute_s`` what
    prefilling the whole prompt would have taken instead. ``quality`` is that of the whole cached prefix: the mean over
    its tokens of the quality of the node they are in times that of its lineage, 1 without a prefix. The regret is by
    how much the request was slower than its recomputation would have been behind the same queue, the predicted one by
    the costs the policy knew.
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
    Nodes of less than ``min_compress_tokens`` tokens stay as they are.
    ``target`` tunes alpha, and refuses what is too lossy for it: that is prefilled. ``curve_error`` is by how much more
    quality the policy's curves promise than there is; every eighth lossy hit tells ``target`` what it was worth.
    """

    trace: Trace
    planner: Planner
    menu: Menu
    machine: Machine
    sensitivities: Sensitivities
    may_recompute: bool = True
    learns: bool = False
    seed: int = 0
    min_compress_tokens: int = MIN_COMPRESS_TOKENS
    target: QualityTarget | None = None
    curve_error: float = 0.0
    moved_bytes: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.learner = CostModel(self.machine.costs) if self.learns else None
        self.known = self.machine.costs
        self.tree = Tree(self.trace.block_tokens)
        self.used = dict.fromkeys(self.menu.tiers, 0)
        self._random = random.Random(self.seed)
        self.queue = Queue(self.machine.num_servers, self.menu.tiers)
        self._lineage = 1.0  # of what the present request computes
        self._tick = 0
        self.reuse = ReuseTracker()
        self._num_lossy = 0

    def run(self) -> Iterator[Outcome]:
        for request in self.trace.requests:
            yield self.serve(request)

    def serve(self, request: Request) -> Outcome:
        self._tick += 1
        self.planner.advance(SWEPT_PER_REQUEST)
        now = request.arrival_s
        path = self._match(request)
        self._grow_older(now)
        if path:
            self.reuse.observe_request(path[-1].id, now)
        kept = self._worth_loading(path, now)
        if self.target is not None:
            self.target.note_prompt(request.num_tokens)
            kept = self._affordable(path[:kept], self.target, now)
        outcome = self._time(request, path[:kept])
        self._lineage = outcome.quality
        promoted = []
        for index, node in enumerate(path):
            self.reuse.use(node.id, now)
            node.weight = self.reuse.rate(node.id)
            node.num_hits += 1
            node.last_use = self._tick
            if node.tier != Tier.GPU or index >= kept:
                self._bring(node, exact=index >= kept)
                promoted.append(node)
            else:
                self.planner.touch(node.id, node.weight, node.num_hits, self._tick)
        known = sum(len(node.blocks) for node in path)
        if known < len(request.blocks):
            promoted.append(self._insert(path[-1] if path else self.tree.root, request.blocks[known:], now))
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
        self.reuse.split(upper.id, lower.id)
        upper.num_bytes = min(before, self.menu.num_bytes(upper.form, upper.num_tokens, tier=upper.tier))
        lower.num_bytes = before - upper.num_bytes
        self.planner.add(self._stats(upper))
        self.planner.add(self._stats(lower))
        return upper

    def _worth_loading(self, path: list[Node], now: float) -> int:
        """Number of nodes of the path taken from the cache: the rest is predicted to be prefilled sooner, behind what
        others load and while others wait."""
        on_gpu = sum(node.tier == Tier.GPU for node in path)
        if not self.may_recompute or on_gpu == len(path):
            return len(path)
        pieces = [
            Piece(node.num_tokens, node.depth_tokens, node.tier, node.num_bytes, node.form.codec)
            for node in path[on_gpu:]
        ]
        slack_s = self.queue.wait_s(Tier.GPU, now)
        waits: dict[Tier, float] = {tier: self.queue.wait_s(tier, now) for tier in self.menu.tiers if tier != Tier.GPU}
        if Tier.HOST in waits:  # unlike on a server, its link works while a request waits for its turn
            waits[Tier.HOST] = max(0.0, waits[Tier.HOST] - slack_s)
        congestion = self.queue.congestion(now)
        return on_gpu + num_worth_loading(pieces, self.known, waits=waits, slack_s=slack_s, congestion=congestion)

    def _affordable(self, path: list[Node], target: QualityTarget, now: float) -> int:
        """Number of the path's nodes that the target lets be served; tells it of the hit, and the policy of alpha."""
        parts = [Share(node.num_tokens, node.num_tokens * (1.0 - node.lineage * node.quality)) for node in path]
        kept = target.num_affordable(parts)
        served, refused = (
            Share(sum(part.num_tokens for part in some), math.fsum(part.lost for part in some))
            for some in (parts[:kept], parts[kept:])
        )
        target.note_hit(served, refused)
        if served.lost:
            self._num_lossy += 1
            if self._num_lossy % JUDGE_EVERY == 1:
                true_loss = math.fsum(self._true_loss(node) for node in path[:kept])
                target.note_judged(1.0 - served.lost / served.num_tokens, 1.0 - true_loss / served.num_tokens)
        alpha = target.next_alpha(now, self.known.prefill, len(self.tree.nodes))
        if alpha is not None:
            self.planner.set_alpha(alpha)
        return kept

    def _true_quality(self, node: Node) -> float:
        if node.form.is_exact or not self.curve_error:
            return node.quality
        return min(1.0, max(0.0, node.quality - self.curve_error))

    def _true_loss(self, node: Node) -> float:
        """Tokens of the node that are lost, by its form and by what it was computed upon."""
        return node.num_tokens * (1.0 - node.lineage * self._true_quality(node))

    def _time(self, request: Request, path: list[Node]) -> Outcome:
        arrival, costs = request.arrival_s, self.machine.costs
        hits: dict[Tier, int] = {}
        bytes_from: dict[Tier, int] = {}
        loss = survivors = 0.0
        for node in path:
            hits[node.tier] = hits.get(node.tier, 0) + node.num_tokens
            bytes_from[node.tier] = bytes_from.get(node.tier, 0) + node.num_bytes
            loss += self._true_loss(node)
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
        predicted_load_s = sum(
            self.known.load_seconds(tier, size) + self.queue.wait_s(tier, arrival) for tier, size in bytes_from.items()
        )
        predicted_s += max(0.0, predicted_load_s - self.queue.wait_s(Tier.GPU, arrival))
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
        wait_s = self.queue.wait_s(Tier.GPU, arrival)
        ttft_s = self.queue.serve(arrival, loads, prefill_s)
        return Outcome(
            arrival,
            request.num_tokens,
            hits,
            load_s,
            prefill_s,
            ttft_s,
            recompute_s,
            max(0.0, ttft_s - wait_s - recompute_s),
            max(0.0, predicted_s),
            1.0 - loss / cached if cached else 1.0,
        )

    def _noise(self) -> float:
        return math.exp(self._random.gauss(0.0, self.machine.noise)) if self.machine.noise else 1.0

    def _grow_older(self, now: float) -> None:
        self.planner.least_loss = SEARCHED_FROM_S / self.reuse.model.horizon_s
        while self.reuse.is_behind(now):  # a server has many steps between two requests
            for node_id in self.reuse.advance(now):
                node = self.tree.nodes[node_id]
                node.weight = self.reuse.rate(node_id)
                self.planner.touch(node_id, node.weight, node.num_hits, node.last_use)

    # ---- moves

    def _bring(self, node: Node, exact: bool) -> None:
        """The node is on the GPU now: loaded, or recomputed, which makes it as exact as what it was computed on."""
        self.used[node.tier] -= node.num_bytes
        if exact:
            node.form, node.quality, node.lineage = EXACT, 1.0, self._lineage
            node.num_bytes = node.num_tokens * self.menu.slot_bytes
        elif node.tier != Tier.GPU and (node.form.codec != "raw" or node.form.is_uneven):
            node.num_bytes, node.form = self.menu.num_bytes(node.form, node.num_tokens), node.form.decoded
        node.tier = Tier.GPU
        self.used[Tier.GPU] += node.num_bytes

    def _insert(self, parent: Node, blocks: tuple[int, ...], now: float) -> Node:
        node = self.tree.add(parent, blocks)
        node.curve, node.lineage = self.sensitivities.curve(blocks[0]), self._lineage
        node.num_bytes = node.num_tokens * self.menu.slot_bytes
        siblings = 0 if parent is self.tree.root else len(parent.children)
        self.reuse.add(node.id, now, node.num_tokens, siblings)
        node.weight = self.reuse.rate(node.id)
        node.num_hits, node.last_use = 1, self._tick
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
                self.reuse.remove(node.id)
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
            allowed_forms=self._allowed_forms(node),
            weight=node.weight,
            num_hits=node.num_hits,
            last_use=node.last_use,
            filled=self.menu.filled(node.form, node.num_tokens),
        )

    def _allowed_forms(self, node: Node) -> int:
        """What can be made of the node where it is, as a server has it: anywhere but on the SSD, below the GPU only by
        a policy that weighs quality."""
        policy = self.planner.policy
        is_open = node.tier == Tier.GPU or (node.tier == Tier.HOST and policy.weighs_quality)
        is_long = node.num_tokens >= self.min_compress_tokens
        return self.menu.smaller(node.form) if is_open and is_long and policy.compresses else 0
