"""The arguments of questions to a running cache, checked one by one; errors name the value and what is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from sglang_evicpress.core import CODECS, Form, Tier
from sglang_evicpress.error_text import short_repr

MOST_ITEMS = 20_000
"""Most that one answer over HTTP lists, whatever limit it is asked with; ``next`` leads to the others."""
FIRST_ITEMS = {"tree": MOST_ITEMS, "outline": MOST_ITEMS, "journal": 100, "profiles": 10_000}
"""Items of an answer over HTTP that is asked for without a limit."""

PAGE_NODES = 100
PAGE_OUTLINE = 100
PAGE_DECISIONS = 200
PAGE_PROFILES = 200
PAGE_NUMBERS = 65_536
"""Most of each that one call describes; a page costs the scheduler at most a few milliseconds."""

Json: TypeAlias = dict[str, object]
MOST_SECONDS = 86_400
_INTEGER = re.compile(r"[0-9]{1,18}")  # below 2**63: what JSON encoders and tree ids agree on


class IntrospectionError(Exception):
    """A question that is refused, with the status and the one sentence that says why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason

    @property
    def body(self) -> Json:
        return {"error": {"reason": self.reason}}


def refused(arguments: Mapping[str, object], name: str, expected: str) -> IntrospectionError:
    """Status 400 for the argument ``name``."""
    what = f"is {short_repr(arguments[name])}" if name in arguments else "is missing"
    return IntrospectionError(400, f"{name} {what}: expected {expected}")


def accept_only(arguments: Mapping[str, object], *names: str) -> None:
    accepted = ", ".join(names) if names else "none"
    for name in arguments:
        if name not in names:
            raise IntrospectionError(400, f"argument {short_repr(name)} is not known here: accepted are {accepted}")


def integer(arguments: Mapping[str, object], name: str, *, least: int, default: int | None = None) -> int:
    """``default`` where it is left out, if there is one."""
    value = arguments.get(name, default)
    if isinstance(value, int | str) and not isinstance(value, bool) and _INTEGER.fullmatch(str(value)):
        number = int(value)
        if number >= least:
            return number
    raise refused(arguments, name, f"an integer >= {least} of at most 18 digits")


def name(arguments: Mapping[str, object], name: str) -> str | None:
    """A text, None where it is left out."""
    value = arguments.get(name)
    if value is None or (isinstance(value, str) and value):
        return value
    raise refused(arguments, name, "a text, or nothing")


def flag(arguments: Mapping[str, object], name: str) -> bool:
    value = arguments.get(name, False)
    if value is True or value in ("true", "1"):
        return True
    if value is False or value in ("false", "0"):
        return False
    raise refused(arguments, name, "true or false")


def form(arguments: Mapping[str, object], name: str) -> Form:
    """A form that the GPU holds, where KV is raw."""
    return _lossy_form(arguments, name, Form.parse)


def stored_form(arguments: Mapping[str, object], name: str) -> Form:
    """A form, perhaps with a codec."""
    return _lossy_form(arguments, name, Form.parse_stored)


def codec(arguments: Mapping[str, object], name: str) -> str:
    for codec in CODECS:
        if arguments.get(name) == codec:
            return codec
    raise refused(arguments, name, f"one of {', '.join(CODECS)}")


def _lossy_form(arguments: Mapping[str, object], name: str, parse: Callable[[str], Form]) -> Form:
    text = arguments.get(name)
    if not isinstance(text, str):
        raise refused(arguments, name, "a string such as 'keydiff@0.5'")
    try:
        form = parse(text)
    except ValueError as error:
        raise IntrospectionError(400, str(error)) from None
    if form.is_exact:
        raise IntrospectionError(400, "form 'exact' compresses nothing: expected one such as keydiff@0.5")
    return form


def tier(arguments: Mapping[str, object], name: str, *, accepted: Sequence[Tier]) -> Tier:
    for tier in accepted:
        if arguments.get(name) == tier.label:
            return tier
    raise refused(arguments, name, f"one of {', '.join(tier.label for tier in accepted)}")


def folder(arguments: Mapping[str, object], name: str) -> str:
    folder = arguments.get(name)
    if isinstance(folder, str) and folder.startswith("/") and "\0" not in folder:
        return folder
    raise refused(arguments, name, "the absolute path of a folder on the machine of the server")


def gigabytes(arguments: Mapping[str, object], name: str) -> float:
    value = arguments.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e9:
        return float(value)
    raise refused(arguments, name, "a number of GB (1e9 bytes) above 0, up to 1e9")


def seconds(arguments: Mapping[str, object], name: str, *, default: float) -> float:
    """A duration of at most a day; ``default`` where it is left out."""
    value = arguments.get(name, default)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_SECONDS:
        return float(value)
    raise refused(arguments, name, f"a number of seconds from 0 to {MOST_SECONDS}")
