"""``evicpress top``: what a server does now, in a terminal that is kept up to date."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_evicpress.cli.operator.server import Json, Server, connected_parser
from sglang_evicpress.cli.output import print_json_line
from sglang_evicpress.cli.parser import Parser, whole
from sglang_evicpress.cli.replay.units import show_bytes
from sglang_evicpress.tables import aligned, number, share

_CLEAR = "\x1b[H\x1b[2J"
NUM_DECISIONS = 8
PAGE_DECISIONS = 1000
_EPILOG = """With --json every look is one line. Exit status: 0 with --once, 2 bad input or no server, 130 Ctrl-C.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """Answers of a server at one time, in seconds of this machine."""

    at_s: float
    stats: Json
    tiers: Json
    journal: Json


def make_parser() -> Parser:
    parser = connected_parser(
        "top", "Show what a server does now: pool and tiers, hits, quality, the last decisions.", _EPILOG
    )
    parser.add_value("--interval", whole(1, 3600), "SECONDS", "between two looks", "2")
    parser.add_argument("--once", action="store_true", help="look once, and end")
    return parser


def top(argv: Sequence[str]) -> int:
    """Run ``evicpress top`` and give its exit status. Raises ValueError."""
    args = make_parser().parse_values(argv)
    server, before = Server.of(args), None
    while True:
        sample = look(server, before, shows_all=args.json)
        if args.json:
            print_json_line({"stats": sample.stats, "tiers": sample.tiers, "journal": sample.journal})
        else:
            text = "\n".join(lines(sample, before))
            print(f"{_CLEAR}{text}" if sys.stdout.isatty() and not args.once else text, flush=True)
        if args.once:
            return 0
        before = sample
        time.sleep(args.interval)


def look(server: Server, before: Sample | None = None, *, shows_all: bool = False) -> Sample:
    """The present state, with the last decisions since ``before``: some, or ``shows_all``, in the order in which they
    were made, as far as a page goes; what is left comes with the next look."""
    num_made = server.get("journal?limit=1")["num_decisions"]
    since = 0 if before is None else before.journal["last"]
    if before is None or since > num_made:  # another server
        since = max(0, num_made - NUM_DECISIONS)
    if not shows_all:
        since = max(since, num_made - NUM_DECISIONS)
    path = f"journal?since={since}&limit={PAGE_DECISIONS}"
    return Sample(time.monotonic(), server.get("stats"), server.get("tiers"), server.get(path))


def lines(sample: Sample, before: Sample | None = None) -> list[str]:
    """The sample as lines of text; rates are those since ``before``, or totals."""
    stats = sample.stats
    return [
        *_summary(stats),
        "",
        *aligned([*_tiers(sample.tiers["tiers"])]),
        "",
        *_flow(sample, before),
        "",
        *_decisions(sample.journal["entries"]),
    ]


def _summary(stats: Json) -> Iterator[str]:
    quality, alpha = stats["quality"], stats["alpha"]
    if alpha is None:
        target = "weighs no quality"
    elif quality["target"] is None:
        target = f"alpha {alpha:.3g}, fixed"
    else:
        target = (
            f"quality {number(quality['measured'])} of {quality['target']:g} "
            f"(predicted {number(quality['predicted'])}), alpha {alpha:.3g}"
        )
    yield f"policy {stats['policy']}: {target}"
    total = stats["total_slots"]
    in_use = total - stats["free_slots"]
    yield (
        f"pool: {in_use} of {total} slots in use, {stats['protected_slots']} by requests; {stats['num_nodes']} nodes, "
        f"{stats['cached_tokens']} tokens cached in {stats['cached_slots']} slots"
    )
    queue = stats["queue"]
    waiting, wait_s = stats["waiting"]["requests"], queue["expected_wait_s"]
    yield f"queue: {waiting} wait, about {wait_s:.1f} s; {queue['refused']} refused"
    dead = [thread["name"] for thread in stats["threads"] if thread["state"] != "running"]
    if dead:
        yield f"threads that do not run: {', '.join(dead)}"


def _tiers(tiers: Mapping[str, Json]) -> Iterator[tuple[str, ...]]:
    yield ("tier", "used", "of", "share", "nodes", "load", "forms")
    for name, tier in tiers.items():
        load = tier.get("load")
        speed = "" if load is None else f"{show_bytes(load['bytes_per_s'])}/s"
        forms = sorted(tier["forms"].items(), key=lambda item: -item[1]["bytes"])
        yield (
            name,
            show_bytes(tier["used_bytes"]),
            show_bytes(tier["capacity_bytes"]),
            share(tier["used_bytes"] / max(1, tier["capacity_bytes"])),
            str(tier["num_nodes"]),
            speed,
            ", ".join(f"{form} {show_bytes(held['bytes'])}" for form, held in forms[:3]),
        )


def _flow(sample: Sample, before: Sample | None) -> Iterator[str]:
    now, then = sample.stats, None if before is None else before.stats
    seconds = None if before is None else max(1e-9, sample.at_s - before.at_s)

    def change(value: float, earlier: float | None) -> str:
        return f"{value:g}" if earlier is None or seconds is None else f"{(value - earlier) / seconds:.1f}/s"

    admitted, was = now["admission"], None if then is None else then["admission"]
    prompts = admitted["prompt_tokens"] - (0 if was is None else was["prompt_tokens"])
    computed = _computed(admitted) - (0.0 if was is None else _computed(was))
    hits = share(1.0 - computed / prompts) if prompts else "-"
    requests = change(admitted["requests"], None if was is None else was["requests"])
    yield f"requests {requests}, {hits} of prompt tokens from the cache"
    reasons = {name: count for name, count in admitted["computed_tokens"].items() if name != "new" and count}
    if reasons:
        yield "computed although known: " + ", ".join(f"{name} {count}" for name, count in sorted(reasons.items()))
    moves, earlier = _moves(now["decisions"]), {} if then is None else _moves(then["decisions"])
    yield "moves: " + (
        ", ".join(
            f"{name} {change(count, None if then is None else earlier.get(name, 0))}" for name, count in moves.items()
        )
        or "none"
    )


def _computed(admission: Json) -> float:
    return float(sum(admission["computed_tokens"].values()))


def _moves(decisions: Json) -> dict[str, int]:
    moves = {f"to {form}": count for form, count in decisions["compressed"].items()}
    moves |= {f"to {tier}": count for tier, count in decisions["demoted"].items()}
    return {**moves, "dropped": decisions["dropped"]} if decisions["dropped"] else moves


def _decisions(decisions: Sequence[Json]) -> Iterator[str]:
    if not decisions:
        yield "no decision since"
        return
    yield "last decisions"
    for each in decisions[-NUM_DECISIONS:]:
        yield f"  {each['time_s']:9.1f} s  node {each['node_id']}: {each['from']} -> {each['to']}, {each['reason']}"
