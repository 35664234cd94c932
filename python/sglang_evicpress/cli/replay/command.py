"""``evicpress replay``: from the arguments to the table and the files."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict

from sglang_evicpress.benchmark.interrupts import raising_interrupts, uninterrupted
from sglang_evicpress.cli.output import print_json
from sglang_evicpress.cli.parser import interrupted_status, naming, say
from sglang_evicpress.cli.pictures import check_picture
from sglang_evicpress.cli.replay.flags import alphas_of, make_parser
from sglang_evicpress.cli.replay.plot import draw
from sglang_evicpress.cli.replay.report import Result, lru_over, table
from sglang_evicpress.cli.replay.settings import header, make_settings, settings_record
from sglang_evicpress.files import WholeFile, check_output
from sglang_evicpress.policy import policy_info
from sglang_evicpress.progress import Progress
from sglang_evicpress.simulator.future import Future
from sglang_evicpress.simulator.queue import NO_QUEUE
from sglang_evicpress.simulator.replay import Outcome, Replay
from sglang_evicpress.simulator.runs import Run, Settings, all_runs, make_replay
from sglang_evicpress.traces import Reading, Trace, read_trace


def replay(argv: Sequence[str]) -> int:
    """Replay, print, and write the files, all of them at the end; the exit status. Raises ValueError for bad input.

    SIGTERM and SIGHUP do what Ctrl-C does."""
    args = make_parser().parse_values(argv)
    with raising_interrupts():
        return _replay(args, argv)


def _replay(args: argparse.Namespace, argv: Sequence[str]) -> int:
    outputs = _outputs(args)
    reading = Reading(args.time_unit, args.block_tokens)
    trace = read_trace(
        args.trace,
        skip_bad=args.skip_bad,
        limit=args.limit,
        on_bad=say,
        reading=None if reading == Reading() else reading,
    )
    working_set_tokens = trace.working_set_tokens
    settings = make_settings(args, trace, working_set_tokens)
    command = shlex.join(["evicpress", "replay", *argv])
    with ExitStack() as stack:
        files = {name: stack.enter_context(WholeFile(path)) for name, path in outputs.items() if name != "plot"}
        about = header(args, settings, trace, working_set_tokens, command)
        if not args.json:
            print("\n".join(f"{name:<12}{text}" for name, text in about.items()), end="\n\n", flush=True)
        results: list[Result] = []
        interrupt = _run_all(args, trace, settings, results, files.get("requests"))
        shared = settings_record(args, settings, trace, working_set_tokens, command)
        if args.json:
            print_json({"settings": shared, "runs": [result.record() for result in results]})
        elif results:
            print(table(results, queued=settings.machine.num_servers != NO_QUEUE), flush=True)
        if interrupt is not None:
            say(f"interrupted{'; no file was written' if outputs else ''}")
            return interrupted_status(interrupt)
        if "jsonl" in files:
            for result in results:
                files["jsonl"].write(
                    {**result.record(), "lru_over_this": lru_over(result, results), "settings": shared}
                )
        with uninterrupted():  # all files or none
            if "plot" in outputs:
                draw(results, outputs["plot"], about["trace"])
            for file in files.values():
                file.commit()
    return 0


def _run_all(
    args: argparse.Namespace,
    trace: Trace,
    settings: Settings,
    results: list[Result],
    requests_file: WholeFile | None,
) -> KeyboardInterrupt | None:
    """Append a result per run, a partial one for a run that Ctrl-C ends, which is returned."""
    is_shown = sys.stderr.isatty() and not args.no_progress
    outcomes: list[Outcome] = []
    this: Replay | None = None
    try:
        future = Future(trace) if any(policy_info(name).sees_future for name in args.policy) else None
        for run in all_runs(args.policy, alphas_of(args), args.quality or ()):
            this, outcomes, begin = make_replay(trace, run, settings, future), [], time.perf_counter()
            for outcome in _outcomes(this, run, is_shown):
                if requests_file is not None:
                    hits = {tier.label: num_tokens for tier, num_tokens in outcome.hit_tokens.items()}
                    requests_file.write({**asdict(run), "index": len(outcomes), **asdict(outcome), "hit_tokens": hits})
                outcomes.append(outcome)
            results.append(Result.of(run, this, outcomes, time.perf_counter() - begin))
            this = None
    except KeyboardInterrupt as interrupt:
        if this is not None and outcomes:
            results.append(Result.of(run, this, outcomes, time.perf_counter() - begin))
        return interrupt
    return None


def _outcomes(replay: Replay, run: Run, is_shown: bool) -> Iterator[Outcome]:
    with Progress(len(replay.trace.requests), "requests", is_shown=is_shown) as progress:
        how = "" if run.alpha is None else f" alpha {run.alpha:g}"
        progress.name(run.policy + (how if run.target is None else f" at quality {run.target:g}"))
        for outcome in replay.run():
            yield outcome
            progress.step()


def _outputs(args: argparse.Namespace) -> dict[str, str]:
    """Flag -> path of what will be written. ValueError if it cannot be, or is another of them or what is read."""
    inputs = {"TRACE": args.trace, "--curves": None if args.curves is None else args.curves[0]}
    taken, outputs = {flag: path for flag, path in inputs.items() if path is not None}, dict[str, str]()
    for name in ("jsonl", "requests", "plot"):
        if (path := getattr(args, name)) is not None:
            with naming(f"--{name}"):
                if name == "plot":
                    check_picture(path)
                check_output(path, taken)
            taken[f"--{name}"] = outputs[name] = path
    return outputs
