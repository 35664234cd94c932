"""The command ``evicpress``. Nothing but argparse is imported until a command has something to do."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_evicpress import __version__
from sglang_evicpress.cli.parser import Parser, interrupted_status, say

_SERVE_EPILOG = """The same command goes on where an earlier one was stopped; it runs only what is missing.

Exit status: 0 all is there, 1 a server failed, 2 bad input, 130 Ctrl-C.

example:
  evicpress bench serve --config bench/configs/cpu-testbed.yaml --systems bound,lru,evicpress
"""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="evicpress", description="EvicPress for SGLang.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"evicpress {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("replay", help="replay a trace under one or more policies on simulated tiers", add_help=False)
    commands.add_parser(
        "profile",
        help="measure how good answers stay on compressed KV, at a running server; show what was measured",
        add_help=False,
    )
    commands.add_parser("plan", help="replay a trace on tiers of several sizes, to choose among them", add_help=False)
    commands.add_parser("doctor", help="what is missing on this machine; test a running server", add_help=False)
    commands.add_parser("top", help="what a server does now", add_help=False)
    commands.add_parser("tree", help="the radix tree of a server", add_help=False)
    commands.add_parser("explain", help="what may become of a node of a server", add_help=False)
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


def _add_bench(commands: argparse._SubParsersAction[Parser]) -> None:
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

    0 is good, 1 that writing failed, fsck or doctor found something, contexts could not be profiled or a server of
    bench failed, 2 bad input, 130 Ctrl-C, 143 SIGTERM. ``--help`` and ``--version`` exit.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not fit the terminal's encoding
    try:
        command = _command(arguments[0]) if arguments else None
        if command is not None:
            return command(arguments[1:])
        args = make_parser().parse_args(arguments)
        if args.command == "fsck":
            return _fsck(args.folder, args.key_file, is_repair=args.repair)
        from sglang_evicpress.cli.bench import serve

        return serve(args, shlex.join(["evicpress", *arguments]))
    except ValueError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt as interrupt:
        say("interrupted")  # while reading the trace, or while writing
        return interrupted_status(interrupt)
    except BrokenPipeError:  # such as `| head`: whoever read the table has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(str(error), 1)


def _command(name: str) -> Callable[[Sequence[str]], int] | None:
    """The command that parses its own words, if it is one of those."""
    match name:
        case "replay":
            from sglang_evicpress.cli.replay.command import replay

            return replay
        case "plan":
            from sglang_evicpress.cli.replay.plan import plan

            return plan
        case "profile":
            from sglang_evicpress.cli.profile.command import profile

            return profile
        case "doctor":
            from sglang_evicpress.cli.operator.doctor import doctor

            return doctor
        case "top":
            from sglang_evicpress.cli.operator.top import top

            return top
        case "tree" | "explain":
            from sglang_evicpress.cli.operator import tree

            return tree.tree if name == "tree" else tree.explain
    return None


def _fsck(folder: Path, key_file: str | None, *, is_repair: bool) -> int:
    from sglang_evicpress.tiers.entry.key import Key
    from sglang_evicpress.tiers.ssd.folder import StoreError
    from sglang_evicpress.tiers.ssd.fsck import fsck

    try:
        key = None if key_file is None else Key.read(key_file)
        report = fsck(folder, repair=is_repair, key=key)
    except StoreError as error:
        return _fail(str(error), 2)
    print("\n".join(report.lines()))
    return 0 if report.is_clean else 1


def _fail(message: str, status: int) -> int:
    say(f"error: {message}")
    return status
