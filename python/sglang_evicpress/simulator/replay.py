"""Replaying a trace: the same policy object and the same tiers as a server, with durations from the cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sglang_evicpress.core import EXACT, Decision, NodeStats, Tier
from sglang_evicpress.costs import Costs
from sglang_evicpress.policy.base import Policy
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.reuse import ReuseClock
from sglang_evicpress.simulator.sensitivity import Sensitivities
from sglang_evicpress.simulator.tree import Node, Tree
from sglang_evicpress.traces import Request, Trace


INHERIT = True


@dataclass(slots=True)
class Outcome:
    """What one request met: tokens by where they came from, seconds, and the quality of its prefix."""

    arrival_s: float
    num_tokens: int
    hit_tokens: dict[Tier, int]
    load_s: float
    prefill_s: float
    ttft_s: float
    recompute_s: float
    quality: float

    @property
    def service_s(self) -> float:
        return self.load_s + self.prefill_s


@dataclass(slots=True)
class Ledger:
    """What a replay moved and decided."""

    moved_bytes: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)


class Replay:
    """One trace under one policy. ``capacity`` gives bytes per tier; requests are served in the order of arrival."""

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        menu: Menu,
        costs: Costs,
        capacity: Mapping[Tier, int],
        clock: ReuseClock,
        sensitivities: Sensitivities,
        num_servers: float = 1.0,
        may_recompute: bool = True,
    ) -> None:
        self.trace = trace
        self.policy = policy
        self.menu = menu
        self.costs = costs
        self.capacity = {tier: capacity[tier] for tier in menu.tiers}
        self.clock = clock
        self.sensitivities = sensitivities
        self.num_servers = num_servers
        self.may_recompute = may_recompute
        self.tree = Tree(trace.block_tokens)
        self.used = dict.fromkeys(menu.tiers, 0)
        self.ledger = Ledger()
        self._free_at = dict.fromkeys(menu.tiers, 0.0)
        self._tick = 0

    def run(self) -> Iterator[Outcome]:
        for request in self.trace.requests:
            yield self.serve(request)

    def serve(self, request: Request) -> Outcome:
        self._tick += 1
        now = request.arrival_s
        path = self._match(request)
        hit = self._value_of_hit(now)
        kept = self._worth_loading(path)
        outcome = self._time(request, path[:kept])
        promoted = []
        for index, node in enumerate(path):
            node.weight += hit
            node.num_hits += 1
            node.last_use = self._tick
            if node.tier != Tier.GPU or index >= kept:
                self._bring(node, exact=index >= kept)
                promoted.append(node)
            else:
                self.policy.touch(node.id, node.weight, node.num_hits, self._tick)
        known = sum(len(node.blocks) for node in path)
        if known < len(request.blocks):
            promoted.append(self._insert(path[-1] if path else self.tree.root, request.blocks[known:], hit))
        for node in promoted:
            self.policy.put(self._stats(node))
        over = self.used[Tier.GPU] - self.capacity[Tier.GPU]
        if over > 0:
            self._carry_out(self.policy.plan(Tier.GPU, over, self._room()))
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
        upper.num_bytes = min(before, self.menu.num_bytes(upper.form, upper.num_tokens))
        lower.num_bytes = before - upper.num_bytes
        self.policy.put(self._stats(upper))
        self.policy.put(self._stats(lower))
        return upper

    def _worth_loading(self, path: list[Node]) -> int:
        """How many nodes of the path are taken from the cache: the rest is predicted to be prefilled sooner."""
        if not self.may_recompute:
            return len(path)
        best, best_s, total_s = len(path), 0.0, 0.0
        for index in range(len(path) - 1, -1, -1):
            node = path[index]
            if node.tier == Tier.GPU:
                break
            saved = self.costs.prefill.marginal_seconds(node.num_tokens, node.depth_tokens)
            total_s += self.costs.load_seconds(node.tier, node.num_bytes, node.form.codec) - saved
            if total_s > best_s:
                best, best_s = index, total_s
        return best

    def _time(self, request: Request, path: list[Node]) -> Outcome:
        costs, arrival = self.costs, request.arrival_s
        hits: dict[Tier, int] = {}
        bytes_from: dict[Tier, int] = {}
        loss = 0.0
        for node in path:
            hits[node.tier] = hits.get(node.tier, 0) + node.num_tokens
            bytes_from[node.tier] = bytes_from.get(node.tier, 0) + node.num_bytes
            loss += node.num_tokens * (1.0 - node.quality)
        cached = sum(hits.values())
        new = max(request.num_tokens - cached, 1)
        prefill_s = costs.prefill.seconds(new, request.num_tokens - new)
        load_s, ready = 0.0, arrival
        for tier, num_bytes in bytes_from.items():
            if tier != Tier.GPU:
                seconds = costs.load_seconds(tier, num_bytes)
                load_s += seconds
                begin = max(arrival, self._free_at[tier])
                self._free_at[tier] = begin + seconds / self.num_servers
                ready = max(ready, begin + seconds)
                self.ledger.moved_bytes[f"{tier.label} to gpu"] += num_bytes
        free_at = self._free_at[Tier.GPU]
        self._free_at[Tier.GPU] = max(free_at, arrival) + prefill_s / self.num_servers
        ttft = max(ready, free_at) + prefill_s - arrival
        recompute_s = costs.prefill.seconds(max(request.num_tokens, 1), 0)
        quality = 1.0 - loss / cached if cached else 1.0
        return Outcome(arrival, request.num_tokens, hits, load_s, prefill_s, ttft, recompute_s, quality)

    def _value_of_hit(self, now: float) -> float:
        if self.clock.is_due(now):
            factor = self.clock.rebase(now)
            for node in self.tree.walk():
                node.weight *= factor
            self.policy.scale_weights(factor)
        return self.clock.value_of_hit(now)

    # ---- moves

    def _bring(self, node: Node, exact: bool) -> None:
        """The node is on the GPU now: loaded, or recomputed, which makes it exact."""
        self.used[node.tier] -= node.num_bytes
        node.tier = Tier.GPU
        if exact:
            node.form, node.quality = EXACT, 1.0
            node.num_bytes = node.num_tokens * self.menu.slot_bytes
        self.used[Tier.GPU] += node.num_bytes

    def _insert(self, parent: Node, blocks: tuple[int, ...], hit: float) -> Node:
        node = self.tree.add(parent, blocks)
        node.curve = self.sensitivities.curve(blocks[0])
        node.num_bytes = node.num_tokens * self.menu.slot_bytes
        node.weight, node.num_hits, node.last_use = hit, 1, self._tick
        if INHERIT and parent is not self.tree.root:
            node.weight = max(hit, parent.weight / len(parent.children))
        self.used[Tier.GPU] += node.num_bytes
        return node

    def _room(self) -> dict[Tier, int]:
        return {tier: self.capacity[tier] - self.used[tier] for tier in self.menu.tiers if tier != Tier.GPU}

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            node = self.tree.nodes[decision.node_id]
            self.ledger.decisions[str(decision.option)] += 1
            self.used[node.tier] -= node.num_bytes
            if decision.option.tier is None or decision.option.form is None:
                self.tree.remove(node)
                self.policy.forget(node.id)
                continue
            if decision.option.tier != node.tier:
                name = f"{node.tier.label} to {decision.option.tier.label}"
                self.ledger.moved_bytes[name] += decision.option.num_bytes
            if decision.option.form != node.form:
                node.quality = node.curve[self.menu.forms.index(decision.option.form)]
            node.tier, node.form, node.num_bytes = decision.option.tier, decision.option.form, decision.option.num_bytes
            self.used[node.tier] += node.num_bytes
            self.policy.put(self._stats(node))

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
            reachable=self.menu.smaller(node.form),
            weight=node.weight,
            num_hits=node.num_hits,
            last_use=node.last_use,
        )
