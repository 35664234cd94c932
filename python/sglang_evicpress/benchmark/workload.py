"""Which questions are asked when: the same for every system, other ones in every repetition and at every level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_evicpress.benchmark.config import Config
from sglang_evicpress.benchmark.contexts import Context, Question


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
    """A request. ``arrival_s`` counts from the start of the level; 0 throughout a level of one client (level 0)."""

    index: int
    arrival_s: float
    item: Item
    repetition: int
    level: float


def plan(config: Config, contexts: Sequence[Context], repetition: int, level: float) -> list[Planned]:
    """The requests of one level of one repetition (counted from 0), in order of arrival."""
    raise NotImplementedError


def warm_up(config: Config, contexts: Sequence[Context]) -> list[Item]:
    """One question about each context, none where the config wants no warm-up."""
    raise NotImplementedError


def training_questions(config: Config, contexts: Sequence[Context]) -> list[tuple[Question, ...]]:
    """For each context those it is profiled by, which no run asks."""
    raise NotImplementedError


def write_training(config: Config, contexts: Sequence[Context], path: Path) -> None:
    """Write what ``evicpress profile --contexts`` takes: each context with its training questions."""
    raise NotImplementedError
