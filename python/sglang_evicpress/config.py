"""Configuration of the server: the kv flags and the config file as one checked value."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError
from pydantic.dataclasses import dataclass

from sglang_evicpress.core import Form
from sglang_evicpress.policy import SERVER_POLICY_NAMES, policy_forms, sees_future, weighs_quality
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.validation import fields_of, sentence

MAX_WINDOW = 256  # what the attention score kernel takes
DEFAULT_FORMS = (Form("keydiff", 0.8), Form("keydiff", 0.5), Form("keydiff", 0.2))
GB = 10**9  # as SGLang's --hicache-size counts
SYNC_MODES = ("none", "batch", "always")
_MIN_GB, _MAX_GB = 0.016, 1e9
_HOST_GB_OF_SSD = 1.0  # when an SSD folder is given alone
_GB = "a number of GB (1e9 bytes)"
_PATH = "the path of a file"
_AT_LEAST_0 = "a finite number of at least 0"


def _known_policy(name: str) -> str:
    try:
        policy_forms(name)
        is_known = not sees_future(name)
    except ValueError:
        is_known = False
    if not is_known:
        raise ValueError(
            f"kv policy {name!r} is not known: expected one of {', '.join(SERVER_POLICY_NAMES)}, "
            "such as keydiff@0.5+lru or impress@0.1"
        )
    return name


def _texts(value: object) -> object:
    """The parts of a text with commas, or of a list, each once."""
    texts = value.split(",") if isinstance(value, str) else value
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return tuple(dict.fromkeys(text.strip() for text in texts))
    return value


def _forms(value: object) -> object:
    texts = _texts(value)
    if isinstance(texts, tuple) and all(isinstance(text, str) for text in texts):
        return tuple(dict.fromkeys(map(Form.parse, texts)))
    return texts


def _curves(value: object) -> object:
    if isinstance(value, dict):
        Curves.from_json(value)
    return value


def _setting(default: object, expected: str, text: str | None = None, **more: Any) -> Any:
    """A field with what it ``expected``s and the help ``text`` of its flag; without a text it has a key only.

    ``key`` is its key in the config file where that is not the field's name, ``flag`` its flag where that is not
    ``--kv-KEY``, and ``shown`` how the help tells the default; the rest are limits that pydantic checks.
    """
    extra: dict[str, JsonValue] = {name: more.pop(name) for name in ("flag", "shown") if name in more}
    key = more.pop("key", None)
    return Field(default, title=expected, description=text, alias=key, json_schema_extra=extra, **more)


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, validate_by_name=True, validate_by_alias=True))
class EvicPressConfig:
    """The checked settings of one server: each field says what it is, what it accepts, and the help of its flag.

    A match that ends inside a compressed node and would keep less than ``min_match_kept`` of what the node's form
    promises for those tokens falls back to the parent node. ``window`` is the number of last prompt queries a press
    with queries looks at. The three ``prefill_`` figures, in seconds, are the cost of prefilling to start with, before
    batches were observed. The values of ``decode_`` settings are checked by ``decode_budget.settings``.

    Raises ValueError for a value out of its range. What depends on this machine (memory, the folder) is checked by
    ``from_flags``, whose errors are one sentence.
    """

    policy: Annotated[str, AfterValidator(_known_policy)] = _setting(
        ...,
        "a string",
        "Decide by this policy what to compress or drop when the KV cache is full: "
        f"{', '.join(SERVER_POLICY_NAMES)}. evicpress weighs quality against time to first token; the others are to "
        "compare with",
        shown="off, SGLang's own cache",
    )
    alpha: float = _setting(
        1.0,
        _AT_LEAST_0,
        "Seconds that full answer quality is worth: higher keeps quality, lower keeps more prefixes",
        ge=0,
        allow_inf_nan=False,
    )
    half_life_s: float | None = _setting(
        None,
        "finite seconds above 0",
        "Seconds after which the use of a cached prefix counts half",
        shown="learned from how soon prefixes are used again",
        key="half_life",
        gt=0,
        allow_inf_nan=False,
    )
    forms: Annotated[tuple[Form, ...], BeforeValidator(_forms)] = _setting(
        DEFAULT_FORMS,
        "at least one form, such as keydiff@0.5 or exact, separated by commas or in a list",
        "Forms that --kv-policy may choose, separated by commas: PRESS@KEPT, or exact, which alone forbids compression",
        min_length=1,
    )
    min_compress_tokens: int = _setting(
        64, "a whole number of at least 1", "Never compress a cached prefix part shorter than this", ge=1
    )
    sinks: int = _setting(4, "a whole number of at least 0", "First tokens of a prompt that are always kept", ge=0)
    window: int = _setting(32, f"a whole number of at least 1, at most {MAX_WINDOW} queries", ge=1, le=MAX_WINDOW)
    min_match_kept: float = _setting(0.5, "a number from 0 to 1", ge=0, le=1, allow_inf_nan=False)
    curves: Annotated[Mapping[str, object] | None, BeforeValidator(_curves)] = _setting(
        None,
        "a JSON object of quality curves",
        "JSON file with quality curves to go by while no context is profiled, such as "
        '{"keydiff": {"0.8": 0.99, "0.5": 0.9}}',
        shown="none, and nothing is compressed until then",
        flag="quality_curves",
    )
    prefill_fixed_s: float = _setting(0.0, _AT_LEAST_0, ge=0, allow_inf_nan=False)
    prefill_per_token_s: float = _setting(1e-4, _AT_LEAST_0, ge=0, allow_inf_nan=False)
    prefill_per_pair_s: float = _setting(0.0, _AT_LEAST_0, ge=0, allow_inf_nan=False)
    host_gb: float = _setting(
        0.0,
        _GB,
        "Host memory, in GB of 1e9 bytes, for the KV of prefixes that leave the GPU",
        shown=f"0, none; {_HOST_GB_OF_SSD:g} with --kv-ssd-dir, as all goes through it",
    )
    ssd_dir: str | None = _setting(
        None,
        "a string, the path of a folder",
        "Folder, on an SSD of this machine, for KV that leaves host memory; a later server with the same model finds "
        "it again. Needs --kv-ssd-gb",
    )
    ssd_gb: float | None = _setting(None, _GB, "GB of 1e9 bytes that may be used in --kv-ssd-dir")
    ssd_write_gb_per_day: float | None = _setting(
        None,
        _GB,
        "GB of 1e9 bytes that may be written to --kv-ssd-dir in a day, to spare the SSD",
        shown="no limit",
    )
    ssd_fsync: str = _setting(
        "batch",
        f"a string, one of {', '.join(SYNC_MODES)}",
        "When what was written to --kv-ssd-dir survives a power failure: none leaves it to the system, batch makes it "
        "durable in the background within about 2 s, always before it counts as written",
    )
    ssd_allow_dirs: Annotated[tuple[str, ...], BeforeValidator(_texts)] = _setting(
        (),
        "absolute folders separated by commas, or a list of them",
        "Absolute folders, separated by commas, in which POST /evicpress/tiers/ssd may attach one",
        shown="none but the parent of --kv-ssd-dir",
        key="ssd_allow_dir",
    )
    ssd_key_file: str | None = _setting(
        None,
        _PATH,
        "File of 32 to 4096 bytes, such as those of head -c 32 /dev/urandom, readable for its owner only: what is on "
        "the SSD is sealed with it, and what has no such seal is a miss",
    )
    profile_path: str | None = _setting(
        None,
        _PATH,
        "File that keeps the measured quality curves of contexts for later servers; made where it is missing",
        shown="none, they are forgotten with the server",
    )
    drift_threshold: float = _setting(
        0.3,
        "a number above 0, up to 1",
        "Measure a context anew when the predicted quality of its answers exceeds the observed one by this much",
        gt=0,
        le=1,
    )
    online_profiling: bool = _setting(
        True,
        "true or false",
        "Do not keep the last questions about each context in memory; nothing is measured online then",
        shown="they are kept",
        flag="disable_online_profiling",
    )
    decode_budget: int = _setting(
        0,
        "a whole number",
        "Tokens of KV that a running request keeps at most. A request may ask for another budget, or 0 for none: "
        '"custom_params": {"kv_decode_budget": 1024}',
        shown="all",
    )
    decode_method: str = _setting(
        "paged",
        "a string",
        "How --kv-decode-budget is kept: paged frees whole pages, of at least 16 tokens; repack, holefill and compact "
        "drop single tokens and move the rest together",
    )
    decode_score: str = _setting(
        "value_key_ratio",
        "a string",
        "What survives under --kv-decode-budget: value_key_ratio, knorm, keydiff, streaming, r_kv, or tova and h2o, "
        "which keep the last queries of every request",
    )
    decode_interval: int = _setting(
        128,
        "a whole number",
        "Tokens that may come on top of --kv-decode-budget before repack, holefill and compact drop again",
    )
    decode_protected_pages: str = _setting(
        "first,newest",
        "a string",
        "Pages that paged never frees: first (all with sinks), newest, first,newest or none",
    )
    decode_client_budgets: str = _setting(
        "trace",
        "a string",
        "Choice of budgets by requests, in their custom_params: off, on, or trace, which also lets them ask for the "
        "trace of their passes",
    )
    max_queue_s: float | None = _setting(
        None,
        "finite seconds above 0",
        "Answer 503 with Retry-After at once to a request that may wait longer than this for its first token, by the "
        "rate at which the queue moves and the waits of those before",
        shown="no limit",
        key="max_queue_seconds",
        gt=0,
        allow_inf_nan=False,
    )

    def __post_init__(self) -> None:
        if self.profile_path is not None and (not self.profile_path.strip() or "\0" in self.profile_path):
            raise ValueError(f"profile_path is {self.profile_path!r}: expected {_PATH}")
        self._check_tiers()

    def _check_tiers(self) -> None:
        if self.ssd_fsync not in SYNC_MODES:
            raise ValueError(f"ssd_fsync is {self.ssd_fsync!r}: expected one of {', '.join(SYNC_MODES)}")
        for folder in self.ssd_allow_dirs:
            if not folder.startswith("/") or "\0" in folder:
                raise ValueError(
                    f"ssd_allow_dir {folder!r} is no absolute path: expected folders such as /mnt/a,/mnt/b"
                )
        if self.ssd_key_file is not None:
            if not self.ssd_key_file.strip() or "\0" in self.ssd_key_file:
                raise ValueError(f"ssd_key_file is {self.ssd_key_file!r}: expected the path of a file")
            if self.ssd_dir is None and not self.ssd_allow_dirs:
                raise ValueError(
                    f"ssd_key_file is {self.ssd_key_file!r} without ssd_dir and ssd_allow_dir: give one, or leave out "
                    "ssd_key_file"
                )
        if self.host_gb != 0:
            check_size("host_gb", self.host_gb, "0 for no host tier, or ")
        if self.ssd_dir is None:
            for name in ("ssd_gb", "ssd_write_gb_per_day"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is {getattr(self, name)} without ssd_dir: give both, or leave out {name}")
            return
        if self.ssd_gb is None:
            raise ValueError(f"ssd_dir is {self.ssd_dir!r} without ssd_gb: expected the GB that may be used there")
        check_ssd_sizes(self.ssd_gb, self.ssd_write_gb_per_day)
        if self.host_gb == 0:
            raise ValueError(
                f"host_gb is 0 with ssd_dir {self.ssd_dir!r}: KV reaches the SSD through host memory, so expected at "
                f"least {_MIN_GB}"
            )

    @property
    def host_bytes(self) -> int:
        """Size of the host tier; 0 without one."""
        return round(self.host_gb * GB)

    @property
    def ssd_bytes(self) -> int:
        """Size of the SSD tier; 0 without one."""
        return round((self.ssd_gb or 0) * GB)

    @property
    def has_tiers(self) -> bool:
        """True if KV that leaves the GPU is kept anywhere."""
        return self.host_bytes > 0

    @property
    def profiles_online(self) -> bool:
        """True if contexts are profiled while the server runs: where it would change what the policy does."""
        has_lossy = any(not form.is_exact for form in self.menu_forms)
        return self.online_profiling and has_lossy and weighs_quality(self.policy)

    @property
    def menu_forms(self) -> tuple[Form, ...]:
        """``forms`` and what the policy brings along."""
        return tuple(dict.fromkeys((*self.forms, *policy_forms(self.policy))))

    @classmethod
    def from_flags(cls, policy: str | None, config_file: str | None = None, **flags: object) -> Self:
        """Join the flags with the JSON config file, which may name the policy too; a flag that is given wins.

        ``flags`` are keys of the file, None where they are not given. An SSD tier without ``host_gb`` gets 1 GB of host
        memory. Raises ValueError, one sentence naming the value and what is accepted, for anything wrong in either.
        """
        values = {} if config_file is None else _read_file(config_file)
        values |= {name: value for name, value in {"policy": policy, **flags}.items() if value is not None}
        if "policy" not in values:
            raise ValueError("no kv policy is given: expected --kv-policy, or a policy config with the key 'policy'")
        if "quality_curves" in values:
            if values.get("curves") is not None:
                raise ValueError("quality_curves and curves are both given: expected one of them, they say the same")
            values["curves"] = _quality_curves(values.pop("quality_curves"))
        if values.get("ssd_dir") is not None:
            values.setdefault("host_gb", _HOST_GB_OF_SSD)
        try:
            config = cls(**values)  # type: ignore[arg-type]  # pydantic checks them
        except ValidationError as error:
            raise ValueError(sentence(error, cls, values)) from None
        memory_gb = _memory_bytes() / GB
        if config.host_gb > memory_gb:
            raise ValueError(
                f"host_gb is {config.host_gb:g}, and this machine has {memory_gb:.1f} GB of memory: expected less"
            )
        if config.ssd_dir is not None:
            check_ssd_folder(config.ssd_dir)
        return config


KEYS = (*fields_of(EvicPressConfig), "quality_curves")
"""Keys of the config file."""


def policy_in(config_file: str) -> str | None:
    """The policy a JSON config file names, if any. Raises ValueError, one sentence, when it cannot be read."""
    value = _read_file(config_file).get("policy")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"policy is {value!r:.100}: expected a string")
    return value


def check_size(name: str, size_gb: float, or_else: str = "") -> None:
    """Raise ValueError, one sentence, for a size no tier can have; ``or_else`` says what else is accepted."""
    if not _MIN_GB <= size_gb <= _MAX_GB:  # also nan
        raise ValueError(f"{name} is {size_gb}: expected {or_else}a number of GB (1e9 bytes) from {_MIN_GB} to 1e9")


def check_ssd_sizes(ssd_gb: float, write_gb_per_day: float | None) -> None:
    """Raise ValueError, one sentence, for sizes no SSD tier can have."""
    check_size("ssd_gb", ssd_gb)
    if write_gb_per_day is not None and not 0 < write_gb_per_day <= _MAX_GB:
        raise ValueError(
            f"ssd_write_gb_per_day is {write_gb_per_day}: expected a number of GB (1e9 bytes) above 0, up to 1e9"
        )


def check_ssd_folder(folder: str) -> None:
    """Raise ValueError, one sentence, when nothing can be written at ``folder``, or it cannot be made."""
    where = f"ssd_dir {folder!r}"
    if not folder.strip() or "\0" in folder:
        raise ValueError(f"{where} is no path: expected the folder of the SSD tier")
    path = Path(folder).absolute()
    there = next(known for known in (path, *path.parents) if os.access(known, os.F_OK) or not known.name)
    if not there.is_dir():
        what = "is" if there == path else f"lies below {str(there)!r}, which is"
        raise ValueError(f"{where} {what} not a folder: expected one, or a path where one can be made")
    if not os.access(there, os.W_OK | os.X_OK):
        what = "is" if there == path else f"cannot be made, because {str(there)!r} is"
        raise ValueError(f"{where} {what} not writable for this user: expected a folder that is")


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_file(config_file: str) -> dict[str, object]:
    where = f"the kv policy config {config_file!r}"
    try:
        text = Path(config_file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{where} does not exist: expected the path of a JSON file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read ({error}): expected a JSON file") from None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise ValueError(f"{where} is not JSON ({error}): expected one JSON object") from None
    if not isinstance(values, dict):
        raise ValueError(f"{where} holds a JSON {type(values).__name__}: expected an object")
    for name in values:
        if name not in KEYS:
            raise ValueError(f"{where} has the unknown key {name!r}: expected keys among {', '.join(KEYS)}")
    return values


def _quality_curves(path: object) -> Mapping[str, object]:
    if not isinstance(path, str):
        raise ValueError(f"prior is {path!r:.100}: expected a string")
    where = f"prior {path!r}"
    try:
        curves = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{where} does not exist: expected a JSON file of quality curves") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read ({error}): expected a JSON file of quality curves") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): expected quality curves") from None
    if not isinstance(curves, dict):
        raise ValueError(f"{where} holds {curves!r:.100}: expected a JSON object of quality curves")
    try:
        Curves.from_json(curves)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return curves
