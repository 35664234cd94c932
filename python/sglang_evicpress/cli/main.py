"""The command ``evicpress``. Nothing but argparse is imported until a command has something to do."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sglang_evicpress import __version__

DEFAULT_FORMS = ",".join(f"{press}@{kept}" for press in ("keydiff", "snapkv", "knorm") for kept in (0.8, 0.6, 0.4, 0.2))

_EPILOG = """SIZE: 1% of the trace's working set; 30GB or 30GiB; 500000, 500ktok or 5Mtok tokens of exact KV.

TRACE: a file of the Mooncake, WEKA or LMCache-agent kind or of our own, plain or .zst, or synthetic:KIND[:SEED].

Prints one row for each policy and alpha. Ctrl-C prints what is done so far and writes no file.

example:
  evicpress replay conversation_trace.jsonl --policy evicpress,lru,keydiff@0.5+lru --gpu 1% --host 4% --ssd 20%
"""

_SERVE_EPILOG = """The same command goes on where an earlier one was stopped; it runs only what is missing.

Exit status: 0 all is there, 1 a server failed, 2 bad input, 130 Ctrl-C.

example:
  evicpress bench serve --config bench/configs/cpu-testbed.yaml --systems bound,lru,evicpress
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="evicpress", description="EvicPress for SGLang.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"evicpress {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    replay = commands.add_parser(
        "replay",
        help="replay a trace under one or more policies on simulated tiers",
        description="Replay a trace under one or more policies on simulated tiers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = replay.add_argument
    add("trace", metavar="TRACE", help="what to replay")
    add(
        "--policy",
        default="evicpress,lru",
        metavar="NAMES",
        help="separated by commas; default %(default)s; a wrong one prints all",
    )
    add("--gpu", required=True, metavar="SIZE", help="cache on the GPU, above 0")
    add("--host", default="0", metavar="SIZE", help="cache in host memory; 0, the default: none")
    add("--ssd", default="0", metavar="SIZE", help="cache on SSD; 0, the default: none")
    add("--alpha", default="1.0", metavar="NUMBERS", help="seconds full quality is worth; each makes a run of its own")
    add("--half-life", default="auto", metavar="SECONDS", help="of a use of a node; auto, the default: learned")
    add("--forms", default=DEFAULT_FORMS, metavar="FORMS", help="on the menu; none: exact only; default %(default)s")
    add("--slot-bytes", default="131072", metavar="BYTES", help="exact KV of one token; default %(default)s")
    add("--prefill", default="0.01,3.5e-5,1.3e-9", metavar="FIXED,PER_TOKEN,PER_PAIR", help="s; default %(default)s")
    add("--host-bandwidth", default="20GB/s", metavar="RATE", help="default %(default)s, behind 0.5 ms")
    add("--ssd-bandwidth", default="2GB/s", metavar="RATE", help="default %(default)s, behind 2 ms")
    add("--noise", default="0", metavar="SIGMA", help="of the logarithm of every cost; above 0, policies learn costs")
    add(
        "--servers",
        metavar="N|load=X",
        help="requests wait for N servers, or for as many as prefilling every whole prompt would keep busy the share X "
        "of the time; left out: nothing waits",
    )
    add(
        "--recompute",
        default="evicpress",
        metavar="WHO",
        help="which policies may prefill again what would take longer to load: evicpress, the default, all or none; "
        "engines today always load",
    )
    add("--seed", default="0", metavar="N", help="of the quality curves drawn for each context; default %(default)s")
    add("--curves", metavar="FILE", help="JSON quality curves, the same for every context, instead of drawn ones")
    add("--limit", metavar="N", help="only the first N requests")
    add("--skip-bad", action="store_true", help="leave bad lines out, and say which")
    add("--jsonl", metavar="FILE", help="write one object for each run")
    add("--requests", metavar="FILE", help="write one object for each request of each run")
    add("--plot", metavar="FILE", help="draw a .png or .svg; needs sglang-evicpress[plot]")
    add("--no-progress", action="store_true", help="no progress bar; there is none either where stderr is no terminal")
    commands.add_parser(
        "profile",
        help="measure how good answers stay on compressed KV, at a running server; show what was measured",
        add_help=False,
    )
    _add_bench(commands)
    fsck = commands.add_parser(
        "fsck",
        help="check the entries in the folder of an SSD tier",
        description="Read every entry in the folder of an SSD tier and compare it with its checksums.",
        epilog="Exit status: 0 all good, 1 something was found (also when it is repaired now), 2 it could not be "
        "checked, as while a server uses the folder.",
        allow_abbrev=False,
    )
    fsck.add_argument("folder", metavar="DIR", type=Path, help="what --kv-ssd-dir was")
    fsck.add_argument("--key-file", metavar="FILE", help="what --kv-ssd-key-file was")
    fsck.add_argument("--repair", action="store_true", help="remove bad entries, and bytes that belong to none")
    return parser


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    bench = commands.add_parser("bench", help="measure systems side by side", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="bench", metavar="WHAT", required=True)
    serve = kinds.add_parser(
        "serve",
        help="every system of a config as a real server in turn, under the same requests",
        description="Start every system of a config as a real server in turn, send all of them the same requests, and "
        "keep what users would notice.",
        epilog=_SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = serve.add_argument
    add("--config", required=True, type=Path, metavar="FILE", help="YAML, such as bench/configs/cpu-testbed.yaml")
    add("--out", type=Path, metavar="FOLDER", help="for all that is written; default bench/out/serve/NAME")
    add(
        "--systems",
        metavar="NAMES",
        help="of the config's, separated by commas: lru, 'evicpress a=1', or all evicpress",
    )
    add("--repetitions", type=int, metavar="N", help="instead of the config's")
    add("--fresh", action="store_true", help="put earlier runs in the folder aside, and begin anew")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and give its exit status.

    0 is good, 1 that writing failed, fsck found something, contexts could not be profiled or a server of bench failed,
    2 bad input, 130 Ctrl-C. ``--help`` and ``--version`` exit.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not fit the terminal's encoding
    try:
        try:
            if arguments[:1] == ["profile"]:  # its own words depend on the next one
                from sglang_evicpress.cli.profile.command import profile

                return profile(arguments[1:], _Parser)
            args = make_parser().parse_args(arguments)
            if args.command == "fsck":
                return _fsck(args.folder, args.key_file, is_repair=args.repair)
            if args.command == "bench":
                from sglang_evicpress.cli.bench import serve

                return serve(args, shlex.join(["evicpress", *arguments]))
            from sglang_evicpress.cli.replay.command import prepare, replay

            prepared = prepare(vars(args), shlex.join(["evicpress", *arguments]))
        except ValueError as error:
            return _fail(str(error), 2)
        return replay(prepared)
    except KeyboardInterrupt:
        print("evicpress: interrupted", file=sys.stderr)  # while reading the trace, or while writing
        return 130
    except BrokenPipeError:  # such as `| head`: whoever read the table has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(str(error), 1)


def _fsck(folder: Path, key_file: str | None, *, is_repair: bool) -> int:
    from sglang_evicpress.tiers.entry.key import Key
    from sglang_evicpress.tiers.ssd.fsck import StoreError, fsck

    try:
        key = None if key_file is None else Key.read(key_file)
        report = fsck(folder, repair=is_repair, key=key)
    except StoreError as error:
        return _fail(str(error), 2)
    print("\n".join(report.lines()))
    return 0 if report.is_clean else 1


def _fail(message: str, status: int) -> int:
    print(f"evicpress: error: {message}", file=sys.stderr)
    return status
