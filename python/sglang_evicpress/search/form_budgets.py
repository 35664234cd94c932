"""Names of budgets in forms: a budget file's shares are read where a form has its path, and named there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from sglang_evicpress.core import CODECS, PYRAMID, UNIFORM
from sglang_evicpress.search.budget_file import BudgetFile, read_budget_file

Shares = dict[str, tuple[float, ...]]
"""Shares of the layers, by name of the budget."""


def name_budgets(forms: Sequence[str], default: str | None) -> tuple[list[str], Shares]:
    """The texts of ``forms`` with the name of a budget where they have the path of a file, and the shares of these.
    Those with a press and no budget get that of the file ``default``, if one is given. Raises ValueError for a file
    that cannot be read."""
    shares: Shares = {}

    def name_of(path: str) -> str:
        file = read_budget_file(path)
        name = budget_name(path, file)
        shares[name] = file.shares
        return name

    default_name = UNIFORM if default is None else name_of(default)
    return [_named(text, default_name, name_of) for text in forms], shares


def budget_name(path: str, file: BudgetFile) -> str:
    """Name of a file's budget in forms: that of the file, and 8 hex digits of its shares, so that other shares have
    another name."""
    stem = re.sub(r"[^0-9A-Za-z_-]", "_", Path(path).stem)[:40]
    return f"{stem}-{sha256(repr(file.shares).encode()).hexdigest()[:8]}"


def beside(text: str, folder: Path) -> str:
    """The text of a form, with the path of its budget file taken from ``folder`` and absolute."""
    base, _, codec = _parts(text)
    path = budget_path(text)
    return text.strip() if path is None else f"{base}:{(folder / path).resolve()}{codec}"


def budget_path(text: str) -> str | None:
    """The path of a form's budget file; None for a form without one."""
    path = _parts(text)[1]
    return None if path in ("", UNIFORM, PYRAMID) else path


def _parts(text: str) -> tuple[str, str, str]:
    """A form's text before its budget, the budget or empty, and ``+CODEC`` or empty, which is left before a budget."""
    base, colon, budget = text.strip().partition(":")
    path, plus, codec = budget.rpartition("+")  # a path may have a plus of its own
    return (base, path, plus + codec) if plus and codec in CODECS else (base, budget, "")


def _named(text: str, default_name: str, name_of: Callable[[str], str]) -> str:
    base, path, codec = _parts(text)
    if ":" not in text:
        press, plus, name = base.partition("+")
        is_whole = "@" not in press
        return base if is_whole or default_name == UNIFORM else f"{press}:{default_name}{plus}{name}"
    if path == UNIFORM:
        return f"{base}{codec}"
    if path == PYRAMID:
        return f"{base}:{path}{codec}"
    name, plus, _ = path.rpartition("+")
    if plus and name in (UNIFORM, PYRAMID):
        return text.strip()  # its codec is none: whoever reads the form says so
    try:
        if not path:
            raise ValueError("there is no budget behind ':'")
        return f"{base}:{name_of(path)}{codec}"
    except ValueError as error:
        raise ValueError(f"form {text.strip()!r:.100}: {error}; or {UNIFORM} or {PYRAMID} in its place") from None
