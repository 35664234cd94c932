"""Random snapshots of a cache under pressure: a radix tree of nodes, a menu, costs, what to free, what is free."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from evicbench.policy.runs import SLOT_BYTES
from sglang_evicpress.core import Form, NodeStats, Tier
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner
from sglang_evicpress.simulator.sensitivity import Sensitivities

PRESSES = ("keydiff", "snapkv", "knorm")
FRACTIONS = (0.8, 0.6, 0.4, 0.2, 0.7, 0.5, 0.3, 0.1, 0.9, 0.75, 0.65, 0.55, 0.45, 0.35)
MIN_NODES, MAX_NODES = 10, 2_000
MIN_OPTIONS, MAX_OPTIONS = 15, 45


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``demand`` bytes are to be freed on the GPU; ``room`` holds the free bytes of the tiers below."""

    nodes: tuple[NodeStats, ...]
    menu: Menu
    costs: CostSnapshot
    alpha: float
    demand: int
    room: Mapping[Tier, int]

    def policy(self) -> Planner:
        planner = make_planner("evicpress", self.menu, alpha=self.alpha, costs=self.costs)
        planner.add_all(self.nodes)
        return planner


def snapshot(seed: int) -> Snapshot:
    """The snapshot of a seed: 10 to 2,000 nodes (log-uniform), 15 to 45 options, 1 to 3 tiers; on the GPU all is exact.

    With more than one tier, some nodes are on those below in the form that is best there, unless prefilling is faster
    than that; the tiers below have room for 0 to 50 % of what the GPU must free, 5 to 95 % of what it holds.
    Tokens are log-uniform, hits heavy-tailed (Pareto, exponent 1.2). A request that hits a node has hit all above, so
    a weight is the node's own hits and those below.
    """
    draw = random.Random(f"snapshot/{seed}")
    num_nodes = round(math.exp(draw.uniform(math.log(MIN_NODES), math.log(MAX_NODES))))
    num_tiers = draw.choice((1, 2, 3))
    num_forms = draw.randint(-(-(MIN_OPTIONS - 1) // num_tiers), (MAX_OPTIONS - 1) // num_tiers)
    forms = [Form(press, kept) for kept, press in itertools.product(FRACTIONS, PRESSES)][: num_forms - 1]
    menu = Menu(tuple(forms), tuple(Tier)[:num_tiers], SLOT_BYTES)
    host = TransferCost(draw.uniform(1e-4, 1e-3), draw.uniform(10e9, 50e9))
    ssd = TransferCost(draw.uniform(1e-3, 5e-3), draw.uniform(1e9, 6e9))
    prefill = PrefillCost(0.01, draw.uniform(2e-5, 2e-4), draw.uniform(1e-9, 4e-9))
    costs = CostSnapshot(prefill, {Tier.HOST: host, Tier.SSD: ssd}, {})
    curves = Sensitivities(menu.forms, seed)
    parents = [draw.randrange(i) if i and draw.random() < 0.7 else None for i in range(num_nodes)]
    weights = [draw.paretovariate(1.2) - 0.9 for _ in range(num_nodes)]
    for i in range(num_nodes - 1, -1, -1):
        parent = parents[i]
        if parent is not None:
            weights[parent] += weights[i]
    nodes: list[NodeStats] = []
    for i, parent in enumerate(parents):
        above = None if parent is None else nodes[parent]
        tokens = round(math.exp(draw.uniform(math.log(16), math.log(8192))))
        depth = 0 if above is None else above.depth_tokens + above.num_tokens
        lowest = 0 if above is None else int(above.tier)
        wanted = max(lowest, draw.randrange(num_tiers) if draw.random() < 0.33 else 0)
        curve = curves.curve(i)
        tier, form = Tier(wanted), 0
        if wanted > Tier.GPU:
            sizes = menu.sizes(tokens)
            worths = [curve[k] - costs.load_seconds(tier, sizes[k]) for k in range(len(menu.forms))]
            form = worths.index(max(worths))
            if worths[form] < 1.0 - prefill.marginal_seconds(tokens, depth):  # nobody would keep it there
                tier, form = Tier.GPU, 0
                above = None if above is None or above.tier > Tier.GPU else above
        held = menu.forms[form]
        nodes.append(
            NodeStats(
                i,
                None if above is None else above.id,
                tier,
                held,
                tokens,
                menu.num_bytes(held, tokens),
                depth,
                curve[form],
                curve,
                menu.smaller(held),
                weights[i],
                1,
                num_nodes - i,
            )
        )
    demand = round(draw.uniform(0.05, 0.95) * sum(node.num_bytes for node in nodes if node.tier == Tier.GPU))
    room = {tier: round(draw.uniform(0.0, 0.5) * demand) for tier in menu.tiers[1:]}
    return Snapshot(tuple(nodes), menu, costs, 1.0, demand, room)
