"""Quality of every answer of a benchmark: against the full-cache answer to the same request and the true one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import orjson

from sglang_evicpress.benchmark.results import SCORES, Request, Results, Run, Score, read_results
from sglang_evicpress.files import write_whole
from sglang_evicpress.profiler.engine import Answer
from sglang_evicpress.profiler.scorers import Scorer, get_scorer
from sglang_evicpress.profiler.scorers.reference import token_f1
from sglang_evicpress.progress import Progress

_PAIRS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Scored:
    """``num_compared`` pairs of texts were embedded now; ``why_no_minilm`` says why none could be."""

    num_requests: int
    num_compared: int
    why_no_minilm: str | None = None


def score_runs(folder: Path, *, minilm: Scorer | None = None, is_shown: bool = False) -> Scored:
    """Write ``scores.jsonl`` of an out folder; what an earlier one says of the same two texts is not measured again.

    A request that failed has no score; one whose counterpart in the full cache failed, or is missing, only
    ``f1_truth``. ``minilm`` is None for the profiler's own, where it is installed. Raises ValueError as
    ``read_results`` does.
    """
    results, why = read_results(folder), None
    if minilm is None:
        try:
            minilm = get_scorer("minilm")
        except ValueError as error:
            why = str(error)
    known = {
        score.pair: score.minilm_full_cache
        for score in results.scores.values()
        if score.pair is not None and score.minilm_full_cache is not None
    }
    wanted = {}
    for _, request, full_cache in _answered(results):
        if full_cache is not None and request.answer != full_cache.answer:
            pair = _pair(request.answer, full_cache.answer)
            if pair not in known:
                wanted[pair] = (full_cache.answer, request.answer)
    compared = {} if minilm is None else dict(_compare(wanted, minilm, is_shown))
    scores = list(_scores(results, {**known, **compared}, None if minilm is None else 1.0))
    write_whole(str(folder / SCORES), b"".join(_line(*each) for each in scores))
    return Scored(len(scores), len(compared), why)


def _answered(results: Results) -> Iterator[tuple[Run, Request, Request | None]]:
    """Every complete request of every run, with that of the full cache."""
    full_caches = {(run.repetition, run.rate): run for run in results.runs if run.system == results.full_cache}
    for run in results.runs:
        full_cache = full_caches.get((run.repetition, run.rate))
        for request in run.requests.values():
            if request.is_complete:
                other = None if full_cache is None else full_cache.requests.get(request.index)
                yield run, request, other if other is not None and other.is_complete else None


def _compare(wanted: dict[str, tuple[str, str]], minilm: Scorer, is_shown: bool) -> Iterator[tuple[str, float]]:
    pairs = list(wanted.items())
    with Progress(len(pairs), "pairs compared", is_shown=is_shown) as progress:
        for start in range(0, len(pairs), _PAIRS_AT_ONCE):
            batch = pairs[start : start + _PAIRS_AT_ONCE]
            minilm.prepare(sorted({text for _, texts in batch for text in texts}))
            for pair, (exact, given) in batch:
                yield pair, minilm.score(Answer((), (), exact), Answer((), (), given), None, None)
            progress.step(len(batch))


def _scores(
    results: Results, minilm: Mapping[str, float], of_equals: float | None
) -> Iterator[tuple[Run, Request, Score]]:
    """``of_equals`` is what two identical answers get from ``minilm``."""
    for run, request, full_cache in _answered(results):
        truth = None if request.reference is None else _f1(request.answer, request.reference)
        if full_cache is None:
            yield run, request, Score(None, None, truth)
            continue
        pair = _pair(request.answer, full_cache.answer)
        near = minilm.get(pair, of_equals if request.answer == full_cache.answer else None)
        yield run, request, Score(_f1(request.answer, full_cache.answer), near, truth, pair)


def _f1(answer: str, reference: str) -> float:
    return 1.0 if answer == reference else token_f1(answer, reference)


def _pair(answer: str, full_cache: str) -> str:
    digests = (sha256(text.encode("utf-8", "replace")).digest() for text in (answer, full_cache))
    return sha256(b"".join(digests)).hexdigest()[:16]


def _line(run: Run, request: Request, score: Score) -> bytes:
    line = {
        **{"system": run.system, "repetition": run.repetition, "rate": run.rate, "index": request.index},
        **{
            "f1_full_cache": score.f1_full_cache,
            "minilm_full_cache": score.minilm_full_cache,
            "f1_truth": score.f1_truth,
        },
        "pair": score.pair,
    }
    return orjson.dumps(line) + b"\n"
