"""Streamed answers as their clients see them: timed to the end, or left before it."""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from evicbench.testbed.server import Server, greedy


@dataclass(frozen=True, slots=True)
class Streamed:
    """Seconds to the first event, and of each event after it; ``last`` is the last event, the whole answer."""

    first_s: float
    steps_s: tuple[float, ...]
    last: Any

    @property
    def between_s(self) -> float:
        return statistics.fmean(self.steps_s or (0.0,))


def stream(server: Server, input_ids: Sequence[int], max_new_tokens: int = 1) -> Streamed:
    """One greedy answer. Raises ServerError for an answer without events, or one that is an error."""
    begin = time.perf_counter()
    times, last = [], b'{"error": "no event came"}'
    with posted(server, greedy(input_ids, max_new_tokens, stream=True), timeout_s=300.0) as connection:
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                last = line[6:]
    whole = json.loads(last)
    if "error" in whole:
        raise server.error(f"a request was answered by an error: {whole['error']}")
    steps = tuple(after - before for before, after in zip(times, times[1:], strict=False))
    return Streamed(times[0] - begin, steps, whole)


@contextmanager
def posted(
    server: Server, body: Mapping[str, Any], *, timeout_s: float = 120.0
) -> Iterator[http.client.HTTPConnection]:
    """A connection on which /generate was asked for; closed at the end of the block, whatever was read by then."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        yield connection
    finally:
        connection.close()
