"""Configuration of the server: the kv flags and the config file as one checked value."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sglang_evicpress.core import Form
from sglang_evicpress.policy import SERVER_POLICY_NAMES, policy_forms, sees_future, weighs_quality

MAX_WINDOW = 256  # what the attention score kernel takes
DEFAULT_FORMS = (Form("keydiff", 0.8), Form("keydiff", 0.5), Form("keydiff", 0.2))
GB = 10**9  # as SGLang's --hicache-size counts
SYNC_MODES = ("none", "batch", "always")
_MIN_GB, _MAX_GB = 0.016, 1e9
_HOST_GB_OF_SSD = 1.0  # when an SSD folder is given alone


@dataclass(frozen=True, slots=True)
class EvicPressConfig:
    """The checked settings of one server.

    ``policy`` is a name that ``policy.SERVER_POLICY_NAMES`` lists, or follows a pattern there. ``alpha`` weighs answer
    quality against time to first token (paper, section 4; 0 counts time only). ``half_life_s``: seconds after which a
    hit counts half, None to learn them from how soon prefixes are used again. ``forms`` are the forms the policy may
    choose. Nodes under ``min_tokens`` tokens are never compressed; the first ``sinks`` tokens of a prompt are always
    kept; ``window`` is the number of last prompt queries a press with queries looks at. A match that ends inside a
    compressed node and would keep less than ``min_share`` of what the node's form promises for those tokens falls back
    to the parent node. ``curves`` is the raw JSON of the quality curves to go by while no context is profiled, None to
    compress nothing until then. The three
    ``prefill_`` figures, in seconds, are the law of prefill times to start with (``costs.PrefillLaw``), before batches
    were observed.

    ``host_gb`` (1e9 bytes) of host memory hold the KV of nodes that left the GPU, 0 for no such tier. ``ssd_gb`` of the
    folder ``ssd_dir`` hold what leaves host memory, None for no such tier; at most ``ssd_write_gb_per_day`` are written
    there, None for no limit. ``ssd_sync`` says when they are made durable: left to the system (none), in the background
    (batch), or before an entry counts as written (always). A folder may be attached at run time beside ``ssd_dir`` or
    in the ``ssd_allow_dirs``; entries are sealed with the key in ``ssd_key_file``, None for no seals.

    ``profiles`` is the file that keeps what was measured of contexts, None to forget it with the server. A context is
    measured again when the quality predicted of its answers exceeds the observed one by ``drift``. ``recording`` keeps
    the last questions about each context in memory, which measuring online needs.

    The five ``decode_`` settings are the budget of running requests that ask for none themselves, in tokens (0: no
    budget), and how it is kept; ``decode.settings`` says what they may be, and checks them. ``decode_client_budgets``
    says what requests may choose themselves: ``off``, ``on`` or ``trace``.

    A request that would wait longer than ``max_queue_s`` for its turn is refused, None for no limit.

    Raises ValueError, one sentence, for a value out of its range. What depends on this machine (memory, the folder) is
    checked by ``from_flags``.
    """

    policy: str
    alpha: float = 1.0
    half_life_s: float | None = None
    forms: tuple[Form, ...] = DEFAULT_FORMS
    min_tokens: int = 64
    sinks: int = 4
    window: int = 32
    min_share: float = 0.5
    curves: Mapping[str, object] | None = None
    prefill_fixed_s: float = 0.0
    prefill_per_token_s: float = 1e-4
    prefill_per_pair_s: float = 0.0
    host_gb: float = 0.0
    ssd_dir: str | None = None
    ssd_gb: float | None = None
    ssd_write_gb_per_day: float | None = None
    ssd_sync: str = "batch"
    ssd_allow_dirs: tuple[str, ...] = ()
    ssd_key_file: str | None = None
    profiles: str | None = None
    drift: float = 0.3
    recording: bool = True
    decode_budget: int = 0
    decode_method: str = "paged"
    decode_score: str = "value_key_ratio"
    decode_every: int = 128
    decode_protect: str = "first,newest"
    decode_client_budgets: str = "trace"
    max_queue_s: float | None = None

    def __post_init__(self) -> None:
        _check_policy(self.policy)
        if not self.forms:
            raise ValueError("forms is empty: expected at least one form, such as keydiff@0.5 or exact")
        for name, at_least in (("min_tokens", 1), ("sinks", 0), ("window", 1)):
            value = getattr(self, name)
            if value < at_least:
                raise ValueError(f"{name} is {value}: expected a whole number of at least {at_least}")
        if self.window > MAX_WINDOW:
            raise ValueError(f"window is {self.window}: expected at most {MAX_WINDOW} queries")
        for name in ("alpha", "prefill_fixed_s", "prefill_per_token_s", "prefill_per_pair_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}: expected a finite number of at least 0")
        if self.half_life_s is not None and not (math.isfinite(self.half_life_s) and self.half_life_s > 0):
            raise ValueError(f"half_life is {self.half_life_s}: expected finite seconds above 0")
        if self.max_queue_s is not None and not (math.isfinite(self.max_queue_s) and self.max_queue_s > 0):
            raise ValueError(f"max_queue_seconds is {self.max_queue_s}: expected finite seconds above 0")
        if not 0.0 <= self.min_share <= 1.0:
            raise ValueError(f"min_share is {self.min_share}: expected a number from 0 to 1")
        if not 0.0 < self.drift <= 1.0:
            raise ValueError(f"drift is {self.drift}: expected a number above 0, up to 1")
        if self.profiles is not None and (not self.profiles.strip() or "\0" in self.profiles):
            raise ValueError(f"profiles is {self.profiles!r}: expected the path of a file")
        self._check_tiers()

    def _check_tiers(self) -> None:
        if self.ssd_sync not in SYNC_MODES:
            raise ValueError(f"ssd_sync is {self.ssd_sync!r}: expected one of {', '.join(SYNC_MODES)}")
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
        return self.recording and has_lossy and weighs_quality(self.policy)

    @property
    def menu_forms(self) -> tuple[Form, ...]:
        """``forms`` and what the policy brings along."""
        return tuple(dict.fromkeys((*self.forms, *policy_forms(self.policy))))

    @classmethod
    def from_flags(
        cls,
        policy: str | None,
        config_file: str | None = None,
        alpha: float | None = None,
        half_life: float | None = None,
        forms: str | None = None,
        min_tokens: int | None = None,
        sinks: int | None = None,
        *,
        host_gb: float | None = None,
        ssd_dir: str | None = None,
        ssd_gb: float | None = None,
        ssd_write_gb_per_day: float | None = None,
        ssd_sync: str | None = None,
        ssd_allow_dir: str | None = None,
        ssd_key_file: str | None = None,
        prior: str | None = None,
        profiles: str | None = None,
        drift: float | None = None,
        recording: bool | None = None,
        decode_budget: int | None = None,
        decode_method: str | None = None,
        decode_score: str | None = None,
        decode_every: int | None = None,
        decode_protect: str | None = None,
        decode_client_budgets: str | None = None,
        max_queue_seconds: float | None = None,
    ) -> Self:
        """Join the flags with the JSON config file, which may name the policy too; a flag that is given wins.

        An SSD tier without ``host_gb`` gets 1 GB of host memory. Raises ValueError, one sentence naming the value and
        what is accepted, for anything wrong in either.
        """
        values = {} if config_file is None else _read_file(config_file)
        flags = {
            "policy": policy,
            "alpha": alpha,
            "half_life": half_life,
            "forms": forms,
            "min_tokens": min_tokens,
            "sinks": sinks,
            "host_gb": host_gb,
            "ssd_dir": ssd_dir,
            "ssd_gb": ssd_gb,
            "ssd_write_gb_per_day": ssd_write_gb_per_day,
            "ssd_sync": ssd_sync,
            "ssd_allow_dir": ssd_allow_dir,
            "ssd_key_file": ssd_key_file,
            "prior": prior,
            "profiles": profiles,
            "drift": drift,
            "recording": recording,
            "decode_budget": decode_budget,
            "decode_method": decode_method,
            "decode_score": decode_score,
            "decode_every": decode_every,
            "decode_protect": decode_protect,
            "decode_client_budgets": decode_client_budgets,
            "max_queue_seconds": max_queue_seconds,
        }
        values |= {name: value for name, value in flags.items() if value is not None}
        if "policy" not in values:
            raise ValueError("no kv policy is given: expected --kv-policy, or a policy config with the key 'policy'")
        if values.get("prior") is not None and values.get("curves") is not None:
            raise ValueError("prior and curves are both given: expected one of them, they say the same")
        settings = {_FIELDS.get(name, name): _READERS[name](name, value) for name, value in values.items()}
        if "ssd_dir" in settings:
            settings.setdefault("host_gb", _HOST_GB_OF_SSD)
        config = cls(**settings)  # type: ignore[arg-type]  # the readers give the types of the fields
        memory_gb = _memory_bytes() / GB
        if config.host_gb > memory_gb:
            raise ValueError(
                f"host_gb is {config.host_gb:g}, and this machine has {memory_gb:.1f} GB of memory: expected less"
            )
        if config.ssd_dir is not None:
            check_ssd_folder(config.ssd_dir)
        return config


def policy_in(config_file: str) -> str | None:
    """The policy a JSON config file names, if any. Raises ValueError, one sentence, when it cannot be read."""
    value = _read_file(config_file).get("policy")
    return None if value is None else _text("policy", value)


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


def _check_policy(name: str) -> None:
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
        if name not in _READERS:
            raise ValueError(f"{where} has the unknown key {name!r}: expected keys among {', '.join(_READERS)}")
    return values


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}: expected a string")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}: expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is a whole number over 1e308: expected a smaller one") from None


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}: expected a whole number")
    return value


def _forms(name: str, value: object) -> tuple[Form, ...]:
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is {value!r}: expected forms separated by commas, or a list of them")
    return tuple(dict.fromkeys(Form.parse(text) for text in texts))


def _folders(name: str, value: object) -> tuple[str, ...]:
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is {value!r}: expected absolute folders separated by commas, or a list of them")
    return tuple(dict.fromkeys(text.strip() for text in texts))


def _curves(name: str, value: object) -> Mapping[str, object] | None:
    return None if value is None else _known_curves(name, value)


def _known_curves(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        given = "null" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{name} is {given}: expected a JSON object")
    from sglang_evicpress.policy.quality_curves import Curves

    Curves.from_json(value)
    return value


def _prior(name: str, value: object) -> Mapping[str, object]:
    path = _text(name, value)
    where = f"{name} {path!r}"
    try:
        return _known_curves(name, json.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(f"{where} does not exist: expected a JSON file of quality curves") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read ({error}): expected a JSON file of quality curves") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}): expected quality curves") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deep: expected quality curves") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _truth(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: expected true or false")
    return value


_READERS: Mapping[str, Callable[[str, object], object]] = {
    "policy": _text,
    "alpha": _number,
    "half_life": _number,
    "forms": _forms,
    "min_tokens": _whole,
    "sinks": _whole,
    "window": _whole,
    "min_share": _number,
    "curves": _curves,
    "prefill_fixed_s": _number,
    "prefill_per_token_s": _number,
    "prefill_per_pair_s": _number,
    "host_gb": _number,
    "ssd_dir": _text,
    "ssd_gb": _number,
    "ssd_write_gb_per_day": _number,
    "ssd_sync": _text,
    "ssd_allow_dir": _folders,
    "ssd_key_file": _text,
    "prior": _prior,
    "profiles": _text,
    "drift": _number,
    "recording": _truth,
    "decode_budget": _whole,
    "decode_method": _text,
    "decode_score": _text,
    "decode_every": _whole,
    "decode_protect": _text,
    "decode_client_budgets": _text,
    "max_queue_seconds": _number,
}
_FIELDS = {
    "half_life": "half_life_s",
    "prior": "curves",
    "ssd_allow_dir": "ssd_allow_dirs",
    "max_queue_seconds": "max_queue_s",
}
