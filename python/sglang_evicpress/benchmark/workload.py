"""Schedule of questions: the same for every system, another in every repetition and at every rate."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from sglang_evicpress.benchmark.arrivals import closed, poisson, read_trace, spread, stretched
from sglang_evicpress.benchmark.config import Config
from sglang_evicpress.benchmark.contexts import Context, Question
from sglang_evicpress.files import write_whole
from sglang_evicpress.profiler.prompts import Template


@dataclass(frozen=True, slots=True)
class Item:
    """A question about the context of number ``context``. ``content`` is the whole prompt, ``reference`` the true
    answer, where it is known."""

    context: int
    family: str
    context_text: str
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


def plan(config: Config, contexts: Sequence[Context], repetition: int, rate: float) -> list[Planned]:
    """The requests of one rate of one repetition (counted from 0), in order of arrival.

    Which contexts are popular is the same in all of them, and says nothing about their families. About a context no
    question is asked again before all others were. Raises ValueError for a trace of arrivals that cannot be read.
    """
    draw = random.Random(f"requests {config.seed} {repetition} {rate:g}")
    times = _times(config, draw, repetition, rate)
    numbers = draw.choices(range(len(contexts)), popularity(config, len(contexts)), k=len(times))
    template = Template.parse(config.template)
    left: dict[int, list[Question]] = {}
    planned = []
    for index, (arrival_s, number) in enumerate(zip(times, numbers, strict=True)):
        if not left.get(number):
            left[number] = list(_asked(config, contexts[number]))
            draw.shuffle(left[number])
        item = _item(template, number, contexts[number], left[number].pop())
        planned.append(Planned(index, arrival_s, item, repetition, rate))
    return planned


def num_requests(config: Config, rate: float) -> int:
    """Number of requests of a rate: the same for all systems that run it."""
    if is_loaded(config, rate):
        assert config.load is not None
        return max(1, round(rate * config.load.seconds))
    extra = [
        extra_rates for extra_rates in config.extra_rates if rate in extra_rates.rates and rate not in config.rates
    ]
    wanted = [config.requests if extra_rates.requests is None else extra_rates.requests for extra_rates in extra]
    wanted += [math.ceil(rate * extra_rates.seconds) for extra_rates in extra if extra_rates.seconds is not None]
    return max(wanted, default=config.requests)


def is_loaded(config: Config, rate: float) -> bool:
    """True if it is a rate of ``config.load``: one that ends at a set time."""
    return config.load is not None and rate in config.load.multiples


def popularity(config: Config, num_contexts: int) -> list[float]:
    """Relative frequency of questions about each context."""
    shares = [float(rank**-config.popularity) for rank in range(1, num_contexts + 1)]
    random.Random(f"popularity {config.seed}").shuffle(shares)
    return shares


def warm_up(config: Config, contexts: Sequence[Context]) -> list[Item]:
    """A question about each context, as often as the config wants, each time in another order.

    They are those of training, where there are any.
    """
    template, draw, items = Template.parse(config.template), random.Random(f"warm-up {config.seed}"), []
    for turn in range(config.warm_up):
        asked = []
        for number, context in enumerate(contexts):
            count = len(context.questions) if config.profiles is None else config.profiles.questions
            asked.append(_item(template, number, context, context.questions[turn % count]))
        draw.shuffle(asked)
        items += asked
    return items


def training_questions(config: Config, contexts: Sequence[Context]) -> list[tuple[Question, ...]]:
    """For each context those it is profiled by, which no run asks."""
    count = 0 if config.profiles is None else config.profiles.questions
    return [context.questions[:count] for context in contexts]


def write_training(config: Config, contexts: Sequence[Context], path: Path) -> None:
    """Write what ``evicpress profile --contexts`` takes: each context with its training questions.

    Without the true answers: what an answer is compared with is that of exact KV.
    """
    training = training_questions(config, contexts)
    lines = [
        orjson.dumps({"context": context.text, "questions": [question.text for question in questions]})
        for context, questions in zip(contexts, training, strict=True)
    ]
    write_whole(str(path), b"\n".join(lines) + b"\n")


def _asked(config: Config, context: Context) -> tuple[Question, ...]:
    return context.questions[0 if config.profiles is None else config.profiles.questions :]


def _item(template: Template, number: int, context: Context, question: Question) -> Item:
    content = template.fill(context.text, question.text)
    return Item(number, context.family, context.text, question.text, question.answer, content)


def _times(config: Config, draw: random.Random, repetition: int, rate: float) -> list[float]:
    if rate == 0:
        return closed(config.requests)
    count = num_requests(config, rate)
    seconds = config.load.seconds if config.load is not None and is_loaded(config, rate) else None
    if config.trace is not None:
        return stretched(read_trace(config.trace), count, rate if seconds is None else count / seconds, repetition)
    if seconds is None and config.gaps_shape == 1.0:
        return poisson(count, rate, draw)
    return spread(count, count / rate if seconds is None else seconds, config.gaps_shape, draw)
