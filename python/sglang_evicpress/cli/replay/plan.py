"""``evicpress plan``: one trace on tiers of several sizes, to choose among them."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence

from sglang_evicpress.benchmark.interrupts import raising_interrupts
from sglang_evicpress.cli.output import print_result
from sglang_evicpress.cli.parser import Parser, interrupted_status, naming, say
from sglang_evicpress.cli.replay.flags import make_parser as replay_parser
from sglang_evicpress.cli.replay.report import Result
from sglang_evicpress.cli.replay.settings import make_settings
from sglang_evicpress.cli.replay.units import Size
from sglang_evicpress.config import DEFAULT_QUALITY
from sglang_evicpress.progress import Progress
from sglang_evicpress.simulator.runs import Run, make_replay
from sglang_evicpress.tables import aligned, ms, number, share
from sglang_evicpress.traces import Reading, Trace, read_trace

TIERS = ("gpu", "host", "ssd")
DEFAULT_SIZES = {"gpu": "1%,2%,4%", "host": "0,4%,16%", "ssd": "0,50%"}
MOST_SETTINGS = 64

_EPILOG = """SIZES: several of 1% of the trace's working set, 30GB, 500ktok, separated by commas; all are combined.
Every other flag of `evicpress replay` but --policy and --alpha is taken too: --slot-bytes, --prefill, ...

Exit status: 0 done, 2 bad input, 130 Ctrl-C, 143 SIGTERM.

example:
  evicpress plan conversation_trace.jsonl --gpu 40GB --host 0,100GB,200GB --ssd 0,2TB --slot-bytes 131072
"""


def make_parser() -> Parser:
    about = "Replay a trace on tiers of several sizes under evicpress at a quality target: choose among them."
    parser = Parser.of("plan", about, _EPILOG)
    parser.add_argument("trace", metavar="TRACE", help="what to replay, as for `evicpress replay`")
    for tier in TIERS:
        text = "sizes of the cache there; default %(default)s"
        parser.add_argument(f"--{tier}", metavar="SIZES", default=DEFAULT_SIZES[tier], help=text)
    parser.add_argument("--quality", metavar="Q", default=str(DEFAULT_QUALITY), help="target; default %(default)s")
    parser.add_json()
    return parser


def plan(argv: Sequence[str]) -> int:
    """Run ``evicpress plan`` and give its exit status. Raises ValueError for bad input."""
    args, rest = make_parser().parse_known_args(replay_parser().joined(argv))
    for flag in ("--policy", "--alpha", "--jsonl", "--requests", "--plot"):
        if any(text.partition("=")[0] == flag for text in rest):
            raise ValueError(f"{flag} is not for plan, which replays evicpress at --quality: leave it out")
    settings = list(itertools.product(*(_sizes(tier, getattr(args, tier)) for tier in TIERS)))
    if len(settings) > MOST_SETTINGS:
        raise ValueError(f"{len(settings)} combinations of sizes are given: expected at most {MOST_SETTINGS}")
    results, interrupt = list[tuple[tuple[str, ...], Result]](), None
    try:
        with raising_interrupts():
            results.extend(_replay_all(args, rest, settings))
    except KeyboardInterrupt as error:
        interrupt = error
        if not results:
            raise
        say(f"interrupted after {len(results)} of {len(settings)} sizes")
    document = [{**dict(zip(TIERS, sizes, strict=True)), **result.record()} for sizes, result in results]
    print_result(args, document, aligned(list(_rows(results))))
    return 0 if interrupt is None else interrupted_status(interrupt)


def _sizes(tier: str, text: str) -> list[str]:
    sizes = [size.strip() for size in text.split(",")]
    with naming(f"--{tier}"):
        for size in sizes:
            Size.parse(size)
    return list(dict.fromkeys(sizes))


def _replay_all(
    args: argparse.Namespace, rest: Sequence[str], settings: Sequence[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], Result]]:
    trace: Trace | None = None
    with Progress(len(settings), "sizes", is_shown=sys.stderr.isatty()) as progress:
        for sizes in settings:
            flags = [f"--{tier}={size}" for tier, size in zip(TIERS, sizes, strict=True)]
            each = replay_parser().parse_values(
                [args.trace, *flags, f"--quality={args.quality}", "--policy=evicpress", *rest]
            )
            if trace is None:
                reading = Reading(each.time_unit, each.block_tokens)
                known = None if reading == Reading() else reading
                trace = read_trace(each.trace, skip_bad=each.skip_bad, limit=each.limit, on_bad=say, reading=known)
            progress.name(", ".join(f"{tier} {size}" for tier, size in zip(TIERS, sizes, strict=True)))
            yield sizes, _replay(each, trace)
            progress.step()


def _replay(args: argparse.Namespace, trace: Trace) -> Result:
    if len(args.quality) != 1:
        raise ValueError(f"--quality: {len(args.quality)} targets are given: expected one")
    (quality,) = args.quality
    run, begin_s = Run("evicpress", None, quality), time.perf_counter()
    replay = make_replay(trace, run, make_settings(args, trace, trace.working_set_tokens), None)
    return Result.of(run, replay, list(replay.run()), time.perf_counter() - begin_s)


def _rows(results: Sequence[tuple[tuple[str, ...], Result]]) -> Iterator[tuple[str, ...]]:
    yield (*TIERS, "TTFT mean, ms", "p95", "of the slowest", "cached", *TIERS, "quality served")
    slowest = max(result.ttft.mean_s for _, result in results)
    for sizes, result in results:
        yield (
            *sizes,
            ms(result.ttft.mean_s),
            ms(result.ttft.p95_s),
            number(result.ttft.mean_s / slowest, 2),
            share(1.0 - result.prefilled_share),
            *(share(result.hit_share.get(tier, 0.0)) for tier in TIERS),
            number(result.served_quality),
        )
