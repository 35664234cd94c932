"""Slots and bytes of a server without running requests, added up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

GRANULE_BYTES = 4096
"""Host entries are rounded up to it."""

Shown = Mapping[str, Any]


def at_rest(stats: Shown, tiers: Shown) -> Iterator[str]:
    """Slots and bytes that nobody has, in words: every slot is free, or held by nodes, and no tier holds more entries
    than its nodes have copies, or fewer bytes than these. The profiler may have a request of its own."""
    held = {name: stats[f"{name}_slots"] for name in ("free", "evictable", "protected", "in_flight")}
    if sum(held.values()) != stats["total_slots"]:
        yield f"slots {held} are not {stats['total_slots']}"
    if not stats["shadow_slots"] and held["protected"] + held["in_flight"]:
        yield f"{held['protected']} protected and {held['in_flight']} slots in flight, and no request"
    yield from (f"{count} jobs to {name}" for name, count in tiers["queue"].items() if count)
    if count := tiers["requests_waiting_for_a_copy"]:
        yield f"{count} requests wait for a copy"
    host = tiers["tiers"]["host"]
    stored = sum(form["bytes"] for form in host["forms"].values())
    num_copies = sum(form["nodes"] for form in host["forms"].values())
    if host["used_bytes"] < stored:
        yield f"host copies of {stored} bytes in {host['used_bytes']}"
    if host["num_entries"] > num_copies:
        yield f"{host['num_entries']} host entries for {num_copies} copies"
    if host["copying_bytes"]:
        yield f"{host['copying_bytes']} host bytes on their way"
    for name, tier in tiers["tiers"].items():
        if tier["used_bytes"] > tier["capacity_bytes"]:
            yield f"{tier['used_bytes']} of {tier['capacity_bytes']} bytes of {name}"


def after_flush(stats: Shown, tiers: Shown) -> Iterator[str]:
    """Leftovers of a cache that was emptied, in words."""
    host, ssd = tiers["tiers"]["host"], tiers["tiers"]["ssd"]
    left = {
        "slots": stats["total_slots"] - stats["free_slots"],
        "nodes": stats["num_nodes"],
        "host bytes": host["used_bytes"],
        "host entries": host["num_entries"],
        "bytes being copied": host["copying_bytes"],
        "SSD entries": ssd["num_entries"],
        "requests waiting for a copy": tiers["requests_waiting_for_a_copy"],
        "jobs": sum(tiers["queue"].values()),
    }
    yield from (f"{count} {what} left" for what, count in left.items() if count)
