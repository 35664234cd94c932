"""Cost of profiling one context by `logprob` beside `minilm`, counted in forward passes and tokens.

A forward pass of a request is one generated token (the first comes with the prompt's pass), or the one pass in which
the tokens of a given answer are scored. The server runs passes of several requests as one batch. Both ways generate the
answers on exact KV first, and that counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce

from evicbench.profiler.study import FORMS, LONGEST_ANSWER, SERVER
from evicbench.profiler.subjects import NUM_TOKENS, StudyContext, make_study_context
from evicbench.report import Line
from evicbench.testbed.server import ADMIN_KEY, Server
from evicbench.testbed.tasks import FAMILIES
from evicbench.tiers.inputs import one_thread
from sglang_evicpress.core import Form
from sglang_evicpress.profiler.client import ServerEngine
from sglang_evicpress.profiler.measure import Asked, profile_context
from sglang_evicpress.profiler.scorers import get_scorer
from sglang_evicpress.profiler.transport import HttpTransport, Json, Transport

TARGET = 0.25

NUM_ASKED = 10  # questions; the shares do not depend on how many


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of ``requests``: their forward ``passes`` and ``generated`` tokens, the tokens ``computed`` for them and the
    ``batches`` in which the server did so."""

    requests: int = 0
    passes: int = 0
    generated: int = 0
    computed: int = 0
    batches: int = 0

    def plus(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(slots=True)
class Counting:
    """A transport that counts what the requests it carries make the server do."""

    transport: Transport
    cost: Cost = Cost()

    def ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Json:
        return self.transport.ask(method, path, body)

    def generate(self, body: Mapping[str, object]) -> list[Json]:
        results = self.transport.generate(body)
        for result in results:
            self.cost = self.cost.plus(cost_of(result["meta_info"]))
        return results


def cost_of(meta: Mapping[str, int]) -> Cost:
    """Cost of one request, from the server's answer. The last generated token needs no computing."""
    generated = meta["completion_tokens"]
    new = meta["prompt_tokens"] - meta["cached_tokens"]
    return Cost(1, max(1, generated), generated, new + max(0, generated - 1))


def measure_context(server: Server, study_context: StudyContext, scorer: str, forms: Sequence[Form]) -> Cost:
    """Profile it in the forms with its first questions. Its exact KV is there already: it is a context in use."""
    counting = Counting(HttpTransport(server.url, admin_api_key=ADMIN_KEY))
    engine = ServerEngine(counting, fill_tokens=NUM_TOKENS, may_evict=True)
    queries = [Asked(tokens) for tokens in study_context.questions[:NUM_ASKED]]
    server.flush()
    server.generate(list(study_context.tokens + study_context.questions[0]), 1)
    before = background_requests(server)
    profile_context(
        engine, study_context.tokens, None, queries, forms, get_scorer(scorer), max_new_tokens=LONGEST_ANSWER
    )
    after = background_requests(server)
    counted = {name: after[name] - before[name] for name in before}
    cost = counting.cost
    # A server that prepares a step while the one before it runs computes the last token of an answer as well.
    if counted["requests"] != cost.requests or not 0 <= counted["tokens"] - cost.computed <= cost.requests:
        raise RuntimeError(f"by their own account requests cost {cost}, by the server's {counted}")
    return replace(cost, computed=counted["tokens"], batches=counted["batches"])


def background_requests(server: Server) -> dict[str, int]:
    counts: dict[str, int] = server.get("/evicpress/profiles")["counts"]["background_requests"]
    return counts


def measure_cost(families: Sequence[str] = FAMILIES, forms: Sequence[Form] = FORMS) -> Iterator[Line]:
    costs: dict[str, dict[str, Cost]] = {}
    with Server(*SERVER) as server, one_thread():
        for family in families:
            study_context = make_study_context(family, 0)
            costs[family] = {
                scorer: measure_context(server, study_context, scorer, forms) for scorer in ("logprob", "minilm")
            }
    ours, theirs = (reduce(Cost.plus, (cost[scorer] for cost in costs.values())) for scorer in ("logprob", "minilm"))
    by_family = sorted(
        ((family, cost["logprob"].passes / cost["minilm"].passes) for family, cost in costs.items()),
        key=lambda each: -each[1],
    )
    yield Line(
        f"{len(costs)} contexts profiled in {len(forms)} forms with {NUM_ASKED} questions: forward passes of "
        "requests, logprob over minilm",
        f"<= {TARGET:.0%}",
        f"{share(ours.passes, theirs.passes)}: {', '.join(f'{family} {part:.0%}' for family, part in by_family)}; "
        f"generated tokens {share(ours.generated, theirs.generated)}, batches {share(ours.batches, theirs.batches)}, "
        f"computed tokens {share(ours.computed, theirs.computed)}: a scored answer's are computed too, but in one pass",
        ours.passes <= TARGET * theirs.passes,
    )


def share(ours: int, theirs: int) -> str:
    return f"{ours / theirs:.1%} ({ours} of {theirs})"
