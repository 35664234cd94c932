"""Clients that stream generations from a server for a while, and when each token came."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

REQUEST_S = 120.0


class StreamError(RuntimeError):
    """A request was refused or ended early."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One streamed generation: when it was asked for, and when each part of it came, on one clock in seconds."""

    asked_s: float
    came_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.came_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens: what ITL is a percentile of."""
        return [after - before for before, after in zip(self.came_s, self.came_s[1:], strict=False)]


def stream(url: str, input_ids: Sequence[int], num_new: int) -> Stream:
    """``num_new`` greedy tokens behind ``input_ids``, whatever they are. Raises StreamError."""
    sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
    body = json.dumps({"input_ids": list(input_ids), "sampling_params": sampling, "stream": True})
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=REQUEST_S)
    try:
        asked_s = time.perf_counter()
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise StreamError(f"the server answered {answer.status}: {answer.read()!r:.200}")
        came_s = [time.perf_counter() for line in answer if line.startswith(b"data: {")]
    finally:
        connection.close()
    if len(came_s) < num_new // 2:  # tokens may come together, but not as many as that
        raise StreamError(f"{len(came_s)} parts came of {num_new} tokens")
    return Stream(asked_s, tuple(came_s))


def steady_load(
    url: str,
    draw_prompt: Callable[[random.Random], Sequence[int]],
    *,
    num_clients: int,
    seconds: float,
    num_new: int,
    mean_pause_s: float,
    seed: str,
) -> list[Stream]:
    """Streams of ``num_clients`` clients, each of which asks, waits about ``mean_pause_s`` and asks again.

    Prompts and pauses are the same for the same ``seed``. No client begins anything after ``seconds``. Raises
    StreamError at the first request that fails.
    """
    end_s = time.perf_counter() + seconds
    has_failed = threading.Event()

    def client(number: int) -> list[Stream]:
        rng = random.Random(f"{seed}-{number}")
        streams: list[Stream] = []
        while not has_failed.is_set():
            pause_s = rng.expovariate(1.0 / mean_pause_s) if mean_pause_s > 0.0 else 0.0
            prompt = draw_prompt(rng)
            if time.perf_counter() + pause_s >= end_s:
                break
            time.sleep(pause_s)
            try:
                streams.append(stream(url, prompt, num_new))
            except (StreamError, OSError, http.client.HTTPException):
                has_failed.set()
                raise
        return streams

    with ThreadPoolExecutor(num_clients) as pool:
        return [each for part in pool.map(client, range(num_clients)) for each in part]
