"""The command line of ``evicpress replay``: every flag, and the reader of its value."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import get_args

from sglang_evicpress.cli.parser import Parser, whole
from sglang_evicpress.cli.replay.units import Size, parse_number, parse_rate
from sglang_evicpress.core import Form
from sglang_evicpress.files import read_json
from sglang_evicpress.policy import policy_info
from sglang_evicpress.policy.cost_model import PrefillCost
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.search.budget_file import MAX_LAYERS
from sglang_evicpress.search.form_budgets import Shares, name_budgets
from sglang_evicpress.simulator.runs import Recompute
from sglang_evicpress.traces.times import UNITS

DEFAULT_FORMS = ",".join(
    (
        *(f"{press}@{kept}" for press in ("keydiff", "snapkv", "knorm") for kept in (0.8, 0.6, 0.4, 0.2)),
        *("exact+int8", "exact+int4", "keydiff@0.8+int4", "keydiff@0.6+int4"),
    )
)

MOST_NOISE = 10.0
DEFAULT_ALPHA_S = 1.0
MOST_ALPHA_S = 1e9
MOST_PREFILL_S = 1e9
"""Beyond these sums of seconds and utilities leave the range of a float."""

_EPILOG = """SIZE: 1% of the trace's working set; 30GB or 30GiB; 500000, 500ktok or 5Mtok tokens of exact KV.

TRACE: a file of the Mooncake, WEKA or LMCache-agent kind or of our own, plain, .zst or .gz, or
synthetic:KIND[:SEED]. Timestamps are numbers, also in strings, or dates in ISO 8601.

Prints one row for each policy and alpha or quality target. Ctrl-C and SIGTERM print what is done so far and write no
file. Exit status: 0 done, 2 bad input, 130 Ctrl-C, 143 SIGTERM.

example:
  evicpress replay conversation_trace.jsonl --policy evicpress,lru,keydiff@0.5+lru --gpu 1% --host 4% --ssd 20%
"""


@dataclass(frozen=True, slots=True)
class Servers:
    """``number`` servers, or as many as are busy the share ``number`` of the time."""

    number: float
    is_load: bool


def make_parser() -> Parser:
    parser = Parser.of("replay", "Replay a trace under one or more policies on simulated tiers.", _EPILOG)
    add, add_value = parser.add_argument, parser.add_value
    add("trace", metavar="TRACE", help="what to replay")
    named = "separated by commas; default %(default)s; a wrong one prints all"
    add_value("--policy", _policies, "NAMES", named, "evicpress,lru")
    add_value("--gpu", _gpu, "SIZE", "cache on the GPU, above 0", required=True)
    add_value("--host", Size.parse, "SIZE", "cache in host memory; 0, the default: none", "0")
    add_value("--ssd", Size.parse, "SIZE", "cache on SSD; 0, the default: none", "0")
    add_value("--external", Size.parse, "SIZE", "share of a store below; 0, the default: none", "0")
    add_value(
        *("--alpha", _alphas, "NUMBERS"),
        "seconds full quality is worth; each makes a run of its own; default 1, or none with --quality",
    )
    add_value(
        *("--quality", _qualities, "NUMBERS"),
        "mean quality of the tokens served, for which evicpress tunes alpha; each makes a run of its own",
    )
    menu = "on the menu, also PRESS@KEPT:BUDGET with pyramid or a budget file; none: exact only; default %(default)s"
    add_value("--forms", _forms, "FORMS", menu, DEFAULT_FORMS)
    add_value("--layers", whole(1, MAX_LAYERS), "N", "layers of the model, over which pyramid is spread")
    add_value("--min-compress-tokens", whole(1), "N", "never compress a shorter node; default %(default)s", "64")
    add_value("--slot-bytes", whole(1), "BYTES", "exact KV of one token; default %(default)s", "131072")
    add_value("--prefill", _prefill, "FIXED,PER_TOKEN,PER_PAIR", "s; default %(default)s", "0.01,3.5e-5,1.3e-9")
    add_value("--host-bandwidth", parse_rate, "RATE", "default %(default)s, behind 0.5 ms", "20GB/s")
    add_value("--ssd-bandwidth", parse_rate, "RATE", "default %(default)s, behind 2 ms", "2GB/s")
    add_value("--external-bandwidth", parse_rate, "RATE", "default %(default)s, behind 5 ms", "1GB/s")
    add_value("--noise", _noise, "SIGMA", "of the logarithm of every cost; above 0, policies learn costs", "0")
    add_value(
        *("--servers", _servers, "N|load=X"),
        "requests wait for N servers, or for as many as prefilling every whole prompt would keep busy the share X of "
        "the time; left out: nothing waits",
    )
    add(
        "--recompute",
        choices=get_args(Recompute),
        default="evicpress",
        metavar="WHO",
        help="which policies may prefill again what would take longer to load: evicpress, the default, all or none; "
        "engines today always load",
    )
    add_value("--seed", whole(0), "N", "of the quality curves drawn for each context; default %(default)s", "0")
    add_value(*("--curves", _curves, "FILE"), "JSON quality curves, the same for every context, instead of drawn ones")
    add_value("--limit", whole(1), "N", "only the first N requests")
    add_value(
        *("--time-unit", _time_unit, "UNIT", f"of the trace's timestamps: {', '.join(UNITS)}; left out: its format's")
    )
    add_value("--block-tokens", whole(1), "N", "tokens of a block of the trace; left out: as its format or file says")
    add("--skip-bad", action="store_true", help="leave bad lines out, and say which")
    add("--jsonl", metavar="FILE", help="write one object for each run")
    add("--requests", metavar="FILE", help="write one object for each request of each run")
    add("--plot", metavar="FILE", help="draw a .png or .svg; needs sglang-evicpress[plot]")
    add("--no-progress", action="store_true", help="no progress bar; there is none either where stderr is no terminal")
    parser.add_json()
    return parser


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        policy_info(name)  # knows what is known
    return names


def _gpu(text: str) -> Size:
    size = Size.parse(text)
    if not size.amount:
        raise ValueError(f"{text!r} is nothing: expected a size above 0")
    return size


def _alphas(text: str) -> tuple[float, ...]:
    expected = "seconds of 0 or more, at most 1e9, or several separated by commas"
    return tuple(dict.fromkeys(_at_most(MOST_ALPHA_S, part, expected) for part in text.split(",")))


def alphas_of(args: argparse.Namespace) -> tuple[float, ...]:
    """The fixed alphas to run with."""
    if args.alpha is None and args.quality is None:
        return (DEFAULT_ALPHA_S,)
    return args.alpha or ()


def _qualities(text: str) -> tuple[float, ...]:
    expected = "a quality above 0, at most 1, or several separated by commas, such as 0.97"
    values = tuple(dict.fromkeys(parse_number(part, expected, is_above=True) for part in text.split(",")))
    if max(values) > 1.0:
        raise ValueError(f"{text!r}: expected {expected}")
    return values


def _at_most(most: float, text: str, expected: str) -> float:
    value = parse_number(text, expected)
    if value > most:
        raise ValueError(f"{text!r}: expected {expected}")
    return value


def _noise(text: str) -> float:
    return _at_most(MOST_NOISE, text, "a number from 0 to 10, such as 0.1")


def _time_unit(text: str) -> str:
    if text not in UNITS:
        raise ValueError(f"{text!r}: expected one of {', '.join(UNITS)}")
    return text


def _forms(text: str) -> tuple[tuple[Form, ...], Shares]:
    """With the shares of their budget files, by name."""
    names, shares = ([], Shares()) if text.strip() == "none" else name_budgets(text.split(","), None)
    return tuple(dict.fromkeys(map(Form.parse_stored, names))), shares


def _prefill(text: str) -> PrefillCost:
    expected = "FIXED,PER_TOKEN,PER_PAIR in seconds of 0 or more, at most 1e9, such as 0.01,3.5e-5,1.3e-9"
    parts = text.split(",")
    if len(parts) != 3:
        raise ValueError(f"{text!r}: expected {expected}")
    cost = PrefillCost(*(_at_most(MOST_PREFILL_S, part, expected) for part in parts))
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


def _curves(path: str) -> tuple[str, Curves]:
    """With the file that they are of."""
    curves = read_json(path, repr(path), file="a JSON file of quality curves", content="quality curves")
    try:
        return path, Curves.from_json(curves)
    except ValueError as error:
        raise ValueError(f"{path!r}: {error}") from None
