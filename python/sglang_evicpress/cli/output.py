"""Standard output of commands: lines for people, or with ``--json`` one JSON document and nothing else."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path


def print_result(args: argparse.Namespace, document: object, lines: Iterable[str]) -> None:
    """Print the result of a command in the way that it was asked for."""
    if args.json:
        print_json(document)
    else:
        print("\n".join(lines), flush=True)


def print_json(document: object) -> None:
    """One document, indented."""
    print(json.dumps(_plain(document), indent=2), flush=True)


def print_json_line(document: object) -> None:
    """One document on one line, for commands that go on."""
    print(json.dumps(_plain(document)), flush=True)


def _plain(value: object) -> object:
    """Value in terms that JSON has: a number that is not finite is null, a path its text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value
