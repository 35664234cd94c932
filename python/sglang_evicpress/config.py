"""Configuration of the server: the kv flags and the config file as one checked value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from sglang_evicpress.core import PRESSES, PYRAMID, UNIFORM, Form
from sglang_evicpress.files import read_json
from sglang_evicpress.flag_groups import (
    AT_LEAST_0,
    GROUPS,
    STRICT,
    DecodeFlags,
    LayerFlags,
    PrefillFlags,
    ProfileFlags,
    StoreFlags,
    file_path,
    setting,
)
from sglang_evicpress.policy import SERVER_POLICY_NAMES, policy_info
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.search.form_budgets import name_budgets
from sglang_evicpress.tenants import BYTES_PER_GB, read_tenants
from sglang_evicpress.validation import checked, fields_of

DEFAULT_QUALITY = 0.97
FIXED_ALPHA_S = 1.0
"""Alpha of a policy that weighs quality and has no target, where none is given."""

MAX_WINDOW = 256  # what the attention score kernel takes
DEFAULT_FORM_TEXTS = [
    *("keydiff@0.8", "keydiff@0.5", "keydiff@0.2"),
    *("exact+int8", "exact+int4", "keydiff@0.8+int4", "keydiff@0.5+int4"),
]
DEFAULT_FORMS = tuple(map(Form.parse_stored, DEFAULT_FORM_TEXTS))
GB = BYTES_PER_GB  # as SGLang's --hicache-size counts
_MIN_GB, _MAX_GB = 0.016, 1e9
MIN_TIER_BYTES = round(_MIN_GB * GB)
AUTO: Literal["auto"] = "auto"
_TIER_GB = f"a number of GB (1e9 bytes) from {_MIN_GB} to 1e9"
_PATH = "the path of a file"


def _known_policy(name: str) -> str:
    try:
        is_known = not policy_info(name).sees_future
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
        return tuple(dict.fromkeys(map(Form.parse_stored, texts)))
    return texts


def _curves(value: object) -> object:
    if isinstance(value, dict):
        Curves.from_json(value)
    return value


def _tenants(value: object) -> object:
    if isinstance(value, str):
        value = read_json(value, f"tenants {value!r}", file="a JSON file of tenants", content="tenants")
    if value is not None:
        read_tenants(value)
    return value


_Path = Annotated[str, AfterValidator(file_path)]


def _absolute(folders: tuple[str, ...]) -> tuple[str, ...]:
    for folder in folders:
        if not folder.startswith("/") or "\0" in folder:
            raise ValueError(f"ssd_allow_dir {folder!r} is no absolute path: expected folders such as /mnt/a,/mnt/b")
    return folders


def _number(value: object) -> object:
    """The number that the text of a flag spells; any other value as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _host_size(size_gb: float | Literal["auto"]) -> float | Literal["auto"]:
    if size_gb != AUTO and size_gb and not _MIN_GB <= size_gb <= _MAX_GB:
        raise ValueError("no tier has this size")
    return size_gb


@dataclass(frozen=True, slots=True, config=STRICT)
class EvicPressConfig:
    """The checked settings of one server: each field says what it is, what it accepts, and the help of its flag.

    A match that ends inside a compressed node and would keep less than ``min_match_kept`` of what the node's form
    promises for those tokens falls back to the parent node. ``window`` is the number of last prompt queries a press
    with queries looks at. ``prefill`` is the cost of prefilling to start with, before batches were observed. Flags and
    files name all settings, those of ``GROUPS`` too, side by side.

    Raises ValueError for a value out of its range. What depends on this machine (memory, the folder) is checked by
    ``from_flags``, whose errors are one sentence.
    """

    policy: Annotated[str, AfterValidator(_known_policy)] = setting(
        ...,
        "a string",
        "Decide by this policy what to compress or drop when the KV cache is full: "
        f"{', '.join(SERVER_POLICY_NAMES)}. evicpress weighs quality against time to first token; the others are to "
        "compare with",
        shown="off, SGLang's own cache",
    )
    quality: float | None = setting(
        None,
        "a number above 0, at most 1",
        "Mean quality that what is served from the cache is kept at, weighted by tokens; 1 serves exact KV only. Only "
        "for the policy evicpress",
        shown=f"{DEFAULT_QUALITY:g}, or none with --kv-alpha",
        gt=0,
        le=1,
    )
    alpha: float | None = setting(
        None,
        AT_LEAST_0,
        "Seconds that full answer quality is worth, instead of --kv-quality: higher keeps quality, lower keeps more "
        "prefixes",
        shown="tuned so that --kv-quality holds",
        ge=0,
    )
    forms: Annotated[tuple[Form, ...], BeforeValidator(_forms)] = setting(
        DEFAULT_FORMS,
        "at least one form, such as keydiff@0.5 or exact, separated by commas or in a list",
        "Forms that --kv-policy may choose, separated by commas: PRESS@KEPT, that or exact with +CODEC (below the "
        "GPU), or exact, which alone forbids compression. PRESS@KEPT:BUDGET spreads the tokens kept over layers: "
        "uniform, pyramid, or a budget file",
        min_length=1,
    )
    layers: LayerFlags = Field(default_factory=LayerFlags)
    min_compress_tokens: int = setting(
        64, "a whole number of at least 1", "Never compress a cached prefix part shorter than this", ge=1
    )
    sinks: int = setting(4, "a whole number of at least 0", "First tokens of a prompt that are always kept", ge=0)
    window: int = setting(32, f"a whole number of at least 1, at most {MAX_WINDOW} queries", ge=1, le=MAX_WINDOW)
    min_match_kept: float = setting(0.5, "a number from 0 to 1", ge=0, le=1)
    curves: Annotated[Mapping[str, object] | None, BeforeValidator(_curves)] = setting(
        None,
        "a JSON object of quality curves",
        "JSON file with quality curves to go by while no context is profiled, such as "
        '{"keydiff": {"0.8": 0.99, "0.5": 0.9}}',
        shown="none, and nothing is compressed until then",
        flag="quality_curves",
    )
    geometry: _Path | None = setting(
        None,
        _PATH,
        "File that evicpress calibrate geometry made of this model, for the press and the decode score geometry",
    )
    prefill: PrefillFlags = Field(default_factory=PrefillFlags)
    host_gb: Annotated[float | Literal["auto"], AfterValidator(_host_size)] = setting(
        AUTO,
        f"auto, 0 for no host tier, or {_TIER_GB}",
        "Host memory of each rank, in GB of 1e9 bytes, for the KV of prefixes that leave the GPU, or 0 for none. auto "
        "is half of what is free beyond 4 GB or a tenth of all memory, at most 4 times the KV pool, and 0 where no "
        "tier can be",
    )
    ssd_dir: str | None = setting(
        None,
        "a string, the path of a folder",
        "Folder, on an SSD of this machine, for KV that leaves host memory; a later server with the same model finds "
        "it again. Needs --kv-ssd-gb",
    )
    ssd_gb: float | None = setting(
        None, _TIER_GB, "GB of 1e9 bytes that may be used in --kv-ssd-dir", ge=_MIN_GB, le=_MAX_GB
    )
    ssd_write_gb_per_day: float | None = setting(
        None,
        "a number of GB (1e9 bytes) above 0, up to 1e9",
        "GB of 1e9 bytes that may be written to --kv-ssd-dir in a day, to spare the SSD",
        shown="no limit",
        gt=0,
        le=_MAX_GB,
    )
    ssd_fsync: Literal["none", "batch", "always"] = setting(
        "batch",
        "one of none, batch, always",
        "When what was written to --kv-ssd-dir survives a power failure: none leaves it to the system, batch makes it "
        "durable in the background within about 2 s, always before it counts as written",
    )
    ssd_allow_dirs: Annotated[tuple[str, ...], BeforeValidator(_texts), AfterValidator(_absolute)] = setting(
        (),
        "absolute folders separated by commas, or a list of them",
        "Absolute folders, separated by commas, in which POST /evicpress/tiers/ssd may attach one",
        shown="none but the parent of --kv-ssd-dir",
        key="ssd_allow_dir",
    )
    stores: StoreFlags = Field(default_factory=StoreFlags)
    profiles: ProfileFlags = Field(default_factory=ProfileFlags)
    decode: DecodeFlags = Field(default_factory=DecodeFlags)
    slot_checks: float = setting(
        0.0,
        "a number from 0 to 1",
        "Share of the slots of each compressed or loaded prefix part whose KV is compared with what it was whenever it "
        "is matched; what has changed is a miss. For looking into wrong answers: it costs a read of these slots",
        shown="0, nothing is compared",
        ge=0,
        le=1,
    )
    max_queue_s: float | None = setting(
        None,
        "finite seconds above 0",
        "Answer 503 with Retry-After at once to a request that may wait longer than this for its first token, by the "
        "rate at which the queue moves and the waits of those before",
        shown="no limit",
        key="max_queue_seconds",
        gt=0,
    )

    tenants: Annotated[Mapping[str, object] | None, BeforeValidator(_tenants)] = setting(
        None,
        "a JSON object of tenants, or the path of its file",
        "JSON file of tenants by name, each with the cache_salt of its requests, the kv_quality that these do not fall "
        'below, and gpu_gb, host_gb, ssd_gb that they may hold, such as {"acme": {"cache_salt": "s-1", "gpu_gb": 4}}',
        repr=False,  # salts are secrets
    )

    def __post_init__(self) -> None:
        for form in self.menu_forms:
            if form.is_uneven and form.budget != PYRAMID and form.budget not in self.layers.shares:
                known = ", ".join((UNIFORM, PYRAMID, *self.layers.shares))
                raise ValueError(f"form {form} has the unknown budget {form.budget!r}: expected {known}")
        if self.quality is not None and self.alpha is not None:
            raise ValueError(
                f"quality is {self.quality:g} and alpha {self.alpha:g}: expected one of them, as alpha is tuned so "
                "that quality holds"
            )
        if self.quality is not None and not policy_info(self.policy).has_target:
            raise ValueError(
                f"quality is {self.quality:g} with policy {self.policy!r}: expected evicpress, which alone can hold it"
            )
        if self.geometry is None:
            for form in self.menu_forms:
                if form.press is not None and PRESSES[form.press].needs_geometry:
                    raise ValueError(
                        f"form {form} is on the menu without geometry: give --kv-geometry FILE, which evicpress "
                        "calibrate geometry makes of the model, or leave out the form"
                    )
        stores = self.stores
        if stores.key_file is not None and not (self.ssd_dir or self.ssd_allow_dirs or stores.backend):
            raise ValueError(
                f"ssd_key_file is {stores.key_file!r} without ssd_dir and ssd_allow_dir, and without external_backend: "
                "give one, or leave out ssd_key_file"
            )
        if stores.backend is not None and self.host_gb == 0:
            raise ValueError(
                f"host_gb is 0 with external_backend {stores.backend!r}: KV reaches the store through host memory, so "
                f"expected at least {_MIN_GB}"
            )
        if self.ssd_dir is None:
            for name in ("ssd_gb", "ssd_write_gb_per_day"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is {getattr(self, name)} without ssd_dir: give both, or leave out {name}")
        elif self.ssd_gb is None:
            raise ValueError(f"ssd_dir is {self.ssd_dir!r} without ssd_gb: expected the GB that may be used there")
        elif self.host_gb == 0:
            raise ValueError(
                f"host_gb is 0 with ssd_dir {self.ssd_dir!r}: KV reaches the SSD through host memory, so expected at "
                f"least {_MIN_GB}"
            )

    @property
    def target_quality(self) -> float | None:
        """Quality that alpha is tuned for, None where it is fixed or means nothing."""
        if self.alpha is not None or not policy_info(self.policy).has_target:
            return None
        return DEFAULT_QUALITY if self.quality is None else self.quality

    @property
    def start_alpha(self) -> float:
        """Alpha to start with, and to stay with where there is no target."""
        return FIXED_ALPHA_S if self.alpha is None else self.alpha

    @property
    def host_bytes(self) -> int:
        """Size of the host tier; 0 without one. Raises RuntimeError while it is to be chosen."""
        if self.host_gb == AUTO:
            raise RuntimeError("host_gb is auto: expected the size that the scheduler chose")
        return round(self.host_gb * GB)

    @property
    def ssd_bytes(self) -> int:
        """Size of the SSD tier; 0 without one."""
        return round((self.ssd_gb or 0) * GB)

    @property
    def has_tiers(self) -> bool:
        """True if KV that leaves the GPU is kept anywhere, or may be once the host tier's size is chosen."""
        return self.host_gb != 0

    @property
    def profiles_online(self) -> bool:
        """True if contexts are profiled while the server runs: where it would change what the policy does."""
        has_lossy = any(not form.is_exact for form in self.menu_forms)
        return self.profiles.are_online and has_lossy and policy_info(self.policy).weighs_quality

    @property
    def menu_forms(self) -> tuple[Form, ...]:
        """``forms``, without a tier below the GPU those without a codec, and what the policy brings along."""
        forms = [form for form in self.forms if self.has_tiers or form.codec == "raw"]
        if self.quality == 1.0:
            forms = [form for form in forms if form.is_exact]
        return tuple(dict.fromkeys((*forms, *policy_info(self.policy).forms)))

    @classmethod
    def from_flags(cls, policy: str | None, config_file: str | None = None, **flags: object) -> Self:
        """Join the flags with the JSON config file, which may name the policy too; a flag that is given wins.

        ``flags`` are keys of the file, None where they are not given. Raises ValueError, one sentence naming the value
        and what is accepted, for anything wrong in either.
        """
        values = {} if config_file is None else _read_file(config_file)
        given = {"policy": policy, **flags, "host_gb": _number(flags.get("host_gb"))}
        values |= {name: value for name, value in given.items() if value is not None}
        for name, other in (("quality", "alpha"), ("alpha", "quality")):
            if flags.get(name) is not None and flags.get(other) is None:
                values.pop(other, None)
        if "policy" not in values:
            raise ValueError("no kv policy is given: expected --kv-policy, or a policy config with the key 'policy'")
        _read_budgets(values)
        if "quality_curves" in values:
            if values.get("curves") is not None:
                raise ValueError("quality_curves and curves are both given: expected one of them, they say the same")
            values["curves"] = _read_curves(values.pop("quality_curves"))
        for name, group in GROUPS.items():
            values[name] = checked(group, {key: values.pop(key) for key in fields_of(group) if key in values})
        config = checked(cls, values)
        memory_gb = memory_bytes() / GB
        if config.host_gb != AUTO and config.host_gb > memory_gb:
            raise ValueError(
                f"host_gb is {config.host_gb:g}, and this machine has {memory_gb:.1f} GB of memory: expected less"
            )
        if config.ssd_dir is not None:
            check_ssd_folder(config.ssd_dir)
        return config


FIELDS = {
    name: field
    for key, given in fields_of(EvicPressConfig).items()
    for name, field in (fields_of(GROUPS[key]) if key in GROUPS else {key: given}).items()
}
"""Every setting by its key in the config file, and ``layer_shares``, which are those of its budget files."""

KEYS = (*(name for name in FIELDS if name != "layer_shares"), "quality_curves")


def policy_in(config_file: str) -> str | None:
    """The policy a JSON config file names, if any. Raises ValueError, one sentence, when it cannot be read."""
    value = _read_file(config_file).get("policy")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"policy is {value!r:.100}: expected a string")
    return value


def check_size(name: str, size_gb: float) -> None:
    """Raise ValueError, one sentence, for a size no tier can have."""
    if not _MIN_GB <= size_gb <= _MAX_GB:  # also nan
        raise ValueError(f"{name} is {size_gb}: expected {_TIER_GB}")


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


def memory_bytes() -> int:
    """Memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_file(config_file: str) -> dict[str, object]:
    where = f"the kv policy config {config_file!r}"
    values = read_json(config_file, where, content="one JSON object")
    if not isinstance(values, dict):
        raise ValueError(f"{where} holds a JSON {type(values).__name__}: expected an object")
    for name in values:
        if name not in KEYS:
            raise ValueError(f"{where} has the unknown key {name!r}: expected keys among {', '.join(KEYS)}")
    return values


def _read_budgets(values: dict[str, object]) -> None:
    """Put names in place of the paths of budget files, and their shares under ``layer_shares``."""
    default, texts = values.get("layer_budget"), _texts(values.get("forms", DEFAULT_FORM_TEXTS))
    if isinstance(texts, tuple) and (default is None or (isinstance(default, str) and default.strip())):
        values["forms"], values["layer_shares"] = name_budgets(texts, default)


def _read_curves(path: object) -> object:
    if not isinstance(path, str):
        raise ValueError(f"prior is {path!r:.100}: expected a string")
    where = f"prior {path!r}"
    curves = read_json(path, where, file="a JSON file of quality curves", content="quality curves")
    try:
        Curves.from_json(curves)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return curves
