"""Out folders of a benchmark that never ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

CONFIG = {
    "name": "made-up",
    "model": "a model",
    "requests": 4,
    "repetitions": 2,
    "max_new_tokens": 16,
    "tokens": 3000,
    "memory": {"gpu": 0.08, "host": 0.25, "ssd": 1.0},
    "rates": [0, 2],
    "ssd_bandwidth": 5e8,
    "once": [],
}
SETTINGS = {
    "working_set_tokens": 50_000,
    "num_contexts": 20,
    "pool_tokens": 4000,
    "host_bytes": 25_600_000,
    "ssd_bytes": 102_400_000,
    "kv_bytes_per_token": 2048,
    "arrivals": "poisson",
}
ENVIRONMENT = {
    "command": "evicpress bench serve",
    "versions": {"sglang": "1.2.3", "python": "3.11"},
    "commit": "0123abc",
    "machine": "a machine",
    "num_cpus": 2,
    "started": "2026-11-21 10:00",
}


def request(index: int, ttft_s: float | None = 0.1, answer: str = "the same", **more: Any) -> dict[str, Any]:
    """A line of a run; without ``ttft_s`` a failed one. It arrives after ``index`` seconds and ends 0.2 s after the
    first token, which two others follow."""
    line = {
        **{"index": index, "context": index, "family": "notes", "question": f"question {index}"},
        **{"arrival_s": float(index), "sent_s": float(index), "ttft_s": ttft_s, "itl_s": [0.05, 0.15]},
        **{"end_s": index + (ttft_s or 0.0) + 0.2, "prompt_tokens": 100, "cached_tokens": 0, "cached_by_tier": None},
        **{"answer": answer, "reference": None, "error": None if ttft_s is not None else "it broke"},
    }
    return {**line, **more}


def requests(times: Sequence[float | None], answers: Sequence[str] = (), **more: Any) -> list[dict[str, Any]]:
    """One for each time."""
    given = answers or ["the same"] * len(times)
    return [request(index, time, given[index], **more) for index, time in enumerate(times)]


def write_plan(folder: Path, systems: Mapping[str, str], **config: Any) -> None:
    """``systems``: name -> kind."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = [
        {"name": name, "kind": kind, "is_stock": kind in ("full-cache", "lru", "prefill-only"), "flags": []}
        for name, kind in systems.items()
    ]
    plan = {
        **{"config": {**CONFIG, **config}, "settings": SETTINGS, "environment": ENVIRONMENT},
        **{"systems": listed, "left_out": [{"name": "hicache", "why": "it needs CUDA"}]},
    }
    (folder / "plan.json").write_bytes(orjson.dumps(plan))


def write_run(
    folder: Path, system: str, rate: float, lines: Sequence[Mapping[str, Any]], repetition: int = 0, **header: Any
) -> Path:
    """A run that took a second for each request."""
    path = folder / "runs" / system.replace(" ", "-") / f"{repetition}-{rate:g}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    run = {
        **{"system": system, "repetition": repetition, "rate": rate, "begin_unix_s": 0.0},
        **{"took_s": float(len(lines)), "offered_rps": rate, "is_stock_checked": True, "check": None},
        **{"stats": None, "stats_before": None, "resident": None},
        **header,
    }
    path.write_bytes(b"\n".join(orjson.dumps(line) for line in ({"run": run}, *lines)) + b"\n")
    return path


def write_scores(folder: Path, scores: Sequence[tuple[str, int, float, int, float | None]]) -> None:
    """(system, repetition, rate, index, quality): the same by every measure."""
    names = ("system", "repetition", "rate", "index")
    lines = [
        {
            **dict(zip(names, key, strict=True)),
            "f1_full_cache": quality,
            "minilm_full_cache": quality,
            "f1_truth": quality,
        }
        for *key, quality in scores
    ]
    (folder / "scores.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def write_settings(
    folder: Path,
    settings: Mapping[str, tuple[str, Mapping[float, tuple[float, float]]]],
    *,
    num_requests: int = 4,
    **more: Any,
) -> None:
    """Whole benchmarks of one repetition: system -> (kind, rate -> (TTFT of every request, quality of every answer)).

    ``more`` goes into every request.
    """
    write_plan(folder, {name: kind for name, (kind, _) in settings.items()}, repetitions=1)
    scores = []
    for name, (_, rates) in settings.items():
        for rate, (ttft_s, quality) in rates.items():
            write_run(folder, name, rate, requests([ttft_s] * num_requests, **more))
            scores += [(name, 0, rate, index, quality) for index in range(num_requests)]
    write_scores(folder, scores)
