"""Hostile clients of a real server: every route and field of ours, for minutes, beside users who notice nothing."""

from __future__ import annotations

import asyncio
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import psutil

from evicbench.mend.values import any_text, any_value
from evicbench.report import Line
from evicbench.testbed.server import ADMIN_KEY, Server, greedy
from sglang_evicpress.introspect.operation import stable_path
from sglang_evicpress.introspect.operations import OPERATIONS

SECONDS = 300.0
SETTLED_S = 120.0  # into the run: memory is looked at then
NUM_HOSTILE = 90
NUM_SLOW = 8
NUM_USERS = 2
MOST_CPU_MS = 5.0
MOST_GROWTH_MB = 50.0
FORWARDED = {"X-Forwarded-For": "203.0.113.7"}  # as a proxy marks clients from elsewhere

OPERATORS = {
    *("compress", "check", "evict", "flush", "demote", "attach_ssd", "detach_ssd", "put_profile"),
    *("open_shadow", "make_shadow_form", "drop_shadow_form", "close_shadow"),
}
"""Operations that no client reaches: with an admin key they need it, without one a caller on the server's machine."""

_SERVED = [operation for operation in OPERATIONS.values() if operation.path]
ROUTES = (
    *(
        (operation.method, re.sub(r"{\w+}", "ID", path))
        for operation in _SERVED
        for path in (operation.path, stable_path(operation.path))
    ),
    *(("GET", f"/evicpress/{name}") for name in ("", "ID", "v1", "v1/", "v1/ID", "v2/tree", "v1/v1/tree")),
)
ARGUMENTS = (*dict.fromkeys(name for each in _SERVED for one in each.arguments for name in one.names), "pairs")
FIELDS = (
    *("kv_decode_budget", "kv_decode_method", "kv_decode_score", "kv_decode_interval", "kv_decode_protected_pages"),
    *("kv_decode_window", "kv_decode_trace", "kv_quality", "kv_retention_seconds", "kv_nonsense"),
)
ERROR = re.compile(r"[^\n]{10,}")


def measure(seconds: float = SECONDS, admin_keys: Sequence[str | None] = (None, ADMIN_KEY)) -> Iterator[Line]:
    """Two servers, one after the other: without an admin key, and with one that the hostile clients do not have."""
    for admin_key in admin_keys:
        with tempfile.TemporaryDirectory() as folder, Server(*_arguments(folder), admin_api_key=admin_key) as server:
            outcome = asyncio.run(Hostile(server, admin_key, seconds).run())
            yield from _lines(outcome, "with an admin key" if admin_key else "without an admin key", seconds)


def _arguments(folder: str) -> tuple[str, ...]:
    return (
        *("--kv-policy", "evicpress", "--kv-forms", "exact", "--max-total-tokens", "16000"),
        *("--max-running-requests", "8", "--chunked-prefill-size", "512", "--skip-tokenizer-init"),
        *("--kv-host-gb", "0.05", "--kv-ssd-dir", f"{folder}/ssd", "--kv-ssd-gb", "0.2"),
    )


def _lines(outcome: Hostile, when: str, seconds: float) -> Iterator[Line]:
    who = f"hostile clients, {when}, {seconds:g} s"
    statuses = ", ".join(f"{status} {count}" for status, count in sorted(outcome.statuses.items()))
    bad = sum(outcome.problems.values())
    seen = "; ".join(f"{what} ({count} times)" for what, count in outcome.problems.most_common(4))
    yield Line(
        f"{who}: no 500, no hang, 503 only with Retry-After",
        "0 bad answers",
        f"{bad} of {sum(outcome.statuses.values())}: {seen or statuses}",
        not bad and bool(outcome.statuses),
    )
    open_calls = {op: spent for op, spent in outcome.calls.items() if op not in OPERATORS}
    dearest, spent = max(open_calls.items(), key=lambda item: item[1]["max_cpu_ms"])
    num_open = sum(int(each["count"]) for each in open_calls.values())
    num_operators = sum(int(each["count"]) for each in outcome.calls.values()) - num_open
    yield Line(
        f"{who}: scheduler CPU of the dearest call",
        f"<= {MOST_CPU_MS:g} ms of the thread's time, operators' calls 0",
        f"{spent['max_cpu_ms']:.2f} ms ({dearest}; {spent['max_wall_ms']:.1f} ms by the clock; {num_open} calls), "
        f"{num_operators} operators' calls",
        spent["max_cpu_ms"] <= MOST_CPU_MS and num_operators == 0,
    )
    grown = (outcome.end_bytes - outcome.settled_bytes) / 1e6
    yield Line(
        f"{who}: memory at the end, idle, beside that after {min(SETTLED_S, seconds / 2):g} s",
        f"at most {MOST_GROWTH_MB:g} MB more",
        f"{grown:+.0f} MB ({outcome.end_bytes / 1e6:.0f} MB)",
        grown <= MOST_GROWTH_MB if seconds > SETTLED_S else None,
    )
    wrong = outcome.statuses["user wrong"]
    yield Line(
        f"{who}: answers of users beside them",
        "all as before",
        f"{outcome.num_answers - wrong} of {outcome.num_answers}",
        not wrong and outcome.num_answers > 0,
    )


class Hostile:
    """Clients of one server. ``statuses`` by who asked; ``problems`` in one sentence each, as they were first seen."""

    def __init__(self, server: Server, admin_key: str | None, seconds: float) -> None:
        self.statuses, self.problems = Counter[str](), Counter[str]()
        self.num_answers = self.settled_bytes = self.end_bytes = 0
        self.calls: dict[str, dict[str, float]] = {}
        self._server = server
        self._seconds = seconds
        self._headers = {} if admin_key is None else {"Authorization": f"Bearer {admin_key}"}
        rng = random.Random("users")
        self._prompts = [_tokens(rng, rng.randrange(100, 900)) for _ in range(24)]
        self._answers: list[list[int]] = []
        self._node_ids = [1]

    async def run(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=90.0)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._server.url, timeout=timeout, connector=connector) as session:
            self._answers = [await self._answer_to(session, prompt) for prompt in self._prompts]
            begin = time.monotonic()
            self._deadline = begin + self._seconds
            hostile = (*(self._ask_anything,) * 6, *(self._generate_anything,) * 2, *(self._look,) * 2, self._listen)
            tasks = [self._repeat(number, hostile, session) for number in range(NUM_HOSTILE)]
            tasks += [self._repeat(1000 + number, (self._send_slowly,), session) for number in range(NUM_SLOW)]
            tasks += [self._use(number, session) for number in range(NUM_USERS)]
            tasks.append(self._watch(begin, session))
            await asyncio.gather(*tasks)
            await asyncio.sleep(5.0)
            self.end_bytes = resident_bytes(self._server.pid)
            async with session.get("/evicpress/stats") as response:
                self.calls = (await response.json())["calls"]
        return self

    async def _repeat(self, seed: int, kinds: Any, session: aiohttp.ClientSession) -> None:
        rng = random.Random(f"hostile-{seed}")
        while time.monotonic() < self._deadline:
            try:
                await rng.choice(kinds)(session, rng)
            except TimeoutError:
                self.problems["no answer within 90 s"] += 1
            except (aiohttp.ClientError, OSError, ValueError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    self.problems[f"the server took no connection: {type(error).__name__}"] += 1
                    return
                self.statuses["cut by the server"] += 1
            await asyncio.sleep(rng.uniform(0.1, 0.6))

    async def _note(self, response: aiohttp.ClientResponse, what: str) -> None:
        await response.read()
        self.statuses[str(response.status)] += 1
        is_refusal = response.status >= 400 and response.status != 401 and "/evicpress" in what  # 401 is SGLang's
        if response.status in (500, 502) or (response.status == 503 and "Retry-After" not in response.headers):
            self.problems[f"{what}: {response.status} {(await response.text())[:160]}"] += 1
        elif is_refusal and not _has_reason(await response.read()):
            self.problems[f"{what}: {response.status} without one reason"] += 1

    # ---- what hostile clients do

    async def _ask_anything(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        method, path = rng.choice(ROUTES)
        node = str(rng.choice(self._node_ids)) if rng.random() < 0.6 else quote(any_text(rng), safe="")
        url = path.replace("ID", node)
        query = {name: any_text(rng) for name in rng.sample(ARGUMENTS, rng.choice((0, 0, 1, 2)))}
        if query:
            url += "?" + "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
        body = None
        if method == "POST":
            given = {name: any_value(rng) for name in rng.sample(ARGUMENTS, rng.choice((0, 1, 2, 3)))}
            body = json.dumps(given if rng.random() < 0.8 else any_value(rng)).encode()
            if rng.random() < 0.1:
                body = rng.randbytes(rng.randrange(100_000))
        async with session.request(method, url, data=body, headers=FORWARDED) as response:
            await self._note(response, f"{method} {path}")

    async def _generate_anything(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        chosen = {name: any_value(rng) for name in rng.sample(FIELDS, rng.choice((1, 1, 2, 3)))}
        if rng.random() < 0.3:
            chosen = {"kv_decode_budget": rng.choice((16, 64, 256)), "kv_decode_interval": rng.choice((1, 16, 64, 128))}
        body = {
            "input_ids": _tokens(rng, rng.randrange(2, 200)),
            "sampling_params": {"max_new_tokens": rng.randrange(1, 6), "custom_params": chosen},
        }
        async with session.post("/generate", data=json.dumps(body), headers=FORWARDED) as response:
            await self._note(response, "POST /generate")

    async def _look(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        """Ask for what any client may see, as often as it likes."""
        node = rng.choice(self._node_ids)
        path = rng.choice(
            (
                *("tree", "stats", "tiers", "journal?limit=100000", "requests", "requests?positions=true", "profiles"),
                *(f"nodes/{node}?positions=true", f"explain/{node}", "tree?limit=1", "tree?after=100000"),
                *("", "v1/outline", f"v1/outline?limit=2&cursor={node}", f"v1/tree?limit=2&cursor={node}"),
                *("v1/journal?limit=3&cursor=7", "v1/requests?cursor=1", "v1/profiles?limit=1", "v1/stats"),
            )
        )
        async with session.get(f"/evicpress/{path}", headers=FORWARDED) as response:
            await self._note(response, f"GET /evicpress/{path.partition('?')[0]}")

    async def _listen(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        """Events for a while, read or not; then the connection is left."""
        path = rng.choice(("/evicpress/events", "/evicpress/v1/events", "/evicpress/v1/events?since=1"))
        async with session.get(path, headers=FORWARDED) as response:
            if response.status != 200:
                await self._note(response, f"GET {path}")
                return
            self.statuses["listened"] += 1
            with suppress(TimeoutError):
                if rng.random() < 0.5:
                    await asyncio.wait_for(response.content.readuntil(b"\n\n"), 5.0)
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            response.close()

    async def _send_slowly(self, _: aiohttp.ClientSession, rng: random.Random) -> None:
        """A body that comes byte by byte, of a connection that is left in the end."""
        path = rng.choice(("/evicpress/check", "/evicpress/shadows", "/evicpress/flush", "/generate"))
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n"
            writer.write((head + "X-Forwarded-For: 203.0.113.7\r\n\r\n").encode())
            end = time.monotonic() + rng.uniform(1.0, 20.0)
            while time.monotonic() < min(end, self._deadline):
                writer.write(b" ")
                await writer.drain()
                with suppress(TimeoutError):
                    if line := await asyncio.wait_for(reader.readline(), 0.5):
                        self.statuses[f"slow {line.split()[1].decode()}"] += 1
                        return
        finally:
            writer.close()

    # ---- users, and who watches

    async def _answer_to(self, session: aiohttp.ClientSession, prompt: list[int]) -> list[int]:
        async with session.post("/generate", json=greedy(prompt, 8)) as response:
            answer = await response.json()
            if response.status != 200:
                raise ValueError(f"a user was answered {response.status}: {answer}")
            return list(answer["output_ids"])

    async def _use(self, number: int, session: aiohttp.ClientSession) -> None:
        rng = random.Random(f"user-{number}")
        while time.monotonic() < self._deadline:
            index = rng.randrange(len(self._prompts))
            try:
                answer = await self._answer_to(session, self._prompts[index])
            except (TimeoutError, aiohttp.ClientError, ValueError) as error:
                self.problems[f"a user got no answer: {type(error).__name__}: {error}"[:200]] += 1
                await asyncio.sleep(1.0)
                continue
            self.num_answers += 1
            if answer != self._answers[index]:
                self.statuses["user wrong"] += 1

    async def _watch(self, begin: float, session: aiohttp.ClientSession) -> None:
        """Nodes for the hostile to ask about, and the memory once it has settled."""
        settled = begin + min(SETTLED_S, self._seconds / 2)
        while time.monotonic() < self._deadline:
            async with session.get("/evicpress/tree", headers=self._headers) as response:
                if response.status == 200:
                    nodes = (await response.json())["nodes"]
                    self._node_ids = [node["id"] for node in nodes] or self._node_ids
            if not self.settled_bytes and time.monotonic() >= settled:
                self.settled_bytes = resident_bytes(self._server.pid)
            await asyncio.sleep(2.0)


def resident_bytes(pid: int) -> int:
    """Unique set size of a process and all its descendants: what would be free without them."""
    first = psutil.Process(pid)
    return sum(process.memory_full_info().uss for process in (first, *first.children(recursive=True)))


def _has_reason(body: bytes) -> bool:
    """True of an error as every route of ours gives it: JSON with one sentence."""
    with suppress(ValueError):
        match json.loads(body):
            case {"error": {"reason": str() as reason}}:
                return ERROR.fullmatch(reason) is not None
    return False


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(5, 500) for _ in range(number)]
