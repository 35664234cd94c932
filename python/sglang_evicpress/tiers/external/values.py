"""Engines of the external store: they keep values under keys, and may lose them at any time."""

from __future__ import annotations

from typing import Protocol


class Values(Protocol):
    """Values by key. Each call may take any time and raise OSError; safe to call from several threads."""

    name: str
    """As users know the engine."""

    def has(self, key: str) -> bool:
        """True if there is a value under that key."""
        ...

    def put(self, key: str, value: memoryview) -> bool:
        """Keep a value under a key that has none; one that it has stays. False where there is no room for it."""
        ...

    def get(self, key: str, target: memoryview) -> bool:
        """Fill ``target`` with the value of that many bytes; False where there is none. Raises BadEntry for a value
        of another size, if the engine can tell."""
        ...

    def close(self) -> None:
        """Let go of the engine."""
        ...
