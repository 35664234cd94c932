"""The command line of ``evicpress replay``, read: every bad value is one ValueError that names its flag."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sglang_evicpress.cli.replay.units import Size, parse_number, parse_rate
from sglang_evicpress.core import Form, Tier
from sglang_evicpress.policy import policy_forms
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.simulator.runs import Recompute

FIXED_LOAD_S = {Tier.HOST: 0.0005, Tier.SSD: 0.002}
"""Seconds every load takes besides its bytes."""

MOST_NOISE = 10.0
MOST_ALPHA_S = 1e9
"""Beyond these sums of seconds and utilities leave the range of a float."""

Args = Mapping[str, object]
"""What argparse found: text, True, False, or None for what was left out."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Servers:
    """``number`` servers, or as many as are busy the share ``number`` of the time; inf: nothing waits."""

    number: float = math.inf
    is_load: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Flags of a replay, before the trace is known. ``sizes`` has the tiers; ``half_life_s`` None is learned."""

    policies: tuple[str, ...]
    alphas: tuple[float, ...]
    sizes: Mapping[Tier, Size]
    half_life_s: float | None
    forms: tuple[Form, ...]
    slot_bytes: int
    costs: CostSnapshot
    noise: float
    servers: Servers
    seed: int
    curves: Curves | None
    curves_file: str | None
    limit: int | None
    skip_bad: bool
    recompute: Recompute


def read_plan(args: Args) -> Plan:
    """ValueError for the first bad value, naming it and what is accepted."""
    sizes = {tier: _read(args, tier.label, Size.parse) for tier in (Tier.GPU, Tier.HOST, Tier.SSD)}
    if not sizes[Tier.GPU].amount:
        raise ValueError(f"--gpu: {args['gpu']!r} is nothing: expected a size above 0")
    load = {
        tier: TransferCost(fixed_s, _read(args, f"{tier.label}_bandwidth", parse_rate))
        for tier, fixed_s in FIXED_LOAD_S.items()
    }
    return Plan(
        policies=_read(args, "policy", _policies),
        alphas=_read(args, "alpha", _alphas),
        sizes={tier: size for tier, size in sizes.items() if size.amount},
        half_life_s=_read(args, "half_life", _half_life),
        forms=_read(args, "forms", _forms),
        slot_bytes=_read(args, "slot_bytes", lambda text: _whole(text, 1)),
        costs=CostSnapshot(_read(args, "prefill", _prefill), load, {}),
        noise=_read(args, "noise", lambda text: _at_most(MOST_NOISE, text, "a number from 0 to 10, such as 0.1")),
        servers=Servers() if args["servers"] is None else _read(args, "servers", _servers),
        seed=_read(args, "seed", lambda text: _whole(text, 0)),
        curves=None if args["curves"] is None else _read(args, "curves", _curves),
        curves_file=None if args["curves"] is None else str(args["curves"]),
        limit=None if args["limit"] is None else _read(args, "limit", lambda text: _whole(text, 1)),
        skip_bad=bool(args["skip_bad"]),
        recompute=_read(args, "recompute", _recompute),
    )


def _read(args: Args, name: str, reader: Callable[[str], T]) -> T:
    try:
        return reader(str(args[name]))
    except ValueError as error:
        raise ValueError(f"--{name.replace('_', '-')}: {error}") from None


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        policy_forms(name)  # knows what is known
    return names


def _alphas(text: str) -> tuple[float, ...]:
    expected = "seconds of 0 or more, at most 1e9, or several separated by commas"
    return tuple(dict.fromkeys(_at_most(MOST_ALPHA_S, part, expected) for part in text.split(",")))


def _at_most(most: float, text: str, expected: str) -> float:
    value = parse_number(text, expected)
    if value > most:
        raise ValueError(f"{text!r}: expected {expected}")
    return value


def _half_life(text: str) -> float | None:
    if text.strip() == "auto":
        return None
    return parse_number(text, "seconds above 0, or auto", is_above=True)


def _forms(text: str) -> tuple[Form, ...]:
    if text.strip() == "none":
        return ()
    return tuple(dict.fromkeys(Form.parse(part) for part in text.split(",")))


def _recompute(text: str) -> Recompute:
    known: dict[str, Recompute] = {"evicpress": "evicpress", "all": "all", "none": "none"}
    if text not in known:
        raise ValueError(f"{text!r}: expected evicpress, all or none")
    return known[text]


def _prefill(text: str) -> PrefillCost:
    expected = "FIXED,PER_TOKEN,PER_PAIR in seconds of 0 or more, such as 0.01,3.5e-5,1.3e-9"
    parts = text.split(",")
    if len(parts) != 3:
        raise ValueError(f"{text!r}: expected {expected}")
    cost = PrefillCost(*(parse_number(part, expected) for part in parts))
    if not cost.seconds(1, 0) > 0.0:
        raise ValueError(f"{text!r} takes no time at all: expected {expected}, not all 0")
    return cost


def _servers(text: str) -> Servers:
    expected = "a number above 0, or load= and a number above 0, such as load=0.9"
    number = text.strip().removeprefix("load=")
    try:
        return Servers(parse_number(number, expected, is_above=True), number != text.strip())
    except ValueError:
        raise ValueError(f"{text!r}: expected {expected}") from None


def _whole(text: str, least: int) -> int:
    expected = f"a whole number of at least {least}"
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) < least:
        raise ValueError(f"{text!r}: expected {expected}")
    return int(text)


def _curves(path: str) -> Curves:
    try:
        return Curves.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"{path!r} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path!r} is no UTF-8: expected a JSON file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path!r} is no JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path!r}: {error}") from None
