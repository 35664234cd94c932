"""Cost of budgets for the scheduler between passes and in them; the pool's count of free slots rises by exactly
what a pass frees; both read inside the scheduler of real servers (``evicbench.decode_budget.watch``).
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from evicbench.decode_budget.requests import Request, ask_all, context_prompt, server_flags
from evicbench.decode_budget.watch import Pass, Round, step_seconds, watched
from evicbench.report import Line
from evicbench.testbed.server import Server

BATCHES = (1, 8, 32)
METHODS = ("paged", "repack", "holefill")
PROMPT, NUM_NEW, BUDGET, EVERY = 60, 260, 128, 32
MOST_SHARE = 0.02
MOST_STEPS = 1.0
MOST_PASSES = 100 / 16  # per 100 tokens of a request
MOST_TIME = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """The rounds of one batch on one server."""

    score: str
    page_size: int
    method: str
    batch: int
    rounds: Sequence[Round]

    @property
    def step_s(self) -> float:
        return statistics.median(step_seconds(self.rounds, self.batch))

    @property
    def idle_share(self) -> float:
        """Share of a decode step that a round without a pass spends on budgets."""
        spent = [
            each.visit_s + each.ring_s for each in self.rounds if each.num_running == self.batch and not each.passes
        ]
        return statistics.median(spent) / self.step_s

    @property
    def passes(self) -> list[Pass]:
        return [made for each in self.rounds for made in each.passes]


def run_all(
    score: str, page_size: int, batches: Sequence[int] = BATCHES, methods: Sequence[str] = METHODS
) -> Iterator[Run]:
    """All batches and methods, one after the other, on one server."""
    draw = random.Random(f"cost {page_size}")
    flags = server_flags(page_size, 65536, 32, "--kv-decode-score", score)
    with watched() as watch, Server(*flags, env=watch.env) as server:
        for batch in batches:
            for method in methods:
                since = watch.num_lines
                prompts = [context_prompt(draw, PROMPT) for _ in range(batch)]
                ask_all(server, [Request(prompt, NUM_NEW, BUDGET, method, score, EVERY) for prompt in prompts])
                yield Run(score, page_size, method, batch, watch.rounds(since))


def gauge_problems(rounds: Sequence[Round], page_size: int) -> list[str]:
    """Rounds in which the count of free slots did not rise by what their passes freed, less what they took."""
    return [
        f"{[made.kind for made in each.passes]}: {each.rise}"
        for each in rounds
        if each.rise != sum(made.pages_freed * page_size - made.taken for made in each.passes)
    ]


def gauge_line(runs: Sequence[Run]) -> Line:
    page_size = runs[0].page_size
    rounds = [each for run in runs for each in run.rounds]
    kinds = Counter(made.kind for run in runs for made in run.passes)
    pages = sum(made.pages_freed for run in runs for made in run.passes)
    problems = gauge_problems(rounds, page_size)
    figure = f"{len(problems)} of {len(rounds)} rounds otherwise"
    return Line(
        f"free-slot gauge, pages of {page_size}: {dict(kinds)} passes that freed {pages} pages",
        "in every round of the scheduler the allocator's count rises by exactly the pages freed, less what a copy took",
        figure + (f"; first {problems[0]}" if problems else ""),
        not problems and pages > 0 and {"page", "repack", "holefill"} <= set(kinds),
    )


def idle_line(runs: Sequence[Run]) -> Line:
    score = runs[0].score
    worst = {batch: max(run.idle_share for run in runs if run.batch == batch) for batch in BATCHES}
    steps = {batch: statistics.median(run.step_s for run in runs if run.batch == batch) for batch in BATCHES}
    what = f", and the queries kept for {score}" if score == "tova" else ""
    return Line(
        f"cost between passes{what}: median of a round without a pass over the median decode step, batches of "
        f"{', '.join(map(str, BATCHES))}, the worst of {', '.join(METHODS)}",
        f"<= {MOST_SHARE:.0%}",
        ", ".join(f"{batch}: {worst[batch]:.2%} of {1e3 * steps[batch]:.1f} ms" for batch in BATCHES),
        max(worst.values()) <= MOST_SHARE,
    )


def pass_line(runs: Sequence[Run]) -> Line:
    score = runs[0].score
    figures, worst = [], 0.0
    for run in runs:
        times = sorted(made.seconds / run.step_s for made in run.passes)
        worst = max(worst, statistics.median(times))
        rounds = max(sum(made.seconds for made in each.passes) / run.step_s for each in run.rounds)
        figures.append(
            f"{run.method} at {run.batch}: {statistics.median(times):.2f} (longest {times[-1]:.2f}, all of a round "
            f"{rounds:.1f})"
        )
    return Line(
        f"cost of a pass by {score}, pages of {runs[0].page_size}, budget {BUDGET}, in decode steps of the same batch: "
        "median over the passes",
        f"<= {MOST_STEPS:g}",
        ", ".join(figures),
        worst <= MOST_STEPS,
    )


def rate_line(runs: Sequence[Run]) -> Line:
    """Rate of passes of ``paged`` with the smallest pages, and the share of the scheduler's time for it."""
    figures, rates, shares = [], [], []
    for run in runs:
        rates.append(100 * sum(made.kind == "page" for made in run.passes) / (run.batch * NUM_NEW))
        visits = [each.visit_s for each in run.rounds if each.passes]  # the first one in a process takes far longer
        gaps = [after.began - each.began for each, after in pairwise(run.rounds)]
        shares.append(statistics.median(visits or [0.0]) * len(visits) / (len(run.rounds) * statistics.median(gaps)))
        figures.append(f"{run.batch}: {rates[-1]:.1f} passes, {shares[-1]:.1%}")
    return Line(
        f"passes of paged with pages of {runs[0].page_size}, budget {BUDGET}, batches of "
        f"{', '.join(str(run.batch) for run in runs)}: per 100 tokens of a request, and what "
        "their rounds (by their median) take of the time",
        f"<= {MOST_PASSES:.2f} and <= {MOST_TIME:.0%}",
        ", ".join(figures),
        min(rates) > 0 and max(rates) <= MOST_PASSES and max(shares) <= MOST_TIME,
    )


def measure() -> Iterator[Line]:
    smallest = list(run_all("value_key_ratio", 1, (1, BATCHES[-1]), ("paged",)))
    yield rate_line(smallest)
    yield pass_line(smallest)
    for score, page_size in (("value_key_ratio", 16), ("tova", 32)):
        runs = list(run_all(score, page_size))
        yield gauge_line(runs)
        yield idle_line(runs)
        yield pass_line(runs)
