"""Nodes of a running server's cache, moved down its tiers by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from evicbench.testbed.server import Server

IDLE_S = 60.0
TRIES = 20

Shown = dict[str, Any]


def nodes_of(server: Server) -> list[Shown]:
    """Every node of the tree, parents before their children."""
    found: list[Shown] = server.get("/evicpress/tree")["nodes"]
    return found


def push_down(
    server: Server, tier: str, is_chosen: Callable[[Shown], bool] = lambda node: True, codec: str | None = None
) -> None:
    """Move nodes to a lower tier, children first, as a codec stores them. A node is passed over that is locked, dropped
    meanwhile, there already, or above whose children are not. Raises ServerError for any other refusal."""
    for node in filter(is_chosen, reversed(nodes_of(server))):
        path = f"/evicpress/nodes/{node['id']}/demote"
        body = {"tier": tier, "hold_seconds": 0} | ({} if codec is None else {"codec": codec})
        status, said = server.request("POST", path, body)
        if status not in (200, 404, 409):
            raise server.error(f"demotion to {tier} answered {status}: {said}")


def push_all(server: Server, tier: str, codec: str | None = None) -> list[int]:
    """Put every node on a tier and nowhere above; the ids of those that stay elsewhere."""
    above: list[int] = []
    for _ in range(TRIES):
        wait_until_idle(server)
        push_down(server, tier, codec=codec)
        wait_until_idle(server)
        above = [node["id"] for node in nodes_of(server) if node["tier"] != tier]
        if not above:
            break
    return above


def wait_until_idle(server: Server) -> None:
    """Until no copy is on its way. Raises ServerError after ``IDLE_S``."""
    deadline = time.monotonic() + IDLE_S
    while any(server.get("/evicpress/tiers")["queue"].values()):
        if time.monotonic() > deadline:
            raise server.error(f"copies still wait after {IDLE_S:g} s")
        time.sleep(0.02)


def sources(answer: Any) -> dict[str, int]:
    """Numbers of tokens of a prompt that came from "device", "host" and "storage"."""
    return dict(answer["meta_info"].get("cached_tokens_details") or {})
