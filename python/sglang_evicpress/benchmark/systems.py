"""The systems of a benchmark, each as the flags and the environment of its server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_evicpress.benchmark.config import Config


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve. ``flags`` and ``env`` add to those of the config.

    ``is_stock``: no code of ours may be active in its server. ``ssd_dir`` is what its SSD tier fills, to be emptied
    before every start; ``profiles`` the file of profiles that it reads.
    """

    name: str
    kind: str
    flags: tuple[str, ...]
    env: Mapping[str, str]
    is_stock: bool
    pool_tokens: int
    alpha: float | None = None
    press: str | None = None
    kept: float | None = None
    ssd_dir: Path | None = None
    profiles: Path | None = None

    @property
    def slug(self) -> str:
        """Its name as the name of a folder."""
        return self.name.replace(" ", "-")

    def record(self) -> dict[str, object]:
        """As ``plan.json`` lists it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A system that does not run here, and ``why``."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of memory, the same for every system but the bound, whose pool holds everything."""

    working_set_tokens: int
    kv_bytes_per_token: int
    pool_tokens: int
    host_bytes: int
    ssd_bytes: int


def sizes_of(config: Config, working_set_tokens: int, kv_bytes_per_token: int) -> Sizes:
    """The shares of ``config.memory`` in tokens and bytes."""
    raise NotImplementedError


def expand(config: Config, working_set_tokens: int, kv_bytes_per_token: int, folder: Path) -> list[System]:
    """Every system of the config that runs on this machine; their files go below ``folder``."""
    raise NotImplementedError


def left_out(config: Config) -> list[LeftOut]:
    """The systems of the config that do not."""
    raise NotImplementedError
