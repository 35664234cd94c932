"""Figure 10 of EvicPress: the same requests with and without online profiling, after one training query per context.

Contexts of the testbed, asked at the arrival times of a public trace in a pool that holds half of them. Every context
is profiled before, by `evicpress profile` with one question; the requests ask others. Quality is the token F1 of an
answer with the one that exact KV gives. Nothing here was chosen by what came out.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evicbench.paths import ROOT, out_file
from evicbench.profiler.plots import save_figure
from evicbench.report import Line
from evicbench.testbed.server import ADMIN_KEY, Server
from evicbench.testbed.tasks import FAMILIES, ONE_QUESTION, Context, make_context
from evicbench.testbed.vocabulary import ASK
from sglang_evicpress.benchmark.arrivals import read_trace, spread, stretched
from sglang_evicpress.profiler.scorers.reference import token_f1
from sglang_evicpress.quantiles import quantile

CLI = "import sys; from sglang_evicpress.cli.main import main; sys.exit(main())"
FORMS = "keydiff@0.8,keydiff@0.5,keydiff@0.2,snapkv@0.5,snapkv@0.2,streaming@0.5,streaming@0.2"
NUM_CONTEXTS, CONTEXT_TOKENS = 16, 2000
POOL_TOKENS = 16_000
"""Half of what the contexts take."""

ALPHA = 0.5
"""Weighs a loss of quality of 0.4 as 0.2 s, what computing a context takes on one core: the policy then compresses
rather than drops (without profiling, it drops a fifth of the tokens that it drops at 1)."""

LARGE_POOL_TOKENS = 60_000
NUM_REQUESTS, RUN_S = 360, 180.0
NUM_QUESTIONS = 12
"""Asked about a context, at most, besides the one of training."""

MAX_NEW_TOKENS = 16
NUM_CLIENTS = 32
WINDOW_S = 30.0
"""Width of the moving mean."""

NEAR_S = 2.0
"""A request that runs within so much of a profiling event counts as served beside it."""


AZURE = ROOT.parent / "shared/data/traces-azure-llm-2023/AzureLLMInferenceTrace_conv.csv"
"""Beside the repository, where it is there at all: https://github.com/Azure/AzurePublicDataset (CC-BY-4.0)."""

BURSTY = 0.5
"""Shape of the gamma distribution of made-up gaps: in bursts, as arrivals at chat services are."""


def arrivals(count: int, seconds: float, trace: Path = AZURE) -> tuple[list[float], str]:
    """``count`` times within ``seconds``, in order, and in words where they are from."""
    if trace.is_file():
        times = stretched(read_trace(trace), count, count / seconds, 0)
        return times, f"the first {count} arrivals of the Azure conversation trace, made {seconds:.0f} s"
    times = spread(count, seconds, BURSTY, random.Random("arrivals"))
    return times, f"{count} made-up arrivals (the Azure trace is not there), {seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class Request:
    """Question and its time, in seconds from the start of a run."""

    arrival_s: float
    context: int
    question: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Served:
    """``begin_s`` to ``end_s`` from the start of the run; ``quality`` in [0, 1]."""

    begin_s: float
    end_s: float
    quality: float

    @property
    def latency_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Replay:
    """One run over all requests. ``profiled_s``: when profiles were put, from its start; ``counts`` the server's."""

    served: Sequence[Served]
    profiled_s: Sequence[float]
    counts: dict[str, Any]
    num_compressed: int
    num_dropped: int

    @property
    def quality(self) -> float:
        return statistics.fmean(each.quality for each in self.served)


def make_requests(times: Sequence[float], seed: int = 10) -> tuple[list[Context], list[Request]]:
    """The contexts, and a request for each time. Popularity falls with the rank of a context, as 1 / rank."""
    rng = random.Random(f"figure 10 {seed}")
    families = [family for family in FAMILIES if family not in ONE_QUESTION]
    contexts = [make_context(families[i % len(families)], CONTEXT_TOKENS, rng) for i in range(NUM_CONTEXTS)]
    ranks = [1.0 / (rank + 1) for rank in range(NUM_CONTEXTS)]
    rng.shuffle(ranks)  # popularity says nothing about the family
    requests = []
    for arrival_s in times:
        (number,) = rng.choices(range(NUM_CONTEXTS), ranks)
        question = rng.choice(contexts[number].questions[1 : 1 + NUM_QUESTIONS]).text
        requests.append(Request(arrival_s, number, question, contexts[number].prompt(question)))
    return contexts, requests


def ask(server: Server, prompt: str) -> str:
    sampling = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
    return str(server.post("/generate", {"text": prompt, "sampling_params": sampling})["text"]).strip()


def prepare(folder: Path, contexts: Sequence[Context], requests: Sequence[Request]) -> tuple[Path, dict[str, str]]:
    """A file of profiles by one question per context, and the exact answer to every prompt."""
    profiles, given = folder / "profiles.log", folder / "contexts.jsonl"
    with given.open("w") as file:
        for context in contexts:
            text = context.prompt("").removesuffix(f" {ASK} ")
            file.write(json.dumps({"context": text, "questions": [context.questions[0].text]}) + "\n")
    with Server(*_arguments(LARGE_POOL_TOKENS, profiles), "--kv-disable-online-profiling") as server:
        exact = {}
        for request in sorted(requests, key=lambda request: request.context):
            if request.prompt not in exact:
                exact[request.prompt] = ask(server, request.prompt)
        decisions = server.get("/evicpress/stats")["decisions"]
        if decisions["compressed"] or decisions["dropped"]:
            raise RuntimeError(f"exact answers were asked of a cache that was not: {decisions}")
        command = [sys.executable, "-c", CLI, "profile", "--url", server.url]
        command += ["--contexts", str(given), "--forms", FORMS, "--prompt", "text"]
        command += ["--template", f"{{context}} {ASK} {{question}}", "--no-progress", "--admin-api-key", ADMIN_KEY]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode or len(server.get("/evicpress/profiles")["profiles"]) < len(contexts):
            raise RuntimeError(f"evicpress profile ended with {done.returncode}: {done.stdout}{done.stderr}")
    return profiles, exact


def _arguments(pool_tokens: int, profiles: Path) -> tuple[str, ...]:
    policy = ("--kv-policy", "evicpress", "--kv-forms", FORMS, "--kv-profile-path", str(profiles))
    return (*policy, "--kv-alpha", str(ALPHA), "--max-total-tokens", str(pool_tokens))


def replay(server: Server, requests: Sequence[Request], exact: dict[str, str]) -> Replay:
    """Every request at its time, whatever became of those before it."""
    moments = ProfilingMoments(server)
    for prompt in ("warm up", "warm up again"):  # what the first requests of a server cost is not the subject
        ask(server, prompt)
    begin = time.time()

    def serve(request: Request) -> Served:
        time.sleep(max(0.0, begin + request.arrival_s - time.time()))
        begin_s = time.time() - begin
        answer = ask(server, request.prompt)
        return Served(begin_s, time.time() - begin, token_f1(answer, exact[request.prompt]))

    with moments, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        served = list(pool.map(serve, requests))
    decisions = server.get("/evicpress/stats")["decisions"]
    counts = server.get("/evicpress/profiles")["counts"]
    if not (found := server.post("/evicpress/check"))["ok"]:
        raise RuntimeError(f"the cache is not in order: {found['violations']}")
    profiled_s = sorted(moment - begin for moment in moments.measured_s if moment >= begin)
    return Replay(served, profiled_s, counts, sum(decisions["compressed"].values()), decisions["dropped"])


class ProfilingMoments:
    """Looks every second when each context was last profiled; ``measured_s`` in Unix seconds."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.measured_s: set[float] = set()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.wait(1.0)
            found = self._server.get("/evicpress/profiles")["profiles"]
            self.measured_s.update(float(profile["measured_s"]) for profile in found)


def moving_mean(
    times: Sequence[float], values: Sequence[float], width: float, at: Sequence[float]
) -> list[float | None]:
    """Mean of the values whose time is within half of ``width``; None where there is none."""
    pairs = list(zip(times, values, strict=True))
    means: list[float | None] = []
    for moment in at:
        near = [value for time_s, value in pairs if abs(time_s - moment) <= width / 2]
        means.append(statistics.fmean(near) if near else None)
    return means


def interval(gains: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """In which the mean lies with 95 % confidence, by drawing from ``gains`` again and again."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(gains, k=len(gains))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws) - 1]


def beside(replay_: Replay, width_s: float = NEAR_S) -> tuple[list[float], list[float]]:
    """Latencies of requests near a profiling event, and of the others."""
    near, far = [], []
    for each in replay_.served:
        is_near = any(each.begin_s - width_s <= moment <= each.end_s + width_s for moment in replay_.profiled_s)
        (near if is_near else far).append(each.latency_s)
    return near, far


def measure_figure10(num_requests: int = NUM_REQUESTS, seconds: float = RUN_S) -> Iterator[Line]:
    times, origin = arrivals(num_requests, seconds)
    contexts, requests = make_requests(times)
    replays = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiles, exact = prepare(folder, contexts, requests)
        for which, more in (("off", ("--kv-disable-online-profiling",)), ("on", ())):
            own = folder / f"{which}.log"
            shutil.copy(profiles, own)
            with Server(*_arguments(POOL_TOKENS, own), *more) as server:
                replays[which] = replay(server, requests, exact)
    on, off = replays["on"], replays["off"]
    out_file("profiler", "figure10.json").write_text(json.dumps(_everything(origin, requests, replays), indent=1))
    draw(requests, on, off)
    yield from lines_of(origin, on, off)


def lines_of(origin: str, on: Replay, off: Replay) -> Iterator[Line]:
    gains = [with_.quality - without.quality for with_, without in zip(on.served, off.served, strict=True)]
    third = len(gains) // 3
    low, high = interval(gains)
    begin, middle, end = (statistics.fmean(part) for part in (gains[:third], gains[third:-third], gains[-third:]))
    counts = on.counts
    yield Line(
        f"figure 10, {origin}: F1 with the exact answer, one training query per context, with online profiling over "
        "without",
        "at least as good, contexts were profiled anew",
        f"{on.quality:.3f} over {off.quality:.3f}: {on.quality - off.quality:+.3f} (95 %: {low:+.3f} to {high:+.3f}); "
        f"{begin:+.3f}, {middle:+.3f}, {end:+.3f} in the thirds of the run; {counts['profiled']} profiles put, "
        f"{counts['drifted']} drifts, {counts['observed']} answers observed; {on.num_compressed} compressions and "
        f"{on.num_dropped} drops, without {off.num_compressed} and {off.num_dropped}",
        on.quality >= off.quality and counts["drifted"] > 0 and counts["profiled"] > 0,
    )
    near, far = beside(on)
    background_requests = counts["background_requests"]
    yield Line(
        f"figure 10: latency of requests, with online profiling and without; spikes beside {len(on.profiled_s)} events",
        "reported; profiling touches <= 5 % of users' steps",
        f"mean {_ms(statistics.fmean, on)} and {_ms(statistics.fmean, off)}, p50 {_ms(statistics.median, on)} and "
        f"{_ms(statistics.median, off)}, p95 {_ms(_p95, on)} and {_ms(_p95, off)}; within {NEAR_S:g} s of an event "
        f"{_mean_ms(near)} ({len(near)} requests), else {_mean_ms(far)}; largest {_ms(max, on)} and {_ms(max, off)}; "
        f"{background_requests['user_steps_touched']} of {background_requests['user_steps']} steps touched",
        background_requests["user_steps_touched"] <= 0.05 * background_requests["user_steps"],
    )


_p95 = partial(quantile, share=0.95)


def _ms(what: Any, replay_: Replay) -> str:
    return f"{1e3 * what([each.latency_s for each in replay_.served]):.0f} ms"


def _mean_ms(latencies: Sequence[float]) -> str:
    return f"{1e3 * statistics.fmean(latencies):.0f} ms" if latencies else "none"


def _everything(origin: str, requests: Sequence[Request], replays: dict[str, Replay]) -> dict[str, object]:
    settings = {
        "forms": FORMS,
        "contexts": NUM_CONTEXTS,
        "context_tokens": CONTEXT_TOKENS,
        "pool_tokens": POOL_TOKENS,
        "alpha": ALPHA,
        "arrivals": origin,
    }
    asked = [[round(each.arrival_s, 3), each.context, each.question] for each in requests]
    return {"settings": settings, "requests": asked, **{name: asdict(each) for name, each in replays.items()}}


def draw(requests: Sequence[Request], on: Replay, off: Replay) -> None:
    """The paper's two panels: gain of quality, and latency, over time."""
    from matplotlib.figure import Figure

    times = [request.arrival_s for request in requests]
    gains = [with_.quality - without.quality for with_, without in zip(on.served, off.served, strict=True)]
    at = [float(second) for second in range(int(times[-1]) + 1)]
    figure = Figure(figsize=(7.5, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(at, [100 * (gain or 0.0) for gain in moving_mean(times, gains, WINDOW_S, at)], label="gain")
    above.axhline(0.0, color="grey", linewidth=0.8)
    above.set(ylabel=f"F1 gained by profiling, points\n(moving mean over {WINDOW_S:g} s)")
    for name, run, colour in (("with profiling", on, "C0"), ("without", off, "C1")):
        latencies = [1e3 * each.latency_s for each in run.served]
        below.plot(times, latencies, ".", color=colour, alpha=0.35, markersize=4)
        means = moving_mean(times, latencies, 5.0, at)
        below.plot(at, [mean if mean is not None else float("nan") for mean in means], color=colour, label=name)
    for axes in (above, below):
        for moment in on.profiled_s:
            axes.axvline(moment, color="red", linewidth=0.5, alpha=0.5)
        axes.grid(alpha=0.3)
    below.set(xlabel="seconds (red: a context was profiled)", ylabel="latency, ms (lines: mean over 5 s)", yscale="log")
    below.legend()
    save_figure("figure10.png", figure)
