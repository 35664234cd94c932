"""A router's view of real servers: KV events against the tree, and SGLang's own router in front of two servers."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from evicbench.moves import nodes_of, push_down, wait_until_idle
from evicbench.report import Line
from evicbench.testbed.server import GUESSED, Server, ServerError, free_port
from evicbench.tiers.restart import Stoppable
from evicbench.trust.view import MEDIA, BlockView, path_of

NUM_STEPS, COMPARE_EVERY = 240, 12
SALT = "a salt"
QUIET_S = 0.5
DRAIN_S = 60.0


class Subscriber:
    """Follows a server's events from its start on."""

    def __init__(self, port: int) -> None:
        self.view, self._socket = BlockView(), zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._next = 0  # batch; a server tells of its empty cache before anybody listens

    def follow(self, wait_s: float = QUIET_S) -> BlockView:
        """Apply what has come, until nothing more does."""
        while self._socket.poll(1000 * wait_s):
            _, number, payload = self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if self._next and sequence != self._next:
                self.view.problems.append(f"batches {self._next} to {sequence - 1} were lost")
            self._next = sequence + 1
            self.view.apply(msgspec.msgpack.decode(payload)[1])
        return self.view

    def close(self) -> None:
        self._socket.close()


def flags(port: int, ssd: Path, *more: str) -> tuple[str, ...]:
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{port}", "buffer_steps": 100_000, "hwm": 0}
    return (
        *("--kv-policy", "evicpress", *GUESSED, "--kv-events-config", json.dumps(config), "--skip-tokenizer-init"),
        *("--page-size", "4", "--max-total-tokens", "4000", "--kv-host-gb", "0.016", "--kv-ssd-dir", str(ssd)),
        *("--kv-ssd-gb", "0.1", *more),
    )


def paths_of(server: Server) -> dict[str, set[int]]:
    """Blocks that the tree has on every tier, by the tokens that lead to them."""
    page, found = server.get("/evicpress/tree")["page_size"], {medium: set[int]() for medium in MEDIA.values()}
    ends: dict[int, int] = {}
    for node in nodes_of(server):
        above: object = ends.get(node["parent_id"] or 0, SALT if node["namespace"] else None)
        tokens, names = server.get(f"/evicpress/nodes/{node['id']}?tokens=true")["token_ids"], []
        for begin in range(0, len(tokens), page):
            above = path_of(above, tuple(tokens[begin : begin + page]))
            names.append(above)
        ends[node["id"]] = names[-1]
        if not node["is_shadow"]:
            for tier in {*node["copies"], *(["gpu"] if node["tier"] == "gpu" else [])}:
                found[MEDIA[tier]].update(names)
    return found


def differences(server: Server, subscriber: Subscriber) -> list[str]:
    """Between the view and the tree of an idle server, after some time for its last events."""
    wait_until_idle(server)
    deadline = time.monotonic() + DRAIN_S
    while True:
        view = subscriber.follow()
        try:
            tree = paths_of(server)
        except ServerError:
            if time.monotonic() > deadline:
                raise
            continue  # a node went while the others were looked at: profiling makes some of its own
        found = [
            f"{medium}: {len(tree[medium] - paths)} blocks were not told of, {len(paths - tree[medium])} are gone"
            for medium in MEDIA.values()
            if (paths := view.paths_on(medium)) != tree[medium]
        ]
        if not found or time.monotonic() > deadline:
            return found


def storm(server: Server, subscriber: Subscriber, rng: random.Random, num_steps: int) -> tuple[Counter[str], list[str]]:
    """Requests, moves, evictions and flushes in random order: what was done, and where the view is not the tree."""
    done, problems = Counter[str](), []
    documents = [[rng.randrange(10, 200) for _ in range(rng.randrange(200, 900))] for _ in range(14)]
    for step in range(num_steps):
        action = rng.choices(("ask", "ask salted", "demote", "evict", "flush a tier", "flush"), (70, 8, 14, 6, 2, 1))[0]
        done[action] += 1
        if action.startswith("ask"):
            document = rng.choice(documents)
            prompt = document[: rng.randrange(50, len(document))] + [rng.randrange(10, 200) for _ in range(8)]
            server.generate(prompt, 2, **({"cache_salt": SALT} if action == "ask salted" else {}))
        elif action == "demote":
            chosen = {node["id"] for node in nodes_of(server) if rng.random() < 0.3}
            push_down(server, rng.choice(("host", "ssd")), lambda node, chosen=chosen: node["id"] in chosen)
        elif action == "evict":
            server.request("POST", "/evicpress/evict", {"num_slots": rng.randrange(100, 2000)})
        elif action == "flush a tier":
            server.request("POST", f"/evicpress/flush?tier={rng.choice(('gpu', 'host', 'ssd'))}")
        else:
            server.flush()
        if step % COMPARE_EVERY == COMPARE_EVERY - 1 or action == "flush":
            problems += [f"step {step}, after {action}: {each}" for each in differences(server, subscriber)]
            done["compared"] += 1
    return done, problems + subscriber.view.problems


def measure_view(num_steps: int = NUM_STEPS, seed: int = 0) -> Iterator[Line]:
    rng = random.Random(f"view-{seed}")
    with tempfile.TemporaryDirectory() as folder:
        ssd, port = Path(folder) / "ssd", free_port()
        with Stoppable(*flags(port, ssd)) as server:
            subscriber = Subscriber(port)
            time.sleep(QUIET_S)
            done, problems = storm(server, subscriber, rng, num_steps)
            context = [rng.randrange(10, 200) for _ in range(800)]
            server.generate(context, 1)
            push_down(server, "ssd")
            wait_until_idle(server)
            server.end(signal.SIGTERM)
            subscriber.close()
        counts, num_events = dict(done), subscriber.view.num_events
        yield Line(
            f"KV events: a router's view and the tree through {num_steps} requests, moves and flushes",
            "the same blocks on GPU, host RAM and SSD every time, each told after the one that it follows",
            f"{counts}, {num_events} events; {len(problems)} problems"
            + (f", first: {problems[0]}" if problems else ""),
            not problems and done["compared"] > 0,
        )
        port = free_port()
        with Stoppable(*flags(port, ssd)) as server:
            subscriber = Subscriber(port)
            time.sleep(QUIET_S)
            answer = server.generate(context, 1)
            problems = differences(server, subscriber) + subscriber.view.problems
            num_found = len(subscriber.view.paths_on(MEDIA["ssd"]))
            subscriber.close()
        yield Line(
            "KV events of a restarted server, asked for a context that its SSD has",
            "what is found again is told of, and the view is the tree",
            f"{answer['meta_info']['cached_tokens']} of 800 tokens cached, {num_found} blocks told of on SSD; "
            f"{_said(problems)}",
            not problems and num_found > 0 and answer["meta_info"]["cached_tokens"] > 0,
        )


def _said(problems: Sequence[str]) -> str:
    return f"{len(problems)} problems" + (f", first: {problems[0]}" if problems else "")


def router_command() -> str:
    """SGLang's router. Raises RuntimeError where it is not installed."""
    found = os.environ.get("EVICPRESS_ROUTER") or shutil.which("sglang-router", path=str(Path(sys.executable).parent))
    if not found:
        raise RuntimeError("SGLang's router is not installed: pip install sglang-router, or EVICPRESS_ROUTER names it")
    return found


def measure_router(num_contexts: int = 12, num_rounds: int = 4, seed: int = 0) -> Iterator[Line]:
    """Requests with equal prefixes, through the router, to two servers each of which cannot hold all contexts."""
    command, rng = router_command(), random.Random(f"router-{seed}")
    arguments = ("--kv-policy", "evicpress", *GUESSED, "--max-total-tokens", "6000", "--kv-host-gb", "0.016")
    words = [f"word{number}" for number in range(400)]
    contexts = [" ".join(rng.choices(words, k=150)) for _ in range(num_contexts)]
    with Server(*arguments) as one, Server(*arguments) as other, tempfile.TemporaryFile() as log:
        port, metrics = free_port(), free_port()
        urls = [f"http://127.0.0.1:{server.port}" for server in (one, other)]
        router = subprocess.Popen(
            [
                *(command, "launch", "--worker-urls", *urls, "--policy", "cache_aware", "--port", str(port)),
                *("--prometheus-port", str(metrics), "--balance-abs-threshold", "1000"),
            ],
            stdout=log,
            stderr=log,
        )
        try:
            cached = _ask_through(f"http://127.0.0.1:{port}", contexts, rng, num_rounds)
            held = [_hits(server) for server in (one, other)]
        finally:
            router.terminate()
            router.wait(30)
    again = cached[num_contexts:]
    share = sum(count > 0 for count in again) / max(1, len(again))
    yield Line(
        f"sglang-router, cache-aware, two servers: {num_contexts} contexts asked {num_rounds} times",
        "95 % of the repeated requests hit, and both servers serve",
        f"{100 * share:.1f} % of {len(again)} repeated requests hit, requests by server {held}",
        share >= 0.95 and min(held) > 0,
    )


def _hits(server: Server) -> int:
    return sum(int(node["num_hits"]) for node in nodes_of(server))


def _has_servers(client: httpx.Client) -> bool:
    try:
        return client.get("/health", timeout=5).is_success and client.get("/v1/models").is_success
    except httpx.TransportError:  # it has not begun to listen
        return False


def _ask_through(url: str, contexts: Sequence[str], rng: random.Random, num_rounds: int) -> list[int]:
    """Cached tokens of each request: every context once, then again in random order."""
    cached: list[int] = []
    deadline = time.monotonic() + DRAIN_S
    with httpx.Client(base_url=url, timeout=DRAIN_S) as client:
        while not _has_servers(client):
            if time.monotonic() > deadline:
                raise RuntimeError("the router has no server")
            time.sleep(0.5)
        for _ in range(num_rounds):
            for context in rng.sample(contexts, len(contexts)):
                sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
                text = f"{context} {rng.randrange(1000)}"
                answer: dict[str, Any] = client.post(
                    "/generate", json={"text": text, "sampling_params": sampling}
                ).json()
                cached.append(int(answer["meta_info"]["cached_tokens"]))
    return cached
