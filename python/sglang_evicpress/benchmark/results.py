"""Results of a benchmark, read back from its run folder: the plan, the runs with their requests, and the scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from sglang_evicpress.benchmark.config import rates_at

PLAN, RUNS, SCORES = "plan.json", "runs", "scores.jsonl"
TIERS = ("gpu", "host", "ssd")

MOST_FAILED = 0.01
"""A system that fails or refuses more of its requests than this share is not compared: those left may be the easy
ones, and had less of a queue to wait in."""

_SGLANG_TIERS = {"device": "gpu", "storage": "ssd"}


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a run. ``latency_s`` ends with the answer and begins as ``ttft_s`` does; both are None for one that
    failed. ``late_s`` is how long after its planned arrival it was sent; ``hits`` are its cached tokens by tier, None
    when the server did not say where they were. ``end_s`` is when it ended, from the start of the rate. ``is_cut``: it
    was cancelled at the end of the rate, and had waited for its first token for ``waited_s``; ``is_refused``: the
    server answered 503. Neither is complete, nor did it fail."""

    index: int
    family: str
    late_s: float
    ttft_s: float | None
    itl_s: tuple[float, ...]
    latency_s: float | None
    prompt_tokens: int
    cached_tokens: int
    hits: Mapping[str, int] | None
    answer: str
    reference: str | None
    error: str | None
    end_s: float = 0.0
    is_cut: bool = False
    is_refused: bool = False
    waited_s: float | None = None

    @property
    def ttft_or_waited_s(self) -> float | None:
        """TTFT, of one that was cut the time it had waited; None of one that failed or was refused."""
        return self.waited_s if self.ttft_s is None else self.ttft_s

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.ttft_s is not None

    @property
    def has_failed(self) -> bool:
        return not (self.is_complete or self.is_cut or self.is_refused)


@dataclass(frozen=True, slots=True)
class Run:
    """One rate of one repetition of a system. ``header`` is the first line of the file ``path``."""

    system: str
    repetition: int
    rate: float
    header: Mapping[str, Any]
    requests: Mapping[int, Request]
    path: Path


@dataclass(frozen=True, slots=True)
class Score:
    """Similarity of an answer to the full-cache one and to the true one; None without one to compare with.

    ``pair`` names the two texts that ``minilm_full_cache`` compares.
    """

    f1_full_cache: float | None
    minilm_full_cache: float | None
    f1_truth: float | None
    pair: str | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """An out folder. ``scores`` are by (system, repetition, rate, index)."""

    run_dir: Path
    plan: Mapping[str, Any]
    runs: tuple[Run, ...]
    scores: Mapping[tuple[str, int, float, int], Score]

    @property
    def systems(self) -> list[Mapping[str, Any]]:
        """Systems in the order of the plan, without those that have no run."""
        ran = {run.system for run in self.runs}
        return [system for system in self.plan["systems"] if system["name"] in ran]

    @property
    def rates(self) -> list[float]:
        return sorted({run.rate for run in self.runs})

    @property
    def families(self) -> list[str]:
        return sorted({request.family for run in self.runs for request in run.requests.values()})

    @property
    def full_cache(self) -> str | None:
        """The name of the system whose answers and times the others are compared with: the full cache, or, where it did
        not run, the one with our attention."""
        named = {system["kind"]: system["name"] for system in reversed(self.systems)}
        return named.get("full-cache", named.get("full-cache+attention"))

    @property
    def tree_cores(self) -> dict[str, str]:
        """System -> the core of SGLang's radix tree that it ran on, of those with SGLang's own tree."""
        cores = {run.system: run.header.get("tree_core") for run in self.runs}
        return {system: core for system, core in cores.items() if core in ("python", "rust")}

    @property
    def f1(self) -> str:
        """The token F1 that is known: with the full cache's answers or, where it did not run, with the true ones."""
        return "f1_truth" if self.full_cache is None else "f1_full_cache"

    @property
    def multiples(self) -> dict[float, float]:
        """Rate -> its multiple of saturation, for the rates that were planned as such."""
        load = self.plan.get("config", {}).get("load") or {}
        rps = load.get("saturation_rps")
        return {} if rps is None else rates_at(rps, load["of_saturation"])

    def runs_of(self, system: str, rate: float) -> list[Run]:
        """By repetition."""
        found = [run for run in self.runs if run.system == system and run.rate == rate]
        return sorted(found, key=lambda run: run.repetition)


def read_results(folder: Path) -> Results:
    """Raises ValueError when the folder has no plan, or a file of it is not what a benchmark writes."""
    return Results(folder, read_plan(folder), tuple(read_runs(folder)), read_scores(folder))


def read_plan(folder: Path) -> Mapping[str, Any]:
    path = folder / PLAN
    try:
        plan = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): expected the out folder of `evicpress bench serve`"
        ) from None
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(plan, dict) or not isinstance(plan.get("systems"), list):
        raise ValueError(f"{path} lists no systems: expected a plan of `evicpress bench serve`")
    return plan


def read_object(path: Path, expected: str) -> dict[str, Any] | None:
    """The JSON object in a file of an out folder; None where there is no such file. Raises ValueError."""
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not what a benchmark writes: expected {expected}")
    return found


def read_runs(folder: Path) -> Iterator[Run]:
    """Every run that is complete, in the order of systems' folders, repetitions and rates."""
    found = [read_run(path) for path in (folder / RUNS).glob("*/*.jsonl")]
    yield from sorted(found, key=lambda run: (run.system, run.repetition, run.rate))


def read_run(path: Path) -> Run:
    try:
        first, *rest = (orjson.loads(line) for line in path.read_bytes().splitlines())
        header = first["run"]
        rate = float(header["rate"])
        requests = {request.index: request for request in (_request(line, rate) for line in rest)}
        return Run(header["system"], int(header["repetition"]), rate, header, requests, path)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a run of `evicpress bench serve` ({error!r:.200}): move it away, and run it again"
        ) from None


def count_requests(path: Path) -> int | None:
    """Number of requests in the file of a run; None where there is no such file."""
    try:
        return len(path.read_bytes().splitlines()) - 1
    except FileNotFoundError:
        return None


def tree_file(path: Path) -> Path:
    """Beside the file of a run: the nodes that it left in the cache."""
    return path.with_suffix(".tree.json")


def read_tree(run: Run) -> list[Mapping[str, Any]]:
    """Nodes as ``/evicpress/tree`` gives them; none of a server without one."""
    path = tree_file(run.path)
    return list(orjson.loads(path.read_bytes())) if path.exists() else []


def _request(line: Mapping[str, Any], rate: float) -> Request:
    error = line.get("error")
    begin_s = line["sent_s"] if rate == 0 else line["arrival_s"]  # one client sends once it has the last answer
    is_cut = bool(line.get("is_cut"))
    has_failed = error is not None or line.get("ttft_s") is None or is_cut
    waited_s = line["end_s"] - begin_s if line.get("ttft_s") is None else line["ttft_s"]
    by_tier = line.get("cached_by_tier")
    return Request(
        index=line["index"],
        family=line.get("family") or "",
        late_s=line["sent_s"] - begin_s,
        ttft_s=None if has_failed else line["ttft_s"],
        itl_s=tuple(line.get("itl_s") or ()),
        latency_s=None if has_failed else line["end_s"] - begin_s,
        prompt_tokens=line.get("prompt_tokens") or 0,
        cached_tokens=line.get("cached_tokens") or 0,
        hits=None if by_tier is None else {_SGLANG_TIERS.get(tier, tier): count for tier, count in by_tier.items()},
        answer=line.get("answer") or "",
        reference=line.get("reference"),
        error=error,
        end_s=line["end_s"],
        is_cut=is_cut,
        is_refused=bool(line.get("is_refused")),
        waited_s=waited_s if is_cut else None,
    )


def read_scores(folder: Path) -> dict[tuple[str, int, float, int], Score]:
    """Nothing where nothing was scored yet."""
    path = folder / SCORES
    if not path.exists():
        return {}
    scores = {}
    try:
        for line in map(orjson.loads, path.read_bytes().splitlines()):
            key = (line["system"], int(line["repetition"]), float(line["rate"]), int(line["index"]))
            scores[key] = Score(line["f1_full_cache"], line["minilm_full_cache"], line["f1_truth"], line.get("pair"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what scoring writes ({error!r:.200}): remove it, and score again") from None
    return scores
