"""Synthetic contexts whose questions can only be answered from the context.

The text of a request is `<bos> CONTEXT <q> QUESTION` and the model continues with `ANSWER <eos>`. Words are
separated by blanks and every word is one token, so a context is the same token prefix under every question.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from evicbench.testbed.vocabulary import ASK, BOS, load_vocabulary

MIN_CONTEXT_TOKENS = 64

_CODE_VALUES, _LOG_VALUES, _LABEL_VALUES, _HEADING_NOUNS = 4, 12, 3, 6
_CODE_TOKENS, _SHOT_TOKENS, _FILLER_TOKENS = 7, 6, 8
_HEADING_TOKENS = _HEADING_NOUNS + 3
_MIXED_ROUND_TOKENS = 160
_COLOUR_WEIGHTS = (0.42, 0.24, 0.14, 0.05, 0.05, 0.05, 0.05)  # a few colours dominate every context

Sentence = tuple[str, ...]


class Question(NamedTuple):
    """A question about one context and the only right answer, both blank-separated words."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Context:
    """A shared prefix of `len(tokens)` tokens (`tokens[0]` is `<bos>`) and what may be asked about it."""

    family: str
    tokens: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def text(self) -> str:
        """The context as a chat message holds it: without `<bos>`, which the chat template writes."""
        return " ".join(self.tokens[1:])

    def prompt(self, question: str) -> str:
        """The raw completion prompt, `<bos>` included."""
        return f"{BOS} {self.text} {ASK} {question}"


class Draft:
    """Sentences that fit in a room of tokens, with the questions they answer; names are never drawn twice."""

    def __init__(self, room: int, rng: random.Random) -> None:
        words = load_vocabulary()
        self.rng = rng
        self.room = room
        self.sentences: list[Sentence] = []
        self.questions: list[Question] = []
        self._names = rng.sample(words.names, len(words.names))
        self._values = words.values
        self._nouns = words.nouns
        self._verbs = words.verbs
        self._palette = rng.sample(words.colours, len(_COLOUR_WEIGHTS))

    @property
    def num_names_left(self) -> int:
        return len(self._names)

    def name(self) -> str:
        return self._names.pop()

    def values(self, count: int) -> Sentence:
        return tuple(self.rng.choices(self._values, k=count))

    def add(self, sentence: Sentence, repeats: int = 1) -> bool:
        """Append up to `repeats` copies; False when not even one fitted."""
        fitting = min(repeats, self.room // len(sentence))
        self.sentences += [sentence] * fitting
        self.room -= fitting * len(sentence)
        return fitting > 0

    def ask(self, question: Sentence, answer: Sentence) -> None:
        self.questions.append(Question(" ".join(question), " ".join(answer)))

    def state(self, keyword: str, num_values: int, repeats: int = 1) -> bool:
        """Add `keyword NAME values .` and ask `keyword NAME`."""
        key, values = (keyword, self.name()), self.values(num_values)
        if not self.add((*key, *values, "."), repeats):
            return False
        self.ask(key, values)
        return True

    def chain(self) -> bool:
        """Add `boss A B .` and `code B values .`, and ask for A's boss and that boss's code."""
        employee, boss, values = self.name(), self.name(), self.values(_CODE_VALUES)
        relation, fact = ("boss", employee, boss, "."), ("code", boss, *values, ".")
        if self.room < len(relation) + len(fact):
            return False
        self.add(relation)
        self.add(fact)
        self.ask(("code", "boss", employee), (boss, *values))
        return True

    def heading(self, keyword: str) -> Sentence:
        """A title or note sentence, asked about but not yet placed: it owns a fixed end of the context."""
        nouns = tuple(self.rng.choices(self._nouns, k=_HEADING_NOUNS))
        self.ask((keyword, ":"), nouns)
        return (keyword, ":", *nouns, ".")

    def fill(self) -> None:
        """Use up the room with sentences that nobody asks about, short of one sentence's length."""
        while self.room >= _FILLER_TOKENS:
            subject, thing = self.rng.choices(self._palette, _COLOUR_WEIGHTS, k=2)
            noun, other = self.rng.choices(self._nouns, k=2)
            verb = self.rng.choice(self._verbs)
            self.add(("the", subject, noun, verb, "the", thing, other, "."))


def _until_full(add: Callable[[Draft], bool]) -> Callable[[Draft, int], None]:
    """Add so many, or as many as there is room for."""

    def build(draft: Draft, count: int) -> None:
        for _ in range(count):
            if not add(draft):
                return

    return build


def _add_repeated_codes(draft: Draft, count: int) -> None:
    share = draft.rng.uniform(0.4, 0.8)
    repeats = max(2, int(draft.room * share / _CODE_TOKENS / count))
    _until_full(lambda each: each.state("code", _CODE_VALUES, repeats))(draft, count)


def _add_mapping(draft: Draft, count: int) -> None:
    """`count` labels, each shared by a few names; a line states one pair, later lines repeat earlier ones."""
    labels = [draft.values(_LABEL_VALUES) for _ in range(count)]
    names_per_label = draft.rng.choice((2, 3, 4, 6))
    pairs = [(draft.name(), label) for _ in range(names_per_label) for label in labels]
    num_lines = max(count, int(draft.room * draft.rng.uniform(0.4, 1.0) / _SHOT_TOKENS))
    for line in range(num_lines):
        is_new = line < len(pairs)
        name, label = pairs[line] if is_new else draft.rng.choice(pairs)
        if not draft.add(("->", name, *label, ";")):
            return
        if is_new:
            draft.ask(("->", name), label)


def _add_headings_only(draft: Draft, count: int) -> None:
    """The title and the note are placed by `compose`; the rest of the context is filler."""


def _add_mixture(draft: Draft, count: int) -> None:
    """`count` rounds of one fact, one repeated fact, one log and one chain, then a small mapping."""
    for _ in range(count):
        draft.state("code", _CODE_VALUES)
        draft.state("code", _CODE_VALUES, repeats=4)
        draft.state("log", _LOG_VALUES)
        draft.chain()
    labels = (draft.values(_LABEL_VALUES), draft.values(_LABEL_VALUES))
    pairs = [(draft.name(), labels[i % 2]) for i in range(6)]
    for line in range(max(2, draft.room // 30)):
        name, label = pairs[line] if line < 2 else draft.rng.choice(pairs)
        if not draft.add(("->", name, *label, ";")):
            return
        if line < 2:
            draft.ask(("->", name), label)


_add_codes = _until_full(lambda draft: draft.state("code", _CODE_VALUES))

_BUILDERS: dict[str, Callable[[Draft, int], None]] = {
    "needle": _add_codes,
    "multikv": _add_codes,
    "redundant": _add_repeated_codes,
    "mapping": _add_mapping,
    "hop": _until_full(Draft.chain),
    "record": _until_full(lambda draft: draft.state("log", _LOG_VALUES)),
    "title": _add_headings_only,
    "note": _add_headings_only,
    "mixed": _add_mixture,
}
FAMILIES: tuple[str, ...] = tuple(_BUILDERS)
ONE_QUESTION = ("title", "note")
"""Families whose contexts can be asked one thing only."""

_NAMES_PER_COUNT = {"mapping": 6, "hop": 2, "mixed": 5}
_SPARE_NAMES = 8  # the small mapping of `mixed` draws six more


def _usual_count(family: str, num_tokens: int) -> int:
    """Number of facts (labels, chains, logs, rounds) in an evaluated context of this length."""
    match family:
        case "multikv":
            return min(180, num_tokens // 10)
        case "hop":
            return max(2, num_tokens // 64)
        case "record":
            return max(2, num_tokens // 32)
        case "mixed":
            return max(1, (num_tokens - 1 - 2 * _HEADING_TOKENS) // _MIXED_ROUND_TOKENS)
        case _:
            return 4


def compose(
    family: str,
    num_tokens: int,
    rng: random.Random,
    *,
    count: int,
    with_title: bool = False,
    with_note: bool = False,
) -> tuple[list[Sentence], list[Question]]:
    """Sentences of at most `num_tokens - 1` and at least `num_tokens - 8` tokens, and all their questions.

    `count` sizes the family (facts, labels, chains, logs or rounds). The title comes first, the note last,
    everything between in random order. Raises ValueError for an unknown family.
    """
    if family not in _BUILDERS:
        raise ValueError(f"unknown family {family!r}; there are {', '.join(FAMILIES)}")
    with_title |= family in ("title", "mixed")
    with_note |= family in ("note", "mixed")
    draft = Draft(num_tokens - 1 - _HEADING_TOKENS * (with_title + with_note), rng)
    affordable = (draft.num_names_left - _SPARE_NAMES) // _NAMES_PER_COUNT.get(family, 1)
    _BUILDERS[family](draft, min(count, affordable))
    draft.fill()
    rng.shuffle(draft.sentences)
    title = [draft.heading("title")] if with_title else []
    note = [draft.heading("note")] if with_note else []
    rng.shuffle(draft.questions)
    return [*title, *draft.sentences, *note], draft.questions


def make_context(family: str, num_tokens: int, rng: random.Random, count: int | None = None) -> Context:
    """A context of exactly `num_tokens` tokens, `<bos>` counted; the same for the same state of `rng`.

    `count` sizes the family as for `compose`; by default it goes by the length.

    Room too small for a sentence is made up by full stops at the start, behind the title if there is one.
    Raises ValueError for an unknown family or fewer than `MIN_CONTEXT_TOKENS` tokens.
    """
    if num_tokens < MIN_CONTEXT_TOKENS:
        raise ValueError(f"a context has at least {MIN_CONTEXT_TOKENS} tokens, not {num_tokens}")
    sentences, questions = compose(family, num_tokens, rng, count=count or _usual_count(family, num_tokens))
    words = [word for sentence in sentences for word in sentence]
    opening = _HEADING_TOKENS if words[0] == "title" else 0
    words[opening:opening] = ["."] * (num_tokens - 1 - len(words))
    return Context(family, (BOS, *words), tuple(questions))
