"""The page, with the headers that keep it to itself."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = "page.html"


@dataclass(frozen=True, slots=True)
class Page:
    """``body`` is UTF-8 HTML. ``headers``: its own script and style run, named by their hashes, it asks the server that
    it comes from, and nothing else; nobody may frame it."""

    body: bytes
    headers: Mapping[str, str]


@cache
def read_page() -> Page:
    """The page from the package, read once."""
    body = Path(__file__).with_name(FILE).read_bytes()
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(body, "script"),
        "style-src": _hashes(body, "style"),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return Page(
        body,
        {
            "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


def _hashes(body: bytes, tag: str) -> str:
    """What is within every such tag, as a source of a Content-Security-Policy."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(inner).digest()).decode()}'" for inner in found)
