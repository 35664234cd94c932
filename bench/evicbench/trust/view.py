"""A router's view of one server, rebuilt from its KV events, and what is wrong with these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

MEDIA = {"gpu": "GPU", "host": "CPU_PINNED", "ssd": "DISK"}
"""How events name our tiers, as SGLang names its own."""

Event: TypeAlias = dict[str, object]
"""An event as it is on the wire, its fields by name."""

_FIELDS = {
    "BlockStored": ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("type", "block_hashes", "medium"),
    "AllBlocksCleared": ("type",),
}
"""Fields of the releases that send a list."""


def named(event: Event | Sequence[object]) -> Event:
    """An event by the names of its fields: the first releases sent lists."""
    if isinstance(event, dict):
        return event
    return dict(zip(_FIELDS[str(event[0])], event, strict=False))


def _numbers(event: Event) -> list[int]:
    blocks = event["block_hashes"]
    return [int(block) for block in blocks] if isinstance(blocks, list) else []


def _pages(event: Event) -> list[tuple[int, ...]]:
    tokens, size = event["token_ids"], event["block_size"]
    if not isinstance(tokens, list) or not isinstance(size, int):
        return []
    return [tuple(tokens[begin : begin + size]) for begin in range(0, len(tokens), size)]


def path_of(above: object, page: tuple[int, ...]) -> int:
    """A number for the tokens down to a page; ``above`` is that of the page before, or a salt, or None."""
    return hash((above, page))


class BlockView:
    """Blocks by medium. ``problems``: events that a router cannot follow."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {medium: set() for medium in MEDIA.values()}
        self.links: dict[int, int | None] = {}
        self.paths: dict[int, int] = {}
        self.problems: list[str] = []
        self.num_events = 0

    def apply(self, events: Iterable[Event | Sequence[object]]) -> None:
        for event in map(named, events):
            self.num_events += 1
            if event["type"] == "AllBlocksCleared":
                for blocks in self.blocks.values():
                    blocks.clear()
                self.links.clear()
                self.paths.clear()
                continue
            medium = str(event["medium"])
            (self._store if event["type"] == "BlockStored" else self._remove)(event, medium)

    def _store(self, event: Event, medium: str) -> None:
        before = event.get("parent_block_hash")
        parent = int(before) if isinstance(before, int) else None
        if parent is not None and parent not in self.links:
            self.problems.append(f"block {_numbers(event)[0]} on {medium} follows {parent}, of which nothing was told")
        elif parent is not None and medium == MEDIA["gpu"] and parent not in self.blocks[medium]:
            self.problems.append(f"block {_numbers(event)[0]} follows {parent}, which is not on {medium}")
        pages = _pages(event)
        for number, block in enumerate(_numbers(event)):
            if self.links.setdefault(block, parent) != parent:
                self.problems.append(f"block {block} follows {self.links[block]} and {parent}")
            self.paths[block] = path_of(self.paths.get(parent or 0, event.get("cache_salt")), pages[number])
            self.blocks[medium].add(block)
            parent = block

    def _remove(self, event: Event, medium: str) -> None:
        for block in _numbers(event):
            if block not in self.links:  # blocks of equal tokens in two namespaces may have one name
                self.problems.append(f"block {block} left {medium}, and nothing was told of it before")
            self.blocks[medium].discard(block)

    def paths_on(self, medium: str) -> set[int]:
        """Blocks that are stored there, by the tokens that lead to them."""
        return {self.paths[block] for block in self.blocks[medium]}

    def differences(self, expected: dict[str, set[int]]) -> list[str]:
        """Blocks that are missing or too many beside ``expected``, by medium."""
        found = []
        for medium, blocks in self.blocks.items():
            wanted = expected.get(medium, set())
            if lacks := len(wanted - blocks):
                found.append(f"{lacks} blocks on {medium} were not told of")
            if extra := len(blocks - wanted):
                found.append(f"{extra} blocks are not on {medium} any more")
        return found
