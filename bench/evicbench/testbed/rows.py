"""Training rows: a context, questions and answers, which tokens count in the loss, and position gaps."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from evicbench.testbed.tasks import Question, Sentence, compose
from evicbench.testbed.vocabulary import ASK, BOS, EOS, PAD, load_vocabulary

TRAIN_MIX: Mapping[str, float] = {
    "multikv": 0.21,
    "mapping": 0.25,
    "redundant": 0.06,
    "hop": 0.12,
    "record": 0.16,
    "needle": 0.06,
    "title": 0.03,
    "note": 0.03,
    "mixed": 0.08,
}
COPY = "copy"
WARM_UP_MIX: Mapping[str, float] = {
    COPY: 0.45,
    "multikv": 0.3,
    "redundant": 0.1,
    "needle": 0.1,
    "mapping": 0.05,
}

_MAX_POSITION = 2176
_GAP_PROBABILITY = 0.5
_HEADING_PROBABILITY = 0.4
_MIN_COMPOSED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Row:
    """Three sequences of one length: token ids (padded), whether each counts in the loss, its position."""

    token_ids: tuple[int, ...]
    is_target: tuple[bool, ...]
    positions: tuple[int, ...]


class _RowDraft:
    """Tokens and targets side by side, and where sentences start: only there may positions jump."""

    def __init__(self) -> None:
        self._ids = load_vocabulary().ids
        self.token_ids: list[int] = []
        self.is_target: list[bool] = []
        self.starts: list[int] = []

    def say(self, words: Sentence, *, targets: range = range(0)) -> None:
        """Append words; `targets` are the indices into `words` that the model must predict."""
        self.starts.append(len(self.token_ids))
        self.token_ids += [self._ids[word] for word in words]
        self.is_target += [i in targets for i in range(len(words))]

    def finish(self, length: int, rng: random.Random) -> Row:
        """Cut or pad to `length` and draw the positions."""
        padding = length - len(self.token_ids)
        token_ids = (self.token_ids + [self._ids[PAD]] * padding)[:length]
        is_target = (self.is_target + [False] * padding)[:length]
        starts = [start for start in self.starts if 0 < start < length]
        return Row(tuple(token_ids), tuple(is_target), draw_positions(length, starts, rng))


def draw_positions(length: int, starts: list[int], rng: random.Random) -> tuple[int, ...]:
    """Positions 0, 1, 2, ... that in half of the rows jump ahead at one to three sentence starts.

    Short rows thus show the model the distances of long ones, and gaps like those that dropped tokens leave.
    """
    room = _MAX_POSITION - length
    jumps = [0] * length
    if room > 0 and starts and rng.random() < _GAP_PROBABILITY:
        for start in rng.sample(starts, min(len(starts), rng.randint(1, 3))):
            is_long = rng.random() < 0.7
            jump = rng.randint(0, room if is_long else min(room, 200))
            jumps[start] += jump
            room -= jump
    positions, position = [], -1
    for jump in jumps:
        position += 1 + jump
        positions.append(position)
    return tuple(positions)


def _varied_count(family: str, num_tokens: int, rng: random.Random) -> int:
    """Like an evaluated context's count, but spread: the model must cope with sparse and dense contexts."""
    match family:
        case "needle":
            return rng.randint(1, 4)
        case "multikv":
            return max(2, int(num_tokens * rng.uniform(0.4, 1.0) / 7))
        case "redundant":
            return rng.randint(2, 5)
        case "mapping":
            return rng.randint(2, 6)
        case "hop":
            return max(1, int(num_tokens * rng.uniform(0.2, 0.9) / 11))
        case "record":
            return max(1, int(num_tokens * rng.uniform(0.3, 1.0) / 15))
        case _:
            return max(1, num_tokens // 160)


def _context_length(family: str, length: int, rng: random.Random) -> int:
    """Length of the context in a row; the rest holds as many questions as fit."""
    if family in ("needle", "title", "note"):
        return length - rng.randint(24, 60)
    if family == "redundant":
        return int(length * rng.uniform(0.6, 0.8))
    return int(length * rng.uniform(0.5, 0.75))


def _repeated_values(sentence: Sentence, seen: set[Sentence]) -> range:
    """Places of a fact's values if its key was stated before (so they can be predicted), else nothing."""
    if sentence[0] not in ("code", "->"):
        return range(0)
    key = sentence[:2]
    if key in seen:
        return range(2, len(sentence) - 1)
    seen.add(key)
    return range(0)


def _copy_row(length: int, rng: random.Random) -> Row:
    """A random string over and over: continuing it forms the copying heads that every family needs."""
    words = load_vocabulary()
    period = rng.randint(length // 5, length // 2)
    kinds = (words.names, words.values, words.nouns)
    string = tuple(rng.choice(rng.choice(kinds)) for _ in range(period))
    draft = _RowDraft()
    draft.say((BOS, *string))
    while len(draft.token_ids) < length:
        is_first_copy = len(draft.token_ids) == 1 + period  # its first word cannot be known to be a repeat
        draft.say(string, targets=range(int(is_first_copy), period))
    return draft.finish(length, rng)


def make_row(length: int, rng: random.Random, mix: Mapping[str, float] = TRAIN_MIX) -> Row:
    """A row of a random family; targets are answers with their `<eos>` and values of repeated facts."""
    (family,) = rng.choices(list(mix), list(mix.values()))
    if family == COPY:
        return _copy_row(length, rng)
    num_tokens = max(_MIN_COMPOSED_TOKENS, _context_length(family, length, rng))
    sentences, questions = compose(
        family,
        num_tokens,
        rng,
        count=_varied_count(family, num_tokens, rng),
        with_title=family != "note" and rng.random() < _HEADING_PROBABILITY,
        with_note=family != "title" and rng.random() < _HEADING_PROBABILITY,
    )
    draft = _RowDraft()
    draft.say((BOS,))
    seen: set[Sentence] = set()
    for sentence in sentences:
        draft.say(sentence, targets=_repeated_values(sentence, seen))
    for question in questions:
        _ask(draft, question, length)
    return draft.finish(length, rng)


def _ask(draft: _RowDraft, question: Question, length: int) -> None:
    asked = (ASK, *question.text.split())
    answered = (*question.answer.split(), EOS)
    if len(draft.token_ids) + len(asked) + len(answered) <= length:
        words = asked + answered
        draft.say(words, targets=range(len(asked), len(words)))
