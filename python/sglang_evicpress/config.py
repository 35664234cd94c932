"""What the server was asked to do: the kv flags and the config file as one checked value. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sglang_evicpress.core import Form
from sglang_evicpress.policy import SERVER_POLICY_NAMES, policy_forms

MAX_WINDOW = 256  # what the attention score kernel takes
DEFAULT_FORMS = (Form("keydiff", 0.8), Form("keydiff", 0.5), Form("keydiff", 0.2))


@dataclass(frozen=True, slots=True)
class EvicPressConfig:
    """The checked settings of one server.

    ``policy`` is a name that ``policy.SERVER_POLICY_NAMES`` lists, or follows a pattern there. ``alpha`` weighs answer
    quality against time to first token (paper, section 4; 0 counts time only). ``half_life_s``: seconds after which a
    hit counts half, None to learn them from how soon prefixes are used again. ``forms`` are the forms the policy may
    choose. Nodes under ``min_tokens`` tokens are never compressed; the first ``sinks`` tokens of a prompt are always
    kept; ``window`` is the number of last prompt queries a press with queries looks at. A match that ends inside a
    compressed node and would keep less than ``min_share`` of what the node's form promises for those tokens falls back
    to the parent node. ``curves`` is the raw JSON of the quality curves, None for the flat prior. The three
    ``prefill_`` figures, in seconds, are the law of prefill times to start with (``costs.PrefillLaw``), before batches
    were observed. Raises ValueError, one sentence, for a value out of its range.
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
        if not 0.0 <= self.min_share <= 1.0:
            raise ValueError(f"min_share is {self.min_share}: expected a number from 0 to 1")

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
    ) -> Self:
        """Join the flags with the JSON config file, which may name the policy too; a flag that is given wins.

        Raises ValueError, one sentence naming the value and what is accepted, for anything wrong in either.
        """
        values = {} if config_file is None else _read_file(config_file)
        flags = {
            "policy": policy,
            "alpha": alpha,
            "half_life": half_life,
            "forms": forms,
            "min_tokens": min_tokens,
            "sinks": sinks,
        }
        values |= {name: value for name, value in flags.items() if value is not None}
        if "policy" not in values:
            raise ValueError("no kv policy is given: expected --kv-policy, or a policy config with the key 'policy'")
        settings = {_FIELDS.get(name, name): _READERS[name](name, value) for name, value in values.items()}
        return cls(**settings)  # type: ignore[arg-type]  # the readers give the types of the fields


def policy_in(config_file: str) -> str | None:
    """The policy a JSON config file names, if any. Raises ValueError, one sentence, when it cannot be read."""
    value = _read_file(config_file).get("policy")
    return None if value is None else _text("policy", value)


def _check_policy(name: str) -> None:
    try:
        policy_forms(name)
        is_known = name != "belady"  # it knows the future, as only a simulator does
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


def _curves(name: str, value: object) -> Mapping[str, object] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"{name} is a {type(value).__name__}: expected a JSON object")
    from sglang_evicpress.profile import Curves

    Curves.from_json(value)
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
}
_FIELDS = {"half_life": "half_life_s"}
