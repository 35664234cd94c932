"""The simulator offers a policy the forms that a server offers it, and counts waiting as a server does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.patches.cache.policy_view import PolicyView
from sglang_evicpress.patches.tiers import load_terms
from sglang_evicpress.policy import POLICIES, PolicyInfo, policy_info
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.quality.expectation import Expectation
from sglang_evicpress.simulator import queue
from sglang_evicpress.simulator.replay import MIN_COMPRESS_TOKENS, Machine
from sglang_evicpress.simulator.runs import Run, Settings, make_replay
from sglang_evicpress.simulator.tree import Node
from sglang_evicpress.traces import Request, Trace

FORMS = (Form("keydiff", 0.5), Form("keydiff", 0.25), Form("knorm", 0.5), Form(codec="int4"))
CURVES = Curves.from_json({form.press: {str(form.kept_fraction): 0.8} for form in FORMS if form.press})
COSTS = CostSnapshot(
    PrefillCost(0.0, 0.1, 0.0), {Tier.HOST: TransferCost(0.0, 20.0), Tier.SSD: TransferCost(0.0, 10.0)}, {}
)
NAMES = [*(name for name, info in POLICIES.items() if not info.sees_future), "keydiff@0.5+lru", "impress@0.1"]


def _on_a_server(node: Node, view: PolicyView) -> int:
    """What a server's view says of a node of the same length and form on the same tier."""
    kv = SimpleNamespace(
        **{"copies": {} if node.tier == Tier.GPU else {node.tier: None}, "form": node.form, "is_lossy_prefix": False},
        **{
            "layout": None,
            "has_failed": False,
            "room_bytes": None,
            "unfit_codec": None,
            "weight": 1.0,
            "num_hits": 1,
            "last_use": 1,
        },
        **{"is_shadow": False, "is_aside": False, "num_prefetches": 0, "external": None},
    )
    if node.tier != Tier.GPU:
        kv.copies[node.tier] = SimpleNamespace(is_exact=node.form.is_exact)
    root = SimpleNamespace(parent=None, key=())
    value = object() if node.tier == Tier.GPU else None
    key = range(node.num_tokens)
    return view.stats_of(SimpleNamespace(id=1, kv=kv, key=key, parent=root, value=value, lock_ref=0)).allowed_forms  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_forms_are_allowed_on_the_same_tiers(name: str) -> None:
    info: PolicyInfo = policy_info(name)
    settings = Settings(Machine(dict.fromkeys((Tier.GPU, Tier.HOST, Tier.SSD), 10**9), COSTS), 1, FORMS, curves=CURVES)
    trace = Trace("t", 64, [Request(0.0, (1, 2), 128)])
    replay = make_replay(trace, Run(name, 1.0 if info.weighs_quality else None), settings)
    list(replay.run())
    (node,) = replay.tree.nodes.values()
    menu = replay.menu
    expectation = Expectation((), tuple(1.0 for _ in menu.forms), menu.everything)
    quality = SimpleNamespace(expectation_of=lambda _: expectation, quality_of=lambda _: 1.0)
    gpu = SimpleNamespace(window_of=lambda _: object(), sinks_of=lambda *_: 0)
    view = PolicyView(menu, MIN_COMPRESS_TOKENS, replay, quality, gpu, {})  # type: ignore[arg-type]
    for node.tier in (Tier.GPU, Tier.HOST, Tier.SSD):
        for node.form in (EXACT, *menu.forms, Form("snapkv", 0.9)):
            for node.num_tokens in (MIN_COMPRESS_TOKENS - 1, MIN_COMPRESS_TOKENS, 1000):
                assert replay._stats(node).allowed_forms == _on_a_server(node, view)


def test_congestion_has_the_same_bound() -> None:
    assert queue.MOST_CONGESTION == load_terms.MOST_CONGESTION
