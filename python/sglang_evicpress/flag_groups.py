"""Groups of settings within the configuration, and what every field of it is made with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic.dataclasses import dataclass

from sglang_evicpress.files import read_json

STRICT = ConfigDict(strict=True, allow_inf_nan=False, validate_by_name=True, validate_by_alias=True)

AT_LEAST_0 = "a finite number of at least 0"
MAX_LAYER_COUNTS = 1024


def setting(default: object, expected: str, text: str | None = None, **more: Any) -> Any:
    """A field with what it ``expected``s and the help ``text`` of its flag; without a text it has a key only.

    ``key`` is its key in the config file where that is not the field's name, ``flag`` its flag where that is not
    ``--kv-KEY``, and ``shown`` how the help tells the default; the rest are limits that pydantic checks.
    """
    extra: dict[str, JsonValue] = {name: more.pop(name) for name in ("flag", "shown") if name in more}
    key = more.pop("key", None)
    return Field(default, title=expected, description=text, alias=key, json_schema_extra=extra, **more)


@dataclass(frozen=True, slots=True, config=STRICT)
class DecodeFlags:
    """Budgets of running requests, as flags and files give them; ``decode_budget.settings`` checks the values."""

    budget: int = setting(
        0,
        "a whole number",
        "Tokens of KV that a running request keeps at most. A request may ask for another budget, or 0 for none: "
        '"custom_params": {"kv_decode_budget": 1024}',
        shown="all",
        key="decode_budget",
    )
    method: str = setting(
        "paged",
        "a string",
        "How --kv-decode-budget is kept: paged frees whole pages, of at least 16 tokens; repack, holefill and compact "
        "drop single tokens and move the rest together",
        key="decode_method",
    )
    score: str = setting(
        "value_key_ratio",
        "a string",
        "What survives under --kv-decode-budget: value_key_ratio, knorm, keydiff, streaming, r_kv, geometry, which "
        "needs --kv-geometry, or tova and h2o, which keep the last queries of every request",
        key="decode_score",
    )
    interval: int = setting(
        128,
        "a whole number",
        "Tokens that may come on top of --kv-decode-budget before repack, holefill and compact drop again",
        key="decode_interval",
    )
    protected_pages: str = setting(
        "first,newest",
        "a string",
        "Pages that paged never frees: first (all with sinks), newest, first,newest or none",
        key="decode_protected_pages",
    )
    client_budgets: str = setting(
        "trace",
        "a string",
        "Choice of budgets by requests, in their custom_params: off, on, or trace, which also lets them ask for the "
        "trace of their passes",
        key="decode_client_budgets",
    )


def file_path(text: str) -> str:
    """The text, if a file can have this name; raises ValueError else."""
    if not text.strip() or "\0" in text:
        raise ValueError("no file has this name")
    return text


@dataclass(frozen=True, slots=True, config=STRICT)
class LayerFlags:
    """Layer budgets, which the forms of the menu name. ``shares`` are those of budget files, by name."""

    budget: Annotated[str, AfterValidator(file_path)] | None = setting(
        None,
        "the path of a file",
        "Budget file, as evicpress search writes it, by which --kv-forms without :BUDGET spread the tokens they keep "
        "over layers",
        shown="none, every layer keeps as many",
        key="layer_budget",
    )
    max_counts: int = setting(
        4,
        f"a whole number of at least 1, at most {MAX_LAYER_COUNTS}",
        "Different numbers of tokens that layers of one node may keep, to which layer budgets are rounded: "
        "attention prepares each step once for each, and has a table of request slots as large as SGLang's for each",
        key="max_layer_counts",
        ge=1,
        le=MAX_LAYER_COUNTS,
    )
    shares: Mapping[str, tuple[float, ...]] = setting({}, "shares by layer, of budgets by name", key="layer_shares")


@dataclass(frozen=True, slots=True, config=STRICT)
class PrefillFlags:
    """Cost of prefilling to start with, in seconds."""

    fixed_s: float = setting(0.0, AT_LEAST_0, key="prefill_fixed_s", ge=0)
    per_token_s: float = setting(1e-4, AT_LEAST_0, key="prefill_per_token_s", ge=0)
    per_pair_s: float = setting(0.0, AT_LEAST_0, key="prefill_per_pair_s", ge=0)


@dataclass(frozen=True, slots=True, config=STRICT)
class ProfileFlags:
    """Quality measured by the server itself."""

    path: Annotated[str, AfterValidator(file_path)] | None = setting(
        None,
        "the path of a file",
        "File that keeps the measured quality curves of contexts for later servers; made where it is missing",
        key="profile_path",
        shown="none, they are forgotten with the server",
    )
    drift_threshold: float = setting(
        0.3,
        "a number above 0, up to 1",
        "Measure a context anew when the predicted quality of its answers exceeds the observed one by this much",
        gt=0,
        le=1,
    )
    are_online: bool = setting(
        True,
        "true or false",
        "Do not keep the last questions about each context in memory; nothing is measured online then",
        key="online_profiling",
        shown="they are kept",
        flag="disable_online_profiling",
    )


def _engine_settings(value: object) -> object:
    """The settings in a JSON text, or in the JSON file that @PATH names; any other value as it is."""
    if not isinstance(value, str):
        return value
    where = f"external_config {value!r:.100}"
    if value.startswith("@"):
        return read_json(value[1:], where)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): expected a JSON object, or @ and the path of one") from None


@dataclass(frozen=True, slots=True, config=STRICT)
class StoreFlags:
    """Storage that others may reach: a store that servers share, and the key that seals what is kept outside."""

    backend: Literal["file", "mooncake", "nixl", "dynamic"] | None = setting(
        None,
        "one of file, mooncake, nixl, dynamic",
        "Store that servers of one model share, by a storage backend of SGLang's --hicache-storage-backend: file, "
        "mooncake, nixl or dynamic. Prefixes are published there, and read where that is sooner than computing",
        key="external_backend",
    )
    config: Annotated[Mapping[str, Any] | None, BeforeValidator(_engine_settings)] = setting(
        None,
        "a JSON object",
        "Settings of --kv-external-backend, as --hicache-storage-backend-extra-config takes them: a JSON object, or @ "
        "and the path of one",
        key="external_config",
        repr=False,  # it may hold credentials
    )
    key_file: Annotated[str, AfterValidator(file_path)] | None = setting(
        None,
        "the path of a file",
        "File of 32 to 4096 bytes, such as those of head -c 32 /dev/urandom, readable for its owner only: what is on "
        "the SSD and in the external store is sealed with it, and what has no such seal is a miss",
        key="ssd_key_file",
    )

    def __post_init__(self) -> None:
        if self.config is not None and self.backend is None:
            raise ValueError("external_config is given without external_backend: expected both, or neither")
        folder = None if self.config is None else self.config.get("file_storage_path")
        if self.backend == "file" and not (isinstance(folder, str) and folder.startswith("/")):
            raise ValueError(
                f"external_backend is 'file' and file_storage_path in external_config is {folder!r:.100}: expected an "
                "absolute path, as everybody can write to the folder that SGLang takes without one"
            )


GROUPS: dict[str, type[DecodeFlags] | type[LayerFlags] | type[PrefillFlags] | type[ProfileFlags] | type[StoreFlags]] = {
    "layers": LayerFlags,
    "prefill": PrefillFlags,
    "stores": StoreFlags,
    "profiles": ProfileFlags,
    "decode": DecodeFlags,
}
"""By their field of the configuration. Files and flags name their settings beside the others."""
