"""The table of kv flags: the fields of the config, as a command line gives them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from sglang_evicpress.config import FIELDS


@dataclass(frozen=True, slots=True)
class Flag:
    """``name`` is the field of ServerArgs that it sets, ``key`` what the config file calls it."""

    name: str
    key: str
    kind: type[str] | type[int] | type[float] | type[bool]
    text: str
    default: str

    @property
    def help(self) -> str:
        return f"{self.text} (default: {self.default})."

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


POLICY_CONFIG = Flag(
    "kv_policy_config",
    "",
    str,
    "JSON file with settings of --kv-policy, or the policy itself; the other --kv flags win over it",
    "none",
)


def _flags() -> Iterator[Flag]:
    kinds: tuple[type[bool] | type[int] | type[float], ...] = (bool, int, float)
    for key, field in FIELDS.items():
        if field.description is not None:
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            types = (field.annotation, *get_args(field.annotation))
            has_words = any(get_origin(found) is Literal for found in types)
            kind = str if has_words else next((kind for kind in kinds if kind in types), str)
            flag = str(extra.get("flag", key))
            shown = extra.get("shown", _shown(field.default))
            yield Flag(f"kv_{flag}", key, kind, field.description, str(shown))
        if key == "policy":
            yield POLICY_CONFIG


def _shown(default: object) -> str:
    if default is None:
        return "none"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


FLAGS = tuple(_flags())
"""Every flag, as --help lists them."""
