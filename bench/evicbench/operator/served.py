"""A server that shows all there is to see, and users that make it happen."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evicbench import testbed
from evicbench.testbed.server import ADMIN_KEY, Server, greedy

GUESSED_CURVES = str(Path(testbed.__file__).with_name("guess.json"))
NUM_CONTEXTS, CONTEXT_TOKENS = 60, 480
NUM_SHARED, SHARED_TOKENS = 5, 120


@contextmanager
def watched_server(*more: str, admin_api_key: str | None = ADMIN_KEY) -> Iterator[Server]:
    """All tiers, a quality target, a tenant, budgets and metrics, all of them too small for what users ask."""
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.json"
        tenants.write_text(json.dumps({"acme": {"cache_salt": "s-1", "gpu_gb": 0.001}}))
        with Server(
            *("--kv-policy", "evicpress", "--kv-quality", "0.95", "--kv-quality-curves", GUESSED_CURVES),
            *("--kv-disable-online-profiling", "--enable-metrics", "--max-total-tokens", "4000"),
            *("--kv-host-gb", "0.02", "--kv-ssd-dir", f"{folder}/ssd", "--kv-ssd-gb", "0.03"),
            *("--kv-tenants", str(tenants), *more),
            admin_api_key=admin_api_key,
        ) as server:
            yield server


class Users:
    """Questions about contexts, the first ones more often, which begin alike in groups; every tenth has a budget."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        shared = [self._tokens(SHARED_TOKENS) for _ in range(NUM_SHARED)]
        self._contexts = [
            [*shared[number % NUM_SHARED], *self._tokens(CONTEXT_TOKENS // (1 + number % 3))]
            for number in range(NUM_CONTEXTS)
        ]
        self.num_asked = 0

    def _tokens(self, number: int) -> list[int]:
        return [self._draw.randrange(6, 400) for _ in range(number)]

    def ask(self, server: Server, num_requests: int) -> None:
        """So many requests, one after the other."""
        for _ in range(num_requests):
            context = self._contexts[int(NUM_CONTEXTS * self._draw.random() ** 2)]
            question = self._tokens(16)
            self.num_asked += 1
            has_budget = self.num_asked % 10 == 0
            body = greedy([*context, *question], 120 if has_budget else 4)
            if has_budget:
                body["sampling_params"]["custom_params"] = {"kv_decode_budget": 64, "kv_decode_method": "paged"}
            server.post("/generate", body)
