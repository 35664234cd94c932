"""Finding of ``evicpress doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """``what`` was looked at, what was ``found``, and the ``fix`` where it is not as it should be. "note" is neither
    good nor bad."""

    what: str
    state: Literal["ok", "note", "FAILED"]
    found: str
    fix: str = ""

    def lines(self) -> Iterator[str]:
        yield f"{self.state:<6}  {self.what}: {self.found}"
        if self.fix:
            yield f"        {self.fix}"
