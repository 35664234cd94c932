"""Real servers for the GPU phases: how they are started, asked and timed. The same code runs a tiny one on the CPU."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evicbench.correctness.stock import WITHOUT_PLUGIN
from evicbench.testbed import server as testbed_server
from evicbench.tiers.prompts import nodes_of, push_down, sources
from sglang_evicpress.benchmark import server as plain_server
from sglang_evicpress.benchmark.server import free_port

START_S = 400.0
PREFILL_GRAPHS = 512  # tokens: questions run in graphs; long prefills compute long enough, and need not be captured
IDLE_S = 60.0
COMMON = (
    *("--skip-server-warmup", "--skip-tokenizer-init", "--log-level", "info", "--stream-interval", "1"),
    # xgrammar is not carried; compiling a kernel in the first forward may outrun the default watchdog
    *("--grammar-backend", "none", "--watchdog-timeout", "900"),
    *("--sampling-backend", "pytorch"),  # all is greedy: FlashInfer's sampling need not be compiled
)


@dataclass(frozen=True, slots=True)
class Launch:
    """Start of a server. ``backend``: attention; ``graphs``: the largest batch with a CUDA graph, 0 for none."""

    model: Path
    device: str
    backend: str = "flashinfer"
    dtype: str = "bfloat16"
    graphs: int = 0
    page_size: int = 1
    memory: float = 0.8
    context: int = 65536
    is_dummy: bool = False

    def arguments(self) -> list[str]:
        given = ["--model-path", str(self.model), "--device", self.device, "--dtype", self.dtype]
        given += ["--page-size", str(self.page_size), "--context-length", str(self.context), *COMMON]
        if self.is_dummy:
            given += ["--load-format", "dummy"]
        if self.device == "cpu":
            return [*given, "--mem-fraction-static", "0.2", "--sleep-on-idle"]
        given += ["--attention-backend", self.backend, "--mem-fraction-static", str(self.memory)]
        if self.graphs:
            given += ["--cuda-graph-max-bs-decode", str(self.graphs)]
            return [*given, "--cuda-graph-max-bs-prefill", str(PREFILL_GRAPHS)]
        return [*given, "--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"]

    def environment(self) -> dict[str, str]:
        added = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        if self.dtype == "float32":
            added["TRITON_F32_DEFAULT"] = "ieee"  # Triton multiplies float32 as tf32 otherwise
        if self.device == "cpu":
            added |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | added


class Server(testbed_server.Server):
    """``with Server(launch, "--kv-policy", "evicpress", log=file) as server``; ``is_stock``: without our plugin."""

    def __init__(
        self, launch: Launch, *arguments: str, log: Path, is_stock: bool = False, env: dict[str, str] | None = None
    ) -> None:
        port = free_port()
        self._own_folder = Path(tempfile.mkdtemp(prefix="evicpress-server-"))
        command = [sys.executable, "-m", "sglang.launch_server", *launch.arguments(), "--port", str(port), *arguments]
        plain_server.Server.__init__(
            self,
            command,
            port=port,
            log=log,
            env={**launch.environment(), **(WITHOUT_PLUGIN if is_stock else {}), **(env or {})},
            folder=self._own_folder,
            timeout_s=START_S,
        )


class Prompts:
    """Random token ids, no two prompts alike from their first tokens on."""

    def __init__(self, seed: object, vocabulary: int) -> None:
        self._rng = random.Random(str(seed))
        self._vocabulary = vocabulary

    def chance(self) -> float:
        """Between 0 and 1."""
        return self._rng.random()

    def draw(self, num_tokens: int) -> list[int]:
        return self._rng.choices(range(3, self._vocabulary), k=num_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds to the first token, and of each token after it; what of the prompt came from where."""

    first_s: float
    steps_s: tuple[float, ...]
    sources: dict[str, int]


def ask(server: Server, ids: Sequence[int], num_tokens: int = 1) -> Answer:
    """One greedy streamed answer, timed as its client sees it."""
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": list(ids), "sampling_params": sampling, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    begin, times, last = time.perf_counter(), [], b""
    with opener.open(request, timeout=300.0) as response:
        for line in response:
            if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                times.append(time.perf_counter())
                last = line
    if not times:
        raise server.error("a request was answered by no event")
    final = json.loads(last[5:])
    if "error" in final:
        raise server.error(f"a request was answered by an error: {final['error']}")
    steps = tuple(after - before for before, after in zip(times, times[1:], strict=False))
    return Answer(times[0] - begin, steps, sources(final))


def wait_until_idle(server: Server) -> None:
    """Until no copy is on its way. Raises ServerError after ``IDLE_S``."""
    deadline = time.monotonic() + IDLE_S
    while any(server.get("/evicpress/tiers")["queue"].values()):
        if time.monotonic() > deadline:
            raise server.error(f"copies still wait after {IDLE_S:g} s")
        time.sleep(0.02)


def compress_all(server: Server, form: str) -> int:
    """Bring every node of the cache to a form; returns how many slots they hold then."""
    for node in nodes_of(server):
        if node["num_tokens"] > 1:
            server.post(f"/evicpress/nodes/{node['id']}/compress", {"form": form})
    return sum(node["num_slots"] for node in nodes_of(server))


def push_all(server: Server, tier: str) -> list[str]:
    """Put every node on ``host`` or ``ssd`` and nowhere above; the refusals and what stayed above."""
    problems: list[str] = []
    for _ in range(20):
        wait_until_idle(server)
        problems = push_down(server, tier)
        wait_until_idle(server)
        above = [node["id"] for node in nodes_of(server) if node["tier"] != tier]
        if not above:
            return problems
        problems.append(f"nodes {above[:3]} are not on {tier}")
    return problems
