"""Slots that the heads of a layer share by their scores (Ada-KV), beside as many in every head: equal stored bytes.

Where that gains nothing, the line says whether any split could: the best fixed one of each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from evicbench.budgets.comparisons import Difference
from evicbench.budgets.head_splits import chosen
from evicbench.budgets.layers import HELD_OUT
from evicbench.budgets.questions import Kept, evaluate, mean, testbed
from evicbench.budgets.searches import TARGETS, Search, committed
from evicbench.report import Line
from sglang_evicpress.profiler.local.objective import adaptive_heads, even_heads
from sglang_evicpress.search.layer_budgets import uniform

WORTH = 0.01
"""F1 that is worth speaking of: a hundredth of all questions."""


def measure_heads(num_contexts: int = HELD_OUT.num_contexts) -> Iterator[Line]:
    layers = testbed().num_layers
    kept = dict[str, Kept]()
    for target in TARGETS:
        for name, budgets in (("uniform", uniform(layers, target)), ("found", committed(Search(target)))):
            kept[f"{name} {target}"] = Kept(budgets, even_heads)
            kept[f"{name} {target}, adaptive"] = Kept(budgets, adaptive_heads)
        kept[f"split {target}"] = chosen(target)[0]
    scores = evaluate(kept, replace(HELD_OUT, num_contexts=num_contexts))
    for target in TARGETS:
        shown, gains = list[str](), list[Difference]()
        for name in ("uniform", "found"):
            adaptive, even = scores[f"{name} {target}, adaptive"], scores[f"{name} {target}"]
            gains.append(Difference.of(adaptive, even))
            shown.append(f"{name} layers {gains[-1]}, {mean(adaptive):.4f} and {mean(even):.4f}")
        fixed = Difference.of(scores[f"split {target}"], scores[f"uniform {target}"])
        yield Line(
            f"adaptive heads (Ada-KV) beside even ones at equal stored bytes, {target} tokens a layer: F1",
            f"95 % interval of the gain above 0 with uniform layers; else no fixed split gains {WORTH:g} either",
            f"{'; '.join(shown)}; best fixed split {fixed}, {chosen(target)[1]}",
            gains[0].low > 0.0 or fixed.high < WORTH,
        )
