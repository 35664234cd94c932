"""The quality of every form of every context, measured once for all the parts that look at it.

Everything is asked of the real server through the profiler's own engine, forms and scorers; only the score of every
single question is kept besides, by several scorers, so that questions can be split afterwards.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

from evicbench.paths import out_file
from evicbench.profiler.subjects import NUM_TOKENS, NUM_TRAINING, StudyContext, make_study_context
from evicbench.testbed.server import ADMIN_KEY, Server
from evicbench.testbed.tasks import FAMILIES, ONE_QUESTION
from evicbench.tiers.inputs import one_thread
from sglang_evicpress.core import Form
from sglang_evicpress.profiler.client import ServerEngine
from sglang_evicpress.profiler.engine import Answer, Likelihood
from sglang_evicpress.profiler.measure import Asked, answer, measure_forms
from sglang_evicpress.profiler.scorers import Scorer, get_scorer
from sglang_evicpress.profiler.transport import HttpTransport
from sglang_evicpress.quality.profile import Profile, query_set
from sglang_evicpress.quality.running_stats import RunningStats

PRESSES = ("keydiff", "snapkv", "knorm", "value_key_ratio", "streaming")
FRACTIONS = (0.8, 0.5, 0.2)
FORMS = tuple(Form(press, kept) for press in PRESSES for kept in FRACTIONS)
"""Those without a codec that `evicpress profile` measures by default."""

FIGURE_4 = 0.4
"""What is kept where the EvicPress paper's figure 4 compares presses: its "ratio of 0.6", see insights.py."""

SENSITIVITY = (Form("keydiff", 0.9), Form("keydiff", 0.1))
JUDGED_FORMS = (*FORMS, *SENSITIVITY)
COMPARED_FORMS = (*SENSITIVITY, *(Form(press, FIGURE_4) for press in PRESSES))
ALL_FORMS = (*FORMS, *COMPARED_FORMS)

JUDGES = ("minilm", "f1")
"""Scorers that read generated answers: asked about fewer forms and questions, as they take most of the time."""

NUM_JUDGED = 8
"""The first ones of the held-out questions."""

NUM_COMPARED = 10
"""The first training and the first held-out questions: what the forms that are only compared are asked."""

NUM_CONTEXTS = 6  # of each family
LONGEST_ANSWER = 16  # tokens; the longest right one has 12 words, then <eos>

SERVER = ("--kv-policy", "evicpress", "--kv-forms", ",".join(map(str, ALL_FORMS)), "--max-total-tokens", "20000")

Scores = Mapping[Form, Sequence[float]]
"""By form one score in [0, 1] for each question."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One context. ``training`` is by logprob, ``held_out`` by scorer; judges have only the first held-out questions.

    The only question of a context is a held-out one.
    """

    family: str
    key: bytes
    num_tokens: int
    training: Scores
    held_out: Mapping[str, Scores]

    @property
    def has_training(self) -> bool:
        return self.family not in ONE_QUESTION

    def quality(self, form: Form, scorer: str = "logprob") -> float:
        """Mean over all questions that the scorer was asked about."""
        asked = [*(self.training.get(form, ()) if scorer == "logprob" else ()), *self.held_out[scorer][form]]
        return statistics.fmean(asked)

    def profile(self) -> Profile:
        """Profile stored after profiling with the training questions."""
        forms = {form: RunningStats.of(scores) for form, scores in self.training.items()}
        return Profile(self.key, self.num_tokens, forms, "logprob", query_set([]), NUM_TRAINING, 0.0)


@dataclass(slots=True)
class Noting:
    """A scorer that is several at once, all with or all without generation, and notes every score; its own is that of
    the first."""

    scorers: Sequence[Scorer]
    noted: dict[str, list[float]] = field(default_factory=dict)
    name: ClassVar[str] = "noting"
    needs_reference: ClassVar[bool] = False

    @property
    def needs_generation(self) -> bool:
        return self.scorers[0].needs_generation

    def prepare(self, texts: Sequence[str]) -> None:
        for scorer in self.scorers:
            scorer.prepare(texts)

    def score(self, exact: Answer, given: Answer | None, likelihood: Likelihood | None, reference: str | None) -> float:
        for scorer in self.scorers:
            self.noted.setdefault(scorer.name, []).append(scorer.score(exact, given, likelihood, reference))
        return self.noted[self.scorers[0].name][-1]

    def take(self) -> dict[str, list[float]]:
        """Notes since the last time."""
        noted, self.noted = self.noted, {}
        return noted


def measure_study_context(engine: ServerEngine, study_context: StudyContext, judges: Sequence[Scorer]) -> Measured:
    """All forms by logprob, and by ``judges`` as far as they are asked."""
    asked = [Asked(tokens) for tokens in study_context.questions]
    num_training = 0 if study_context.family in ONE_QUESTION else NUM_TRAINING
    held_out_ones = range(num_training, len(asked))
    judged = held_out_ones[:NUM_JUDGED]
    compared = [*range(num_training)[:NUM_COMPARED], *held_out_ones[:NUM_COMPARED]]
    num_compared = min(num_training, NUM_COMPARED)
    shadow = engine.open_shadow(study_context.tokens, None)
    try:
        exact = answer(engine, shadow.namespace, study_context.tokens, asked, LONGEST_ANSWER)
        scores: dict[str, dict[Form, list[float]]] = {}
        for scorers, forms, which in (
            ([get_scorer("logprob")], FORMS, range(len(asked))),
            ([get_scorer("logprob")], COMPARED_FORMS, compared),
            (judges, JUDGED_FORMS, judged),
        ):
            noting = Noting(scorers)
            measuring = measure_forms(
                engine,
                shadow,
                study_context.tokens,
                [asked[index] for index in which],
                forms,
                noting,
                [exact[index] for index in which],
                max_new_tokens=LONGEST_ANSWER,
            )
            measured = 0
            for form, _ in measuring:
                measured += 1
                for name, values in noting.take().items():
                    if len(values) != len(which):
                        raise RuntimeError(f"{len(which)} questions were asked, {len(values)} of them scored")
                    scores.setdefault(name, {})[form] = values
            if measured != len(forms):
                raise RuntimeError(
                    f"{measured} of {len(forms)} forms could be made of a context of {study_context.family}"
                )
    finally:
        engine.close_shadow(shadow)
    logprob = scores.pop("logprob")
    ends = {form: num_training if form in FORMS else num_compared for form in logprob}
    training = {form: values[: ends[form]] for form, values in logprob.items()} if num_training else {}
    held_out = {"logprob": {form: values[ends[form] :] for form, values in logprob.items()}, **scores}
    return Measured(study_context.family, shadow.key, shadow.num_tokens, training, held_out)


@cache
def study() -> tuple[Measured, ...]:
    """All contexts of all families; measured once, whichever part asks first."""
    judges = [get_scorer(name) for name in JUDGES]
    begin = time.monotonic()
    with Server(*SERVER) as server, one_thread():  # MiniLM's others would wait for the server's core
        engine = ServerEngine(
            HttpTransport(server.url, admin_api_key=ADMIN_KEY), fill_tokens=NUM_TOKENS, may_evict=True
        )
        found = tuple(
            measure_study_context(engine, make_study_context(family, number), judges)
            for number in range(NUM_CONTEXTS)
            for family in FAMILIES
        )
    print(f"    {len(found)} contexts measured in {time.monotonic() - begin:.0f} s", flush=True)
    out_file("profiler", "study.json").write_text(to_json(found))
    return found


def to_json(contexts: Sequence[Measured]) -> str:
    """A line for each context: mean scores by form, of training and of held-out questions."""
    lines = []
    for context in contexts:
        means = {
            name: {str(form): round(statistics.fmean(values), 4) for form, values in scores.items()}
            for name, scores in (("training", context.training), *context.held_out.items())
        }
        lines.append(json.dumps({"family": context.family, "key": context.key.hex(), **means}))
    return "[\n" + ",\n".join(lines) + "\n]\n"
