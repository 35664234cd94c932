"""``evicpress profile show``: the profiles of a server, and the curves of one of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from sglang_evicpress.cli.output import print_result
from sglang_evicpress.cli.parser import Parser
from sglang_evicpress.cli.profile.connection import ADMIN_KEY_VARIABLE, KEY_VARIABLE, connect
from sglang_evicpress.cli.profile.offline import PROFILES, profile_of
from sglang_evicpress.cli.profile.plot import about, plot, when
from sglang_evicpress.core import Form
from sglang_evicpress.profiler.engine import EngineError
from sglang_evicpress.profiler.transport import Transport
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.tables import aligned

_NUM_NAMED = 5
_EPILOG = """Exit status: 0 shown, 2 bad input, no such context or no server.
"""


@dataclass(frozen=True, slots=True)
class Listed:
    """A profile in the server's list."""

    key: str
    num_tokens: int
    num_forms: int
    scorer: str
    num_queries: int
    measured_s: float


def make_parser() -> Parser:
    parser = Parser.of(
        "profile show", "List the profiles of a server, or plot the quality of one context's forms.", _EPILOG
    )
    parser.add_argument("key", metavar="HASH", nargs="?", help="of a context; its first digits are enough")
    parser.add_argument("--url", metavar="URL", required=True, help="of a server, such as http://127.0.0.1:30000")
    parser.add_argument("--api-key", metavar="KEY", help=f"of the server; default: the variable {KEY_VARIABLE}")
    parser.add_argument("--admin-api-key", metavar="KEY", help=f"if it has one; default: {ADMIN_KEY_VARIABLE}")
    parser.add_json()
    return parser


def show(argv: Sequence[str]) -> int:
    """Run ``evicpress profile show`` and give its exit status. Raises ValueError."""
    args = make_parser().parse_args(argv)
    try:
        transport = connect(args.url, args.api_key, args.admin_api_key)
        answer = transport.ask("GET", PROFILES)
        try:
            listed = TypeAdapter(list[Listed]).validate_python(answer.get("profiles"))
        except ValidationError as error:
            raise EngineError(f"GET {PROFILES} answered {answer!r:.200}: {error.errors()[0]['msg']}") from None
        if args.key is None:
            print_result(args, answer, _table(listed, str(answer.get("identity"))))
            return 0
        profile, expected = _read(transport, _find(args.key, [each.key for each in listed]))
    except EngineError as error:
        raise ValueError(str(error)) from None
    document = {**profile.to_json(), "expected": {str(form): quality for form, quality in expected.items()}}
    print_result(args, document, [*about(profile), "", *plot(profile), "", *_figures(profile, expected)])
    return 0


def _read(transport: Transport, key: str) -> tuple[Profile, Mapping[Form, float]]:
    """The profile, and per form the quality that a policy goes by."""
    answer = transport.ask("GET", f"{PROFILES}/{key}")
    profile, curve = profile_of(answer, key), answer.get("curve", {})
    try:
        return profile, {form: float(curve[str(form)]["expected"]) for form in profile.forms}
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"GET {PROFILES}/{key} answered curve {curve!r:.200}: {error!r}") from None


def _find(start: str, keys: Sequence[str]) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{1,32}", start):
        raise ValueError(f"{start!r:.100} is no hash: expected up to 32 hex digits")
    found = [key for key in keys if key.startswith(start.lower())]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(f"no context of {len(keys)} begins with {start}: `evicpress profile show` lists them")
    named = f"{', '.join(found[:_NUM_NAMED])}{', ...' if len(found) > _NUM_NAMED else ''}"
    raise ValueError(f"{len(found)} contexts begin with {start}: expected one of {named}")


def _table(listed: Sequence[Listed], model: str) -> list[str]:
    if not listed:
        return ["no profiles"]
    rows = [["context", "tokens", "forms", "scorer", "queries", "measured", "model"]]
    for each in listed:
        counts = str(each.num_tokens), str(each.num_forms), each.scorer, str(each.num_queries)
        rows.append([each.key[:12], *counts, when(each.measured_s), model[:8]])
    return aligned(rows)


def _figures(profile: Profile, expected: Mapping[Form, float]) -> list[str]:
    rows = [["form", "quality", "std", "count", "expected"]]
    by_size = sorted(profile.forms.items(), key=lambda item: (-item[0].kept_fraction, -item[1].mean))
    for form, seen in by_size:
        spread = f"{math.sqrt(seen.variance):.3f}"
        rows.append([str(form), f"{seen.mean:.3f}", spread, f"{seen.count:g}", f"{expected[form]:.3f}"])
    return aligned(rows)
