"""Progress of a long run and its remaining time; tqdm is imported only when it is shown."""

from __future__ import annotations

import sys
from typing import Any, Self


class Progress:
    """A bar on stderr over ``num_steps`` of ``unit``; without ``is_shown`` only what is said appears there."""

    def __init__(self, num_steps: int, unit: str, *, is_shown: bool) -> None:
        self._bar: Any = None
        if is_shown:
            from tqdm import tqdm  # type: ignore[import-untyped]

            # By the mean rate so far: one kind of step takes longer than another, and starting servers takes time too.
            # Drawn seldom, as a measured server may share the processor.
            self._bar = tqdm(
                total=num_steps, leave=False, unit=f" {unit}", file=sys.stderr, smoothing=0, mininterval=1.0
            )

    def name(self, text: str) -> None:
        """Name the present work."""
        if self._bar is not None:
            self._bar.set_description(text)

    def step(self, num_steps: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(num_steps)

    def leave_out(self, num_steps: int) -> None:
        """So many steps will not be done: they took no time, and say nothing of how long the others take."""
        if self._bar is not None:
            self._bar.total -= num_steps
            self._bar.refresh()

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(f"evicpress: {text}", file=sys.stderr, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
