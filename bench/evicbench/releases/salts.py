"""Salts and extra keys on a real server, through host RAM, the SSD and a restart: none sees another's KV."""

from __future__ import annotations

import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from evicbench.report import Line
from evicbench.testbed.server import Server
from evicbench.testbed.tasks import make_context
from evicbench.tiers import restart

NAMESPACES: tuple[dict[str, str], ...] = (
    {},
    {"cache_salt": "ab"},
    {"extra_key": "ab"},
    {"cache_salt": "a", "extra_key": "b"},
    {"cache_salt": "b", "extra_key": "a"},
    {"cache_salt": "ba"},
)
"""Fields of requests of equal prompts."""


def _num_cached(server: Server, prompt: str, fields: dict[str, str]) -> int:
    body = {"model": "testbed", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    usage = server.post("/v1/completions", body)["usage"]
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def measure(seed: int = 0) -> Iterator[Line]:
    prompt = make_context("needle", 600, random.Random(f"salts-{seed}"))
    text = prompt.prompt(prompt.questions[0].text)
    with tempfile.TemporaryDirectory() as folder:
        flags = restart.arguments(Path(folder) / "ssd")
        arguments = (*(flag for flag in flags if flag != "--skip-tokenizer-init"), "--enable-cache-report")
        with restart.Stoppable(*arguments) as server:
            first = [_num_cached(server, text, fields) for fields in NAMESPACES]
            again = [_num_cached(server, text, fields) for fields in NAMESPACES]
            restart.put_on_ssd(server)
            server.end(signal.SIGTERM)
        with restart.Stoppable(*arguments) as server:
            later = [_num_cached(server, text, fields) for fields in reversed(NAMESPACES[1:])]
            unknown = _num_cached(server, text, {"cache_salt": "bab"})
    yield Line(
        f"salts: one prompt with {len(NAMESPACES)} salts and extra keys, some of equal concatenation",
        "cached tokens 0 the first time, all but the last page after; the same from SSD after a restart, 0 for another",
        f"first {first}, again {again}, after a restart {later}, another {unknown}",
        not any(first) and min(again) > 0 and min(later) > 0 and not unknown,
    )
