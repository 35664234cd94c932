"""Real servers for the GPU phases: how they are started, asked and timed. The same code runs a tiny one on the CPU."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from evicbench.moves import nodes_of
from evicbench.testbed import server as testbed_server
from sglang_evicpress.benchmark import server as plain_server
from sglang_evicpress.benchmark.server import free_port

START_S = 400.0
PREFILL_GRAPHS = 512  # tokens: questions run in graphs; long prefills compute long enough, and need not be captured
MIN_TOKENS = 64  # a shorter node, such as that of a health check, may have nothing to give
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
    """``with Server(launch, "--kv-policy", "evicpress", log=file) as server``."""

    def __init__(self, launch: Launch, *arguments: str, log: Path, env: dict[str, str] | None = None) -> None:
        port = free_port()
        self._own_folder = Path(tempfile.mkdtemp(prefix="evicpress-server-"))
        command = [sys.executable, "-m", "sglang.launch_server", *launch.arguments(), "--port", str(port)]
        command += testbed_server.explicit(arguments)
        command += ["--admin-api-key", testbed_server.ADMIN_KEY]  # cases read the tokens of nodes
        plain_server.Server.__init__(
            self,
            command,
            port=port,
            log=log,
            env={**launch.environment(), **(env or {})},
            folder=self._own_folder,
            timeout_s=START_S,
            admin_api_key=testbed_server.ADMIN_KEY,
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


def compress_all(server: Server, form: str) -> int:
    """Bring every node of the cache to a form but short ones; returns how many slots all hold then."""
    for node in nodes_of(server):
        if node["num_tokens"] >= MIN_TOKENS:
            server.post(f"/evicpress/nodes/{node['id']}/compress", {"form": form})
    return sum(node["num_slots"] for node in nodes_of(server))
