"""``evicpress profile show``: the profiles of a server or a store, and the curves of one of them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sglang_evicpress.cli.profile.connection import ADMIN_KEY_VARIABLE, KEY_VARIABLE, connect
from sglang_evicpress.cli.profile.offline import PROFILES, profile_of
from sglang_evicpress.cli.profile.plot import about, plot, png, when
from sglang_evicpress.core import Form
from sglang_evicpress.files import check_output, write_whole
from sglang_evicpress.profiler.engine import EngineError
from sglang_evicpress.profiler.transport import Transport
from sglang_evicpress.quality.catalog import Catalog
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.store import StoreError, read_all
from sglang_evicpress.tables import aligned

_NUM_NAMED = 5


@dataclass(frozen=True, slots=True)
class Listed:
    """A profile in short. ``model`` is the hex identity of its model."""

    key: str
    model: str
    num_tokens: int
    num_forms: int
    scorer: str
    num_queries: int
    measured_s: float


class Source(Protocol):
    """Source of profiles."""

    def listed(self) -> list[Listed]: ...

    def read(self, key: str) -> tuple[Profile, Mapping[Form, float]]:
        """The profile, and per form what its quality is hardly below: what a policy goes by."""


@dataclass(frozen=True, slots=True)
class Server:
    """Profiles of a running server. Everything raises EngineError."""

    transport: Transport

    def listed(self) -> list[Listed]:
        answer = self.transport.ask("GET", PROFILES)
        names = [name for name in Listed.__slots__ if name != "model"]
        try:
            model = answer["identity"]
            return [Listed(model=model, **{name: each[name] for name in names}) for each in answer["profiles"]]
        except (KeyError, TypeError) as error:
            raise EngineError(f"GET {PROFILES} answered {answer!r:.200}: {error!r}") from None

    def read(self, key: str) -> tuple[Profile, Mapping[Form, float]]:
        answer = self.transport.ask("GET", f"{PROFILES}/{key}")
        profile = profile_of(answer, key)
        curve: Any = answer.get("curve", {})
        try:
            return profile, {form: float(curve[str(form)]["lower_bound"]) for form in profile.forms}
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"GET {PROFILES}/{key} answered curve {curve!r:.200}: {error!r}") from None


class Stored:
    """Profiles in a file of a ``ProfileStore``, of every model. Changes nothing; raises ValueError and StoreError."""

    def __init__(self, path: Path) -> None:
        self._profiles = read_all(path)

    def listed(self) -> list[Listed]:
        return [
            Listed(
                each.key.hex(), model, each.num_tokens, len(each.forms), each.scorer, each.num_queries, each.measured_s
            )
            for model, each in self._profiles
        ]

    def read(self, key: str) -> tuple[Profile, Mapping[Form, float]]:
        model, profile = next(pair for pair in self._profiles if pair[1].key.hex() == key)
        catalog = Catalog(None, max_profiles=len(self._profiles))
        for other, each in self._profiles:
            if other == model:
                catalog.put(each)
        curves = catalog.curves_of(profile.key)
        return profile, {form: curves.quality(form) for form in profile.forms}


def show(argv: Sequence[str], make_parser: Callable[..., argparse.ArgumentParser]) -> int:
    """Run ``evicpress profile show`` and give its exit status. Raises ValueError."""
    parser = make_parser(
        prog="evicpress profile show",
        description="List the profiles of a server or a file, or plot the quality of one context's forms.",
        allow_abbrev=False,
    )
    parser.add_argument("key", metavar="HASH", nargs="?", help="of a context; its first digits are enough")
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument("--url", metavar="URL", help="of a server, such as http://127.0.0.1:30000")
    sources.add_argument("--store", metavar="FILE", type=Path, help="what --kv-profile-path was; it is not changed")
    parser.add_argument("--png", metavar="FILE", help="draw there; needs sglang-evicpress[plot]")
    parser.add_argument("--api-key", metavar="KEY", help=f"of the server; default: the variable {KEY_VARIABLE}")
    parser.add_argument("--admin-api-key", metavar="KEY", help=f"if it has one; default: {ADMIN_KEY_VARIABLE}")
    args = parser.parse_args(argv)
    if args.png is not None:
        _check_png(args.png, has_key=args.key is not None)
    try:
        source: Source = (
            Server(connect(args.url, args.api_key, args.admin_api_key)) if args.store is None else Stored(args.store)
        )
        listed = source.listed()
        if args.key is None:
            print("\n".join(_table(listed)))
            return 0
        profile, bounds = source.read(_find(args.key, listed))
    except (EngineError, StoreError) as error:
        raise ValueError(str(error)) from None
    if args.png is not None:
        write_whole(args.png, png(profile))
        return 0
    print("\n".join([*about(profile), "", *plot(profile), "", *_figures(profile, bounds)]))
    return 0


def _check_png(path: str, *, has_key: bool) -> None:
    if not has_key:
        raise ValueError("--png: expected HASH too, the context to draw")
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"--png: {path!r}: expected a path that ends in .png")
    try:
        check_output(path)
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError(f"--png: {path!r} needs matplotlib: pip install 'sglang-evicpress[plot]'") from None
    except ValueError as error:
        raise ValueError(f"--png: {error}") from None


def _find(start: str, listed: Sequence[Listed]) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{1,32}", start):
        raise ValueError(f"{start!r:.100} is no hash: expected up to 32 hex digits")
    found = [each.key for each in listed if each.key.startswith(start.lower())]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(f"no context of {len(listed)} begins with {start}: `evicpress profile show` lists them")
    named = f"{', '.join(found[:_NUM_NAMED])}{', ...' if len(found) > _NUM_NAMED else ''}"
    raise ValueError(f"{len(found)} contexts begin with {start}: expected one of {named}")


def _table(listed: Sequence[Listed]) -> list[str]:
    if not listed:
        return ["no profiles"]
    rows = [["context", "tokens", "forms", "scorer", "queries", "measured", "model"]]
    for each in listed:
        rows.append(
            [
                each.key[:12],
                str(each.num_tokens),
                str(each.num_forms),
                each.scorer,
                str(each.num_queries),
                when(each.measured_s),
                each.model[:8],
            ]
        )
    return aligned(rows)


def _figures(profile: Profile, bounds: Mapping[Form, float]) -> list[str]:
    rows = [["form", "quality", "std", "count", "lower bound"]]
    by_size = sorted(profile.forms.items(), key=lambda item: (-item[0].kept_fraction, -item[1].mean))
    for form, seen in by_size:
        spread = f"{math.sqrt(seen.variance):.3f}"
        rows.append([str(form), f"{seen.mean:.3f}", spread, f"{seen.count:g}", f"{bounds[form]:.3f}"])
    return aligned(rows)
