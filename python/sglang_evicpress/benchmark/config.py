"""Settings of a benchmark: one YAML file as one checked value."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from sglang_evicpress.benchmark.fields import Fields, each, number, one_of, text, texts_by_name, whole, words
from sglang_evicpress.core import PRESSES, Form

CONTROLS = ("full-cache+attention", "prefill-only+attention", "lru+attention")
"""Stock SGLang but for our CPU attention, so that what our cache gains is told from what our attention does."""

KINDS = (
    *("full-cache", "prefill-only", "lru", "hicache", "tiers-lru", "fixed", "adaptcache", "impress", "evicpress"),
    *CONTROLS,
)
"""What ``systems`` may name; ``fixed`` stands for every press with every kept fraction, ``evicpress`` for every alpha.
"""

DEFAULT_TEMPLATE = "{context}\n\n{question}"
DEFAULT_PRESSES: tuple[str, ...] = ("keydiff", "knorm", "snapkv")
DEFAULT_KEPT: tuple[float, ...] = (0.8, 0.6, 0.5, 0.4, 0.2)

_OWN_FLAGS = (
    *("--model", "--model-path", "--host", "--port", "--max-total-tokens", "--enable-cache-report"),
    *("--disable-radix-cache", "--enable-hierarchical-cache", "--kv-policy", "--kv-policy-config"),
    *("--kv-alpha", "--kv-forms", "--kv-profile-path", "--kv-host-gb", "--kv-ssd-dir", "--kv-ssd-gb"),
)
"""Given by the benchmark to each system, so not to be given for all."""

_WHICH_RUNS = (
    "path",
    "name",
    "systems",
    "repetitions",
    "once",
    "alphas",
    "presses",
    "kept",
    "extra_rates",
    "ttft_limit_s",
)


@dataclass(frozen=True, slots=True)
class Source:
    """Source of the contexts: a JSONL ``file``, or a ``command`` that prints one, run in ``folder``."""

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
class ExtraRates:
    """More ``extra_rates``, in the first repetition, for the systems of these names or kinds only. Each has
    ``requests``, and at least as many as come in ``seconds``: in a burst shorter than a queue takes to build any server
    keeps up."""

    rates: tuple[float, ...]
    systems: tuple[str, ...]
    requests: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Open-loop rates for all systems and repetitions, at multiples of saturation: what ``reference``, the name of a
    system, answers per second while ``clients`` ask without a pause for ``seconds``.

    The arrivals of a rate take exactly ``seconds``; ``cut_s`` later what has no answer is cancelled.
    ``saturation_rps`` is None until it is measured.
    """

    of_saturation: tuple[float, ...]
    reference: str
    seconds: float
    cut_s: float
    clients: int
    saturation_rps: float | None = None

    @property
    def multiples(self) -> dict[float, float]:
        """Rate, in requests/s -> its multiple of saturation; none before that is measured."""
        return {} if self.saturation_rps is None else rates_at(self.saturation_rps, self.of_saturation)


def rates_at(saturation_rps: float, multiples: Iterable[float]) -> dict[float, float]:
    """Rate, in requests/s of three digits -> its multiple of saturation."""
    return {float(f"{multiple * saturation_rps:.3g}"): multiple for multiple in multiples}


@dataclass(frozen=True, slots=True)
class Profiling:
    """Before the runs, each context is profiled by its first ``questions``, in ``forms`` (separated by commas)."""

    questions: int
    forms: str


@dataclass(frozen=True, slots=True)
class Config:
    """A benchmark. ``load_config`` makes and checks it.

    ``model`` is a folder or a name on the hub; ``server`` are flags and ``env`` variables of every server, stock ones
    included; ``policy_flags`` are flags of every server with a kv policy. ``template`` holds ``{context}`` and
    ``{question}``. Contexts of more than ``tokens`` tokens are left out. ``requests`` are sent at each of
    ``extra_rates``, in requests/s; rate 0 is one client that waits for each answer. ``warm_up``: how often each context
    is asked about unmeasured before the first rate. Contexts are asked about by rank ** -``popularity``. ``trace`` is
    the file whose gaps arrivals have; where it is None they have those of a gamma distribution of ``gaps_shape``: 1 is
    a Poisson process, less comes in bursts. ``ssd_bandwidth`` is what reads of the SSD tier are slowed to, in bytes/s.
    Systems in ``once`` run in the first repetition only. ``load`` adds rates, and ``ttft_limit_s`` is the TTFT within
    which an answer counts for goodput.
    """

    path: Path
    name: str
    model: str
    server: tuple[str, ...]
    env: Mapping[str, str] = field(hash=False)
    policy_flags: tuple[str, ...]
    template: str
    contexts: Source
    tokens: int | None
    requests: int
    warm_up: int
    popularity: float
    seed: int
    max_new_tokens: int
    trace: Path | None
    gaps_shape: float
    rates: tuple[float, ...]
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
    extra_rates: tuple[ExtraRates, ...]
    load: Load | None
    ttft_limit_s: float | None

    def saturated_at(self, rps: float) -> Config:
        """With the rates of ``load`` for a saturation of so many requests/s. Raises ValueError without a load."""
        if self.load is None:
            raise ValueError(f"{self.path} has no load: expected one, of_saturation, reference and seconds")
        load = replace(self.load, saturation_rps=rps)
        return replace(self, load=load, rates=tuple(dict.fromkeys((*self.rates, *sorted(load.multiples)))))

    def rates_of(self, kind: str, name: str, repetition: int) -> tuple[float, ...]:
        """Rates of one repetition, counted from 0, of such a system; none where it does not run."""
        if repetition >= self.repetitions or (repetition and {kind, name} & {*self.once}):
            return ()
        if repetition:
            return self.rates
        more = [
            rate
            for extra_rates in self.extra_rates
            if {kind, name} & {*extra_rates.systems}
            for rate in extra_rates.rates
        ]
        return tuple(dict.fromkeys((*self.rates, *sorted(more))))

    @property
    def forms(self) -> str:
        """Forms that evicpress and adaptcache choose from."""
        return self.profiles.forms if self.profiles is not None else _grid(self.presses, self.kept)

    def record(self) -> dict[str, object]:
        """All of it as JSON takes it, for ``plan.json``."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    def identity(self) -> dict[str, object]:
        """The part of ``record`` that two benchmarks share whose runs may lie in one folder: all but which systems run
        and how often."""
        kept = {name: value for name, value in self.record().items() if name not in _WHICH_RUNS}
        return {**kept, "forms": self.forms}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain(each_) for name, each_ in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each_) for each_ in value]
    return str(value) if isinstance(value, Path) else value


def load_config(path: Path) -> Config:
    """Raises ValueError naming the file, the key, the value and what is accepted."""
    fields = Fields.of(str(path), _read_yaml(path))
    need, get = fields.need, fields.get
    presses = get("presses", each(one_of(tuple(PRESSES))), f"a list of {', '.join(PRESSES)}", DEFAULT_PRESSES)
    kept = get("kept", each(number(above=0.0, below=1.0)), "a list of numbers above 0, below 1", DEFAULT_KEPT)
    kinds = f"a list of {', '.join(KINDS)}"
    arrivals = "poisson, gamma SHAPE (above 0; 1 is poisson, less comes in bursts), or trace FILE.csv"
    poisson: tuple[Path | None, float] = (None, 1.0)
    trace, shape = get("arrivals", lambda value: _arrivals(text(value), path.parent), arrivals, poisson)
    config = Config(
        path=path,
        name=get("name", _file_name, "a name that can be that of a folder", path.stem),
        model=need("model", lambda value: _model(text(value), path.parent), "a folder beside this file, or a hub name"),
        server=get("server", words, "flags of sglang.launch_server", ()),
        env=get("env", texts_by_name, "a mapping of variables to texts", {}),
        policy_flags=get("policy_flags", words, "kv flags of sglang.launch_server", ()),
        template=get("template", _template, "a text with {context} and, behind it, {question}", DEFAULT_TEMPLATE),
        contexts=_source(Fields.of(f"{path}: contexts", need("contexts", _any, "file or command")), path.parent),
        tokens=get("tokens", whole(1), "a whole number of at least 1", None),
        requests=need("requests", whole(1), "a whole number of at least 1"),
        warm_up=get("warm_up", whole(0), "how often each context is asked about, a whole number of 0 or more", 1),
        popularity=get("popularity", number(), "an exponent of at least 0", 1.0),
        seed=get("seed", whole(0), "a whole number of at least 0", 0),
        max_new_tokens=get("max_new_tokens", whole(1), "a whole number of at least 1", 32),
        trace=trace,
        gaps_shape=shape,
        rates=get("rates", each(number()), "a list of requests/s, 0 for one client at a time", (0.0,)),
        repetitions=get("repetitions", whole(1, 1000), "a whole number from 1 to 1000", 1),
        memory=_memory(Fields.of(f"{path}: memory", need("memory", _any, "gpu, host and ssd"))),
        kv_bytes_per_token=get("kv_bytes_per_token", whole(1), "a whole number of at least 1", None),
        ssd_bandwidth=get("ssd_bandwidth", number(above=0.0), "bytes/s above 0", None),
        alphas=get("alphas", each(number()), "a list of numbers of at least 0", (1.0,)),
        presses=presses,
        kept=kept,
        systems=get("systems", each(one_of(KINDS)), kinds, KINDS),
        profiles=_profiling(path, get("profiles", _any, "questions and forms", None), _grid(presses, kept)),
        once=get("once", each(one_of(KINDS), may_be_empty=True), kinds, ()),
        extra_rates=_extra_rates(path, get("extra_rates", _any, "rates and systems", None)),
        load=_load(path, get("load", _any, "of_saturation, reference and seconds", None)),
        ttft_limit_s=get("ttft_limit_s", number(above=0.0), "seconds above 0", None),
    )
    fields.finish()
    for flag in config.server:
        if flag.partition("=")[0] in _OWN_FLAGS:
            raise ValueError(f"{path}: server has {flag!r}, which the benchmark gives to each system: leave it out")
    return config


def _read_yaml(path: Path) -> object:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: expected the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): expected a YAML file") from None
    except yaml.YAMLError as error:
        what = " ".join(str(error).split())
        raise ValueError(f"{path} is not YAML ({what:.200}): expected a mapping of names to values") from None


def _source(fields: Fields, folder: Path) -> Source:
    file = fields.get("file", lambda value: _beside(text(value), folder), "a JSONL file beside this one", None)
    command: tuple[str, ...] = fields.get("command", words, "a program and its arguments", ())
    cwd = fields.get("folder", lambda value: _folder(text(value), folder), "a folder to run the command in", folder)
    fields.finish()
    if (file is None) == (not command):
        raise ValueError(f"{fields.where} is {dict(fields.values)!r:.100}: expected either file or command")
    if command[:1] == ("python",):
        command = (sys.executable, *command[1:])
    return Source(file, command, cwd.resolve())


def _memory(fields: Fields) -> Memory:
    memory = Memory(
        gpu=fields.need("gpu", number(above=0.0), "a share of the working set, above 0"),
        host=fields.get("host", number(), "a share of the working set, of at least 0", 0.0),
        ssd=fields.get("ssd", number(), "a share of the working set, of at least 0", 0.0),
    )
    fields.finish()
    if memory.ssd and not memory.host:
        raise ValueError(f"{fields.where}: host is 0 with ssd {memory.ssd:g}: expected some, all goes through it")
    return memory


def _profiling(path: Path, value: object, forms: str) -> Profiling | None:
    if value is None:
        return None
    fields = Fields.of(f"{path}: profiles", value)
    profiling = Profiling(
        questions=fields.need("questions", whole(1, 1000), "a whole number from 1 to 1000"),
        forms=fields.get("forms", _forms, "compressed forms such as keydiff@0.5, separated by commas", forms),
    )
    fields.finish()
    return profiling


def _extra_rates(path: Path, value: object) -> tuple[ExtraRates, ...]:
    """One mapping or a list of them."""
    if value is None:
        return ()
    found = []
    for part in value if isinstance(value, list | tuple) else [value]:
        fields = Fields.of(f"{path}: extra_rates", part)
        extra_rates = ExtraRates(
            rates=fields.need("rates", each(number(above=0.0)), "a list of requests/s above 0"),
            systems=fields.need("systems", each(text), "a list of systems or kinds of systems"),
            requests=fields.get("requests", whole(1), "a whole number of 1 or more", None),
            seconds=fields.get("seconds", number(above=0.0), "seconds above 0", None),
        )
        fields.finish()
        found.append(extra_rates)
    return tuple(found)


def _load(path: Path, value: object) -> Load | None:
    if value is None:
        return None
    fields = Fields.of(f"{path}: load", value)
    load = Load(
        of_saturation=fields.need("of_saturation", each(number(above=0.0)), "a list of multiples above 0"),
        reference=fields.need("reference", text, "the name of a system"),
        seconds=fields.need("seconds", number(above=0.0), "seconds above 0"),
        cut_s=fields.get("cut_s", number(), "seconds of at least 0", 10.0),
        clients=fields.get("clients", whole(1, 1000), "a whole number from 1 to 1000", 16),
    )
    fields.finish()
    return load


def _any(value: object) -> object:
    return value


def _file_name(value: object) -> str:
    name = text(value)
    if name != Path(name).name or name.startswith("."):
        raise ValueError
    return name


def _model(name: str, folder: Path) -> str:
    """Absolute where it is a folder; a name on the hub stays as it is."""
    if (folder / name).is_dir():
        return str((folder / name).resolve())
    if name.startswith((".", "/")) or name.count("/") > 1:
        raise ValueError
    return name


def _template(value: object) -> str:
    from sglang_evicpress.profiler.prompts import Template

    Template.parse(text(value))
    return str(value).replace(r"\n", "\n")


def _arrivals(value: str, folder: Path) -> tuple[Path | None, float]:
    """The trace, and the shape of the gaps where there is none."""
    kind, _, rest = value.strip().partition(" ")
    match kind:
        case "poisson" if not rest:
            return None, 1.0
        case "gamma":
            return None, number(above=0.0)(rest)
        case "trace":
            return _beside(rest.strip(), folder), 1.0
        case _:
            raise ValueError


def _beside(name: str, folder: Path) -> Path:
    """A file that is there. Raises ValueError."""
    path = (folder / name).resolve()
    if not path.is_file():
        raise ValueError
    return path


def _folder(name: str, folder: Path) -> Path:
    path = folder / name
    if not path.is_dir():
        raise ValueError
    return path


def _forms(value: object) -> str:
    names = value.split(",") if isinstance(value, str) else words(value)
    forms = dict.fromkeys(Form.parse(name) for name in names)
    if not forms or any(form.is_exact for form in forms):
        raise ValueError
    return ",".join(map(str, forms))


def _grid(presses: tuple[str, ...], kept: tuple[float, ...]) -> str:
    return ",".join(str(Form(press, fraction)) for press in presses for fraction in kept)
