"""Random snapshots of a cache under pressure: a radix tree of nodes, a menu, costs, what to free, what is free."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
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
SMALL, LARGE = (2, 100), (100, 5_000)
"""Fewest and most nodes."""
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


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of cache. ``below_root``: the share of nodes that have a parent; ``is_chain``: it is the node before.

    ``tokens`` is log-uniform, or, where ``tail`` is given, Pareto of that exponent from its lower bound on. Of the
    quality a context loses, ``shared_loss`` is that of its tree. ``ties``: all weights and curves are alike but for so
    much of them. ``demand`` is that on the GPU, as a share of it; ``room`` that below, as a share of the demand. The
    SSD reads ``ssd`` bytes a second. ``num_tiers`` 0: 1 to 3.
    """

    name: str
    below_root: float = 0.7
    is_chain: bool = False
    tokens: tuple[float, float] = (16, 8_192)
    tail: float | None = None
    shared_loss: float = 0.0
    ties: float | None = None
    demand: tuple[float, float] = (0.05, 0.95)
    room: tuple[float, float] = (0.0, 0.5)
    ssd: tuple[float, float] = (1e9, 6e9)
    num_tiers: int = 0
    page_size: int = 1


FAMILIES = (
    Family("plain"),
    Family("heavy-tailed sizes", tail=0.8),
    Family("correlated qualities", shared_loss=0.9),
    Family("near ties", ties=1e-3),
    Family("deep chains", below_root=0.95, is_chain=True),
    Family("tiny capacities", demand=(0.95, 0.999), room=(0.0, 0.03)),
    Family("slow SSD", ssd=(5e7, 5e8), num_tiers=3),
    Family("GPU only", num_tiers=1),
    Family("pages of 64", page_size=64, tokens=(64, 8_192)),
    Family("few large nodes, as of RAG", below_root=0.5, is_chain=True, tokens=(2_048, 16_384), page_size=16),
    Family("chains on the GPU alone, pages of 16", below_root=0.9, is_chain=True, num_tiers=1, page_size=16),
)


def snapshot(seed: int, family: Family = FAMILIES[0], num_nodes: tuple[int, int] = LARGE) -> Snapshot:
    """The snapshot of a seed: nodes (log-uniform), 15 to 45 options, 1 to 3 tiers; on the GPU all is exact.

    With more than one tier, some nodes are on those below in the form that is best there, unless prefilling is faster
    than that. Hits are heavy-tailed (Pareto, exponent 1.2). A request that hits a node has hit all above, so a weight
    is the node's own hits and those below.
    """
    draw = random.Random(f"snapshot/{family.name}/{seed}")
    num = round(math.exp(draw.uniform(math.log(num_nodes[0]), math.log(num_nodes[1]))))
    num_tiers = family.num_tiers or draw.choice((1, 2, 3))
    num_forms = draw.randint(-(-(MIN_OPTIONS - 1) // num_tiers), (MAX_OPTIONS - 1) // num_tiers)
    forms = [Form(press, kept) for kept, press in itertools.product(FRACTIONS, PRESSES)][: num_forms - 1]
    menu = Menu(tuple(forms), tuple(Tier)[:num_tiers], SLOT_BYTES, family.page_size)
    host = TransferCost(draw.uniform(1e-4, 1e-3), draw.uniform(10e9, 50e9))
    ssd = TransferCost(draw.uniform(1e-3, 5e-3), draw.uniform(*family.ssd))
    prefill = PrefillCost(0.01, draw.uniform(2e-5, 2e-4), draw.uniform(1e-9, 4e-9))
    costs = CostSnapshot(prefill, {Tier.HOST: host, Tier.SSD: ssd}, {})
    parents: list[int | None] = []
    for i in range(num):
        has_parent = i > 0 and draw.random() < family.below_root
        parents.append(None if not has_parent else i - 1 if family.is_chain else draw.randrange(i))
    roots: list[int] = []
    for i, parent in enumerate(parents):
        roots.append(i if parent is None else roots[parent])
    nodes: list[NodeStats] = []
    curves = _curves(family, roots, Sensitivities(menu.forms, seed), draw)
    for i, (parent, weight, curve) in enumerate(zip(parents, _weights(family, parents, draw), curves, strict=True)):
        above = None if parent is None else nodes[parent]
        tokens = _tokens(family, draw)
        depth = 0 if above is None else above.depth_tokens + above.num_tokens
        lowest = 0 if above is None else int(above.tier)
        wanted = max(lowest, draw.randrange(num_tiers) if i and draw.random() < 0.33 else 0)
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
                weight,
                1,
                num - i,
            )
        )
    demand = round(draw.uniform(*family.demand) * sum(node.num_bytes for node in nodes if node.tier == Tier.GPU))
    room = {tier: round(draw.uniform(*family.room) * demand) for tier in menu.tiers[1:]}
    return Snapshot(tuple(nodes), menu, costs, 1.0, demand, room)


def _tokens(family: Family, draw: random.Random) -> int:
    least, most = family.tokens
    if family.tail is None:
        tokens = math.exp(draw.uniform(math.log(least), math.log(most)))
    else:
        tokens = min(least * draw.paretovariate(family.tail), 1e5)
    return max(1, round(tokens / family.page_size)) * family.page_size


def _weights(family: Family, parents: Sequence[int | None], draw: random.Random) -> list[float]:
    if family.ties is not None:
        return [1.0 + draw.uniform(0.0, family.ties) for _ in parents]
    weights = [draw.paretovariate(1.2) - 0.9 for _ in parents]
    for i in range(len(parents) - 1, -1, -1):
        parent = parents[i]
        if parent is not None:
            weights[parent] += weights[i]
    return weights


def _curves(
    family: Family, roots: Sequence[int], sensitivities: Sensitivities, draw: random.Random
) -> Iterator[tuple[float, ...]]:
    for i, root in enumerate(roots):
        curve = sensitivities.curve(i if family.ties is None else 0)
        if family.ties is not None:
            factor = 1.0 + draw.uniform(0.0, family.ties)
            curve = tuple(max(0.0, 1.0 - (1.0 - quality) * factor) for quality in curve)
        if family.shared_loss:
            shares = (1.0 - family.shared_loss, family.shared_loss)
            pairs = zip(curve, sensitivities.curve(root), strict=True)
            curve = tuple(own * shares[0] + common * shares[1] for own, common in pairs)
        yield curve
