"""Greedy answers over holes on the GPU against transformers on the CPU, which gathers the same survivors.

The cases are those of ``make show-foundation``. With Triton the model runs in float32: IEEE products, and torch for all
but attention, where SGLang's CUDA kernels take 16 bits only (``native``). FlashInfer's attention takes 16 bits only
too, so there the weights are rounded to float16 for server and reference, and rounding in between is allowed for.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from evicbench.correctness import exactness
from evicbench.correctness.case import Case
from evicbench.correctness.findings import TOLERANCE, Finding, judged
from evicbench.correctness.reference import Reference, Text, changed_model, make_peaky_model
from evicbench.gpu import native
from evicbench.gpu.figures import Figure, Part, check
from evicbench.gpu.machine import Settings
from evicbench.gpu.serving import Launch, Server
from evicbench.moves import wait_until_idle
from evicbench.plugins import path_with, plugin_folder
from evicbench.testbed.server import MODEL

HALF_TOLERANCE = 0.3  # of a log probability where all is float16; with SGLang's CPU engine the largest was 0.21
HALF_TIE = 0.1  # two candidates closer than this are one to float16
MIN_CONTRAST = 5.0  # by so much a wrong cache must be further off than a right one, in float16
HOLD_S = 600
HEAD_DIM = 64  # the smallest that FlashInfer has


class HalfCase(Case):
    """A case of a server that computes in float16."""

    tie = HALF_TIE
    score_tolerance = 2e-2


class LoadedCase(Case):
    """A case whose KV goes down to host RAM before each question, and comes back with it."""

    def ask(
        self, text: Text, *, cached: int | None = None, suffix: Sequence[int] | None = None, with_controls: bool = False
    ) -> Text:
        for node in reversed(self.path(text.token_ids)):
            # One that others need, or above whose children are not, stays.
            body = {"tier": "host", "hold_seconds": HOLD_S}
            status, said = self._server.request("POST", f"/evicpress/nodes/{node.id}/demote", body)
            if status not in (200, 404, 409):
                raise self._server.error(f"demotion to host answered {status}: {said}")
        wait_until_idle(self._server)
        return super().ask(text, cached=cached, suffix=suffix, with_controls=with_controls)


class LoadedHalfCase(LoadedCase, HalfCase):
    """Both."""


@dataclass(frozen=True, slots=True)
class Config:
    """One server of the matrix."""

    model: str
    backend: str
    graphs: bool
    page_size: int
    is_loaded: bool = False  # from host RAM, for every question

    @property
    def dtype(self) -> str:
        return "float16" if self.is_half else "float32"

    @property
    def is_half(self) -> bool:
        """True if the backend takes 16 bits only."""
        return self.backend not in ("triton", "torch_native")

    @property
    def judges_controls(self) -> bool:
        """float16 hides what a model hardly hangs on: there only the model that hangs on everything shows it."""
        return not self.is_half or self.model == "peaky"

    def __str__(self) -> str:
        graphs = "with CUDA graphs" if self.graphs else "without CUDA graphs"
        loaded = ", from host RAM" if self.is_loaded else ""
        return f"{self.model} {self.dtype}, {self.backend}, {graphs}, page size {self.page_size}{loaded}"

    @property
    def case(self) -> type[Case]:
        if self.is_loaded:
            return LoadedHalfCase if self.is_half else LoadedCase
        return HalfCase if self.is_half else Case


def configs(device: str) -> list[Config]:
    """Every backend with and without graphs and at both page sizes on the testbed's model, then the peaky one, which
    hangs on every survivor: once in float32, whose controls the testbed's model shows too, and in every pair in
    float16, whose wide tolerances only these controls give a meaning. With graphs also from host RAM: attention waits
    for its layer between the pieces of a prefill's graph."""
    if device == "cpu":
        return [Config("testbed", "torch_native", False, 16, is_loaded) for is_loaded in (False, True)]
    backends = ["triton", "flashinfer"]
    if _has_flash_ops():
        backends.append("fa3")
    pairs = list(product((True, False), (1, 16)))
    every = [Config(model, b, *pair) for model in ("testbed", "peaky") for b in backends for pair in pairs]
    in_graphs = [each for each in every if each.graphs and each.page_size == 16]
    chosen = [each for each in every if each.model == "testbed" or each.is_half or each in in_graphs]
    return chosen + [replace(each, is_loaded=True) for each in in_graphs]


def _has_flash_ops() -> bool:
    """True if sgl_kernel is whole; it is not imported, which needs a driver."""
    found = importlib.util.find_spec("sgl_kernel")
    folders = [] if found is None else found.submodule_search_locations or []
    return any(file.suffix == ".so" for folder in folders for file in Path(folder).glob("flash_ops*"))


def jobs(tiny: bool) -> exactness.Jobs:
    """One context per form, then splits, turns, compression again, chunks and batches; every press is in both."""
    yield from list(exactness.grid(1))[:: 9 if tiny else 1]
    if not tiny:
        yield from exactness.shapes()


def round_all(weights: dict[str, torch.Tensor]) -> None:
    """To values that float16 holds."""
    weights.update({name: tensor.half().float() for name, tensor in weights.items()})


def rounded_model(source: Path, folder: Path, dtype: str) -> Path:
    """The model with weights that float16 holds, kept in float32: server and reference begin with equal weights."""
    if dtype == "float32":
        return source
    changed_model(source, folder, round_all)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


def measure_config(chosen: Settings, config: Config) -> Iterator[Figure]:
    with (
        tempfile.TemporaryDirectory(prefix="evicpress-greedy-") as made,
        plugin_folder(native.NAME, "evicbench.gpu.native:load") as plugin,
    ):
        folder = Path(made)
        source = MODEL if config.model == "testbed" else make_peaky_model(folder / "peaky", HEAD_DIM)
        model = rounded_model(source, folder / "rounded", config.dtype)
        graphs = 16 if config.graphs else 0
        given = {"backend": config.backend, "dtype": config.dtype, "graphs": graphs, "page_size": config.page_size}
        launch = Launch(model, chosen.device, memory=0.3, context=4096, **given)
        which = f"{config.model}-{config.backend}-{int(config.graphs)}-{config.page_size}"
        log = chosen.out / f"greedy-{which}{'-loaded' if config.is_loaded else ''}.log"
        tiers = ("--kv-host-gb", "1") if config.is_loaded else ()
        arguments = (*exactness.server_arguments(config.page_size), *tiers)
        torch.manual_seed(chosen.seed)
        switches = [*([] if config.is_half else [native.SWITCH]), *([native.LOADS] if config.is_loaded else [])]
        env = dict.fromkeys(switches, "1") | {"PYTHONPATH": path_with(plugin)} if switches else {}
        with Server(launch, *arguments, log=log, env=env) as server:
            reference = Reference(model)
            findings = exactness.run_jobs(server, reference, config.page_size, jobs(chosen.tiny), config.case)
            served = server.get("/evicpress/stats")["served"]
            violations = server.post("/evicpress/check")["violations"]
        yield from verdicts(config, findings, violations)
        if config.is_loaded:
            tokens = served["tokens"].get("host", {})
            yield check(
                f"greedy source: {config}", any(tokens.values()), f"tokens by form {json.dumps(tokens)}", "host RAM"
            )


def verdicts(config: Config, findings: list[Finding], violations: list[str]) -> Iterator[Figure]:
    """The lines of one server: tokens, how far off wrong caches are, and the integrity of the cache."""
    tolerance = HALF_TOLERANCE if config.is_half else TOLERANCE
    ok, worst, said = judged(findings, tolerance)
    what, unit = f"greedy: {config}", "largest difference of a log probability"
    yield Figure(what, worst, unit, f"no token wrong but ties, within {tolerance:g}", ok, said)
    controls = [finding.controls for finding in findings if finding.controls]
    what = f"greedy controls: {config}"
    if not controls and config.judges_controls:
        yield check(what, False, "no answer was compared with wrong caches", "at least one")
    elif controls:
        least = min(min(kind) for kind in controls)
        needed = MIN_CONTRAST * worst if config.is_half else 10 * tolerance
        yield Figure(
            what,
            least,
            "least difference that a wrong cache makes",
            f"> {needed:.2g}",
            least > needed if config.judges_controls else None,
            f"{len(controls)} answers, each over the full cache, shifted survivors, closed-up positions",
        )
    what = f"greedy integrity: {config}"
    yield check(what, not violations, str(violations[:1] or "no violation"), "no violation")


def parts(chosen: Settings) -> list[Part]:
    def part(config: Config) -> Part:
        targets = (f"greedy: {config}", *([f"greedy controls: {config}"] if config.judges_controls else []))
        return Part(f"greedy {config}", targets, lambda: measure_config(chosen, config))

    return [part(config) for config in configs(chosen.device)]
