"""Settings of a benchmark: one YAML file as one checked value."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from sglang_evicpress.benchmark.arrivals import read_trace
from sglang_evicpress.core import CODECS, EXACT, PRESSES, Form
from sglang_evicpress.files import read_text
from sglang_evicpress.profiler.scorers import SCORERS, get_scorer
from sglang_evicpress.search.form_budgets import beside, budget_path, name_budgets
from sglang_evicpress.validation import fields_of, sentence

CONTROLS = ("full-cache+attention", "prefill-only+attention", "lru+attention")
"""Stock SGLang but for our CPU attention, so that what our cache gains is told from what our attention does."""

KINDS = (
    *("full-cache", "prefill-only", "lru", "hicache", "tiers-lru", "fixed", "adaptcache", "impress", "evicpress"),
    *CONTROLS,
)
"""What ``systems`` may name; ``fixed`` stands for every press with every kept fraction, ``evicpress`` for every alpha
and quality target."""

UNIFORM_KIND = "evicpress-uniform"
"""``evicpress`` without the forms that have layer budgets; only where ``systems`` names it."""

DEFAULT_TEMPLATE = "{context}\n\n{question}"
DEFAULT_PRESSES: tuple[str, ...] = ("keydiff", "knorm", "snapkv")
DEFAULT_KEPT: tuple[float, ...] = (0.8, 0.6, 0.5, 0.4, 0.2)

_OWN_FLAGS = (
    *("--model", "--model-path", "--host", "--port", "--max-total-tokens", "--enable-cache-report"),
    *("--disable-radix-cache", "--enable-hierarchical-cache", "--kv-policy", "--kv-policy-config"),
    *("--kv-alpha", "--kv-quality", "--kv-forms", "--kv-profile-path", "--kv-host-gb", "--kv-ssd-dir", "--kv-ssd-gb"),
)
"""Given by the benchmark to each system, so not to be given for all, nor by their first letters, which SGLang takes."""

_WHICH_RUNS = (
    *("path", "name", "systems", "repetitions", "once", "alphas", "qualities", "presses", "kept", "codecs"),
    *("extra_rates", "ttft_limit_s"),
)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError
    return value


def _word(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    return str(value)


def _words(value: object) -> tuple[str, ...]:
    """A list of texts and numbers, or one text that is split as a shell does."""
    if isinstance(value, str):
        return tuple(shlex.split(value))
    if not isinstance(value, list | tuple):
        raise ValueError
    return tuple(map(_word, value))


def _variables(value: object) -> object:
    return {name: _word(each) for name, each in value.items()} if isinstance(value, dict) else value


def _number(value: object) -> object:
    """``2e8``, which is a text to YAML, is a number too."""
    return float(value) if isinstance(value, str) else value


def _listed(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError
    return values


def _known(*names: str) -> AfterValidator:
    def check(name: str) -> str:
        if name not in names:
            raise ValueError
        return name

    return AfterValidator(check)


def _beside(value: object, info: ValidationInfo[Path]) -> Path:
    path: Path = (info.context / _text(value)).resolve()
    if not path.is_file():
        raise ValueError
    return path


def _folder(value: object, info: ValidationInfo[Path]) -> Path:
    path: Path = (info.context / (value if isinstance(value, Path) else _text(value))).resolve()
    if not path.is_dir():
        raise ValueError
    return path


def _model(name: str, info: ValidationInfo[Path]) -> str:
    """Absolute where it is a folder; a name on the hub stays as it is."""
    if (info.context / name).is_dir():
        return str((info.context / name).resolve())
    if name.startswith((".", "/")) or name.count("/") > 1:
        raise ValueError
    return name


def _file_name(name: str) -> str:
    if name != Path(name).name or name.startswith("."):
        raise ValueError
    return name


def _template(text: str) -> str:
    from sglang_evicpress.profiler.prompts import Template

    try:
        Template.parse(text)
    except ValueError:
        raise ValueError from None
    return text.replace(r"\n", "\n")


def _arrivals(value: str, info: ValidationInfo[Path]) -> str:
    kind, _, rest = value.strip().partition(" ")
    if kind == "trace":
        return f"trace {_beside(rest.strip(), info)}"
    if value.strip() != "poisson" and (kind != "gamma" or not 0.0 < float(rest) < float("inf")):
        raise ValueError
    return value.strip()


def _compressed(value: object, info: ValidationInfo[Path]) -> str:
    """Forms as a server takes them: the path of a budget file is absolute."""
    names = [beside(name, info.context) for name in (value.split(",") if isinstance(value, str) else _words(value))]
    forms = [Form.parse_stored(name) for name in name_budgets(names, None)[0]]
    if not forms or any(form == EXACT for form in forms):
        raise ValueError
    has_path = zip(names, forms, strict=True)
    return ",".join(dict.fromkeys(name if form.is_uneven else str(form) for name, form in has_path))


def _not_ours(flags: tuple[str, ...], info: ValidationInfo[Path]) -> tuple[str, ...]:
    for flag in flags:
        name = flag.partition("=")[0]
        if len(name) > 2 and name.startswith("--") and any(own.startswith(name) for own in _OWN_FLAGS):
            raise ValueError(
                f"{info.field_name} has {flag!r}, which the benchmark gives to each system: expected none of these"
            )
    return flags


def _digests(paths: Iterable[Path]) -> dict[str, str]:
    return {str(path): sha256(path.read_bytes()).hexdigest() for path in paths}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no name of a file is so long
        return False


T = TypeVar("T")
Text = Annotated[str, BeforeValidator(_text)]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Number = Annotated[float, BeforeValidator(_number), Field(ge=0.0, allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0.0)]
Whole = Annotated[int, Field(ge=1)]
Several = Annotated[tuple[T, ...], BeforeValidator(_listed), AfterValidator(_distinct)]
Kind = Annotated[str, _known(*KINDS, UNIFORM_KIND)]

_WHOLE, _SHARE = "a whole number of at least 1", "a share of the working set"
_LIST_OF_KINDS = ", ".join((*KINDS, UNIFORM_KIND))


class _Settings(BaseModel):
    """The ``title`` of a field says what it accepts; paths are beside the folder that is the context of validation."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_default=True)


class Source(_Settings):
    """Source of the contexts: a JSONL ``file``, or a ``command`` that prints one, run in ``folder``."""

    file: Annotated[Path, BeforeValidator(_beside)] | None = Field(None, title="a JSONL file beside this one")
    command: Words = Field((), title="a program and its arguments")
    folder: Annotated[Path, BeforeValidator(_folder)] = Field(Path(), title="a folder to run the command in")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.file is None) == (not self.command):
            given = self.model_dump(mode="json", exclude_unset=True)
            raise ValueError(f"contexts is {given!r:.100}: expected either file or command")
        return self

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command, with this interpreter for ``python``."""
        return (sys.executable, *self.command[1:]) if self.command[:1] == ("python",) else self.command


class Memory(_Settings):
    """Shares of the working set; ``host`` and ``ssd`` may be 0, for no such tier."""

    gpu: Positive = Field(title=f"{_SHARE}, above 0")
    host: Number = Field(0.0, title=f"{_SHARE}, of at least 0")
    ssd: Number = Field(0.0, title=f"{_SHARE}, of at least 0")

    @model_validator(mode="after")
    def _goes_through_host(self) -> Self:
        if self.ssd and not self.host:
            raise ValueError(f"memory: host is 0 with ssd {self.ssd:g}: expected some, all goes through it")
        return self


class ExtraRates(_Settings):
    """More ``extra_rates``, in the first repetition, for the systems of these names or kinds only. Each has
    ``requests``, and at least as many as come in ``seconds``: in a burst shorter than a queue takes to build any server
    keeps up."""

    rates: Several[Positive] = Field(title="a list of requests/s above 0", min_length=1)
    systems: Several[Text] = Field(title="a list of systems or kinds of systems", min_length=1)
    requests: Whole | None = Field(None, title=_WHOLE)
    seconds: Positive | None = Field(None, title="seconds above 0")


class Load(_Settings):
    """Open-loop rates for all systems and repetitions, at multiples of saturation: what ``reference``, the name of a
    system, answers per second while ``clients`` ask without a pause for ``seconds``.

    The arrivals of a rate take exactly ``seconds``; ``cut_s`` later what has no answer is cancelled.
    ``saturation_rps`` is None until it is measured.
    """

    of_saturation: Several[Positive] = Field(title="a list of multiples above 0", min_length=1)
    reference: Text = Field(title="the name of a system")
    seconds: Positive = Field(title="seconds above 0")
    cut_s: Number = Field(10.0, title="seconds of at least 0")
    clients: int = Field(16, title="a whole number from 1 to 1000", ge=1, le=1000)
    saturation_rps: Positive | None = Field(None, title="requests/s above 0")

    @property
    def multiples(self) -> dict[float, float]:
        """Rate, in requests/s -> its multiple of saturation; none before that is measured."""
        return {} if self.saturation_rps is None else rates_at(self.saturation_rps, self.of_saturation)


def rates_at(saturation_rps: float, multiples: Iterable[float]) -> dict[float, float]:
    """Rate, in requests/s of three digits -> its multiple of saturation."""
    return {float(f"{multiple * saturation_rps:.3g}"): multiple for multiple in multiples}


DEFAULT_SCORER = "logprob"


def _scorer(name: str) -> str:
    return get_scorer(name).name  # its package is there


class Profiling(_Settings):
    """Before the runs, each context is profiled by its first ``questions``, in ``forms`` (separated by commas), and
    what it loses is said by ``scorer``, as ``evicpress profile`` does."""

    questions: int = Field(title="a whole number from 1 to 1000", ge=1, le=1000)
    forms: Annotated[str, BeforeValidator(_compressed)] | None = Field(
        None, title="compressed forms such as keydiff@0.5, separated by commas"
    )
    scorer: Annotated[str, AfterValidator(_scorer)] = Field(DEFAULT_SCORER, title=f"one of {', '.join(SCORERS)}")


class Workload(_Settings):
    """The requests of a rate.

    Contexts of more than ``tokens`` tokens are left out. ``template`` holds ``{context}`` and ``{question}``.
    ``warm_up``: how often each context is asked about unmeasured before the first rate. Contexts are asked about by
    rank ** -``popularity``. ``arrivals`` have the gaps of a Poisson process, of a gamma distribution (of shape 1 it is
    a Poisson process, of less it comes in bursts), or of the file of a trace, which is read once: its times are
    ``trace_s``.
    """

    contexts: Source = Field(title="file or command")
    tokens: Whole | None = Field(None, title=_WHOLE)
    template: Annotated[Text, AfterValidator(_template)] = Field(
        DEFAULT_TEMPLATE, title="a text with {context} and, behind it, {question}"
    )
    requests: Whole = Field(title=_WHOLE)
    warm_up: int = Field(1, title="how often each context is asked about, a whole number of 0 or more", ge=0)
    popularity: Number = Field(1.0, title="an exponent of at least 0")
    seed: int = Field(0, title="a whole number of at least 0", ge=0)
    max_new_tokens: Whole = Field(32, title=_WHOLE)
    arrivals: Annotated[Text, AfterValidator(_arrivals)] = Field(
        "poisson", title="poisson, gamma SHAPE (above 0; 1 is poisson, less comes in bursts), or trace FILE.csv"
    )

    _trace_s: tuple[float, ...] = PrivateAttr(())
    _files_sha256: dict[str, str] = PrivateAttr({})

    @model_validator(mode="after")
    def _read_trace(self) -> Self:
        if self.trace is not None:
            self._trace_s = tuple(read_trace(self.trace))
            self._files_sha256 = _digests([self.trace])
        return self

    @property
    def trace_s(self) -> tuple[float, ...]:
        return self._trace_s

    @property
    def files_sha256(self) -> Mapping[str, str]:
        """Path of the trace, if there is one -> digest of its content."""
        return self._files_sha256

    @property
    def trace(self) -> Path | None:
        kind, _, rest = self.arrivals.partition(" ")
        return Path(rest) if kind == "trace" else None

    @property
    def gaps_shape(self) -> float:
        kind, _, rest = self.arrivals.partition(" ")
        return float(rest) if kind == "gamma" else 1.0


class Config(_Settings):
    """A benchmark. ``load_config`` makes and checks it.

    ``model`` is a folder or a name on the hub; ``server`` are flags and ``env`` variables of every server, stock ones
    included; ``policy_flags`` are flags of every server with a kv policy. ``rates`` are in requests/s; rate 0 is one
    client that waits for each answer. ``ssd_bandwidth`` is what reads of our SSD tier are slowed to, in bytes/s;
    hicache's are not. Systems in ``once`` run in the first repetition only. ``load`` adds rates, and ``ttft_limit_s``
    is the TTFT within which an answer counts for goodput.
    """

    path: Path
    workload: Workload
    name: Annotated[Text, AfterValidator(_file_name)] = Field(title="a name that can be that of a folder")
    model: Annotated[Text, AfterValidator(_model)] = Field(title="a folder beside this file, or a hub name")
    server: Annotated[Words, AfterValidator(_not_ours)] = Field((), title="flags of sglang.launch_server")
    env: Annotated[Mapping[Text, str], BeforeValidator(_variables)] = Field({}, title="a mapping of variables to texts")
    policy_flags: Annotated[Words, AfterValidator(_not_ours)] = Field((), title="kv flags of sglang.launch_server")
    rates: Several[Number] = Field((0.0,), title="a list of requests/s, 0 for one client at a time", min_length=1)
    repetitions: int = Field(1, title="a whole number from 1 to 1000", ge=1, le=1000)
    memory: Memory = Field(title="gpu, host and ssd")
    kv_bytes_per_token: Whole | None = Field(None, title=_WHOLE)
    ssd_bandwidth: Positive | None = Field(None, title="bytes/s above 0")
    alphas: Several[Number] = Field((1.0,), title="a list of numbers of at least 0", min_length=1)
    qualities: Several[Annotated[Positive, Field(le=1.0)]] = Field((), title="a list of numbers above 0, at most 1")
    presses: Several[Annotated[str, _known(*PRESSES)]] = Field(
        DEFAULT_PRESSES, title=f"a list of {', '.join(PRESSES)}", min_length=1
    )
    kept: Several[Annotated[Positive, Field(lt=1.0)]] = Field(
        DEFAULT_KEPT, title="a list of numbers above 0, below 1", min_length=1
    )
    codecs: Several[Annotated[str, _known(*CODECS)]] = Field(
        ("raw",), title=f"a list of {', '.join(CODECS)}", min_length=1
    )
    systems: Several[Kind] = Field(KINDS, title=f"a list of {_LIST_OF_KINDS}", min_length=1)
    profiles: Profiling | None = Field(None, title="questions and forms")
    once: Several[Kind] = Field((), title=f"a list of {_LIST_OF_KINDS}")
    extra_rates: Several[ExtraRates] = Field((), title="rates and systems")
    load: Load | None = Field(None, title="of_saturation, reference and seconds")
    ttft_limit_s: Positive | None = Field(None, title="seconds above 0")

    _files_sha256: dict[str, str] = PrivateAttr({})

    @model_validator(mode="after")
    def _read_files(self) -> Self:
        budgets = [Path(path) for form in self.forms.split(",") if (path := budget_path(form)) is not None]
        words = [word.removeprefix("@") for flag in self.policy_flags for word in flag.split("=", 1)]
        named = [self.path.resolve().parent / word for word in words]
        self._files_sha256 = _digests([*budgets, *filter(_is_file, named)])
        return self

    @property
    def files_sha256(self) -> Mapping[str, str]:
        """Path of a file that servers read, by ``forms`` or ``policy_flags`` -> digest of its content."""
        return self._files_sha256

    def saturated_at(self, rps: float) -> Config:
        """With the rates of ``load`` for a saturation of so many requests/s. Raises ValueError without a load."""
        if self.load is None:
            raise ValueError(f"{self.path} has no load: expected one, of_saturation, reference and seconds")
        load = self.load.model_copy(update={"saturation_rps": rps})
        rates = tuple(dict.fromkeys((*self.rates, *sorted(load.multiples))))
        return self.model_copy(update={"load": load, "rates": rates})

    def rates_of(self, kind: str, name: str, repetition: int) -> tuple[float, ...]:
        """Rates of one repetition, counted from 0, of such a system; none where it does not run."""
        if repetition >= self.repetitions or (repetition and {kind, name} & {*self.once}):
            return ()
        if repetition:
            return self.rates
        more = [rate for extra in self.extra_rates if {kind, name} & {*extra.systems} for rate in extra.rates]
        return tuple(dict.fromkeys((*self.rates, *sorted(more))))

    @property
    def uniform_forms(self) -> str:
        """Forms, of ``forms``, that keep as many tokens in every layer."""
        return ",".join(form for form in self.forms.split(",") if ":" not in form)

    @property
    def num_training(self) -> int:
        """How many of the first questions about each context are for profiling."""
        return 0 if self.profiles is None else self.profiles.questions

    @property
    def scorer(self) -> str:
        """Scorer of the profiles."""
        return DEFAULT_SCORER if self.profiles is None else self.profiles.scorer

    @property
    def fixed_forms(self) -> list[Form]:
        """Forms of the systems ``fixed``: every press with every kept fraction, and the exact form, by every codec."""
        pressed = [(press, kept) for press in self.presses for kept in self.kept]
        forms = [Form(*one, codec) for codec in self.codecs for one in ((None, 1.0), *pressed)]
        return [form for form in forms if form != EXACT]

    @property
    def forms(self) -> str:
        """Forms that evicpress and adaptcache choose from."""
        if self.profiles is not None and self.profiles.forms is not None:
            return self.profiles.forms
        return ",".join(str(Form(press, fraction)) for press in self.presses for fraction in self.kept)

    def record(self) -> dict[str, Any]:
        """All of it as JSON takes it, for ``plan.json``: by the keys of the file."""
        return {**self.model_dump(mode="json", exclude={"workload"}), **self.workload.model_dump(mode="json")}

    def identity(self) -> dict[str, Any]:
        """The part of ``record`` that two benchmarks share whose runs may lie in one folder: all but which systems run
        and how often; with the content of the files that it names, where it names any."""
        kept = {name: value for name, value in self.record().items() if name not in _WHICH_RUNS}
        if self.profiles is not None and self.scorer == DEFAULT_SCORER:  # as before there were others
            del kept["profiles"]["scorer"]
        files = {**self.workload.files_sha256, **self.files_sha256}
        return {**kept, "forms": self.forms, **({"files_sha256": files} if files else {})}


def load_config(path: Path) -> Config:
    """Raises ValueError naming the file, the key, the value and what is accepted."""
    given = {key: value for key, value in _read_yaml(path).items() if value is not None}
    asked, others = fields_of(Workload), [name for name in fields_of(Config) if name not in ("path", "workload")]
    if unknown := [key for key in given if key not in (*others, *asked)]:
        raise ValueError(f"{path} has the unknown key {unknown[0]!r:.100}: expected {', '.join((*others, *asked))}")
    if isinstance(extra := given.get("extra_rates"), dict):
        given["extra_rates"] = [extra]
    workload = _checked(Workload, {key: value for key, value in given.items() if key in asked}, path)
    own = {key: value for key, value in given.items() if key in others}
    return _checked(Config, {"name": path.stem, **own, "path": path, "workload": workload}, path)


S = TypeVar("S", Config, Workload)


def _checked(kind: type[S], values: Mapping[str, object], path: Path) -> S:
    try:
        return kind.model_validate(values, context=path.parent)
    except ValidationError as error:
        raise ValueError(sentence(error, kind, values, str(path))) from None


def _read_yaml(path: Path) -> dict[object, object]:
    import yaml  # type: ignore[import-untyped]

    text = read_text(path, str(path), "a YAML file")
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        what = " ".join(str(error).split())
        raise ValueError(f"{path} is not YAML ({what:.200}): expected a mapping of names to values") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is {found!r:.100}: expected a mapping of names to values")
    return found
