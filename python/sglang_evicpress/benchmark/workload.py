"""Schedule of questions: the same for every system, another in every repetition and at every rate."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from sglang_evicpress.benchmark.arrivals import poisson, spread, stretched
from sglang_evicpress.benchmark.config import Config
from sglang_evicpress.benchmark.contexts import Context
from sglang_evicpress.files import write_whole
from sglang_evicpress.profiler.contexts import GivenQuestion
from sglang_evicpress.profiler.prompts import Template


@dataclass(frozen=True, slots=True)
class Item:
    """A question about the context of number ``context``. ``content`` is the whole prompt, ``reference`` the true
    answer, where it is known."""

    context: int
    family: str
    question: str
    reference: str | None
    content: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """For /v1/chat/completions: one message of a user."""
        return [{"role": "user", "content": self.content}]


@dataclass(frozen=True, slots=True)
class Planned:
    """A request. ``arrival_s`` counts from the start of the rate; 0 throughout a rate of one client (rate 0)."""

    index: int
    arrival_s: float
    item: Item
    repetition: int
    rate: float


def plan(
    config: Config, contexts: Sequence[Context], repetition: int, rate: float, *, count: int | None = None
) -> list[Planned]:
    """The requests of one rate of one repetition (counted from 0), in order of arrival; ``count`` of one client.

    Which contexts are popular is the same in all of them, and says nothing about their families. About a context no
    question is asked again before all others were. Raises ValueError for a stretch of a trace that takes no time.
    """
    draw = random.Random(f"requests {config.workload.seed} {repetition} {rate:g}")
    times = [0.0] * count if count is not None else _times(config, draw, repetition, rate)
    numbers = draw.choices(range(len(contexts)), popularity(config, len(contexts)), k=len(times))
    template = Template.parse(config.workload.template)
    left: dict[int, list[GivenQuestion]] = {}
    planned = []
    for index, (arrival_s, number) in enumerate(zip(times, numbers, strict=True)):
        if not left.get(number):
            left[number] = list(contexts[number].questions[config.num_training :])
            draw.shuffle(left[number])
        item = _item(template, number, contexts[number], left[number].pop())
        planned.append(Planned(index, arrival_s, item, repetition, rate))
    return planned


def num_requests(config: Config, rate: float) -> int:
    """Number of requests of a rate: the same for all systems that run it."""
    if is_loaded(config, rate):
        assert config.load is not None
        return max(1, round(rate * config.load.seconds))
    least = config.workload.requests
    extra = [each for each in config.extra_rates if rate in each.rates and rate not in config.rates]
    wanted = [least if each.requests is None else each.requests for each in extra]
    wanted += [math.ceil(rate * each.seconds) for each in extra if each.seconds is not None]
    return max(wanted, default=least)


def is_loaded(config: Config, rate: float) -> bool:
    """True if it is a rate of ``config.load``: one that ends at a set time."""
    return config.load is not None and rate in config.load.multiples


def popularity(config: Config, num_contexts: int) -> list[float]:
    """Relative frequency of questions about each context."""
    shares = [float(rank**-config.workload.popularity) for rank in range(1, num_contexts + 1)]
    random.Random(f"popularity {config.workload.seed}").shuffle(shares)
    return shares


def warm_up(config: Config, contexts: Sequence[Context]) -> list[Item]:
    """A question about each context, as often as the config wants, each time in another order.

    They are those of training, where there are any.
    """
    template, items = Template.parse(config.workload.template), list[Item]()
    draw = random.Random(f"warm-up {config.workload.seed}")
    for turn in range(config.workload.warm_up):
        asked = []
        for number, context in enumerate(contexts):
            count = config.num_training or len(context.questions)
            asked.append(_item(template, number, context, context.questions[turn % count]))
        draw.shuffle(asked)
        items += asked
    return items


def write_training(config: Config, contexts: Sequence[Context], path: Path) -> None:
    """Write what ``evicpress profile --contexts`` takes: each context with its training questions, which no run asks.

    Without the true answers: what an answer is compared with is that of exact KV.
    """
    lines = []
    for context in contexts:
        questions = [question.text for question in context.questions[: config.num_training]]
        lines.append(orjson.dumps({"context": context.text, "questions": questions}))
    write_whole(str(path), b"\n".join(lines) + b"\n")


def _item(template: Template, number: int, context: Context, question: GivenQuestion) -> Item:
    content = template.fill(context.text, question.text)
    return Item(number, context.family, question.text, question.answer, content)


def _times(config: Config, draw: random.Random, repetition: int, rate: float) -> list[float]:
    work, count = config.workload, num_requests(config, rate)
    if rate == 0:
        return [0.0] * count  # one client sends each request when it has the answer to the one before
    seconds = config.load.seconds if config.load is not None and is_loaded(config, rate) else None
    if work.trace is not None:
        return stretched(work.trace_s, count, rate if seconds is None else count / seconds, repetition)
    if seconds is None and work.gaps_shape == 1.0:
        return poisson(count, rate, draw)
    return spread(count, count / rate if seconds is None else seconds, work.gaps_shape, draw)
