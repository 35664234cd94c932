"""The load of the demo: a few clients that ask the turns of a workload through the official OpenAI client."""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import openai
from testbed.workload import Turn

REQUEST_SECONDS = 120.0
_MAX_NEW_TOKENS = 14  # the longest answer has 12 words, then <eos>


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of one turn; `ttft_s` is from sending the request to the first streamed word."""

    text: str
    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


def connect(url: str) -> openai.OpenAI:
    """A client of one server; nothing is retried, so that no figure hides a failure."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=REQUEST_SECONDS)


def ask(client: openai.OpenAI, messages: Sequence[dict[str, str]]) -> Answer:
    """One streamed chat completion, greedy. Raises openai.OpenAIError."""
    begin = time.perf_counter()
    first = None
    words: list[str] = []
    usage = None
    stream = client.chat.completions.create(
        model="testbed",
        messages=list(messages),
        temperature=0,
        max_tokens=_MAX_NEW_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter()
            words.append(chunk.choices[0].delta.content)
    end = time.perf_counter()
    if usage is None:
        raise openai.OpenAIError("a stream ended before its last chunk")
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    return Answer("".join(words).strip(), (first or end) - begin, end - begin, usage.prompt_tokens, cached)


def ask_all(
    client: openai.OpenAI, turns: Sequence[Turn], num_clients: int, tick: Callable[[list[Answer]], None]
) -> list[Answer]:
    """All turns in order, `num_clients` at a time, each client asking again as soon as it has its answer.

    `tick` gets the answers so far, in order of arrival. The first failure, or Ctrl-C, ends the whole load.
    """
    stop = threading.Event()
    answers: dict[int, Answer] = {}
    arrived: list[Answer] = []

    def answer(index: int) -> int:
        if not stop.is_set():
            answers[index] = ask(client, turns[index].messages)
        return index

    pool = ThreadPoolExecutor(num_clients)
    try:
        for done in as_completed([pool.submit(answer, index) for index in range(len(turns))]):
            arrived.append(answers[done.result()])
            tick(arrived)
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
    return [answers[index] for index in range(len(turns))]


def prefill_seconds_per_token(client: openai.OpenAI, turn: Turn) -> float:
    """Seconds to prefill a token: a context that is new to the server answers so much later than a cached one."""
    new, again = ask(client, turn.messages), ask(client, turn.messages)
    return (new.ttft_s - again.ttft_s) / max(1, again.cached_tokens - new.cached_tokens)


class Progress:
    """A line that is rewritten on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._begin = time.monotonic()
        self._last = self._begin
        self._is_live = sys.stdout.isatty()

    def __call__(self, answers: Sequence[Answer]) -> None:
        now = time.monotonic()
        is_last = len(answers) == self._total
        if not is_last and now - self._last < (0.1 if self._is_live else 10.0):
            return
        self._last = now
        line = progress_line(self._label, answers, self._total, now - self._begin)
        if self._is_live:
            print(f"\r\x1b[K{line}", end="\n" if is_last else "", flush=True)
        else:
            print(line, flush=True)


def progress_line(label: str, answers: Sequence[Answer], total: int, elapsed_s: float) -> str:
    ttft_ms = 1000 * statistics.fmean(answer.ttft_s for answer in answers)
    hit = sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)
    done = f"{label:<10}{len(answers):>4}/{total} questions {elapsed_s:5.0f} s"
    return f"{done}   mean TTFT {ttft_ms:4.0f} ms   prefix hits {hit:4.0%}"


def to_lines(turns: Sequence[Turn], answers: Sequence[Answer]) -> Iterator[str]:
    """One JSON object per request, in the order of the workload."""
    for turn, answer in zip(turns, answers, strict=True):
        yield json.dumps(
            {
                "context_id": turn.context_id,
                "family": turn.family,
                "question": turn.question,
                "truth": turn.answer,
                "answer": answer.text,
                "ttft_s": round(answer.ttft_s, 6),
                "total_s": round(answer.total_s, 6),
                "prompt_tokens": answer.prompt_tokens,
                "cached_tokens": answer.cached_tokens,
            }
        )
