"""What a benchmark measures: one YAML file as one checked value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KINDS = ("bound", "prefill-only", "lru", "hicache", "tiers-lru", "fixed", "adaptcache", "impress", "evicpress")
"""What ``systems`` may name; ``fixed`` stands for every press with every kept fraction, ``evicpress`` for every alpha.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the contexts are from: a JSONL ``file``, or a ``command`` that prints one, run in ``folder``."""

    file: Path | None
    command: tuple[str, ...]
    folder: Path


@dataclass(frozen=True, slots=True)
class Memory:
    """Shares of the working set; ``host`` and ``ssd`` may be 0, for no such tier."""

    gpu: float
    host: float
    ssd: float


@dataclass(frozen=True, slots=True)
class Profiling:
    """Before the runs, each context is profiled by its first ``questions``, in ``forms`` (separated by commas)."""

    questions: int
    forms: str


@dataclass(frozen=True, slots=True)
class Config:
    """A benchmark. ``load_config`` makes and checks it.

    ``model`` is a folder or a name on the hub; ``server`` are flags and ``env`` variables of every server, stock ones
    included. ``template`` holds ``{context}`` and ``{question}``. Contexts of more than ``tokens`` tokens are left out.
    ``requests`` are sent at each of ``levels``, in requests/s; level 0 is one client that waits for each answer.
    ``warm_up``: whether each context is asked about once, unmeasured, before the first level. Contexts are asked about
    by rank ** -``popularity``. ``trace`` is the file whose gaps arrivals have, None for a Poisson process.
    ``ssd_bandwidth`` is what reads of the SSD tier are slowed to, in bytes/s. Systems in ``once`` run in the first
    repetition only.
    """

    path: Path
    name: str
    model: str
    server: tuple[str, ...]
    env: Mapping[str, str]
    template: str
    contexts: Source
    tokens: int | None
    requests: int
    warm_up: bool
    popularity: float
    seed: int
    max_new_tokens: int
    trace: Path | None
    levels: tuple[float, ...]
    repetitions: int
    memory: Memory
    kv_bytes_per_token: int | None
    ssd_bandwidth: float | None
    alphas: tuple[float, ...]
    presses: tuple[str, ...]
    kept: tuple[float, ...]
    systems: tuple[str, ...]
    profiles: Profiling | None
    once: tuple[str, ...]

    @property
    def forms(self) -> str:
        """What evicpress and adaptcache choose among."""
        raise NotImplementedError

    def record(self) -> dict[str, object]:
        """All of it as JSON takes it, for ``plan.json``."""
        raise NotImplementedError

    def identity(self) -> dict[str, object]:
        """The part of ``record`` that two benchmarks share whose runs may lie in one folder: all but which systems run
        and how often."""
        raise NotImplementedError


def load_config(path: Path) -> Config:
    """Raises ValueError naming the file, the key, the value and what is accepted."""
    raise NotImplementedError
