"""``evicpress replay``: from the arguments to the table and the files."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sglang_evicpress.cli.replay.flags import Args, Plan, read_plan
from sglang_evicpress.cli.replay.plot import check_plot, draw
from sglang_evicpress.cli.replay.report import Result, Tally, lru_over, table
from sglang_evicpress.cli.replay.settings import header, make_settings, settings_record
from sglang_evicpress.files import WholeFile
from sglang_evicpress.policy import sees_future
from sglang_evicpress.simulator.future import Future
from sglang_evicpress.simulator.replay import NO_QUEUE, Outcome, Replay
from sglang_evicpress.simulator.runs import Run, Settings, all_runs, make_replay
from sglang_evicpress.traces import Trace, read_trace

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell reports a process that SIGINT ended."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A replay about to begin: everything is read and checked. ``outputs`` are paths by flag."""

    plan: Plan
    settings: Settings
    trace: Trace
    working_set_tokens: int
    outputs: Mapping[str, str]
    shows_progress: bool
    command: str


def prepare(args: Args, command: str) -> Prepared:
    """Read everything; ``command`` is what was typed. Whatever is wrong with the input is a ValueError here."""
    plan = read_plan(args)
    outputs = _outputs(args)
    trace = read_trace(str(args["trace"]), skip_bad=plan.skip_bad, limit=plan.limit, on_bad=_warn)
    working_set = trace.working_set_tokens
    settings = make_settings(plan, trace, working_set)
    shows_progress = sys.stderr.isatty() and not args["no_progress"]
    return Prepared(plan, settings, trace, working_set, outputs, shows_progress, command)


def replay(prepared: Prepared) -> int:
    """Replay, print, and write the files, all of them at the end; the exit status."""
    plan, settings, trace, outputs = prepared.plan, prepared.settings, prepared.trace, prepared.outputs
    with ExitStack() as stack:
        files = {name: stack.enter_context(WholeFile(path)) for name, path in outputs.items() if name != "plot"}
        about = header(plan, settings, trace, prepared.working_set_tokens, prepared.command)
        print("\n".join(f"{name:<12}{text}" for name, text in about.items()), end="\n\n", flush=True)
        results: list[Result] = []
        is_done = _run_all(prepared, results, files.get("requests"))
        if results:
            print(table(results, queued=settings.machine.num_servers != NO_QUEUE), flush=True)
        if not is_done:
            _warn(f"interrupted{'; no file was written' if outputs else ''}")
            return INTERRUPTED
        if "jsonl" in files:
            shared = settings_record(plan, settings, trace, prepared.working_set_tokens, prepared.command)
            for result in results:
                files["jsonl"].write(
                    {**result.record(), "lru_over_this": lru_over(result, results), "settings": shared}
                )
        if "plot" in outputs:
            draw(results, outputs["plot"], about["trace"])
        for file in files.values():
            file.commit()
    return 0


def _run_all(prepared: Prepared, results: list[Result], requests_file: WholeFile | None) -> bool:
    """Append a result per run, a partial one for a run that Ctrl-C ends; whether all were done."""
    trace, plan = prepared.trace, prepared.plan
    tally: Tally | None = None
    try:
        future = Future(trace) if any(map(sees_future, plan.policies)) else None
        for run in all_runs(plan.policies, plan.alphas):
            this = make_replay(trace, run, prepared.settings, future)
            tally, begin = Tally(run, this.menu.tiers, len(trace.requests)), time.perf_counter()
            for outcome in _outcomes(this, run, prepared.shows_progress):
                if requests_file is not None:
                    requests_file.write(_request_record(run, tally.num_requests, outcome))
                tally.add(outcome)
            results.append(tally.result(this.ledger, this.clock.half_life_s, time.perf_counter() - begin))
            tally = None
    except KeyboardInterrupt:
        if tally is not None and tally.num_requests:
            results.append(tally.result(this.ledger, this.clock.half_life_s, time.perf_counter() - begin))
        return False
    return True


def _outcomes(replay: Replay, run: Run, shows_progress: bool) -> Iterator[Outcome]:
    if not shows_progress:
        yield from replay.run()
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    name = run.policy if run.alpha is None else f"{run.policy} alpha {run.alpha:g}"
    with tqdm(replay.run(), name, len(replay.trace.requests), leave=False, unit=" requests", file=sys.stderr) as bar:
        yield from bar


def _request_record(run: Run, index: int, outcome: Outcome) -> dict[str, object]:
    return {
        "policy": run.policy,
        "alpha": run.alpha,
        "index": index,
        "arrival_s": outcome.arrival_s,
        "num_tokens": outcome.num_tokens,
        "hit_tokens": {tier.label: num_tokens for tier, num_tokens in outcome.hit_tokens.items()},
        "load_s": float(outcome.load_s),
        "prefill_s": outcome.prefill_s,
        "ttft_s": outcome.ttft_s,
        "recompute_s": outcome.recompute_s,
        "regret_s": outcome.regret_s,
        "predicted_regret_s": outcome.predicted_regret_s,
        "quality": outcome.quality,
    }


def _outputs(args: Args) -> dict[str, str]:
    """Flag -> path of what will be written. ValueError if it cannot be, or is another of them or the trace."""
    taken = {Path(str(args["trace"])).resolve(): "TRACE"}
    outputs = {}
    for name in ("jsonl", "requests", "plot"):
        path = args[name]
        if path is None:
            continue
        other = taken.setdefault(Path(str(path)).resolve(), f"--{name}")
        if other != f"--{name}":
            raise ValueError(f"--{name}: {str(path)!r} is also {other}: expected a file of its own")
        try:
            if name == "plot":
                check_plot(str(path))
            with WholeFile(str(path)):
                pass  # it can be written
        except ValueError as error:
            raise ValueError(f"--{name}: {error}") from None
        outputs[name] = str(path)
    return outputs


def _warn(message: str) -> None:
    print(f"evicpress: {message}", file=sys.stderr, flush=True)
