"""Layer budgets on held-out questions: beside uniform ones and a pyramid, expanded, of three seeds, on other tasks,
and searched anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from evicbench.budgets.comparisons import Difference, better
from evicbench.budgets.questions import EXACT, Kept, Questions, Scores, evaluate, mean, tasks_of, testbed
from evicbench.budgets.searches import FAMILIES, NUM_TOKENS, SEEDS, TARGETS, TRANSFERRED, Search, committed
from evicbench.report import Line
from sglang_evicpress.search.layer_budgets import Budgets, expanded, pyramid, uniform

HELD_OUT = Questions(400, 7, FAMILIES, NUM_TOKENS)
OTHER_TASKS = Questions(252, 8, ("multikv", "hop", "record"), NUM_TOKENS)
MOST_LOSS = 0.01
"""F1 that expanded budgets, and those of other seeds, may differ by: a hundredth of all questions."""

EXPANDED = tuple((source, target) for source in TARGETS for target in TARGETS if source < target)


def rivals(target: int) -> dict[str, Kept]:
    layers = testbed().num_layers
    return {f"uniform {target}": Kept(uniform(layers, target)), f"pyramid {target}": Kept(pyramid(layers, target))}


@cache
def held_out(num_contexts: int = HELD_OUT.num_contexts) -> dict[str, Scores]:
    """All that is compared, answered once: ``uniform C``, ``pyramid C``, ``found C``, ``C to D`` and ``seed S``."""
    kept = dict[str, Kept]()
    for target in TARGETS:
        kept |= rivals(target) | {f"found {target}": Kept(committed(Search(target)))}
    for source, target in EXPANDED:
        kept[f"{source} to {target}"] = Kept(committed(Search(source), target))
    for seed in SEEDS[1:]:
        kept[f"seed {seed}"] = Kept(committed(Search(TRANSFERRED, seed)))
    return evaluate(kept, replace(HELD_OUT, num_contexts=num_contexts))


def measure_found(num_contexts: int = HELD_OUT.num_contexts) -> Iterator[Line]:
    scores = held_out(num_contexts)
    for target in TARGETS:
        yield _gain(f"{target} tokens a layer", scores, target, committed(Search(target)))


def measure_other_tasks(num_contexts: int = OTHER_TASKS.num_contexts) -> Iterator[Line]:
    questions = replace(OTHER_TASKS, num_contexts=num_contexts)
    budgets = committed(Search(TRANSFERRED))
    scores = evaluate(rivals(TRANSFERRED) | {f"found {TRANSFERRED}": Kept(budgets)}, questions)
    what = f"{TRANSFERRED} tokens a layer, families never searched on ({', '.join(questions.families)})"
    yield _gain(what, scores, TRANSFERRED, budgets)


def measure_expanded(num_contexts: int = HELD_OUT.num_contexts) -> Iterator[Line]:
    """Table 10 of EvolKV: expanded to more tokens, beside searched there."""
    scores = held_out(num_contexts)
    for source, target in EXPANDED:
        name = f"{source} to {target}"
        rival = better(scores, (f"uniform {target}", f"pyramid {target}"))
        gain = Difference.of(scores[name], scores[rival])
        loss = Difference.of(scores[name], scores[f"found {target}"])
        yield Line(
            f"found at {source}, expanded to {target} tokens a layer: F1",
            f"above {rival.split()[0]}, and not {MOST_LOSS:g} below what is searched at {target}, by 95 % intervals",
            f"{mean(scores[name]):.4f}: {gain} and {loss}",
            gain.low > 0.0 and loss.low > -MOST_LOSS,
        )


def measure_seeds(num_contexts: int = HELD_OUT.num_contexts) -> Iterator[Line]:
    """Table 8 of EvolKV: three searches, each with a seed and contexts of its own."""
    scores = held_out(num_contexts)
    names = [f"found {TRANSFERRED}", *(f"seed {seed}" for seed in SEEDS[1:])]
    means = [mean(scores[name]) for name in names]
    middle = sum(means) / len(means)
    farthest = max(abs(each - middle) for each in means)
    found = ", ".join(_shown(committed(Search(TRANSFERRED, seed))) for seed in SEEDS)
    yield Line(
        f"three seeds at {TRANSFERRED} tokens a layer: F1",
        f"each within {MOST_LOSS:g} of their mean",
        f"{', '.join(f'{each:.4f}' for each in means)}: at most {farthest:.4f} off; {found}",
        farthest <= MOST_LOSS,
    )


def measure_search(num_contexts: int = HELD_OUT.num_contexts, iterations: int = 20) -> Iterator[Line]:
    """The search of one committed file, made now."""
    one = Search(TRANSFERRED, iterations=iterations)
    budgets = expanded(one.run(tasks_of(one.questions.contexts())).shares, TRANSFERRED)
    scores = held_out(num_contexts)
    tasks = replace(HELD_OUT, num_contexts=num_contexts)
    now = evaluate({"now": Kept(budgets)}, tasks)["now"]
    rival = better(scores, (f"uniform {TRANSFERRED}", f"pyramid {TRANSFERRED}"))
    gain, loss = Difference.of(now, scores[rival]), Difference.of(now, scores[f"found {TRANSFERRED}"])
    yield Line(
        f"a search made now at {TRANSFERRED} tokens a layer: F1",
        f"above {rival.split()[0]}, and not {MOST_LOSS:g} below the committed file, by 95 % intervals",
        f"{mean(now):.4f}: {gain} and {loss}; {_shown(budgets)}",
        gain.low > 0.0 and loss.low > -MOST_LOSS,
    )


def _gain(what: str, scores: dict[str, Scores], target: int, budgets: Budgets) -> Line:
    found, rival = f"found {target}", better(scores, (f"uniform {target}", f"pyramid {target}"))
    gain = Difference.of(scores[found], scores[rival])
    means = ", ".join(f"{name.split()[0]} {mean(scores[name]):.4f}" for name in _names(target))
    num_questions = sum(map(len, scores[found]))
    return Line(
        f"{what}: F1 of budgets found beside the better of uniform and pyramid",
        "95 % interval of the gain above 0",
        f"{gain}; {means}, exact KV {mean(scores[EXACT]):.4f}; {num_questions} questions; {_shown(budgets)}",
        gain.low > 0.0,
    )


def _names(target: int) -> tuple[str, ...]:
    return f"uniform {target}", f"pyramid {target}", f"found {target}"


def _shown(budgets: Budgets) -> str:
    return "/".join(map(str, budgets))
