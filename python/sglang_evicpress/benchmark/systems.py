"""The systems of a benchmark, each as the flags and the environment of its server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path

from sglang_evicpress.benchmark.config import CONTROLS, Config
from sglang_evicpress.config import GB, check_size

FULL_CACHE_FACTOR = 1.25
"""The pool of the full cache, over the working set: questions and answers are cached too."""

NUM_RUNNING = 16
"""Requests that the pool of the full cache has room for, besides."""

IMPRESS = 0.5
"""The fraction of important tokens that impress keeps."""

ATTENTION = {"SGLANG_EVICPRESS": "attention"}
"""Our CPU attention on a server that has nothing else of ours (patches/install.py)."""

FAULTS_VARIABLE = "SGLANG_EVICPRESS_FAULTS"
"""Slows the reads of our SSD tier (tiers/faults.py)."""

_PLUGIN = "evicpress"
_DEFAULT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve. ``flags`` and ``env`` add to those of the config.

    ``is_stock``: no code of ours may be active in its server; ``has_policy``: it has our cache. ``ssd_dir`` is what its
    SSD tier fills, to be emptied before every start; ``profiles`` the file of profiles that it reads.
    """

    name: str
    kind: str
    flags: tuple[str, ...]
    env: Mapping[str, str] = field(hash=False)
    is_stock: bool
    pool_tokens: int
    alpha: float | None = None
    press: str | None = None
    kept: float | None = None
    ssd_dir: Path | None = None
    profiles: Path | None = None

    @property
    def has_policy(self) -> bool:
        return "--kv-policy" in self.flags

    @property
    def slug(self) -> str:
        """Its name as the name of a folder."""
        return self.name.replace(" ", "-")

    def record(self) -> dict[str, object]:
        """Entry of ``plan.json``."""
        names = ("name", "kind", "is_stock", "alpha", "press", "kept", "flags", "env", "pool_tokens")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of memory, the same for every system but the full-cache one, whose pool holds everything."""

    working_set_tokens: int
    kv_bytes_per_token: int
    pool_tokens: int
    host_bytes: int
    ssd_bytes: int


def sizes_of(config: Config, working_set_tokens: int, kv_bytes_per_token: int) -> Sizes:
    """The shares of ``config.memory`` in tokens and bytes. Raises ValueError for a tier that is too small."""
    working_set_bytes = working_set_tokens * kv_bytes_per_token
    sizes = Sizes(
        working_set_tokens,
        kv_bytes_per_token,
        pool_tokens=round(config.memory.gpu * working_set_tokens),
        host_bytes=round(config.memory.host * working_set_bytes),
        ssd_bytes=round(config.memory.ssd * working_set_bytes),
    )
    for name, num_bytes in (("host", sizes.host_bytes), ("ssd", sizes.ssd_bytes)):
        if num_bytes:
            check_size(f"{config.path}: memory {name} of {working_set_tokens} tokens, in GB,", num_bytes / GB)
    return sizes


def expand(config: Config, sizes: Sizes, folder: Path) -> list[System]:
    """Every system of the config that runs on this machine, in its order; their files go below ``folder``. Raises
    ValueError for ``extra_rates`` of what is no system of the config."""
    shelf, out = _Shelf(config, sizes, folder), left_out(config)
    systems = [system for kind in config.systems if kind not in out for system in shelf.systems(kind)]
    known = names_of(systems)
    for name in (name for extra in config.extra_rates for name in extra.systems):
        if name not in known and name not in out:
            raise ValueError(
                f"{config.path}: extra_rates: systems has {name!r:.100}: expected some of {', '.join(known)}"
            )
    return systems


def names_of(systems: Iterable[System]) -> list[str]:
    """Words that a system is chosen by: its kind, and its name."""
    return list(dict.fromkeys(name for system in systems for name in (system.kind, system.name)))


def profiling_system(config: Config, sizes: Sizes, folder: Path) -> System:
    """System on which contexts are profiled before the runs: the full-cache pool; only it writes its profiles."""
    shelf = _Shelf(config, sizes, folder)
    return shelf.ours("profiling", "profiling", "evicpress", *shelf.learned, has_tiers=False, is_whole=True)


def left_out(config: Config) -> dict[str, str]:
    """Systems of the config that do not run here -> why."""
    out = {"hicache": "SGLang's hierarchical cache needs CUDA"}
    if _has_cuda(config):
        out = dict.fromkeys(CONTROLS, "on a GPU the attention is SGLang's own")
        if config.memory.host <= config.memory.gpu:
            out["hicache"] = "SGLang's hierarchical cache needs more host memory than GPU memory"
    return {name: why for name, why in out.items() if name in config.systems}


def stock_environment() -> dict[str, str]:
    """Lets SGLang load every plugin but ours, which is then never imported."""
    others = sorted({point.name for point in entry_points(group="sglang.srt.plugins")} - {_PLUGIN})
    return {"SGLANG_PLUGINS": ",".join(others) or "none"}


@dataclass(frozen=True, slots=True)
class _Shelf:
    """Makes systems."""

    config: Config
    sizes: Sizes
    folder: Path

    def systems(self, kind: str) -> Iterator[System]:
        match kind:
            case "full-cache":
                yield self.stock(kind, is_whole=True)
            case "prefill-only":
                yield self.stock(kind, "--disable-radix-cache")
            case "lru":
                yield self.stock(kind)
            case "full-cache+attention" | "prefill-only+attention" | "lru+attention":
                (same,) = self.systems(kind.partition("+")[0])
                yield replace(same, name=kind, kind=kind, env=ATTENTION, is_stock=False)
            case "hicache":
                yield self.hicache()
            case "tiers-lru":
                yield self.ours(kind, kind, "lru", "--kv-forms", "exact")
            case "fixed":
                for form in self.config.fixed_forms:
                    name = f"{form}+lru"
                    yield self.ours(name, kind, name, "--kv-forms", "exact", press=form.press, kept=form.kept_fraction)
            case "impress":
                name = f"impress@{IMPRESS:g}"
                yield self.ours(name, kind, name, "--kv-forms", "exact")
            case "adaptcache":
                yield self.ours(kind, kind, kind, *self.learned)
            case "evicpress" | "evicpress-uniform":
                learned = self.learned if kind == "evicpress" else self.learned_uniform
                for alpha in self.config.alphas:
                    flags = ("--kv-alpha", f"{alpha:g}", *learned)
                    yield self.ours(f"{kind} a={alpha:g}", kind, "evicpress", *flags, alpha=alpha)
                for quality in self.config.qualities:
                    flags = ("--kv-quality", f"{quality:g}", *learned)
                    yield self.ours(f"{kind} q={quality:g}", kind, "evicpress", *flags)

    def stock(self, name: str, *flags: str, is_whole: bool = False, env: Mapping[str, str] | None = None) -> System:
        pool = self.pool(is_whole)
        return System(name, name, (*_common(pool), *flags), {**stock_environment(), **(env or {})}, True, pool)

    def hicache(self) -> System:
        """Its size of host memory is in whole GB; the ratio to the pool is not."""
        memory, store = self.config.memory, self.folder / "ssd" / "hicache"
        flags = ("--enable-hierarchical-cache", "--hicache-ratio", f"{memory.host / memory.gpu:g}")
        if not memory.ssd:
            return self.stock("hicache", *flags)
        env = {
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store),
            "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE": str(self.sizes.ssd_bytes),
        }
        return replace(self.stock("hicache", *flags, "--hicache-storage-backend", "file", env=env), ssd_dir=store)

    def ours(
        self,
        name: str,
        kind: str,
        policy: str,
        *flags: str,
        alpha: float | None = None,
        press: str | None = None,
        kept: float | None = None,
        has_tiers: bool = True,
        is_whole: bool = False,
    ) -> System:
        pool, env = self.pool(is_whole), dict[str, str]()
        tiers: tuple[str, ...] = ("--kv-host-gb", "0")
        ssd_dir = None
        if has_tiers and self.sizes.host_bytes:
            tiers = ("--kv-host-gb", _gb(self.sizes.host_bytes))
            if self.sizes.ssd_bytes:
                ssd_dir = self.folder / "ssd" / name.replace(" ", "-")
                tiers += ("--kv-ssd-dir", str(ssd_dir), "--kv-ssd-gb", _gb(self.sizes.ssd_bytes))
                if self.config.ssd_bandwidth is not None:
                    env[FAULTS_VARIABLE] = f"read={self.config.ssd_bandwidth:g}"
        return System(
            name,
            kind,
            (*_common(pool), "--kv-policy", policy, *flags, *tiers, *self.config.policy_flags),
            env,
            False,
            pool,
            alpha,
            press,
            kept,
            ssd_dir,
            self.profiles if "--kv-profile-path" in flags else None,
        )

    @property
    def profiles(self) -> Path:
        return self.folder / "profiles.log"

    @property
    def learned(self) -> tuple[str, ...]:
        """Flags of a policy that goes by profiles: those made before, or, without any, those it makes while it runs."""
        return self._learned(self.config.forms)

    @property
    def learned_uniform(self) -> tuple[str, ...]:
        """The same without forms that have layer budgets."""
        return self._learned(self.config.uniform_forms)

    def _learned(self, forms: str) -> tuple[str, ...]:
        if self.config.profiles is None:
            return ("--kv-forms", forms)
        profiles = ("--kv-profile-path", str(self.profiles), "--kv-disable-online-profiling")
        return ("--kv-forms", forms, *profiles)

    def pool(self, is_whole: bool) -> int:
        if not is_whole:
            return self.sizes.pool_tokens
        longest = (self.config.workload.tokens or _DEFAULT_TOKENS) + self.config.workload.max_new_tokens
        return round(FULL_CACHE_FACTOR * self.sizes.working_set_tokens) + NUM_RUNNING * longest


def _common(pool_tokens: int) -> tuple[str, ...]:
    return ("--max-total-tokens", str(pool_tokens), "--enable-cache-report")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.6f}"


def _has_cuda(config: Config) -> bool:
    """True if flags and machine show a CUDA device: where none is asked for, SGLang takes the GPU."""
    words = [word for flag in config.server for word in flag.split("=", 1)]
    devices = [value for flag, value in pairwise(words) if flag == "--device"]
    return devices[-1].startswith("cuda") if devices else Path("/dev/nvidiactl").exists()
