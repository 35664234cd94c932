"""Questions about a text: cut out of it without a model, or asked of any OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from string import Template

import numpy as np
from numpy.typing import NDArray

from sglang_evicpress.cli.profile.chat import ChatEndpoint, EndpointError
from sglang_evicpress.profiler.contexts import GivenQuestion

MIN_CUE_WORDS, MAX_CUE_WORDS = 2, 8
MIN_ANSWER_WORDS = 3
MAX_PIECE_WORDS = 40
"""A sentence of more words is cut into pieces of at most so many, cue and answer together."""

_GOOD_ANSWER_WORDS = 8

STYLES = {
    "natural": 'What comes right after the words "{cue}" in the text above? Quote it up to the end of the sentence.',
    "continue": "{cue}",
}


def extract_questions(text: str, num_questions: int, *, style: str = "natural") -> list[GivenQuestion]:
    """At most ``num_questions`` questions, spread evenly over ``text`` and in its order; the same for the same text.

    Each gives the first words of a sentence, at least 2 and no more than make them occur once in the text, and asks
    what follows; the rest of the sentence is the answer. Style "continue" is the bare words, for a model that goes on
    writing. Raises ValueError when no sentence begins with such words, and for an unknown style.
    """
    if num_questions < 1:
        raise ValueError(f"num_questions is {num_questions}: expected at least 1")
    if style not in STYLES:
        raise ValueError(f"style {style!r:.100} is unknown: expected one of {', '.join(STYLES)}")
    words = _Words.of(text)
    cues = np.array(list(_cues(words)), dtype=np.int64).reshape(-1, 3)
    if not len(cues):
        raise ValueError(
            f"a text of {len(words.starts)} words has no sentence whose first {MIN_CUE_WORDS} to {MAX_CUE_WORDS} words "
            f"occur once with {MIN_ANSWER_WORDS} more behind them: expected prose or lines that differ"
        )
    chosen = cues[_spread(cues[:, 0], _rarity(words, cues), num_questions, len(words.starts))]
    questions = []
    for start, middle, end in chosen.tolist():
        cue = _one_line(text[words.starts[start] : words.ends[middle - 1]])
        answer = _one_line(text[words.ends[middle - 1] : words.ends[end - 1]])
        questions.append(GivenQuestion(STYLES[style].format(cue=cue), answer))
    return questions


PART_CHARS = 24_000
"""A longer text is shown to the endpoint in parts of about so many characters, some 6,000 tokens of English."""

MAX_REPLIES = 3
"""Of one part, until it has given as many questions as were wanted."""


def ask_questions(
    endpoint: ChatEndpoint, text: str, num_questions: int, *, part_chars: int = PART_CHARS
) -> list[GivenQuestion]:
    """Questions with short answers, all different, from the model behind an ``endpoint``.

    At least one and at most ``num_questions``, as evenly from the parts of ``text`` as it has them; where it has more
    parts than questions are wanted, some are not shown. Raises EndpointError, naming the address, when the server does
    not answer or the first part gives no question, and ValueError for a text or number that cannot be used.
    """
    if num_questions < 1 or part_chars < 1:
        raise ValueError(f"num_questions is {num_questions}, part_chars {part_chars}: expected at least 1")
    if not text.strip():
        raise ValueError("the text is empty: expected something to ask about")
    prompt = Template(question_prompt())
    found: dict[str, GivenQuestion] = {}
    wanted = 0
    for part, num_wanted in _parts(text, num_questions, part_chars):
        wanted += num_wanted
        for attempt in range(MAX_REPLIES):
            missing = wanted - len(found)
            # Asked the same again, a model without chance in it would give the same again.
            reply = endpoint.complete(
                prompt.substitute(text=part, num_questions=missing), temperature=0.7 if attempt else 0.0
            )
            fresh = {question.text.casefold(): question for question in _parsed(reply)}
            found |= [item for item in fresh.items() if item[0] not in found][:missing]
            if len(found) == wanted:
                break
        if not found:
            raise EndpointError(
                f"{endpoint.name} gave no question in {MAX_REPLIES} replies, at last {reply[:200]!r}: expected lines "
                f'such as {{"question": "...", "answer": "..."}}'
            )
    return list(found.values())


def question_prompt() -> str:
    """Prompt for an endpoint, with places for the text and the number of questions."""
    return files("sglang_evicpress.cli.profile").joinpath("question_prompt.txt").read_text("utf-8")


def _parts(text: str, num_questions: int, part_chars: int) -> Iterator[tuple[str, int]]:
    """Parts in their order, cut between lines or words, with the number of questions wanted of each."""
    num_parts = math.ceil(len(text) / part_chars)
    cuts = [0]
    for index in range(1, num_parts):
        ideal = len(text) * index // num_parts
        least = max(cuts[-1], ideal - part_chars // 8)
        cuts.append(next((at + 1 for mark in "\n 。" if (at := text.rfind(mark, least, ideal)) > least), ideal))
    cuts.append(len(text))
    for index in range(num_parts):
        num_wanted = num_questions * (index + 1) // num_parts - num_questions * index // num_parts
        if num_wanted:
            yield text[cuts[index] : cuts[index + 1]], num_wanted


_MAX_CHARS = 2000  # of a question or an answer


def _parsed(reply: str) -> list[GivenQuestion]:
    """Every JSON object with a question and an answer, whatever numbers, fences or brackets are around them."""
    decoder = json.JSONDecoder(strict=False)
    questions = []
    place = max(0, reply.rfind("</think>"))
    while (place := reply.find("{", place)) >= 0:
        try:
            value, end = decoder.raw_decode(reply, place)
        except json.JSONDecodeError:
            place += 1
            continue
        except RecursionError:
            break
        question, answer = (_string(value.get(name)) for name in ("question", "answer"))
        if question and answer:
            questions.append(GivenQuestion(question, answer))
            place = end
        else:
            place += 1
    return questions


def _string(value: object) -> str:
    """Empty for what is no text of a usable length."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    return value.strip() if isinstance(value, str) and len(value) <= _MAX_CHARS else ""


# Chinese and Japanese are written without spaces: there every character is a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_PUNCTUATION = re.compile(r"[\W_]+")
# Looks back, so that a long run of marks is read once and not again from each of them.
_SENTENCE_END = re.compile(
    r"(?<![.…])[.…]++[\"'”’)\]]*+(?=\s+[^a-z\s])|(?<![!?])[!?]++[\"'”’)\]]*+(?=\s)|[。！？]+|\n+"
)
_WRAPPED_COLUMNS = 50  # a line shorter than this was not broken to fit a page


@dataclass(frozen=True, slots=True)
class _Words:
    """Words of a text, without those that are only punctuation: begin and end of each, a number shared by equal ones,
    and the index of the first word of every sentence, with the number of words at the end."""

    starts: list[int]
    ends: list[int]
    ids: NDArray[np.int64]
    sentences: list[int]
    labels: list[int]  # of each sentence: the index of the first word behind a label such as `Ann:` or `line 3:`

    @classmethod
    def of(cls, text: str) -> _Words:
        starts, ends, ids = [], [], []
        numbers: dict[str, int] = {}
        for match in _WORD.finditer(text):
            if bare := _PUNCTUATION.sub("", match[0].casefold()):
                starts.append(match.start())
                ends.append(match.end())
                ids.append(numbers.setdefault(bare, len(numbers)))
        offsets = np.array(starts, dtype=np.int64)
        breaks = np.searchsorted(offsets, list(_sentence_ends(text)))
        sentences = np.unique(np.concatenate([[0], breaks, [len(starts)]])).tolist()
        labels = [
            next((i + 1 for i in range(first, min(first + 4, last)) if text[ends[i] - 1] == ":"), first)
            for first, last in zip(sentences, sentences[1:], strict=False)
        ]
        return cls(starts, ends, np.array(ids, dtype=np.int64), sentences, labels)


def _sentence_ends(text: str) -> Iterator[int]:
    line_start = 0
    for match in _SENTENCE_END.finditer(text):
        end = match.end()
        if match[0] == "\n":
            before, after = text[match.start() - 1 : match.start()], text[end : end + 1]
            is_long = match.start() - line_start >= _WRAPPED_COLUMNS
            if is_long and (before.isalnum() or before in ",;-") and after.islower():
                line_start = end
                continue  # prose that was broken to fit a page
        if match[0].startswith("\n"):
            line_start = end
        yield end


def _cues(words: _Words) -> Iterator[tuple[int, int, int]]:
    """First word of a cue, of its answer, and behind its answer; in the order of the text."""
    num_cue_words = _shortest_unique(words.ids)
    for first, last, label in zip(words.sentences, words.sentences[1:], words.labels, strict=False):
        num_pieces = math.ceil((last - first) / MAX_PIECE_WORDS)
        edges = [first + (last - first) * piece // num_pieces for piece in range(num_pieces + 1)]
        for piece_first, piece_last in zip(edges, edges[1:], strict=False):
            for start in (label, first) if piece_first == first else (piece_first,):
                middle = start + int(num_cue_words[start]) if start < piece_last else piece_last
                if start < middle <= piece_last - MIN_ANSWER_WORDS:
                    yield start, middle, piece_last
                    break


def _shortest_unique(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every word, the least number of words from it on that occur once; 0 if that is more than MAX_CUE_WORDS."""
    shortest = np.zeros(len(ids), dtype=np.int64)
    phrases = ids  # numbers the phrases of so many words, by the word they begin with; equal ones share a number
    for num_words in range(MIN_CUE_WORDS, min(MAX_CUE_WORDS, len(ids)) + 1):
        pairs = phrases[:-1] * len(ids) + ids[num_words - 1 :]
        _, phrases, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        is_new = (counts[phrases] == 1) & (shortest[: len(phrases)] == 0)
        shortest[: len(phrases)][is_new] = num_words
    return shortest


def _rarity(words: _Words, cues: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mean rarity of the words of each answer in the text, in nats; one of few words counts for less."""
    surprise = np.log(len(words.ids) / np.bincount(words.ids)[words.ids])
    total = np.concatenate([[0.0], np.cumsum(surprise)])
    num_words = np.maximum(cues[:, 2] - cues[:, 1], _GOOD_ANSWER_WORDS)
    rarity: NDArray[np.float64] = (total[cues[:, 2]] - total[cues[:, 1]]) / num_words
    return rarity


def _spread(
    places: NDArray[np.int64], rarity: NDArray[np.float64], num_chosen: int, num_words: int
) -> NDArray[np.int64]:
    """Choose among ``places``: the rarest of each equal part of the text, then whatever is farthest from those
    taken, until there are ``num_chosen``."""
    if len(places) <= num_chosen:
        return np.arange(len(places))
    parts = places * num_chosen // num_words
    by_part = np.lexsort((places, -rarity, parts))
    taken: list[int] = by_part[np.unique(parts[by_part], return_index=True)[1]].tolist()
    distance = np.full(len(places), num_words)
    for index in taken:
        distance = np.minimum(distance, np.abs(places - places[index]))
    while len(taken) < num_chosen:
        taken.append(int(np.argmax(distance)))
        distance = np.minimum(distance, np.abs(places - places[taken[-1]]))
    return np.sort(taken)


def _one_line(text: str) -> str:
    return " ".join(text.split())
