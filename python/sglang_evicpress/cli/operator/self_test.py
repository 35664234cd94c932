"""Test of a running server: a prompt is cached, compressed, moved to host memory and used again."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Container, Iterator, Sequence

from sglang_evicpress.cli.operator.finding import Finding
from sglang_evicpress.cli.operator.server import Json, Server
from sglang_evicpress.cli.operator.tree import all_nodes

NUM_TOKENS = 256
LEAST_TOKEN, NUM_IDS = 10, 200  # in every vocabulary
NEW_TOKENS = 4
MOVE_S = 10.0
HOLD_S = 60


def self_test(server: Server) -> Iterator[Finding]:
    """One finding for each step; the first that fails is the last one."""
    try:
        yield from _steps(server)
    except ValueError as error:
        yield Finding("self-test", "FAILED", str(error), "see the server's log")


def _steps(server: Server) -> Iterator[Finding]:
    stats = server.get("stats")
    yield Finding("server", "ok", f"policy {stats['policy']}, {stats['num_nodes']} nodes, {stats['total_slots']} slots")
    prompt = [LEAST_TOKEN + secrets.randbelow(NUM_IDS) for _ in range(NUM_TOKENS)]
    name = f"doctor-{secrets.token_hex(8)}"
    known = {node["namespace"] for node in all_nodes(server)}
    exact = _ask(server, prompt, name)
    namespace = _own_namespace(server, known)
    node = max(_nodes_in(server, namespace), key=lambda node: int(node["num_tokens"]))
    yield Finding("self-test: cached", "ok", f"node {node['id']} of {node['num_tokens']} tokens")

    raw = [form for form in stats["forms"] if form != "exact" and "+" not in form]
    if raw:
        server.post(f"nodes/{node['id']}/compress", {"form": raw[-1], "hold_seconds": HOLD_S})
        after = _node(server, node["id"])
        if after["form"] != raw[-1] or after["num_slots"] >= node["num_slots"]:
            yield Finding("self-test: compressed", "FAILED", f"the node holds {after['form']}, not {raw[-1]}")
            return
        yield Finding(
            "self-test: compressed", "ok", f"{node['num_slots']} slots became {after['num_slots']} as {raw[-1]}"
        )
    else:
        yield Finding("self-test: compressed", "note", "no form on the menu keeps fewer tokens")

    tiers = server.get("tiers")["tiers"]
    if "host" in tiers:
        for below in reversed(_nodes_in(server, namespace)):  # children first
            server.post(f"nodes/{below['id']}/demote", {"tier": "host", "hold_seconds": HOLD_S})
        if not _waits(server, node["id"], "host"):
            yield Finding("self-test: moved to host memory", "FAILED", f"not within {MOVE_S:g} s")
            return
        yield Finding("self-test: moved to host memory", "ok", f"node {node['id']}")
    else:
        yield Finding("self-test: moved to host memory", "note", "this server has no host tier")

    again = _ask(server, prompt, name)
    cached, served = again["cached_tokens"], again.get("kv_cache", {})
    found = f"{cached} of {NUM_TOKENS} tokens from the cache, {served.get('lossy_tokens', 0)} of them lossy"
    if cached:
        yield Finding("self-test: used again", "ok", found)
    else:
        fix = "what is compressed is served as far as --kv-quality allows, so this may be right: try again"
        yield Finding("self-test: used again", "note" if raw else "FAILED", found, fix)
    if not raw and again["output_ids"] != exact["output_ids"]:
        yield Finding("self-test: the same answer", "FAILED", "exact KV gave another answer")
    violations: Sequence[str] = server.post("check", {})["violations"]
    if violations:
        yield Finding("self-test: invariants", "FAILED", "; ".join(violations))
    else:
        yield Finding("self-test: invariants", "ok", "all hold")


def _ask(server: Server, prompt: Sequence[int], name: str) -> Json:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    answer = server.generate({"input_ids": [prompt], "sampling_params": sampling, "extra_key": [name]})
    return {**answer["meta_info"], "output_ids": answer.get("output_ids")}


def _own_namespace(server: Server, known: Container[str | None]) -> str:
    """The namespace of the prompt that was just asked, as the tree shows it: one that was not there before and has as
    many tokens. Users' nodes are never touched. Raises ValueError where it cannot be told."""
    tokens = Counter[str]()
    for node in all_nodes(server):
        if node["namespace"] is not None and node["namespace"] not in known:
            tokens[node["namespace"]] += node["num_tokens"]
    found = [name for name, number in tokens.items() if NUM_TOKENS // 2 <= number <= NUM_TOKENS + NEW_TOKENS]
    if not found:
        raise ValueError("the prompt is not in the tree: is --disable-radix-cache set?")
    if len(found) > 1:
        raise ValueError("a user's request of as many tokens came in a new namespace meanwhile: try again")
    return found[0]


def _nodes_in(server: Server, namespace: str) -> list[Json]:
    """Parents first."""
    return [node for node in all_nodes(server) if node["namespace"] == namespace]


def _node(server: Server, node_id: int) -> Json:
    return server.get(f"nodes/{node_id}")


def _waits(server: Server, node_id: int, tier: str) -> bool:
    """True once the node is on the tier."""
    deadline_s = time.monotonic() + MOVE_S
    while time.monotonic() < deadline_s:
        if _node(server, node_id)["tier"] == tier:
            return True
        time.sleep(0.1)
    return False
