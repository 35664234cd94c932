"""Commands by name, with the parser of their words and what runs them; neither is imported before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from sglang_evicpress import __version__
from sglang_evicpress.cli.parser import Parser

_PACKAGE = "sglang_evicpress.cli"


@dataclass(frozen=True, slots=True)
class Command:
    """``run`` and ``parser`` are functions of modules of this package, as ``module:function``; without the latter it is
    ``make_parser`` beside ``run``. ``run`` takes the words behind the command's name and gives the exit status; it
    raises ValueError for bad input."""

    help: str
    run: str
    parser: str = ""

    def load_run(self) -> Callable[[Sequence[str]], int]:
        module, _, function = self.run.partition(":")
        run: Callable[[Sequence[str]], int] = vars(import_module(f"{_PACKAGE}.{module}"))[function]
        return run

    def load_parser(self) -> Parser:
        module, _, function = (self.parser or f"{self.run.partition(':')[0]}:make_parser").partition(":")
        make: Callable[[], Parser] = vars(import_module(f"{_PACKAGE}.{module}"))[function]
        return make()


GROUPS = {"bench": "measure systems side by side", "calibrate": "measure once what a press needs of a model"}
"""First words that are no command of their own."""

COMMANDS = {
    "doctor": Command("what is missing on this machine; test a running server", "operator.doctor:doctor"),
    "top": Command("what a server does now", "operator.top:top"),
    "tree": Command("the radix tree of a server", "operator.tree:tree"),
    "explain": Command("what may become of a node of a server", "operator.explain:explain"),
    "plan": Command("replay a trace on tiers of several sizes, to choose among them", "replay.plan:plan"),
    "replay": Command("replay a trace under one or more policies on simulated tiers", "replay.command:replay"),
    "profile": Command(
        "measure how good answers stay on compressed KV, at a running server; show what was measured",
        "profile.command:profile",
    ),
    "profile show": Command("list profiles, or plot one", "profile.show:show"),
    "search": Command(
        "search how many tokens each layer should keep, with a local model; expand what was found",
        "search.command:search_budgets",
    ),
    "search expand": Command("show budgets at another target", "search.expand:expand"),
    "calibrate geometry": Command(
        "the centres of a model's queries before RoPE, for --kv-geometry",
        "calibrate:calibrate_geometry",
        "parsers:calibrate_geometry",
    ),
    "fsck": Command("check the entries in the folder of an SSD tier", "fsck:fsck", "parsers:fsck"),
    "bench serve": Command(
        "every system of a config as a real server in turn, under the same requests",
        "bench:serve",
        "parsers:bench_serve",
    ),
    "completion": Command("a script that completes commands in a shell", "completion:completion", "parsers:completion"),
}


def split_name(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """The command that words begin with, by its longest name, and the words behind that; None where there is none."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS and len(words) >= length:
            return name, words[length:]
    return None


def make_parser(*, with_flags: bool = False) -> Parser:
    """Parser of ``evicpress`` itself; ``with_flags`` also with the flags of all commands, which imports them all."""
    parser = Parser(prog="evicpress", description="EvicPress for SGLang.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"evicpress {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    below = {
        name: commands.add_parser(name, help=text, allow_abbrev=False).add_subparsers(metavar="WHAT", required=True)
        for name, text in GROUPS.items()
    }
    for name, command in COMMANDS.items():
        first, _, second = name.partition(" ")
        parents = [command.load_parser()] if with_flags else []
        if second and first not in below:
            if not with_flags:
                continue
            below[first] = commands.choices[first].add_subparsers(metavar="WHAT")
        kinds = below[first] if second else commands
        kinds.add_parser(second or first, help=command.help, parents=parents, add_help=False)
    return parser
