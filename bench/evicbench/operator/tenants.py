"""Tenants with limits beside others with none: what each holds whenever the server has come to rest.

The pool has room for all contexts, so that what moves or shrinks does so for a limit and nothing else. Qualities of
forms are guessed: what nobody knows the quality of does not shrink.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from evicbench.operator.floor import FORMS, make_contexts
from evicbench.report import Line
from evicbench.testbed.server import GUESSED, Server

NUM_REQUESTS = 80
NUM_CONTEXTS = 18
REST_EVERY = 10
REST_S = 20.0
POOL_SLOTS = 14_000
SLOT_BYTES = 3072
LIMITS = {"gpu": 1_000 * SLOT_BYTES, "host": 400 * SLOT_BYTES}
SALTS = {"tight": "s-tight", "good": "s-good", "nobody": "s-nobody"}
TENANTS = {
    "tight": {"cache_salt": SALTS["tight"]},
    "good": {"cache_salt": SALTS["good"], "kv_quality": 0.9},
}

Held = Mapping[str, Mapping[str, int]]


def measure(num_requests: int = NUM_REQUESTS) -> Iterator[Line]:
    gb = {f"{tier}_gb": num_bytes / 1e9 for tier, num_bytes in LIMITS.items()}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tenants.json"
        path.write_text(json.dumps({name: {**tenant, **gb} for name, tenant in TENANTS.items()}))
        forms = ",".join(map(str, FORMS))
        flags = ("--kv-policy", "evicpress", "--kv-forms", forms, *GUESSED, "--max-total-tokens", str(POOL_SLOTS))
        with Server(*flags, "--kv-host-gb", "0.016", "--enable-cache-report", "--kv-tenants", str(path)) as server:
            yield from _play(server, num_requests)


def _play(server: Server, num_requests: int) -> Iterator[Line]:
    rng, contexts = random.Random("tenants"), make_contexts(NUM_CONTEXTS)
    rests: list[Held] = []
    lossy, seen, missed = dict.fromkeys(SALTS, 0), set[tuple[str, int]](), 0
    for number in range(num_requests):
        name, index = rng.choice(list(SALTS)), rng.randrange(NUM_CONTEXTS)
        body = {"model": "default", "prompt": contexts[index].text, "max_tokens": 2, "cache_salt": SALTS[name]}
        kv = server.post("/v1/completions", body)["usage"]["kv_cache"]
        lossy[name] += kv["lossy_tokens"]
        if name == "nobody":
            missed += (name, index) in seen and not kv["exact_tokens"]
            seen.add((name, index))
        if number % REST_EVERY == REST_EVERY - 1:
            rests.append(_at_rest(server))
    over = [
        f"{name}: {num_bytes:,} of {LIMITS[tier]:,} bytes on {tier}"
        for rest in rests
        for name, held in rest.items()
        for tier, num_bytes in held.items()
        if num_bytes > LIMITS[tier]
    ]
    stats, checked = server.get("/evicpress/stats"), server.post("/evicpress/check")
    decisions = stats["decisions"]["by_reason"].items()
    kinds = {kind: reasons["over_limit"] for kind, reasons in decisions if "over_limit" in reasons}
    yield Line(
        f"tenants with {LIMITS['gpu'] // SLOT_BYTES:,} slots on the GPU, {LIMITS['host'] // SLOT_BYTES:,} on the host, "
        f"{num_requests} requests of theirs and of others: bytes held at {len(rests)} rests",
        "never more than allowed; invariants hold",
        f"{len(over)} over{'; ' + over[0] if over else ''}; invariants broken: {len(checked['violations'])}",
        not over and not checked["violations"],
    )
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    yield Line(
        "the same: what it was met by, and what others lost by it",
        "compressing among others, which is served to the tenant without a floor; others lose nothing",
        f"{told}; lossy tokens served: {lossy['tight']:,} without a floor, {lossy['good']:,} with 0.9, "
        f"{lossy['nobody']:,} to others, of whose repeated contexts {missed} were not there",
        kinds.get("compress", 0) > 0 and lossy["tight"] > 0 and lossy["nobody"] == missed == 0,
    )


def _at_rest(server: Server) -> Held:
    """Bytes of tenants once nothing changes any more."""
    before: Held | None = None
    deadline_s = time.monotonic() + REST_S
    while time.monotonic() < deadline_s:
        time.sleep(1.0)
        now = {name: told["held_bytes"] for name, told in server.get("/evicpress/stats")["tenants"].items()}
        if now == before:
            return now
        before = now
    raise RuntimeError(f"the server does not come to rest in {REST_S:g} s: {before}")
